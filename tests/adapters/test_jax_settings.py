"""Settings of JAX that check training steps do not concern saves and loads; layouts stay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import unickpt


@contextmanager
def in_all_threads(option: str, value: object, after: object) -> Iterator[None]:
    jax.config.update(option, value)
    try:
        yield
    finally:
        jax.config.update(option, after)


CHECKS = {
    "nans": lambda: in_all_threads("jax_debug_nans", True, False),
    "infs": lambda: in_all_threads("jax_debug_infs", True, False),
    "transfers": lambda: in_all_threads("jax_transfer_guard", "disallow", "allow"),
    "explicit transfers": lambda: in_all_threads(
        "jax_transfer_guard", "disallow_explicit", "allow"
    ),
    "nans in this thread": lambda: jax.debug_nans(True),
    "transfers in this thread": lambda: jax.transfer_guard("disallow"),
}


def bits(array: Any) -> bytes:
    is_key = jnp.issubdtype(array.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(array) if is_key else array).tobytes()


@pytest.fixture
def state() -> dict[str, Any]:
    """Arrays of each way in which the adapter makes one, with NaNs and infinities."""
    mesh = jax.make_mesh((4,), ("d",), devices=jax.devices()[:4])
    sharded = NamedSharding(mesh, PartitionSpec("d"))
    replicated = NamedSharding(mesh, PartitionSpec())
    bad = np.array([np.nan, np.inf, -np.inf, 1], np.float32)
    return {
        "small": jnp.asarray(bad),
        "large": jnp.asarray(np.tile(bad, 25_000)),
        "scalar": jnp.float32(np.nan),
        "weak": jnp.asarray(float("inf")),
        "sharded": jax.device_put(bad, sharded),
        "replicated": jax.device_put(bad, replicated),
        "weak and sharded": jax.device_put(jnp.asarray(float("nan")), replicated),
        "key": jax.random.key(7),
        "keys": jax.device_put(jax.random.split(jax.random.key(1), 4), sharded),
        "count": jnp.int32(3),
    }


@pytest.mark.parametrize("check", CHECKS)
def test_a_state_is_saved_and_loaded_under_checks_of_training_steps(
    state: dict[str, Any], check: str
) -> None:
    like = {
        name: jax.device_put(jnp.zeros_like(x), x.sharding) if x.committed else jnp.zeros_like(x)
        for name, x in state.items()
    }
    with CHECKS[check]():
        unickpt.save("memory://now", state, overwrite=True)
        unickpt.save_async("memory://later", state, overwrite=True).result()
        loads = [unickpt.load(path, like) for path in ("memory://now", "memory://later")]
    for loaded in loads:
        for name, expected in state.items():
            assert loaded[name].sharding == expected.sharding, name
            assert bits(loaded[name]) == bits(expected), name
        assert loaded["weak"].weak_type
        assert loaded["weak and sharded"].weak_type


def test_the_device_layout_of_like_is_kept() -> None:
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    columns = Format(Layout((1, 0)), SingleDeviceSharding(jax.devices()[0]))
    array = jax.device_put(jnp.asarray(values), columns)
    unickpt.save("memory://layout", {"w": array}, overwrite=True)
    abstract: Any = jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=columns)  # type: ignore[no-untyped-call]
    for like in (array, abstract):
        loaded = unickpt.load("memory://layout", {"w": like})["w"]
        assert loaded.format.layout.major_to_minor == (1, 0)
        np.testing.assert_array_equal(loaded, values)
    rows = unickpt.load("memory://layout", {"w": jnp.asarray(values)})["w"]
    assert rows.format.layout.major_to_minor == (0, 1)
