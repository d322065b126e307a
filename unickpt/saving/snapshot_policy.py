"""How the state is kept unchanged until it is written, and how a change before that is noticed.

By reference, or copied, now or later.

Lazy copies, in the background, are an idea of DataStates-LLM (Maurya et al., HPDC 2024).
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.errors import StateChanged
from unickpt.format import chunk_encoding
from unickpt.format.verified_chunks import SMALL
from unickpt.frameworks.adapter_protocol import ArraySource, Fragment, Memory, Read
from unickpt.frameworks.host_memory import stage
from unickpt.options import SaveOptions
from unickpt.references.value_places import WriteItem
from unickpt.saving.write_plan import DirectSource, naming

_log = logging.getLogger("unickpt")
_SAMPLES = 64


class SnapshotMethod(Enum):
    """How a fragment is kept; in the order in which fragments are staged and written."""

    REFERENCE = auto()
    COPY_NOW = auto()
    COPY_LATER = auto()  # it must not change before it is copied
    CLONE = auto()  # on its device; the clone is copied later


BACKGROUND = {SnapshotMethod.COPY_LATER, SnapshotMethod.CLONE}


class SnapshotPolicy:
    """Decides how each fragment of one save is kept; keeps those that are not copied in chunks.

    Arguments:
        options: of the save.
        owners: the memory of the optimizers whose steps wait for this; None if no steps wait.
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
        self._written = _WrittenMemory(sources)
        self._reads: dict[Memory, Read] = {}
        self.methods: dict[Fragment, SnapshotMethod] = {}
        """How each fragment that `keep` returned is kept."""
        self.used: set[SnapshotMethod] = set()
        """The methods of these fragments."""
        self.copied_bytes = 0
        """Bytes that were copied at once, in fragments too small to defer."""

    @property
    def small_bytes(self) -> int:
        """How many more bytes can be copied in such fragments."""
        return self._budget // 16 - self.copied_bytes

    def keep(self, source: ArraySource, borrowed: Callable[[Box], bool]) -> ArraySource:
        """An array with fragments that stay as they are, or that are copied before they change.

        Arguments:
            source: the array.
            borrowed: whether a box of it is not saved; such a box is not kept.
        """
        fragments = []
        for fragment in source.fragments:
            if borrowed(fragment.box):
                method = SnapshotMethod.REFERENCE
                kept_fragment = _read_by(fragment, _unread, Memory(mutable=False))
            else:
                method, kept_fragment = self._decide(fragment, source.dtype)
            self.methods[kept_fragment] = method
            self.used.add(method)
            fragments.append(kept_fragment)
        if all(
            kept_fragment is original
            for kept_fragment, original in zip(fragments, source.fragments, strict=True)
        ):
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
                self.methods[lazy] = SnapshotMethod.COPY_LATER
                self.used.add(SnapshotMethod.COPY_LATER)
        return self._deferred[fragment]

    def _decide(self, fragment: Fragment, dtype: DType) -> tuple[SnapshotMethod, Fragment]:
        nbytes = fragment.box.size * dtype.itemsize
        if fragment.memory.on_device:
            return self._decide_on_device(fragment)
        memory = fragment.memory
        immutable = not memory.mutable and not self._written.shares(memory)
        if self._mode != "copy" and immutable and memory.keep is not None:
            return SnapshotMethod.REFERENCE, _read_by(fragment, self._kept_read(memory), memory)
        if nbytes <= min(SMALL, self.small_bytes):
            self.copied_bytes += nbytes
            private = Memory(mutable=False)
            return SnapshotMethod.REFERENCE, _read_by(fragment, _copied(fragment, dtype), private)
        lazily = memory.mutable and self._is_lazy(memory)
        lazy = _lazily(fragment) if lazily else None
        return (
            (SnapshotMethod.COPY_NOW, fragment)
            if lazy is None
            else (SnapshotMethod.COPY_LATER, lazy)
        )

    def _decide_on_device(self, fragment: Fragment) -> tuple[SnapshotMethod, Fragment]:
        memory = fragment.memory
        if self._is_lazy(memory):
            return SnapshotMethod.COPY_LATER, fragment
        # A copy to the host would wait for all work that is queued on the device.
        lazily = self._mode == "lazy" or (self._mode == "auto" and self._owners is not None)
        if (lazily or self._mode == "device") and memory.keep is not None:
            try:
                read = self._kept_read(memory)
            except MemoryError as error:
                _log.warning("no room for a clone on the device, copying to the host: %s", error)
            else:
                return SnapshotMethod.CLONE, _read_by(fragment, read, memory.watched(None))
        return SnapshotMethod.COPY_NOW, fragment

    def _kept_read(self, memory: Memory) -> Read:
        """A function that reads the current data; fragments of an array are kept together."""
        assert memory.keep is not None, "called only if there is a way to keep it"
        if memory not in self._reads:
            self._reads[memory] = memory.keep()
        return self._reads[memory]

    def _is_lazy(self, memory: Memory) -> bool:
        if not memory.mutable:  # on a device; deletion is detected
            return self._mode in ("reference", "lazy")
        # Many writers do not update version counters (fused optimizers, batch norm, `.data`), so
        # a copy is deferred only if the memory's owner waits. On the host a copy costs little.
        lazy = self._mode == "lazy" or (self._mode == "auto" and memory.on_device)
        return lazy and self._owners is not None and memory.owner in self._owners


class _WrittenMemory:
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

    Its owner waits before it changes the memory. Freed memory is always detected. Other
    changes are detected only if torch's version counters or a sample of the elements show them.
    """
    from unickpt.arrays import guarded_copy

    if not guarded_copy.is_possible():
        return None
    try:
        memory = fragment.read(fragment.box, _no_room)
    except _NoView:
        return None
    samples_per_axis = max(1, round(_SAMPLES ** (1 / max(1, memory.ndim))))
    grid: list[Any] = [slice(None, None, max(1, n // samples_per_axis)) for n in memory.shape]
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
    raise AssertionError("data that is not saved is never read")


class _NoView(Exception):
    """Reading makes a copy."""


def _no_room() -> Array:
    raise _NoView


def _copied(fragment: Fragment, dtype: DType) -> Read:
    """Copies a fragment; returns a function that reads the copy."""
    native, start = dtype.newbyteorder("="), fragment.box.start
    copied = stage(fragment, fragment.box, native, partial(np.empty, dtype=np.uint8), copied=True)
    return lambda box, make_buffer: copied[box.relative_to(start).slices]


_THREADS = 4  # at most
_ALONE_BYTES = 16 << 20  # below this, starting threads costs more than it gains

PlaceT = TypeVar("PlaceT")


class OrderedCopy(Generic[PlaceT]):
    """Copies chunks.

    Arguments:
        items: the chunks, in the order in which they are written. The writer waits for the first
            ones: if later ones took the memory, it would wait forever.
        reserve: reserves memory for a chunk, and may wait; called for one chunk at a time.
        keep: copies a chunk to its place.
        stopped: whether the remaining copies are not needed.
    """

    def __init__(
        self,
        items: Sequence[WriteItem],
        reserve: Callable[[WriteItem], PlaceT],
        keep: Callable[[WriteItem, PlaceT], None],
        stopped: Callable[[], bool] = lambda: False,
    ) -> None:
        self._reserve, self._keep, self._stopped = reserve, keep, stopped
        self._rest, self._order = iter(items), threading.Lock()
        small = sum(item.nbytes for item in items) < _ALONE_BYTES
        self._most = 1 if small else min(_THREADS, os.cpu_count() or 1)
        self._helpers, self._errors = list[threading.Thread](), list[BaseException]()
        self._starting, self._over = threading.Lock(), False

    def run(self, *, alone: bool = False) -> None:
        """Copies all.

        Arguments:
            alone: whether to copy on this thread only, until `hurry` is called.

        Raises: the first error of `reserve` or `keep`; the rest is not copied then.
        """
        if not alone:
            self._start(self._most - 1, "unickpt copy")
        self._copy_some()
        with self._starting:
            self._over = True
        for helper in self._helpers:
            helper.join()
        if self._errors:
            raise self._errors[0]

    def hurry(self) -> None:
        """Speeds up a waited-for copy: threads of the caller's priority help the thread of `run`,
        which has lower priority and might get no core."""
        self._start(self._most, "unickpt stage")

    def _start(self, count: int, name: str) -> None:
        with self._starting:
            while not self._over and len(self._helpers) < count:
                helper = threading.Thread(target=self._copy_some, name=name)
                helper.start()
                self._helpers.append(helper)

    def _copy_some(self) -> None:
        try:
            while not self._errors and not self._stopped():
                with self._order:
                    item = next(self._rest, None)
                    if item is None:
                        return
                    place = self._reserve(item)
                self._keep(item, place)
        except BaseException as error:
            self._errors.append(error)


class Changes:
    """The chunks that one save copies in the background, and that must not change before.

    Arguments:
        direct: reads chunks in place.
    """

    def __init__(self, direct: DirectSource) -> None:
        self._direct, self._settling = direct, threading.Lock()
        self._watched: dict[Fragment, WriteItem] = {}
        self._digests: dict[WriteItem, int] = {}

    def watch(self, items: Sequence[WriteItem]) -> None:
        """Adds chunks that must not change from now on until they are copied."""
        self._watched = {i.fragment: i for i in items if i.fragment.memory.mutable}

    def remember(self, items: Sequence[WriteItem]) -> None:
        """Hashes chunks whose copies are deferred, so that any change is detected.

        A user who requests lazy copies knows what must not change. These were not requested.
        """

        def hash_one(item: WriteItem, _: None) -> None:
            staged = self._direct.fetch(item)
            self._digests[item] = chunk_encoding.digest(staged.data)
            staged.release()

        OrderedCopy(items, lambda item: None, hash_one).run()

    @contextmanager
    def noticed(self, item: WriteItem) -> Iterator[Callable[[Array], None]]:
        """Checks that a chunk is the same before and after it is copied.

        Yields:
            A function to call with the copy.

        Raises:
            StateChanged: names the array.
        """
        lazy = item.fragment in self._watched
        try:
            if lazy:
                self.check(item)
            try:
                yield lambda copied: self._compare(item, copied)
            except _Differs:
                raise self._error(item) from None
            except StateChanged as error:
                raise naming(error, item) from None
            if lazy:  # it may have changed temporarily, as for evaluating averaged weights
                self.check(item)
        except BaseException as error:
            self.check(item)  # a clearer error than that of reading a deleted array
            error.add_note(f"unickpt: while array {item.entry.name!r} was being staged")
            raise

    def settle(self) -> None:
        """Checks all of them once more; later changes are allowed.

        Raises:
            StateChanged: names the array.
        """
        with self._settling:
            for item in self._watched.values():
                self.check(item)
            self._watched = {}

    def check(self, item: WriteItem) -> None:
        """Checks one chunk, as far as its framework detects changes, and by a sample.

        Raises:
            StateChanged: it was changed.
        """
        memory = item.fragment.memory
        if memory.changed is not None and memory.changed():
            raise self._error(item)

    def forget(self) -> None:
        """The save has ended."""
        self._watched, self._digests = {}, {}

    def _compare(self, item: WriteItem, copied: Array) -> None:
        if item in self._digests and self._digests[item] != chunk_encoding.digest(copied):
            raise _Differs

    def _error(self, item: WriteItem) -> StateChanged:
        why = ""
        if item in self._digests:
            why = (
                " Its copy was put off, because it did not fit into SaveOptions.budget_bytes: "
                "allow more."
            )
        return StateChanged(
            f"array {item.entry.name!r} was changed in place, donated or deleted after the "
            "save was requested and before it was staged. Call PendingSave.wait_staged() "
            "before the update (Checkpointer(optimizers=[...]) does that automatically), or "
            f'save with SaveOptions(staging="copy"). The checkpoint was not saved.{why}'
        )


class _Differs(Exception):
    """A copy differs from the data at the time of the call."""
