"""Encodes an OCDBT database whose values are ranges of existing files.

TensorStore writes the values of a database itself, or copies references from another one, key by
key. Neither way allows references to arbitrary files, or a database of millions of keys in seconds:
here whole columns of a node are encoded at once. TensorStore documents the format; `nodes` decodes
it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from operator import lt
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from unickpt.quoting import quoted
from unickpt.storage.btree.nodes import MANIFEST_MAGIC, MOST_KEY_BYTES, NODE_MAGIC, DataReference
from unickpt.storage.errors import Failed
from unickpt.threads import in_batches

_ENTRIES = 2048
"""The most entries of a node. Decoded, they take far less than the 8 MiB limit of TensorStore.

A process that loads its own chunks of many arrays reads a leaf of each, and each leaf costs the
coordinator a checksum. Measured with 4,096 processes and 200 arrays (benchmarks/scale.py), with
nodes of 512, 1024 and 4096: commit 2.7, 1.8 and 1.2 s; to load 0.45, 0.55 and 1.6 s.
"""
MOST_INLINE = 100
"""Bytes of the longest value that nodes hold themselves; TensorStore's default."""
_MOST_DECODED, _ARITY_LOG2 = 8 << 20, 4  # TensorStore's defaults
_MISSING = (1 << 64) - 1
_FEW = 32  # below this, NumPy is slower than Python
_LONG = 1 << 10  # longer keys are compared one by one, which takes less memory

PLACE_FIELDS = ("file", "<i4"), ("offset", "<u8"), ("length", "<u8")
PLACE_DTYPE = np.dtype([*PLACE_FIELDS])
"""The place of a value: the number of its file, or `INLINE`, and its bytes there."""
PLACE_BYTES = np.dtype((np.void, PLACE_DTYPE.itemsize))
"""The same as bytes, which NumPy copies many times as fast as fields."""
INLINE = -1
"""Instead of a file: the value is among those that are stored in nodes."""
PlaceArray = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class SortedKeys:
    """Ascending keys, and what nodes store about them. Those of a grid of chunks serve all arrays
    with that grid.

    Arguments:
        texts: the keys.
        shared: the number of bytes that each shares with the one before it; 0 for the first.
        lengths: the numbers of its other bytes.
        ends: where those of each end in `suffixes`.
        suffixes: all of them, joined.
    """

    texts: Sequence[bytes]
    shared: PlaceArray
    lengths: PlaceArray
    ends: PlaceArray
    suffixes: bytes

    @classmethod
    def from_texts(cls, texts: Sequence[bytes]) -> SortedKeys:
        """Computes them of keys.

        Raises:
            ValueError: they do not ascend.
        """
        if not all(map(lt, texts, islice(texts, 1, None))):
            raise ValueError("the keys of a database must ascend")
        shared, lengths, suffixes = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], list[bytes]()
        for start in range(0, len(texts), _ENTRIES):  # compared in little memory
            before = start - (start > 0)
            counts, unshared, joined = _without_shared(texts[before : start + _ENTRIES])
            skipped = unshared[0] if start else 0
            shared.append(np.asarray(counts[start - before :], np.int64))
            lengths.append(np.asarray(unshared[start - before :], np.int64))
            suffixes.append(joined[skipped:])
        counts, unshared = np.concatenate(shared), np.concatenate(lengths)
        return cls(texts, counts, unshared, np.cumsum(unshared), b"".join(suffixes))


@dataclass(frozen=True, eq=False)
class TreeEntries:
    """Some entries of a database.

    Arguments:
        keys: without the prefix.
        places: of their values; one element of `PLACE_DTYPE` each.
        prefix: of all keys.
    """

    keys: SortedKeys
    places: PlaceArray
    prefix: bytes = b""

    def key(self, position: int) -> bytes:
        """A whole key."""
        return self.prefix + self.keys.texts[position]


_Slice = tuple[TreeEntries, int, int]
"""Consecutive entries: of which run, from which one, and before which one."""


class _Placed(NamedTuple):
    """A node, and its place.

    Arguments:
        first: its first key.
        place: its place.
        keys: number of keys below it.
        tree_bytes: of it and of all nodes below it.
        value_bytes: of all values in files below it.
    """

    first: bytes
    place: DataReference
    keys: int
    tree_bytes: int
    value_bytes: int


def encode(
    runs: Iterable[TreeEntries],
    files: Sequence[str],
    inline: bytes,
    place: Callable[[bytes], DataReference],
) -> tuple[bytes, int]:
    """A database of any size; in memory are one run and one node at a time.

    Arguments:
        runs: its entries; all keys of a run follow those of the previous run.
        files: the paths of the files with the values, below the database's folder, ascending.
        inline: the values that nodes hold themselves, joined; places without a file are in it.
        place: stores a node in a file below the database's folder; returns its place.

    Returns:
        The manifest, and the number of keys.

    Raises:
        ValueError: the keys do not ascend.
        Failed: one is too long for TensorStore.
    """
    tables, level = _FileTables([path.encode() for path in files]), list[_Placed]()
    for slices in _batches(runs):
        places = _joined([run.places[start:stop] for run, start, stop in slices])
        node = _leaf(slices, places, tables, inline)
        apart = int(places["length"][places["file"] >= 0].sum())
        run, start, _ = slices[0]
        first = run.prefix + run.keys.texts[start]
        level.append(_Placed(first, place(node), len(places), len(node), apart))
    height = 0
    while len(level) > 1:
        height += 1
        level = [_above(height, batch, place) for batch in in_batches(level, _ENTRIES)]
    root = level[0] if level else None
    return _manifest(root, height), 0 if root is None else root.keys


def _batches(runs: Iterable[TreeEntries]) -> Iterator[list[_Slice]]:
    """The entries of each leaf. Raises as `encode`."""
    slices, count, before = list[_Slice](), 0, None
    for run in runs:
        start, end = 0, len(run.keys.texts)
        if not end:
            continue
        if before is not None and before.key(-1) >= run.key(0):
            raise ValueError("the keys of a database must ascend")
        before = run
        if len(run.prefix) + int((run.keys.shared + run.keys.lengths).max()) > MOST_KEY_BYTES:
            longest = run.prefix + max(run.keys.texts, key=len)
            raise Failed(
                f"the key {quoted(longest.decode())} has {len(longest)} bytes; a database takes "
                f"at most {MOST_KEY_BYTES}; give the stored leaf a shorter name"
            )
        while start < end:
            stop = min(end, start + _ENTRIES - count)
            slices.append((run, start, stop))
            count += stop - start
            start = stop
            if count == _ENTRIES:
                yield slices
                slices, count = [], 0
    if slices:
        yield slices


def _joined(places: Sequence[PlaceArray]) -> PlaceArray:
    """Joined places."""
    if len(places) == 1:
        return places[0]
    return np.concatenate([batch.view(PLACE_BYTES) for batch in places]).view(PLACE_DTYPE)


def _above(
    height: int, nodes: Sequence[_Placed], place: Callable[[bytes], DataReference]
) -> _Placed:
    """The parent of some nodes."""
    ordered = sorted({node.place.path for node in nodes})
    numbers = {path: number for number, path in enumerate(ordered)}
    body = [
        bytes([height]),
        _files([path.encode() for path in ordered]),
        _numbers([len(nodes)]),
        *_inner_keys([node.first for node in nodes]),
        *_references(nodes, numbers),
    ]
    node = _sealed(NODE_MAGIC, b"".join(body))
    return _Placed(
        nodes[0].first,
        place(node),
        sum(child.keys for child in nodes),
        sum(child.tree_bytes for child in nodes) + len(node),
        sum(child.value_bytes for child in nodes),
    )


def _manifest(root: _Placed | None, height: int) -> bytes:
    body = [
        os.urandom(16),
        b"\0",  # everything about the versions is in this file
        _numbers([MOST_INLINE, _MOST_DECODED]),
        bytes([_ARITY_LOG2, 0]),  # no compression
        _files([b"" if root is None else root.place.path.encode()]),
        bytes([1, 1, height]),
        *_references([root] if root is not None else [], {root.place.path: 0} if root else {}),
        time.time_ns().to_bytes(8, "little"),
        b"\0",  # no older versions
    ]
    return _sealed(MANIFEST_MAGIC, b"".join(body))


def _leaf(
    slices: Sequence[_Slice], places: PlaceArray, tables: _FileTables, inline: bytes
) -> bytes:
    file = places["file"]
    apart = file >= 0
    used, which = _distinct(file[apart])
    within = places[["offset", "length"]][~apart].tolist()
    body = [
        b"\0",
        tables.subset(used),
        _numbers([len(places)]),
        *_leaf_keys(slices),
        _numbers(places["length"]),
        apart.astype(np.uint8).tobytes(),  # 1 for each value in a file
        _numbers(_both(which, places["offset"][apart])),
        *[inline[offset : offset + length] for offset, length in within],
    ]
    return _sealed(NODE_MAGIC, b"".join(body))


def _distinct(files: PlaceArray) -> tuple[PlaceArray, PlaceArray]:
    """The distinct numbers of files, ascending, and which of them each one is; as `np.unique`, but
    without sorting."""
    if not len(files):
        return files, files
    is_used = np.zeros(int(files.max()) + 1, np.bool_)
    is_used[files] = True
    used = np.flatnonzero(is_used)
    positions = np.empty(len(is_used), np.int64)
    positions[used] = np.arange(len(used))
    return used, positions[files]


def _references(nodes: Sequence[_Placed], files: dict[str, int]) -> list[bytes]:
    """The places of nodes, and the totals below them; column by column."""
    if not nodes:
        return [_numbers([0, _MISSING, _MISSING, 0, 0, 0])]
    rows = [
        (files[x.place.path], x.place.offset, x.place.length, x.keys, x.tree_bytes, x.value_bytes)
        for x in nodes
    ]
    return [_numbers(list(chain.from_iterable(zip(*rows, strict=True))))]


def _leaf_keys(slices: Sequence[_Slice]) -> list[bytes]:
    """Keys, each without the prefix shared with the previous one."""
    shared, lengths, suffixes = list[PlaceArray](), list[PlaceArray](), list[bytes]()
    for number, (run, start, stop) in enumerate(slices):
        keys, first, same = run.keys, run.key(start), 0
        if number:
            before, _, end = slices[number - 1]
            same = _same(before.key(end - 1), first)
        counts, unshared = (
            keys.shared[start:stop] + len(run.prefix),
            keys.lengths[start:stop].copy(),
        )
        counts[0], unshared[0] = same, len(first) - same
        shared.append(counts)
        lengths.append(unshared)
        suffixes += first[same:], keys.suffixes[keys.ends[start] : keys.ends[stop - 1]]
    counts, unshared = np.concatenate(shared), np.concatenate(lengths)
    return [_numbers(_both(counts[1:], unshared)), *suffixes]


def _inner_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Keys, each without the prefix shared with the previous one; none is shared by all below."""
    shared, lengths, suffixes = _without_shared(keys)
    return [_numbers(_both(shared[1:], lengths)), bytes(len(keys)), suffixes]


def _files(paths: Sequence[bytes]) -> bytes:
    """The table of files; all paths are relative to the database's folder."""
    if not paths:
        return b"\0"
    shared, lengths, suffixes = _without_shared(paths)
    numbers = _numbers([len(paths), *shared[1:], *lengths])
    return b"".join([numbers, bytes(len(paths)), suffixes])


@dataclass(frozen=True)
class _FileTables:
    """The tables of files of all leaves: each has some of the same paths.

    In a job whose processes hold shards of every array, a leaf has values in thousands of files,
    of which most follow each other. What a path shares with the one before it is found once.

    Arguments:
        paths: of all files, ascending.
    """

    paths: Sequence[bytes]

    @cached_property
    def _columns(self) -> tuple[PlaceArray, PlaceArray, PlaceArray, bytes]:
        """The bytes of each path, those that it shares with the one before it, where the others
        end, and these, joined."""
        paths = self.paths
        lengths = np.fromiter(map(len, paths), np.int64, len(paths))
        shared, suffixes = [np.zeros(1, np.int64)], list[bytes](paths[:1])
        for start in range(0, len(paths) - 1, _ENTRIES):
            of_batch, _, unshared = _without_shared(paths[start : start + _ENTRIES + 1])
            shared.append(np.asarray(of_batch[1:], np.int64))
            suffixes.append(unshared[len(paths[start]) :])
        counts = np.concatenate(shared)
        return lengths, counts, np.cumsum(lengths - counts), b"".join(suffixes)

    def subset(self, used: PlaceArray) -> bytes:
        """The table of some of the files, by their numbers, which ascend."""
        breaks = np.flatnonzero(used[1:] - used[:-1] != 1) + 1
        if len(used) < _FEW or len(breaks) * 4 > len(used):
            paths = [self.paths[number] for number in used.tolist()]
            if len(used) < _FEW:
                return _files(paths)
            shared, unshared, joined = _without_shared(paths)
            return _file_table(shared, unshared, [joined])
        lengths, counts, ends, joined = self._columns
        shared, suffixes, start = counts[used], list[bytes](), 0
        for stop in [*breaks.tolist(), len(used)]:
            first, last = int(used[start]), int(used[stop - 1])
            before = int(used[start - 1]) if start else first
            shared[start] = counts[before + 1 : first + 1].min() if start else 0
            suffixes += self.paths[first][int(shared[start]) :], joined[ends[first] : ends[last]]
            start = stop
        return _file_table(shared, lengths[used] - shared, suffixes)


def _file_table(shared: Any, lengths: Any, suffixes: Sequence[bytes]) -> bytes:
    """A table of many files, by the columns of `_without_shared`."""
    numbers = _numbers([len(lengths)]) + _numbers(_both(shared[1:], lengths))
    return b"".join([numbers, bytes(len(lengths)), *suffixes])


def _without_shared(texts: Sequence[bytes]) -> tuple[Any, Any, bytes]:
    """The number of bytes each shares with the previous one, the number of its others, and these,
    joined."""
    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    longest = int(lengths.max())
    if len(texts) < _FEW or longest > _LONG:
        counts, suffixes = [0], [texts[0]]
        for before, text in pairwise(texts):
            counts.append(_same(before, text))
            suffixes.append(text[counts[-1] :])
        return counts, list(map(len, suffixes)), b"".join(suffixes)
    # One row for each; NumPy pads them with zeros.
    matrix = np.array(texts, f"S{max(1, longest)}").view(np.uint8).reshape(len(texts), -1)
    shared = np.zeros(len(texts), np.int64)
    differs = matrix[1:] != matrix[:-1]
    first = np.where(differs.any(axis=1), differs.argmax(axis=1), longest)
    np.minimum(first, np.minimum(lengths[1:], lengths[:-1]), out=shared[1:])
    suffixes = [text[count:] for text, count in zip(texts, shared.tolist(), strict=True)]
    return shared, lengths - shared, b"".join(suffixes)


def _both(first: Any, second: Any) -> Any:
    """Two consecutive columns of numbers."""
    if isinstance(first, list) and isinstance(second, list):
        return first + second
    return np.concatenate([np.asarray(first, np.uint64), np.asarray(second, np.uint64)])


def _same(a: bytes, b: bytes) -> int:
    """The length of the common prefix of two texts, in bytes."""
    most = min(len(a), len(b))
    differs = int.from_bytes(a[:most]) ^ int.from_bytes(b[:most])
    return most - (differs.bit_length() + 7) // 8


def _numbers(values: Any) -> bytes:
    """Numbers, each with seven bits per byte, the lowest first; all bytes except the last are
    above 127."""
    if len(values) < _FEW:
        few = values if isinstance(values, list) else values.tolist()
        if not few or max(few) < 128:
            return bytes(few)
        out = bytearray()
        for value in few:
            while value > 127:
                out.append(value & 127 | 128)
                value >>= 7
            out.append(value)
        return bytes(out)
    left = np.asarray(values)
    least, most = int(left.min()), int(left.max())
    if least == most:
        return _numbers([most]) * len(left)
    if most < 128:
        return left.astype(np.uint8).tobytes()
    left = left.astype(np.uint32 if most < 1 << 32 else np.uint64)  # a copy
    columns = -(-most.bit_length() // 7)
    digits = np.empty((len(left), columns), np.uint8)
    is_digit = np.ones(digits.shape, np.bool_)
    for column in range(columns):
        digit = left.astype(np.uint8) & 127
        left >>= 7
        has_more = left > 0
        digits[:, column] = digit | has_more.view(np.uint8) << 7
        if column + 1 < columns:
            is_digit[:, column + 1] = has_more
    encoded: bytes = digits[is_digit].tobytes()
    return encoded


def _sealed(magic: bytes, body: bytes) -> bytes:
    """A body with its header and its checksum, not compressed."""
    length = len(magic) + 8 + 2 + len(body) + 4
    data = b"".join([magic, length.to_bytes(8, "little"), b"\0\0", body])
    crc: int = google_crc32c.value(data)
    return data + crc.to_bytes(4, "little")
