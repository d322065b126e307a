"""Supply: where a writer gets its chunks from, and when it may forget them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from unickpt import chunks
from unickpt.adapt import Array
from unickpt.errors import StateChanged
from unickpt.share import ChunkJob
from unickpt.stage import HostBuffers, stage


@dataclass(frozen=True)
class Staged:
    """A chunk in host memory, which nobody changes before `release`.

    Arguments:
        data: the chunk, contiguous and in native byte order.
        nbytes: memory that this holds, beyond the state itself and beyond what was told of before.
        release: takes the memory back.
    """

    data: Array
    nbytes: int
    release: Callable[[], None]


class Supply(Protocol):
    """Where a writer gets its chunks from.

    `behind` tells whether it is written behind a training loop.
    """

    behind: bool

    def ready(self, jobs: Sequence[ChunkJob]) -> bool:
        """Whether `fetch` would not wait."""

    def fetch(self, job: ChunkJob) -> Staged:
        """A chunk, as soon as it is staged."""

    def digest(self, job: ChunkJob) -> int:
        """The digest of a chunk that may still be fetched afterwards."""


class Direct:
    """Stages chunks at the moment when they are written, from memory that stays unchanged.

    Arguments:
        budget_bytes: how much memory to keep for copies.
    """

    behind = False

    def __init__(self, budget_bytes: int) -> None:
        self._buffers = HostBuffers(budget_bytes)

    def ready(self, jobs: Sequence[ChunkJob]) -> bool:
        return True

    def fetch(self, job: ChunkJob) -> Staged:
        taken: list[Array] = []

        def take(nbytes: int) -> Array:
            taken.append(self._buffers.take(nbytes))
            return taken[0]

        def release() -> None:
            for buffer in taken:
                self._buffers.give(buffer)

        with naming(job):
            data = stage(job.fragment, job.box, job.dtype, take)
        return Staged(data, data.nbytes if taken else 0, release)

    def digest(self, job: ChunkJob) -> int:
        staged = self.fetch(job)
        try:
            return chunks.digest(staged.data)
        finally:
            staged.release()


@contextmanager
def naming(job: ChunkJob) -> Iterator[None]:
    """Names the array whose memory turns out to be gone while a chunk of it is read."""
    try:
        yield
    except StateChanged as error:
        raise StateChanged(
            f"array {job.entry.name!r} {job.box}: {error} after the save was asked for and before "
            "it was read. Nothing of it was saved. Call PendingSave.wait_staged() before that, or "
            'save with SaveOptions(staging="copy")'
        ) from None
