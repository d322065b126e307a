"""NumPy's .npz files, read in place where they are not compressed.

Sources: numpy/lib/format.py, and `numpy.savez`. Arrays of objects would need pickles, and are
refused.
"""

from __future__ import annotations

import ast
import math
import struct
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.foreign import loose_files
from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import FileBox, RangeReader, row_major, whole
from unickpt.foreign.files import Files
from unickpt.foreign.loose_files import open_kind
from unickpt.foreign.zip_files import DEFLATED, STORED, Member, ZipFile
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader
from unickpt.quoting import quoted
from unickpt.storage.errors import Failed, reading_failed
from unickpt.trees import tree

_MAGIC = b"\x93NUMPY"
MOST_HEADER = 10_000  # as NumPy's own limit for files that are not trusted
_MOST_RANK = 32
_MOST_EXTENT = 1 << 62
# Deflate makes data at most 1032 times smaller.
_MOST_DEFLATED = 1032


@dataclass(frozen=True)
class NpyHeader:
    """What the head of an array says.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: its extents.
        fortran: whether the first dimension is the innermost.
        big_endian: the byte order of its elements.
        length: bytes before its first element.
    """

    dtype: str
    shape: tuple[int, ...]
    fortran: bool
    big_endian: bool
    length: int

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * dtypes.from_name(self.dtype).itemsize

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        return row_major(self.shape[::-1])[::-1] if self.fortran else row_major(self.shape)


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an .npz file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: there are several, or an array's dtype is one that unickpt lacks.
        StorageError: the storage failed.
    """
    return open_kind(files, loose_files.NPZ, lambda found: NpzReader(files, found.names[0]))


class NpzReader(RangeReader):
    """The arrays of one .npz file.

    Arguments:
        files: the folder.
        name: of the file.
    """

    format = "npz"
    most_per_byte = 1 << 10  # they may be compressed

    def __init__(self, files: Files, name: str) -> None:
        self._zip = ZipFile(files, name)
        self._deflated: dict[str, tuple[Member, NpyHeader]] = {}
        entries, boxes = dict[str, ArrayEntry](), dict[str, tuple[FileBox]]()
        name_of = _nested if _can_nest(self._zip.members.values()) else _flat
        for member in self._zip.members.values():
            array = name_of(member)
            if array in entries:
                raise self._zip.damaged(f"two arrays are called {quoted(array)}")
            header, where = self._header(member)
            entries[array] = whole(array, header.shape, header.dtype, where)
            if member.method == STORED:
                boxes[array] = (where,)
            else:
                # What is compressed is read as a whole.
                entries[array] = ArrayEntry(
                    array,
                    header.shape,
                    header.dtype,
                    tuple(max(1, n) for n in header.shape),
                    entries[array].layout,
                )
                self._deflated[array] = member, header
        node = tree.from_names(entries)
        super().__init__(files, Index(tree.to_json(node), entries), boxes)

    def _header(self, member: Member) -> tuple[NpyHeader, FileBox]:
        where = f"{self._zip.files.location}: {self._zip.name}: {quoted(member.name)}"
        at = 0
        most = min(member.size, MOST_HEADER + 12)
        if member.method == STORED:
            at = self._zip.offset(member)
            data = self._zip.files.read(self._zip.name, at, most)
        elif member.method == DEFLATED and member.size <= _MOST_DEFLATED * member.compressed:
            data = self._inflated(member, most)
        else:
            raise UnsupportedFormat(f"{where} is compressed by the method {member.method}")
        header = parsed(data, where)
        if header.length + header.nbytes != member.size:
            raise CheckpointCorrupt(
                f"{where} has {member.size} bytes, {header.length + header.nbytes} expected"
            )
        box = Box.whole(header.shape)
        begin = at + header.length
        if member.method == STORED:
            self._zip.summed(member, at, data[: header.length])
        return header, FileBox(
            box, FileRange(self._zip.name, begin, header.big_endian), 0, header.strides
        )

    def _inflated(self, member: Member, most: int) -> bytes:
        """The first bytes of a member, at most so many."""
        begin = self._zip.offset(member)
        # The head needs few bytes of what is compressed.
        count = member.compressed if most >= member.size else min(member.compressed, most + 1000)
        data = self._zip.files.read(self._zip.name, begin, count)
        try:
            found = zlib.decompressobj(-15).decompress(data, max(1, most))
        except zlib.error as error:
            raise self._zip.damaged(f"{member.name} cannot be decompressed: {error}") from error
        if most >= member.size:
            self._zip.check(member, found)
        return found

    def check_backed(self, entry: ArrayEntry) -> None:
        if entry.name not in self._deflated:
            super().check_backed(entry)
            return
        member, _ = self._deflated[entry.name]
        if not self._reaches(entry, self._zip.name, member.header + member.compressed):
            raise CheckpointCorrupt(
                f"{self.location}: array {entry.name!r} has {member.compressed} compressed bytes "
                f"in {self._zip.name}, which ends before"
            )

    def unchecked(self) -> Sequence[str]:
        checked = {name for name, (member, _) in self._deflated.items() if member.crc}
        return [name for name in super().unchecked() if name not in checked]

    def read_chunk(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        row: Any,
        out: Array,
        requested: Any = None,
    ) -> bool:
        if entry.name not in self._deflated:
            return super().read_chunk(entry, part, number, row, out, requested)
        member, header = self._deflated[entry.name]
        is_plain = header.strides == row_major(header.shape)
        flat = out.reshape(-1) if is_plain else np.empty(out.size, out.dtype)
        try:
            self._zip.inflate(member, flat.view(np.uint8).data, header.length)
        except Failed as error:
            raise reading_failed(error, f"{self.location}: array {entry.name!r}") from error
        except CheckpointCorrupt as error:
            raise CheckpointCorrupt(f"{self.location}: array {entry.name!r}: {error}") from error
        if not is_plain:
            out[...] = flat.reshape(header.shape[::-1]).T
        if header.big_endian:
            out.byteswap(inplace=True)
        return True


def parsed(data: bytes, where: str) -> NpyHeader:
    """The head of an array, of its first bytes.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it is none, or of a dtype that unickpt lacks.
    """
    if data[:6] != _MAGIC or len(data) < 12 or data[6] not in (1, 2, 3):
        raise UnsupportedFormat(f"{where} is not an array of NumPy")
    count, start = (
        (*struct.unpack("<H", data[8:10]), 10)
        if data[6] == 1
        else (*struct.unpack("<I", data[8:12]), 12)
    )
    if count > MOST_HEADER or start + count > len(data):
        raise CheckpointCorrupt(f"{where} has a header of {count} bytes")
    try:
        facts = ast.literal_eval(data[start : start + count].decode("latin-1").strip())
        shape, descr, fortran = facts["shape"], facts["descr"], facts["fortran_order"]
        _check(shape, fortran)
    except (ValueError, SyntaxError, TypeError, KeyError, RecursionError, MemoryError) as error:
        raise CheckpointCorrupt(f"{where}: its header is damaged: {error}") from error
    dtype, big_endian = _dtype(descr, where)
    return NpyHeader(dtype, shape, fortran, big_endian, start + count)


def _check(shape: Any, fortran: Any) -> None:
    if not isinstance(shape, tuple) or len(shape) > _MOST_RANK or type(fortran) is not bool:
        raise ValueError("no shape or order")
    if not all(type(n) is int and 0 <= n < _MOST_EXTENT for n in shape):
        raise ValueError(f"{quoted(shape)} is not a shape")


def _dtype(descr: Any, where: str) -> tuple[str, bool]:
    """The name of a dtype, and whether it is big endian."""
    if not isinstance(descr, str) or descr[:1] not in ("<", ">", "|"):
        raise UnsupportedFormat(f"{where} has the dtype {quoted(descr)}")
    try:
        found = np.dtype(descr)
        return dtypes.name_of(found.newbyteorder("=")), descr[0] == ">"
    except TypeError as error:
        raise UnsupportedFormat(f"{where} has the dtype {quoted(descr)}") from error


def _flat(member: Member) -> str:
    return tree.component(member.name.removesuffix(".npy"))


def _nested(member: Member) -> str:
    return "/".join(map(tree.component, member.name.removesuffix(".npy").split("/")))


def _can_nest(members: Iterable[Member]) -> bool:
    """Whether no array has the name of what would contain others."""
    try:
        tree.from_names(dict.fromkeys(map(_nested, members)))
    except (ValueError, RecursionError):
        return False
    return True
