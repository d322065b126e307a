"""The weights of ONNX models: initializers of the graph, read in place.

Source: github.com/onnx/onnx, onnx/onnx.proto, and the wire format of Protocol Buffers. The rest of
a model is skipped without reading it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from unickpt.backends._files import file_choice
from unickpt.backends._files.elements import InMemoryElements, Nibbles, Unreadable
from unickpt.backends._files.file_choice import FoundFiles, open_kind
from unickpt.backends._files.headers import MOST_RANK, Cursor, size_of, sizes
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    Array,
    ArrayTable,
    Elements,
    FileRange,
    Files,
    RangeReader,
    Reader,
    TensorSource,
    name_component,
    quoted,
)

_GRAPH, _INITIALIZER, _SPARSE = 7, 5, 15
_DIMS, _TYPE, _SEGMENT, _NAME, _RAW, _EXTERNAL = 1, 2, 3, 8, 9, 13
_NUMBERS, _FLOATS, _DOUBLES, _INT64, _UINT64 = 5, 4, 10, 7, 11
# By type, the field of elements that are no raw_data; the other types have theirs in _NUMBERS.
_TYPED = {
    1: _FLOATS, 14: _FLOATS, 11: _DOUBLES, 15: _DOUBLES, 7: _INT64, 12: _UINT64, 13: _UINT64
}  # fmt: skip
_DATA = {_RAW, _NUMBERS, _SEGMENT, *_TYPED.values()}
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
# Two in a byte. unickpt has no uint4: its values get a wider dtype.
_FOUR_BITS = {21: "uint8", 22: "int4", 23: "float4_e2m1fn"}
_MOST_NAME = 1 << 16

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an ONNX model; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged, or names a file outside of its folder.
        UnsupportedFormat: it has sparse initializers.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> Reader | None:
        model = _Model(files, selection.names[0])
        table = model.table
        return OnnxReader(files, table.index(), table.boxes) if model.has_graph else None

    return open_kind(files, file_choice.ONNX, make)


class OnnxReader(RangeReader):
    """The initializers of a model."""

    format = "onnx"


class _Field(NamedTuple):
    """A field of a message: a number, or where its bytes are and how many."""

    number: int
    is_bytes: bool
    value: int
    size: int


class _Model:
    """The content of a file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
    """

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name, self._cursor = files, name, Cursor(files, name)
        self.table, self.has_graph = ArrayTable(), False
        for part in self._fields(size_of(files, name)):
            if part.number == _GRAPH and part.is_bytes:
                self.has_graph = True
                self._read_graph(part)

    def _damaged(self, reason: str) -> CheckpointCorrupt:
        return self._cursor.damaged(f"is a damaged model of ONNX: {reason}")

    def _read_graph(self, graph: _Field) -> None:
        for part in self._within(graph):
            if part.number == _INITIALIZER:
                self._read_tensor(part)
            elif part.number == _SPARSE:
                raise self._files.unsupported(
                    f"{self._name} has sparse initializers: make them dense with onnx first"
                )

    def _read_tensor(self, message: _Field) -> None:
        """Adds an initializer to the table."""
        name, kind, dims = "", 0, list[int]()
        data, external = dict[int, _Field](), dict[str, str]()
        for part in self._within(message):
            number = part.number
            if number == _DIMS:
                numbers = self._numbers(part) if part.is_bytes else [part.value]
                dims += islice(numbers, 2 * MOST_RANK - len(dims))
            elif number == _TYPE:
                kind = part.value
            elif number == _NAME:
                name = self._text(part)
            elif number == _EXTERNAL:
                pair = {item.number: self._text(item) for item in self._within(part)}
                external[pair.get(1, "")] = pair.get(2, "")
            elif number in _DATA:
                if not part.is_bytes or number == _SEGMENT or number in data:
                    raise self._damaged(f"an initializer has its data in parts, at {part.value}")
                data[number] = part
        array = name_component(name)
        if not name or array in self.table.entries:
            raise self._damaged(f"two initializers, or none, are called {quoted(name)}")
        try:
            self.table.add(array, self._source(name, kind, sizes(dims), data, external))
        except ValueError as error:
            raise self._damaged(f"array {array!r}: {error}") from error

    def _source(
        self, name: str, kind: int, shape: tuple[int, ...], data: Mapping[int, _Field],
        external: Mapping[str, str],
    ) -> TensorSource:  # fmt: skip
        """Where an initializer is. Raises ValueError: the file's description of it is wrong."""
        dtype, is_packed = {**_DTYPES, **_FOUR_BITS}.get(kind), kind in _FOUR_BITS
        if dtype is None:
            reason = f"{self._files.location}: {quoted(name)} is of the type {kind}, which is not"
            way_out = "read; read the others by their names (only=)"
            return TensorSource("uint8", shape, Unreadable(f"{reason} {way_out}"))
        source = TensorSource(dtype, shape, InMemoryElements(b""))
        expected = -(-source.count // 2) if is_packed else source.nbytes
        typed = _TYPED.get(kind, _NUMBERS)
        place = data.get(_RAW) or data.get(typed)
        elements: Elements
        if external:
            where = self._outside(external, expected)
            elements = Nibbles(*where) if is_packed else FileRange(*where)
        elif place is None:
            if expected:
                raise ValueError("it has no data")
            return source
        elif place.number in (_RAW, _FLOATS, _DOUBLES):
            if place.size != expected:
                raise ValueError(f"it has {place.size} bytes, {expected} expected")
            elements_class = Nibbles if is_packed else FileRange
            elements = elements_class(self._name, place.value)
        else:
            elements = InMemoryElements(self._decoded(place, source, expected, is_packed))
        return TensorSource(dtype, shape, elements)

    def _decoded(
        self, place: _Field, source: TensorSource, expected: int, is_packed: bool
    ) -> bytes:
        """The elements of a field of numbers; each has as many bits as the dtype."""
        count = expected if is_packed else source.count
        width = 1 if is_packed else expected // max(1, count)
        data = _integers(self._bytes(place), count).astype(f"<u{width}")
        if is_packed:
            data = np.stack((data & 15, data >> 4), axis=1).reshape(-1)[: source.count]
        return data.tobytes()

    def _outside(self, external: Mapping[str, str], expected: int) -> tuple[str, int]:
        """A file next to the model, and where in it an initializer begins."""
        path = posixpath.normpath(external.get("location", ""))
        if path in (".", "..") or path.startswith(("../", "/")) or "\\" in path:
            raise ValueError(f"its data is in {quoted(path)}, which is no file in the folder")
        offset = int(external.get("offset", "0"))
        length = int(external.get("length", str(expected)))
        if offset < 0 or length != expected:
            raise ValueError(f"{length} bytes at {offset} of {path}, {expected} expected")
        return path, offset

    # --- the wire format --------------------------------------------------------------------------

    def _within(self, message: _Field) -> Iterator[_Field]:
        if not message.is_bytes:
            raise self._damaged(f"a number at byte {self._cursor.at} instead of a message")
        self._cursor.at = message.value
        return self._fields(message.value + message.size)

    def _fields(self, end: int) -> Iterator[_Field]:
        """The fields from here on."""
        cursor = self._cursor
        while cursor.at < end:
            tag = self._varint()
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                made, after = _Field(number, False, self._varint(), 0), cursor.at
            elif wire in (1, 5):
                after = cursor.at + (8 if wire == 1 else 4)
                made = _Field(number, False, cursor.at, 0)
            elif wire == 2:
                size = self._varint()
                made, after = _Field(number, True, cursor.at, size), cursor.at + size
            else:
                raise self._damaged(f"a field of the unknown kind {wire} at byte {cursor.at}")
            if after > end:
                raise self._damaged(f"a field ends at byte {after}, and what contains it at {end}")
            yield made
            cursor.at = after

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._cursor.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise self._damaged(f"a number of more than ten bytes at byte {self._cursor.at}")

    def _numbers(self, part: _Field) -> Iterator[int]:
        self._cursor.at = part.value
        while self._cursor.at < part.value + part.size:
            yield self._varint()

    def _bytes(self, part: _Field) -> bytes:
        self._cursor.at = part.value
        return self._cursor.take(part.size)

    def _text(self, part: _Field) -> str:
        if not part.is_bytes or part.size > _MOST_NAME:
            raise self._damaged(f"a name of {part.size} bytes at byte {part.value}")
        return self._bytes(part).decode(errors="backslashreplace")


def _integers(data: bytes, count: int) -> Array:
    """So many numbers, each in up to ten bytes; seven bits of a byte count."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 128)
    starts = np.concatenate(([0], ends + 1))
    lengths = np.diff(starts)
    if len(ends) != count or starts[-1] != len(raw) or (count and lengths.max() > 10):
        raise ValueError(f"its data are {len(ends)} numbers, {count} expected")
    place = np.arange(len(raw)) - np.repeat(starts[:-1], lengths)
    bits = (raw & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts[:-1]) if count else bits
