"""`PerProcess` values as self-describing bytes: a tree, its plain values and its small arrays."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from unickpt import dtypes, tree, values
from unickpt.adapt import Adapter, adapter_of
from unickpt.box import Box
from unickpt.group import alone
from unickpt.marks import LocalFragments, PerProcess
from unickpt.stage import HostBuffers, stage


def blob_key(name: str, process: int) -> str:
    """Where one process's value of a per-process leaf is stored."""
    return f"{name}/process_{process:05d}" if name else f"process_{process:05d}"


def encode(value: Any, among: Sequence[Adapter]) -> bytes:
    """A value of one process as JSON.

    Raises:
        UnsupportedLeaf: names what cannot be stored.
        TypeError: an array is not on the host of this process alone.
    """
    root = tree.flatten(
        value, lambda x: _is_leaf(x, among), _refuse_marks, "the value cannot be stored"
    )
    arrays, plain = {}, {}
    for leaf in tree.leaves(root):
        adapter = adapter_of(leaf.value, among)
        if adapter is None:
            plain[leaf.name] = values.to_json(leaf.value)
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
    body = {"tree": tree.to_json(root), "values": plain, "arrays": arrays}
    return json.dumps(body, separators=(",", ":")).encode()


def decode(data: bytes, like: Any, among: Sequence[Adapter]) -> Any:
    """The inverse of `encode`; arrays are returned as those of `like`, or as NumPy arrays.

    Raises:
        ValueError: the bytes are malformed, or `like` has another structure.
    """
    try:
        body = json.loads(data)
        found = {name: values.from_json(v) for name, v in body["values"].items()}
        found |= {name: _array(a) for name, a in body["arrays"].items()}
        prngs = {name: a.get("prng") for name, a in body["arrays"].items()}
        root = tree.from_json(body["tree"])
        if {leaf.name for leaf in tree.leaves(root)} != set(found):
            raise ValueError("its tree and its leaves do not match")
    except (KeyError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"a per-process value is malformed: {error!r}") from None
    if like is not None:
        root = tree.flatten(
            like,
            lambda x: _is_leaf(x, among),
            lambda obj, name: None,
            "`like` cannot be loaded into",
        )
        templates = {leaf.name: leaf.value for leaf in tree.leaves(root)}
        if set(templates) != set(found):
            differ = ", ".join(sorted(set(templates) ^ set(found))[:5])
            raise ValueError(f"the stored per-process value and `like` differ in: {differ}")
        found = {
            name: _into(templates[name], value, prngs.get(name), name, among)
            for name, value in found.items()
        }
    return tree.rebuild(root, found.__getitem__)


def _is_leaf(x: Any, among: Sequence[Adapter]) -> bool:
    return values.is_plain(x) or adapter_of(x, among) is not None


def _refuse_marks(obj: Any, name: str) -> None:
    if isinstance(obj, PerProcess | LocalFragments):
        raise TypeError(f"{name!r}: a {type(obj).__name__} cannot be inside a PerProcess")


def _shown(shape: tuple[int, ...], dtype: dtypes.DType, prng: str | None) -> str:
    return f"{dtype}{list(shape)}" + (f" of a {prng} key" if prng else "")


def _array(stored: dict[str, Any]) -> Any:
    dtype, shape = dtypes.from_name(stored["dtype"]), tuple(stored["shape"])
    raw = base64.b64decode(stored["data"], validate=True)
    if len(raw) != math.prod(shape) * dtype.itemsize:
        raise ValueError("an array's data has the wrong size")
    return np.frombuffer(bytearray(raw), np.uint8).view(dtype).reshape(shape)


def _into(template: Any, value: Any, prng: str | None, name: str, among: Sequence[Adapter]) -> Any:
    adapter = adapter_of(template, among)
    target = None if adapter is None else adapter.target(template)
    if target is not None and target.shape == () and values.is_plain(value):
        number = values.as_array(value, target.dtype)
        value = value if number is None else number
    elif target is None and isinstance(value, np.ndarray) and value.shape == ():
        value = value.item() if values.is_kind(values.plain(template), value.dtype) else value
    if target is None or not isinstance(value, np.ndarray):
        if type(values.plain(template)) is not type(value):
            raise ValueError(
                f"{name!r}: stored {type(value).__name__}, asked for {type(template).__name__}"
            )
        try:
            return values.as_asked(value, template)
        except ValueError as error:
            raise ValueError(f"{name!r}: {error}") from None
    stored = (value.shape, value.dtype, prng)
    if stored != (target.shape, target.dtype, target.prng):
        raise ValueError(
            f"{name!r}: stored {_shown(*stored)}, "
            f"asked for {_shown(target.shape, target.dtype, target.prng)}"
        )
    buffers = [target.buffer(i) for i in range(len(target.boxes))]
    for box, buffer in zip(target.boxes, buffers, strict=True):
        buffer[...] = value[box.slices]
    return target.finish(buffers)
