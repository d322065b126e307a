"""The weights of ONNX models: initializers of the graph, read in place.

Source: github.com/onnx/onnx, onnx/onnx.proto, and the wire format of Protocol Buffers. What else is
in a model is skipped without reading it.
"""

from __future__ import annotations

import posixpath
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from unickpt.backends._files import loose_files
from unickpt.backends._files.archives import WholeFile
from unickpt.backends._files.headers import Cursor, sizes
from unickpt.backends._files.loose_files import FoundFiles, open_kind
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    Array,
    ArrayTable,
    Elements,
    FileRange,
    Files,
    InMemoryElements,
    Nibbles,
    RangeReader,
    Reader,
    TensorSource,
    Unreadable,
    name_component,
    quoted,
)

_GRAPH, _INITIALIZER, _SPARSE = 7, 5, 15
_DIMS, _TYPE, _SEGMENT, _NAME, _RAW, _EXTERNAL = 1, 2, 3, 8, 9, 13
_FIXED, _VARINTS = (4, 10), (5, 7, 11)  # float_data and double_data; integers
_DTYPES = {
    1: "float32", 2: "uint8", 3: "int8", 4: "uint16", 5: "int16", 6: "int32", 7: "int64",
    9: "bool", 10: "float16", 11: "float64", 12: "uint32", 13: "uint64", 14: "complex64",
    15: "complex128", 16: "bfloat16", 17: "float8_e4m3fn", 18: "float8_e4m3fnuz",
    19: "float8_e5m2", 20: "float8_e5m2fnuz", 24: "float8_e8m0fnu",
}  # fmt: skip
# Two in a byte. unickpt has no uint4: its values are those of a wider dtype.
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

    def make(found: FoundFiles) -> Reader | None:
        model = _Model(files, found.names[0])
        return OnnxReader(files, model) if model.has_graph else None

    return open_kind(files, loose_files.ONNX, make)


class OnnxReader(RangeReader):
    """The initializers of a model.

    Arguments:
        files: of the checkpoint.
        model: what the file says.
    """

    format = "onnx"

    def __init__(self, files: Files, model: _Model) -> None:
        table = ArrayTable()
        for tensor in model.tensors:
            array = name_component(tensor.name)
            if not tensor.name or array in table.entries:
                raise model.damaged(f"two initializers, or none, are called {quoted(tensor.name)}")
            try:
                table.add(array, model.source(tensor))
            except ValueError as error:
                raise model.damaged(f"array {array!r}: {error}") from error
        super().__init__(files, table.index(), table.boxes)


class _Field(NamedTuple):
    """A field of a message: a number, or where its bytes are and how many."""

    number: int
    is_bytes: bool
    value: int
    size: int


@dataclass
class _Tensor:
    """An initializer as the file describes it."""

    name: str = ""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    data: dict[int, _Field] = field(default_factory=dict)
    external: dict[str, str] = field(default_factory=dict)


class _Model:
    """What a file says.

    Arguments:
        files: of the checkpoint.
        name: of the file.
    """

    def __init__(self, files: Files, name: str) -> None:
        self._files, self._name, self._cursor = files, name, Cursor(files, name)
        self.tensors: list[_Tensor] = []
        self.has_graph = False
        for part in self._fields(WholeFile(files, name).size):
            if part.number == _GRAPH and part.is_bytes:
                self.has_graph = True
                self._read_graph(part)

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self._cursor.damaged(f"is damaged: {reason}")

    def source(self, tensor: _Tensor) -> TensorSource:
        """Where an initializer is.

        Raises:
            ValueError: what the file says of it is wrong.
        """
        shape, dtype = sizes(tensor.dims), _DTYPES.get(tensor.kind)
        is_packed = tensor.kind in _FOUR_BITS
        dtype = _FOUR_BITS[tensor.kind] if is_packed else dtype
        if dtype is None:
            reason = f"{self._files.location}: {quoted(tensor.name)} is of the type {tensor.kind}"
            way_out = "which is not read; read the others by their names (only=)"
            return TensorSource("uint8", shape, Unreadable(f"{reason}, {way_out}"))
        found = TensorSource(dtype, shape, InMemoryElements(b""))
        expected = -(-found.count // 2) if is_packed else found.nbytes
        return TensorSource(dtype, shape, self._elements(tensor, expected, found, is_packed))

    def _elements(
        self, tensor: _Tensor, expected: int, found: TensorSource, is_packed: bool
    ) -> Elements:
        where = self._place(tensor, expected)
        if where is not None:
            return Nibbles(*where) if is_packed else FileRange(*where)
        integers = next((tensor.data[n] for n in _VARINTS if n in tensor.data), None)
        if integers is None:
            if expected:
                raise ValueError("it has no data")
            return InMemoryElements(b"")
        count = expected if is_packed else found.count
        width = 1 if is_packed else found.nbytes // max(1, count)
        data = _integers(self._bytes(integers), count).astype(f"<u{width}")
        if is_packed:
            data = np.stack((data & 15, data >> 4), axis=1).reshape(-1)[: found.count]
        return InMemoryElements(data.tobytes())

    def _place(self, tensor: _Tensor, expected: int) -> tuple[str, int] | None:
        """The file in which the elements follow each other, and where; None if they do not."""
        if tensor.external:
            path = posixpath.normpath(tensor.external.get("location", ""))
            if path in (".", "..") or path.startswith(("../", "/")) or "\\" in path:
                raise ValueError(f"its data is in {quoted(path)}, which is no file in the folder")
            offset = int(tensor.external.get("offset", "0"))
            length = int(tensor.external.get("length", str(expected)))
            if offset < 0 or length != expected:
                raise ValueError(f"{length} bytes at {offset} of {path}, {expected} expected")
            return path, offset
        place = next((tensor.data[n] for n in (_RAW, *_FIXED) if n in tensor.data), None)
        if place is None:
            return None
        if place.size != expected:
            raise ValueError(f"it has {place.size} bytes, {expected} expected")
        return self._name, place.value

    def _read_graph(self, graph: _Field) -> None:
        for part in self._within(graph):
            if part.number == _INITIALIZER and part.is_bytes:
                self.tensors.append(self._tensor(part))
            elif part.number == _SPARSE:
                raise self._files.unsupported(
                    f"{self._name} has sparse initializers: make them dense with onnx first"
                )

    def _tensor(self, message: _Field) -> _Tensor:
        made = _Tensor()
        for part in self._within(message):
            number = part.number
            if number == _DIMS:
                made.dims += [part.value] if not part.is_bytes else self._packed(part)
            elif number == _TYPE and not part.is_bytes:
                made.kind = part.value
            elif number == _NAME and part.is_bytes:
                made.name = self._text(part)
            elif number == _EXTERNAL and part.is_bytes:
                pair = {item.number: self._text(item) for item in self._within(part)}
                made.external[pair.get(1, "")] = pair.get(2, "")
            elif number in (_RAW, *_FIXED, *_VARINTS, _SEGMENT):
                if not part.is_bytes or number == _SEGMENT or number in made.data:
                    raise self.damaged(f"an initializer has its data in parts, at {part.value}")
                made.data[number] = part
        return made

    # --- the wire format --------------------------------------------------------------------------

    def _within(self, message: _Field) -> Iterator[_Field]:
        if not message.is_bytes:
            raise self.damaged(f"a number at byte {self._cursor.at} instead of a message")
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
                raise self.damaged(f"a field of the unknown kind {wire} at byte {cursor.at}")
            if after > end:
                raise self.damaged(f"a field ends at byte {after}, and what contains it at {end}")
            yield made
            cursor.at = after

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._cursor.take(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise self.damaged(f"a number of more than ten bytes at byte {self._cursor.at}")

    def _bytes(self, part: _Field) -> bytes:
        self._cursor.at = part.value
        return self._cursor.take(part.size)

    def _text(self, part: _Field) -> str:
        if not part.is_bytes or part.size > _MOST_NAME:
            raise self.damaged(f"a name of {part.size} bytes at byte {part.value}")
        return self._bytes(part).decode(errors="backslashreplace")

    def _packed(self, part: _Field) -> list[int]:
        if part.size > _MOST_NAME:
            raise self.damaged(f"a shape of {part.size} bytes at byte {part.value}")
        data = self._bytes(part)
        try:
            found: list[int] = _integers(data, sum(byte < 128 for byte in data)).tolist()
        except ValueError as error:
            raise self.damaged(f"a shape at byte {part.value}: {error}") from error
        return found


def _integers(data: bytes, count: int) -> Array:
    """So many numbers, each in up to ten bytes of which seven bits count."""
    raw = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(raw < 128)
    starts = np.concatenate(([0], ends + 1))
    lengths = np.diff(starts)
    if len(ends) != count or starts[-1] != len(raw) or (count and lengths.max() > 10):
        raise ValueError(f"its data are {len(ends)} numbers, {count} expected")
    place = np.arange(len(raw)) - np.repeat(starts[:-1], lengths)
    bits = (raw & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, starts[:-1]) if count else bits
