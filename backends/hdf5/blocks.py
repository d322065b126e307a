"""The bytes that an HDF5 file's own structures consist of, and the trees and heaps of them.

Source: the HDF5 file format specification, version 3. The files are untrusted: a structure that
leads back to itself, or in which much refers to the same bytes, ends at a bound on what is read.
"""

from __future__ import annotations

import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from unickpt.errors import CheckpointCorrupt, UnsupportedFormat

UNDEFINED = (1 << 64) - 1
"""As an address: there is nothing."""
_PAGE, _PAGES = 64 << 10, 256  # bytes, and how many are kept
# Nothing is read twice, but for small structures that several use; some bytes cost as many.
_REREADS, _LEAST, _SPARE = 8, 32, 1 << 20
_MASK = 0xFFFFFFFF


@dataclass
class HDF5Blocks:
    """The bytes of an HDF5 file, called from several threads.

    Arguments:
        where: the file, for messages.
        size: its bytes.
        fetch: reads bytes, by offset and count.
    """

    where: str
    size: int
    fetch: Callable[[int, int], bytes]
    _pages: OrderedDict[int, bytes] = field(default_factory=OrderedDict)
    _seen: set[int] = field(default_factory=set)
    _read: int = 0
    _fetched: int = 0
    _lock: Any = field(default_factory=threading.Lock)

    def read(self, at: int, count: int) -> bytes:
        """Bytes of a structure.

        Raises:
            CheckpointCorrupt: the file is shorter, or too much is read again and again.
        """
        if at < 0 or count < 0 or at + count > self.size:
            raise self.damaged(f"it needs bytes {at} to {at + count}, and has {self.size}")
        with self._lock:
            first, last = at // _PAGE, (at + max(0, count - 1)) // _PAGE
            data = b"".join(self._page(number) for number in range(first, last + 1))
            self._read += max(count, _LEAST)
            new = _PAGE * len(self._seen)
            if max(self._read, self._fetched) > _SPARE + _REREADS * min(new, self.size):
                raise self.damaged("its structures lead back to themselves")
        return data[at - first * _PAGE :][:count]

    def _page(self, number: int) -> bytes:
        data = self._pages.pop(number, None)
        if data is None:
            data = self.fetch(number * _PAGE, min(_PAGE, self.size - number * _PAGE))
            self._fetched += len(data)
            self._seen.add(number)
        self._pages[number] = data
        if len(self._pages) > _PAGES:
            self._pages.popitem(last=False)
        return data

    def signed(self, at: int, signature: bytes, count: int) -> bytes:
        """Bytes of a structure that begins with a signature."""
        data = self.read(at, count)
        if data[: len(signature)] != signature:
            raise self.damaged(f"no {signature.decode()} at byte {at}")
        return data

    def checked(self, at: int, signature: bytes, count: int) -> bytes:
        """As `signed`, of a structure that ends with its checksum, which is not in `count`."""
        data = self.signed(at, signature, count + 4)
        if checksum(data[:-4]) != integer(data[-4:]):
            raise self.damaged(f"the {signature.decode()} at byte {at} does not match its checksum")
        return data[:-4]

    def damaged(self, what: str) -> CheckpointCorrupt:
        """The error."""
        return CheckpointCorrupt(f"{self.where} is damaged: {what}")


def integer(data: bytes) -> int:
    """An unsigned one, of any length."""
    return int.from_bytes(data, "little")


def _rotated(x: int, by: int) -> int:
    return (x << by | x >> 32 - by) & _MASK


def checksum(data: bytes) -> int:
    """Bob Jenkins' lookup3, which all newer structures have."""
    a = b = c = (0xDEADBEEF + len(data)) & _MASK
    if not data:
        return c
    words = struct.unpack(f"<{-(-len(data) // 12) * 3}I", data + bytes(-len(data) % 12))
    for at in range(0, len(words), 3):
        a, b, c = a + words[at] & _MASK, b + words[at + 1] & _MASK, c + words[at + 2] & _MASK
        if at == len(words) - 3:
            break
        a = (a - c & _MASK) ^ _rotated(c, 4)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ _rotated(a, 6)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ _rotated(b, 8)
        b = b + a & _MASK
        a = (a - c & _MASK) ^ _rotated(c, 16)
        c = c + b & _MASK
        b = (b - a & _MASK) ^ _rotated(a, 19)
        a = a + c & _MASK
        c = (c - b & _MASK) ^ _rotated(b, 4)
        b = b + a & _MASK
    c = (c ^ b) - _rotated(b, 14) & _MASK
    a = (a ^ c) - _rotated(c, 11) & _MASK
    b = (b ^ a) - _rotated(a, 25) & _MASK
    c = (c ^ b) - _rotated(b, 16) & _MASK
    a = (a ^ c) - _rotated(c, 4) & _MASK
    b = (b ^ a) - _rotated(a, 14) & _MASK
    return (c ^ b) - _rotated(b, 24) & _MASK


def tree_leaves(blocks: HDF5Blocks, at: int, kind: int, key: int) -> Iterator[tuple[bytes, int]]:
    """The keys and addresses in the leaves of a B-tree of version 1.

    Arguments:
        blocks: of the file.
        at: the root.
        kind: the type of its nodes.
        key: bytes of a key.
    """
    todo, above = [(at, -1)], set[int]()
    while todo:
        at, expected = todo.pop()
        if at in above:
            raise blocks.damaged(f"two ways lead to the node at byte {at}")
        above.add(at)
        found, level, used = struct.unpack_from("<BBH", blocks.signed(at, b"TREE", 24), 4)
        if found != kind or expected not in (-1, level):
            raise blocks.damaged(f"the node at byte {at} is of another tree")
        data = blocks.read(at + 24, used * (key + 8))
        entries = []
        for begin in range(0, len(data), key + 8):
            child = integer(data[begin + key : begin + key + 8])
            entries.append((data[begin : begin + key], child))
        if level:
            todo += [(child, level - 1) for _, child in reversed(entries)]
        else:
            yield from entries


def _width(most: int) -> int:
    """Bytes of an integer up to `most`."""
    return max(1, (most.bit_length() + 7) // 8)


def tree_records(blocks: HDF5Blocks, at: int, kinds: tuple[int, ...]) -> Iterator[bytes]:
    """The records of a B-tree of version 2.

    Arguments:
        blocks: of the file.
        at: its header.
        kinds: of the records it may have.
    """
    _, _, kind, node, size, depth, _, _, root, count, _ = struct.unpack(
        "<4sBBIHHBBQHQ", blocks.checked(at, b"BTHD", 34)
    )
    if kind not in kinds or size == 0 or node < 10 + size or depth > 32:
        raise blocks.damaged(f"the tree at byte {at} has other records")
    if root == UNDEFINED:
        return
    most = below = (node - 10) // size
    wide, totals = _width(most), [0, 0]  # of the counts; of the totals, by depth
    for _ in range(depth):
        pointer = 8 + wide + totals[-1]
        here = (node - 10 - pointer) // (size + pointer)
        below = (here + 1) * below + here
        totals.append(_width(below))
    todo, above = [(root, depth, count)], set[int]()
    while todo:
        at, level, count = todo.pop()
        if at in above:
            raise blocks.damaged(f"two ways lead to the node at byte {at}")
        above.add(at)
        pointer = 8 + wide + totals[level] if level else 0
        length = 6 + count * size + (count + 1) * pointer
        if length + 4 > node:
            raise blocks.damaged(f"the node at byte {at} has {count} records")
        data = blocks.checked(at, b"BTIN" if level else b"BTLF", length)
        for n in range(count):
            yield data[6 + n * size :][:size]
        for n in range(count + 1 if level else 0):
            begin = 6 + count * size + n * pointer
            child = integer(data[begin : begin + 8])
            todo.append((child, level - 1, integer(data[begin + 8 : begin + 8 + wide])))


@dataclass(frozen=True)
class FractalHeap:
    """A heap of links or attributes.

    Arguments:
        blocks: of the file.
        at: its header.
    """

    blocks: HDF5Blocks
    at: int
    _kept: dict[int, bytes] = field(default_factory=dict)

    @cached_property
    def _header(self) -> tuple[int, ...]:
        """The flags, the largest object, the width, the smallest and the largest block, the bits of
        an offset, the root, and its rows."""
        head = struct.unpack("<4sBHHBI12QHQQHHQH", self.blocks.checked(self.at, b"FRHP", 142))
        if head[3]:
            raise UnsupportedFormat(f"{self.blocks.where}: its heap of names is compressed")
        _, _, _, _, flags, largest, *_ = head
        width, smallest, most, bits, _, root, rows = head[18:]
        if not (smallest.bit_count() == most.bit_count() == width.bit_count() == 1 and bits <= 64):
            raise self.blocks.damaged(f"the heap at byte {self.at} has no blocks")
        return flags, largest, width, smallest, most, bits, root, rows

    def object(self, key: bytes) -> bytes | None:
        """What lies in a block, by its key; None if it lies elsewhere."""
        _, largest, _, _, most, bits, root, rows = self._header
        if key[0] & 0x30:
            return None
        end = 1 + -(-bits // 8)
        offset, wide = integer(key[1:end]), min(_width(most), _width(largest))
        length = integer(key[end : end + wide])
        block, begin, size = self._block(root, rows, offset)
        if offset - begin + length > size:
            raise self.blocks.damaged(f"an object leaves its block at byte {block}")
        return self._direct(block, size)[offset - begin :][:length]

    def _block(self, at: int, rows: int, offset: int) -> tuple[int, int, int]:
        """The address, offset and size of the block that an offset lies in."""
        _, _, width, smallest, most, bits, _, _ = self._header
        if rows == 0:
            return at, 0, smallest
        start, inner = 0, offset
        while True:
            size = smallest
            row = (inner // (smallest * width)).bit_length()
            if row:
                size = smallest << row - 1
                first = size * width
            else:
                first = 0
            if row >= rows:
                raise self.blocks.damaged(f"the heap at byte {self.at} has no byte {offset}")
            direct = most.bit_length() - smallest.bit_length() + 2
            column = (inner - first) // size
            head = 13 + -(-bits // 8)
            if at not in self._kept:
                self._kept[at] = self.blocks.checked(at, b"FHIB", head + 8 * rows * width)
            data = self._kept[at]
            at = integer(data[head + 8 * (row * width + column) :][:8])
            start, inner = start + first + column * size, inner - first - column * size
            if row < direct:
                return at, start, size
            rows = size.bit_length() - (smallest * width).bit_length() + 1

    def _direct(self, at: int, size: int) -> bytes:
        if at in self._kept:
            return self._kept[at]
        flags, _, _, _, _, bits, _, _ = self._header
        data = self.blocks.signed(at, b"FHDB", size)
        end = 13 + -(-bits // 8)
        if flags & 2:
            zeroed = data[:end] + bytes(4) + data[end + 4 :]
            if checksum(zeroed) != integer(data[end : end + 4]):
                raise self.blocks.damaged(f"the FHDB at byte {at} does not match its checksum")
        self._kept[at] = data
        return data
