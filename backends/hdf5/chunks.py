"""Where the chunks of an HDF5 dataset lie, and how they are decoded.

Source: the HDF5 file format specification, version 3. What libhdf5 leaves to plugins is refused.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.backends.hdf5.blocks import UNDEFINED, integer, tree_leaves, tree_records
from unickpt.backends.hdf5.objects import HDF5Object
from unickpt.errors import UnsupportedFormat

_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_SINGLE, _IMPLICIT, _FIXED, _EXTENSIBLE, _TREE = range(1, 6)
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_NAMES = {4: "szip", 5: "nbit", 6: "scaleoffset", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_MOST_DEFLATED = 1032
_WORDS = 1 << 16


@dataclass(frozen=True)
class HDF5Chunk:
    """Where a chunk is.

    Arguments:
        at, size: its bytes in the file.
        skipped: a bit for each filter that was not applied.
    """

    at: int
    size: int
    skipped: int = 0


@dataclass(frozen=True)
class HDF5Storage:
    """How a dataset is stored.

    Arguments:
        dataset: the object.
        told: its name, for messages.
        begin: where its bytes are if they lie in one piece; None if they do not, or are not stored.
        size: of that piece.
        chunk: the shape of a chunk; None if it has none.
        filters: by number, in the order in which they were applied.
    """

    dataset: HDF5Object
    told: str
    begin: int | None = None
    size: int = 0
    chunk: tuple[int, ...] | None = None
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
        blocks, shape = self.dataset.blocks, self.dataset.shape or ()
        grid = [-(-n // c) for n, c in zip(shape, self.chunk or (), strict=True)]
        found: dict[tuple[int, ...], HDF5Chunk] = {}
        for place, chunk in _stored(self):
            if any(i >= n for i, n in zip(place, grid, strict=True)) or not chunk.size:
                continue  # of a time when the dataset was larger
            bad = place in found or chunk.at + chunk.size > blocks.size
            if bad or (not self.filters and chunk.size != self.chunk_bytes):
                raise blocks.damaged(f"{self.told}: the chunk {place} is not at byte {chunk.at}")
            if self.chunk_bytes > _MOST_DEFLATED * (chunk.size + 1):
                raise blocks.damaged(f"{self.told}: the chunk {place} has {chunk.size} bytes only")
            found[place] = chunk
        ends = sorted((chunk.at, chunk.at + chunk.size) for chunk in found.values())
        if any(end > begin for (_, end), (begin, _) in itertools.pairwise(ends)):
            raise blocks.damaged(f"{self.told}: chunks share bytes")
        return found

    def decode(self, chunk: HDF5Chunk, data: bytes) -> np.ndarray:
        """The bytes of a chunk in memory, from those in the file.

        Raises:
            CheckpointCorrupt: they cannot be decoded, or do not match their checksum.
        """
        damaged, told = self.dataset.blocks.damaged, f"{self.told}: the chunk at byte {chunk.at}"
        for number in reversed(range(len(self.filters))):
            if chunk.skipped >> number & 1:
                continue
            if self.filters[number] == _DEFLATE:
                try:
                    data = zlib.decompressobj().decompress(data, self.chunk_bytes + 5)
                except zlib.error as error:
                    raise damaged(f"{told} cannot be decompressed: {error}") from error
            elif self.filters[number] == _FLETCHER32:
                data, stored = data[:-4], integer(data[-4:])
                if stored % 65535 != _fletcher(data) % 65535 or (
                    (stored >> 16) % 65535 != (_fletcher(data) >> 16) % 65535
                ):
                    raise damaged(f"{told} does not match its checksum")
            else:
                data = _unshuffled(data, self.dataset.type.size)
        if len(data) != self.chunk_bytes:
            raise damaged(f"{told} has {len(data)} bytes, {self.chunk_bytes} expected")
        return np.frombuffer(data, np.uint8)


def _fletcher(data: bytes) -> int:
    """The checksum: two sums, each modulo 65535."""
    words = np.frombuffer(data + bytes(len(data) % 2), ">u2").astype(np.uint64)
    one = two = 0
    for begin in range(0, len(words), _WORDS):
        block = words[begin : begin + _WORDS]
        two += len(block) * one + int(
            (block * np.arange(len(block), 0, -1).astype(np.uint64)).sum()
        )
        one += int(block.sum())
    return (two % 65535) << 16 | one % 65535


def _unshuffled(data: bytes, size: int) -> bytes:
    count = len(data) // size
    if count <= 1 or size <= 1:
        return data
    planes = np.frombuffer(data, np.uint8, count * size).reshape(size, count)
    return planes.T.tobytes() + data[count * size :]


def storage(dataset: HDF5Object, told: str) -> HDF5Storage:
    """How a dataset is stored.

    Raises:
        CheckpointCorrupt: what the file says is contradictory.
        UnsupportedFormat: it lies in other files, or by a filter or a version that is not read.
    """
    (data, place), where = dataset.layout, f"{dataset.blocks.where}: {told}"
    version, kind = data[0], data[1]
    if kind == _VIRTUAL or dataset.is_external:
        raise UnsupportedFormat(f"{where} lies in other files")
    if version not in (3, 4, 5):
        raise UnsupportedFormat(f"{where} has a layout of version {version}, which is not read")
    if kind == _COMPACT:
        return HDF5Storage(dataset, told, place + 4, integer(data[2:4]))
    if kind == _CONTIGUOUS:
        begin, size = struct.unpack_from("<QQ", data, 2)
        return (
            HDF5Storage(dataset, told)
            if begin == UNDEFINED
            else HDF5Storage(dataset, told, begin, size)
        )
    rank = len(dataset.shape or ())
    if version == 3:
        stored, dims = data[2], struct.unpack_from(f"<{rank + 1}I", data, 11)
    else:
        stored, wide = data[3], data[4]
        dims = tuple(integer(data[5 + n * wide :][:wide]) for n in range(rank + 1))
    if kind != _CHUNKED or stored != rank + 1 or 0 in dims or dims[-1] != dataset.type.size:
        raise dataset.blocks.damaged(f"{told}: its chunks do not fit its shape")
    return HDF5Storage(dataset, told, None, 0, dims[:-1], _filters(dataset.filters, where))


def _filters(data: bytes, where: str) -> tuple[int, ...]:
    """The numbers of the filters. Each takes part once: twice, they unpack without a bound."""
    if not data:
        return ()
    version, count, at, found = data[0], data[1], 8 if data[0] == 1 else 2, list[int]()
    for _ in range(count):
        number = integer(data[at : at + 2])
        named = version == 1 or number >= 256
        length = integer(data[at + 2 : at + 4]) if named else 0
        at += 4 if named else 2
        values = integer(data[at + 2 : at + 4])
        at += 4 + (-(-length // 8) * 8 if version == 1 else length) + 4 * values
        at += 4 * (values % 2) if version == 1 else 0
        found.append(number)
        if number not in (_DEFLATE, _SHUFFLE, _FLETCHER32) or found.count(number) > 1:
            name = f"{number} ({_NAMES[number]})" if number in _NAMES else str(number)
            twice = " twice" if found.count(number) > 1 else ""
            raise UnsupportedFormat(
                f"{where} is stored with the filter {name}{twice}; deflate, shuffle and fletcher32 "
                "are read, each once: write it again with h5py, without the filter"
            )
    return tuple(found)


# --- indexes --------------------------------------------------------------------------------------


def _stored(of: HDF5Storage) -> Iterator[tuple[tuple[int, ...], HDF5Chunk]]:
    """The chunks in the index of a dataset, with their places."""
    assert of.chunk is not None
    (data, _), blocks, rank = of.dataset.layout, of.dataset.blocks, len(of.chunk)
    if data[0] == 3:
        root = integer(data[3:11])
        if root == UNDEFINED:
            return
        for key, at in tree_leaves(blocks, root, 1, 16 + 8 * rank):
            size, skipped, *offsets = struct.unpack(f"<II{rank + 1}Q", key)
            if any(n % c for n, c in zip(offsets, of.chunk, strict=False)):
                raise blocks.damaged(f"{of.told}: a chunk begins at {offsets}")
            place = tuple(n // c for n, c in zip(offsets, of.chunk, strict=False))
            yield place, HDF5Chunk(at, size, skipped)
        return
    at = 5 + data[4] * (rank + 1)
    kind, root = data[at], integer(data[-8:])
    if root == UNDEFINED:
        return
    if kind == _SINGLE:
        filtered = struct.unpack_from("<QI", data, at + 1) if data[2] & 2 else (of.chunk_bytes, 0)
        root = integer(data[at + 1 + (12 if data[2] & 2 else 0) :][:8])
        yield (0,) * rank, HDF5Chunk(root, *filtered)
    elif kind == _TREE:
        root = integer(data[at + 7 : at + 15])
        for record in tree_records(blocks, root, (10, 11)):
            chunk = _element(of, record[: len(record) - 8 * rank])
            if chunk is not None:
                yield struct.unpack(f"<{rank}Q", record[-8 * rank :]), _whole_edges(of, chunk, data)
    else:
        yield from _numbered(of, data, at)


def _whole_edges(of: HDF5Storage, chunk: HDF5Chunk, layout: bytes) -> HDF5Chunk:
    if layout[2] & 1:
        raise UnsupportedFormat(
            f"{of.dataset.blocks.where}: {of.told} has chunks at its edges without filters, which "
            "is not read"
        )
    return chunk


def _numbered(of: HDF5Storage, data: bytes, at: int) -> Iterator[tuple[tuple[int, ...], HDF5Chunk]]:
    """As `_stored`, of an index in which the chunks have numbers."""
    assert of.chunk is not None
    most, kind, order = list(of.dataset.most), data[at], list(range(len(of.chunk)))
    root = integer(data[at + {_IMPLICIT: 1, _FIXED: 2}.get(kind, 6) :][:8])
    if kind == _EXTENSIBLE:  # the dimension without an end comes first
        order.sort(key=lambda d: most[d] != UNDEFINED)
    grid = [-(-most[d] // of.chunk[d]) for d in order]
    found: Iterator[tuple[int, HDF5Chunk]]
    if kind == _IMPLICIT:
        count, blocks = math.prod(grid), of.dataset.blocks
        if count * of.chunk_bytes > blocks.size:
            raise blocks.damaged(f"{of.told}: the file is too short for its chunks")
        found = ((n, HDF5Chunk(root + n * of.chunk_bytes, of.chunk_bytes)) for n in range(count))
    elif kind == _FIXED:
        found = _fixed(of, root)
    elif kind == _EXTENSIBLE:
        found = _extensible(of, root)
    else:
        raise of.dataset.blocks.damaged(f"{of.told}: its index is of the type {kind}")
    for number, chunk in found:
        place = [0] * len(order)
        for position in reversed(range(len(order))):
            last = position == 0
            rest, number = (
                (number, 0) if last else (number % grid[position], number // grid[position])
            )
            place[order[position]] = rest
        yield tuple(place), _whole_edges(of, chunk, data)


def _element(of: HDF5Storage, data: bytes) -> HDF5Chunk | None:
    """A chunk from its element of an index; None if it is not stored."""
    at = integer(data[:8])
    if at == UNDEFINED:
        return None
    if len(data) == 8:
        return HDF5Chunk(at, of.chunk_bytes)
    return HDF5Chunk(at, integer(data[8:-4]), integer(data[-4:]))


def _elements(
    of: HDF5Storage, data: bytes, size: int, first: int
) -> Iterator[tuple[int, HDF5Chunk]]:
    for begin in range(0, len(data), size):
        chunk = _element(of, data[begin : begin + size])
        if chunk is not None:
            yield first + begin // size, chunk


def _pages(
    of: HDF5Storage, at: int, count: int, page: int, size: int, first: int, written: Sequence[bool]
) -> Iterator[tuple[int, HDF5Chunk]]:
    """The elements in pages, each with its checksum, of which not all need be written."""
    for number, here in enumerate(written):
        length = min(page, count - number * page)
        if here:
            data = of.dataset.blocks.checked(at, b"", length * size)
            yield from _elements(of, data, size, first + number * page)
        at += length * size + 4


def _bits(data: bytes, count: int) -> list[bool]:
    return [bool(data[n // 8] & 0x80 >> n % 8) for n in range(count)]


def _fixed(of: HDF5Storage, root: int) -> Iterator[tuple[int, HDF5Chunk]]:
    """The elements of a fixed array."""
    blocks = of.dataset.blocks
    *_, size, page_bits, count, at = struct.unpack("<4sBBBBQQ", blocks.checked(root, b"FAHD", 24))
    if at == UNDEFINED:
        return
    page = 1 << page_bits
    if size < 8 or page_bits > 32 or count * size > blocks.size * page:
        raise blocks.damaged(f"the array at byte {root} has {count} elements")
    if count <= page:
        data = blocks.checked(at, b"FADB", 14 + count * size)
        yield from _elements(of, data[14:], size, 0)
        return
    pages = -(-count // page)
    data = blocks.checked(at, b"FADB", 14 + -(-pages // 8))
    written = _bits(data[14:], pages)
    yield from _pages(of, at + len(data) + 4, count, page, size, 0, written)


def _extensible(of: HDF5Storage, root: int) -> Iterator[tuple[int, HDF5Chunk]]:
    """The elements of an extensible array."""
    blocks = of.dataset.blocks
    head = struct.unpack("<4sBBBBBBBB7Q", blocks.checked(root, b"EAHD", 68))
    size, bits, direct, least, pointers, page_bits = head[3:9]
    index = head[-1]
    if index == UNDEFINED:
        return
    if size < 8 or not least.bit_count() == pointers.bit_count() == 1 or page_bits > 32:
        raise blocks.damaged(f"the array at byte {root} has no blocks")
    in_index, blocks_here = 2 * (pointers.bit_length() - 1), 2 * (pointers - 1)
    supers = 1 + bits - (least.bit_length() - 1)
    length = 14 + direct * size + 8 * (blocks_here + max(0, supers - in_index))
    data = blocks.checked(index, b"EAIB", length)
    yield from _elements(of, data[14 : 14 + direct * size], size, 0)
    addresses = struct.unpack_from(
        f"<{(length - 14 - direct * size) // 8}Q", data, 14 + direct * size
    )
    first, used, page, wide = direct, 0, 1 << page_bits, -(-bits // 8)
    for number in range(supers):
        count, per = 1 << number // 2, least << (number + 1) // 2
        pages = per // page if per > page else 0
        if number < in_index:
            for at in addresses[used : used + count]:
                yield from _block(of, at, per, page, size, first, wide, [True] * pages)
                first += per
            used += count
            continue
        at = addresses[blocks_here + number - in_index]
        if at == UNDEFINED:
            first += count * per
            continue
        flags = -(-pages // 8)
        data = blocks.checked(at, b"EASB", 14 + wide + count * (flags + 8))
        every = _bits(data[14 + wide :], count * pages)  # not from a new byte for each block
        for n in range(count):
            written = every[n * pages : (n + 1) * pages]
            block = integer(data[14 + wide + count * flags + 8 * n :][:8])
            yield from _block(of, block, per, page, size, first, wide, written)
            first += per


def _block(
    of: HDF5Storage, at: int, count: int, page: int, size: int, first: int, wide: int,
    written: Sequence[bool],
) -> Iterator[tuple[int, HDF5Chunk]]:  # fmt: skip
    """The elements of a data block of an extensible array."""
    if at == UNDEFINED:
        return
    blocks = of.dataset.blocks
    if not written:
        data = blocks.checked(at, b"EADB", 14 + wide + count * size)
        yield from _elements(of, data[14 + wide :], size, first)
        return
    blocks.checked(at, b"EADB", 14 + wide)
    yield from _pages(of, at + 18 + wide, count, page, size, first, written)
