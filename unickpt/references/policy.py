"""The interface for chunks that a save need not write, because an earlier checkpoint has them.

A save references values that are already stored: in files that it links, or in a sibling
checkpoint. A `ReferencePolicy` decides which ones, and what is written instead. The kinds of
references and their storage are part of the format (docs/format.md), and so of the core.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.adapter_protocol import ArraySource
from unickpt.references.value_places import Compared, ValuePlaces, WriteItem
from unickpt.storage.locations import Location
from unickpt.storage.paths import PathLike

if TYPE_CHECKING:
    from unickpt.format.encoder_protocol import SaveEncoder
    from unickpt.write_filter import Selection


@dataclass(frozen=True)
class DescribedSave:
    """The facts of a save in the call, when every leaf is described.

    Arguments:
        url: of the new checkpoint.
        attempt: the name that the save will have in the index.
        entries: the arrays.
        sources: the parts of them that this process holds.
        units: the names of arrays with units; the previous step may have older ones.
        arrays: the program's arrays, by name.
        current: the current data of some of them, by name.
    """

    url: str
    attempt: str
    entries: Mapping[str, ArrayEntry]
    sources: Mapping[str, ArraySource]
    units: Collection[str]
    arrays: Callable[[], Mapping[str, Any]]
    current: Callable[[Sequence[str]], Mapping[str, ArraySource]]


class Skipped(Protocol):
    """The parts that a save neither stages nor reads, because they are known to equal the base."""

    def skips(self, name: str, box: Box) -> bool:
        """Whether no chunk of a box is staged; the box consists of whole chunks."""

    def skips_chunk(self, name: str, box: Box) -> bool:
        """Whether a chunk is not staged."""


@dataclass(frozen=True)
class WritingSave:
    """The facts of a save in one process before it writes.

    Arguments:
        location: of the new checkpoint.
        folder: the folder in which this process writes.
        base: the checkpoint whose equal chunks are reused; None to reuse only the chunks that this
            save leaves out.
        is_given: whether the program has named the base, so that it must exist.
        compression: `SaveOptions.compression`.
        selection: which units are written, if some may be left out.
        skipped: the parts that are neither staged nor read.
        budget_bytes: host memory to compare with.
        fsync: whether files are flushed to disk.
        encoder: chooses how arrays are stored, if that is not decided before. It must follow each
            base, even an unused one, and None in place of one that cannot be read.
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
    """Decides what saves reference. The target of the door `references` is called with
    `SaveOptions.reuse`, `changed` and `kept_cost`."""

    name: str
    """The name of its notes in records and in the index."""

    def skipped(self, save: DescribedSave, before: Any) -> tuple[Skipped | None, Any]:
        """The parts that a save need not stage. Called on each process, in the saving call.

        Arguments:
            save: the facts of the save.
            before: the result of this method for the base's save; None if there is none, so that
                nothing may be skipped.

        Returns:
            Also the facts about this save that the next one needs.

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
            CheckpointNotFound, InvalidPath: the base that the program named does not exist.
            StorageError: it does not exist, but the save needs it for chunks that it does not
                write.
        """

    def merge(self, notes: Mapping[int, Any], statistics: Sequence[Mapping[str, float]]) -> Any:
        """The policy's entry in the index, below its name; None for none. Pure.

        Arguments:
            notes: `ReferenceSource.note` by process, if there is one.
            statistics: of the output of each process (`commit.messages.Record`).
        """


class Claim(Protocol):
    """How a process saves some chunks.

    Arguments:
        written: the chunks to write, in this order, unless they equal those of the base.
        reused: the chunks to reuse from the base, whatever they hold.
        notes: the codecs' notes about arrays with reused chunks: number of the array, codec, note.
    """

    written: Sequence[WriteItem]
    reused: Sequence[WriteItem]
    notes: Sequence[tuple[int, str, Any]]

    def take(self, places: ValuePlaces, first: int) -> Mapping[int, WriteItem]:
        """Reuses `reused`; called while the others are written.

        Arguments:
            places: records the places of `written` and `reused`.
            first: the row of the first of `reused`.

        Returns:
            The chunks that have to be written after all, by their rows.
        """


class ReferenceSource(Protocol):
    """An earlier checkpoint, for one process of one save. Several threads may call `compare`."""

    compares: bool
    """Whether written chunks are compared; else only chunks that the save leaves out are reused."""
    adds: bool
    """Whether values are added to reused chunks."""
    note: Any
    """For `ReferencePolicy.merge`; None for nothing."""

    @property
    def nbytes(self) -> int:
        """Logical bytes of reused chunks, minus those of the values added to them."""

    @property
    def kept_bytes(self) -> int:
        """The bytes of all files that stay alive for reused chunks."""

    def claim(self, items: Sequence[WriteItem], *, in_order: bool) -> Claim:
        """Decides how some chunks are saved.

        Arguments:
            items: the chunks.
            in_order: whether the written ones must keep their order.
        """

    def compare(self, item: WriteItem, data: Array) -> Compared:
        """Reuses a chunk, or one that differs little from it, if the base has it.

        Arguments:
            item: the chunk.
            data: its elements, or the bytes that its codec stores if that is none of Zarr's.

        Raises:
            StateChanged: it contradicts the program's statement about it.
        """

    def most_at_once(self, items: Sequence[WriteItem]) -> int | None:
        """The number of these chunks that memory allows to compare at the same time; None if
        comparing takes none."""

    def read(self, item: WriteItem) -> Array:
        """A borrowed chunk that has to be written; in its stored form if its codec is none of
        Zarr's.

        Raises:
            StorageError: the base lacks it, or it cannot be read, or is damaged.
        """

    def digest(self, item: WriteItem) -> int:
        """The digest of the base's chunk. Raises as `read`."""
