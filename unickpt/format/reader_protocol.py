"""The protocol that every readable format fulfils.

`load`, rules, `convert`, `diff`, `verify` and `inspect` know checkpoints only as readers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import tensorstore as ts

from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format.chunk_grid import Part
from unickpt.format.digest_table import Table
from unickpt.format.index import ArrayEntry, Index
from unickpt.quoting import shortened
from unickpt.storage.locations import Location

if TYPE_CHECKING:
    from unickpt.format.timing import Timing
    from unickpt.frameworks.sections import StoredValue

T = TypeVar("T")
U = TypeVar("U")

# Arrays may always take this many bytes, however few are stored.
_ALWAYS = 1 << 30
_SHOWN = 3  # of the largest arrays, in a message


ChunkId = tuple[ArrayEntry, Part, int]
"""A chunk: the array, its part, and the chunk's row-major number in the part."""


class Request(NamedTuple):
    """A chunk to read, or a box of one.

    Arguments:
        entry: the array.
        part: the part of the array.
        number: the chunk's row-major number in the part.
        out: contiguous memory of the array's dtype, and of the shape of the chunk or box.
        digest: of the chunk, with which the stored bytes are compared; None to read them only.
        box: the part of the chunk to read, in the array's coordinates, if `Reader.reads_boxes`
            allows it; None for all of it.
    """

    entry: ArrayEntry
    part: Part
    number: int
    out: Array
    digest: int | None = None
    box: Box | None = None


class ParallelMap(Protocol):
    """Calls a function with each item, on several threads; returns the results in order."""

    def __call__(self, function: Callable[[T], U], items: Sequence[T]) -> Iterable[U]: ...


class BlockType(NamedTuple):
    """The meaning of the bytes of an array for which NumPy has no dtype.

    Arguments:
        name: of the type in its library.
        shape: of the array that is stored as blocks.
    """

    name: str
    shape: tuple[int, ...]


class Reader(Protocol):
    """An opened checkpoint of one format. Its methods are called from several threads.

    A format derives its reader from this class. It needs the attributes and `read`; the methods
    with a body implement a format without digests, values that differ by process, or protection
    against a save that replaces the checkpoint.

    The arrays of the index describe the place of their elements: an array consists of parts, which
    are boxes of it (`chunk_grid.parts`), and a part of chunks. A chunk is read at once. A format
    whose files have no chunks chooses a chunk extent, and reads a range of a file for each.
    """

    format: str
    """The name of the format."""
    version: str
    """The version of the format; empty if it has none."""
    location: Location
    """Its location."""
    index: Index
    """Its arrays, plain values and structure."""
    lacks: str = ""
    """State of a training run that the format lacks, why, and what to do; for errors."""
    most_per_byte: int = 64
    """The largest plausible number of array bytes per stored byte: some arrays repeat or share
    elements, and others are compressed, or left out because they are constant."""
    has_wide_checksums: bool = False
    """Whether the format keeps checksums of more than a chunk, which `checking` compares."""
    beside: Sequence[str] = ()
    """Files in the same folder that look like a checkpoint, but are not part of it."""
    blocks: Mapping[str, BlockType] = MappingProxyType({})
    """The arrays whose elements are the bytes of blocks, by name, with their display."""
    under: str = ""
    """The removed prefix of all names, if this is a part of a checkpoint."""

    @property
    def identity(self) -> str:
        """A text that differs for another save, or another part of one. A checkpoint of another
        system has no attempt: its location must do."""
        index = self.index
        return f"{index.attempt or self.location} {index.created} {self.under}"

    @property
    def label(self) -> str:
        """Its location, and the part of it, for messages."""
        return f"{self.location}{f', under {self.under!r}' if self.under else ''}"

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        """Reads chunks, or boxes of them, into memory: many at once, because that is less work for
        each, and lets a storage serve several together.

        Arguments:
            requests: the chunks, and their destinations.

        Returns:
            The positions of those that do not match their digests.

        Raises:
            CheckpointCorrupt: one is missing or cannot be decoded.
            StorageError: the storage failed.
        """

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        """Whether single boxes of an array's chunks can be read. The digest of the chunk cannot be
        checked then."""
        return False

    def first_digests(self, entries: Sequence[ArrayEntry]) -> Table | None:
        """The row of `digests_of` of the first chunk of each of some arrays; None if the format
        stores none. Less work for each array than `digests_of`.

        Raises:
            CheckpointCorrupt: the digests contradict the arrays.
        """
        tables = [self.digests_of(entry.name) for entry in entries]
        if not tables or any(table is None for table in tables):
            return None
        return np.concatenate([table[:1] for table in tables if table is not None])

    def digests_of(self, name: str) -> Table | None:
        """The digests of an array's chunks, in the order of its parts; None if the format stores
        none, so that the data cannot be verified."""
        return None

    def timing(self) -> Timing | None:
        """How long the save took, by process and phase; None if that was not stored.

        Raises:
            CheckpointCorrupt: it is damaged.
        """
        return None

    def check_backed(self, entry: ArrayEntry) -> None:
        """Checks that enough data is stored to justify the memory that an array's shape needs.

        Raises:
            CheckpointCorrupt: the data contradicts the shape.
        """
        return

    def stored_bytes(self) -> int | None:
        """An upper bound of the bytes that store all arrays; None if unknown."""
        return None

    def check_total(self, entries: Collection[ArrayEntry]) -> None:
        """Checks that enough data is stored to justify the memory, or the time, that arrays need
        together: each one alone may be justified by data that all of them share.

        Arguments:
            entries: the arrays to make, which rules may have changed.

        Raises:
            CheckpointCorrupt: names the largest.
        """
        nbytes = sum(entry.nbytes for entry in entries)
        if nbytes <= _ALWAYS:
            return
        stored = self.stored_bytes()
        if stored is None or nbytes <= self.most_per_byte * stored:
            return
        largest = heapq.nlargest(_SHOWN, entries, key=attrgetter("nbytes"))
        for entry in largest:
            if entry.name in self.index.arrays:
                self.check_backed(self.index.arrays[entry.name])  # says more, if it alone is wrong
        shown = ", ".join(f"{shortened(e.name, 100)!r} ({e.dtype_and_shape})" for e in largest)
        raise CheckpointCorrupt(
            f"{self.location}: its {len(entries)} arrays would take {nbytes} bytes, but only "
            f"{stored} bytes are stored for all of them; the largest are {shown}. If that is "
            "correct, load less at once with `only`, or load into your own memory with `like`"
        )

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        """The encoded values of a per-process leaf, each read and verified when it is used.

        Arguments:
            name: of the leaf.
            processes: the processes whose values to read; all by default.

        """
        raise KeyError(name)

    def damaged(self, reason: str) -> Exception:
        """The error for bad stored data: damage, or that the checkpoint was replaced since."""
        return CheckpointCorrupt(f"{self.location}: {reason}")

    def check_unchanged(self) -> None:
        """Checks that this is still the checkpoint at its path, if the format can tell.

        Raises:
            CheckpointReplaced: it is not.
        """
        return

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        """Checks all that is stored, except chunks.

        Arguments:
            run: does work on several threads.

        Returns:
            For each damage the name of the leaf, empty if none is at fault, and what is wrong.
        """
        return iter(())

    def checking(self) -> Reader:
        """This checkpoint for one piece of work that reads most of it: bytes with checksums that
        are no digests are compared with them, as soon as all bytes of a checksum are read."""
        return self

    def file_damage(self) -> Iterator[str]:
        """The damage of files that are restored while they are read; as `Restorer.damage`."""
        return iter(())

    def check_rest(self, index: int = 0, count: int = 1) -> Iterator[tuple[str, str]]:
        """For a reader of `checking`, after the work: reads the remaining bytes of checksums of
        which some bytes were read, and compares them.

        Arguments:
            index, count: the index of this process, and how many did the work.

        Returns:
            As `check_structure`.
        """
        return iter(())

    def unchecked(self) -> Sequence[str]:
        """The arrays without digests, in which damage goes unnoticed; known once they are read."""
        return [name for name in self.index.arrays if self.digests_of(name) is None]

    def part_url(self, part: Part) -> str:
        """The URL with which TensorStore opens a part; empty if it cannot."""
        return ""

    def open_part(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        """A part as a TensorStore.

        Raises:
            UnsupportedFormat: TensorStore cannot read this format.
        """
        raise UnsupportedFormat(
            f"{self.location}: TensorStore cannot open the arrays of a checkpoint of the format "
            f"{self.format!r}; read them by slicing"
        )
