"""NumPy's .npz files, read in place where they are not compressed.

Sources: numpy/lib/format.py, and `numpy.savez`. Arrays of objects would need pickles, and are
refused.
"""

from __future__ import annotations

import io
import tokenize
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import open_kind
from unickpt.backends._files.flat_names import (
    can_nest,
    flat_names,
    nested_name,
    plain_values,
    refuse,
)
from unickpt.backends._files.headers import naming, sizes
from unickpt.backends._files.zip_files import DEFLATED, STORED, Member, ZipFile
from unickpt.backends._files.zip_layout import Content, ZipLayout
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    Array,
    ArrayEntry,
    ArrayTable,
    Box,
    FileRange,
    Files,
    Index,
    Part,
    Plan,
    PlannedFile,
    RangeReader,
    Reader,
    TensorSource,
    dtype_from_name,
    dtype_name,
    name_component,
    quoted,
    row_major,
    shortened,
)

MAGIC = b"\x93NUMPY"
MOST_HEADER = 10_000  # as NumPy's own limit for files that are not trusted
_MOST_TOLD = 200
# The exceptions that NumPy raises for a damaged header.
_DAMAGES = (
    ValueError, SyntaxError, TypeError, LookupError, AttributeError, ArithmeticError,
    RecursionError, MemoryError, tokenize.TokenError,
)  # fmt: skip
# Deflate makes data at most 1032 times smaller.
_MOST_DEFLATED = 1032


@dataclass(frozen=True)
class NpyHeader:
    """The content of an array's header.

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

    def source(self, file: str, begin: int = 0) -> TensorSource:
        """The array whose header begins at a byte of a file."""
        strides = row_major(self.shape[::-1])[::-1] if self.fortran else None
        elements = FileRange(file, begin + self.length, self.big_endian)
        return TensorSource(self.dtype, self.shape, elements, 0, strides)


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an .npz file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: there are several, or an array's dtype is one that unickpt lacks.
        StorageError: the storage failed.
    """
    return open_kind(files, file_choice.NPZ, lambda chosen: NpzReader(files, chosen.names[0]))


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
        table = ArrayTable()
        is_nested = can_nest(map(_text, self._zip.members.values()))
        name_of = nested_name if is_nested else name_component
        for member in self._zip.members.values():
            array = name_of(_text(member))
            if array in table.entries:
                raise self._zip.damaged(f"two arrays are called {quoted(array)}")
            header, where = self._header(member)
            table.add(array, where)
            if member.method != STORED:
                # A compressed member is read whole.
                chunk = tuple(max(1, n) for n in header.shape)
                table.entries[array] = replace(table.entries[array], chunk=chunk)
                del table.boxes[array]
                self._deflated[array] = member, header
        super().__init__(files, table.index(), table.boxes)

    def _header(self, member: Member) -> tuple[NpyHeader, TensorSource]:
        where = f"{self._zip.files.location}: {self._zip.name}: {quoted(member.name)}"
        offset = 0
        most = min(member.size, MOST_HEADER + 12)
        if member.method == STORED:
            offset = self._zip.offset(member)
            data = self._zip.files.read(self._zip.name, offset, most)
        elif member.method == DEFLATED and member.size <= _MOST_DEFLATED * member.compressed:
            data = self._zip.first(member, most)
        else:
            raise UnsupportedFormat(f"{where} is compressed by the method {member.method}")
        header = parsed(data, where)
        source = header.source(self._zip.name, offset)
        if header.length + source.nbytes != member.size:
            raise CheckpointCorrupt(
                f"{where} has {member.size} bytes, {header.length + source.nbytes} expected"
            )
        if member.method == STORED:
            self._zip.summed(member, offset, data[: header.length])
        return header, source

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

    def read_box(self, entry: ArrayEntry, part: Part, box: Box, out: Array) -> None:
        if entry.name not in self._deflated:
            super().read_box(entry, part, box, out)
            return
        member, header = self._deflated[entry.name]
        is_plain = header.source("").is_row_major
        flat = out.reshape(-1) if is_plain else np.empty(out.size, out.dtype)
        with naming(self.location, f"array {entry.name!r}"):
            self._zip.inflate(member, flat.view(np.uint8).data, header.length)
        if not is_plain:
            out[...] = flat.reshape(header.shape[::-1]).T
        if header.big_endian:
            out.byteswap(inplace=True)


def parsed(data: bytes, where: str, void: str | None = None) -> NpyHeader:
    """The head of an array, of its first bytes.

    Arguments:
        data: these bytes.
        where: the array, for errors.
        void: the dtype of arrays whose elements are two bytes of no type.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it is none, or of a dtype that unickpt lacks.
    """
    if data[:6] != MAGIC or len(data) < 12 or data[6] not in (1, 2, 3):
        raise UnsupportedFormat(f"{where} is not an array of NumPy")
    stream = io.BytesIO(data)
    major, _ = np.lib.format.read_magic(stream)
    # Version 3 differs from 2 in the names of fields only.
    npy_format = np.lib.format
    read = npy_format.read_array_header_1_0 if major == 1 else npy_format.read_array_header_2_0
    try:
        stored, fortran, dtype = read(stream, max_header_size=MOST_HEADER)
        shape = sizes(stored)
    except _DAMAGES as error:
        reason = shortened(str(error), _MOST_TOLD)
        raise CheckpointCorrupt(f"{where}: its header is damaged: {reason}") from error
    try:
        name = void if void and dtype == np.dtype("V2") else dtype_name(dtype.newbyteorder("="))
    except TypeError as error:
        raise UnsupportedFormat(
            f"{where} has the dtype {quoted(str(dtype))}, which unickpt lacks; load it with NumPy, "
            "and save the arrays of numbers alone"
        ) from error
    return NpyHeader(name, shape, fortran, dtype.byteorder == ">", stream.tell())


def _text(member: Member) -> str:
    return member.name.removesuffix(".npy")


# --- files to write -------------------------------------------------------------------------------


@dataclass(frozen=True)
class NpzWriter:
    """One file; tied arrays are written once for each of their names."""

    suffixes: ClassVar[Sequence[str]] = (".npz",)

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        # NumPy writes dtypes of other packages, and forgets which they were.
        missing = [
            entry
            for entry in index.arrays.values()
            if dtype_from_name(entry.dtype).type.__module__ != "numpy"
        ]
        refuse("npz", missing, plain_values(index))
        names = flat_names(index)
        contents = []
        for name, entry in index.entries.items():
            elements = entry.name, Box.whole(entry.shape), entry.nbytes
            contents.append(Content(f"{names[name]}.npy", _header(entry), *elements))
        zipped = ZipLayout(contents)
        planned = PlannedFile(
            file or "arrays.npz", zipped.size, zipped.texts, tuple(zipped.data), zipped.ending,
            last=True,
        )  # fmt: skip
        return Plan((planned,), _shown({name: names[name] for name in index.entries}))


def _header(entry: ArrayEntry) -> bytes:
    head = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(dtype_from_name(entry.dtype).newbyteorder("<"))
    facts = {"descr": descr, "fortran_order": False, "shape": entry.shape}
    np.lib.format.write_array_header_1_0(head, facts)
    return head.getvalue()


def _shown(names: dict[str, str]) -> dict[str, str]:
    """The names as unickpt reads them: as containers, unless one is both a leaf and a container."""
    name_of = nested_name if can_nest(names.values()) else name_component
    return {name: name_of(text) for name, text in names.items()}
