"""Chunk sources: where a writer gets its chunks from, and when it releases them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from unickpt.arrays.dtypes import Array
from unickpt.arrays.host_memory import HostBuffers
from unickpt.errors import StateChanged
from unickpt.format import codec
from unickpt.frameworks.protocol import stage
from unickpt.reuse.base import Base
from unickpt.saving.write_plan import WriteItem


@dataclass(slots=True, eq=False)  # not frozen: a save makes one for each chunk, see `protocol`
class StagedChunk:
    """A chunk in host memory, unchanged until `release`; never modified.

    Arguments:
        data: the chunk, contiguous and in native byte order.
        nbytes: memory that this holds, beyond the state itself and what was counted before.
        release: releases the memory.
    """

    data: Array
    nbytes: int
    release: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Staged:
    """What was staged before it was asked for; see `SaveReport`."""

    staged_bytes: int = 0
    drained_bytes: int = 0
    spilled_bytes: int = 0
    budget_wait_s: float = 0.0


class ChunkSource(Protocol):
    """Where a writer gets its chunks from.

    `behind` says whether it is written in the background of a training loop.
    """

    behind: bool

    @property
    def staged(self) -> Staged: ...

    def ready(self, items: Sequence[WriteItem]) -> bool:
        """Whether `fetch` returns without waiting."""

    def fetch(self, item: WriteItem) -> StagedChunk:
        """Waits until a chunk is staged, and returns it."""

    def digest(self, item: WriteItem) -> int:
        """The digest of a chunk, which can still be fetched afterwards."""


class DirectSource:
    """Stages chunks when they are written, from memory that does not change.

    Arguments:
        budget_bytes: bytes of memory to keep for copies.
    """

    behind = False
    staged = Staged()

    def __init__(self, budget_bytes: int) -> None:
        self._buffers = HostBuffers(budget_bytes)

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return True

    def fetch(self, item: WriteItem) -> StagedChunk:
        taken: list[Array] = []

        def take(nbytes: int) -> Array:
            taken.append(self._buffers.take(nbytes))
            return taken[0]

        try:
            data = stage(item.fragment, item.box, item.dtype, take)
        except StateChanged as error:
            raise naming(error, item) from None
        # Kept for every chunk until its commit: as few objects as possible, because Python's
        # garbage collector visits each again and again.
        if not taken:
            return StagedChunk(data, 0, _nothing_to_release)
        return StagedChunk(data, data.nbytes, partial(self._buffers.give, taken[0]))

    def digest(self, item: WriteItem) -> int:
        staged = self.fetch(item)
        try:
            return codec.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()


def _nothing_to_release() -> None:
    """For a chunk that is a view of the state itself, or memory of its own."""


class BorrowingSource:
    """Takes some chunks from the base of a save, to write them again.

    Arguments:
        source: provides the others.
        base: has those that are borrowed.
    """

    def __init__(self, source: ChunkSource, base: Base) -> None:
        self._source, self._base = source, base
        self.behind = source.behind

    @property
    def staged(self) -> Staged:
        return self._source.staged

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return self._source.ready([item for item in items if not item.borrowed])

    def fetch(self, item: WriteItem) -> StagedChunk:
        if not item.borrowed:
            return self._source.fetch(item)
        data = self._base.read(item.entry, item.part, item.number)
        return StagedChunk(data, data.nbytes, _nothing_to_release)

    def digest(self, item: WriteItem) -> int:
        if not item.borrowed:
            return self._source.digest(item)
        return self._base.digest(item.entry, item.part, item.number)


def naming(error: StateChanged, item: WriteItem) -> StateChanged:
    """The error that names the array if its memory is gone when a chunk is read."""
    return StateChanged(
        f"array {item.entry.name!r} {item.box}: {error} after the save was requested and before "
        "it was read. The checkpoint was not saved. Call PendingSave.wait_staged() before that "
        'change, or save with SaveOptions(staging="copy")'
    )
