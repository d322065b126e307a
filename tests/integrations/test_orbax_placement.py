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
from typer.testing import CliRunner

import unickpt
import unickpt.integrations.orbax as ocp
from unickpt.cli.app import app
from unickpt.integrations.orbax import v1

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
        "numpy": [np.arange(3), np.float32(2.5)],
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
def test_a_manager(tmp_path: Path, kind: AxisType) -> None:
    saved = state(kind)
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
        manager.wait_until_finished()
        check(manager.restore(1), saved)
        check(manager.restore(1, args=ocp.args.StandardRestore()), saved)
        check(manager.restore(1, args=ocp.args.PyTreeRestore()), saved)
        described = manager.item_metadata(1).tree
        assert described["w"].sharding == saved["w"].sharding
        assert described["numpy"][0].sharding is None


def test_items_by_name(tmp_path: Path) -> None:
    saved = {"params": state(), "other": {"numpy": np.arange(2), "jax": jnp.arange(2)}}
    items = {name: ocp.args.StandardSave(each) for name, each in saved.items()}
    with ocp.CheckpointManager(tmp_path) as manager:
        manager.save(
            1, args=ocp.args.Composite(**items, about=ocp.args.JsonSave({"b": [1], "a": 2}))
        )
        manager.wait_until_finished()
        found = manager.restore(1)
        check({name: found[name] for name in saved}, saved)
        assert list(found["about"].items()) == [("b", [1]), ("a", 2)]


def test_version_1_and_checkpointers(tmp_path: Path) -> None:
    saved = state()
    v1.save(tmp_path / "v1", saved)
    check(v1.load(tmp_path / "v1"), saved)
    described = v1.load(tmp_path / "v1", v1.metadata(tmp_path / "v1"))
    assert described["w"].sharding == saved["w"].sharding
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "v0", saved)
        checkpointer.wait_until_finished()
        check(checkpointer.restore(tmp_path / "v0"), saved)


def test_what_orbax_saved(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    saved = state(AxisType.Explicit)
    saved["numpy"] = [np.arange(3), np.full((), 2.5, np.float32)]  # it has no np.float32
    with orbax.CheckpointManager(tmp_path) as manager:
        manager.save(1, args=orbax.args.StandardSave(saved))
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path) as manager:
        check(manager.restore(1), saved)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_orbax_restores_an_export_as_it_was_saved(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint")
    saved = state(AxisType.Explicit)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        manager.save(1, args=ocp.args.StandardSave(saved))
    exported = ["export", f"{tmp_path}/run/step_1", f"{tmp_path}/back/1", "--to", "orbax"]
    assert CliRunner().invoke(app, exported).exit_code == 0
    with orbax.CheckpointManager(tmp_path / "back") as manager:
        check(manager.restore(1, args=orbax.args.StandardRestore()), saved)


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
def test_version_1_of_orbax_needs_no_shardings_for_an_export(tmp_path: Path) -> None:
    orbax = pytest.importorskip("orbax.checkpoint.experimental.v1")
    saved = {"w": state()["w"], "one": jnp.ones(2), "numpy": np.arange(3)}
    unickpt.save(tmp_path / "a", saved)
    v1.save(tmp_path / "b", saved)
    bare = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in saved.items() if k != "numpy"}
    for name in "ab":
        exported = ["export", f"{tmp_path}/{name}", f"{tmp_path}/{name}_", "--to", "orbax"]
        assert CliRunner().invoke(app, exported).exit_code == 0
        found = orbax.load(tmp_path / f"{name}_", {**bare, "numpy": np.zeros(3, int)})
        check(found, saved) if name == "b" else None
        assert found["w"].sharding.spec == saved["w"].sharding.spec


def test_arrays_of_64_bits_that_jax_would_truncate_are_numpy_arrays(tmp_path: Path) -> None:
    has = jax if hasattr(jax, "enable_x64") else jax.experimental  # JAX 0.6 has it there alone
    with has.enable_x64(True):
        saved = {"n": jnp.arange(3) + 2**40, "w": jnp.ones(2, jnp.float32)}
        v1.save(tmp_path / "a", saved)
        assert isinstance(v1.load(tmp_path / "a")["n"], jax.Array)
    found = v1.load(tmp_path / "a")
    assert type(found["n"]) is np.ndarray
    assert found["n"][0] == 2**40
    assert isinstance(found["w"], jax.Array)


FEWER = """
import sys
import jax, numpy as np
from unickpt.errors import LoadMismatch
from unickpt.integrations.orbax import v1

try:
    found = v1.load(sys.argv[1])
    print(type(found["w"]).__name__, found["w"].sharding.num_devices, float(found["w"].sum()))
except LoadMismatch as error:
    print(error)
"""


def test_fewer_devices(processes: Processes, tmp_path: Path) -> None:
    saved = state()
    v1.save(tmp_path / "a", {"w": saved["w"]})
    (one,) = processes.finish(processes.jax(1, 2, FEWER, tmp_path / "a"))
    assert "ArrayImpl 1 780.0" in one
    same = processes.finish(processes.jax(2, 4, FEWER, tmp_path / "a"))
    # Gloo writes lines of its own, also between the words of ours.
    assert all(re.search(r"(?s)ArrayImpl 8.*780\.0", output) for output in same), same
    two = processes.finish(processes.jax(2, 2, FEWER, tmp_path / "a"))
    for output in two:
        assert "array 'w' was on 8 devices of another job, and this one has 4 in 2" in output


def test_metadata_of_a_user_that_look_like_ours(tmp_path: Path) -> None:
    about = {"orbax": {"items": {"default": ""}, "single": "default", "meshes": [1], "numpy": 3}}
    unickpt.save(tmp_path / "step_1", {"w": jnp.ones(2)}, metadata=about)
    with ocp.CheckpointManager(tmp_path) as manager:
        assert isinstance(manager.restore(1)["w"], jax.Array)
