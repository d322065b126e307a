"""The protocol of formats into which checkpoints are exported.

A format plans the bytes of its files; the export reads the arrays and writes the files, in any
order and by any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, runtime_checkable

from unickpt.arrays.box import Box
from unickpt.format.index import Index

Ending = Callable[[Sequence[int]], Mapping[int, bytes]]
"""Bytes of a file, by their offsets, from the CRC-32 of each of its `data`."""


@dataclass(frozen=True)
class Data:
    """Consecutive elements of an array in a file, in row-major order, little-endian.

    Arguments:
        offset: of the first one in the file, in bytes.
        array: its name in the index that was planned.
        box: which elements.
    """

    offset: int
    array: str
    box: Box


@dataclass(frozen=True)
class PlannedFile:
    """A file of a checkpoint; bytes not given here are zero.

    Arguments:
        name: below the checkpoint's location.
        size: in bytes.
        texts: bytes that are already known, by their offsets.
        data: elements of arrays, by ascending offsets.
        ending: makes bytes, by their offsets, from the CRC-32 of each of `data`; None if the format
            needs none.
        last: whether it makes the checkpoint complete: such files are written after all others.
        copied: instead of all this, the path of a local file to copy.
    """

    name: str
    size: int
    texts: Mapping[int, bytes] = field(default_factory=dict)
    data: tuple[Data, ...] = ()
    ending: Ending | None = None
    last: bool = False
    copied: str | None = None


def text_file(name: str, text: str | bytes, *, last: bool = False) -> PlannedFile:
    """A file whose bytes are known."""
    data = text.encode() if isinstance(text, str) else text
    return PlannedFile(name, len(data), {0: data}, last=last)


@dataclass(frozen=True)
class Plan:
    """All files of a checkpoint.

    Arguments:
        files: in the order in which they are written, except that `last` ones come last.
        arrays: the name of each array of the index, and of each of its aliases, in the new
            checkpoint, as unickpt's reader of the format has it; without those that the format
            leaves out.
        values: likewise for plain values.
        casts: the dtypes to which arrays are cast on request, by the names of the index.
        others: whether the new checkpoint has further leaves, such as those of a template.
        made: plain values that the index does not have, by their names in the new checkpoint.
        parts: plans of its parts, if it consists of several checkpoints: by the names of their
            files, or "" for the one that a reader finds in the folder. They describe the contents,
            instead of this plan; all files are in this one.
    """

    files: tuple[PlannedFile, ...]
    arrays: Mapping[str, str]
    values: Mapping[str, str] = field(default_factory=dict)
    casts: Mapping[str, str] = field(default_factory=dict)
    others: bool = False
    made: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, Plan] = field(default_factory=dict)


@dataclass(frozen=True)
class OfEachProcess:
    """The values of a leaf that differs by process, of all processes; its arrays are NumPy's."""

    values: tuple[Any, ...]


class Writer(Protocol):
    """A format, with the options of one export.

    One that can hold leaves that differ by process has `per_process = True`: it finds them in
    `index.values`, as `OfEachProcess`.
    """

    suffixes: ClassVar[Sequence[str]]
    """The suffixes of a destination that is a single file; empty if it is always a folder."""

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        """Plans all files; equal on all processes.

        Arguments:
            index: describes the leaves to write; its layouts and chunks are those of the source.
            most_bytes: of a file, if the format can split its contents.
            file: the name of the single file to write, in an existing folder; None for a folder.

        Raises:
            UnsupportedLeaf: the format cannot hold a leaf; names it, and says what to do.
        """


@runtime_checkable
class NeedsElements(Protocol):
    """A writer that needs the elements of some small arrays to plan its files, such as those within
    a pickle."""

    def needed(self, index: Index) -> Collection[str]:
        """The names of these arrays."""

    def with_elements(self, elements: Mapping[str, Any]) -> Writer:
        """The same writer, which knows them.

        Arguments:
            elements: NumPy arrays, by name.
        """


@runtime_checkable
class LeavesOut(Protocol):
    """A writer of a format that has no place for some leaves of its checkpoints.
    The export's report names them."""

    def left_out(self, index: Index) -> Collection[str]:
        """The names of these leaves, which `plan` leaves out."""
