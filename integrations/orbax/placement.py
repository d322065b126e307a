"""Restores without an abstract tree: arrays of JAX, on a mesh like the one they were saved from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.extend import (
    ArrayEntry,
    Layout,
    SavedArrays,
    dtype_from_name,
    flatten_state,
    leaves_of_tree,
    quoted,
)
from unickpt.extend import Mesh as StoredMesh

_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct  # which has no types


def abstract_array(shape: Any, dtype: Any, sharding: Any = None) -> Any:
    """The target to load an array into; a NumPy array, if JAX would truncate it to 32 bits."""
    if sharding is None and is_truncated(dtype):
        return np.empty(tuple(shape), dtype)
    return _ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def is_truncated(dtype: Any) -> bool:
    """Whether JAX would make 32 bits of a dtype's 64, as it does without `jax_enable_x64`."""
    return bool(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype)


_PartitionSpec: Any = jax.sharding.PartitionSpec  # which has no types

_NOT_NUMPY = (jax.Array, bool, int, float, str, type(None))


def described_placement(saved: Any) -> dict[str, Any]:
    """The record of types and placements of a tree's arrays in a step, as JSON; for
    `SavedArrays.of_json`."""
    try:
        leaves = jax.tree.leaves(saved)
        shardings = [leaf.sharding for leaf in leaves if isinstance(leaf, jax.Array)]
        meshes = {sharding.mesh for sharding in shardings if isinstance(sharding, NamedSharding)}
        facts = {
            (tuple(map(str, mesh.axis_names)), mesh.devices.shape): (
                [str(axis_type) for axis_type in mesh.axis_types],
                [device.id for device in mesh.devices.flat],
            )
            for mesh in meshes
        }
        return SavedArrays(_numpy_names(saved, leaves), facts).to_json()
    except (AttributeError, TypeError, ValueError, UnsupportedLeaf):
        return {}  # such a tree the save itself refuses, on all processes


def _numpy_names(saved: Any, leaves: Sequence[Any]) -> list[str] | bool:
    if all(isinstance(leaf, _NOT_NUMPY) for leaf in leaves):
        return False  # as almost always; to name the leaves takes longer
    # The save reads the state of objects once.
    node = flatten_state(saved, lambda obj: hasattr(type(obj), "state_dict"))
    named = {leaf.name: leaf.value for leaf in leaves_of_tree(node)}
    numpy = [name for name, leaf in named.items() if isinstance(leaf, np.ndarray | np.generic)]
    return numpy if any(isinstance(leaf, jax.Array) for leaf in named.values()) else bool(numpy)


def target(entry: ArrayEntry, saved: SavedArrays, where: str) -> Any:
    """The target to load an array into, so that it is as it was saved; a NumPy array also if JAX
    would truncate it.

    Arguments:
        saved: more about all arrays.
        where: the checkpoint, for messages.

    Raises:
        LoadMismatch: it was distributed over devices that the processes of this job do not have.
    """
    shape, dtype = entry.shape, dtype_from_name(entry.dtype)
    if entry.prng is not None:
        wrap = partial(jax.random.wrap_key_data, impl=entry.prng)
        key = jax.eval_shape(wrap, abstract_array(shape, dtype))
        shape, dtype = key.shape, key.dtype
    elif saved.is_numpy(entry.name) is True or is_truncated(dtype):
        return np.empty(shape, dtype)
    return abstract_array(shape, dtype, _sharding(entry, saved, len(shape), where))


def _sharding(entry: ArrayEntry, saved: SavedArrays, rank: int, where: str) -> NamedSharding | None:
    """The sharding of an array; None for JAX's default device.

    Arguments:
        rank: of the array; that of the data of a random key is larger.
    """
    layout = entry.layout
    if layout is not None and _is_replicated(layout):
        return None  # it was on one device, of each process
    mesh = None
    if layout is not None:
        types, ids = saved.of_mesh(layout.mesh.axes, layout.mesh.shape)
        mesh = _mesh(layout.mesh, tuple(types), tuple(ids))
    if layout is not None and mesh is not None:
        spec = list(layout.spec[:rank])
        while spec and spec[-1] is None:  # as JAX writes it
            spec.pop()
        return NamedSharding(mesh, _PartitionSpec(*spec))
    if layout is None and jax.process_count() == 1:
        return None
    size = "" if layout is None else f" {len(layout.mesh.processes)}"
    raise LoadMismatch(
        f"{where}: array {quoted(entry.name)} was on{size} devices of another job, and this one "
        f"has {jax.device_count()} in {jax.process_count()} processes; pass an abstract tree with "
        "shardings"
    )


def _is_replicated(layout: Layout) -> bool:
    return layout == Layout.replicated(len(layout.dims), len(layout.mesh.processes))


@lru_cache(maxsize=64)
def _mesh(saved: StoredMesh, types: tuple[str, ...], ids: tuple[int, ...]) -> Mesh | None:
    """A mesh of this job like one that was saved; None if it has not the devices.

    The same devices; else devices of the same processes; else, if there are as many, all devices in
    JAX's order.

    Arguments:
        types: of its axes; empty if they are not known.
        ids: of its devices; empty if they are not known.
    """
    by_id = {device.id: device for device in jax.devices()}
    chosen = [by_id.get(device_id) for device_id in ids]
    if len(chosen) != len(saved.processes) or None in chosen:
        chosen = _of_processes(saved.processes)
    if None in chosen and len(chosen) == jax.device_count():
        chosen = list(jax.devices())
    if None in chosen:
        return None
    types_by_name = {str(axis_type): axis_type for axis_type in jax.sharding.AxisType}
    are_known = bool(types) and {*types} <= types_by_name.keys()
    axis_types = tuple(types_by_name[name] for name in types) if are_known else None
    return Mesh(np.array(chosen, object).reshape(saved.shape), saved.axes, axis_types=axis_types)


def _of_processes(processes: Sequence[int]) -> list[Any]:
    """A device of each process, all different; None where it has no more."""
    of_process: dict[int, list[Any]] = {}
    for device in jax.devices():
        of_process.setdefault(device.process_index, []).append(device)
    unused_devices = {process: iter(devices) for process, devices in of_process.items()}
    return [next(unused_devices.get(process, iter(())), None) for process in processes]
