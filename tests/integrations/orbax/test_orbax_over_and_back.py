"""A job of Orbax's manager that is killed continues with our handler, is killed again, and goes
back to Orbax's own by an export: one argument is changed, and the result is that of a job that
nobody killed."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes

import unickpt

pytest.importorskip("orbax.checkpoint")
pytestmark = [pytest.mark.integration, pytest.mark.trainers]

JOB = """
import logging, os, signal, sys, warnings
logging.disable(logging.ERROR)
warnings.simplefilter("ignore")
import jax, jax.numpy as jnp, numpy as np, optax
folder, way, kind, die, out = sys.argv[1:]
import orbax.checkpoint as ocp
chosen = {}
if way == "unickpt":
    from unickpt.integrations.orbax import registry
    chosen = {"handler_registry": registry()}
args, tx = ocp.args, optax.adamw(0.1)
x = lambda step: jax.random.normal(jax.random.key(step), (16, 4))
if kind == "nnx":
    from flax import nnx
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), nnx.Dropout(0.1, rngs=nnx.Rngs(1)))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    @nnx.jit
    def train(model, optimizer, x):
        optimizer.update(model, nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model))
    state = lambda: {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
else:
    params = {"w": jnp.ones((4, 2)) / 3, "b": jnp.zeros(2)}
    opt, seen = tx.init(params), []
    @jax.jit
    def train(params, opt, x):
        loss = lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2)
        updates, opt = tx.update(jax.grad(loss)(params), opt, params)
        return optax.apply_updates(params, updates), opt
    state = lambda: {"params": params, "opt": opt}
options = ocp.CheckpointManagerOptions(
    save_interval_steps=2, max_to_keep=None, best_fn=lambda metrics: metrics["loss"]
)
with ocp.CheckpointManager(folder, options=options, **chosen) as manager:
    begin = manager.latest_step()
    if begin is not None and kind == "nnx":
        found = manager.restore(begin, args=args.StandardRestore(state()))
        nnx.update(model, found["model"])
        nnx.update(optimizer, found["optimizer"])
    elif begin is not None:
        found = manager.restore(
            begin, args=args.Composite(state=args.StandardRestore(state()), data=args.JsonRestore())
        )
        params, opt, seen = found.state["params"], found.state["opt"], found.data["seen"]
        assert manager.best_step() is not None
    print("from", begin, flush=True)
    for step in range(0 if begin is None else begin + 1, 11):
        if kind == "nnx":
            train(model, optimizer, x(step))
            save = args.StandardSave(state())
        else:
            params, opt = train(params, opt, x(step))
            seen.append(step)
            data = args.JsonSave({"seen": list(seen)})  # Orbax writes it later
            save = args.Composite(state=args.StandardSave(state()), data=data)
        manager.save(step, args=save, metrics={"loss": 1.0 / (step + 1)})
        if str(step) == die:
            manager.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
every = (state(), seen) if kind == "dict" else nnx.state((model, optimizer), nnx.Not(nnx.RngKey))
np.savez(out, *map(np.asarray, jax.tree.leaves(every)))
"""


@pytest.mark.parametrize("kind", ["dict", "nnx"])
def test_over_and_back(kind: str, processes: Processes, tmp_path: Path) -> None:
    if kind == "nnx":
        pytest.importorskip("flax.nnx")

    def run(folder: str, way: str, die: int | None = None) -> str:
        out = tmp_path / f"{folder}.npz"
        given = JOB, tmp_path / folder, way, kind, str(die), out
        if folder == "back":  # without unickpt
            job = processes.start(*given)
        else:
            job = processes.forked(*given, of=["orbax"])
        said, errors = job.communicate()
        assert job.returncode == (0 if die is None else -signal.SIGKILL), said + errors
        return said

    run("run", "orbax", 5)
    assert run("run", "unickpt", 7) == "from 4\n"
    item = "default" if kind == "nnx" else "state"
    ours, back = tmp_path / "run" / "6", tmp_path / "back" / "6"
    assert (ours / item / "UNICKPT.txt").exists()
    shutil.copytree(ours, back, ignore=shutil.ignore_patterns(item))
    unickpt.convert(ours / item, back / item, to="orbax")
    assert run("back", "orbax") == "from 6\n"
    run("whole", "orbax")
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "back.npz") as back:
        assert len(whole.files) > 5
        for name in whole.files:
            assert np.array_equal(whole[name], back[name])
