"""OCDBT's manifests and B-tree nodes, decoded as untrusted input and within bounds.

TensorStore's own decoder trusts its input: a node of a few kilobytes can unpack to gigabytes, and
keys that share long prefixes expand it again. So every node is decoded here before it reaches
TensorStore. TensorStore's documentation describes the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add, gt, le, lt
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from unickpt.storage.errors import Damaged

MOST_MANIFEST_BYTES = 1 << 20
MANIFEST_MAGIC = bytes.fromhex("0cdb3a2a")
NODE_MAGIC = bytes.fromhex("0cdb20de")
_HEADER_BYTES = 4 + 8 + 2
_ENDING_BYTES = 4
_MOST_ENTRIES = 1 << 20  # as TensorStore
MOST_KEY_BYTES = (1 << 16) - 1  # of a key, and of a file's path; as TensorStore
_MOST_OFFSET = (1 << 63) - 1
_MISSING = (1 << 64) - 1
_FEW = 32  # below this, NumPy is slower than Python
# Memory of an entry or a file name in addition to its bytes.
_ENTRY_BYTES = 96
_FREE_BYTES = 32 << 20
_PER_STORED_BYTE = 256  # measured: up to 85 for keys that follow a pattern

NodeColumn = np.ndarray[Any, Any]


class NodeBudget:
    """Limits the memory of a database's nodes relative to their stored bytes."""

    def __init__(self) -> None:
        self._most, self._taken = _FREE_BYTES, 0

    @property
    def left(self) -> int:
        return self._most - self._taken

    def earn(self, stored: int) -> None:
        """Counts the stored bytes of a node, once per node.

        Arguments:
            stored: the number of its stored bytes.
        """
        self._most += _PER_STORED_BYTE * stored

    def take(self, nbytes: int) -> None:
        """Counts memory before it is used.

        Raises:
            Damaged: it is too much for the stored bytes.
        """
        self._taken += nbytes
        if self._taken > self._most:
            raise Damaged(
                f"the nodes of the B-tree take more than {self._most >> 20} MiB when unpacked, "
                "far more than their stored bytes should need"
            )


class DataReference(NamedTuple):
    """The place of a value or a node: a range of bytes in a data file.

    TensorStore calls it an indirect data reference.

    Arguments:
        path: of the file, below the database's folder.
        offset: of the first byte.
        length: in bytes.
        base: of a node: length of the prefix of `path` that all its paths share.
    """

    path: str
    offset: int
    length: int
    base: int = 0


class Manifest(NamedTuple):
    """The facts of a manifest about the newest version of a database.

    Arguments:
        root: the place of the root node; None if the database is empty.
        height: of the root node.
        keys: number of keys, as the manifest claims.
        nbytes: of all nodes and values in files, likewise.
        committed: when it was committed, in seconds since 1970, likewise.
    """

    root: DataReference | None = None
    height: int = 0
    keys: int = 0
    nbytes: int = 0
    committed: float = 0.0


@dataclass(frozen=True, eq=False)
class BTreeNode:
    """A B-tree node; equal only to itself.

    Arguments:
        height: 0 for a leaf.
        keys: of the entries, ascending, whole.
        files: the paths of all files that the node names, with the length of their bases.
        which: of each entry: the position of its file in `files`; -1 for a value in the node.
        offsets: of each entry: in bytes; in `inline` for a value in the node.
        lengths: of each entry: in bytes.
        common: of each entry of an inner node: length of the key prefix of all keys below it.
        inline: the values in the node, joined.
    """

    height: int
    keys: list[bytes]
    files: list[tuple[str, int]]
    which: NodeColumn
    offsets: NodeColumn
    lengths: NodeColumn
    common: list[int]
    inline: bytes

    def find(self, entry: int) -> bytes | DataReference:
        """The value of an entry, or its place, or the place of its node."""
        offset, length = int(self.offsets[entry]), int(self.lengths[entry])
        if self.which[entry] < 0:
            return self.inline[offset : offset + length]
        path, base = self.files[self.which[entry]]
        return DataReference(path, offset, length, base)


def manifest(data: bytes) -> Manifest:
    """Decodes a manifest.

    Raises:
        Damaged: it is invalid, or of a kind that checkpoints do not use.
    """
    if len(data) > MOST_MANIFEST_BYTES:
        raise Damaged(
            f"the manifest has {len(data)} bytes; a checkpoint's has at most {MOST_MANIFEST_BYTES}"
        )
    budget = NodeBudget()
    body = _open(data, MANIFEST_MAGIC, "the manifest", budget)
    if body.take(17)[16] != 0:  # after the database's name
        raise Damaged("the manifest does not hold the database's versions")
    body.few(2)
    body.take(1)
    if body.few(1) != [0]:
        body.take(4)
    files = _files(body, "", budget)
    (count,) = body.few(1)
    if not 0 < count <= _MOST_ENTRIES:
        raise Damaged(f"the manifest names {count} versions")
    budget.take(count * _ENTRY_BYTES)
    body.numbers(count)
    heights = body.take(count)
    which, offset, length, keys, *nbytes = body.numbers(6, count)[:, -1].tolist()
    committed = int.from_bytes(body.take(8 * count)[-8:], "little") / 1e9
    if offset == length == _MISSING:
        return Manifest(committed=committed)
    _check_references([which], [offset], [length], files)
    path, base = files[which]
    root = DataReference(path, offset, length, base)
    return Manifest(root, heights[-1], keys, sum(nbytes), committed)


def node(
    data: bytes, where: DataReference, height: int, prefix: bytes, budget: NodeBudget
) -> BTreeNode:
    """Decodes a B-tree node.

    Arguments:
        data: the stored bytes.
        where: their origin.
        height: the height that the node must have.
        prefix: of all its keys.
        budget: of the database.

    Raises:
        Damaged: it is invalid, has another height, or is too large for its stored bytes.
    """
    name = f"the B-tree node at byte {where.offset} of {where.path}"
    body = _open(data, NODE_MAGIC, name, budget)
    if body.take(1)[0] != height:
        raise Damaged(f"{name} does not have the height {height}")
    files = _files(body, where.path[: where.base], budget)
    (count,) = body.few(1)
    if not 0 < count <= _MOST_ENTRIES:
        raise Damaged(f"{name} has {count} entries")
    budget.take(count * _ENTRY_BYTES)
    keys, common = _keys(body, count, prefix, height > 0, budget)
    if height:
        which, offsets, lengths = body.numbers(3, count)
        _check_references(which, offsets, lengths, files)
        common = [len(prefix) + n for n in common]
        return BTreeNode(height, keys, files, which.astype(np.int64), offsets, lengths, common, b"")
    lengths = body.numbers(count)
    apart = np.frombuffer(body.take(count), np.uint8) != 0
    apart_count = int(apart.sum())
    file_numbers, starts = body.numbers(2, apart_count)
    _check_references(file_numbers, starts, lengths[apart], files)
    which = np.full(count, -1, np.int64)
    which[apart] = file_numbers
    within = np.where(apart, np.uint64(0), lengths)
    if int(within.max()) > budget.left:
        raise body.too_short()
    offsets = np.cumsum(within) - within
    offsets[apart] = starts
    inline = body.take(int(within.sum()))
    return BTreeNode(0, keys, files, which, offsets, lengths, [], inline)


def _open(data: bytes, magic: bytes, name: str, budget: NodeBudget) -> _Body:
    """Checks the header and checksum of a manifest or a node."""
    length = int.from_bytes(data[4:12], "little")
    if data[:4] != magic or length != len(data) or len(data) < _HEADER_BYTES + _ENDING_BYTES:
        raise Damaged(f"{name} does not begin with the right bytes")
    if data[12] != 0 or data[13] > 1:
        raise Damaged(
            f"{name} has version {data[12]} and compression {data[13]}; supported are version 0 "
            "and compression 0 and 1"
        )
    if not is_sealed(data):
        raise Damaged(f"{name} does not match its checksum")
    return _Body(data[_HEADER_BYTES:-_ENDING_BYTES], data[13] == 1, name, budget)


class _Body:
    """The body of a manifest or node, read from its start; unpacked only as far as needed.

    Arguments:
        stored: the bytes.
        packed: whether they are a zstd stream.
        name: their name in messages.
        budget: for the unpacked bytes.
    """

    def __init__(self, stored: bytes, packed: bool, name: str, budget: NodeBudget) -> None:
        self._stored, self._packed, self._name, self._budget = stored, packed, name, budget
        self._data = b"" if packed else stored
        self._at = 0
        # The number of bytes to unpack next; no more are unpacked.
        self._guess, self._most = 0, len(stored)
        if packed:  # as TensorStore does, and no save of ours
            from unickpt.storage.btree import bounded_codecs

            self._guess, self._most = bounded_codecs.zstd_sizes(stored)

    def too_short(self) -> Exception:
        return Damaged(f"{self._name} ends early, or is too large when unpacked")

    def _need(self, end: int, likely: int | None = None) -> None:
        """Unpacks at least up to a position.

        Arguments:
            end: the position.
            likely: how far to unpack if the body is that long.
        """
        if end <= len(self._data):
            return
        if not self._packed or end > self._most:
            raise self.too_short()
        from unickpt.storage.btree import bounded_codecs

        self._budget.take(end - len(self._data))
        guess = self._guess if likely is None or likely > self._most else likely
        more = min(max(end, guess), end + self._budget.left)
        content = bounded_codecs.zstd_prefix(self._stored, more)
        if content is None and more > end:
            self._most = more - 1
            content = bounded_codecs.zstd_prefix(self._stored, end)
        if content is None:
            raise self.too_short()
        self._budget.take(len(content) - end)
        self._data = content
        self._guess = len(content) + (self._most - len(content) + 1) // 2

    def take(self, count: int) -> bytes:
        """The next bytes."""
        start, end = self._at, self._at + count
        if end > len(self._data):
            self._need(end)
        self._at = end
        return self._data[start:end]

    def few(self, count: int) -> list[int]:
        """The next numbers, with seven bits per byte; all bytes of one except its last are above
        127."""
        data, position, value, shift = self._data, self._at, 0, 0
        plain = data[position : position + count]
        if len(plain) == count and plain.isascii():  # most are
            self._at += count
            return [*plain]
        numbers: list[int] = []
        while len(numbers) < count:
            if position == len(data):
                self._need(position + 1)
                data = self._data
            byte = data[position]
            position += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                numbers.append(value)
                value = shift = 0
            elif shift == 70:
                break
        if len(numbers) < count or max(numbers, default=0) > _MISSING:
            raise Damaged(f"{self._name} holds a number of more than 64 bits")
        self._at = position
        return numbers

    def numbers(self, *shape: int) -> NodeColumn:
        """As `few`: an array, such as of two columns with as many numbers each."""
        count = math.prod(shape)
        if count < _FEW:
            return np.array(self.few(count), np.uint64).reshape(shape)
        self._need(self._at + count)
        while True:
            most = self._at + 10 * count
            end = min(most, len(self._data))
            raw = np.frombuffer(self._data, np.uint8, end - self._at, self._at)
            ends = np.flatnonzero(raw < 128)[:count]
            if len(ends) == count:
                break
            if end == most:
                raise Damaged(f"{self._name} holds a number of more than 64 bits")
            missing = count - len(ends)
            # The rest is probably as wide, but a guess beyond the body's end costs more than one
            # that is a little too short.
            wide = missing * len(raw) // (len(ends) or 1)
            self._need(end + missing, end + max(missing, wide - wide // 16))
        starts = np.concatenate([[0], ends[:-1] + 1])
        widths = ends - starts + 1
        if widths.max() > 10:
            raise Damaged(f"{self._name} holds a number of more than 64 bits")
        digits = raw[: ends[-1] + 1].astype(np.uint64) & np.uint64(127)
        shifts = 7 * (np.arange(len(digits)) - np.repeat(starts, widths))
        self._at += len(digits)
        numbers = np.bitwise_or.reduceat(digits << shifts.astype(np.uint64), starts)
        return numbers.reshape(shape)

    def lengths(self, count: int) -> list[int]:
        """The next numbers, which are lengths of keys or paths."""
        lengths: list[int] = self.few(count) if count < _FEW else self.numbers(count).tolist()
        longest = max(lengths, default=0)
        if longest > MOST_KEY_BYTES:
            raise Damaged(
                f"{self._name} holds a key or a path of {longest} bytes, which is too long"
            )
        return lengths


def _files(body: _Body, base: str, budget: NodeBudget) -> list[tuple[str, int]]:
    """The table of files: their paths, and the length of each base path."""
    (count,) = body.few(1)
    if count > _MOST_ENTRIES:
        raise Damaged(f"a node of the B-tree names {count} files")
    if count == 0:
        return []
    numbers = [0, *body.lengths(3 * count - 1)]  # the first path shares nothing with one before it
    shared, lengths, bases = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    budget.take(count * (_ENTRY_BYTES + len(base)) + sum(shared) + sum(lengths))
    out, path, offset = [], b"", 0
    ends = body.take(sum(lengths))
    for again, more, base_length in zip(shared, lengths, bases, strict=True):
        if again > len(path) or base_length > again + more:
            raise Damaged("the paths of files in a node of the B-tree contradict each other")
        path, offset = path[:again] + ends[offset : offset + more], offset + more
        name = _text(path)
        whole = base + name
        out.append((whole, len(base) + (len(_text(path[:base_length])) if base_length else 0)))
        if name.startswith("/") or "\0" in name or ".." in whole.split("/"):
            raise Damaged(f"{whole[:200]!r} lies outside the database")
    return out


def _text(path: bytes) -> str:
    try:
        return path.decode()
    except UnicodeDecodeError:
        raise Damaged(f"a path of a file in the B-tree is {path[:200]!r}") from None


def _keys(
    body: _Body, count: int, prefix: bytes, is_inner: bool, budget: NodeBudget
) -> tuple[list[bytes], list[int]]:
    """The keys of a node; for an inner node also the prefix of the keys below each."""
    numbers = [0, *body.lengths((3 if is_inner else 2) * count - 1)]
    shared, lengths, common = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
    budget.take(sum(shared) + sum(lengths) + count * len(prefix))
    ends = body.take(sum(lengths))
    whole = list(map(add, shared, lengths))
    possible = max(whole) <= MOST_KEY_BYTES and all(map(le, shared[1:], whole))
    out: list[bytes] = []
    key, offset = prefix, 0
    for again, more in zip(shared, lengths, strict=True) if possible else ():
        key = key[: len(prefix) + again] + ends[offset : offset + more]
        offset += more
        out.append(key)
    if not possible or not all(map(lt, out, islice(out, 1, None))):
        raise Damaged("the keys of a node of the B-tree are not in order")
    if is_inner and any(map(gt, common, whole)):
        raise Damaged("the keys of a node of the B-tree are shorter than what they share")
    return out, common


def _check_references(which: Any, offsets: Any, lengths: Any, files: Sequence[object]) -> None:
    """Checks that a node refers only to files of its table and to possible offsets."""
    if len(which) == 0:
        return
    highest: Any = max if len(which) < _FEW else np.max
    file, offset, length = map(int, map(highest, (which, offsets, lengths)))
    if file >= len(files):
        raise Damaged(f"a node of the B-tree names file {file} of {len(files)}")
    if offset > _MOST_OFFSET or length > _MOST_OFFSET:
        raise Damaged("a node of the B-tree refers to bytes outside of any possible file")


def is_sealed(data: bytes) -> bool:
    """Whether the last four bytes are the CRC-32C of those before them."""
    return len(data) > 4 and google_crc32c.value(data[:-4]) == int.from_bytes(data[-4:], "little")
