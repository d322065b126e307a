"""Trees as Orbax writes them: a folder of Zarr arrays (version 2, not compressed).

Sources: orbax/checkpoint/_src/metadata/tree.py, _src/serialization/type_handlers.py. The layout is
that of `use_ocdbt=False` in version 0, which every version of Orbax restores, in parallel. A chunk
is a file of its own, so processes need not talk to each other.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np

from unickpt.backends._files.flat_names import refuse
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    ArrayEntry,
    Box,
    Data,
    Index,
    Leaf,
    Node,
    PlannedFile,
    SavedArrays,
    dtype_from_name,
    join_names,
    name_component,
    quoted,
    text_file,
    unwrapped,
)

_SEQUENCE, _DICT = 1, 2
_EMPTY = {"list": "List", "tuple": "Tuple", "namedtuple": "NamedTuple"}
# TensorStore's driver for version 2 of Zarr lacks them.
_MISSING = ("float8_e4m3",)
_VALUE = "value"
_Keys = tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class TreeFiles:
    """The files of a tree.

    Arguments:
        files: within its folder.
        arrays, values: as of `Plan`, by the names that unickpt's reader has in the folder.
        others: whether that has further names.
    """

    files: tuple[PlannedFile, ...]
    arrays: Mapping[str, str]
    values: Mapping[str, str]
    others: bool = False

    def within(self, folder: str, shown: str) -> TreeFiles:
        """The same in a folder, where the reader shows names below another."""
        return TreeFiles(
            tuple(replace(file, name=f"{folder}/{file.name}") for file in self.files),
            {name: _join(shown, inner_name) for name, inner_name in self.arrays.items()},
            {name: _join(shown, inner_name) for name, inner_name in self.values.items()},
            self.others,
        )


def _join(above: str, name: str) -> str:
    return join_names(above, name) if name else above


def tree_files(
    index: Index,
    node: Node,
    chunk_bytes: int,
    custom_metadata: Any = None,
    saved: SavedArrays | None = None,
) -> TreeFiles:
    """The files of a tree of arrays and values.

    Arguments:
        index: of the checkpoint.
        node: the tree, or a part of it.
        chunk_bytes: the most bytes of a file.
        custom_metadata: JSON that the user added.
        saved: facts about its arrays, if a job of JAX saved them.

    Raises:
        UnsupportedLeaf: Orbax cannot hold something.
    """
    saved = saved or SavedArrays()
    leaves = list(_leaves(index, node, (), ""))
    _check(index, leaves)
    metadata, texts, about = dict[str, Any](), dict[str, Any](), list[Any]()
    files, shardings = list[PlannedFile](), dict[str, str]()
    arrays, values = dict[str, str](), dict[str, str]()
    for leaf in leaves:
        entry = index.entries.get(leaf.name) if leaf.kind is None else None
        kind = leaf.kind or _kind(index, leaf.name, saved)
        metadata[str(tuple(key for key, _ in leaf.keys))] = _described(leaf.keys, kind)
        if entry is not None:
            chunk = _chunk(entry, chunk_bytes)
            files += _array_files(leaf.stored, entry.name, entry, chunk)
            about.append(_about(leaf.stored, entry, chunk))
            shardings[base64.b64encode(leaf.stored.encode()).decode()] = _sharding(entry, saved)
            arrays[leaf.name] = leaf.shown
        elif leaf.kind is None:
            values[leaf.name] = leaf.shown
            files += _value_files(leaf.stored, index.values[leaf.name], kind, texts)
    files += _metadata_files(metadata, texts, about, custom_metadata)
    files.append(text_file("_sharding", json.dumps(shardings)))
    _check_files(files)
    # An empty namedtuple is read as None.
    has_others = any(leaf.kind == _EMPTY["namedtuple"] for leaf in leaves)
    return TreeFiles(tuple(files), arrays, values, has_others)


@dataclass(frozen=True)
class _OrbaxLeaf:
    """A leaf, or an empty container.

    Arguments:
        name: in the index.
        shown: as unickpt reads it.
        keys: that lead to it, with their kinds.
        kind: Orbax's name of an empty container; None for a leaf.
    """

    name: str
    shown: str
    keys: _Keys
    kind: str | None = None

    @property
    def stored(self) -> str:
        """The name of the stored array; Orbax escapes nothing in it."""
        return ".".join(key for key, _ in self.keys)


def _leaves(index: Index, node: Node | Leaf, keys: _Keys, shown: str) -> Iterator[_OrbaxLeaf]:
    is_wrapped = isinstance(node, Node) and node.kind == "wrapper"
    node = unwrapped(node)
    if isinstance(node, Leaf):
        if is_wrapped and node.name in index.entries:
            # The array of an `nnx.Variable`, `flax.linen.Partitioned` and the like: JAX, and so
            # Orbax, has a key for it.
            keys, shown = (*keys, (_VALUE, _DICT)), join_names(shown, _VALUE)
        yield _OrbaxLeaf(node.name, shown, keys)
        return
    if not node.children and keys:
        yield _OrbaxLeaf("", shown, keys, _EMPTY.get(node.kind, "Dict"))
    kind = _SEQUENCE if node.kind in ("list", "tuple") else _DICT
    for key, child in zip(map(str, node.keys), node.children, strict=True):
        below = join_names(shown, key if kind == _SEQUENCE else name_component(key))
        yield from _leaves(index, child, (*keys, (key, kind)), below)


def _check(index: Index, leaves: Sequence[_OrbaxLeaf]) -> None:
    """Refuses values that Orbax cannot hold, and names that it would confuse."""
    entries = {leaf.name: index.entry(leaf.name) for leaf in leaves if leaf.name in index.entries}
    missing = [
        entry
        for entry in {entry.name: entry for entry in entries.values()}.values()
        if entry.dtype in _MISSING or dtype_from_name(entry.dtype).kind in "mM"
    ]
    plain = {leaf.name: index.values[leaf.name] for leaf in leaves if leaf.name in index.values}
    values = {
        name: f"{quoted(value)}, a plain {type(value).__name__}"
        for name, value in plain.items()
        if isinstance(value, bytes) or (type(value) is int and not -(1 << 63) <= value < 1 << 63)
    }
    refuse("orbax", missing, values)
    seen: dict[str, _OrbaxLeaf] = {}
    for leaf in leaves:
        other = seen.setdefault(leaf.stored, leaf)
        if other is not leaf:
            first, second = ([key for key, _ in twin.keys] for twin in (other, leaf))
            raise UnsupportedLeaf(
                f"Orbax would write {quoted(first)} and {quoted(second)} to one place, "
                f"{quoted(leaf.stored)}; rename one of them by a rule"
            )
        if any(part in ("", ".", "..") for part in leaf.stored.split("/")) or "\0" in leaf.stored:
            raise UnsupportedLeaf(
                f"Orbax would write {quoted(leaf.stored)} into a folder of that name, which cannot "
                "be; rename it by a rule"
            )


def _check_files(files: Sequence[PlannedFile]) -> None:
    """Refuses pairs of names where one is the folder of the other's file."""
    seen = set[str]()
    folders = {file.name[:slash] for file in files for slash, c in enumerate(file.name) if c == "/"}
    for file in files:
        if file.name in seen or file.name in folders:
            raise UnsupportedLeaf(
                f"Orbax would need {quoted(file.name)} for two leaves; rename one of them by a rule"
            )
        seen.add(file.name)


def _kind(index: Index, name: str, saved: SavedArrays) -> str:
    """Orbax's name of the type of a leaf."""
    if name in index.entries:
        entry = index.entry(name)
        is_jax = entry.prng is not None or saved.is_numpy(entry.name) is False
        return "jax.Array" if is_jax else "np.ndarray"
    value = index.values[name]
    if value is None:
        return "None"
    return "string" if isinstance(value, str) else "scalar"


def _described(keys: _Keys, kind: str) -> dict[str, Any]:
    empty = kind in ("None", "Dict", *_EMPTY.values())
    return {
        "key_metadata": [{"key": key, "key_type": key_type} for key, key_type in keys],
        "value_metadata": {"value_type": kind, "skip_deserialize": empty},
    }


# --- arrays and values --------------------------------------------------------------------------


def _chunk(entry: ArrayEntry, most_bytes: int) -> tuple[int, ...]:
    """The extents of a chunk: its elements follow each other in the array."""
    extents = [max(1, n) for n in entry.shape]
    for dim in range(len(extents)):
        rows = entry.itemsize * math.prod(extents[dim + 1 :])
        if rows * extents[dim] <= most_bytes:
            break
        extents[dim] = max(1, most_bytes // rows)
    return tuple(extents)


def _array_files(
    stored: str, name: str, entry: ArrayEntry, chunk: Sequence[int]
) -> Iterator[PlannedFile]:
    """A file for each chunk; the last one in a dimension is padded with zeros."""
    yield text_file(f"{stored}/.zarray", _zarray(entry.dtype, entry.shape, chunk))
    size = math.prod(chunk) * entry.itemsize
    counts = [range(-(-n // c)) for n, c in zip(entry.shape, chunk, strict=True)]
    for position in product(*counts):
        start = tuple(k * c for k, c in zip(position, chunk, strict=True))
        stop = tuple(min(a + c, n) for a, c, n in zip(start, chunk, entry.shape, strict=True))
        key = ".".join(map(str, position)) or "0"
        yield PlannedFile(f"{stored}/{key}", size, data=(Data(0, name, Box(start, stop)),))


def _zarray(dtype: str, shape: Sequence[int], chunk: Sequence[int]) -> str:
    numpy_dtype = dtype_from_name(dtype)
    facts = {
        "chunks": list(chunk),
        "compressor": None,
        "dimension_separator": ".",
        "dtype": numpy_dtype.newbyteorder("<").str
        if numpy_dtype.type.__module__ == "numpy"
        else dtype,
        "fill_value": None,
        "filters": None,
        "order": "C",
        "shape": list(shape),
        "zarr_format": 2,
    }
    return json.dumps(facts, separators=(",", ":"))


def _sharding(entry: ArrayEntry, saved: SavedArrays) -> str:
    """The sharding of an array; Orbax loads it onto these devices by default.

    The devices have the ids that were saved with a step; else the first ones.
    """
    layout = entry.layout
    if layout is None or not layout.mesh.axes:  # boxes, or one device
        return _named_sharding(("device",), (1,), (), (), (0,))
    axes, shape, spec = layout.mesh.axes, layout.mesh.shape, layout.spec
    if entry.prng is not None:  # of the keys, not of their data
        spec = spec[:-1]
    while spec and spec[-1] is None:  # as JAX writes it
        spec = spec[:-1]
    types, ids = saved.of_mesh(axes, shape)
    return _named_sharding(axes, shape, spec, tuple(types), tuple(ids))


@lru_cache(maxsize=256)
def _named_sharding(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    spec: tuple[Any, ...],
    types: tuple[str, ...],
    ids: tuple[int, ...],
) -> str:
    size = math.prod(shape)
    devices = np.array(
        [{"id": device_id} for device_id in (ids if len(ids) == size else range(size))], object
    )
    sharding: dict[str, Any] = {
        "sharding_type": "NamedSharding",
        "shape": shape,
        "axis_names": axes,
        "partition_spec": spec,
        "device_mesh": {"mesh": devices.reshape(shape).tolist()},
    }
    if types:
        sharding["axis_types"] = types
    return json.dumps(sharding)


def _about(stored: str, entry: ArrayEntry, chunk: Sequence[int]) -> dict[str, Any]:
    key = None if entry.prng is None else {"random_key_impl": entry.prng}
    facts = {"param_name": stored, "write_shape": list(chunk), "chunk_shape": list(chunk)}
    return {"array_metadata": {**facts, "ext_metadata": key}}


def _value_files(stored: str, value: Any, kind: str, texts: dict[str, Any]) -> list[PlannedFile]:
    """The files of a number; a text is added to the file of all texts."""
    if kind == "scalar":
        dtype = {bool: "bool", int: "int64", float: "float64"}[type(value)]
        number = dtype_from_name(dtype).newbyteorder("<").type(value)
        return [
            text_file(f"{stored}/.zarray", _zarray(dtype, (), ())),
            text_file(f"{stored}/0", number.tobytes()),
        ]
    if kind == "string":
        *above, last = (t.replace("~1", "/").replace("~0", "~") for t in stored.split("/"))
        for token in above:
            texts = texts.setdefault(token, {})
        texts[last] = value
    return []


def _metadata_files(
    metadata: Mapping[str, Any], texts: Mapping[str, Any], about: Sequence[Any], custom: Any
) -> Iterator[PlannedFile]:
    if texts:
        yield text_file("_strings.json", json.dumps(texts, ensure_ascii=False))
    yield text_file("array_metadatas/process_0", json.dumps({"array_metadatas": about}))
    item_metadata = {
        "tree_metadata": metadata,
        "use_ocdbt": False,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": custom,
    }
    yield text_file("_METADATA", json.dumps(item_metadata), last=True)
