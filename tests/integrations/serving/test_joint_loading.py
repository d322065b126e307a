"""Ranks of an engine that need parts of the same compressed chunks: one of them reads each."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from support.processes import Processes

import unickpt

pytestmark = [pytest.mark.integration, pytest.mark.plugins]
STATE = {name: np.arange(2400.0).reshape(40, 60) + i for i, name in enumerate(["up", "down", "o"])}
WHOLE = sum(array.nbytes for array in STATE.values())
RANK = """
import json, logging, sys
import torch
import torch.distributed as dist
from unickpt.integrations.serving.loading import CheckpointLoader
from unickpt.types import LoadReport

dist.init_process_group("gloo")
rank, kind, read = dist.get_rank(), sys.argv[2], []

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, shape in (("up", (20, 60)), ("down", (40, 30)), ("o", (40, 60))):
            setattr(self, name, torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64)))

    def load_weights(self, weights):
        if kind == "fails" and rank == 1:
            raise RuntimeError("provoked")
        for name, tensor in weights:
            parameter = getattr(self, name).data
            if name == "up":
                tensor = tensor.narrow(0, 20 * rank, 20)
            elif name == "down":
                tensor = tensor.narrow(1, 30 * rank, 30)
            parameter.copy_(tensor)
            if kind == "computes" and rank == 1:
                parameter.add_(0)  # reads what is recorded

class Reads(logging.Handler):
    def emit(self, record):
        if record.args and isinstance(record.args[0], LoadReport):
            read.append(record.args[0].read_bytes)

logging.getLogger("unickpt").addHandler(Reads())
logging.getLogger("unickpt").setLevel(logging.INFO)
model, error = Model(), None
try:
    loader = CheckpointLoader({"path": sys.argv[1]}, "settings")
    loader.load(model, "", must_fill=True, group=dist.group.WORLD)
except Exception as raised:
    error = str(raised)
tensors = {name: parameter.tolist() for name, parameter in model.named_parameters()}
print(json.dumps({"read": sum(read), "error": error, "tensors": tensors}))
"""


@pytest.mark.parametrize(
    ("kind", "most"), [("shares", 1), ("computes", 2), ("fails", 1), ("cheap", 2)]
)
def test_chunks_are_read_once_or_each_rank_reads_alone(
    kind: str, most: int, tmp_path: Path, processes: Processes
) -> None:
    if kind == "cheap":  # unickpt's own, on this machine
        unickpt.save(tmp_path / "stored", STATE)
    else:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "stored", STATE)
    ranks = processes.torch(2, RANK, tmp_path / "stored", kind)
    ended = [json.loads(lines.splitlines()[-1]) for lines in processes.finish(ranks)]
    assert [end["error"] for end in ended] == [None, "provoked" if kind == "fails" else None]
    assert sum(end["read"] for end in ended) == most * WHOLE
    for rank, end in enumerate(ended[: 1 if kind == "fails" else 2]):
        up, down = STATE["up"][20 * rank :][:20], STATE["down"][:, 30 * rank :][:, :30]
        assert np.array_equal(end["tensors"]["up"], up)
        assert np.array_equal(end["tensors"]["down"], down)
        assert np.array_equal(end["tensors"]["o"], STATE["o"])
