"""The content of msgpack files; arrays, extensions of Flax, are located but not read.

Sources: flax/serialization.py, and msgpack's specification
(github.com/msgpack/msgpack/blob/master/spec.md). One pass finds out where the arrays are; their
bytes are read when they are needed. (msgpack's own Unpacker reads an extension, and so an array,
whole before it reports where the next value begins.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.backends._files.elements import ElementRun, InMemoryElements, JoinedElements
from unickpt.backends._files.headers import Cursor, sizes
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    MAX_DEPTH,
    FileRange,
    Files,
    TensorSource,
    dtype_from_name,
    dtype_name,
    quoted,
)

_ARRAY, _COMPLEX, _SCALAR, _TUPLE = 1, 2, 3, 4  # extensions; the last one is Orbax's
_CHUNKED = "__msgpack_chunked_array__"
# Orbax's aggregates, and arrays of several hosts.
_ELSEWHERE = ("PLACEHOLDER://", "AGGREGATED://", "//GDAPlaceholder:")
_SPEC = {"driver", "kvstore"}  # keys of T5X's specs of TensorStore
_MOST_TEXT = 64 << 20
# All names together may have so many letters for each byte that is no array's, and this many more.
_LETTERS, _LEAST_LETTERS = 64, 1 << 16


@dataclass(frozen=True, eq=False)
class Elsewhere:
    """A placeholder for an array in other files: a text, or T5X's spec of TensorStore."""

    found: str | Mapping[Any, Any]


def scan(files: Files, name: str) -> Any:
    """The content of a file: containers, plain values, `TensorSource` and `Elsewhere`.

    Arguments:
        files: of the checkpoint.
        name: of the file.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it contains values that unickpt lacks.
        Failed: the storage failed.
    """
    return _MsgpackScanner(Cursor(files, name)).root()


class _MsgpackScanner:
    """Reads one msgpack value.

    Arguments:
        cursor: at its beginning.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._at = cursor
        self._letters = 0

    def root(self) -> Any:
        """The containers, plain values and arrays of the file."""
        try:
            tree = self._value(0, "")
        except (UnicodeDecodeError, OverflowError) as error:
            raise self._damaged(f"{error}") from error
        if not self._at.at_end():
            raise self._damaged("more follows after its end")
        return tree

    def _damaged(self, reason: str) -> CheckpointCorrupt:
        return self._at.damaged(f"is damaged before byte {self._at.at}: {reason}")

    def _unsupported(self, name: str, reason: str) -> UnsupportedFormat:
        cursor = self._at
        return cursor.files.unsupported(f"{cursor.name}: {quoted(name)} {reason}")

    def _value(self, depth: int, name: str) -> Any:
        """The next value.

        Arguments:
            depth: containers above it.
            name: of it, for errors.
        """
        self._letters += len(name)
        if self._letters > _LETTERS * self._at.taken + _LEAST_LETTERS:
            raise self._damaged("its names are too long for its size")
        if depth > MAX_DEPTH:
            raise self._unsupported(name, f"is nested deeper than {MAX_DEPTH} levels")
        code = self._at.take(1)[0]
        kind, count = self._head(code)
        if kind == "value":
            return count
        if kind == "map":
            return self._map(count, depth, name)
        if kind == "list":
            return [self._value(depth + 1, f"{name}/{n}") for n in range(count)]
        if kind == "str":
            return self._text(count)
        if kind == "bytes":
            return self._some(count)
        return self._extension(count, depth, name)

    def _head(self, code: int) -> tuple[str, Any]:
        """The value that begins with a byte: its kind, and its length or value."""
        if code not in _HEADS:
            raise self._damaged(f"no value begins with {code:#04x}")
        kind, content = _HEADS[code]
        return kind, self._at.unpack(content) if isinstance(content, str) else content

    def _some(self, count: int) -> bytes:
        if count > _MOST_TEXT:
            raise self._damaged(f"a text of {count} bytes")
        return self._at.take(count)

    def _text(self, count: int) -> str | Elsewhere:
        text = self._some(count).decode()
        return Elsewhere(text) if text.startswith(_ELSEWHERE) else text

    def _map(self, count: int, depth: int, name: str) -> Any:
        entries: dict[Any, Any] = {}
        for _ in range(count):
            key = self._key()
            if key in entries:
                raise self._damaged(f"{quoted(name)} contains {quoted(key)} twice")
            entries[key] = self._value(depth + 1, f"{name}/{key}" if name else str(key))
        if _CHUNKED in entries:
            return self._chunked(entries, name)
        return Elsewhere(entries) if entries.keys() >= _SPEC else entries

    def _key(self) -> str | int:
        kind, content = self._head(self._at.take(1)[0])
        if kind == "str":
            return self._some(content).decode()
        if kind == "value" and type(content) is int:
            return content
        if kind == "bytes":
            raise self._unsupported(
                repr(self._some(content)),
                "is a key of bytes, as msgpack_numpy and srsly write them",
            )
        raise self._damaged("a key is neither a text nor a number")

    def _chunked(self, entries: Mapping[Any, Any], name: str) -> TensorSource:
        """An array that Flax has cut, since msgpack limits the size of a value."""
        shape, chunks = self._numbered(entries, "shape"), self._numbered(entries, "chunks")
        if not chunks or not all(isinstance(chunk, TensorSource) for chunk in chunks):
            raise self._damaged(f"the chunks of {quoted(name)} are not arrays")
        extents = self._extents(shape)
        if len({chunk.dtype for chunk in chunks}) > 1:
            raise self._damaged(f"the chunks of {quoted(name)} have several dtypes")
        runs = [ElementRun(chunk.elements, 0, chunk.count) for chunk in chunks if chunk.count]
        joined = JoinedElements(tuple(runs))
        if joined.count != math.prod(extents):
            raise self._damaged(
                f"the chunks of {quoted(name)} have {joined.count} elements, "
                f"{math.prod(extents)} expected"
            )
        return TensorSource(chunks[0].dtype, extents, joined)

    def _numbered(self, entries: Mapping[Any, Any], key: str) -> list[Any]:
        """A tuple as Flax writes it: a dict whose keys are its positions, as texts."""
        items = entries.get(key)
        if isinstance(items, dict) and list(items) == [str(n) for n in range(len(items))]:
            return list(items.values())
        raise self._damaged(f"the {key} of a cut array is {quoted(items)}")

    def _extents(self, shape: Any) -> tuple[int, ...]:
        try:
            return sizes(shape)
        except ValueError as error:
            raise self._damaged(str(error)) from error

    def _extension(self, length: int, depth: int, name: str) -> Any:
        kind = self._at.unpack("b")
        end = self._at.at + length
        if kind in (_ARRAY, _SCALAR):
            value: Any = self._array(depth, name)
        elif kind == _COMPLEX:
            value = self._complex(depth, name)
        elif kind == _TUPLE:
            value = self._value(depth + 1, name)
            value = tuple(value) if isinstance(value, list) else value
        else:
            raise self._unsupported(name, f"is an extension of the unknown type {kind}")
        if self._at.at != end:
            raise self._damaged(f"{quoted(name)} has {length} bytes, and ends elsewhere")
        return value

    def _array(self, depth: int, name: str) -> TensorSource:
        kind, count = self._head(self._at.take(1)[0])
        if (kind, count) != ("list", 3):
            raise self._damaged(f"{quoted(name)} is not an array")
        shape = self._extents(self._value(depth + 1, name))
        stored = self._value(depth + 1, name)
        text = stored.decode("latin-1") if isinstance(stored, bytes) else stored
        kind, count = self._head(self._at.take(1)[0])
        if kind not in ("bytes", "str") or not isinstance(text, str):
            raise self._damaged(f"{quoted(name)} has no dtype or no elements")
        try:
            dtype = dtype_name(dtype_from_name(text))
        except TypeError:
            raise self._unsupported(name, f"has the dtype {quoted(text)}") from None
        source = TensorSource(dtype, shape, FileRange(self._at.name, self._at.at))
        if count != source.nbytes:
            raise self._damaged(
                f"{quoted(name)}, {dtype}{list(shape)}, has {count} bytes, {source.nbytes} expected"
            )
        self._at.skip(count)
        return source

    def _complex(self, depth: int, name: str) -> TensorSource:
        parts = self._value(depth + 1, name)
        if not isinstance(parts, list) or [type(x) for x in parts] != [float, float]:
            raise self._damaged(f"{quoted(parts)} is not a complex number")
        return TensorSource(
            "complex128", (), InMemoryElements(np.array([complex(*parts)]).tobytes())
        )


_HEADS: Mapping[int, tuple[str, Any]] = {
    **{code: ("value", code) for code in range(0x80)},
    **{code: ("value", code - 0x100) for code in range(0xE0, 0x100)},
    **{
        first + n: (kind, n)
        for first, count, kind in ((0x80, 16, "map"), (0x90, 16, "list"), (0xA0, 32, "str"))
        for n in range(count)
    },
    **{
        first + n: (kind, length_or_value)
        for first, kind, contents in (
            (0xC0, "value", (None,)), (0xC2, "value", (False, True)),
            (0xC4, "bytes", (">B", ">H", ">I")), (0xC7, "extension", (">B", ">H", ">I")),
            (0xCA, "value", (">f", ">d", ">B", ">H", ">I", ">Q", ">b", ">h", ">i", ">q")),
            (0xD4, "extension", (1, 2, 4, 8, 16)), (0xD9, "str", (">B", ">H", ">I")),
            (0xDC, "list", (">H", ">I")), (0xDE, "map", (">H", ">I")),
        )
        for n, length_or_value in enumerate(contents)
    },
}  # fmt: skip
"""The value that begins with a byte: its kind, and its length or value, or how `struct` reads
it."""
