"""Metadata of steps and items, with the names of Orbax's; and what Orbax's own describe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct  # which has no types


def abstract_array(shape: Any, dtype: Any, sharding: Any = None) -> Any:
    """What to load an array into; a NumPy array, if JAX would truncate it to 32 bits."""
    if sharding is None and is_truncated(dtype):
        return np.empty(tuple(shape), dtype)
    return _ShapeDtypeStruct(tuple(shape), dtype, sharding=sharding)


def is_truncated(dtype: Any) -> bool:
    """Whether JAX would make 32 bits of a dtype's 64, as it does without `jax_enable_x64`."""
    return bool(jax.dtypes.canonicalize_dtype(dtype, allow_extended_dtype=True) != dtype)


@dataclass(frozen=True)
class ArrayMetadata:
    """An array that is stored; may be restored into."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    sharding: Any = None


@dataclass(frozen=True)
class ScalarMetadata:
    """A number or truth value that is stored; `dtype` is its type in Python."""

    name: str
    dtype: Any
    shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class StringMetadata:
    """A text that is stored."""

    name: str


@dataclass(frozen=True)
class TreeMetadata:
    """The tree of an item; its leaves are `ArrayMetadata` and the like."""

    tree: Any
    custom_metadata: Any = None


@dataclass(frozen=True)
class StepMetadata:
    """What is known of a step.

    Arguments:
        item_handlers: how each item was saved, by its name.
        item_metadata: a `TreeMetadata`, or a `Composite` of them.
        metrics: as given to `save`; empty if none were.
        commit_timestamp_nsecs: since 1970.
        custom_metadata: as given to `save`.
    """

    item_handlers: Mapping[str, str]
    item_metadata: Any
    metrics: Mapping[str, Any]
    commit_timestamp_nsecs: int
    custom_metadata: Mapping[str, Any]


@dataclass(frozen=True)
class RootMetadata:
    """What is known of a run."""

    custom_metadata: Mapping[str, Any] = field(default_factory=dict)
    directory: Any = None


def described(leaf: Any) -> Any:
    """What to load into for a leaf that is metadata, Orbax's or ours; all others as they are."""
    cls = type(leaf).__name__
    if type(leaf).__module__.split(".")[0] not in ("orbax", "unickpt"):
        return leaf
    if cls == "StringMetadata":
        return ""
    if cls == "ScalarMetadata":
        return np.dtype(leaf.dtype).type(0).item()
    if cls == "ArrayMetadata":
        sharding = getattr(leaf, "sharding", None) or getattr(leaf, "sharding_metadata", None)
        return abstract_array(leaf.shape, leaf.dtype, _jax(sharding))
    return leaf


def sharding_of(how: Any) -> Any:
    """The sharding of Orbax's `ArrayRestoreArgs` or ours; None if they say none."""
    sharding = getattr(how, "sharding", None)
    if sharding is not None:
        return _jax(sharding)
    mesh, axes = getattr(how, "mesh", None), getattr(how, "mesh_axes", None)
    return None if mesh is None or axes is None else jax.sharding.NamedSharding(mesh, axes)


def _jax(sharding: Any) -> Any:
    """A sharding of JAX: also from Orbax's description of one, and from a JAX `Format`."""
    if sharding is None or isinstance(sharding, jax.sharding.Sharding):
        return sharding
    if hasattr(sharding, "to_jax_sharding"):
        return sharding.to_jax_sharding()
    inner = getattr(sharding, "sharding", None)
    if isinstance(inner, jax.sharding.Sharding):
        return inner
    raise TypeError(f"a sharding is {sharding!r}, which is none of JAX")
