"""JAX: sharded arrays and their abstract shapes, typed PRNG keys, registered pytrees, processes."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from unickpt import dtypes
from unickpt.adapt import Array, ArraySource, Fragment
from unickpt.adapters.numpy import whole_source
from unickpt.box import Box
from unickpt.group import Group, new_session
from unickpt.layout import Layout, Mesh
from unickpt.tree import Expansion

_ALIGNMENT = 64  # XLA takes host memory over without a copy from this alignment on


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def source(leaf: Any, group: Group) -> ArraySource:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError("a jax.ShapeDtypeStruct has no data; it can only be loaded into")
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("a traced array has no data; call unickpt outside jit, grad and vmap")
    if leaf.is_deleted():
        raise TypeError("the array was deleted or donated; save what the donating step returned")
    prng = None
    identity = ("jax", id(leaf))
    if _is_key(leaf.dtype):
        prng, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    dtype = np.dtype(leaf.dtype)
    dtypes.name_of(dtype)
    shape = tuple(leaf.shape)
    if group.count > 1 and leaf.is_fully_addressable:
        # Without a mesh over processes it is like a NumPy array: every process has its own copy.
        whole = whole_source(shape, dtype, group, lambda box: _host(leaf, box), identity)
        return ArraySource(
            shape, dtype, whole.fragments, whole.layout, identity=identity, prng=prng
        )
    held = {_box(shard.index, shape): shard.data for shard in leaf.addressable_shards}
    held = {box: data for box, data in held.items() if not box.empty}
    layout, boxes = _layout(leaf.sharding, shape)
    holders = dict(boxes) if layout is None else layout.local(shape, jax.process_index())
    fragments = tuple(Fragment(box, holders[box], _reader(box, data)) for box, data in held.items())
    known = None if layout is not None else boxes
    return ArraySource(shape, dtype, fragments, layout, known, identity, prng)


def target(leaf: Any) -> JaxTarget:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("a traced array cannot be loaded into; call unickpt.load outside jit")
    return JaxTarget(leaf)


def expand(obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(obj, is_leaf=lambda x: x is not obj)
    except (TypeError, ValueError) as error:  # e.g. keys that cannot be sorted
        raise TypeError(
            f"{name!r}: JAX cannot flatten this {type(obj).__name__}: {error}"
        ) from error
    if jax.tree_util.treedef_is_leaf(treedef) and pairs and pairs[0][1] is obj:
        return None
    keys = tuple(_key(path[0]) for path, _ in pairs)
    children = tuple(child for _, child in pairs)
    # Boxes around one value (nnx.Variable, flax.linen.Partitioned) are no part of the name.
    kind = "wrapper" if keys == ("value",) else "object"
    return Expansion(
        kind,
        keys,
        children,
        lambda xs: jax.tree_util.tree_unflatten(treedef, xs),
        type(obj).__name__,
    )


def group() -> Group | None:
    # Asked this way, JAX does not start its backends.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return _JaxGroup()


class _JaxGroup:
    def __init__(self) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()

    def next_attempt(self) -> str:
        return f"{_session()}-{next(_attempts()):06d}"


@cache
def _session() -> str:
    from jax.experimental import multihost_utils

    mine = np.frombuffer(bytes.fromhex(new_session()), np.uint8)
    return bytes(np.asarray(multihost_utils.broadcast_one_to_all(mine))).hex()


@cache
def _attempts() -> itertools.count[int]:
    return itertools.count()


class JaxTarget:
    """A new array with the sharding of `like`; without one, on JAX's default device."""

    def __init__(self, leaf: Any) -> None:
        self.prng: str | None = None
        self.identity: Hashable = None  # arrays are made anew, so two leaves never share memory
        shape, dtype = tuple(leaf.shape), leaf.dtype
        if _is_key(dtype):
            self.prng = dtype._impl.name
            data = jax.eval_shape(jax.random.key_data, _abstract(shape, dtype))
            shape, dtype = tuple(data.shape), data.dtype
        self.shape, self.dtype = shape, np.dtype(dtype)
        dtypes.name_of(self.dtype)
        self.sharding: Sharding | None = leaf.sharding
        if self.sharding is None or not getattr(leaf, "committed", True):
            self.sharding, self._index = None, {None: Box.whole(shape)}
        else:
            if self.prng is not None and isinstance(leaf, jax.Array):
                self.sharding = jax.random.key_data(leaf).sharding
            indices = self.sharding.addressable_devices_indices_map(shape)
            self._index = {device: _box(index, shape) for device, index in indices.items()}
        self.boxes: Sequence[Box] = tuple(dict.fromkeys(self._index.values()))

    def buffer(self, position: int) -> Array:
        box = self.boxes[position]
        nbytes = box.size * self.dtype.itemsize
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        offset = -raw.ctypes.data % _ALIGNMENT
        aligned: Array = raw[offset : offset + nbytes].view(self.dtype).reshape(box.shape)
        return aligned

    def finish(self, buffers: Sequence[Array]) -> Any:
        filled = dict(zip(self.boxes, buffers, strict=True))
        if self.sharding is None:
            array = jax.device_put(filled[Box.whole(self.shape)])
        else:
            pieces = [jax.device_put(filled[box], device) for device, box in self._index.items()]
            array = jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, pieces, dtype=self.dtype
            )
        return array if self.prng is None else jax.random.wrap_key_data(array, impl=self.prng)


def _abstract(shape: tuple[int, ...], dtype: Any) -> Any:
    make: Any = jax.ShapeDtypeStruct
    return make(shape, dtype)


def _is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def _reader(box: Box, data: Any) -> Any:
    return lambda wanted: _host(data, wanted.relative_to(box.start))


def _host(data: Any, box: Box) -> Array:
    """Host memory of a box of an addressable array; a view on CPU."""
    if all(device.platform == "cpu" for device in data.devices()):
        view: Array = np.asarray(data)[box.slices]
        return view
    # Sliced on the device: a whole shard on the host would stay cached in the array.
    return np.asarray(data[box.slices])


Holders = tuple[tuple[Box, tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def _layout(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Layout | None, Holders]:
    """The layout of a sharding; where none says it, all boxes with their processes instead."""
    if sharding.num_devices == 1:
        (device,) = sharding.device_set
        return Layout(Mesh((), (), (_process(device),)), ((),) * len(shape)), ()
    if isinstance(sharding, NamedSharding):
        layout = _named(sharding, len(shape))
        coordinates = np.ndindex(sharding.mesh.devices.shape)
        device_at = zip(sharding.mesh.devices.flat, coordinates, strict=True)
        local = sharding.addressable_devices_indices_map(shape)
        if all(layout.box(shape, at) == _box(local[d], shape) for d, at in device_at if d in local):
            return layout, ()
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), set()).add(_process(device))
    return None, tuple((b, tuple(sorted(p))) for b, p in holders.items() if not b.empty)


def _process(device: Any) -> int:
    return int(device.process_index)


def _named(sharding: NamedSharding, rank: int) -> Layout:
    mesh = sharding.mesh
    axes = tuple(str(a) for a in mesh.axis_names)
    processes = tuple(_process(device) for device in mesh.devices.flat)
    dims: list[tuple[str, ...]] = []
    for entry in tuple(sharding.spec) + (None,) * (rank - len(sharding.spec)):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        dims.append(tuple(str(n) for n in names))
    return Layout(Mesh(axes, mesh.devices.shape, processes), tuple(dims))
