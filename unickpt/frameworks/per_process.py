"""`PerProcess` values as self-describing bytes: a tree, its plain values and its small arrays."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.frameworks.host_memory import HostBuffers, stage
from unickpt.frameworks.leaves import LocalFragments, PerProcess, adapter_of, varying
from unickpt.frameworks.process_group import alone
from unickpt.frameworks.protocol import Adapter, StoredTree
from unickpt.quoting import quoted
from unickpt.trees import tree, tree_json


class _Malformed(ValueError):
    """The bytes are not a per-process value."""


class _Misfit(ValueError):
    """A stored per-process value differs from `like`."""


def blob_key(name: str, process: int) -> str:
    """Where one process's value of a per-process leaf is stored."""
    return f"{name}/process_{process:05d}" if name else f"process_{process:05d}"


def encode(value: Any, adapters: Sequence[Adapter]) -> bytes:
    """A value of one process as JSON.

    Raises:
        UnsupportedLeaf: names what cannot be stored.
        TypeError: an array is not on the host of this process alone.
    """
    root = tree.flatten(
        value,
        lambda x: _is_leaf(x, adapters),
        lambda obj, name: _expand(obj, name, adapters),
        "the value cannot be stored",
    )
    arrays, plain = {}, {}
    for leaf in tree.leaves(root):
        adapter = adapter_of(leaf.value, adapters)
        if adapter is None:
            plain[leaf.name] = tree_json.value_to_json(leaf.value)
            continue
        source = adapter.source(leaf.value, alone())
        whole = Box.whole(source.shape)
        if source.fragments and source.fragments[0].box != whole:
            raise TypeError(f"{leaf.name!r}: a sharded array cannot be a per-process value")
        dtype = source.dtype.newbyteorder("=")
        data = b""
        if source.fragments:
            data = stage(source.fragments[0], whole, dtype, HostBuffers(0).take).tobytes()
        arrays[leaf.name] = {
            "dtype": dtypes.name_of(source.dtype),
            "shape": source.shape,
            "data": base64.b64encode(data).decode(),
            **({} if source.prng is None else {"prng": source.prng}),
        }
    body = {"tree": tree_json.to_json(root), "values": plain, "arrays": arrays}
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes, where: str, like: Any, adapters: Sequence[Adapter]) -> Any:
    """The inverse of `encode`; arrays are returned as those of `like`, or as NumPy arrays.

    Arguments:
        data: what `encode` returned; untrusted.
        where: the checkpoint and the leaf, for messages.
        like: what to load; None for what is stored.
        adapters: the adapters.

    Raises:
        CheckpointCorrupt: the bytes are not a per-process value.
        LoadMismatch: `like` has another structure.
    """
    try:
        root, found, prngs = _decode(data)
        if like is not None:
            root = tree.flatten(
                like,
                lambda x: _is_leaf(x, adapters),
                lambda obj, name: _expand(obj, name, adapters, StoredTree(found, lambda: None)),
                "`like` cannot be loaded into",
            )
            found = _fitted(root, found, prngs, adapters)
            for node, check in tree.checks(root):
                check(node, found.__getitem__)
    except _Malformed as error:
        raise CheckpointCorrupt(f"{where}: {error}") from None
    except _Misfit as error:
        raise LoadMismatch(f"{where}: {error}") from None
    return tree.rebuild(root, found.__getitem__)


def _fitted(
    root: tree.Node | tree.Leaf,
    found: dict[str, Any],
    prngs: dict[str, str | None],
    adapters: Sequence[Adapter],
) -> dict[str, Any]:
    """The stored leaves as the leaves of `like` request them."""
    templates = {leaf.name: leaf.value for leaf in tree.leaves(root)}
    if set(templates) != set(found):
        differ = ", ".join(sorted(set(templates) ^ set(found))[:5])
        raise _Misfit(f"the stored per-process value and `like` differ in: {differ}")
    return {
        name: _into(templates[name], value, prngs.get(name), name, adapters)
        for name, value in found.items()
    }


def _decode(data: bytes) -> tuple[tree.Node | tree.Leaf, dict[str, Any], dict[str, str | None]]:
    """The tree, its leaves by name, and the PRNG implementations of those that are keys."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _Malformed(f"a per-process value is not JSON: {error}") from None
    plain, arrays = (_table(body, kind) for kind in ("values", "arrays"))
    try:
        root = tree_json.from_json(body.get("tree"))
        found = {name: tree_json.value_from_json(stored) for name, stored in plain.items()}
        if tree_json.has_opaque(data):
            found = tree_json.with_opaque(body.get("tree"), found)
    except (tree_json.BadTree, tree_json.BadValue) as error:
        raise _Malformed(f"a per-process value is malformed: {error}") from None
    found |= {name: _array(name, stored) for name, stored in arrays.items()}
    if {leaf.name for leaf in tree.leaves(root)} != set(found):
        raise _Malformed("a per-process value is malformed: its tree and its leaves do not match")
    return root, found, {name: stored.get("prng") for name, stored in arrays.items()}


def _table(body: Any, kind: str) -> dict[str, Any]:
    table = body.get(kind) if isinstance(body, dict) else None
    if not isinstance(table, dict):
        raise _Malformed(f"a per-process value is malformed: its {kind} are {quoted(table)}")
    return table


def _is_leaf(x: Any, adapters: Sequence[Adapter]) -> bool:
    return tree_json.is_plain(x) or adapter_of(x, adapters) is not None


def _expand(
    obj: Any, name: str, adapters: Sequence[Adapter], stored: StoredTree | None = None
) -> tree.Expansion | None:
    """The parts of an array that is stored as its parts."""
    if stored is None and isinstance(obj, PerProcess | LocalFragments):
        raise TypeError(f"{name!r}: a {type(obj).__name__} cannot be inside a PerProcess")
    of = varying(type(obj), adapters)
    return None if of is None else of.expand(obj, name, stored)


def _shown(shape: tuple[int, ...], dtype: dtypes.DType, prng: str | None) -> str:
    return dtypes.with_shape(str(dtype), shape) + (f" of a {prng} key" if prng else "")


def _array(name: str, stored: Any) -> Any:
    if not isinstance(stored, dict):
        raise _Malformed(f"array {quoted(name)} of a per-process value is {quoted(stored)}")
    shape, text, data = stored.get("shape"), stored.get("dtype"), stored.get("data")
    prng = stored.get("prng")
    if not (isinstance(text, str) and isinstance(data, str) and isinstance(prng, str | None)):
        raise _bad_array(name, "its dtype, data or PRNG implementation is not a text")
    if not isinstance(shape, list) or any(type(n) is not int or n < 0 for n in shape):
        raise _bad_array(name, f"its shape is {quoted(shape)}")
    try:
        dtype = dtypes.from_name(text)
    except TypeError as error:
        raise _bad_array(name, str(error)) from None
    try:
        raw = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise _bad_array(name, str(error)) from None
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise _bad_array(name, f"its data has {len(raw)} bytes, but its shape is {quoted(shape)}")
    try:
        return np.frombuffer(bytearray(raw), np.uint8).view(dtype).reshape(shape)
    except ValueError as error:  # more dimensions, or larger ones, than NumPy supports
        raise _bad_array(name, str(error)) from None


def _bad_array(name: str, why: str) -> _Malformed:
    return _Malformed(f"array {quoted(name)} of a per-process value is malformed: {why}")


def _plain_as_asked(template: Any, value: Any, name: str) -> Any:
    if type(tree_json.plain(template)) is not type(value):
        raise _Misfit(
            f"{name!r}: stored {type(value).__name__}, asked for {type(template).__name__}"
        )
    try:
        return tree_json.as_asked(value, template)
    except ValueError as error:
        raise _Misfit(f"{name!r}: {error}") from None


def _into(
    template: Any, value: Any, prng: str | None, name: str, adapters: Sequence[Adapter]
) -> Any:
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
            f"asked for {_shown(target.shape, target.dtype, target.prng)}"
        )
    buffers = [target.buffer(i) for i in range(len(target.boxes))]
    for box, buffer in zip(target.boxes, buffers, strict=True):
        buffer[...] = value[box.slices]
    return target.finish(buffers)
