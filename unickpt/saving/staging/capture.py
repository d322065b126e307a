"""How the state is kept unchanged until it is written: by reference, or copied, now or later.

Lazy copies, in the background, are an idea of DataStates-LLM (Maurya et al., HPDC 2024).
"""

from __future__ import annotations

import itertools
import logging
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable
from enum import Enum, auto
from functools import partial
from typing import Any

import numpy as np

from unickpt.arrays import guarded_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import StateChanged
from unickpt.format.chunk_store import SMALL
from unickpt.frameworks.protocol import ArraySource, Fragment, Memory, Read, stage
from unickpt.saving.options import SaveOptions

_log = logging.getLogger("unickpt")
# Smaller arrays are not worth the risk: changes of batch norm's statistics are not detectable.
_LAZY_BYTES = 1 << 20
_SAMPLES = 64


class CaptureMethod(Enum):
    """How a fragment is kept; in the order in which fragments are staged and written."""

    REFERENCE = auto()
    COPY_NOW = auto()
    COPY_LATER = auto()  # it must not change before that
    CLONE = auto()  # on its device; the clone is copied later


BACKGROUND = {CaptureMethod.COPY_LATER, CaptureMethod.CLONE}


class Capture:
    """Decides how each fragment of one save is kept; keeps those that are not copied in chunks.

    Arguments:
        options: of the save.
        owners: what the optimizers own whose steps wait for this; None if no steps wait.
        sources: all arrays of the save.
        budget_bytes: bytes of host memory for copies.
    """

    def __init__(
        self,
        options: SaveOptions,
        owners: set[Hashable] | None,
        sources: Iterable[ArraySource],
        budget_bytes: int,
    ) -> None:
        self._mode, self._budget, self._owners = options.staging, budget_bytes, owners
        self._deferred: dict[Fragment, Fragment | None] = {}
        self._written = _Written(sources)
        self._reads: dict[Memory, Read] = {}
        self.methods: dict[Fragment, CaptureMethod] = {}
        """How each fragment that `keep` returned is kept."""
        self.used: set[CaptureMethod] = set()
        """The methods of these fragments."""
        self.copied_bytes = 0
        """Bytes that were copied at once, in fragments too small to defer."""

    def keep(self, source: ArraySource, borrowed: Callable[[Box], bool]) -> ArraySource:
        """An array with fragments that stay as they are, or that are copied before they change.

        Arguments:
            source: the array.
            borrowed: whether a box of it is not saved; then nothing of it is kept.
        """
        fragments = []
        for fragment in source.fragments:
            if borrowed(fragment.box):
                method = CaptureMethod.REFERENCE
                kept = _read_by(fragment, _unread, Memory(mutable=False))
            else:
                method, kept = self._decide(fragment, source.dtype)
            self.methods[kept] = method
            self.used.add(method)
            fragments.append(kept)
        if all(kept is given for kept, given in zip(fragments, source.fragments, strict=True)):
            return source
        return source.with_fragments(tuple(fragments))

    def deferred(self, fragment: Fragment) -> Fragment | None:
        """A fragment that would be copied now, to be copied in the background instead.

        Returns:
            None unless it is known when it changes next: at a step that waits for this save.
        """
        memory = fragment.memory
        guarded = self._mode == "auto" and self._owners and memory.owner in self._owners
        if not guarded or not memory.mutable or memory.on_device:
            return None
        if fragment not in self._deferred:
            lazy = self._deferred[fragment] = _lazily(fragment)
            if lazy is not None:
                self.methods[lazy] = CaptureMethod.COPY_LATER
                self.used.add(CaptureMethod.COPY_LATER)
        return self._deferred[fragment]

    def _decide(self, fragment: Fragment, dtype: DType) -> tuple[CaptureMethod, Fragment]:
        nbytes = fragment.box.size * dtype.itemsize
        if fragment.memory.on_device:
            return self._decide_on_device(fragment, nbytes)
        memory = fragment.memory
        immutable = not memory.mutable and not self._written.shares(memory)
        if self._mode != "copy" and immutable and memory.keep is not None:
            return CaptureMethod.REFERENCE, _read_by(fragment, self._kept_read(memory), memory)
        if nbytes <= SMALL and self.copied_bytes + nbytes <= self._budget // 16:
            self.copied_bytes += nbytes
            private = Memory(mutable=False)
            return CaptureMethod.REFERENCE, _read_by(fragment, _copied(fragment, dtype), private)
        lazily = memory.mutable and self._is_lazy(memory, nbytes)
        lazy = _lazily(fragment) if lazily else None
        return (
            (CaptureMethod.COPY_NOW, fragment) if lazy is None else (CaptureMethod.COPY_LATER, lazy)
        )

    def _decide_on_device(self, fragment: Fragment, nbytes: int) -> tuple[CaptureMethod, Fragment]:
        memory = fragment.memory
        if self._is_lazy(memory, nbytes):
            return CaptureMethod.COPY_LATER, fragment
        # A copy to the host would wait for all work that is queued on the device.
        lazily = self._mode == "lazy" or (self._mode == "auto" and self._owners is not None)
        if (lazily or self._mode == "device") and memory.keep is not None:
            try:
                read = self._kept_read(memory)
            except MemoryError as error:
                _log.warning("no room for a clone on the device, copying to the host: %s", error)
            else:
                return CaptureMethod.CLONE, _read_by(fragment, read, memory.watched(None))
        return CaptureMethod.COPY_NOW, fragment

    def _kept_read(self, memory: Memory) -> Read:
        """A function that reads the data as it is now; fragments of an array are kept together."""
        assert memory.keep is not None, "called only if there is a way to keep it"
        if memory not in self._reads:
            self._reads[memory] = memory.keep()
        return self._reads[memory]

    def _is_lazy(self, memory: Memory, nbytes: int) -> bool:
        if not memory.mutable:  # on a device; deletion is detected
            return self._mode in ("reference", "lazy")
        if self._owners is not None:
            # On the host some changes cannot be detected, and a copy costs little.
            lazy = self._mode == "lazy" or (self._mode == "auto" and memory.on_device)
            return lazy and memory.owner in self._owners
        traced = memory.changed is not None and nbytes >= _LAZY_BYTES
        return self._mode == "lazy" and traced


class _Written:
    """The host memory of arrays that their owners may write to.

    Arguments:
        sources: all arrays of a save.
    """

    def __init__(self, sources: Iterable[ArraySource]) -> None:
        memories = [fragment.memory for source in sources for fragment in source.fragments]
        spans = sorted(span for m in memories if m.mutable and m.spans for span in m.spans())
        self._begins = [begin for begin, _ in spans]
        self._ends = list(itertools.accumulate((end for _, end in spans), max))

    def shares(self, memory: Memory) -> bool:
        """Whether it overlaps the memory of one of them."""
        if not self._begins or memory.spans is None:
            return False
        for begin, end in memory.spans():
            before = bisect_left(self._begins, end)
            if before and self._ends[before - 1] > begin:
                return True
        return False


def _read_by(fragment: Fragment, read: Read, memory: Memory) -> Fragment:
    return Fragment(fragment.box, fragment.replicas, read, memory)


def _lazily(fragment: Fragment) -> Fragment | None:
    """A fragment in host memory to copy in the background; None if that is not possible.

    Freed memory is always detected; changes by the version counters of torch, and by a sample of
    the elements, because `.data`, NumPy and steps on DTensors do not increment versions.
    """
    if not guarded_copy.is_possible():
        return None
    try:
        memory = fragment.read(fragment.box, _no_room)
    except _NoView:
        return None
    each = max(1, round(_SAMPLES ** (1 / max(1, memory.ndim))))
    grid: list[Any] = [slice(None, None, max(1, n // each)) for n in memory.shape]
    sample = memory[(*grid, ...)]
    before, reports_change = sample.tobytes(), fragment.memory.changed

    def changed() -> bool:
        if reports_change is not None and reports_change():
            return True
        now = np.empty(sample.shape, sample.dtype)
        try:
            fragment.read(fragment.box, _no_room)  # raises if the memory was replaced
            guarded_copy.copy(sample, now)
        except (guarded_copy.Freed, StateChanged):
            return True
        return now.tobytes() != before

    def read(box: Box, make_buffer: Callable[[], Array]) -> Array:
        part, out = fragment.read(box, make_buffer), make_buffer()
        try:
            guarded_copy.copy(part, out)
        except guarded_copy.Freed:
            raise StateChanged("its memory was freed") from None
        return out

    return _read_by(fragment, read, fragment.memory.watched(changed))


def _unread(box: Box, make_buffer: Callable[[], Array]) -> Array:
    raise AssertionError("what is not saved is not read")


class _NoView(Exception):
    """Reading makes a copy."""


def _no_room() -> Array:
    raise _NoView


def _copied(fragment: Fragment, dtype: DType) -> Read:
    """Copies a fragment; returns a function that reads the copy."""
    native, start = dtype.newbyteorder("="), fragment.box.start
    copied = stage(fragment, fragment.box, native, partial(np.empty, dtype=np.uint8), copied=True)
    return lambda box, make_buffer: copied[box.relative_to(start).slices]
