"""Without an abstract tree, arrays come back as they were: of JAX on the same mesh, or of NumPy."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from support.processes import Processes

import unickpt

ocp = pytest.importorskip("orbax.checkpoint")
from orbax.checkpoint import v1  # noqa: E402

from unickpt.integrations.orbax import registry, v1_registry  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
P: Any = PartitionSpec


def mesh(kind: AxisType = AxisType.Auto) -> Mesh:
    """A mesh whose devices are not in JAX's order."""
    devices = np.array(jax.devices()[::-1]).reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(kind, kind))


def state(kind: AxisType = AxisType.Auto) -> dict[str, Any]:
    def put(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, NamedSharding(mesh(kind), P(*spec)))

    return {
        "w": put(jnp.arange(40.0).reshape(8, 5), "data"),
        "both": put(jnp.arange(16, dtype=jnp.bfloat16), ("model", "data")),
        "copied": put(jnp.arange(3)),
        "one": jnp.ones(2),
        "keys": put(jax.random.split(jax.random.key(1), 8), "data"),
        "numpy": [np.arange(3), np.full((), 2.5, np.float32)],
        "step": 7,
    }


def check(found: Any, wanted: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert isinstance(a, jax.Array) == isinstance(b, jax.Array)
        if isinstance(b, jax.Array):
            if isinstance(b.sharding, NamedSharding):
                assert a.sharding == b.sharding
                assert a.sharding.mesh == b.sharding.mesh
            if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
                a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.array_equal(a, b)
        assert np.asarray(a).dtype == np.asarray(b).dtype


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("saved_by", ["unickpt", "orbax"])
def test_a_manager(tmp_path: Path, kind: AxisType, saved_by: str) -> None:
    saved = state(kind)
    chosen = {"handler_registry": registry()} if saved_by == "unickpt" else {}
    with ocp.CheckpointManager(tmp_path, **chosen) as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        check(manager.restore(1), saved)
        check(manager.restore(1, args=ocp.args.StandardRestore()), saved)
        check(manager.restore(1, args=ocp.args.PyTreeRestore()), saved)


def test_version_1(tmp_path: Path) -> None:
    saved, context = state(), v1.Context()
    context.checkpointables.registry = v1_registry()
    with context:
        v1.save(tmp_path / "a", saved)
        check(v1.load(tmp_path / "a"), saved)


def test_orbax_restores_an_export_as_it_was_saved(tmp_path: Path) -> None:
    saved = state(AxisType.Explicit)
    with ocp.CheckpointManager(tmp_path / "run", handler_registry=registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
    back = tmp_path / "back"
    unickpt.convert(tmp_path / "run" / "1" / "default", back / "1" / "default", to="orbax")
    with ocp.CheckpointManager(back) as manager:
        check(manager.restore(1, args=ocp.args.StandardRestore()), saved)


def test_arrays_of_64_bits_that_jax_would_truncate_are_numpy_arrays(tmp_path: Path) -> None:
    has = jax if hasattr(jax, "enable_x64") else jax.experimental  # JAX 0.6 has it there alone
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        with has.enable_x64(True):
            saved = {"n": jnp.arange(3) + 2**40, "w": jnp.ones(2, jnp.float32)}
            manager.save(1, args=ocp.args.StandardSave(saved))
            manager.wait_until_finished()
            assert isinstance(manager.restore(1)["n"], jax.Array)
        found = manager.restore(1)
    assert type(found["n"]) is np.ndarray
    assert found["n"][0] == 2**40
    assert isinstance(found["w"], jax.Array)


FEWER = """
import sys
import jax, numpy as np
import orbax.checkpoint as ocp
from unickpt.errors import LoadMismatch
from unickpt.integrations.orbax import registry

with ocp.CheckpointManager(sys.argv[1], handler_registry=registry()) as manager:
    try:
        found = manager.restore(1)
        print(type(found["w"]).__name__, found["w"].sharding.num_devices, float(found["w"].sum()))
    except LoadMismatch as error:
        print(error)
"""


def test_fewer_devices(processes: Processes, tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": state()["w"]}))
    (one,) = processes.finish(processes.jax(1, 2, FEWER, tmp_path))
    assert "array 'w' was on 8 devices of another job, and this one has 2 in 1" in one
    same = processes.finish(processes.jax(2, 4, FEWER, tmp_path))
    # Gloo writes lines of its own, also between the words of ours.
    assert all(re.search(r"(?s)ArrayImpl 8.*780\.0", output) for output in same), same
    two = processes.finish(processes.jax(2, 2, FEWER, tmp_path))
    for output in two:
        assert "array 'w' was on 8 devices of another job, and this one has 4 in 2" in output


def test_metadata_of_a_user_that_look_like_ours(tmp_path: Path) -> None:
    about = {"orbax": {"items": {"default": ""}, "single": "default", "meshes": [1], "numpy": 3}}
    unickpt.save(tmp_path / "1" / "default", {"w": jnp.ones(2)}, metadata=about)
    with ocp.Checkpointer(registry().get(None, ocp.args.StandardSave)) as checkpointer:
        assert isinstance(checkpointer.restore(tmp_path / "1" / "default")["w"], jax.Array)
