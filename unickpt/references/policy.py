"""The seam for chunks that a save need not write, because an earlier checkpoint has them.

A save refers to values that are stored already: in files that it links, or in a checkpoint beside
it. Which ones, and what is written instead, a `ReferencePolicy` decides. What may be referred to
and how it is stored is part of the format (docs/format.md), and so of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.protocol import ArraySource
from unickpt.references.chunks import Compared, ValuePlaces, WriteItem
from unickpt.storage.locations import Location
from unickpt.storage.paths import PathLike

if TYPE_CHECKING:
    from unickpt.format.encoders import SaveEncoder
    from unickpt.write_filter import Selection


@dataclass(frozen=True)
class DescribedSave:
    """What a save knows in the call, when every leaf is described.

    Arguments:
        url: where the checkpoint will be.
        attempt: the name that the save will have in the index.
        entries: the arrays.
        sources: what this process holds of them.
        units: the names of arrays with units; the step before may have older ones.
        arrays: the arrays as the program has them, by name.
        current: some of them as they are now, by name.
    """

    url: str
    attempt: str
    entries: Mapping[str, ArrayEntry]
    sources: Mapping[str, ArraySource]
    units: Collection[str]
    arrays: Callable[[], Mapping[str, Any]]
    current: Callable[[Sequence[str]], Mapping[str, ArraySource]]


class Skipped(Protocol):
    """What a save neither stages nor reads, because it is known to be as in the base."""

    def skips(self, name: str, box: Box) -> bool:
        """Whether nothing of a box that consists of chunks is staged."""

    def skips_chunk(self, name: str, box: Box) -> bool:
        """Whether a chunk is not staged."""


@dataclass(frozen=True)
class WritingSave:
    """What a save knows when it is about to write, in one process.

    Arguments:
        location: of the new checkpoint.
        folder: in which this process writes.
        base: the checkpoint whose equal chunks are taken; None if only what this save leaves out
            is taken.
        is_given: whether the program has named the base, so that it must be there.
        compression: `SaveOptions.compression`.
        selection: which units are written, if some may be left out.
        skipped: what is neither staged nor read.
        budget_bytes: host memory to compare with.
        fsync: whether files are flushed to disk.
        encoder: chooses how arrays are stored, if that is not decided before. It is to follow each
            base, whether anything of that is used or not; None where one cannot be read.
    """

    location: Location
    folder: Location
    base: PathLike | None
    is_given: bool
    compression: str | None
    selection: Selection | None
    skipped: Any
    budget_bytes: int
    fsync: bool
    encoder: SaveEncoder | None


class ReferencePolicy(Protocol):
    """Decides what saves refer to; what the door `references` leads to is called with
    `SaveOptions.reuse`, `changed` and `kept_cost`."""

    name: str
    """By which records and the index have its notes."""

    def skipped(self, save: DescribedSave, before: Any) -> tuple[Skipped | None, Any]:
        """What a save need not stage. Called on each process, in the call that saves.

        Arguments:
            save: what is known of it.
            before: what this method returned for the save that is the base; None if nothing is
                known of it, so that nothing may be skipped.

        Returns:
            Also what has to be known of this save for the next one.

        Raises:
            ValueError: the options do not fit the state.
            StateChanged: they are wrong about an array.
        """

    def open(self, save: WritingSave) -> tuple[ReferenceSource | None, Selection | None]:
        """Opens the base of a save. Called on each process, on the thread that saves.

        Returns:
            None if nothing can be referred to; and the units that the save writes, of which others
            may be in another of `Selection.earlier` than was expected.

        Raises:
            CheckpointNotFound, InvalidPath: the base that the program named is not there.
            StorageError: it is not there, but has what this save does not write.
        """

    def merge(self, notes: Mapping[int, Any], statistics: Sequence[Mapping[str, float]]) -> Any:
        """What the index says on behalf of this policy, below its name. Pure.

        Arguments:
            notes: `ReferenceSource.note` by process, where there is one.
            statistics: what each process has written (`commit.messages.Record`).
        """


class Claim(Protocol):
    """How a process saves some chunks.

    Arguments:
        written: those that are written, in this order, unless they are equal in the base.
        reused: those that are taken from the base, whatever they hold.
        notes: what codecs say about arrays of which chunks are taken: number of the array, codec,
            note.
    """

    written: Sequence[WriteItem]
    reused: Sequence[WriteItem]
    notes: Sequence[tuple[int, str, Any]]

    def take(self, places: ValuePlaces, first: int) -> Mapping[int, WriteItem]:
        """Takes `reused`; called while the others are written.

        Arguments:
            places: where it is noted, of `written` and `reused`.
            first: the row of the first of `reused`.

        Returns:
            Those that have to be written after all, by their rows.
        """


class ReferenceSource(Protocol):
    """An earlier checkpoint, for one process of one save. Several threads may call `compare`."""

    compares: bool
    """Whether chunks that are written are compared; else only what the save leaves out is taken."""
    adds: bool
    """Whether values are added to chunks that are taken."""
    note: Any
    """For `ReferencePolicy.merge`; None for nothing."""

    @property
    def nbytes(self) -> int:
        """Logical bytes of what was taken, less those of what was added to it."""

    @property
    def kept_bytes(self) -> int:
        """The bytes of all files that stay alive for what was taken."""

    def claim(self, items: Sequence[WriteItem], *, in_order: bool) -> Claim:
        """Decides how some chunks are saved.

        Arguments:
            items: the chunks.
            in_order: whether those that are written must stay in their order.
        """

    def compare(self, item: WriteItem, data: Array) -> Compared:
        """Takes a chunk, or what differs little from it, if the base has that.

        Arguments:
            item: the chunk.
            data: its elements, or the bytes that its codec stores if that is none of Zarr's.

        Raises:
            StateChanged: it is not what the program said of it.
        """

    def most_at_once(self, items: Sequence[WriteItem]) -> int | None:
        """How many of these chunks the memory allows to compare at the same time; None if comparing
        takes none."""

    def read(self, item: WriteItem) -> Array:
        """A chunk that was borrowed, and has to be written; as it is stored if its codec is none of
        Zarr's.

        Raises:
            StorageError: the base lacks it, or it cannot be read, or is damaged.
        """

    def digest(self, item: WriteItem) -> int:
        """The digest of a chunk as the base has it. Raises as `read`."""
