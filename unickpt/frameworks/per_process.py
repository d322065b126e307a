"""`PerProcess` values as self-describing bytes: a tree, its plain values and its arrays.

Small values are JSON. With much data, and for `Sections`, large parts are kept in binary
(`frameworks.sections`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.frameworks import sections
from unickpt.frameworks.adapter_protocol import Adapter, StoredTree
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
from unickpt.frameworks.sections import EncodedValue, Joined, LazyMapping, Malformed
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.frameworks.sections import StoredValue

_BINARY_LEAST = 16 << 10
"""The size in bytes from which arrays are kept in binary. Below it, as for the states of random
generators, all is JSON, and readers that know no binary values can open the checkpoint."""
_LONG = 1 << 12
_INTS = (np.uint8, np.int16, np.uint16, np.int32, np.int64)
_INT64 = 1 << 63


_UNREADABLE = RecursionError, UnicodeError, msgspec.DecodeError


class _ArrayHead(msgspec.Struct, frozen=True, omit_defaults=True, rename={"form": "as"}):
    """The JSON facts of an array in a value: its elements, or the byte at which they are.

    Arguments:
        form: its original type, if no NumPy array: a "list", "bytes", or a tensor of "torch".
    """

    dtype: str
    shape: tuple[Annotated[int, msgspec.Meta(ge=0)], ...]
    prng: str | None = None
    form: str | None = None
    at: int | None = None
    data: bytes | None = None


class _Section(msgspec.Struct, frozen=True):
    """The JSON of a value or a section."""

    tree: Any
    values: dict[str, Any]
    arrays: dict[str, msgspec.Raw]


_ARRAY, _BODY = msgspec.json.Decoder(_ArrayHead), msgspec.json.Decoder(_Section)


class _Misfit(ValueError):
    """A stored per-process value differs from `like`."""


def blob_key(name: str, process: int) -> str:
    """The key of one process's value of a per-process leaf."""
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
    if isinstance(value, Sections):
        _check_section_keys(value.values)
        parts = {
            tree.plain_key(key): _ValuePart.from_value(section, adapters).binary()
            for key, section in value.values.items()
        }
        return sections.join(parts, _facts(value.facts))
    part = _ValuePart.from_value(value, adapters)
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
    """The tree of a value or a section, split into its parts.

    Arguments:
        tree: its JSON.
        plain: its plain values, as JSON.
        arrays: the facts of its arrays, long lists of numbers and long bytes, as JSON.
        data: the elements of these.
    """

    tree: Any
    plain: Mapping[str, Any]
    arrays: Mapping[str, _ArrayHead]
    data: Mapping[str, Sequence[memoryview]]

    @classmethod
    def from_value(cls, value: Any, adapters: Sequence[Adapter]) -> _ValuePart:
        root = tree.flatten(
            value,
            lambda x: _is_leaf(x, adapters) or _is_long_list(x) or isinstance(x, Joined),
            lambda obj, name: _expand(obj, name, adapters),
            "the value cannot be stored",
        )
        plain, arrays, data, group = {}, {}, {}, alone()
        for leaf in tree.leaves(root):
            value, about, form = leaf.value, None, None
            if _is_as_stored(value):
                pieces, about = [value], _ArrayHead(dtypes.name_of(value.dtype), value.shape)
            elif (adapter := adapter_of(value, adapters)) is not None:
                array, about = _on_host(leaf, adapter, group)
                pieces = [array]
            elif isinstance(value, Joined):
                pieces = [np.ascontiguousarray(piece) for piece in value.arrays]
            elif isinstance(value, list):
                pieces, form = [_numbers(value)], "list"
            elif type(value) is bytes and len(value) >= _LONG:
                pieces, form = [np.frombuffer(value, np.uint8)], "bytes"
            else:
                plain[leaf.name] = tree_json.value_to_json(value)
                continue
            if about is None:
                length = sum(map(len, pieces))
                about = _ArrayHead(dtypes.name_of(pieces[0].dtype), (length,), form=form)
            arrays[leaf.name] = about
            data[leaf.name] = [p.reshape(-1).view(np.uint8).data for p in pieces]
        return cls(tree_json.to_json(root), plain, arrays, data)

    @property
    def nbytes(self) -> int:
        """The bytes of all that is not plain."""
        return sum(len(piece) for pieces in self.data.values() for piece in pieces)

    def json(self) -> bytes:
        """All of it as JSON."""
        plain, arrays = dict(self.plain), dict[str, _ArrayHead]()
        for name, about in self.arrays.items():
            elements = b"".join(self.data[name])
            if about.form == "bytes":
                plain[name] = {"bytes": elements}
            else:
                arrays[name] = replace(about, form=None, data=elements)
        return self._text(plain, arrays)

    def binary(self) -> tuple[bytes, Sequence[Sequence[memoryview]]]:
        """Its JSON without the elements of arrays, and these."""
        arrays, offset = {}, 0
        for name, about in self.arrays.items():
            arrays[name] = replace(about, at=offset)
            size = sum(map(len, self.data[name]))
            offset += size + sections.padding(size)
        return self._text(self.plain, arrays), list(self.data.values())

    def _text(self, plain: Mapping[str, Any], arrays: Mapping[str, _ArrayHead]) -> bytes:
        return msgspec.json.encode({"tree": self.tree, "values": plain, "arrays": arrays})


def _is_as_stored(value: Any) -> bool:
    """Whether a value is a NumPy array whose memory is stored unchanged; a loader may have
    thousands of them."""
    if type(value) is not np.ndarray:
        return False
    flags, dtype = value.flags, value.dtype
    return flags.c_contiguous and dtype.kind in "biufc" and bool(dtype.isnative)


def _on_host(leaf: tree.Leaf, adapter: Adapter, group: Group) -> tuple[Array, _ArrayHead]:
    """The elements of an array, and its other facts."""
    source = adapter.source(leaf.value, group)
    whole, dtype = Box.whole(source.shape), source.dtype.newbyteorder("=")
    if source.fragments and source.fragments[0].box != whole:
        raise TypeError(f"{leaf.name!r}: a sharded array cannot be a per-process value")
    form = "torch" if hasattr(adapter, "from_numpy") else None
    about = _ArrayHead(dtypes.name_of(source.dtype), source.shape, source.prng, form)
    if not source.fragments:
        return np.zeros(source.shape, dtype), about
    array = stage(source.fragments[0], whole, dtype, HostBuffers(0).take)
    return np.ascontiguousarray(array).reshape(source.shape), about


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
        stored: the result of `encode`; untrusted.
        where: the checkpoint and the leaf, for messages.
        like: the requested value; None for the stored one.
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
            raise _Misfit("this process saved no value of its own, but `like` requests one")
        facts = stored.head.facts
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


def _decode_value(text: bytes, data: memoryview, like: Any, adapters: Sequence[Adapter]) -> Any:
    """A value, or a section, from its JSON and its elements."""
    root, values, about = _decode(text, data)
    if like is None:
        values |= {n: _as_said(values[n], facts, adapters) for n, facts in about.items()}
    else:
        root = tree.flatten(
            like,
            lambda x: _is_leaf(x, adapters) or _is_long_list(x),
            lambda obj, name: _expand(obj, name, adapters, StoredTree(values, lambda: None)),
            "`like` cannot be loaded into",
        )
        sequence_names = [n for n, facts in about.items() if facts.form in ("list", "bytes")]
        values |= {n: _as_said(values[n], about[n], adapters) for n in sequence_names}
        values = _fitted(root, values, about, adapters)
        for node, check in tree.checks(root):
            check(node, values.__getitem__)
    return tree.rebuild(root, values.__getitem__)


def _as_said(value: Any, about: _ArrayHead, adapters: Sequence[Adapter]) -> Any:
    """An array in its original type: a list, bytes, or (if torch is imported) a tensor."""
    match about.form:
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
    about: Mapping[str, _ArrayHead],
    adapters: Sequence[Adapter],
) -> dict[str, Any]:
    """The stored leaves as the leaves of `like` request them."""
    templates = {leaf.name: leaf.value for leaf in tree.leaves(root)}
    if set(templates) != set(values):
        differ = ", ".join(sorted(set(templates) ^ set(values))[:5])
        raise _Misfit(f"the stored per-process value and `like` differ in: {differ}")
    fitted = dict[str, Any]()
    for name, value in values.items():
        prng = about[name].prng if name in about else None
        try:
            fitted[name] = _into(templates[name], value, prng, adapters)
        except _Misfit as error:
            raise _Misfit(f"{name!r}: {error}") from None
    return fitted


def _decode(
    text: bytes, data: memoryview
) -> tuple[tree.Node | tree.Leaf, dict[str, Any], dict[str, _ArrayHead]]:
    """The tree, its leaves by name, and the facts of those that are arrays."""
    try:
        body = _BODY.decode(text)
        root = tree_json.from_json(body.tree)
        values: dict[str, Any] = {n: tree_json.value_from_json(v) for n, v in body.values.items()}
        if tree_json.has_opaque(text):
            values = tree_json.with_opaque(body.tree, values)
    except (*_UNREADABLE, tree_json.BadTree, tree_json.BadValue) as error:
        raise Malformed(f"a per-process value is malformed: {error}") from None
    about = dict[str, _ArrayHead]()
    for name, stored in body.arrays.items():
        about[name], values[name] = _array(name, stored, data)
    if {leaf.name for leaf in tree.leaves(root)} != set(values):
        raise Malformed("a per-process value is malformed: its tree and its leaves do not match")
    return root, values, about


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


def _array(name: str, text: msgspec.Raw, data: memoryview) -> tuple[_ArrayHead, Array]:
    """The facts of an array, and its elements, which are in the text or in the data."""
    try:
        about = _ARRAY.decode(text)
        dtype = dtypes.from_name(about.dtype)
    except (*_UNREADABLE, TypeError) as error:
        raise _bad_array(name, str(error)) from None
    shape, offset = about.shape, about.at
    nbytes = math.prod(shape) * dtype.itemsize
    raw: bytes | memoryview | None = about.data
    if raw is None:
        if offset is None or not 0 <= offset <= len(data) - nbytes:
            raise _bad_array(name, f"it is at byte {offset} of {len(data)}")
        raw = data[offset : offset + nbytes]
    if len(raw) != nbytes:
        raise _bad_array(name, f"its data has {len(raw)} bytes, but its shape is {quoted(shape)}")
    if about.form in ("list", "bytes") and len(shape) != 1:
        raise _bad_array(name, f"it is no list, as its shape is {quoted(shape)}")
    try:
        return about, np.frombuffer(bytearray(raw), np.uint8).view(dtype).reshape(shape)
    except ValueError as error:  # more dimensions, or larger ones, than NumPy supports
        raise _bad_array(name, str(error)) from None


def _bad_array(name: str, why: str) -> Malformed:
    return Malformed(f"array {quoted(name)} of a per-process value is malformed: {why}")


def _plain_as_asked(template: Any, value: Any) -> Any:
    if type(tree_json.plain(template)) is not type(value):
        raise _Misfit(f"stored {type(value).__name__}, requested {type(template).__name__}")
    try:
        return tree_json.as_asked(value, template)
    except ValueError as error:
        raise _Misfit(str(error)) from None


def _list_as_requested(template: Any, value: Any) -> Any:
    """A long list of numbers of one type, where another one is requested."""
    stored, requested = (
        f"a list of {len(x)} {type(x[0]).__name__}s" if isinstance(x, list) else type(x).__name__
        for x in (value, template)
    )
    if stored != requested:
        raise _Misfit(f"stored {stored}, requested {requested}")
    return value


def _into(template: Any, value: Any, prng: str | None, adapters: Sequence[Adapter]) -> Any:
    if isinstance(value, list) or isinstance(template, list):
        return _list_as_requested(template, value)
    adapter = adapter_of(template, adapters)
    target = None if adapter is None else adapter.target(template)
    if target is not None and target.shape == () and tree_json.is_plain(value):
        number = tree_json.as_array(value, target.dtype)
        value = value if number is None else number
    elif target is None and isinstance(value, np.ndarray) and value.shape == ():
        same_kind = tree_json.is_kind(tree_json.plain(template), value.dtype)
        value = value.item() if same_kind else value
    if target is None or not isinstance(value, np.ndarray):
        return _plain_as_asked(template, value)
    stored = value.shape, value.dtype, prng
    requested = target.shape, target.dtype, target.prng
    if stored != requested:
        raise _Misfit(f"stored {_shown(*stored)}, requested {_shown(*requested)}")
    buffers = [target.buffer(i) for i in range(len(target.boxes))]
    for box, buffer in zip(target.boxes, buffers, strict=True):
        buffer[...] = value[box.slices]
    return target.finish(buffers)
