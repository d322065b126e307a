"""GGUF files of llama.cpp, read in place.

Source: github.com/ggml-org/ggml, docs/gguf.md and src/ggml-common.h. A quantized tensor consists of
blocks, which NumPy has no dtype for: it is read as its bytes, or dequantized on request, by
llama.cpp's own package gguf. A model can consist of several files, whose names contain their
numbers; any one stands for all.
"""

from __future__ import annotations

import errno
import importlib
import math
import struct
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from unickpt.backends._files import file_choice
from unickpt.backends._files.elements import Unreadable
from unickpt.backends._files.file_choice import FoundFiles, open_kind
from unickpt.backends._files.headers import Cursor, is_size
from unickpt.errors import CheckpointCorrupt, HintError, UnsupportedFormat
from unickpt.extend import (
    Array,
    ArrayTable,
    BlockType,
    ByteRange,
    Damaged,
    FileRange,
    Files,
    RangeReader,
    Reader,
    TensorSource,
    name_component,
    quoted,
)

_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_SPLIT = "split."  # the keys about a model in several files
_COUNT, _NUMBER, _TENSORS = f"{_SPLIT}count", f"{_SPLIT}no", f"{_SPLIT}tensors.count"
_MOST_TEXT = 64 << 20
_MOST_ITEMS = 1 << 22  # of all lists in the metadata
_MOST_RANK = 4  # as ggml
_DEQUANTIZED = "float32"
_OTHERS = "read the other tensors by their names (only=), or drop it by a rule"
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _LIST = 7, 8, 9
_DTYPES = {0: "float32", 1: "float16", 24: "int8", 25: "int16", 26: "int32", 27: "int64",
           28: "float64", 30: "bfloat16"}  # fmt: skip

HINTS: Collection[str] = ("dequantize",)


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a GGUF file, or all of a model; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged, or one of several files is missing.
        UnsupportedFormat: its name does not tell the others', or tensors shall be dequantized and
            the package gguf is not installed.
        HintError: `dequantize` is not "float32".
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> GgufReader:
        dequantize = hints.get("dequantize")
        if dequantize not in (None, _DEQUANTIZED):
            raise HintError(
                f"{files.location}: dequantize={quoted(dequantize)}: it can be {_DEQUANTIZED!r}; "
                "without it, quantized tensors are read as their bytes"
            )
        quants = None if dequantize is None else _quants(files)
        return GgufReader(files, selection.names[0], quants)

    return open_kind(files, file_choice.GGUF, make)


def _quants(files: Files) -> Any:
    """The module that dequantizes."""
    try:
        return importlib.import_module("gguf.quants")
    except ImportError:
        reason = "dequantizing needs the package gguf: install unickpt[gguf]"
        raise files.unsupported(reason) from None


@dataclass(frozen=True)
class Quantization:
    """A type of blocks.

    Arguments:
        name: as ggml calls it.
        elements: of a block.
        nbytes: of a block.
        halves: where the numbers of two bytes are in it; None if it has others that depend on the
            byte order.
    """

    name: str
    elements: int
    nbytes: int
    halves: tuple[int, ...] | None = None


@dataclass(frozen=True)
class GGUFBlocks:
    """Elements that are dequantized when they are read.

    Arguments:
        file: below the checkpoint's location.
        offset: of the first block, in bytes.
        number: of the type of the blocks, which `kind` describes.
        big_endian: the byte order of their scales.
        quants: the module that dequantizes.
        label: names the tensor in errors.
    """

    file: str
    offset: int
    number: int
    kind: Quantization
    big_endian: bool
    quants: Any
    label: str

    def read(self, files: Files, first: int, out: Array) -> None:
        size = self.kind.elements
        begin, end = first // size, -(-(first + out.size) // size)
        data = np.empty((end - begin, self.kind.nbytes), np.uint8)
        files.read_into(self.file, self.offset + begin * self.kind.nbytes, data.reshape(-1).data)
        out[...] = self._decoded(data).reshape(-1)[first - begin * size :][: out.size]

    def _decoded(self, data: Array) -> Array:
        try:
            if self.big_endian:
                if self.kind.halves is None:
                    raise NotImplementedError("of a big-endian file")
                for start in self.kind.halves:
                    data[:, start : start + 2] = data[:, start : start + 2][:, ::-1].copy()
            kind = self.quants.GGMLQuantizationType(self.number)
            with np.errstate(all="ignore"):  # scales can be infinite
                # As one row: rows are taken by the dozen.
                elements: Array = self.quants.dequantize(data.reshape(1, -1), kind)
        except (NotImplementedError, ValueError) as error:
            raise UnsupportedFormat(
                f"{self.label} is of the type {self.kind.name}, which cannot be dequantized "
                f"({error}); {_OTHERS}. Without the hint, it is read as its bytes"
            ) from error
        return elements

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        size, nbytes = self.kind.elements, self.kind.nbytes
        ends = first // size * nbytes, -(-(first + count) // size) * nbytes
        yield ByteRange(self.file, self.offset + ends[0], self.offset + ends[1])


@dataclass(frozen=True)
class _GGUFTensor:
    """A tensor as the file describes it: its extents in NumPy's order, and where it begins."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


class GgufReader(RangeReader):
    """The tensors and metadata of a model.

    Arguments:
        files: of the checkpoint.
        name: of its file, or of one of them.
        quants: the module that dequantizes; None if quantized tensors are read as their bytes.
    """

    format = "gguf"

    def __init__(self, files: Files, name: str, quants: Any) -> None:
        headers = _headers(files, name)
        self.version = str(headers[0].version)
        table, packed = ArrayTable(), dict[str, str]()
        blocks: dict[str, BlockType] = {}
        for header in headers:
            ends: list[tuple[int, int, str]] = []
            for tensor in header.tensors:
                source, nbytes = _stored(tensor, header, quants)
                array = name_component(tensor.name)
                if array in table.entries:
                    raise header.damaged(f"two tensors are called {quoted(tensor.name)}")
                if source.dtype == "uint8":
                    packed[array] = header.kind_name(tensor.kind)
                    blocks[array] = BlockType(packed[array], tensor.shape)
                table.add(array, source)
                ends.append((tensor.offset, tensor.offset + nbytes, tensor.name))
            header.check_places(ends)
        metadata = {**_metadata(headers), **({"quantized": packed} if packed else {})}
        super().__init__(files, table.index(metadata), table.boxes)
        self.blocks = blocks


def _headers(files: Files, name: str) -> Sequence[_GGUFHeader]:
    """The headers of all files of a model, from the name of one."""
    first = _GGUFHeader(Cursor(files, name))
    count = first.metadata.get(_COUNT, 1)
    if count in (0, 1):
        return [first]
    match = file_choice.GGUF_PART.fullmatch(name)
    if match is None or type(count) is not int or int(match[2]) != count:
        raise first.unsupported(
            f"it is one of {quoted(count)} files, which must be named as llama.cpp names them, "
            "<model>-00001-of-00003.gguf for the first of 3: rename them"
        )
    headers = []
    for number in range(count):
        part = f"{match[1]}-{number + 1:05d}-of-{count:05d}.gguf"
        headers.append(first if part == name else _GGUFHeader(_cursor(files, part, first)))
        metadata = headers[-1].metadata
        if metadata.get(_COUNT) != count or metadata.get(_NUMBER) != number:
            raise headers[-1].damaged(
                f"it says that it is file {quoted(metadata.get(_NUMBER))} of "
                f"{quoted(metadata.get(_COUNT))}, from 0 on, and its name that it is {number} of "
                f"{count}"
            )
    total = sum(len(header.tensors) for header in headers)
    for header in headers:
        if header.metadata.get(_TENSORS, total) != total:
            raise header.damaged(
                f"it says that all files have {quoted(header.metadata[_TENSORS])} tensors, and they"
                f" have {total}; are they of one model?"
            )
    return headers


def _cursor(files: Files, name: str, first: _GGUFHeader) -> Cursor:
    """The beginning of another file of a model."""
    try:
        head = files.head(name)
    except Damaged as error:
        if error.errno != errno.ENOENT:
            raise
        raise files.damaged(
            f"{name} is missing, which belongs to {first.file}; was the model copied as a whole?"
        ) from error
    if not file_choice.GGUF.begins(head):
        raise files.damaged(f"{name} is damaged: it is no GGUF file")
    return Cursor(files, name)


def _metadata(headers: Sequence[_GGUFHeader]) -> dict[str, Any]:
    """The metadata of all files of a model; usually only the first one has any."""
    if len(headers) == 1:
        return headers[0].metadata
    metadata: dict[str, Any] = {}
    for header in headers:
        for key, value in header.metadata.items():
            if not key.startswith(_SPLIT) and metadata.setdefault(key, value) != value:
                raise header.damaged(
                    f"it has another {quoted(key)} than the files before; are they of one model?"
                )
    return metadata


def _stored(tensor: _GGUFTensor, header: _GGUFHeader, quants: Any) -> tuple[TensorSource, int]:
    """A tensor's array, and its bytes in the file."""
    file, shape, big_endian = header.file, tensor.shape, header.order == ">"
    dtype = _DTYPES.get(tensor.kind)
    if dtype is not None:
        source = TensorSource(dtype, shape, FileRange(file, tensor.offset, big_endian))
        return source, source.nbytes
    kind, label = _QUANTIZED.get(tensor.kind), header.label(tensor.name)
    if kind is None:
        reason = f"{label} has the unknown type {tensor.kind}, whose size is unknown"
        return TensorSource("uint8", shape, Unreadable(f"{reason}; {_OTHERS}")), 0
    if not shape or shape[-1] % kind.elements:
        raise header.damaged(
            f"{quoted(tensor.name)} has the shape {list(shape)}, which blocks of {kind.elements} "
            f"({kind.name}) do not fill"
        )
    row = shape[-1] // kind.elements * kind.nbytes
    packed = TensorSource("uint8", (*shape[:-1], row), FileRange(file, tensor.offset))
    if quants is None:
        return packed, packed.nbytes
    blocks = GGUFBlocks(file, tensor.offset, tensor.kind, kind, big_endian, quants, label)
    return TensorSource(_DEQUANTIZED, shape, blocks), packed.nbytes


class _GGUFHeader:
    """The header of a file.

    Arguments:
        cursor: at the beginning of the file.
    """

    def __init__(self, cursor: Cursor) -> None:
        self._at, self.file = cursor, cursor.name
        self._items = _MOST_ITEMS
        cursor.take(4)
        version = cursor.take(4)
        self.order = "<" if version[:2] != b"\0\0" else ">"
        """The byte order of the file, as `struct` has it."""
        self.version = struct.unpack(self.order + "I", version)[0]
        if self.version not in _VERSIONS:
            raise self.unsupported(f"the file has the version {self.version}; 2 and 3 are read")
        tensors, pairs = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            key = self._text()
            if key in self.metadata:
                raise self.damaged(f"{quoted(key)} occurs twice")
            self.metadata[key] = self._value(self._number("I"), key)
        descriptions = [self._tensor() for _ in range(tensors)]
        alignment = self.metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or not 0 < alignment < 1 << 32:
            raise self.damaged(f"{_ALIGNMENT} is {quoted(alignment)}")
        begin = -(-cursor.at // alignment) * alignment
        self._begin, self._alignment = begin, alignment
        self.tensors = [replace(t, offset=begin + t.offset) for t in descriptions]

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self._at.damaged(f"is damaged: {reason}")

    def unsupported(self, reason: str) -> UnsupportedFormat:
        """The error for content that cannot be read."""
        return self._at.files.unsupported(f"{self.file}: {reason}")

    def label(self, tensor: str) -> str:
        """A tensor, for errors."""
        return f"{self._at.files.location}: {self.file}: {quoted(tensor)}"

    def kind_name(self, number: int) -> str:
        """A type of blocks as ggml calls it, and the byte order if it is not the usual one."""
        quantization = _QUANTIZED.get(number)
        name = f"type {number}" if quantization is None else quantization.name
        return name if self.order == "<" else f"{name}, big-endian"

    def check_places(self, places: list[tuple[int, int, str]]) -> None:
        """Checks that tensors lie in the file, and do not overlap.

        Arguments:
            places: for each tensor, where it begins and ends, and its name.
        """
        last, size = self._begin, self._at.size
        for begin, end, name in sorted(places):
            if begin < last or (size is not None and end > size):
                raise self.damaged(
                    f"{quoted(name)} lies at {begin} to {end}, in another tensor or beyond the end"
                )
            last = end
        if size is not None and size - last >= self._alignment:
            raise self.damaged(
                f"{size - last} bytes behind the last of its {len(self.tensors)} tensors belong to "
                "none of them"
            )

    def _number(self, kind: str) -> Any:
        return self._at.unpack(self.order + kind)

    def _text(self) -> str:
        count = self._number("Q")
        if count > _MOST_TEXT:
            raise self.damaged(f"a text of {count} bytes")
        return self._at.take(count).decode(errors="backslashreplace")

    def _value(self, kind: int, key: str) -> Any:
        """A value of the metadata, as JSON has it."""
        if kind in _NUMBERS:
            number = self._number(_NUMBERS[kind])
            return number if math.isfinite(number) else str(number)
        if kind == _BOOL:
            return self._number("?")
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            raise self.unsupported(f"{quoted(key)} is of the unknown type {kind}")
        item_kind, count = self._number("I"), self._number("Q")
        self._items -= count
        if self._items < 0:
            raise self.unsupported(f"{quoted(key)} has {count} items, too many")
        if item_kind == _LIST:
            raise self.unsupported(f"{quoted(key)} is a list of lists")
        return [self._value(item_kind, key) for _ in range(count)]

    def _tensor(self) -> _GGUFTensor:
        name, rank = self._text(), self._number("I")
        if rank > _MOST_RANK:
            raise self.damaged(f"{quoted(name)} has {rank} dimensions")
        shape = tuple(self._number("Q") for _ in range(rank))[::-1]
        kind, offset = self._number("I"), self._number("Q")
        if not all(map(is_size, (*shape, offset, math.prod(shape)))):
            raise self.damaged(f"{quoted(name)} has the shape {list(shape)} at {offset}")
        return _GGUFTensor(name, shape, kind, offset)


_QUANTIZED: Mapping[int, Quantization] = {
    number: Quantization(name, elements, nbytes, halves)
    for number, name, elements, nbytes, halves in (
        (2, "Q4_0", 32, 18, (0,)), (3, "Q4_1", 32, 20, (0, 2)), (6, "Q5_0", 32, 22, None),
        (7, "Q5_1", 32, 24, None), (8, "Q8_0", 32, 34, (0,)), (10, "Q2_K", 256, 84, (80, 82)),
        (11, "Q3_K", 256, 110, (108,)), (12, "Q4_K", 256, 144, (0, 2)),
        (13, "Q5_K", 256, 176, (0, 2)), (14, "Q6_K", 256, 210, (208,)),
        (15, "Q8_K", 256, 292, None), (16, "IQ2_XXS", 256, 66, None),
        (17, "IQ2_XS", 256, 74, None), (18, "IQ3_XXS", 256, 98, None),
        (19, "IQ1_S", 256, 50, None), (20, "IQ4_NL", 32, 18, (0,)), (21, "IQ3_S", 256, 110, (0,)),
        (22, "IQ2_S", 256, 82, (0,)), (23, "IQ4_XS", 256, 136, (0, 2)),
        (29, "IQ1_M", 256, 56, None), (34, "TQ1_0", 256, 54, (52,)), (35, "TQ2_0", 256, 66, (64,)),
        (39, "MXFP4", 32, 17, ()), (40, "NVFP4", 64, 36, ()), (41, "Q1_0", 128, 18, (0,)),
    )
}  # fmt: skip
