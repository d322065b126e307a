"""unickpt.integrations.flax, and examples/nnx_train.py killed in the middle."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes

import unickpt

jax = pytest.importorskip("jax")
nnx = pytest.importorskip("flax.nnx")
from unickpt.integrations.flax import check_shardings  # noqa: E402

pytestmark = pytest.mark.integration

EXAMPLE = Path(TESTS).parent.joinpath("examples", "nnx_train.py").read_text()


def make() -> Any:
    split = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    with nnx.use_eager_sharding(False):
        return nnx.Linear(4, 8, kernel_init=split, rngs=nnx.Rngs(0))


def test_lost_shardings_are_named() -> None:
    abstract = nnx.eval_shape(make)
    for model in (abstract, nnx.state(abstract)):
        with pytest.raises(ValueError, match=r"^1 variables.*: kernel\. Call nnx.eval_shape under"):
            check_shardings(model)
    check_shardings(make())  # of arrays, where they are counts
    mesh = jax.make_mesh((1,), ("model",))
    check_shardings(nnx.get_abstract_model(make, mesh)[1])
    check_shardings(nnx.eval_shape(lambda: nnx.Linear(4, 8, rngs=nnx.Rngs(0))))


@pytest.mark.trainers
def test_a_job_that_is_killed_goes_on(processes: Processes, tmp_path: Path) -> None:
    """With the same losses on as many devices; on others, sums have another order."""
    assert len(EXAMPLE.splitlines()) <= 40
    four, two = ({"XLA_FLAGS": f"--xla_force_host_platform_device_count={n}"} for n in (4, 2))
    job = processes.forked(EXAMPLE, tmp_path / "run", 10**6, of=["jax"], env=four)
    first = killed_after(job, 20)
    with unickpt.Checkpointer(tmp_path / "run") as run:
        last = run.latest() or 0
        unickpt.copy(run.path(last), tmp_path / "two" / f"step_{last}")
        kernel = unickpt.open(run.path(last))["0/layers/0/kernel"]
    assert 0 < last <= 21
    assert kernel.layout is not None
    assert kernel.layout.mesh.shape == (4,)
    outputs = processes.finish(
        [
            processes.forked(EXAMPLE, tmp_path / name, 40, of=["jax"], env=env)
            for name, env in (("whole", four), ("run", four), ("two", two))
        ]
    )
    wanted, rest, other = map(losses, outputs)
    assert sorted(rest) == sorted(other) == list(range(last + 1, 41))
    assert {**first, **rest} == {i: wanted[i] for i in {**first, **rest}}
    floats = [[float.fromhex(found[i]) for i in rest] for found in (wanted, other)]
    np.testing.assert_allclose(*floats, rtol=1e-4)


OVER = """
import logging, os, signal, sys
logging.disable(logging.ERROR)
import jax, jax.numpy as jnp, optax
from flax import nnx
path, way, last = sys.argv[1], sys.argv[2], int(sys.argv[3])
import orbax.checkpoint as ocp
chosen = {}
if way == "unickpt":
    from unickpt.integrations.orbax import registry
    chosen = {"handler_registry": registry()}

class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 1, rngs=rngs)])
        self.norm, self.drop = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
    def __call__(self, x):
        return self.layers[1](self.drop(nnx.relu(self.norm(self.layers[0](x)))))

@nnx.jit
def train(model, optimizer, x):
    def loss(model):
        return jnp.mean(model(x) ** 2)
    optimizer.update(model, nnx.grad(loss)(model))

model = Model(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
with ocp.CheckpointManager(path, **chosen) as manager:
    begin = manager.latest_step()
    if begin is not None:
        like = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        found = manager.restore(begin, args=ocp.args.StandardRestore(like))
        nnx.update(model, found["model"])
        nnx.update(optimizer, found["optimizer"])
    for step in range(0 if begin is None else begin + 1, 8):
        train(model, optimizer, jax.random.normal(jax.random.key(step), (16, 4)))
        state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
        manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        if step == last:
            os.kill(os.getpid(), signal.SIGKILL)
leaves = jax.tree.leaves(nnx.state((model, optimizer), nnx.Not(nnx.RngState)))
print(b"".join(jax.device_get(leaf).tobytes() for leaf in leaves).hex())
"""


@pytest.mark.trainers
def test_a_killed_run_of_orbax_goes_on(processes: Processes, tmp_path: Path) -> None:
    """With one argument added: Orbax stores an NNX variable as the `value` of one."""
    pytest.importorskip("orbax.checkpoint")
    whole = processes.forked(OVER, tmp_path / "whole", "orbax", -1, of=["orbax"])
    killed = processes.forked(OVER, tmp_path / "run", "orbax", 4, of=["orbax"])
    assert killed.wait() == -signal.SIGKILL, killed.communicate()
    assert "0/kernel/value" in " ".join(unickpt.open(tmp_path / "run" / "4"))
    again = processes.forked(OVER, tmp_path / "run", "unickpt", 6, of=["orbax"])
    assert again.wait() == -signal.SIGKILL, again.communicate()
    assert (tmp_path / "run" / "6" / "default" / "UNICKPT.txt").exists()
    found, wanted = processes.finish(
        [processes.forked(OVER, tmp_path / "run", "unickpt", -1, of=["orbax"]), whole]
    )
    assert found == wanted


def losses(output: str) -> dict[int, str]:
    return {int(i): x for i, x in re.findall(r"iteration (\d+) loss (\S+)", output)}


def killed_after(process: subprocess.Popen[str], iteration: int) -> dict[int, str]:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if f"iteration {iteration} " in line:
            process.send_signal(signal.SIGKILL)
            break
    assert process.wait() == -signal.SIGKILL
    return losses("".join(lines))
