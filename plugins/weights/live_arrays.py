"""The arrays of an engine that are live, and changes to them: staged, applied in one short step, or
reverted."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import cached_property, partial
from threading import Lock
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from unickpt.extend import Array, Box, LoadRequest, Pool, adapter_of, adapters, group_of_one
from unickpt.types import LocalFragments

# A change of more than one element of so many is copied whole: its positions would take as long.
_SPARSE = 8


def words_of(array: Array) -> Array:
    """The elements as integers, in the same memory: -0.0 differs from 0.0, and a NaN from others.
    Elements of 16 bytes stay as they are."""
    return array.view(f"u{array.itemsize}") if array.itemsize in (1, 2, 4, 8) else array


class Change(Protocol):
    """A staged change of live memory."""

    def apply(self) -> None: ...

    def revert(self) -> None:
        """Undoes it, also if it was applied in part."""


@dataclass(frozen=True)
class ElementsChange:
    """A change of some elements of host memory.

    Arguments:
        view: of the memory.
        index: ascending positions of the elements in the view, or all.
        new, old: the elements.
    """

    view: Array
    index: Any
    new: Array
    old: Array

    def apply(self) -> None:
        self.view[self.index] = self.new

    def revert(self) -> None:
        self.view[self.index] = self.old

    @property
    def nbytes(self) -> int:
        """Bytes that are staged."""
        positions = 0 if self.index is ... else self.index.nbytes
        return int(positions + self.new.nbytes + self.old.nbytes)


def change_of(view: Array, data: Array) -> ElementsChange | None:
    """The change that turns a view of live memory into `data`; None if they are equal.

    Arguments:
        view: of the memory; unchanged.
        data: of the same shape and dtype; copied.
    """
    before, after = in_memory_order(words_of(view), words_of(data))
    differ = before != after
    if before.dtype.kind == "c":  # as numbers, NaN differs and -0.0 does not
        differ = np.ones(before.shape, bool)
    count = int(np.count_nonzero(differ))
    if not count:
        return None
    if count * _SPARSE >= before.size or any(step % before.itemsize for step in before.strides):
        return ElementsChange(before, ..., after.copy(), before.copy())
    positions = np.flatnonzero(differ)
    if before.flags.c_contiguous:
        before, after = before.reshape(-1), after.reshape(-1)
        return ElementsChange(before, positions, after[positions], before[positions])
    # One list of ascending positions in the memory is applied several times faster than axes are.
    index = np.unravel_index(positions, before.shape)
    steps = [step // before.itemsize for step in before.strides]
    offsets: Any = sum(axis * step for axis, step in zip(index, steps, strict=True))
    extent = 1 + sum((n - 1) * step for n, step in zip(before.shape, steps, strict=True))
    memory = as_strided(before, (extent,), (before.itemsize,))
    return ElementsChange(memory, offsets, after[index], before[index])


def in_memory_order(view: Array, data: Array) -> tuple[Array, Array]:
    """A view and another array with the view's axes as they are in memory."""
    flips: Any = (..., *(slice(None, None, -1 if step < 0 else 1) for step in view.strides))
    order = sorted(range(view.ndim), key=lambda axis: -abs(view.strides[axis]))
    return view[flips].transpose(order), data[flips].transpose(order)


@dataclass(frozen=True)
class _LeafChange:
    """A change of a leaf as a whole.

    Arguments:
        leaves: the live leaves, by name.
        name: of the leaf.
        new, old: the leaves; the same one if it is filled in place.
        fill: targets and their buffers that fill it with the new and the old elements.
    """

    leaves: dict[str, Any]
    name: str
    new: Any
    old: Any
    fill: tuple[tuple[Any, Sequence[Array]], ...] = ()

    def apply(self) -> None:
        for target, buffers in self.fill[:1]:
            target.finish(buffers)
        self.leaves[self.name] = self.new

    def revert(self) -> None:
        for target, buffers in self.fill[1:]:
            target.finish(buffers)
        self.leaves[self.name] = self.old


@dataclass
class LiveLeaf:
    """An array of an engine.

    Arguments:
        name: in the tree.
        leaf: of the tree.
        target: where a load would place it.
    """

    name: str
    leaf: Any
    target: Any
    in_place: bool = field(init=False)
    """Whether `memory` is the live memory."""
    _before: list[Array] = field(default_factory=list)
    _is_read: bool = False
    _lock: Any = field(default_factory=Lock, repr=False)

    def __post_init__(self) -> None:
        span = self.target.span
        self.in_place = span is not None and all(
            not array.size or span[0] <= array.__array_interface__["data"][0] < span[1]
            for array in self._buffers
        )

    @cached_property
    def _buffers(self) -> list[Array]:
        return [self.target.buffer(i) for i in range(len(self.target.boxes))]

    @property
    def memory(self) -> list[Array]:
        """The elements of each box, as host memory; read on first use."""
        if self.in_place or self.target.abstract:
            return self._buffers
        with self._lock:
            if not self._is_read:
                for box, array in zip(self.target.boxes, self._buffers, strict=True):
                    self._read(box, array)
                if self.target.span is not None:
                    self._before = [array.copy() for array in self._buffers]
                self._is_read = True
        return self._buffers

    @property
    def boxes(self) -> Sequence[Box]:
        return self.target.boxes  # type: ignore[no-any-return]

    def _read(self, box: Box, out: Array) -> None:
        """Reads elements that are not in host memory."""
        if isinstance(self.leaf, LocalFragments):
            source = self.leaf.source(group_of_one())
        else:
            adapter = adapter_of(self.leaf, adapters())
            assert adapter is not None, "it has a target"
            source = adapter.source(self.leaf, group_of_one())
        for fragment in source.fragments:
            common = fragment.box.intersect(box)
            if common is not None or fragment.box == box:
                common = common or box
                data = fragment.read(common, partial(np.empty, common.shape, out.dtype))
                out[common.relative_to(box.start).slices] = data

    def change(self, changes: Sequence[ElementsChange], leaves: dict[str, Any]) -> Change:
        """The change of a leaf that is not live host memory, from those of its elements in host
        memory; places the new elements on the device, if that makes a new leaf.

        Arguments:
            changes: of `memory`.
            leaves: the live leaves, by name.
        """
        for change in changes:
            change.apply()
        if self.target.span is None:
            return _LeafChange(leaves, self.name, self.target.finish(self.memory), self.leaf)
        fill = (self.target, self.memory), (self.target, self._before)
        return _LeafChange(leaves, self.name, self.leaf, self.leaf, fill)


@dataclass(frozen=True)
class MemoryChange:
    """A change of a torch tensor to other memory.

    Arguments:
        leaf: the tensor.
        new, old: tensors with the new and the old memory.
    """

    leaf: Any
    new: Any
    old: Any

    def apply(self) -> None:
        self.leaf.data = self.new

    def revert(self) -> None:
        self.leaf.data = self.old


def live_leaves(request: LoadRequest) -> dict[str, LiveLeaf]:
    """The arrays of a request; of several with the same memory, the first."""
    by_identity = dict[Any, str]()
    names = [
        name
        for name, target in request.targets.items()
        if target.identity is None or by_identity.setdefault(target.identity, name) == name
    ]
    return {name: LiveLeaf(name, request.leaves[name], request.targets[name]) for name in names}


def flip(changes: Sequence[Change], threads: int = 2) -> None:
    """Applies all changes, or none.

    Arguments:
        changes: staged before, the largest first.
        threads: how many apply them; each takes the next one.
    """

    left = deque(changes)

    def apply() -> None:
        while True:
            try:
                change = left.popleft()
            except IndexError:
                return
            change.apply()

    pending = list[Future[None]]()
    try:
        with Pool(threads - 1) as pool:  # its end waits for all
            for _ in range(1, min(threads, len(changes))):
                pending.append(pool.submit(apply))
            apply()
        for ended in pending:
            ended.result()
    except BaseException:  # also an interrupt at any place
        wait(pending)
        for change in changes:
            change.revert()
        raise


def finish_in_place(leaves: Mapping[str, LiveLeaf]) -> None:
    """Lets frameworks know that memory was changed, such as autograd."""
    for leaf in leaves.values():
        if leaf.in_place:
            leaf.target.finish(leaf.memory)
