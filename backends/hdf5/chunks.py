"""How an HDF5 dataset is stored: in one piece, in its header, or in chunks, which are decoded here.

pyfive would decompress a chunk whatever it expands to; here no more than the dataset declares is.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from unickpt.backends.hdf5.objects import UNDEFINED, HDF5Object
from unickpt.errors import UnsupportedFormat

_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_NAMES = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_MOST_DEFLATED = 1032


@dataclass(frozen=True)
class HDF5Chunk:
    """Where a chunk is.

    Arguments:
        begin, size: its bytes in the file.
        skipped: a bit for each filter that was not applied.
    """

    begin: int
    size: int
    skipped: int = 0


@dataclass(frozen=True)
class HDF5Storage:
    """How a dataset is stored.

    Arguments:
        dataset: the object.
        name: of the dataset, quoted for messages.
        begin: where its bytes are if they lie in one piece; None if they do not, or are not stored.
        size: of that piece.
        inline: its bytes, if they lie in its header.
        chunk: the shape of a chunk; None if it has none.
        tree: the address of the index of its chunks; None if none are stored.
        filters: by number, in the order in which they were applied.
    """

    dataset: HDF5Object
    name: str
    begin: int | None = None
    size: int = 0
    inline: bytes | None = None
    chunk: tuple[int, ...] | None = None
    tree: int | None = None
    filters: tuple[int, ...] = ()

    @property
    def chunk_bytes(self) -> int:
        """The bytes of a chunk in memory."""
        return math.prod(self.chunk or ()) * self.dataset.type.size

    def chunks(self) -> dict[tuple[int, ...], HDF5Chunk]:
        """The chunks that are stored, by their places in the grid of chunks.

        Raises:
            CheckpointCorrupt: the places are no such places, or chunks share bytes.
        """
        file, shape = self.dataset.file, self.dataset.shape or ()
        grid = [-(-n // c) for n, c in zip(shape, self.chunk or (), strict=True)]
        chunks: dict[tuple[int, ...], HDF5Chunk] = {}
        for place, chunk in self._indexed():
            if any(i >= n for i, n in zip(place, grid, strict=True)) or not chunk.size:
                continue  # of a time when the dataset was larger
            bad = place in chunks or chunk.begin + chunk.size > file.source.size
            if bad or (not self.filters and chunk.size != self.chunk_bytes):
                raise file.damaged(f"{self.name}: the chunk {place} is not at byte {chunk.begin}")
            if self.chunk_bytes > _MOST_DEFLATED * (chunk.size + 1):
                raise file.damaged(f"{self.name}: the chunk {place} has {chunk.size} bytes only")
            chunks[place] = chunk
        ends = sorted((chunk.begin, chunk.begin + chunk.size) for chunk in chunks.values())
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends)):
            raise file.damaged(f"{self.name}: chunks share bytes")
        return chunks

    def _indexed(self) -> Iterator[tuple[tuple[int, ...], HDF5Chunk]]:
        """The chunks in the index, with their places."""
        if self.chunk is None or self.tree is None:
            return
        file, rank = self.dataset.file, len(self.chunk)
        with file.source.at_most(file.source.size):  # each node once
            tree = file.pyfive.BTreeV1RawDataChunks(file.source, self.tree, rank + 1)
        for node in tree.all_nodes[0]:
            for key, begin in zip(node["keys"], node["addresses"], strict=True):
                first = key["chunk_offset"][:rank]
                if any(n % c for n, c in zip(first, self.chunk, strict=True)):
                    raise file.damaged(f"{self.name}: a chunk begins at {first}")
                place = tuple(n // c for n, c in zip(first, self.chunk, strict=True))
                yield place, HDF5Chunk(begin, key["chunk_size"], key["filter_mask"])

    def decode(self, chunk: HDF5Chunk, data: bytes) -> np.ndarray:
        """The bytes of a chunk in memory, from those in the file.

        Raises:
            CheckpointCorrupt: they cannot be decoded, or do not match their checksum.
        """
        file, where = self.dataset.file, f"{self.name}: the chunk at byte {chunk.begin}"
        pyfive = file.pyfive.BTreeV1RawDataChunks
        for number in reversed(range(len(self.filters))):
            if chunk.skipped >> number & 1:
                continue
            try:
                if self.filters[number] == _DEFLATE:
                    data = zlib.decompressobj().decompress(data, self.chunk_bytes + 5)
                else:
                    entry = {"filter_id": self.filters[number]}
                    data = pyfive._filter_chunk(data, 0, [entry], self.dataset.type.size)
            except zlib.error as error:
                raise file.damaged(f"{where} cannot be decompressed: {error}") from error
            except ValueError as error:
                raise file.damaged(f"{where} does not match its checksum") from error
        if len(data) != self.chunk_bytes:
            raise file.damaged(f"{where} has {len(data)} bytes, {self.chunk_bytes} expected")
        return np.frombuffer(data, np.uint8)


def storage(dataset: HDF5Object, name: str) -> HDF5Storage:
    """How a dataset is stored.

    Raises:
        CheckpointCorrupt: the file contradicts itself.
        UnsupportedFormat: it lies in other files, or uses a filter or a version that is not read.
    """
    data, where = dataset.layout, f"{dataset.file.where}: {name}"
    version, kind = data[0], data[1]
    if kind == _VIRTUAL or dataset.is_external:
        raise UnsupportedFormat(f"{where} lies in other files")
    if version < 3 or version > (3 if kind == _CHUNKED else 5):
        raise UnsupportedFormat(
            f"{where} has a layout of version {version}, which pyfive does not read: write the "
            'file again with h5py.File(..., libver=("earliest", "v108"))'
        )
    if kind == _COMPACT:
        size = int.from_bytes(data[2:4], "little")
        inline, shape = data[4 : 4 + size], dataset.shape or ()
        return HDF5Storage(dataset, name, 0, size, inline, shape)
    if kind == _CONTIGUOUS:
        begin, size = struct.unpack_from("<QQ", data, 2)
        stored = begin != UNDEFINED
        return HDF5Storage(dataset, name, begin, size) if stored else HDF5Storage(dataset, name)
    rank = len(dataset.shape or ())
    stored_rank, tree, *dims = struct.unpack_from(f"<BQ{rank + 1}I", data, 2)
    if kind != _CHUNKED or stored_rank != rank + 1 or 0 in dims or dims[-1] != dataset.type.size:
        raise dataset.file.damaged(f"{name}: its chunks do not fit its shape")
    return HDF5Storage(
        dataset, name, chunk=tuple(dims[:-1]), tree=None if tree == UNDEFINED else tree,
        filters=_filters(dataset, where),
    )  # fmt: skip


def _filters(dataset: HDF5Object, where: str) -> tuple[int, ...]:
    """The numbers of the filters. Each takes part once: twice, they unpack without a bound."""
    numbers = [entry["filter_id"] for entry in dataset.header.filter_pipeline or ()]
    for number in numbers:
        twice = " twice" if numbers.count(number) > 1 else ""
        if number not in (_DEFLATE, _SHUFFLE, _FLETCHER32) or twice:
            name = f"{number} ({_NAMES[number]})" if number in _NAMES else str(number)
            raise UnsupportedFormat(
                f"{where} is stored with the filter {name}{twice}; deflate, shuffle and fletcher32 "
                "are read, each once: write it again with h5py, without the filter"
            )
    return tuple(numbers)
