"""Jobs with another system's checkpoints are killed, and go on here after one line is changed; the
result is that of a job that nobody interrupted. So it is on the way back, by an export."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.processes import Processes

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.trainers]

# Each saves after every second of 8 steps; "killed" dies in the fifth.
DCP = """
import os, signal, sys, torch
mode, folder, out = sys.argv[1:]
if "ours" in mode:
    import unickpt.integrations.dcp as dcp
else:
    import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Dropout(0.1), torch.nn.Linear(5, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
def state(step):
    weights, moments = get_state_dict(model, optimizer)
    random = torch.get_rng_state()
    return {"model": weights, "optim": moments, "step": torch.tensor(step), "rng": random}
first = 1
if os.path.exists(folder):
    found = state(0)
    dcp.load(found, checkpoint_id=folder)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optim"]
    )
    torch.set_rng_state(found["rng"])
    first = int(found["step"]) + 1
assert first == (5 if mode in ("ours", "theirs") else 1)
for step in range(first, 9):
    model(torch.ones(4, 3) * step).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step == 5 and "killed" in mode:
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 2 == 0:
        dcp.save(state(step), checkpoint_id=folder)
import numpy as np
np.savez(out, *[p.detach().numpy() for p in model.parameters()])
"""
LIGHTNING = """
import logging, os, signal, sys, warnings
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel("ERROR")
import lightning, numpy as np, torch
from lightning.pytorch.callbacks import ModelCheckpoint
mode, folder, out = sys.argv[1:]
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(3, 2)
    def training_step(self, batch, number):
        if self.global_step == 4 and mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.net(batch[0] * (self.global_step + 1)).square().sum()
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
plugins = []
if mode == "ours":
    from unickpt.integrations.lightning import UnickptCheckpointIO
    plugins = [UnickptCheckpointIO()]
torch.manual_seed(0)
model, data = Model(), torch.utils.data.TensorDataset(torch.ones(4, 3))
saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=2, save_top_k=-1)
trainer = lightning.Trainer(
    max_steps=8, plugins=plugins, callbacks=[saving], logger=False, accelerator="cpu",
    enable_progress_bar=False, enable_model_summary=False,
)
there = sorted(os.listdir(folder)) if os.path.exists(folder) else []
assert bool(there) == (mode == "ours"), there
loader = torch.utils.data.DataLoader(data, batch_size=2)
trainer.fit(model, loader, ckpt_path=os.path.join(folder, there[-1]) if there else None)
np.savez(out, *[p.detach().numpy() for p in model.parameters()])
"""
ORBAX_V1 = """
import os, signal, sys
import jax, jax.numpy as jnp, numpy as np, optax
mode, folder, out, kind = sys.argv[1:]
from orbax.checkpoint import v1 as ocp
context = ocp.Context()
if mode == "killed-ours":
    from unickpt.integrations.orbax import v1_registry
    context.checkpointables.registry = v1_registry()
if kind == "equinox":
    import equinox as eqx
    whole = eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0))
    params, rest = eqx.partition(whole, eqx.is_array)
    apply = lambda params, x: jax.vmap(eqx.combine(params, rest))(x)
else:
    params = {"w": jnp.ones((3, 2)) / 3, "b": jnp.zeros(2)}
    apply = lambda params, x: x @ params["w"] + params["b"]
tx = optax.adamw(0.1)
state = {"params": params, "opt": tx.init(params), "step": 0}
first = 1
with ocp.training.Checkpointer(folder, context=context) as checkpointer:
    if checkpointer.latest is not None:
        is_array = lambda x: hasattr(x, "shape")
        # Orbax needs to be told shardings of what was exported; ours does not.
        like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)
        if mode == "theirs":
            like = ocp.arrays.to_shape_dtype_struct
        shape = lambda x: like(x) if is_array(x) else x
        found = checkpointer.load(checkpointer.latest, jax.tree.map(shape, state))
        state = jax.tree.map(lambda x: jnp.asarray(x) if is_array(x) else x, found)
        first = int(state["step"]) + 1
    assert first == {"killed-ours": 5, "theirs": 7}.get(mode, 1), first
    for step in range(first, 9):
        loss = lambda p: (apply(p, jnp.ones((4, 3)) * step) ** 2).sum()
        updates, opt = tx.update(jax.grad(loss)(state["params"]), state["opt"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": step}
        if step == {"killed": 5, "killed-ours": 7}.get(mode):
            os.kill(os.getpid(), signal.SIGKILL)
        if step % 2 == 0:
            checkpointer.save(step, state)
np.savez(out, *map(np.asarray, jax.tree.leaves(state["params"])))
"""


def changed_over(processes: Processes, source: str, tmp_path: Path, *more: str) -> None:
    run = runner(processes, source, tmp_path, *more)
    assert run("whole", "theirs") == 0
    assert run("killed", "run") == -signal.SIGKILL
    assert run("ours", "run") == 0
    compare(tmp_path, "ours")


def changed_back(
    processes: Processes, source: str, tmp_path: Path, step: str, to: str, exported: str
) -> None:
    """A job that saves here is killed, a step of it exported, and a job without unickpt goes on."""
    run = runner(processes, source, tmp_path)
    assert run("whole", "theirs") == 0
    assert run("killed-ours", "run") == -signal.SIGKILL
    unickpt.convert(tmp_path / "run" / step, tmp_path / exported, to=to)
    assert run("theirs", Path(exported).parts[0]) == 0
    compare(tmp_path, "theirs")


def runner(
    processes: Processes, source: str, tmp_path: Path, *more: str
) -> Callable[[str, str], int]:
    def run(mode: str, folder: str) -> int:
        given = source, mode, tmp_path / folder, tmp_path / f"{mode}.npz", *more
        if mode == "theirs":  # without unickpt
            done = processes.start(*given)
        else:
            done = processes.forked(*given, of=["torch" if "torch" in source else "orbax"])
        said, errors = done.communicate()
        assert done.returncode in (0, -signal.SIGKILL), said + errors
        return done.returncode

    return run


def compare(tmp_path: Path, mode: str) -> None:
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / f"{mode}.npz") as ours:
        assert whole.files
        for name in whole.files:
            assert np.array_equal(ours[name], whole[name])


def test_dcp(processes: Processes, tmp_path: Path) -> None:
    changed_over(processes, DCP, tmp_path)


def test_dcp_and_back(processes: Processes, tmp_path: Path) -> None:
    changed_back(processes, DCP, tmp_path, "", "dcp", "exported")


def test_lightning(processes: Processes, tmp_path: Path) -> None:
    changed_over(processes, LIGHTNING, tmp_path)


@pytest.mark.parametrize("kind", ["dict", "equinox"])
def test_orbax_of_version_1_and_back(processes: Processes, tmp_path: Path, kind: str) -> None:
    run = runner(processes, ORBAX_V1, tmp_path, kind)
    assert run("whole", "whole") == 0
    assert run("killed", "run") == -signal.SIGKILL
    assert run("killed-ours", "run") == -signal.SIGKILL
    ours, back = tmp_path / "run" / "6", tmp_path / "back" / "6"
    assert (ours / "state" / "UNICKPT.txt").exists()
    shutil.copytree(ours, back, ignore=shutil.ignore_patterns("state"))
    unickpt.convert(ours / "state", back / "state", to="orbax")
    assert run("theirs", "back") == 0
    compare(tmp_path, "theirs")
