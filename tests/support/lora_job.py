"""A job of LoRA with FSDP2: rank by rank, as torchrun would start it.

Arguments: the root of the run, the layout of the mesh, how many steps, what is said, the mistake.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import unickpt
from unickpt.adapters import torch_digests

ROWS, COLUMNS, RANK = 389, 257, 4
"""Odd, so that no two ranks hold the same number of rows."""
MISTAKE_AT = 2
FROZEN = "model/*.base.*"
OPTIONS = unickpt.SaveOptions(chunk_bytes=32 << 10, fsync=False, timeout_s=30)


class Lora(nn.Module):
    """A frozen layer with an adapter."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Linear(inputs, RANK, bias=False)
        self.up = nn.Linear(RANK, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + self.up(self.down(x))
        return y


def mesh_of(layout: str) -> DeviceMesh:
    world = dist.get_world_size()
    if layout == "replicated":
        return init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    return init_device_mesh("cpu", (world,))


def state_of(mesh: DeviceMesh) -> dict[str, Any]:
    torch.manual_seed(7)
    model = nn.Sequential(Lora(COLUMNS, ROWS), nn.ReLU(), Lora(ROWS, COLUMNS))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    trained = [p for p in model.parameters() if p.requires_grad]
    return {"model": model, "optimizer": torch.optim.AdamW(trained, lr=1e-2, fused=True), "step": 0}


def train(state: dict[str, Any], step: int) -> None:
    torch.manual_seed(1000 + step)
    inputs = torch.randn(8, COLUMNS)
    state["model"](inputs).square().mean().backward()
    state["optimizer"].step()
    state["optimizer"].zero_grad()
    state["step"] = step


def local_of(model: nn.Module, name: str) -> torch.Tensor:
    parameter = model.get_parameter(name)
    assert isinstance(parameter, DTensor)
    return parameter.to_local()


def mistake(model: nn.Module, kind: str) -> None:
    """Changes a frozen weight; version counters say nothing of it."""
    if kind == "fused":
        weight = model.get_parameter("0.base.weight")
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], lr=1e-3, fused=True).step()
        weight.grad = None
    elif kind == "element" and dist.get_rank() == dist.get_world_size() - 1:
        local_of(model, "2.base.weight").data[-1, -1] += 1


def changed_of(said: str) -> Any:
    return {"False": {FROZEN: False}, "tracked": "tracked", "nothing": None}[said]


def main(root: str, layout: str, steps: str, said: str, wrong: str = "") -> None:
    if said == "tracked":  # as on an accelerator
        torch_digests._is_hashed = lambda tensor: True
    dist.init_process_group("gloo")
    state, rows = state_of(mesh_of(layout)), []
    with unickpt.Checkpointer(root, reuse=True, keep_last=3, options=OPTIONS) as run:
        first = 0
        if run.latest() is not None:
            state = run.load(state)
            first = state["step"] + 1
        for step in range(first, int(steps)):
            train(state, step)
            if step == MISTAKE_AT:
                mistake(state["model"], wrong)
            row = {"step": step, "error": "", "text": ""}
            try:
                pending = run.save(step, state, changed=changed_of(said))
                pending.wait_staged()
                report = pending.result()
                row |= {n: getattr(report, f"{n}_bytes") for n in ("written", "staged", "reused")}
            except unickpt.UnickptError as error:
                row |= {"error": type(error).__name__, "text": str(error)}
            rows.append(row)
            print(json.dumps(row), flush=True)
    full = {
        name: parameter.full_tensor().detach()
        for name, parameter in state["model"].named_parameters()
        if isinstance(parameter, DTensor)
    }
    if dist.get_rank() == 0:
        torch.save(full, os.path.join(root, "..", "full.pt"))
    with suppress(RuntimeError):  # another rank is gone already
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
