"""`PerProcess` values as self-describing bytes: a tree, its plain values and its arrays.

Small ones are JSON. With much data, and for `Sections`, what
is large is kept in binary (`frameworks.sections`).
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.frameworks import sections
from unickpt.frameworks.host_memory import HostBuffers, stage
from unickpt.frameworks.leaves import (
    NOTHING,
    LocalFragments,
    PerProcess,
    Sections,
    adapter_of,
    varying,
)
from unickpt.frameworks.process_group import Group, alone
from unickpt.frameworks.protocol import Adapter, StoredTree
from unickpt.frameworks.sections import EncodedValue, Joined, LazyMapping, Malformed
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.frameworks.sections import StoredValue

_BINARY_LEAST = 16 << 10
"""Bytes from which on arrays are kept in binary. Below, as the states of random generators are, all
is JSON, and readers that know no binary values can open the checkpoint."""
_LONG = 1 << 12
_INTS = (np.uint8, np.int16, np.uint16, np.int32, np.int64)
_INT64 = 1 << 63


class _Misfit(ValueError):
    """A stored per-process value differs from `like`."""


def blob_key(name: str, process: int) -> str:
    """Where one process's value of a per-process leaf is stored."""
    return f"{name}/process_{process:05d}" if name else f"process_{process:05d}"


def encode(value: Any, adapters: Sequence[Adapter]) -> EncodedValue:
    """A value of one process as bytes.

    Raises:
        UnsupportedLeaf: names what cannot be stored.
        TypeError: an array is not on the host of this process alone.
    """
    if isinstance(value, EncodedValue):
        return value
    if value is NOTHING:
        return EncodedValue(b"")
    group = alone()
    if isinstance(value, Sections):
        _check_section_keys(value.values)
        parts = {
            tree.plain_key(key): _ValuePart.from_value(section, adapters, group).binary()
            for key, section in value.values.items()
        }
        return sections.join(parts, _facts(value.facts))
    part = _ValuePart.from_value(value, adapters, group)
    if part.nbytes < _BINARY_LEAST:
        return EncodedValue(part.json())
    return sections.join({"": part.binary()}, None)


def _check_section_keys(values: Mapping[Any, Any]) -> None:
    for key in values:
        if not isinstance(key, str):
            raise TypeError(f"the keys of Sections must be str, not {quoted(key)}; use str(key)")
    if problem := tree.key_problem(tuple(values)):
        raise TypeError(f"Sections: {problem}")


def _facts(facts: Mapping[str, Any]) -> Mapping[str, Any]:
    if json.loads(json.dumps(dict(facts), allow_nan=False)) != facts:
        raise TypeError(f"the facts of Sections must be JSON, not {quoted(facts)}")
    return facts


@dataclass(frozen=True)
class _ValuePart:
    """The tree of a value or a section, taken apart.

    Arguments:
        tree: its JSON.
        plain: its plain values, as JSON.
        arrays: what is known of its arrays, long lists of numbers and long bytes, as JSON.
        data: the elements of these.
    """

    tree: Any
    plain: Mapping[str, Any]
    arrays: Mapping[str, dict[str, Any]]
    data: Mapping[str, Sequence[memoryview]]

    @classmethod
    def from_value(cls, value: Any, adapters: Sequence[Adapter], group: Group) -> _ValuePart:
        root = tree.flatten(
            value,
            lambda x: _is_leaf(x, adapters) or _is_long_list(x) or isinstance(x, Joined),
            lambda obj, name: _expand(obj, name, adapters),
            "the value cannot be stored",
        )
        plain, arrays, data = {}, {}, {}
        for leaf in tree.leaves(root):
            extra = dict[str, Any]()
            if _is_as_stored(leaf.value):
                pieces, shape = [leaf.value], leaf.value.shape
            elif (adapter := adapter_of(leaf.value, adapters)) is not None:
                array, extra = _on_host(leaf, adapter, group)
                pieces, shape = [array], array.shape
            elif isinstance(leaf.value, Joined):
                pieces = [np.ascontiguousarray(piece) for piece in leaf.value.arrays]
                shape = (sum(map(len, pieces)),)
            elif isinstance(leaf.value, list):
                pieces, shape, extra = [_numbers(leaf.value)], (len(leaf.value),), {"as": "list"}
            elif type(leaf.value) is bytes and len(leaf.value) >= _LONG:
                pieces, shape = [np.frombuffer(leaf.value, np.uint8)], (len(leaf.value),)
                extra = {"as": "bytes"}
            else:
                plain[leaf.name] = tree_json.value_to_json(leaf.value)
                continue
            name = extra.pop("dtype", None) or dtypes.name_of(pieces[0].dtype)
            arrays[leaf.name] = {"dtype": name, "shape": shape, **extra}
            data[leaf.name] = [p.reshape(-1).view(np.uint8).data for p in pieces]
        return cls(tree_json.to_json(root), plain, arrays, data)

    @property
    def nbytes(self) -> int:
        """Of what is not plain."""
        return sum(len(piece) for pieces in self.data.values() for piece in pieces)

    def json(self) -> bytes:
        """All of it as JSON."""
        plain, arrays = dict(self.plain), dict[str, Any]()
        for name, about in self.arrays.items():
            text = base64.b64encode(b"".join(self.data[name])).decode()
            if about.get("as") == "bytes":
                plain[name] = {"bytes": text}
            else:
                header = {key: fact for key, fact in about.items() if key in ("dtype", "shape")}
                prng = {"prng": about["prng"]} if "prng" in about else {}
                arrays[name] = {**header, "data": text, **prng}
        return self._text(plain, arrays)

    def binary(self) -> tuple[bytes, Sequence[Sequence[memoryview]]]:
        """Its JSON without the elements of arrays, and these."""
        arrays, offset = {}, 0
        for name, about in self.arrays.items():
            arrays[name] = {**about, "at": offset}
            size = sum(map(len, self.data[name]))
            offset += size + sections.padding(size)
        return self._text(self.plain, arrays), list(self.data.values())

    def _text(self, plain: Mapping[str, Any], arrays: Mapping[str, Any]) -> bytes:
        body = {"tree": self.tree, "values": plain, "arrays": arrays}
        return msgspec.json.encode(body)


def _is_as_stored(value: Any) -> bool:
    """Whether a value is an array of NumPy whose memory is what is stored; a loader may have
    thousands of them."""
    if type(value) is not np.ndarray:
        return False
    flags, dtype = value.flags, value.dtype
    return flags.c_contiguous and dtype.kind in "biufc" and bool(dtype.isnative)


def _on_host(leaf: tree.Leaf, adapter: Adapter, group: Group) -> tuple[Array, dict[str, Any]]:
    """The elements of an array, and what else is said of it."""
    source = adapter.source(leaf.value, group)
    whole, dtype = Box.whole(source.shape), source.dtype.newbyteorder("=")
    if source.fragments and source.fragments[0].box != whole:
        raise TypeError(f"{leaf.name!r}: a sharded array cannot be a per-process value")
    extra: dict[str, Any] = {"dtype": dtypes.name_of(source.dtype)}
    if source.prng is not None:
        extra["prng"] = source.prng
    if hasattr(adapter, "from_numpy"):
        extra["as"] = "torch"
    if not source.fragments:
        return np.zeros(source.shape, dtype), extra
    array = stage(source.fragments[0], whole, dtype, HostBuffers(0).take)
    return np.ascontiguousarray(array).reshape(source.shape), extra


def _is_long_list(value: Any) -> bool:
    """Whether a value is a list of many ints or floats, such as tokens, which is one array."""
    if type(value) is not list or len(value) * 8 < _BINARY_LEAST:
        return False
    kinds = set(map(type, value))
    return kinds == {float} or (kinds == {int} and min(value) >= -_INT64 and max(value) < _INT64)


def _numbers(value: list[Any]) -> Array:
    """A long list of numbers as an array, of ints as small as they allow."""
    if type(value[0]) is float:
        return np.array(value, np.float64)
    array = np.array(value, np.int64)
    low, high = int(array.min()), int(array.max())
    fits = (d for d in _INTS if np.iinfo(d).min <= low and high <= np.iinfo(d).max)
    return array.astype(next(fits))


def decode(stored: StoredValue, where: str, like: Any, adapters: Sequence[Adapter]) -> Any:
    """The inverse of `encode`; arrays are returned as those of `like`, or as NumPy arrays.

    Arguments:
        stored: what `encode` returned; untrusted.
        where: the checkpoint and the leaf, for messages.
        like: what to load; None for what is stored.
        adapters: the adapters.

    Returns:
        The value; `Sections`, which read lazily, for those; None where the process saved none.

    Raises:
        CheckpointCorrupt: the bytes are not a per-process value.
        LoadMismatch: `like` has another structure.
    """
    if stored.is_empty and like is None:
        return None
    try:
        if stored.is_empty:
            raise _Misfit("this process saved no value of its own, `like` asks for one")
        if stored.is_json:
            return _decode_value(stored.json(), None, like, adapters)
        facts = stored.head().facts
        if facts is None:
            return _decode_value(*stored.section(""), like, adapters)
        if like is not None and not isinstance(like, Sections):
            raise _Misfit("the stored per-process value is in Sections, `like` is not")
    except Malformed as error:
        raise CheckpointCorrupt(f"{where}: {error}") from None
    except _Misfit as error:
        raise LoadMismatch(f"{where}: {error}") from None

    def section(key: str) -> Any:
        try:
            return _decode_value(*stored.section(key), None, adapters)
        except Malformed as error:
            raise CheckpointCorrupt(f"{where}: section {quoted(key)}: {error}") from None

    return Sections(facts, LazyMapping(stored, section))


def _decode_value(
    text: bytes, data: memoryview | None, like: Any, adapters: Sequence[Adapter]
) -> Any:
    """A value, or a section, of its JSON and its elements."""
    root, values, about = _decode(text, data)
    prngs = {name: facts.get("prng") for name, facts in about.items()}
    if like is None:
        values |= {n: _as_said(values[n], facts, adapters) for n, facts in about.items()}
    else:
        root = tree.flatten(
            like,
            lambda x: _is_leaf(x, adapters) or _is_long_list(x),
            lambda obj, name: _expand(obj, name, adapters, StoredTree(values, lambda: None)),
            "`like` cannot be loaded into",
        )
        sequence_names = [n for n, facts in about.items() if facts.get("as") in ("list", "bytes")]
        values |= {n: _as_said(values[n], about[n], adapters) for n in sequence_names}
        values = _fitted(root, values, prngs, adapters)
        for node, check in tree.checks(root):
            check(node, values.__getitem__)
    return tree.rebuild(root, values.__getitem__)


def _as_said(value: Any, about: Mapping[str, Any], adapters: Sequence[Adapter]) -> Any:
    """An array as what it was: a list, bytes, or (if torch is imported) a tensor."""
    match about.get("as"):
        case "list":
            return value.tolist()
        case "bytes":
            return value.tobytes()
        case "torch":
            for adapter in adapters:
                make = getattr(adapter, "from_numpy", None)
                if make is not None:
                    return make(value)
    return value


def _fitted(
    root: tree.Node | tree.Leaf,
    values: dict[str, Any],
    prngs: dict[str, str | None],
    adapters: Sequence[Adapter],
) -> dict[str, Any]:
    """The stored leaves as the leaves of `like` request them."""
    templates = {leaf.name: leaf.value for leaf in tree.leaves(root)}
    if set(templates) != set(values):
        differ = ", ".join(sorted(set(templates) ^ set(values))[:5])
        raise _Misfit(f"the stored per-process value and `like` differ in: {differ}")
    return {
        name: _into(templates[name], value, prngs.get(name), name, adapters)
        for name, value in values.items()
    }


def _decode(
    text: bytes, data: memoryview | None
) -> tuple[tree.Node | tree.Leaf, dict[str, Any], dict[str, dict[str, Any]]]:
    """The tree, its leaves by name, and what is said of those that are arrays."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Malformed(f"a per-process value is not JSON: {error}") from None
    plain, arrays = (_table(body, kind) for kind in ("values", "arrays"))
    try:
        root = tree_json.from_json(body.get("tree"))
        values: dict[str, Any] = {n: tree_json.value_from_json(value) for n, value in plain.items()}
        if tree_json.has_opaque(text):
            values = tree_json.with_opaque(body.get("tree"), values)
    except (tree_json.BadTree, tree_json.BadValue) as error:
        raise Malformed(f"a per-process value is malformed: {error}") from None
    values |= {name: _array(name, stored, data) for name, stored in arrays.items()}
    if {leaf.name for leaf in tree.leaves(root)} != set(values):
        raise Malformed("a per-process value is malformed: its tree and its leaves do not match")
    return root, values, arrays


def _table(body: Any, kind: str) -> dict[str, Any]:
    table = body.get(kind) if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise Malformed(f"a per-process value is malformed: its {kind} are {quoted(table)}")
    return table


def _is_leaf(x: Any, adapters: Sequence[Adapter]) -> bool:
    is_array = type(x) is np.ndarray  # most are
    return is_array or tree_json.is_plain(x) or adapter_of(x, adapters) is not None


def _expand(
    obj: Any, name: str, adapters: Sequence[Adapter], stored: StoredTree | None = None
) -> tree.Expansion | None:
    """The parts of an array that is stored as its parts."""
    if stored is None and isinstance(obj, PerProcess | LocalFragments):
        raise TypeError(f"{name!r}: a {type(obj).__name__} cannot be inside a PerProcess")
    adapter = varying(type(obj), adapters)
    return None if adapter is None else adapter.expand(obj, name, stored)


def _shown(shape: tuple[int, ...], dtype: dtypes.DType, prng: str | None) -> str:
    return dtypes.with_shape(str(dtype), shape) + (f" of a {prng} key" if prng else "")


def _array(name: str, stored: Any, data: memoryview | None) -> Array:
    if not isinstance(stored, dict):
        raise Malformed(f"array {quoted(name)} of a per-process value is {quoted(stored)}")
    shape, text, prng = stored.get("shape"), stored.get("dtype"), stored.get("prng")
    if not (isinstance(text, str) and isinstance(prng, str | None)):
        raise _bad_array(name, "its dtype or PRNG implementation is not a text")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise _bad_array(name, f"its shape is {quoted(shape)}")
    try:
        dtype = dtypes.from_name(text)
    except TypeError as error:
        raise _bad_array(name, str(error)) from None
    nbytes = math.prod(shape) * dtype.itemsize
    raw = _base64(name, stored) if data is None else _binary(name, stored, data, nbytes)
    if len(raw) != nbytes:
        raise _bad_array(name, f"its data has {len(raw)} bytes, but its shape is {quoted(shape)}")
    if stored.get("as") in ("list", "bytes") and len(shape) != 1:
        raise _bad_array(name, f"it is no list, as its shape is {quoted(shape)}")
    try:
        return np.frombuffer(bytearray(raw), np.uint8).view(dtype).reshape(shape)
    except ValueError as error:  # more dimensions, or larger ones, than NumPy supports
        raise _bad_array(name, str(error)) from None


def _base64(name: str, stored: dict[str, Any]) -> bytes:
    try:
        return base64.b64decode(stored.get("data", 0), validate=True)
    except (TypeError, ValueError) as error:
        raise _bad_array(name, str(error)) from None


def _binary(name: str, stored: dict[str, Any], data: memoryview, nbytes: int) -> memoryview:
    offset = stored.get("at")
    if type(offset) is not int or not 0 <= offset <= len(data) - nbytes:
        raise _bad_array(name, f"it is at byte {quoted(offset)} of {len(data)}")
    return data[offset : offset + nbytes]


def _bad_array(name: str, why: str) -> Malformed:
    return Malformed(f"array {quoted(name)} of a per-process value is malformed: {why}")


def _plain_as_asked(template: Any, value: Any, name: str) -> Any:
    if type(tree_json.plain(template)) is not type(value):
        raise _Misfit(
            f"{name!r}: stored {type(value).__name__}, requested {type(template).__name__}"
        )
    try:
        return tree_json.as_asked(value, template)
    except ValueError as error:
        raise _Misfit(f"{name!r}: {error}") from None


def _list_as_requested(template: Any, value: Any, name: str) -> Any:
    """A long list of numbers of one type, where another one is asked for."""
    stored, requested = (
        f"a list of {len(x)} {type(x[0]).__name__}s" if isinstance(x, list) else type(x).__name__
        for x in (value, template)
    )
    if stored != requested:
        raise _Misfit(f"{name!r}: stored {stored}, requested {requested}")
    return value


def _into(
    template: Any, value: Any, prng: str | None, name: str, adapters: Sequence[Adapter]
) -> Any:
    if isinstance(value, list) or isinstance(template, list):
        return _list_as_requested(template, value, name)
    adapter = adapter_of(template, adapters)
    target = None if adapter is None else adapter.target(template)
    if target is not None and target.shape == () and tree_json.is_plain(value):
        number = tree_json.as_array(value, target.dtype)
        value = value if number is None else number
    elif target is None and isinstance(value, np.ndarray) and value.shape == ():
        same_kind = tree_json.is_kind(tree_json.plain(template), value.dtype)
        value = value.item() if same_kind else value
    if target is None or not isinstance(value, np.ndarray):
        return _plain_as_asked(template, value, name)
    stored = (value.shape, value.dtype, prng)
    if stored != (target.shape, target.dtype, target.prng):
        raise _Misfit(
            f"{name!r}: stored {_shown(*stored)}, "
            f"requested {_shown(target.shape, target.dtype, target.prng)}"
        )
    buffers = [target.buffer(i) for i in range(len(target.boxes))]
    for box, buffer in zip(target.boxes, buffers, strict=True):
        buffer[...] = value[box.slices]
    return target.finish(buffers)
