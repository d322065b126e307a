"""OCDBT, TensorStore's B-tree database: the container of checkpoints in any storage.

Its nodes are untrusted: `Tree` decodes them within bounds, and `DatabaseReader` gives TensorStore
only references from nodes that were checked.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.arrays.dtypes import Array
from unickpt.storage.btree import nodes
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.errors import Damaged, Failed
from unickpt.storage.tensorstore_calls import Future, KvStore

MANIFEST = "manifest.ocdbt"
"""The first file of a database, in its folder."""
RETIRED = "retired"
"""In the folder of a checkpoint: manifests of retired checkpoints, which only hold chunks that
others have borrowed."""
# Without its own cache, every chunk read would read the B-tree's nodes again.
NODE_CACHE = "cache_pool#nodes"
NODE_CACHE_BYTES = 64 << 20
# The place of a context's copies of manifests; separate from memory://, freed with the context.
MANIFESTS = "memory_key_value_store#manifests"


def spec(
    base: Mapping[str, Any], *, manifest: Mapping[str, Any] | None = None, data: str | None = None
) -> dict[str, Any]:
    """The database in the folder that the key-value store `base` names.

    Data files are large, so that a save writes few of them; this was measured.

    Arguments:
        base: the folder.
        manifest: the key-value store with the manifest, if that is not the folder.
        data: subfolder for new data, ending with `/`; `d/` by default.
    """
    out = {
        "driver": "ocdbt",
        "base": dict(base),
        "target_data_file_size": 256 << 20,
        "cache_pool": NODE_CACHE,
    }
    if manifest is not None:
        out["manifest"] = dict(manifest)
    if data is not None:
        kinds = ("value_data", "btree_node_data", "version_tree_node_data")
        out |= {f"{kind}_prefix": data for kind in kinds}
    return out


def manifest_in_memory(name: str) -> dict[str, Any]:
    """The key-value store for a copy of one manifest, in a context."""
    return {"driver": "memory", "memory_key_value_store": MANIFESTS, "path": name}


class Tree:
    """Finds the values of a database; reads its nodes on demand.

    Arguments:
        manifest: returns the database's manifest, or None if it has none.
        fetch: returns the bytes of a reference; see `fetch`.
    """

    def __init__(self, manifest: Callable[[], bytes | None], fetch: Callable[..., bytes]) -> None:
        self._manifest, self.fetch = manifest, fetch
        self._nodes: dict[tuple[DataReference, bytes], nodes.BTreeNode] = {}
        self._top: set[str] = set()
        self._budget, self._stored = nodes.NodeBudget(), set[DataReference]()
        self._lock = threading.Lock()

    def find(self, key: str) -> bytes | DataReference | None:
        """A value that the tree itself holds, or its place; None if the key is missing.

        Raises:
            Damaged: the tree is damaged, or needs far more memory than its stored bytes justify.
            Failed: the storage failed.
        """
        key_bytes = key.encode()
        with self._lock:
            leaf = self._leaf(key_bytes)
        position = 0 if leaf is None else bisect_left(leaf.keys, key_bytes)
        if leaf is None or position == len(leaf.keys) or leaf.keys[position] != key_bytes:
            return None
        return leaf.find(position)

    def find_all(
        self, keys: Sequence[str]
    ) -> Iterator[tuple[nodes.BTreeNode, list[int], list[int]]]:
        """The leaves that have some of the keys, each with those keys, ascending, and their
        positions in it; skips missing keys.

        Raises:
            Damaged, Failed: as for `find`.
        """
        encoded_keys = [key.encode() for key in keys]
        order = sorted(range(len(encoded_keys)), key=encoded_keys.__getitem__)
        ahead = 0
        while ahead < len(order):
            with self._lock:
                leaf = self._leaf(encoded_keys[order[ahead]])
            if leaf is None:
                ahead += 1
                continue
            stop = bisect_right(order, leaf.keys[-1], ahead, key=encoded_keys.__getitem__)
            which: list[int] = []
            positions: list[int] = []
            position = 0
            for number in order[ahead:stop]:
                position = bisect_left(leaf.keys, encoded_keys[number], position)
                if leaf.keys[position] == encoded_keys[number]:
                    which.append(number)
                    positions.append(position)
            if which:
                yield leaf, which, positions
            ahead = max(stop, ahead + 1)  # beyond the last key of this leaf: no leaf has it

    def leaves(self) -> Iterator[nodes.BTreeNode]:
        """All leaves, in order.

        Raises:
            Damaged: as for `find`.
        """
        with self._lock:
            root = self._root
            ahead, seen = [] if root is None else [root], set[nodes.BTreeNode]()
            while ahead:
                node = ahead.pop()
                if node in seen:  # a few hostile nodes that share children can make many paths
                    raise Damaged("a node of the B-tree has two parents")
                seen.add(node)
                if node.height == 0:
                    yield node
                ahead += reversed(
                    [self._below(node, position) for position in range(len(node.common))]
                )

    def _leaf(self, key: bytes) -> nodes.BTreeNode | None:
        """The leaf that has a key, if any has it."""
        node = self._root
        while node is not None and node.height > 0:
            position = bisect_right(node.keys, key) - 1
            if position < 0:
                return None
            node = self._below(node, position)
        return node

    def files(self, prefix: str) -> set[str]:
        """The files with the values of all keys with a prefix and with the nodes that lead to them.

        Raises:
            Damaged: as for `find`.
        """
        first = prefix.encode()
        after = _after(first)
        with self._lock:
            root = self._root
            named = set(self._top)
            ahead, seen = [] if root is None else [root], set[nodes.BTreeNode]()
            while ahead:
                node = ahead.pop()
                seen.add(node)  # a few hostile nodes that share children can make many paths
                low = bisect_left(node.keys, first)
                high = len(node.keys) if after is None else bisect_left(node.keys, after)
                if node.height > 0 and low > 0 and first not in node.keys[low : low + 1]:
                    low -= 1
                which = np.unique(node.which[low:high])
                named |= {node.files[index][0] for index in which[which >= 0].tolist()}
                if node.height > 0:
                    below = [self._below(node, index) for index in range(low, high)]
                    ahead += dict.fromkeys(child for child in below if child not in seen)
        return named

    @cached_property
    def _root(self) -> nodes.BTreeNode | None:
        data = self._manifest()
        manifest = nodes.Manifest() if data is None else nodes.manifest(data)
        if manifest.root is None:
            return None
        self._top.add(manifest.root.path)
        return self._node(manifest.root, manifest.height, b"")

    def _below(self, node: nodes.BTreeNode, position: int) -> nodes.BTreeNode:
        """The node that an entry of an inner node leads to."""
        reference = node.find(position)
        assert isinstance(reference, DataReference), "inner nodes hold no values"
        return self._node(reference, node.height - 1, node.keys[position][: node.common[position]])

    def _node(self, reference: DataReference, height: int, prefix: bytes) -> nodes.BTreeNode:
        node = self._nodes.get((reference, prefix))
        if node is not None:
            return node
        data = self.fetch(reference)
        if reference not in self._stored:
            self._stored.add(reference)
            self._budget.earn(len(data))
        node = nodes.node(data, reference, height, prefix, self._budget)
        self._nodes[reference, prefix] = node
        return node


def _after(prefix: bytes) -> bytes | None:
    """The first key after all keys with a prefix; None if there is none."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else None


_SMALL = 1 << 20  # read here; TensorStore reads larger values
_BRIEF = 64 << 10  # copied so quickly that waiting for the GIL would take longer
# A request for one more value takes longer than reading so many bytes between two.
_GAP_BYTES, _MOST_TOGETHER = 16 << 10, 8 << 20
_AHEAD_BYTES = 256 << 10
OnRead = Callable[[memoryview], object]
"""A function that is called with the bytes that were read."""


class DatabaseReader:
    """Reads the values of an untrusted database.

    TensorStore only reads bytes of files; the nodes that lead to them are checked here first.

    Arguments:
        tree: the database's B-tree.
        store: the key-value store of its folder.
    """

    def __init__(self, tree: Tree, store: KvStore | None = None) -> None:
        self._store, self.tree = store, tree
        self._checked, self._checked_files = set[str](), set[str]()

    def request(self, key: str) -> Result:
        """Starts to read a value."""
        entry = self.tree.find(key)
        if isinstance(entry, DataReference) and self._store is not None:
            return self._store.read(entry.path, byte_range=_range(entry))
        return ReadyResult(self.tree.fetch(entry) if isinstance(entry, DataReference) else entry)

    def request_all(self, keys: Sequence[str]) -> dict[str, Result]:
        """Starts to read values, neighbouring ones of a file together; skips those that cannot be
        read, so that `read` reports why."""
        store, futures = self._store, dict[str, Result]()
        if store is None:
            for key in keys:
                with suppress(Failed):
                    futures[key] = self.request(key)
            return futures
        places = dict[str, DataReference]()
        with suppress(Failed):
            for leaf, numbers, positions in self.tree.find_all(keys):
                for number, position in zip(numbers, positions, strict=True):
                    entry = leaf.find(position)
                    if isinstance(entry, DataReference):
                        places[keys[number]] = entry
                    else:
                        futures[keys[number]] = ReadyResult(entry)
        for run in _neighbours(places):
            futures |= zip(run, _read_run(store, list(run.values())), strict=True)
        return futures

    def read_into(
        self,
        keys: Sequence[str],
        out: Sequence[Array],
        lengths: Sequence[int],
        looks: Sequence[OnRead | None],
    ) -> Sequence[bool]:
        """Reads values of up to 1 MiB into memory; larger ones TensorStore reads with fewer copies.

        Arguments:
            keys: of the values.
            out: contiguous memory for the first bytes of each value.
            lengths: how many bytes each value must have.
            looks: called with the read bytes, while they are in a CPU cache; None for none.

        Returns:
            For each whether it was read; for the others, `read` reports why not.
        """
        small = [buffer.nbytes <= _SMALL for buffer in out]
        futures, done = self.request_all(list(compress(keys, small))), [False] * len(keys)
        for index, (key, buffer) in enumerate(zip(keys, out, strict=True)):
            with suppress(Failed):
                value = futures[key].result().value if key in futures and small[index] else b""
                done[index] = key in futures and small[index] and len(value) == lengths[index]
            if done[index]:
                memory = buffer.reshape(-1).view(np.uint8)
                if buffer.nbytes > _BRIEF:
                    np.copyto(memory, np.frombuffer(value, np.uint8, buffer.nbytes))
                else:  # unlike NumPy, this keeps the GIL
                    memory.data[:] = value[: buffer.nbytes]
                look = looks[index]
                if look is not None:
                    look(memory.data)
        return done

    def read(self, key: str, length: int | None = None) -> bytes | None:
        """A value, or None if it is missing.

        Arguments:
            key: of the value.
            length: that the value must have, in bytes, if known.

        Raises:
            Damaged: it has another length, is incomplete, or the tree is damaged.
        """
        entry = self.tree.find(key)
        if length is not None and entry is not None and length_of(entry) != length:
            raise Damaged(f"{length_of(entry)} bytes stored, {length} expected")
        return self.tree.fetch(entry) if isinstance(entry, DataReference) else entry

    def read_range(
        self, key: str, offset: int, length: int, *, may_be_sparse: bool = False
    ) -> bytes:
        """Some bytes of a value.

        Arguments:
            key: of the value.
            offset: of the first of them.
            length: how many.
            may_be_sparse: whether a local file may have a hole there, in which some file systems
                store zeros.

        Raises:
            Damaged: it is missing or has fewer, or the tree is damaged.
        """
        entry = self.tree.find(key)
        if entry is None or length_of(entry) < offset + length:
            raise Damaged(f"bytes {offset} to {offset + length} are missing")
        if not isinstance(entry, DataReference):
            return entry[offset : offset + length]
        reference = DataReference(entry.path, entry.offset + offset, length)
        return self.tree.fetch(reference, may_be_sparse)

    def length(self, key: str) -> int | None:
        """The length of a value in bytes according to the tree; None if it is missing."""
        entry = self.tree.find(key)
        return None if entry is None else length_of(entry)

    def has(self, key: str, length: int) -> bool:
        """Whether a value of at least `length` bytes is stored, including its last byte."""
        entry = self.tree.find(key)
        if entry is None or length_of(entry) < length:
            return False
        if isinstance(entry, DataReference):
            self.tree.fetch(DataReference(entry.path, entry.offset + length - 1, 1))
        return True

    def check(self, prefix: str) -> None:
        """Checks all nodes that lead to keys with a prefix, before TensorStore reads them.

        Raises:
            Damaged: they are damaged, or need far more memory than their stored bytes justify.
        """
        if prefix not in self._checked:
            for path in self.tree.files(prefix) - self._checked_files:
                self._check_file(path)
                self._checked_files.add(path)
            self._checked.add(prefix)

    def _check_file(self, path: str) -> None:
        """Does nothing: object storage contains only objects."""


class ReadyResult:
    """A value that is available; with the interface of TensorStore's future."""

    def __init__(self, value: bytes | memoryview | None) -> None:
        self._value = value

    def result(self) -> ReadyResult:
        return self

    @property
    def state(self) -> str:
        return "missing" if self._value is None else "value"

    @property
    def value(self) -> bytes | memoryview:
        return b"" if self._value is None else self._value


def fetch(store: KvStore, reference: DataReference, may_be_sparse: bool = False) -> bytes:
    """The bytes of a reference; objects have no holes.

    Raises:
        Damaged: some are missing.
    """
    read = store.read(reference.path, byte_range=_range(reference)).result()
    if read.state != "value":
        raise Damaged(f"no file {reference.path}")
    data: bytes = read.value
    return data


class AheadFetch:
    """`fetch`, for storage where a request takes long: with the first reference, that of the root,
    it reads what was written just before it, such as the index and the digests.

    Arguments:
        store: the key-value store of the files.
    """

    def __init__(self, store: KvStore) -> None:
        self._store, self._read = store, ("", 0, b"")

    def __call__(self, reference: DataReference, may_be_sparse: bool = False) -> bytes:
        path, start, data = self._read
        if not path:
            path, start = reference.path, max(0, reference.offset - _AHEAD_BYTES)
            stop = reference.offset + reference.length
            data = fetch(self._store, DataReference(path, start, stop - start))
            self._read = path, start, data
        first = reference.offset - start
        if reference.path == path and 0 <= first <= len(data) - reference.length:
            return data[first : first + reference.length]
        return fetch(self._store, reference, may_be_sparse)


class _PartResult:
    """A value that is read together with others.

    Arguments:
        store: the key-value store of the files.
        reference: the place of the value.
        together: the bytes that are read.
        start: the offset of their first byte in the file.
    """

    def __init__(
        self,
        store: KvStore,
        reference: DataReference,
        together: Future[ts.KvStore.ReadResult],
        start: int,
    ) -> None:
        self._store, self._reference = store, reference
        self._together, self._start = together, start

    def result(self) -> ReadyResult | ts.KvStore.ReadResult:
        """The value; if the file lacks some of them, it is read alone."""
        reference, first = self._reference, self._reference.offset - self._start
        with suppress(Damaged):
            read = self._together.result()
            if read.state == "value":
                return ReadyResult(memoryview(read.value)[first : first + reference.length])
        return self._store.read(reference.path, byte_range=_range(reference)).result()


Result = Future[ts.KvStore.ReadResult] | ReadyResult | _PartResult
"""Its method `result` waits for a value."""


def _neighbours(places: Mapping[str, DataReference]) -> Iterator[dict[str, DataReference]]:
    """Values that are read together, because little or nothing is between them in a file."""
    run, path, start, stop = dict[str, DataReference](), "", 0, 0
    for key, place in sorted(places.items(), key=lambda item: (item[1].path, item[1].offset)):
        end = max(stop, place.offset + place.length)
        is_near = place.offset - stop <= _GAP_BYTES and end - start <= _MOST_TOGETHER
        if run and (place.path != path or not is_near):
            yield run
            run = {}
        if not run:
            path, start, end = place.path, place.offset, place.offset + place.length
        run[key], stop = place, end
    if run:
        yield run


def _read_run(store: KvStore, places: Sequence[DataReference]) -> Iterator[Result]:
    """Starts to read values that `_neighbours` returned."""
    first = places[0]
    if len(places) == 1:
        yield store.read(first.path, byte_range=_range(first))
        return
    stop = max(place.offset + place.length for place in places)
    together = store.read(first.path, byte_range=slice(first.offset, stop))
    for place in places:
        yield _PartResult(store, place, together, first.offset)


def length_of(entry: bytes | DataReference) -> int:
    """The length in bytes of a value that `Tree.find` returned."""
    return entry.length if isinstance(entry, DataReference) else len(entry)


def _range(reference: DataReference) -> slice:
    return slice(reference.offset, reference.offset + reference.length)
