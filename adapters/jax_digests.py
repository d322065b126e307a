"""128-bit digests of JAX arrays, computed on the devices that hold them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_MOST_ELEMENTS = 1 << 31
"""Positions of elements are numbers of 32 bits, because JAX has no others by default."""


def tokens(arrays: Sequence[Any]) -> list[Hashable]:
    """A token of the content of each array.

    Arguments:
        arrays: on accelerators; None for those to leave out.

    Returns:
        None for an array that was left out or cannot be hashed.
    """
    digests: dict[int, list[Any]] = {}
    for number, array in enumerate(arrays):
        if array is not None:
            shard_digests = _digests(array)
            if shard_digests is not None:
                digests[number] = shard_digests
    results: list[Hashable] = [None] * len(arrays)
    for number, values in jax.device_get(digests).items():  # all transfers at once
        array = arrays[number]
        words = tuple(map(bytes, map(np.asarray, values)))
        results[number] = words, str(array.dtype), tuple(array.shape), array.sharding
    return results


def _digests(array: Any) -> list[Any] | None:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        array = jax.random.key_data(array)
    shards = [shard.data for shard in array.addressable_shards]
    if any(data.size >= _MOST_ELEMENTS for data in shards):
        return None
    return [digest(data) for data in shards]


# Four sums of 32 bits; the multipliers are those of MurmurHash3 and of xxHash32, all odd.
_MIXES = (
    (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35),
    (0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F),
    (0x27D4EB2D, 0x165667B1, 0x9E3779B1),
    (0x165667C5, 0xCC9E2D51, 0x1B873593),
)


@jax.jit
def digest(data: Any) -> Any:
    """The digest of the elements of an array on one device: four words.

    For each position a mix is a bijection of the word, so that every change of a single word
    changes all sums.
    """
    words = _words(data)
    positions = lax.iota(jnp.uint32, words.size) + jnp.uint32(1)
    sums = []
    for spread, *factors in _MIXES:
        mix = words ^ (positions * jnp.uint32(spread))
        for factor, shift in zip(factors, (16, 13), strict=True):
            mix = (mix ^ (mix >> jnp.uint32(shift))) * jnp.uint32(factor)
        mix = mix ^ (mix >> jnp.uint32(16))
        sums.append(jnp.sum(mix, dtype=jnp.uint32))
    return jnp.stack(sums)


_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
_PACKED = ("int4", "uint4", "int2", "uint2")


def _words(data: Any) -> Any:
    """The bits of each element as words of 32 bits, flat."""
    if jnp.iscomplexobj(data):
        data = jnp.stack([data.real, data.imag], -1)
    if np.dtype(data.dtype).name == "float4_e2m1fn":
        data = lax.bitcast_convert_type(data, jnp.uint4)
    if data.dtype == jnp.bool_ or np.dtype(data.dtype).name in _PACKED:
        data = data.astype(jnp.int8)
    bits = lax.bitcast_convert_type(data, _UNSIGNED[np.dtype(data.dtype).itemsize])
    return bits.astype(jnp.uint32).reshape(-1)
