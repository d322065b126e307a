"""The chunks that one save keeps: copies, or references to memory that does not change."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from unickpt.arrays.dtypes import Array
from unickpt.errors import CoverageError
from unickpt.format import codec
from unickpt.frameworks.memory_budget import stage
from unickpt.references.chunks import WriteItem
from unickpt.saving.snapshot_policy import Changes
from unickpt.saving.staging_memory import ChunkKey, CopyMemory, HostMemoryPool, key
from unickpt.saving.task import SaveEvent
from unickpt.saving.write_plan import DirectSource, Staged, StagedChunk
from unickpt.threads import Events


class KeptChunks:
    """The chunks that one save keeps; a `ChunkSource`.

    Arguments:
        area: memory for copies.
        memory: this save's share of it.
        changes: the chunks that must not change before they are copied.
        direct: reads chunks in place.
        events: of the save.
    """

    background = True

    def __init__(
        self,
        area: HostMemoryPool,
        memory: CopyMemory,
        changes: Changes,
        direct: DirectSource,
        events: Events[SaveEvent],
    ) -> None:
        self._area, self._memory, self._changes = area, memory, changes
        self._direct, self._events, self._changed = direct, events, events.changed
        self._copies: dict[ChunkKey, StagedChunk] = {}
        self._references: dict[ChunkKey, WriteItem] = {}
        self.error: BaseException | None = None
        """The error because of which not all can be kept."""

    @property
    def staged(self) -> Staged:
        return self._memory.facts

    def refer(self, items: Sequence[WriteItem]) -> None:
        """Has these chunks read in place; nothing changes them before the save has ended."""
        with self._changed:
            self._references |= {key(item): item for item in items}
            self._changed.notify_all()

    def refers(self, item: WriteItem) -> bool:
        """Whether a chunk is read in place."""
        return key(item) in self._references

    def fail(self, error: BaseException) -> None:
        """Fails the save with an error, and wakes threads that wait for chunks."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def check(self) -> None:
        """Raises the error, if there is one."""
        if self.error is not None:
            raise self.error

    def clear(self) -> None:
        """Releases the copies, and drops all references."""
        for chunk_key in list(self._copies):
            self._release(chunk_key)
        self._references = {}

    def copy(self, item: WriteItem, _: None) -> None:
        """Copies a chunk into reserved memory."""
        copied = self._copied(item)
        with self._changed:
            self._copies[key(item)] = copied
            self._changed.notify_all()
        self._memory.count(copied=item.nbytes)

    def _copied(self, item: WriteItem) -> StagedChunk:
        """A copy in reserved memory."""
        memory, buffers = item.fragment.memory, list[Array]()

        def take(nbytes: int) -> Array:
            buffers.append(self._area.take(nbytes, self._memory.budget, memory))
            return buffers[0]

        def release() -> None:
            for buffer in buffers:
                self._area.give(buffer, memory)
            buffers.clear()
            self._area.unreserve(item.nbytes)

        try:
            with self._changes.noticed(item) as compare:
                data = stage(item.fragment, item.box, item.dtype, take, copied=not memory.on_device)
                compare(data)
        except BaseException:
            release()
            raise
        return StagedChunk(data, 0, release)

    def ready(self, items: Sequence[WriteItem]) -> bool:
        with self._changed:
            return self.error is not None or all(
                key(item) in self._copies or key(item) in self._references for item in items
            )

    def fetch(self, item: WriteItem) -> StagedChunk:
        kept_chunk = self._find(item)
        if isinstance(kept_chunk, WriteItem):
            return self._fetch_reference(kept_chunk)
        return replace(kept_chunk, release=partial(self._release, key(item)))

    def digest(self, item: WriteItem) -> int:
        kept_chunk = self._find(item)
        if isinstance(kept_chunk, StagedChunk):
            return codec.digest_as_stored(item.entry, kept_chunk.data)
        staged = self._fetch_reference(kept_chunk)
        try:
            return codec.digest_as_stored(item.entry, staged.data)
        finally:
            staged.release()

    def _find(self, item: WriteItem) -> StagedChunk | WriteItem:
        """Waits until a chunk is kept: as a copy, or where this item reads it."""
        chunk_key = key(item)
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    chunk_key in self._copies
                    or chunk_key in self._references
                    or self.error is not None
                    or SaveEvent.STAGED in self._events
                )
            )
            kept_chunk = self._references.get(chunk_key) or self._copies.get(chunk_key)
            if kept_chunk is not None:
                return kept_chunk
            self.check()
        raise CoverageError(
            f"array {item.entry.name!r} {item.box}: by its layout another process holds this "
            "chunk, but that process lacks the array in its tree, and this one staged only its own "
            "share. "
            "Give all processes of a mesh the same arrays, or use unickpt.save, without staging"
        )

    def _fetch_reference(self, item: WriteItem) -> StagedChunk:
        staged = self._direct.fetch(item)
        if not item.fragment.memory.mutable:
            return staged

        def release() -> None:
            staged.release()
            self._changes.check(item)  # in case the caller did not wait

        return replace(staged, release=release)

    def _release(self, chunk_key: ChunkKey) -> None:
        with self._changed:
            staged = self._copies.pop(chunk_key, None)
        if staged is not None:
            staged.release()
