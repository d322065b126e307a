"""The small files of an Orbax checkpoint: its tree, texts, PRNG keys and shardings.

Source: orbax/checkpoint/_src/metadata/tree.py, tree_rich_types.py, sharding.py.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import MAX_DEPTH, Expansion, Layout, Mesh, MeshFacts, MeshKey, quoted

_ARRAYS = {"jax.Array": "array", "np.ndarray": "numpy"}
_SCALAR, _TEXT = "scalar", "string"
_EMPTY: Mapping[str, Callable[[], Any]] = {"Dict": dict, "List": list, "Tuple": tuple}
_EMPTY_NAMEDTUPLE = "NamedTuple"
_SEQUENCE, _DICT = 1, 2
_BAD = (
    ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, binascii.Error,
)  # fmt: skip
# Devices of all meshes of different sizes together, and axes of one.
_MOST_DEVICES, _MOST_AXES = 1 << 20, 32


@dataclass(frozen=True)
class Stored:
    """A leaf whose value is stored elsewhere.

    Arguments:
        name: of its array or text, as Orbax names them: its keys, joined by dots.
        kind: "array", "numpy" (an array that was one of NumPy), "scalar" or "text".
        facts: the dtype and the shape of an array, if they are stored; its own metadata must agree.
    """

    name: str
    kind: str
    facts: tuple[str, tuple[int, ...]] | None = None


@dataclass(frozen=True)
class NamedTuple:
    """A namedtuple of a checkpoint whose metadata has the types of its containers."""

    type_name: str
    fields: Mapping[str, Any]

    def expanded(self) -> Expansion:
        return Expansion(
            "namedtuple", tuple(self.fields), tuple(self.fields.values()), tuple, self.type_name
        )


@dataclass(frozen=True)
class ItemMetadata:
    """The metadata of an item, from `_METADATA`.

    Arguments:
        tree: containers, plain values and `Stored`.
        stored: all of the latter.
        ocdbt: whether arrays are in an OCDBT database; None if it is not recorded.
        version: of Zarr.
        fill: whether chunks that are missing are legal: they have the fill value.
        custom: of the user.
    """

    tree: Any
    stored: tuple[Stored, ...]
    ocdbt: bool | None
    version: int
    fill: bool
    custom: Mapping[str, Any]


def _loaded(data: bytes, where: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CheckpointCorrupt(f"{where} is not valid JSON: {error}") from error


# --- the tree -----------------------------------------------------------------------------------

_Path = tuple[tuple[str, int], ...]


def item(data: bytes, where: str) -> ItemMetadata:
    """The content of `_METADATA`.

    Arguments:
        data: the file; untrusted.
        where: its path, for messages.

    Raises:
        CheckpointCorrupt: it is damaged, or two arrays have the same name.
    """
    root = _loaded(data, where)
    try:
        leaves = dict(map(_leaf, root["tree_metadata"].values()))
        by_path = {tuple(key for key, _ in path): leaf for path, leaf in leaves.items()}
        if len(by_path) != len(root["tree_metadata"]):
            raise ValueError("it lists a leaf twice")
        if (lost := lost_leaf(by_path.items())) is not None:
            raise ValueError(
                f"{quoted(list(lost[0]))} and {quoted(list(lost[1]))} were both written as "
                f"{quoted(lost[2])}, so that the data of one of them is lost"
            )
        rich = root.get("value_metadata_tree")
        if rich is not None:
            content = _rich(json.loads(rich), (), by_path)
            if by_path:
                raise ValueError(f"its trees differ: only one has {quoted(next(iter(by_path)))}")
        else:
            content = _nested(list(leaves.items()), 0)
        stored = tuple(leaf for leaf in leaves.values() if isinstance(leaf, Stored))
        version = 3 if root.get("use_zarr3", False) else 2
        fill = not root.get("store_array_data_equal_to_fill_value", False)
        custom = root["custom_metadata"] if isinstance(root.get("custom_metadata"), dict) else {}
        return ItemMetadata(content, stored, root.get("use_ocdbt"), version, fill, custom)
    except _BAD as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error}") from error


def _leaf(entry: Any) -> tuple[_Path, Any]:
    path = tuple((key["key"], key["key_type"]) for key in entry["key_metadata"])
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    for key, kind in path:
        if type(key) is not str or kind not in (_SEQUENCE, _DICT):
            raise ValueError(f"the key {quoted(key)} of type {quoted(kind)}")
    kind = entry["value_metadata"]["value_type"]
    return path, _value(".".join(key for key, _ in path), kind)


def _value(name: str, kind: Any) -> Any:
    if kind in _ARRAYS:
        return Stored(name, _ARRAYS[kind])
    if kind in (_SCALAR, _TEXT):
        return Stored(name, "scalar" if kind == _SCALAR else "text")
    if kind in _EMPTY:
        return _EMPTY[kind]()
    if kind in ("None", _EMPTY_NAMEDTUPLE):
        return None  # of the latter, unless Orbax has stored the types of containers
    return f"<{quoted(kind)[1:-1]}>"  # of a custom type handler


def lost_leaf(
    leaves: Iterable[tuple[tuple[str, ...], Any]],
) -> tuple[tuple[str, ...], tuple[str, ...], str] | None:
    """The keys of two leaves that were written to one place, and its name; None if there are none.

    Orbax joins keys by dots and escapes none.
    """
    first: dict[tuple[str, bool], tuple[str, ...]] = {}
    for path, leaf in leaves:
        if isinstance(leaf, Stored):
            other = first.setdefault((leaf.name, leaf.kind == "text"), path)
            if other != path:
                return other, path, leaf.name
    return None


def _nested(leaves: Sequence[tuple[_Path, Any]], depth: int) -> Any:
    """The containers of leaves that have the first `depth` keys in common."""
    if len(leaves) == 1 and len(leaves[0][0]) == depth:
        return leaves[0][1]
    groups: dict[str, list[tuple[_Path, Any]]] = {}
    kinds = set()
    for path, leaf in leaves:
        if len(path) == depth:
            raise ValueError(f"{quoted([key for key, _ in path])} is a leaf and a container")
        key, kind = path[depth]
        kinds.add(kind)
        groups.setdefault(key, []).append((path, leaf))
    children = {key: _nested(group, depth + 1) for key, group in groups.items()}
    if kinds <= {_DICT}:
        return children
    try:
        if kinds == {_SEQUENCE}:
            return [children[str(index)] for index in range(len(children))]
    except KeyError:
        pass
    raise ValueError(f"a container has the keys {quoted(list(children))}, of types {sorted(kinds)}")


def _rich(node: Any, path: tuple[str, ...], leaves: dict[tuple[str, ...], Any]) -> Any:
    """A tree whose containers have their types; takes its leaves out of `leaves`."""
    if len(path) >= MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(node, list):
        return [_rich(child, (*path, str(n)), leaves) for n, child in enumerate(node)]
    category, kind = node.get("category"), node.get("clazz")
    if category == "custom" and kind == "ValueMetadataEntry":
        leaf = leaves.pop(path)
        is_empty = node["data"]["value_type"] == _EMPTY_NAMEDTUPLE
        return NamedTuple("OrbaxEmptyNamedTuple", {}) if is_empty else leaf
    if category == "custom" and kind == "tuple":
        entries = enumerate(node["entries"])
        return tuple(_rich(child, (*path, str(n)), leaves) for n, child in entries)
    if category == "namedtuple":
        pairs = [(child["key"], child["value"]) for child in node["entries"]]
        fields = {key: _rich(child, (*path, key), leaves) for key, child in pairs}
        return NamedTuple(str(kind).rpartition(".")[2], fields)
    return {key: _rich(child, (*path, key), leaves) for key, child in node.items()}


# --- texts --------------------------------------------------------------------------------------


def texts(data: bytes, names: Sequence[str], where: str) -> dict[str, str]:
    """The texts of `_strings.json` by the name of their leaf, which TensorStore wrote there by
    their JSON pointers.

    Raises:
        CheckpointCorrupt: it is damaged, or has not all of them.
    """
    root = _loaded(data, where)
    texts_by_name = {}
    for name in names:
        value = root
        for token in name.split("/"):
            key = token.replace("~1", "/").replace("~0", "~")
            value = value.get(key) if isinstance(value, dict) else None
        if not isinstance(value, str):
            raise CheckpointCorrupt(f"{where} has no text {quoted(name)}")
        texts_by_name[name] = value
    return texts_by_name


# --- PRNG keys and shardings --------------------------------------------------------------------


def key_implementations(data: bytes, where: str) -> dict[str, str]:
    """The implementations of typed PRNG keys by the name of their array, as a file of
    `array_metadatas` says.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    implementations = {}
    try:
        for entry in _loaded(data, where)["array_metadatas"]:
            facts = entry["array_metadata"]
            kind = (facts.get("ext_metadata") or {}).get("random_key_impl")
            if kind is not None:
                implementations[str(facts["param_name"])] = str(kind)
    except _BAD as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error!r}") from error
    return implementations


def shardings(data: bytes, where: str) -> dict[str, Any]:
    """The shardings of `_sharding` by the name of their array, for `layout`.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    try:
        texts = {
            base64.b64decode(name, validate=True).decode(): text
            for name, text in _loaded(data, where).items()
        }
        parsed = {text: json.loads(text) for text in set(texts.values())}
        shardings_by_name = {name: parsed[text] for name, text in texts.items()}
        sizes = {_devices(sharding) for sharding in parsed.values() if _is_named(sharding)}
        if sum(sizes) > _MOST_DEVICES:
            raise ValueError(f"meshes of {sum(sizes)} devices")
        return shardings_by_name
    except _BAD as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error!r}") from error


def layout(sharding: Any, rank: int, where: str) -> Layout | None:
    """The layout of an array of so many dimensions; None if its sharding is not that of a mesh.

    Orbax records the devices of the mesh and not their processes: all are said to be of process 0.

    Arguments:
        sharding: from `shardings`; None if there is none.
        rank: of the array; that of a PRNG key is larger than that of its sharding.
        where: the file and the array, for messages.

    Raises:
        CheckpointCorrupt: it is damaged, or does not fit the array.
    """
    try:
        if sharding is None or not _is_named(sharding):
            return None
        shape = tuple(int(n) for n in sharding["shape"])
        axes = tuple(str(axis) for axis in sharding["axis_names"])
        spec = sharding["partition_spec"]
        if any(not isinstance(entry, (str, list, type(None))) for entry in spec):
            return None
        dims = [_axes(entry) for entry in spec]
        if len(dims) > rank:
            raise ValueError(f"the partition {quoted(spec)} of an array of rank {rank}")
        mesh = Mesh(axes, shape, _processes(_devices(sharding)))
        return Layout(mesh, (*dims, *((),) * (rank - len(dims))))
    except _BAD as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error}") from error


def meshes(shardings: Iterable[Any]) -> dict[MeshKey, MeshFacts]:
    """The facts of meshes in shardings.

    Arguments:
        shardings: from `shardings`; `layout` has accepted them.
    """
    facts_by_mesh: dict[MeshKey, MeshFacts] = {}
    for sharding in {id(sharding): sharding for sharding in shardings}.values():
        if sharding is not None and _is_named(sharding):
            mesh_key = tuple(map(str, sharding["axis_names"])), tuple(map(int, sharding["shape"]))
            with suppress(*_BAD):  # of no consequence: JAX's own order of devices is as good
                types = tuple(map(str, sharding.get("axis_types") or ()))
                ids = [device["id"] for device in _flat(sharding["device_mesh"]["mesh"])]
                facts_by_mesh.setdefault(mesh_key, (types, tuple(map(int, ids))))
    return facts_by_mesh


def _flat(nested: Any) -> list[Any]:
    return [leaf for child in nested for leaf in _flat(child)] if type(nested) is list else [nested]


def _is_named(sharding: Any) -> bool:
    return bool(sharding["sharding_type"] == "NamedSharding")


def _devices(sharding: Any) -> int:
    """How many devices a mesh has."""
    shape = [int(n) for n in sharding["shape"]]
    if len(shape) > _MOST_AXES or any(not 0 <= n <= _MOST_DEVICES for n in shape):
        raise ValueError(f"a mesh of {quoted(shape)}")
    return math.prod(shape)


@lru_cache(maxsize=4)
def _processes(devices: int) -> tuple[int, ...]:
    """The process of each device, shared by all arrays on meshes of one size."""
    return (0,) * devices


def _axes(entry: Any) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(str(axis) for axis in entry)
