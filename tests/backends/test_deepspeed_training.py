"""Training goes on in torch from a folder of ZeRO 3, with the losses that DeepSpeed would have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support import TESTS, deepspeed_cases
from support.processes import Processes

import unickpt
import unickpt.adapters.torch
from unickpt import Rules

pytestmark = pytest.mark.integration

torch = pytest.importorskip("torch")

ON_TWO_RANKS = """
import sys
import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.insert(0, sys.argv[2])
from support import deepspeed_cases
from unickpt import Rules, load
from unickpt.adapters.torch import NamedOptimizer

dist.init_process_group("gloo")
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
model = deepspeed_cases.net()
for layer in (model.up, model.down):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = deepspeed_cases.optimizer(model)
tree = {"model": model, "optim": NamedOptimizer(optimizer, model)}
load(sys.argv[1], tree, rules=Rules.preset("deepspeed"))
losses = []
for batch in deepspeed_cases.batches()[3:]:
    loss = model(batch[4 * dist.get_rank() :][:4])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as DeepSpeed does by default
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    losses.append(float(mean / 2))
print("losses", losses)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepspeed_cases.unpack(tmp_path_factory.mktemp("deepspeed"))


def expected(cases: Path) -> Any:
    """The losses of steps 4 to 7 of a run of DeepSpeed that was not interrupted."""
    return json.loads((cases / "z3-losses" / "losses.json").read_text())[3:]


def test_plain_torch(cases: Path) -> None:
    model = deepspeed_cases.net()
    optimizer = deepspeed_cases.optimizer(model)
    tree = {"model": model, "optim": unickpt.adapters.torch.NamedOptimizer(optimizer, model)}
    unickpt.load(cases / "z3-losses" / "ckpt", tree, rules=Rules.preset("deepspeed"))
    losses = []
    for batch in deepspeed_cases.batches()[3:]:
        loss = model(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as DeepSpeed does by default
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses == pytest.approx(expected(cases), rel=2e-6)
    assert losses[0] - losses[-1] > 1e-3


def test_two_ranks_of_fsdp(cases: Path, processes: Processes) -> None:
    ranks = processes.torch(2, ON_TWO_RANKS, cases / "z3-losses" / "ckpt", TESTS)
    for output in processes.finish(ranks):
        losses = json.loads(output.split("losses")[1])
        assert losses == pytest.approx(expected(cases), rel=2e-6)


@pytest.mark.parametrize(
    "case", ["z0-fp32-dp2", "z1-elastic-dp2", "z3-fp32-dp2", "uc-z3-fp32-dp2", "z3-bf16-dp4"]
)
def test_one_preset_serves_all_stages(cases: Path, case: str) -> None:
    model = deepspeed_cases.net()
    optimizer = deepspeed_cases.optimizer(model)
    named = unickpt.adapters.torch.NamedOptimizer(optimizer, model)
    # Without ZeRO, DeepSpeed numbers the parameters as torch does.
    tree = {"model": model, "optim": optimizer if case.startswith("z0") else named}
    path = cases / case / "ckpt"
    unickpt.load(path, tree, rules=Rules.preset("deepspeed"), cast="bf16" in case)
    stored = unickpt.open(path)
    for name, value in model.state_dict().items():
        assert (value.numpy() == stored[f"fp32/{name}"][...]).all()
    number = 2 if case.startswith("z0") else "down.weight"
    state = optimizer.state[model.down.weight]
    assert (state["exp_avg"].numpy() == stored[f"exp_avg/{number}"][...]).all()
    assert (state["exp_avg_sq"].numpy() == stored[f"exp_avg_sq/{number}"][...]).all()
    assert state["step"] == 3
