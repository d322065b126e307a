"""The chunks of arrays in files, as sequences of elements; each is found when it is first read.

A file holds a zip of torch.save for each chunk, or, if it was written with
`SerializationFormat.SAFETENSORS`, one safetensors file of all its tensors after the zips of its
other values. Either can be compressed as a whole.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from unickpt.backends._files.archives import ArchivePart, MemberFiles
from unickpt.backends._files.safetensors_headers import SafetensorsHeader, read_header
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends.dcp.metadata import Blob, DcpChunk, TensorFacts
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    Array,
    ByteRange,
    CheckedFiles,
    Damaged,
    Elements,
    FileBox,
    Files,
    dtype_and_shape,
    dtype_from_name,
    flat_range_to_boxes,
    read_file_box,
)

_ZIP = b"PK\x03\x04"
_EDGE = 1024  # of a chunk's zip: its pickle is at the beginning, its directory at the end
_ZIP_END = b"PK\x05\x06"
_AROUND = 1 << 20  # the most bytes of a zip besides the elements of its tensor


class LocatedElements:
    """The elements of a chunk, in row-major order; where they are is found out when first read.

    Arguments:
        blob: holds the chunk.
        find: finds out where they are; raises `CheckpointCorrupt` if the chunk is another.
    """

    def __init__(self, blob: Blob, find: Callable[[Files], FileBox]) -> None:
        self._blob, self._find = blob, find
        self._found: FileBox | None = None

    def read(self, files: Files, first: int, out: Array) -> None:
        if self._found is None:  # two threads may find it out twice
            try:
                self._found = self._find(files)
            except CheckpointCorrupt as error:
                raise Damaged(str(error).removeprefix(f"{files.location}: ")) from error
        _read_flat(files, self._found, first, out)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        yield ByteRange(self._blob.file, self._blob.offset, self._blob.offset + self._blob.length)


class Compressed:
    """Elements within a blob that is compressed; all of it is read for any of them.

    Arguments:
        blob: the compressed bytes.
        most: bytes without compression.
        inner: makes the elements from the decompressed file.
    """

    def __init__(self, blob: Blob, most: int, inner: Callable[[], Elements]) -> None:
        self._blob, self._most, self._inner = blob, most, inner

    def read(self, files: Files, first: int, out: Array) -> None:
        data = files.read(self._blob.file, self._blob.offset, self._blob.length)
        plain = decompressed(data, self._most, self._blob.file)
        self._inner().read(CheckedFiles(in_memory(files, self._blob.file, plain)), first, out)

    def ranges(self, first: int, count: int, itemsize: int) -> Iterator[ByteRange]:
        yield ByteRange(self._blob.file, self._blob.offset, self._blob.offset + self._blob.length)


def decompressed(data: bytes, most: int, file: str) -> bytes:
    """A zstd stream without compression.

    Arguments:
        data: the stream.
        most: how many bytes it may become.
        file: which contains it, for messages.

    Raises:
        Damaged: it is no such stream, or becomes more.
        UnsupportedFormat: the library is not installed.
    """
    zstd = zstandard(file)
    try:
        with zstd.ZstdDecompressor().stream_reader(io.BytesIO(data)) as stream:
            content: bytes = stream.read(most + 1)
    except zstd.ZstdError as error:
        raise Damaged(f"{file} contains a damaged zstd stream: {error}") from error
    if len(content) > most:
        raise Damaged(f"{file} contains a zstd stream of more than {most} bytes")
    return content


def zstandard(file: str) -> Any:
    """The library that knows zstd.

    Raises:
        UnsupportedFormat: it is not installed.
    """
    try:
        return importlib.import_module("zstandard")
    except ImportError as error:
        raise UnsupportedFormat(
            f"{file} is compressed with zstd (stream.zstd/1); to read it, install the library: "
            "pip install 'unickpt[zstd]'"
        ) from error


class ChunkFinder:
    """Finds the chunks of one checkpoint in its files."""

    def __init__(self) -> None:
        self._headers: dict[tuple[str, int], SafetensorsHeader] = {}

    def elements(self, name: str, facts: TensorFacts, chunk: DcpChunk) -> Elements:
        """The elements of a chunk.

        Arguments:
            name: of its tensor, in the metadata.
            facts: of its tensor.
            chunk: one of them.
        """
        blob = chunk.blob
        find = partial(self._find, name, facts, chunk)
        if not blob.compressed:
            return LocatedElements(blob, find)
        needed = chunk.box.size * dtype_from_name(facts.dtype).itemsize
        inner = replace(chunk, blob=Blob(blob.file, 0, 0))
        find = partial(_in_zip, facts.dtype, inner)
        return Compressed(blob, needed + _AROUND, partial(LocatedElements, inner.blob, find))

    def _find(self, name: str, facts: TensorFacts, chunk: DcpChunk, files: Files) -> FileBox:
        """Where the elements of a chunk are, by its own header, which must fit the metadata."""
        blob = chunk.blob
        header = self._headers.get((blob.file, blob.offset))
        if header is None:
            head = files.read(blob.file, blob.offset, min(_EDGE, blob.length))
            if head[:4] == _ZIP:
                end = blob.offset + blob.length
                ranges = [(blob.offset, head)]
                if blob.length > _EDGE:
                    ranges.append((end - _EDGE, files.read(blob.file, end - _EDGE, _EDGE)))
                return _in_zip(facts.dtype, chunk, ChunkFacts(files, ranges))
            header = read_header(files, blob.file, blob.offset)
            self._headers[blob.file, blob.offset] = header
        return _in_safetensors(name, facts, chunk, header)


def _in_zip(dtype: str, chunk: DcpChunk, files: Files) -> FileBox:
    blob = chunk.blob
    torch_file = TorchFile(files, blob.file, blob.offset, blob.length or None)
    tensor = torch_file.value
    if not isinstance(tensor, Tensor):
        raise _contradicts(dtype, chunk, "no tensor")
    _check(dtype, chunk, tensor.dtype, tensor.shape)
    return torch_file.box(tensor)


def _in_safetensors(
    name: str, facts: TensorFacts, chunk: DcpChunk, header: SafetensorsHeader
) -> FileBox:
    tensor = header.tensors.get(name)
    chunks_in_file = [other for other in facts.chunks if other.blob.file == chunk.blob.file]
    if tensor is None or len(chunks_in_file) > 1:  # it can hold one tensor of a name
        raise _contradicts(facts.dtype, chunk, "no tensor of its own for this chunk")
    _check(facts.dtype, chunk, tensor.dtype, tensor.shape)
    start = header.offsets.get(name, chunk.box.start)
    if start != chunk.box.start:
        raise _contradicts(facts.dtype, chunk, f"the part that begins at {list(start)}")
    return FileBox(chunk.box, tensor.elements)


def _check(expected: str, chunk: DcpChunk, dtype: str, shape: tuple[int, ...]) -> None:
    if (dtype, shape) != (expected, chunk.box.shape):
        raise _contradicts(expected, chunk, dtype_and_shape(dtype, shape))


def _contradicts(dtype: str, chunk: DcpChunk, content: str) -> CheckpointCorrupt:
    expected = dtype_and_shape(dtype, chunk.box.shape)
    return CheckpointCorrupt(
        f"{chunk.blob.file} contains {content} at byte {chunk.blob.offset}, where the metadata "
        f"expects {expected} for {chunk.box}; are the files of one save?"
    )


# --- files whose bytes are partly in memory -------------------------------------------------------


class ChunkFacts(Files):
    """Files whose bytes are partly in memory already.

    Arguments:
        files: the others.
        ranges: offsets and bytes, all of the one file that is parsed.
    """

    def __init__(self, files: Files, ranges: Iterable[tuple[int, bytes]]) -> None:
        super().__init__(files.location, files.single is not None)
        self._files, self._all = files, list(ranges)
        self.summed = files.summed

    def read(self, file: str, offset: int, length: int) -> bytes:
        for begin, data in self._all:
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin : offset - begin + length]
        begin, data = self._all[-1]
        if offset + length == begin + len(data) and _ZIP_END in data:
            # A search for the end of a zip reads more than the end has, except for comments.
            return bytes(length - len(data)) + data
        return self._files.read(file, offset, length)


def in_memory(files: Files, name: str, data: bytes) -> MemberFiles:
    """A file whose bytes are all in memory.

    Arguments:
        files: of the checkpoint, for messages.
        name: of the file.
        data: the bytes.
    """

    def read_into(offset: int, out: memoryview) -> None:
        out[:] = data[offset : offset + len(out)]

    return MemberFiles(files, {name: ArchivePart(len(data), read_into)})


def _read_flat(files: Files, file_box: FileBox, first: int, out: Array) -> None:
    """Reads consecutive elements of a box.

    Arguments:
        files: of the checkpoint.
        file_box: the box.
        first: the number of the first element, in the box's row-major order.
        out: one-dimensional and contiguous; receives them.

    Raises:
        Failed: the storage failed, or a file is too short.
    """
    done = 0
    for box in flat_range_to_boxes(file_box.box.shape, first, first + out.size):
        read_file_box(files, file_box, box, out[done : done + box.size].reshape(box.shape))
        done += box.size
