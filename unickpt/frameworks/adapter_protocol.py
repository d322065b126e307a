"""The protocol between the core and the frameworks' adapters.

The core knows arrays only as `ArraySource` (to save) and `ArrayTarget` (to load into).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.arrays.layout import Layout
from unickpt.frameworks.process_group import Group
from unickpt.trees import tree
from unickpt.trees.tree import Expansion

if TYPE_CHECKING:
    from unickpt.arrays.memory_region import MemoryRegion

Read = Callable[[Box, Callable[[], Array]], Array]
Sample = Callable[[tuple[Array, ...]], Callable[[], Array]]

# Objects of these classes are never modified. They are not frozen, because that makes creating them
# three times as slow (and `dataclasses.replace` four times), and a save creates some for each array
# while its caller waits.


@dataclass(slots=True, eq=False)
class Memory:
    """The memory of a fragment, and how its framework reports changes to it.

    Arguments:
        mutable: whether its owner may write to it; immutable memory may still be deleted.
        on_device: whether it is on an accelerator, so that reading it already makes a copy.
        keep: keeps the current data without host memory (references to immutable data, or a clone
            on the device), and returns a function that reads it; None if that is impossible.
            Raises `MemoryError` if the device has no room.
        changed: whether the data was changed or deleted since it was described; None if that
            cannot be known.
        owner: the key by which a `Fence` identifies it.
        allocate: allocates this many bytes of host memory, for fast transfers from this device.
        spans: its host address ranges, as (begin, end); None on a device.
        transfer: has the device copy disjoint boxes to host memory, without waiting for it; None
            is returned if there is no room. None itself if that is impossible.
    """

    mutable: bool = True
    on_device: bool = False
    keep: Callable[[], Read] | None = None
    changed: Callable[[], bool] | None = None
    owner: Hashable = None
    allocate: Callable[[int], Array] | None = None
    spans: Callable[[], Sequence[tuple[int, int]]] | None = None
    transfer: Callable[[Sequence[Box]], Transfer | None] | None = None

    def watched(self, changed: Callable[[], bool] | None) -> Memory:
        """The memory to read instead of this one, with another way to detect changes."""
        return Memory(
            self.mutable, self.on_device, self.keep, changed, self.owner, self.allocate, self.spans
        )


class Transfer(NamedTuple):
    """Boxes of an array that its device copies to host memory.

    Arguments:
        read: reads one of the boxes; waits until it is there.
        wait: waits until all are there. None if the owner may change the array at once.
        go_first: makes later device work of this thread wait for them. After that, the owner may
            have the device change the array. None if `wait` is None.
    """

    read: Read
    wait: Callable[[], None] | None = None
    go_first: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Fragment:
    """A box of an array that this process holds.

    Arguments:
        box: in global coordinates, not empty.
        replicas: all processes that hold the same box, ascending.
        read: returns host memory of a sub-box in global coordinates: a view where possible, else
            memory that the second argument allocates (of that shape and the array's dtype), filled.
        memory: the memory that holds it.
        sample: keeps the elements at some indices (an array of indices per dimension; a scalar
            counts as one-dimensional) as they are now, without waiting for a device, and returns
            a function that returns them; None if `read` returns a view of the whole box.
    """

    box: Box
    replicas: tuple[int, ...]
    read: Read
    memory: Memory = field(default_factory=Memory)
    sample: Sample | None = None


@dataclass(slots=True, eq=False)
class ArraySource:
    """An adapter's description of a leaf to save.

    Arguments:
        shape: global shape.
        dtype: NumPy dtype of the stored elements.
        fragments: the distinct boxes of this process.
        layout: how all processes hold the array; None if no layout describes it.
        boxes: without a layout, all fragments of all processes, if this process knows them.
        identity: equal for leaves that are the same array (tied parameters).
        prng: implementation of a typed PRNG key.
        assumed: whether `layout` only assumes that all processes hold the array; a process that
            has it in its tree holds it whole.
    """

    shape: tuple[int, ...]
    dtype: DType
    fragments: tuple[Fragment, ...]
    layout: Layout | None = None
    boxes: tuple[tuple[Box, tuple[int, ...]], ...] | None = None
    identity: Hashable = None
    prng: str | None = None
    assumed: bool = False

    @property
    def held_bytes(self) -> int:
        """Bytes of the elements that this process holds."""
        return sum(fragment.box.size for fragment in self.fragments) * self.dtype.itemsize

    def with_fragments(self, fragments: tuple[Fragment, ...]) -> ArraySource:
        """The same array with other fragments."""
        return ArraySource(
            self.shape, self.dtype, fragments, self.layout, self.boxes, self.identity, self.prng,
            self.assumed,
        )  # fmt: skip


class Uploader(Protocol):
    """Copies host memory to a device, while the host goes on to read."""

    def stage(self, destinations: Sequence[Any]) -> tuple[Sequence[Array], Callable[[], None]]:
        """Host memory to fill for each destination, and a function that then starts to copy it.

        The memory is kept until it is copied.
        """

    def close(self) -> None:
        """Waits for all copies."""


class DeviceMemory(NamedTuple):
    """Where the boxes of a target lie on a device.

    Arguments:
        device: the key of the device.
        uploader: makes an uploader to this device.
        destination: the memory of a part of one of the boxes, by the position of the box, as the
            uploader takes it.
    """

    device: Hashable
    uploader: Callable[[], Uploader]
    destination: Callable[[int, Box], Any]

    @classmethod
    def joined(cls, targets: Sequence[ArrayTarget], boxes: Sequence[Box]) -> DeviceMemory | None:
        """The memory of several targets of one box, each with that of another array; None unless
        all are on one device."""
        memories = [target.device_memory for target in targets]
        first = memories[0] if memories else None
        if first is None or any(m is None or m.device != first.device for m in memories):
            return None

        def destination(position: int, box: Box) -> Any:
            memory = memories[position]
            assert memory is not None, "all are on a device"
            return memory.destination(0, box.relative_to(boxes[position].start))

        return cls(first.device, first.uploader, destination)


class ArrayTarget(Protocol):
    """An adapter's description of a leaf to load into.

    `boxes` are the distinct, possibly overlapping boxes that this process needs. `buffer(i)`
    returns writable host memory of the shape of `boxes[i]`, the destination itself if possible.
    `finish` takes these buffers, filled, and returns the leaf; it takes none if an uploader has
    filled `device_memory`, which is None if `finish` must copy, or nothing has to. `identity` is
    equal for leaves that share memory, and None if loading allocates new memory; `abstract` leaves
    hold no data to keep; `prng` is the implementation of a typed PRNG key. `processes` says over
    how many processes the leaf is distributed, replicas included: if one of them loads it, all
    others probably do. `span` are the addresses (begin, end) between which the memory lies that
    loading fills, and `regions` returns that of each box; None and none if loading allocates new
    memory. `layout` says how the processes of the framework's job hold the leaf; None if each holds
    it whole, or if no layout describes it.
    """

    shape: tuple[int, ...]
    dtype: DType
    processes: int
    boxes: Sequence[Box]
    identity: Hashable
    abstract: bool
    prng: str | None

    @property
    def device_memory(self) -> DeviceMemory | None: ...

    @property
    def layout(self) -> Layout | None: ...

    @property
    def span(self) -> tuple[int, int] | None: ...

    def regions(self) -> Sequence[MemoryRegion]: ...

    def buffer(self, position: int) -> Array: ...

    def finish(self, buffers: Sequence[Array]) -> Any: ...


class Fence(Protocol):
    """A hook before every update that an optimizer makes to the memory it owns."""

    def owners(self) -> set[Hashable]:
        """`Memory.owner` of all memory that only the optimizer changes."""

    def remove(self) -> None:
        """Removes the hook."""


class StoredTree(Mapping[str, Any]):
    """The contents of a checkpoint for a load: arrays and plain values by name, and containers.

    Arguments:
        leaves: by name.
        node: returns the structure of all; None if the checkpoint has none.
    """

    def __init__(
        self, leaves: Mapping[str, Any], node: Callable[[], tree.Node | tree.Leaf | None]
    ) -> None:
        self._leaves, self._node = leaves, node

    def __getitem__(self, name: str) -> Any:
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    def among(self, leaves: Mapping[str, Any]) -> StoredTree:
        """The same structure with some of the leaves."""
        return StoredTree(leaves, self._node)

    def find(self, name: str) -> tree.Node | tree.Leaf | None:
        """The stored container or leaf of a name, without wrappers; None if unknown."""
        return tree.unwrapped(tree.find(self._node(), name))


class Gatherer(Protocol):
    """Copies small arrays from devices to the host together, in each save of the same arrays.

    Only one save at a time uses it.
    """

    numbers: Sequence[int]
    """Which of the leaves that it was made for it copies."""

    def prepare(self) -> None:
        """Compiles, and allocates memory; called once before `start`, while no caller waits."""

    def start(self, leaves: Sequence[Any]) -> Sequence[Read]:
        """Starts to copy leaves of the same `facts`; their owner may change them at once.

        Arguments:
            leaves: those of `numbers`.

        Returns:
            For each, a function that waits for its copy and reads it.
        """


class Adapter(Protocol):
    """The interface of a module under `unickpt.adapters`."""

    def is_array(self, leaf: Any) -> bool:
        """Whether `source` and `target` handle this leaf."""

    @property
    def varies(self) -> Callable[[type], bool] | None:
        """Returns whether a type has both arrays and containers, which `expand` takes, among its
        objects; for any other type, all objects are arrays or none. None if no type has both."""

    def source(self, leaf: Any, group: Group) -> ArraySource:
        """Describes an array to save.

        Raises:
            TypeError: the dtype or the layout cannot be stored; the message need not name the leaf.
        """

    def facts(self, leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Hashable]]:
        """The facts of `source` about leaves, quickly: a save needs them while its caller waits.

        Returns:
            A value that stands for the results of `source`, except `identity` and addresses of
            memory: equal values mean equal results; and for each leaf a key: the keys of two leaves
            are equal if `source` gives both the same `identity`, or could. Both are only compared:
            the value with that of another call, the keys with each other.

        Raises:
            Exception: only `source` itself can describe them.
        """

    def copier(self, out: Sequence[Array]) -> Callable[[Sequence[Any], Sequence[int] | None], None]:
        """A function that copies leaves, all of mutable host memory, into arrays of their shape and
        dtype, in native byte order: into all, or into those of these numbers."""

    def gatherer(self, leaves: Sequence[Any], sources: Sequence[ArraySource]) -> Gatherer | None:
        """Copies small leaves on devices together, in later saves; None if that does not pay.

        Arguments:
            leaves: arrays; their `facts` are known.
            sources: of each.
        """

    def readers(self, leaves: Sequence[Any]) -> list[Read]:
        """Functions that read leaves in place. All are whole or immutable, in host memory, and
        unchanged until the save has ended; their `facts` are known."""

    def tokens(self, leaves: Sequence[Any]) -> Sequence[Hashable]:
        """Values that prove that arrays have not changed since an earlier call.

        Returns:
            For each array a digest of its content in this process, computed by the accelerator: it
            equals an earlier one only if the content is equal. None if the array lies in host
            memory, where a save hashes it anyway, or cannot be hashed.
        """

    def target(self, leaf: Any) -> ArrayTarget:
        """Describes an array to load into. Raises as `source`."""

    def empty(self, entry: Any, example: Any = None) -> Any:
        """An array to load a stored one into; None if the framework does not have its dtype.

        Arguments:
            entry: of the stored array.
            example: an array whose device it shall have. None for the default device; the array may
                be abstract then.
        """

    def expand(self, obj: Any, name: str, stored: StoredTree | None) -> Expansion | None:
        """Expands one level of a container of this framework; None for other objects.

        Arguments:
            obj: an object that is neither a leaf nor a builtin container; also an array that is
                stored as its parts.
            name: its name in the tree.
            stored: while loading, the contents of the checkpoint; else None.
        """

    @property
    def group_of(self) -> Callable[[Any], Group | None] | None:
        """Returns the processes that an object of this framework names, such as a process group;
        of None, its job, if that has more than one process. Returns None for other objects. None
        itself if the framework has no processes.

        Raises:
            ValueError: this process is not one of them, or they cannot communicate.
        """

    def fence(self, optimizer: Any, wait: Callable[[], None]) -> Fence | None:
        """Calls `wait` before each step of an optimizer; None if it is another framework's."""


def whole_source(
    shape: tuple[int, ...],
    dtype: dtypes.DType,
    group: Group,
    read: Read,
    identity: Hashable,
    memory: Memory,
    sample: Sample | None = None,
) -> ArraySource:
    """An array that every process of the job holds whole, if it has it in its tree."""
    box, holders, layout = _held_whole(shape, group.count)
    fragments = () if 0 in shape else (Fragment(box, holders, read, memory, sample),)
    return ArraySource(shape, dtype, fragments, layout, identity=identity, assumed=len(holders) > 1)


@lru_cache(maxsize=4096)
def _held_whole(shape: tuple[int, ...], processes: int) -> tuple[Box, tuple[int, ...], Layout]:
    """The box of an array, all processes, and the layout by which each holds it."""
    holders = tuple(range(processes))
    return Box.whole(shape), holders, Layout.replicated(len(shape), processes)
