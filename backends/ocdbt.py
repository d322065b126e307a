"""OCDBT, TensorStore's B-tree database: the container in which all backends keep checkpoints."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import tensorstore as ts

from unickpt.backends.kvstore import Damaged, dump

MANIFEST = "manifest.ocdbt"
# Without a cache of its own, every chunk that is read would read the B-tree's nodes anew.
NODE_CACHE = "cache_pool#nodes"
NODE_CACHE_BYTES = 64 << 20


def spec(
    base: Mapping[str, Any],
    *,
    manifest: Mapping[str, Any] | None = None,
    data: str | None = None,
) -> dict[str, Any]:
    """The database in the folder that the key-value store `base` names.

    Data files are large, so that a save writes few of them; measured beside smaller ones.

    Arguments:
        base: the folder.
        manifest: the key-value store that holds the manifest, where that is not the folder.
        data: where below the folder new data goes, ending with `/`; `d/` where not given.
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


@dataclass(frozen=True)
class Place:
    """Where a value lies.

    Arguments:
        path: of the file, below the database's folder.
        offset: of the first byte.
        length: in bytes.
    """

    path: str
    offset: int
    length: int


class Tree:
    """Finds where the values of a database lie; its nodes are read when they are needed.

    Arguments:
        base: the database's folder.
        manifest: the key-value store that holds its manifest.
        context: as for the database.
    """

    def __init__(self, base: ts.KvStore, manifest: ts.KvStore, context: ts.Context) -> None:
        self._base, self._manifest, self._context = base, manifest, context
        self._nodes: dict[tuple[Any, bytes], _Node] = {}
        self._lock = threading.Lock()

    def find(self, key: str) -> bytes | Place | None:
        """A value that the tree itself holds, or where it lies; None where there is none.

        Raises:
            Damaged: the tree is damaged.
            Failed: the storage failed.
        """
        wanted = key.encode()
        with self._lock:
            node = self._node(None, b"", None)
            while node is not None and node.height > 0:
                at = bisect_right(node.keys, wanted) - 1
                if at < 0:
                    return None
                entry = node.entries[at]
                prefix = node.prefix + entry["subtree_common_prefix"]
                node = self._node(entry["location"], prefix, node.height - 1)
        if node is None:
            return None
        at = bisect_left(node.keys, wanted)
        if at == len(node.keys) or node.keys[at] != wanted:
            return None
        entry = node.entries[at]
        inline = entry.get("inline_value")
        return inline if inline is not None else _place(entry["indirect_value"])

    def _node(self, location: str | None, prefix: bytes, height: int | None) -> _Node | None:
        """A node, or the root where no location is given; None where the tree is empty."""
        found = self._nodes.get((location, prefix))
        if found is not None:
            return found
        if location is None:
            versions = dump(self._manifest, context=self._context)["versions"]
            if not versions or "location" not in versions[-1]["root"]:
                return None
            start, height = versions[-1]["root"]["location"], versions[-1]["root_height"]
        else:
            start = location
        node = dump(self._base, start, context=self._context)
        if node["height"] != height:
            raise Damaged(f"{start} is no B-tree node of height {height}")
        keys = [prefix + entry["key"] for entry in node["entries"]]
        self._nodes[location, prefix] = _Node(node["height"], prefix, keys, node["entries"])
        return self._nodes[location, prefix]


@dataclass(frozen=True)
class _Node:
    """A B-tree node; the keys of its entries are whole."""

    height: int
    prefix: bytes
    keys: list[bytes]
    entries: list[dict[str, Any]]


def _place(location: str) -> Place:
    """Parses `value:BASE:FILE:OFFSET:LENGTH`; see `tensorstore.ocdbt.dump`."""
    try:
        _, base, name, offset, length = location.split(":")
        place = Place(unquote(base) + unquote(name), int(offset), int(length))
    except ValueError:
        raise Damaged(f"{location!r} names no place of a value") from None
    path = place.path
    if path.startswith("/") or ".." in path.split("/"):
        raise Damaged(f"{path!r} lies outside the database")
    return place


def written(base: ts.KvStore, context: ts.Context) -> tuple[float, int]:
    """When a database was last written (seconds since 1970), and its bytes, as its manifest tells.

    Raises:
        Failed: there is no such manifest, or it cannot be read.
    """
    versions = dump(base, context=context)["versions"]
    if not versions:
        return 0.0, 0
    told = versions[-1]["root"]["statistics"]
    nbytes = int(told["num_indirect_value_bytes"]) + int(told["num_tree_bytes"])
    return int(versions[-1]["commit_time"]) / 1e9, nbytes


def count_keys(base: ts.KvStore, context: ts.Context) -> int:
    """Number of keys of the database whose manifest lies in `base`, as that manifest tells.

    Raises:
        Failed: there is no such manifest, or it cannot be read.
    """
    versions = dump(base, context=context)["versions"]
    return int(versions[-1]["root"]["statistics"]["num_keys"]) if versions else 0


def root_node(base: ts.KvStore, context: ts.Context) -> str:
    """The file with the root of the B-tree of the database whose manifest lies in `base`.

    Raises:
        Failed: there is no such manifest, it cannot be read, or its tree is empty.
    """
    versions = dump(base, context=context)["versions"]
    if not versions or "location" not in versions[-1]["root"]:
        raise Damaged("the manifest names no B-tree")
    return _place(versions[-1]["root"]["location"]).path
