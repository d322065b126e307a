"""The protocol between the core and the frameworks' adapters, and the registry that finds them.

The core knows arrays only as `ArraySource` (to save) and `ArrayTarget` (to load into).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np

from unickpt.box import Box
from unickpt.dtypes import DType
from unickpt.group import Group, alone
from unickpt.layout import Layout
from unickpt.tree import Expansion

Array = np.ndarray[Any, Any]
Read = Callable[[Box, Callable[[], Array]], Array]
Sample = Callable[[tuple[Array, ...]], Callable[[], Array]]

# These classes are facts, which nobody changes. They are not frozen, because that makes them three
# times as slow to make (and `dataclasses.replace` four times), and a save makes some for each array
# while its caller waits.


@dataclass(slots=True, eq=False)
class Memory:
    """Where a fragment lies, and what its framework tells of changes to it.

    Arguments:
        mutable: whether its owner may write to it; what is immutable may still be deleted.
        on_device: whether an accelerator has it, so that what is read is a copy already.
        keep: keeps the data as it is now, without host memory (references to what never changes,
            or a clone on the device), and returns what reads it; None where there is no such way.
            Raises `MemoryError` where the device has no room.
        changed: whether the data was changed or deleted since it was described; None where nobody
            can tell.
        owner: what a `Fence` knows it by.
        allocate: makes host memory of so many bytes, for fast transfers from this device.
        spans: the host's addresses of what it lies in, each from and up to; None on a device.
    """

    mutable: bool = True
    on_device: bool = False
    keep: Callable[[], Read] | None = None
    changed: Callable[[], bool] | None = None
    owner: Hashable = None
    allocate: Callable[[int], Array] | None = None
    spans: Callable[[], Sequence[tuple[int, int]]] | None = None

    def watched(self, changed: Callable[[], bool] | None) -> Memory:
        """The same memory with another way to see changes."""
        return Memory(
            self.mutable, self.on_device, self.keep, changed, self.owner, self.allocate, self.spans
        )


@dataclass(slots=True, eq=False)
class Fragment:
    """A box of an array that this process holds.

    Arguments:
        box: in global coordinates, not empty.
        replicas: all processes that hold the same box, ascending.
        read: host memory of a sub-box, given in global coordinates: a view where possible, else
            filled memory that a call of the second argument gave, of that shape and of the array's
            dtype.
        memory: where it lies.
        sample: keeps the elements at some indices (along each dimension an array of them; a scalar
            counts as one-dimensional) as they are now, without waiting for a device, and returns
            what gives them; None where `read` gives a view of the whole box.
    """

    box: Box
    replicas: tuple[int, ...]
    read: Read
    memory: Memory = field(default_factory=Memory)
    sample: Sample | None = None


@dataclass(slots=True, eq=False)
class ArraySource:
    """What an adapter says of a leaf to be saved.

    Arguments:
        shape: global shape.
        dtype: NumPy dtype of the stored elements.
        fragments: the distinct boxes of this process.
        layout: how all processes hold the array; None where no layout says it.
        boxes: without a layout, all fragments of all processes, where this process knows them.
        identity: equal for leaves that are one array (tied parameters).
        prng: implementation of a typed PRNG key.
        assumed: whether `layout` only assumes that all processes hold the array, because they
            would if they have it at all.
    """

    shape: tuple[int, ...]
    dtype: DType
    fragments: tuple[Fragment, ...]
    layout: Layout | None = None
    boxes: tuple[tuple[Box, tuple[int, ...]], ...] | None = None
    identity: Hashable = None
    prng: str | None = None
    assumed: bool = False

    def with_fragments(self, fragments: tuple[Fragment, ...]) -> ArraySource:
        """The same array with other fragments."""
        return ArraySource(
            self.shape, self.dtype, fragments, self.layout, self.boxes, self.identity, self.prng,
            self.assumed,
        )  # fmt: skip


class ArrayTarget(Protocol):
    """What an adapter says of a leaf to be loaded.

    `boxes` are the distinct, possibly overlapping boxes that this process wants. `buffer(i)` gives
    writable host memory of the shape of `boxes[i]`, the destination itself where that is possible.
    `finish` gets these buffers, filled, and returns the leaf. `identity` is equal for leaves that
    share memory, and None where loading makes new memory; `abstract` leaves hold no data that they
    could keep; `prng` is the implementation of a typed PRNG key.
    """

    shape: tuple[int, ...]
    dtype: DType
    boxes: Sequence[Box]
    identity: Hashable
    abstract: bool
    prng: str | None

    def buffer(self, position: int) -> Array: ...

    def finish(self, buffers: Sequence[Array]) -> Any: ...


class Fence(Protocol):
    """Stands before every update that an optimizer makes to the memory it owns."""

    def owners(self) -> set[Hashable]:
        """`Memory.owner` of all that the optimizer, and nothing else, changes."""

    def remove(self) -> None:
        """Takes the fence away."""


class Adapter(Protocol):
    """What a module under `unickpt.adapters` offers."""

    def is_array(self, leaf: Any) -> bool:
        """Whether `source` and `target` are for this leaf."""

    def source(self, leaf: Any, group: Group) -> ArraySource:
        """Describes an array to save.

        Raises:
            TypeError: the dtype or the layout cannot be stored; the message needs no name.
        """

    def target(self, leaf: Any) -> ArrayTarget:
        """Describes an array to load into. Raises as `source`."""

    def expand(self, obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
        """One level of a container of this framework; None where it is none.

        Arguments:
            obj: any object that is no leaf and no builtin container.
            name: its name in the tree.
            stored: while loading, the stored arrays and values by name; else None.
        """

    def group(self) -> Group | None:
        """This framework's job, where it has been initialised with more than one process."""

    def fence(self, optimizer: Any, wait: Callable[[], None]) -> Fence | None:
        """Has `wait` called before every step of an optimizer; None where it is none of ours."""


_FRAMEWORKS = ("jax", "torch")


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported, and NumPy's."""
    loaded = [name for name in _FRAMEWORKS if sys.modules.get(name) is not None]
    modules = [importlib.import_module(f"unickpt.adapters.{n}") for n in [*loaded, "numpy"]]
    return [cast(Adapter, module) for module in modules]


def adapter_of(leaf: Any, among: Sequence[Adapter]) -> Adapter | None:
    """The adapter that knows a leaf."""
    for adapter in among:
        if adapter.is_array(leaf):
            return adapter
    return None


def current_group(among: Sequence[Adapter]) -> Group:
    """The job of this process, as its frameworks know it.

    Raises:
        ValueError: two frameworks each know a different job.
    """
    groups = [g for g in (a.group() for a in among) if g is not None]
    if len(groups) > 1:
        raise ValueError(
            "jax.distributed and torch.distributed are both initialised; say which processes save "
            "together: options=SaveOptions(group=unickpt.ProcessGroup(index, count, session))"
        )
    return groups[0] if groups else alone()
