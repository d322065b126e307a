"""JAX: sharded arrays and their abstract shapes, typed PRNG keys, registered pytrees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from operator import attrgetter
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding, Sharding, SingleDeviceSharding

from unickpt import doors
from unickpt.adapters.jax_group import JaxGroup, only_this_process
from unickpt.adapters.jax_group import group_of as group_of
from unickpt.adapters.jax_settings import unchecked
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, overlap
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout, Mesh
from unickpt.arrays.memory_region import MemoryRegion
from unickpt.errors import UnsupportedLeaf
from unickpt.frameworks.adapter_protocol import (
    ArraySource,
    DeviceMemory,
    Fence,
    Fragment,
    Gatherer,
    Memory,
    Read,
    Sample,
    whole_source,
)
from unickpt.frameworks.members import Members
from unickpt.frameworks.process_group import Group, members_of
from unickpt.trees.tree import Expansion

_ALIGNMENT = 64  # XLA uses host memory of at least this alignment without a copy
# Up to so many bytes, a copy takes no longer than to align memory and refer to it.
_COPIED = 64 << 10


def is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


varies = None


def source(leaf: Any, group: Group) -> ArraySource:
    _check_source(leaf, group)
    identity = ("jax", id(leaf))
    prng = None
    if _is_key(leaf.dtype):
        with unchecked():
            prng, leaf = str(jax.random.key_impl(leaf)), jax.random.key_data(leaf)
    shape, dtype = tuple(leaf.shape), np.dtype(leaf.dtype)
    dtypes.name_of(dtype)
    pieces: dict[Box, Any] = {}
    boxes_at = _local_boxes(leaf.sharding, shape)
    for shard in leaf.addressable_shards:
        pieces.setdefault(boxes_at[shard.device], shard.data)
    pieces = {box: data for box, data in pieces.items() if not box.empty}
    read, memory = partial(_gather, pieces), _memory(pieces, leaf.sharding)
    sample = _sampler(pieces)
    if leaf.is_fully_addressable and group.count > 1:
        # Without a mesh over processes it is like a NumPy array: every process has its own copy.
        whole = whole_source(shape, dtype, group, read, identity, memory, sample)
        return replace(whole, prng=prng)
    is_alone = leaf.is_fully_addressable and jax.process_index() > 0
    members = only_this_process() if is_alone else members_of(group)
    layout, boxes = _layout(leaf.sharding, shape, members)
    if layout is None:
        known_of = dict(boxes)
        holders: Mapping[Box, tuple[int, ...]] = {box: known_of[box] for box in pieces}
    else:
        holders = _local(layout, shape, group.index)  # boxes may span devices; `_gather` joins them
    fragments = tuple(
        Fragment(box, processes, read, memory, sample) for box, processes in holders.items()
    )
    explicit_boxes = None if layout is not None else boxes
    return ArraySource(shape, dtype, fragments, layout, explicit_boxes, identity, prng)


def facts(leaves: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Hashable]]:
    properties = list(map(attrgetter("shape", "dtype", "sharding"), leaves))
    return (properties, [leaf.is_deleted() for leaf in leaves]), list(map(id, leaves))


def tokens(leaves: Sequence[Any]) -> Sequence[Hashable]:
    """Not the identity of an immutable array: memory of torch or NumPy may be behind it (dlpack,
    `device_put`), and JAX does not record that."""
    if all(_on_cpu(leaf.sharding) for leaf in leaves):
        return [None] * len(leaves)
    from unickpt.adapters import jax_digests  # only where there are devices

    with unchecked():
        return jax_digests.tokens([None if _on_cpu(leaf.sharding) else leaf for leaf in leaves])


def copier(out: Sequence[Array]) -> Callable[[Sequence[Any], Sequence[int] | None], None]:
    raise NotImplementedError("JAX arrays are not changed")


def gatherer(leaves: Sequence[Any], sources: Sequence[ArraySource]) -> Gatherer | None:
    from unickpt.adapters.jax_transfer import StackedArrays  # only where there are devices

    stacked = StackedArrays(leaves, _places_of, _gather)
    return stacked if stacked.numbers else None


def _places_of(leaf: Any) -> Mapping[Box, int]:
    """Each box of an array on this process's devices, and the number of a shard that has it."""
    boxes_at, places = _local_boxes(leaf.sharding, leaf.shape), dict[Box, int]()
    for number, shard in enumerate(leaf.addressable_shards):
        if not boxes_at[shard.device].empty:
            places.setdefault(boxes_at[shard.device], number)
    return places


def readers(leaves: Sequence[Any]) -> list[Read]:
    return [_viewed(leaf) or partial(_gather, _views(leaf)) for leaf in leaves]


def _viewed(leaf: Any) -> Read | None:
    """A function that reads an array on one device, as most are that are saved in thousands."""
    if type(leaf.sharding) is not SingleDeviceSharding:
        return None
    # NumPy takes the memory of arrays of its own dtypes; of others it requests a copy, which JAX
    # might keep in the array.
    array = np.asarray(leaf if leaf.dtype.isbuiltin == 1 else leaf.addressable_data(0))
    return lambda box, make_buffer: array[box.slices]


def _views(leaf: Any) -> dict[Box, Array]:
    """Views of the pieces of an array on the host, not of PRNG keys."""
    boxes_at = _local_boxes(leaf.sharding, leaf.shape)
    if len(boxes_at) == 1:
        (box,) = boxes_at.values()
        return {} if box.empty else {box: np.asarray(leaf.addressable_data(0))}
    views: dict[Box, Array] = {}
    for shard in leaf.addressable_shards:
        box = boxes_at[shard.device]
        if not box.empty and box not in views:
            views[box] = np.asarray(shard.data)
    return views


def _memory(pieces: Mapping[Box, Any], sharding: Sharding) -> Memory:
    """A donated array is deleted. On CPU, JAX does not reuse its memory while a view is held
    (tested); on other devices it does, so the array must be read or cloned before."""
    if _on_cpu(sharding):
        views = partial(_map, np.asarray, pieces)
        return Memory(
            mutable=False, keep=lambda: partial(_gather, views()), spans=partial(_spans, pieces)
        )

    def deleted() -> bool:
        return any(data.is_deleted() for data in pieces.values())

    def clone() -> Read:
        return partial(_gather, _map(_clone, pieces))

    from unickpt.adapters.jax_transfer import transfer  # only where there are devices

    bring = partial(transfer, _gather, pieces)
    return Memory(mutable=False, on_device=True, keep=clone, changed=deleted, transfer=bring)


def _spans(pieces: Mapping[Box, Any]) -> list[tuple[int, int]]:
    """The host address ranges of arrays; `device_put` and dlpack may share memory of NumPy or torch
    that begins at a multiple of 64 bytes, and JAX does not record that they did."""
    buffers = [(data.unsafe_buffer_pointer(), data.nbytes) for data in pieces.values()]
    return [(begin, begin + nbytes) for begin, nbytes in buffers]


def _sampler(pieces: Mapping[Box, Any]) -> Sample:
    """Gathers elements on the devices of the pieces, and copies them to the host later."""

    def sample(indices: tuple[Array, ...]) -> Callable[[], Array]:
        parts = []
        for box, data in pieces.items():
            start, stop = box.start or (0,), box.stop or (1,)
            bounds = list(zip(indices, start, stop, strict=True))
            inside = np.all([(a <= i) & (i < b) for i, a, b in bounds], axis=0)
            if not inside.any():
                continue
            where = tuple(i[inside] - a for i, a, _ in bounds)
            with unchecked():
                numpy: Any = np if _on_cpu(data.sharding) else jax.numpy
                parts.append((inside, numpy.atleast_1d(data)[where]))

        def bring() -> Array:
            out = np.empty(len(indices[0]), np.dtype(parts[0][1].dtype))
            with unchecked():
                for inside, values in parts:
                    out[inside] = np.asarray(values)
            return out

        return bring

    return sample


def _map(do: Callable[[Any], Any], pieces: Mapping[Box, Any]) -> dict[Box, Any]:
    return {box: do(data) for box, data in pieces.items()}


def _clone(data: Any) -> Any:
    try:
        with unchecked():
            return jax.numpy.copy(data)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise MemoryError(str(error)) from error
        raise


@lru_cache(maxsize=4096)
def _on_cpu(sharding: Sharding) -> bool:
    devices: set[Any] = set(sharding.device_set)
    return all(device.platform == "cpu" for device in devices)


def _check_source(leaf: Any, group: Group) -> None:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise TypeError("a jax.ShapeDtypeStruct has no data; it can only be loaded into")
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("a traced array has no data; call unickpt outside jit, grad and vmap")
    if leaf.is_deleted():
        raise TypeError("the array was deleted or donated; save what the donating step returned")
    _check_reduced(leaf.sharding)
    if leaf.is_fully_addressable:
        return
    position = jax.process_index(), jax.process_count()
    if not isinstance(group, JaxGroup) and (group.index, group.count) != position:
        raise TypeError(
            f"the array spans the {jax.process_count()} processes of jax.distributed, so all of "
            f"them must save it together, but the group has {group.count}; to save with some of "
            "them, give SaveOptions(group=) their devices"
        )
    owners = () if leaf.addressable_shards else {_process(d) for d in leaf.sharding.device_set}
    if len(owners) == 1:
        # To that process it looks like a replica; each process writes a share of it.
        raise TypeError(
            f"the array is on devices of process {min(owners)} only; leave it out of the "
            "trees of the other processes"
        )


def target(leaf: Any) -> JaxTarget:
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError("a traced array cannot be loaded into; call unickpt.load outside jit")
    return JaxTarget(leaf)


def empty(entry: Any, example: Any = None) -> Any:
    make: Any = jax.ShapeDtypeStruct
    words = make(entry.shape, dtypes.from_name(entry.dtype))
    if entry.prng is None:
        return words
    return jax.eval_shape(partial(jax.random.wrap_key_data, impl=entry.prng), words)


def expand(obj: Any, name: str, stored: Mapping[str, Any] | None) -> Expansion | None:
    try:
        pairs, treedef = jax.tree_util.tree_flatten_with_path(obj, is_leaf=lambda x: x is not obj)
    except (TypeError, ValueError) as error:  # e.g. keys that cannot be sorted
        raise UnsupportedLeaf(
            f"{name!r}: JAX cannot flatten this {type(obj).__name__}: {error}"
        ) from error
    if jax.tree_util.treedef_is_leaf(treedef) and pairs and pairs[0][1] is obj:
        return None
    children = [child for _, child in pairs]
    keys = [_key(path[0]) for path, _ in pairs]
    if len(set(keys)) != len(keys):
        raise UnsupportedLeaf(
            f"{name!r}: {type(obj).__name__} gives several of its children the same key: {keys}"
        )
    visible_indices = [i for i, key in enumerate(keys) if not _is_internal(key, children[i])]

    def rebuild(values: list[Any]) -> Any:
        values_by_index = dict(zip(visible_indices, values, strict=True))
        # Children that are not shown have no leaves; they are copied, so that they are not shared.
        fresh = [
            values_by_index[i]
            if i in values_by_index
            else jax.tree_util.tree_map(lambda x: x, child)
            for i, child in enumerate(children)
        ]
        return jax.tree_util.tree_unflatten(treedef, fresh)

    # Wrappers of one value (nnx.Variable, flax.linen.Partitioned) are not part of the name.
    return Expansion(
        "wrapper" if keys == ["value"] else "object",
        tuple(keys[i] for i in visible_indices),
        tuple(children[i] for i in visible_indices),
        rebuild,
        type(obj).__name__,
    )


def fence(optimizer: Any, wait: Callable[[], None]) -> Fence | None:
    return None


class JaxTarget:
    """A new array with the sharding of `like`; without one, on JAX's default device. If `like` has
    a device layout of its own, the array has it too.

    JAX uses the buffers without a copy where it can. It never writes to such memory, not even for
    donated arrays, so that replicas on several devices may share a buffer.
    """

    def __init__(self, leaf: Any) -> None:
        self.prng: str | None = None
        self.abstract = isinstance(leaf, jax.ShapeDtypeStruct)
        self.identity: Hashable = None  # new arrays, so two leaves never share memory
        shape, dtype, self._impl = tuple(leaf.shape), leaf.dtype, None
        if not isinstance(dtype, np.dtype) and _is_key(dtype):
            self._impl, words, dtype = _implementation(dtype)
            shape, self.prng = (*shape, *words), str(self._impl)
        self.shape, self.dtype = shape, np.dtype(dtype)
        dtypes.name_of(self.dtype)
        if self.dtype.itemsize > 4 and jax.dtypes.canonicalize_dtype(self.dtype) != self.dtype:
            raise TypeError(
                f"JAX would truncate dtype {self.dtype}: call jax.config.update('jax_enable_x64', "
                "True) first, or load into a NumPy array"
            )
        self._weak = bool(getattr(leaf, "weak_type", False))
        self.sharding, self._device_layout = _wanted_sharding(leaf), _device_layout(leaf)
        self._index, self.boxes, self.processes = _places(self.sharding, shape)

    span: tuple[int, int] | None = None  # new arrays
    device_memory: DeviceMemory | None = None  # JAX copies them itself, and keeps them meanwhile

    @property
    def layout(self) -> Layout | None:
        if not isinstance(self.sharding, NamedSharding):
            return None
        return _named(self.sharding, len(self.shape))

    def regions(self) -> Sequence[MemoryRegion]:
        return ()

    def buffer(self, position: int) -> Array:
        box = self.boxes[position]
        nbytes = box.size * self.dtype.itemsize
        if nbytes <= _COPIED:
            return np.empty(box.shape, self.dtype)
        raw = np.empty(nbytes + _ALIGNMENT, np.uint8)
        return np.ndarray(box.shape, self.dtype, raw, -raw.ctypes.data % _ALIGNMENT)

    def finish(self, buffers: Sequence[Array]) -> Any:
        with unchecked():
            array = self._made(buffers)
            if self._weak:
                array = _weakener(self.sharding)(array)
            if self._device_layout is not None:
                array = _laid_out(array, self._device_layout)
            return array if self._impl is None else jax.random.wrap_key_data(array, impl=self._impl)

    def _made(self, buffers: Sequence[Array]) -> Any:
        if self.sharding is None:
            (filled,) = buffers
            # For a small array `device_put` takes half as long again.
            is_small = filled.nbytes <= _COPIED
            return jax.numpy.array(filled) if is_small else jax.device_put(filled)
        if len(buffers) == 1 and self._index:
            (filled,) = buffers  # all devices of this process have the same box
            return jax.make_array_from_callback(self.shape, self.sharding, lambda _: filled)
        buffers_by_box = dict(zip(self.boxes, buffers, strict=True))
        kind = self.sharding.memory_kind
        pieces = jax.device_put(
            [buffers_by_box[box] for box in self._index.values()],
            [SingleDeviceSharding(device, memory_kind=kind) for device in self._index],
        )
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, pieces, dtype=self.dtype
        )


@lru_cache(maxsize=4096)
def _places(
    sharding: Sharding | None, shape: tuple[int, ...]
) -> tuple[Mapping[Any, Box], Sequence[Box], int]:
    """Where an array of this process goes: the box of each device, which boxes there are, and over
    how many processes it is distributed."""
    if sharding is None:
        return {None: Box.whole(shape)}, (Box.whole(shape),), 1
    index = _local_boxes(sharding, shape)
    return index, tuple(dict.fromkeys(index.values())), _processes_of(sharding)


def _wanted_sharding(leaf: Any) -> Sharding | None:
    """The sharding of an array like `leaf`; None if unspecified, as for uncommitted arrays."""
    sharding: Sharding | None = leaf.sharding
    if sharding is None or not getattr(leaf, "committed", True):
        return None
    _check_reduced(sharding)
    if not isinstance(sharding, NamedSharding):
        if isinstance(leaf, jax.Array) and _is_key(leaf.dtype):
            with unchecked():
                physical: Sharding = jax.random.key_data(leaf).sharding
            return physical
        return sharding
    if isinstance(sharding.mesh, AbstractMesh):
        # jax.eval_shape leaves the devices open; the mesh of jax.set_mesh names them.
        mesh = jax.sharding.get_mesh() if hasattr(jax.sharding, "get_mesh") else None
        if mesh is None or mesh.abstract_mesh != sharding.mesh:
            raise TypeError(
                f"its sharding is on the abstract mesh {sharding.mesh}, which has no devices; load "
                "under jax.set_mesh(mesh), or give a NamedSharding on a concrete mesh"
            )
        return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)
    return sharding


def _device_layout(leaf: Any) -> Any:
    """How devices keep the elements of an array, as `jax.experimental.layout` says it; None for
    arrays without such a layout, and with JAX before 0.7."""
    return getattr(getattr(leaf, "format", None), "layout", None)


def _laid_out(array: Any, layout: Any) -> Any:
    """An array in a device layout."""
    present = array.format.layout
    same_order = present.major_to_minor == layout.major_to_minor
    if same_order and layout.tiling in (None, present.tiling):
        return array
    return jax.device_put(array, type(array.format)(layout, array.sharding))


def _check_reduced(sharding: Any) -> None:
    unreduced = getattr(getattr(sharding, "spec", None), "unreduced", None)
    if unreduced:
        raise TypeError(
            f"the array holds unreduced partial sums over the mesh axes {sorted(unreduced)}; "
            "reshard it to a spec without `unreduced` first"
        )


@lru_cache(maxsize=64)
def _weakener(sharding: Sharding | None) -> Callable[[Any], Any]:
    """A function that makes an array weakly typed, like those from Python scalars."""

    def weaken(x: Any) -> Any:
        zeros = jax.numpy.broadcast_to(x.dtype.type(0).item(), x.shape)
        return zeros.at[...].set(x) if zeros.dtype == x.dtype else x

    return jax.jit(weaken) if sharding is None else jax.jit(weaken, out_shardings=sharding)


@cache
def _implementation(dtype: Any) -> tuple[Any, tuple[int, ...], dtypes.DType]:
    """A key dtype's implementation, and the shape and dtype of one key's data."""
    implementations = []

    def data(key: Any) -> Any:
        implementations.append(jax.random.key_impl(key))
        return jax.random.key_data(key)

    make: Any = jax.ShapeDtypeStruct
    words = jax.eval_shape(data, make((), dtype))
    return implementations[0], tuple(words.shape), np.dtype(words.dtype)


def _is_key(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.dtypes.prng_key))


def _key(entry: Any) -> Any:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            return getattr(entry, attribute)
    return str(entry)


def _is_internal(key: Any, child: Any) -> bool:
    """Whether a child is a framework's own bookkeeping without any leaf (nnx has one)."""
    private = isinstance(key, str) and key.startswith("_pytree__")
    return private and not jax.tree_util.tree_leaves(child)


def _box(index: Any, shape: tuple[int, ...]) -> Box:
    bounds = [s.indices(n)[:2] for s, n in zip(index, shape, strict=True)]
    return Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))


def _gather(pieces: Mapping[Box, Any], requested: Box, make_buffer: Callable[[], Array]) -> Array:
    """Host memory of a box that pieces of an array cover; a view where one covers it."""
    holder = next((box for box in pieces if box.contains(requested)), None)
    if holder is not None:
        return _host(pieces[holder], requested.relative_to(holder.start), make_buffer)
    out = make_buffer()
    for box, data in pieces.items():
        common = box.intersect(requested)
        if common is not None:
            into = out[common.relative_to(requested.start).slices]
            host_part = _host(data, common.relative_to(box.start), partial(_same, into))
            if host_part is not into:
                into[...] = host_part
    return out


def _same(array: Array) -> Array:
    return array


def _host(data: Any, box: Box, make_buffer: Callable[[], Array]) -> Array:
    """Host memory of a box of an addressable array; a view on CPU."""
    if isinstance(data, np.ndarray) or _on_cpu(data.sharding):
        view: Array = np.asarray(data)[box.slices]
        return view
    from unickpt.adapters.jax_transfer import copied

    # Not of a whole shard: on the host it would stay cached in the array.
    return copied(data, box, make_buffer)


Holders = tuple[tuple[Box, tuple[int, ...]], ...]


@lru_cache(maxsize=4096)
def _layout(
    sharding: Sharding, shape: tuple[int, ...], members: Members | None
) -> tuple[Layout | None, Holders]:
    """As `_layout_in_job`, by the positions of processes among `members`, if any are given."""
    layout, boxes = _layout_in_job(sharding, shape)
    if members is None:
        return layout, boxes
    members.check("an array", map(_process, sharding.device_set))
    if layout is not None:
        layout = replace(layout, mesh=members.mesh(layout.mesh))
    positions = members.positions
    return layout, tuple(
        (box, tuple(sorted(positions[p] for p in processes))) for box, processes in boxes
    )


def _layout_in_job(sharding: Sharding, shape: tuple[int, ...]) -> tuple[Layout | None, Holders]:
    """The layout of a sharding; if none describes it, all boxes with their processes instead."""
    if isinstance(sharding, NamedSharding):
        layout = _named(sharding, len(shape))
        coordinates = np.ndindex(sharding.mesh.devices.shape)
        device_at = zip(sharding.mesh.devices.flat, coordinates, strict=True)
        local = sharding.addressable_devices_indices_map(shape)
        if all(
            layout.box(shape, position) == _box(local[d], shape)
            for d, position in device_at
            if d in local
        ):
            return layout, ()
    elif sharding.num_devices == 1:
        (device,) = sharding.device_set
        return Layout(Mesh((), (), (_process(device),)), ((),) * len(shape)), ()
    holders: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        holders.setdefault(_box(index, shape), set()).add(_process(device))
    box_holders = tuple((b, tuple(sorted(p))) for b, p in holders.items() if not b.empty)
    boxes = [box for box, _ in box_holders]
    if overlap(boxes) or sum(box.size for box in boxes) != Box.whole(shape).size:
        raise TypeError(f"the boxes of {sharding} overlap, or do not cover shape {shape}")
    return None, box_holders


@lru_cache(maxsize=64)
def _processes_of(sharding: Sharding) -> int:
    return len({_process(device) for device in sharding.device_set})


@lru_cache(maxsize=4096)
def _local_boxes(sharding: Sharding, shape: tuple[int, ...]) -> Mapping[Any, Box]:
    indices = sharding.addressable_devices_indices_map(shape)
    return {device: _box(index, shape) for device, index in indices.items()}


@lru_cache(maxsize=4096)
def _local(layout: Layout, shape: tuple[int, ...], process: int) -> Mapping[Box, tuple[int, ...]]:
    return layout.local(shape, process)


def _process(device: Any) -> int:
    return int(device.process_index)


@lru_cache(maxsize=256)
def _named(sharding: NamedSharding, rank: int) -> Layout:
    mesh = sharding.mesh
    axes = tuple(str(a) for a in mesh.axis_names)
    processes = tuple(_process(device) for device in mesh.devices.flat)
    dims: list[tuple[str, ...]] = []
    for entry in tuple(sharding.spec) + (None,) * (rank - len(sharding.spec)):
        names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        dims.append(tuple(str(n) for n in names))
    return Layout(Mesh(axes, mesh.devices.shape, processes), tuple(dims))


def __getattr__(name: str) -> Any:
    if name != "RouterTokens":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return doors.need("names", "router_tokens_jax")
