"""Leaves: objects that a framework's adapter describes, and `PerProcess` and `LocalFragments`."""

from __future__ import annotations

import importlib
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, flat_range_to_boxes, overlap
from unickpt.arrays.dtypes import Array
from unickpt.frameworks.adapter_protocol import (
    Adapter,
    ArraySource,
    DeviceMemory,
    Fragment,
    Memory,
    Read,
    StoredTree,
    Transfer,
)
from unickpt.frameworks.process_group import Group, current_group, saving_group, within
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.arrays.layout import Layout
    from unickpt.arrays.memory_region import MemoryRegion
    from unickpt.frameworks.grown_state import MakeArray

T = TypeVar("T")
_FRAMEWORKS = ("jax", "torch")


def adapters() -> list[Adapter]:
    """The adapters of the frameworks that this process has imported, and NumPy's."""
    return [*map(_module, filter(sys.modules.get, _FRAMEWORKS)), _module("numpy")]


@cache
def _module(framework: str) -> Adapter:
    return cast(Adapter, importlib.import_module(f"unickpt.adapters.{framework}"))


def job_group(
    group: Group | None = None, timeout_s: float | None = None, *, saves: bool = False
) -> Group:
    """The processes that save or load together: those given, else all of the job, as its frameworks
    report it.

    Arguments:
        group: such as `LoadOptions.group`.
        timeout_s: how long they wait for each other, such as `LoadOptions.timeout_s`; None for
            their own limit.
        saves: as `saving_group`, warn if the processes of a job would save separately.

    Raises:
        ValueError: two frameworks each report a job.
    """
    group = group or (saving_group if saves else current_group)(adapters())
    return group if timeout_s is None else within(group, timeout_s)


def adapter_named(framework: str) -> Adapter:
    """Imports and returns the adapter of a framework.

    Raises:
        ValueError: there is none of this name.
        ImportError: the framework is not installed.
    """
    if framework not in _FRAMEWORKS:
        raise ValueError(f'framework={framework!r} is none of "numpy", "torch" and "jax"')
    return _module(framework)


def adapter_of(leaf: Any, adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that handles a leaf, if any."""
    for adapter in adapters:
        if adapter.is_array(leaf):
            return adapter
    return None


def is_array(value: Any) -> bool:
    """Whether an object is an array of a framework, which a save stores as one."""
    return adapter_of(value, adapters()) is not None


@dataclass(frozen=True)
class ArrayFacts:
    """The facts of an adapter about all arrays of its framework.

    Arguments:
        adapter: of the framework.
        numbers: the arrays' numbers among the leaves.
        facts: see `Adapter.facts`.
        first: for each, the first with the same key; None if all keys differ.
    """

    adapter: Adapter
    numbers: Sequence[int]
    facts: Sequence[Any]
    first: Sequence[int] | None

    @classmethod
    def gather(cls, adapter: Adapter, numbers: Sequence[int], values: Sequence[Any]) -> ArrayFacts:
        facts, keys = adapter.facts([values[number] for number in numbers])
        if len(set(keys)) == len(keys):
            return cls(adapter, numbers, facts, None)
        seen: dict[Hashable, int] = {}
        first = [seen.setdefault(key, number) for number, key in enumerate(keys)]
        return cls(adapter, numbers, facts, first)


def by_type(find: Callable[[Any], T]) -> Callable[[Any], T]:
    """A function that decides by an object's type alone, called once for each type."""
    results: dict[type, T] = {}

    def lookup(leaf: Any) -> T:
        kind = type(leaf)
        if kind not in results:
            results[kind] = find(leaf)
        return results[kind]

    return lookup


def varying(kind: type, adapters: Sequence[Adapter]) -> Adapter | None:
    """The adapter that treats some objects of a type as arrays, and others as containers."""
    return next((adapter for adapter in adapters if adapter.varies and adapter.varies(kind)), None)


def leaf_test(adapters: Sequence[Adapter]) -> Callable[[Any], bool]:
    """`is_leaf` for the many objects of a tree; caches decisions that depend only on the type."""
    answers: dict[type, bool | Callable[[Any], bool]] = dict.fromkeys(tree_json.PLAIN_TYPES, True)
    answers |= dict.fromkeys(_CONTAINERS, False)

    def test(obj: Any) -> bool:
        kind = type(obj)
        answer = answers.get(kind)
        if answer is None:
            adapter = varying(kind, adapters)
            answer = answers[kind] = is_leaf(obj, adapters) if adapter is None else adapter.is_array
        return answer if answer is True or answer is False else answer(obj)

    return test


_CONTAINERS = (dict, list, tuple)


def is_leaf(obj: Any, adapters: Sequence[Adapter]) -> bool:
    """Whether an object of a tree is a leaf for saving and loading."""
    if type(obj) in _CONTAINERS:
        return False
    return (
        tree_json.is_plain(obj)
        or isinstance(obj, PerProcess | Described)
        or adapter_of(obj, adapters) is not None
    )


def expand(
    obj: Any, name: str, adapters: Sequence[Adapter], stored: StoredTree | None = None
) -> tree.Expansion | None:
    """One level of a framework's container, or of an object with `state_dict`."""
    for adapter in adapters:
        level = adapter.expand(obj, name, stored)
        if level is not None:
            return level
    if not _is_stateful(obj):
        return None

    def rebuild(children: list[Any]) -> Any:
        obj.load_state_dict(children[0])
        return obj

    state = obj.state_dict()
    if stored is not None:
        from unickpt.frameworks.grown_state import with_grown

        state = with_grown(state, name, stored, _array_maker(state, adapters))
    return tree.Expansion("wrapper", ("state_dict",), (state,), rebuild, type(obj).__name__)


def _array_maker(state: Any, adapters: Sequence[Adapter]) -> MakeArray | None:
    """A function that makes arrays of the framework whose arrays a state has; None without any."""
    from unickpt.frameworks.grown_state import first_array

    array = first_array(state, lambda value: adapter_of(value, adapters) is not None)
    adapter = adapter_of(array, adapters)
    return None if adapter is None else lambda entry: adapter.empty(entry, array)


def flatten_state(
    state: Any, is_end: Callable[[Any], bool] = lambda obj: False
) -> tree.Node | tree.Leaf:
    """The structure of a tree as a save sees it: its containers and the states of its objects, down
    to arrays and plain values. Calls `state_dict` of the objects.

    Arguments:
        state: the tree.
        is_end: which objects are not expanded; arrays and plain values never are.

    Raises:
        UnsupportedLeaf: an object of it has no place in a tree; names it.
    """
    among = adapters()
    return tree.flatten(
        state,
        lambda obj: is_leaf(obj, among) or is_end(obj),
        lambda obj, name: expand(obj, name, among),
    )


def _is_stateful(obj: Any) -> bool:
    kind = type(obj)
    return callable(getattr(kind, "state_dict", None)) and callable(
        getattr(kind, "load_state_dict", None)
    )


@dataclass(frozen=True)
class PerProcess:
    """A leaf whose value differs by process, such as RNG or data-loader state.

    If as many processes load it as saved it, each gets its own value back; for another number of
    processes, `redistribute` in `like` computes the values.

    Arguments:
        value: any nesting of containers, plain values and host arrays. In `like`, its arrays are
            the destinations; with None, arrays are returned as NumPy arrays.
        redistribute: in `like`, called on every process if their number has changed, with the
            values of all processes that saved (arrays as NumPy arrays), the index of this process
            and the current number of processes; returns this process's value.

    Example:
        >>> tree = {"rng": PerProcess({"seed": 7, "offset": 120})}
        >>> def share_out(saved, index, count):
        ...     return {"seed": 7 + index, "offset": min(s["offset"] for s in saved)}
        >>> like = {"rng": PerProcess(redistribute=share_out)}
    """

    value: Any = None
    redistribute: Callable[[Sequence[Any], int, int], Any] | None = None


@dataclass(frozen=True)
class Sections:
    """A value for `PerProcess` in sections; a process that loads reads those it needs.

    With one in `like`, `redistribute` is called even if the number of processes is the same. It
    gets a `Sections` for each process that saved, or None for one that saved none of its own. Facts
    are read at once, a section on request.

    Arguments:
        facts: facts about a value that need no section to be read: a dict of JSON values.
        values: the sections, by their keys: each any nesting of containers, plain values and host
            arrays.

    Example:
        >>> rank_3 = PerProcess(Sections({"rank": 3}, {"shard 3": {"offset": 120}}))
    """

    facts: Mapping[str, Any]
    values: Mapping[str, Any]


NOTHING = Sections({}, {})
"""The value of a process that saves none of its own, because another one has the same."""


@dataclass(frozen=True)
class PerProcessValues:
    """The result of `load` without `like` for a `PerProcess` leaf: the value of every process."""

    values: tuple[Any, ...]

    @property
    def all_equal(self) -> bool:
        """Whether all processes saved the same value; arrays are compared bit for bit."""
        return all(_are_equal(value, self.values[0]) for value in self.values[1:])


def _are_equal(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_are_equal(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_are_equal, a, b))
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    return bool(a == b)


class Described(ABC):
    """A leaf that describes itself, without an adapter."""

    @abstractmethod
    def source(self, group: Group) -> ArraySource:
        """As an adapter's `source`."""


class SavedOnly:
    """An object whose state is created within the save, so that a failure on one process fails the
    save on all; subclasses have `state_dict`."""

    def load_state_dict(self, state: object) -> None:
        raise NotImplementedError("it is only saved")


class LocalFragments(Described):
    """Elements of a global array that this process holds, in any partitioning.

    Other processes hold the rest, and declare it themselves; nothing is communicated. The fragments
    of all processes must cover the array exactly once; the coordinator checks it before the commit.
    The same object at two places of a tree is one array. In `like`, the given memory is filled in
    place.

    Arguments:
        shape: shape of the global array.
        fragments: boxes with their data: NumPy arrays or torch tensors of the shape of the box.
        dtype: a dtype name such as "bfloat16"; needed only where `fragments` is empty.

    Raises:
        ValueError: a box does not fit its data or the shape, or two overlap; or an argument has
            a wrong type.

    Example:
        >>> import numpy as np
        >>> mine = LocalFragments((4, 3), [(Box((0, 0), (2, 3)), np.zeros((2, 3)))])
    """

    def __init__(
        self, shape: Sequence[int], fragments: Sequence[tuple[Box, Any]], dtype: str | None = None
    ) -> None:
        self.shape = _shape(shape)
        self.fragments = tuple(fragments)
        whole = Box.whole(self.shape)
        for fragment in self.fragments:
            if not (isinstance(fragment, tuple) and len(fragment) == 2):
                raise ValueError("a fragment is a pair (Box(start, stop), data)")
            box, data = fragment
            if not isinstance(box, Box):
                raise ValueError(f"a fragment's box is {quoted(box)}, not a Box(start, stop)")
            _check_data(data)
            if len(box.start) != len(self.shape) or not whole.contains(box):
                raise ValueError(f"box {box} does not lie within shape {self.shape}")
            if tuple(data.shape) != box.shape:
                raise ValueError(f"data of shape {tuple(data.shape)} does not fit box {box}")
        pair = overlap([box for box, _ in self.fragments])
        if pair is not None:
            first, second = (self.fragments[i][0] for i in pair)
            raise ValueError(f"boxes {first} and {second} overlap")
        self.dtype = dtype

    @classmethod
    def flat(
        cls, shape: Sequence[int], ranges: Sequence[tuple[int, Any]], dtype: str | None = None
    ) -> LocalFragments:
        """Row-major flat ranges, as ZeRO and distributed optimizers hold them.

        Arguments:
            shape: shape of the global array.
            ranges: pairs of the flat position of the first element and contiguous 1-d data.
            dtype: as for the class.

        Example:
            >>> import numpy as np
            >>> mine = LocalFragments.flat((4, 3), [(2, np.arange(5.0))])  # elements [2, 7)
        """
        pieces: list[tuple[Box, Any]] = []
        shape = _shape(shape)
        for part in ranges:
            if not (isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], Integral)):
                raise ValueError("a flat range is a pair (position of its first element, 1-d data)")
            start, data = int(part[0]), part[1]
            _check_data(data)
            if len(data.shape) != 1:
                raise ValueError(f"a flat range needs 1-d data, not shape {tuple(data.shape)}")
            contiguous = data.flags.c_contiguous if hasattr(data, "flags") else data.is_contiguous()
            if not contiguous:
                raise ValueError("a flat range needs contiguous data, so that it can be filled")
            offset = 0
            for box in flat_range_to_boxes(shape, start, start + data.shape[0]):
                pieces.append((box, data[offset : offset + box.size].reshape(box.shape)))
                offset += box.size
        return cls(shape, pieces, dtype)

    @classmethod
    def whole(cls, data: Any) -> LocalFragments:
        """Declares that this process alone holds a whole array."""
        return cls(tuple(data.shape), [(Box.whole(tuple(data.shape)), data)])

    def source(self, group: Group) -> ArraySource:
        """As an adapter's `source`."""
        fragments, fragment_dtypes = list[Fragment](), list[dtypes.DType]()
        for box, data in self.fragments:
            inner = _adapter(data).source(data, group)
            if inner.layout is None or any(inner.layout.dims):
                raise TypeError("LocalFragments can only hold NumPy arrays and plain torch tensors")
            fragment_dtypes.append(inner.dtype)
            fragments += [placed(fragment, box, (group.index,)) for fragment in inner.fragments]
        dtype = self._common_dtype(fragment_dtypes)
        return ArraySource(self.shape, dtype, tuple(fragments), identity=self._identity)

    @property
    def _identity(self) -> Hashable:
        """The same object at two places of a tree is one array, as tied parameters are."""
        return "fragments", id(self)

    def target(self) -> LocalTarget:
        """As an adapter's `target`."""
        return LocalTarget(self)

    def _common_dtype(self, fragment_dtypes: Iterable[dtypes.DType]) -> dtypes.DType:
        """The dtype that the fragments have, or that was declared for none."""
        declared = () if self.dtype is None else (dtypes.from_name(self.dtype),)
        both = dict.fromkeys([*declared, *(dtype.newbyteorder("=") for dtype in fragment_dtypes)])
        if not both:
            raise TypeError("LocalFragments without any fragment need a dtype, e.g. 'float32'")
        if len(both) > 1:
            raise TypeError(f"LocalFragments mix dtypes {' and '.join(map(str, both))}")
        return next(iter(both))


class LocalTarget:
    """Fills the fragments' own memory."""

    abstract = False
    processes = 1
    prng: str | None = None
    layout: Layout | None = None

    def __init__(self, marked: LocalFragments) -> None:
        self.marked, self.shape = marked, marked.shape
        self.identity: Hashable = marked._identity
        self.inner = [_adapter(data).target(data) for _, data in marked.fragments]
        for (box, _), inner in zip(marked.fragments, self.inner, strict=True):
            if inner.identity is None and not box.empty:
                raise TypeError(f"the memory of fragment {box} cannot be filled in place")
        self.dtype = marked._common_dtype(inner.dtype for inner in self.inner)
        self.boxes: Sequence[Box] = tuple(box for box, _ in marked.fragments)
        self.device_memory = DeviceMemory.joined(self.inner, self.boxes)

    @property
    def span(self) -> tuple[int, int] | None:
        spans = [target.span for target in self.inner if target.span is not None]
        return (min(spans)[0], max(end for _, end in spans)) if spans else None

    def regions(self) -> Sequence[MemoryRegion]:
        return [region for target in self.inner for region in target.regions()]

    def buffer(self, position: int) -> Array:
        return self.inner[position].buffer(0)

    def finish(self, buffers: Sequence[Array]) -> Any:
        for inner, buffer in zip(self.inner, buffers, strict=True) if buffers else ():
            inner.finish([buffer])
        return self.marked


def _shape(shape: object) -> tuple[int, ...]:
    if not isinstance(shape, Iterable):
        raise ValueError(f"shape {quoted(shape)} must be a tuple of integers")
    return tuple(int(n) for n in shape)


def _check_data(data: object) -> None:
    if not hasattr(data, "shape"):
        raise ValueError(
            f"a fragment's data is of type {type(data).__name__}; pass a NumPy array or a tensor"
        )


def _adapter(data: Any) -> Adapter:
    adapter = adapter_of(data, adapters())
    if adapter is None:
        raise TypeError(f"a fragment's data is a {type(data).__name__}, not an array")
    return adapter


def placed(fragment: Fragment, box: Box, replicas: tuple[int, ...]) -> Fragment:
    """A whole array as a box of a larger one.

    Arguments:
        fragment: the whole array.
        box: its place in the larger one.
        replicas: the processes that hold it.
    """
    read, memory = _shifted(fragment.read, box), _shifted_memory(fragment.memory, box)
    return Fragment(box, replicas, read, memory)


def _shifted(read: Read, box: Box) -> Read:
    return lambda requested, make_buffer: read(requested.relative_to(box.start), make_buffer)


def _shifted_memory(memory: Memory, box: Box) -> Memory:
    keep, transfer = memory.keep, memory.transfer

    def shifted_transfer(boxes: Sequence[Box]) -> Transfer | None:
        assert transfer is not None, "else there is none of this"
        inner = transfer([requested.relative_to(box.start) for requested in boxes])
        return None if inner is None else inner._replace(read=_shifted(inner.read, box))

    return replace(
        memory,
        keep=None if keep is None else lambda: _shifted(keep(), box),
        transfer=None if transfer is None else shifted_transfer,
    )
