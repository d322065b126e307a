"""The interface for codecs that are chosen during a save, by the content of its chunks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from unickpt.arrays.dtypes import Array
from unickpt.format.chunk_encoding import Encoded
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Encoding, Index

Column = np.ndarray[Any, Any]
Settled = tuple[Encoding | None, Column]
"""The codec of an array, and the number of bytes at the start of each of its chunks that do not
belong to it."""


class SaveEncoder(Protocol):
    """Encodes the chunks of one save in one process. Several threads call `encode`."""

    saved_bytes: int
    """The number of bytes saved."""

    def is_undecided(self, entry: ArrayEntry) -> bool:
        """Whether an array of the save may have the codec in its entry, or none."""

    def follow(self, before: Index | None) -> None:
        """Continues with the choices of a base, whose chunks may become chunks of this save.

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
        """A chunk as it is stored. Arguments as for `look`, and the part of the array."""

    def note(self, entries: Sequence[ArrayEntry]) -> Any:
        """The facts about this process from which process 0 decides how arrays are stored.

        Arguments:
            entries: all arrays of this process, in their order.
        """


class EncodingPolicy(Protocol):
    """Chooses how arrays are stored from what is saved. The target of a door of the group
    `encodings` makes one for a save; its name is the value of `SaveOptions.compression`."""

    name: str
    """The name of its notes in records."""

    def encoding(self, dtype: str, nbytes: int, chunk_bytes: int) -> Encoding | None:
        """The codec that an array may have; None to store it unencoded.

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
        """The codec of each undecided array for which it differs from that in its entry. Pure.

        Arguments:
            arrays: of all processes.
            stored: for an array, the number of stored bytes of each chunk, and the chunks that
                another checkpoint has.
            notes: of each process the arrays that it has, and `SaveEncoder.note`.

        Raises:
            CoverageError: processes have stored an array in different ways.
        """
