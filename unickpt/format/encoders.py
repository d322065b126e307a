"""The seam for codecs that are chosen while a save writes, by what its chunks hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_grid import Part
from unickpt.format.codec import Encoded
from unickpt.format.index import ArrayEntry, Encoding, Index

Column = np.ndarray[Any, Any]
Settled = tuple[Encoding | None, Column]
"""How an array is stored, and how many bytes at the start of each of its chunks are no part of
it."""


class SaveEncoder(Protocol):
    """Encodes the chunks of one save in one process. Several threads call `encode`."""

    saved_bytes: int
    """By how much what was written became smaller."""

    def is_undecided(self, entry: ArrayEntry) -> bool:
        """Whether an array of the save may have the codec in its entry, or none."""

    def follow(self, before: Index | None) -> None:
        """Goes on with what a base chose, whose chunks may become chunks of this save.

        Arguments:
            before: its index; None if it cannot be read here, though perhaps by other processes.
        """

    def look(self, number: int, entry: ArrayEntry, chunk: Array) -> None:
        """Called with each chunk before it is encoded, on one thread, in their order.

        Arguments:
            number: of the array.
            entry: the array; one that is undecided.
            chunk: the elements.
        """

    def encode(self, number: int, entry: ArrayEntry, part: Part, chunk: Array) -> Encoded:
        """A chunk as it is stored. Arguments as of `look`, and the part of the array."""

    def note(self, entries: Sequence[ArrayEntry]) -> Any:
        """What process 0 needs to know of this process to settle how arrays are stored.

        Arguments:
            entries: all arrays of this process, in their order.
        """


class EncodingPolicy(Protocol):
    """Chooses by what is saved how arrays are stored; what a door of the group `encodings` leads to
    makes one for a save, by the name that `SaveOptions.compression` has."""

    name: str
    """By which records have its notes."""

    def encoding(self, dtype: str, nbytes: int, chunk_bytes: int) -> Encoding | None:
        """The codec that an array may have; None to store it as it is.

        Arguments:
            dtype: of the array.
            nbytes: of all its elements.
            chunk_bytes: of the elements of a chunk.
        """

    def begin(self, *, alone: bool) -> SaveEncoder:
        """An encoder for this process.

        Arguments:
            alone: whether no other process saves with this one.
        """

    def settle(
        self,
        arrays: Mapping[str, ArrayEntry],
        stored: Callable[[str], tuple[Column, Column]],
        notes: Sequence[tuple[Sequence[str], Any]],
    ) -> Mapping[str, Settled]:
        """How undecided arrays are stored whose codec is not that in the entry. Pure.

        Arguments:
            arrays: of all processes.
            stored: for an array, how many bytes are stored of each chunk, and which chunks another
                checkpoint has.
            notes: of each process the arrays that it has, and `SaveEncoder.note`.

        Raises:
            CoverageError: processes have stored an array in different ways.
        """
