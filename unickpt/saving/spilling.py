"""Copies of chunks in files on a local disk, where memory has no room for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from unickpt.arrays.dtypes import Array
from unickpt.frameworks.host_memory import HostBuffers, stage
from unickpt.saving.snapshot_policy import Changes
from unickpt.saving.write_plan import StagedChunk, WriteItem
from unickpt.storage.spill_files import Slot, SpillFiles


class Spill:
    """Writes chunks to files; may be used by several threads.

    Arguments:
        files: where.
        budget_bytes: bytes of memory to keep for chunks on their way to a file and back.
    """

    def __init__(self, files: SpillFiles, budget_bytes: int) -> None:
        self.files, self.buffers = files, HostBuffers(budget_bytes)

    def write(self, item: WriteItem, slot: Slot, changes: Changes) -> SpilledChunk | None:
        """Copies a chunk to a file; None if that failed.

        Arguments:
            item: the chunk.
            slot: its place; given up if this fails.
            changes: notices if the chunk changes before it is copied.

        Raises: what reading the chunk raises.
        """
        taken: list[Array] = []

        def take(nbytes: int) -> Array:
            taken.append(self.buffers.take(nbytes))
            return taken[0]

        try:
            with changes.noticed(item) as compare:
                data = stage(item.fragment, item.box, item.dtype, take)  # a view where possible
                compare(data)
                written = slot.write(data)
        except BaseException:
            slot.free()
            raise
        finally:
            for buffer in taken:
                self.buffers.give(buffer)
        if not written:
            slot.free()
            return None
        return SpilledChunk(self, item, slot)


@dataclass(frozen=True, slots=True)
class SpilledChunk:
    """A chunk in a file.

    Arguments:
        spill: what wrote it.
        item: which.
        slot: where.
    """

    spill: Spill
    item: WriteItem
    slot: Slot

    def fetch(self, release: Callable[[], None]) -> StagedChunk:
        """Reads it back; `release` is called when that memory is released.

        Raises:
            StorageError: it is lost.
        """
        nbytes = self.slot.nbytes
        buffer = self.spill.buffers.take(nbytes)

        def give() -> None:
            self.spill.buffers.give(buffer)
            release()

        data = buffer[:nbytes].view(self.item.dtype).reshape(self.item.box.shape)
        try:
            self.slot.read(data)
        except BaseException:
            self.spill.buffers.give(buffer)
            raise
        return StagedChunk(data, nbytes, give)

    def release(self) -> None:
        """Gives its place back."""
        self.slot.free()
