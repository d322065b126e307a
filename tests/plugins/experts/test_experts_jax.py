"""Experts that are stacked in JAX arrays on eight devices, with the states of optax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from unickpt import Checkpointer, Experts, SaveOptions, load, open, verify

jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

import jax.numpy as jnp  # noqa: E402
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

EXPERTS = 8
OPTIONS = SaveOptions(fsync=False, chunk_bytes=1 << 20)


def mesh(*shape: int) -> Mesh:
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), ("x", "tp"))


def state_of(step: int, on: Mesh, *spec: str | None) -> dict[str, Any]:
    """Parameters and Adam's state, of which each element is of this step alone."""
    up = np.arange(EXPERTS * 64 * 32, dtype=np.float32).reshape(EXPERTS, 64, 32) + step * 100_000
    sharded = NamedSharding(on, PartitionSpec(*spec))
    params = {
        "moe": {"up": jax.device_put(up, sharded)},
        "router": jax.device_put(up[0], NamedSharding(on, PartitionSpec())),
    }
    optimizer = optax.adam(1e-3)
    _, opt = optimizer.update(params, optimizer.init(params))
    return {"params": params, "opt": opt, "step": step}


def check(path: Path, key: str) -> dict[int, int]:
    """Each expert, and its state in the optimizer, are as in its recorded step."""
    checkpoint = open(path)
    own = checkpoint.metadata["unickpt"]
    steps = {int(x): step for x, step in own["experts"]["steps"][key].items()}
    assert sorted(steps) == list(range(EXPERTS))
    on = mesh(8, 1)
    for name in checkpoint:
        found = np.asarray(checkpoint[name][...])
        at = {step: flat(state_of(step, on)) for step in {own["step"], *steps.values()}}
        if name.endswith("moe/up"):
            assert checkpoint.index.arrays[name].chunk[0] == 1
            for x, step in steps.items():
                assert found[x].tobytes() == at[step][name][x].tobytes(), f"{name}[{x}]"
        else:
            assert found.tobytes() == at[own["step"]][name].tobytes(), name
    assert verify(path).ok
    return steps


def flat(state: Any) -> dict[str, Any]:
    found = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        parts = [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]
        found["/".join(parts)] = np.asarray(leaf)
    return found


@pytest.mark.parametrize(
    ("axis", "shape", "spec"),
    [
        (0, (8, 1), ("x",)),
        ("x", (8, 1), ("x", None)),
        ("x", (4, 2), ("x", None, "tp")),
        ("x", (2, 4), ("x", "tp")),
        (0, (4, 2), (None, "tp")),
        (0, (8, 1), ()),
    ],
)
def test_stacked_experts_on_a_mesh(
    axis: Any, shape: tuple[int, int], spec: Any, tmp_path: Path
) -> None:
    key = "**/moe/up"
    with Checkpointer(tmp_path, experts=Experts({key: (axis, 3)}), options=OPTIONS) as run:
        for step in range(1, 5):
            report = run.save(step, state_of(step, mesh(*shape), *spec)).result()
            if step > 1:
                # Of 8 experts 3, in weights and two moments.
                assert report.reused_bytes == 3 * 5 * 64 * 32 * 4
    steps = check(tmp_path / "step_4", key)
    assert steps == {0: 4, 1: 2, 2: 2, 3: 3, 4: 3, 5: 3, 6: 4, 7: 4}


@pytest.mark.integration  # JAX compiles
def test_another_mesh_goes_on(tmp_path: Path) -> None:
    key = "**/moe/up"
    for job, shape in enumerate([(8, 1), (2, 4), (4, 2)]):
        on, step = mesh(*shape), 1 + 2 * job
        with Checkpointer(tmp_path, experts=Experts({key: ("x", 2)}), options=OPTIONS) as run:
            if job:
                like = state_of(0, on, "x")
                got = run.load(like)
                expected = np.asarray(load(tmp_path / f"step_{step - 1}")["params"]["moe"]["up"])
                assert np.array_equal(np.asarray(got["params"]["moe"]["up"]), expected)
            for number in (step, step + 1):
                report = run.save(number, state_of(number, on, "x")).result()
                # The chunks of one expert are the same on all of these meshes.
                assert (report.reused_bytes > 0) == (number > 1)
            check(tmp_path / f"step_{step + 1}", key)


def test_nothing_of_the_other_experts_is_kept(tmp_path: Path) -> None:
    """Their arrays may be deleted, or donated, before the save has ended."""

    def state(step: int) -> dict[str, Any]:
        return {str(x): {"w": jnp.full((200, 200), step * 10.0 + x)} for x in range(4)}

    options = SaveOptions(fsync=False, staging="copy")
    with Checkpointer(tmp_path, experts=Experts({"{x}/w": 1}), options=options) as run:
        run.save(1, state(1), wait=True)
        now = state(2)
        pending = run.save(2, now)
        for x in "123":
            now[x]["w"].delete()
        report = pending.result()
        assert report.staged_bytes == report.written_bytes == 200 * 200 * 4
    found = load(tmp_path / "step_2")
    assert [float(found[str(x)]["w"][0, 0]) for x in range(4)] == [20, 11, 12, 13]
