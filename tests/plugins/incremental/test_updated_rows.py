"""The rows that optimizers update, recorded for `changed=`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.processes import Processes
from torch import nn

import unickpt
from unickpt import Checkpointer, SaveOptions, StorageError
from unickpt.errors import StateChanged
from unickpt.plugins.incremental.updated_rows import UpdatedRows
from unickpt.storage.data_files import DataFile

ROWS, COLUMNS = 600, 64
OPTIONS = SaveOptions(chunk_bytes=4096, fsync=False)
OPTIMIZERS = {
    "SparseAdam": lambda p: torch.optim.SparseAdam(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
}
MOMENTS = {"SparseAdam": ("exp_avg", "exp_avg_sq"), "SGD": (), "Adagrad": ("sum",)}


def job(kind: str, *, bag: bool = False) -> tuple[dict[str, Any], UpdatedRows]:
    torch.manual_seed(3)
    table: Any = nn.EmbeddingBag if bag else nn.Embedding
    model = table(ROWS, COLUMNS, sparse=kind == "SparseAdam")
    optimizer: Any = OPTIMIZERS[kind](model.parameters())
    names = ["model/weight", *(f"optimizer/state/0/{name}" for name in MOMENTS[kind])]
    rows = UpdatedRows(optimizer, dict.fromkeys(names, model.weight))
    return {"model": model, "optimizer": optimizer}, rows


def look_up(state: dict[str, Any], numbers: list[int]) -> None:
    state["model"](torch.tensor([numbers])).square().sum().backward()


def train(state: dict[str, Any], numbers: list[int]) -> None:
    look_up(state, numbers)
    state["optimizer"].step()
    state["optimizer"].zero_grad()


def updated(rows: UpdatedRows) -> list[int]:
    numbers: list[int] = np.flatnonzero(rows.changed()["model/weight"]).tolist()
    return numbers


def is_stored(path: str, state: dict[str, Any]) -> None:
    stored = unickpt.load(path)
    assert np.array_equal(stored["model"]["weight"], state["model"].weight.detach().numpy())
    moments = state["optimizer"].state_dict()["state"].get(0, {})
    for name, value in moments.items():
        assert np.array_equal(stored["optimizer"]["state"][0][name], value), name
    assert unickpt.verify(path).ok


@pytest.mark.integration  # takes seconds
@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_saves_write_the_rows_that_were_updated(kind: str, bag: bool, tmp_path: Path) -> None:
    state, rows = job(kind, bag=bag)
    train(state, [1, 2])
    rng = np.random.default_rng(0)
    with Checkpointer(tmp_path, reuse=True, keep_last=2, options=OPTIONS) as run:
        for step in range(20):
            train(state, rng.integers(0, ROWS, 3).tolist())
            pending = run.save(step, state, changed=rows.changed())
            rows.saved(pending)
            pending.wait_staged()
            report = pending.result()
            is_stored(run.path(step), state)
            if step:
                arrays = 1 + len(MOMENTS[kind])
                # The chunks of three rows, and those whose turn it is.
                assert report.staged_bytes <= arrays * (3 + 3) * 4096 + 100


def test_gradients_that_are_accumulated_across_a_save_count_when_they_are_used(
    tmp_path: Path,
) -> None:
    state, rows = job("SGD")
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        for step in range(2):
            rows.saved(run.save(step, state, changed=rows.changed(), wait=True))
        look_up(state, [7])
        assert updated(rows) == []
        rows.saved(run.save(2, state, changed=rows.changed(), wait=True))
        train(state, [500])
        assert updated(rows) == [7, 500]
        rows.saved(run.save(3, state, changed=rows.changed(), wait=True))
        is_stored(run.path(3), state)
        assert updated(rows) == []


def test_rows_count_until_a_save_has_committed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state, rows = job("SparseAdam")
    train(state, [1])
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        rows.saved(run.save(0, state, changed=rows.changed(), wait=True))
        train(state, [3])
        assert updated(rows) == [3]
        train(state, [4])
        assert updated(rows) == [3, 4], "no save was announced"
        with pytest.raises(unickpt.UnsupportedLeaf):
            run.save(1, state | {"bad": object()}, changed=rows.changed())
        assert updated(rows) == [3, 4]
        with monkeypatch.context() as patch:

            def full(*_: Any) -> None:
                raise StorageError("the disk is full")

            patch.setattr(DataFile, "add", full)
            pending = run.save(1, state, changed=rows.changed())
            rows.saved(pending)
            with pytest.raises(StorageError, match="full"):
                pending.result()
        assert pending.failed()
        train(state, [5])
        assert updated(rows) == [3, 4, 5]
        pending = run.save(2, state, changed=rows.changed())
        rows.saved(pending)
        pending.result()
        assert not pending.failed()
        is_stored(run.path(2), state)
        assert updated(rows) == []


def test_several_saves_in_flight(tmp_path: Path) -> None:
    state, rows = job("Adagrad")
    pending = []
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        for step in range(8):
            train(state, [step, 599 - step])
            pending.append(run.save(step, state, changed=rows.changed()))
            rows.saved(pending[-1])
            pending[-1].wait_staged()
        for save in pending:
            save.result()
        is_stored(run.path(7), state)
        assert updated(rows) == []


@pytest.mark.parametrize(
    ("optimizer", "why"),
    [
        (lambda p: torch.optim.Adam(p), "Adam may change rows without a gradient"),
        (lambda p: torch.optim.AdamW(p), "AdamW may change rows"),
        (lambda p: torch.optim.SGD(p, momentum=0.9), r"SGD with .*momentum.*0\.9"),
        (lambda p: torch.optim.Adagrad(p, weight_decay=0.1), "Adagrad with .*weight_decay"),
    ],
)
def test_optimizers_that_change_other_rows_are_refused(optimizer: Any, why: str) -> None:
    weight = nn.Parameter(torch.ones(4, 2))
    with pytest.raises(ValueError, match=why):
        UpdatedRows(optimizer([weight]), {"w": weight})
    with pytest.raises(ValueError, match="none of the optimizer's"):
        UpdatedRows(torch.optim.SGD([weight]), {"w": torch.ones(4, 2)})


def test_settings_are_checked_in_each_step() -> None:
    state, rows = job("SGD")
    state["optimizer"].param_groups[0]["weight_decay"] = 0.1
    with pytest.raises(ValueError, match="weight_decay"):
        train(state, [1])
    rows.remove()
    train(state, [1])


def test_a_wrong_trust_is_found_by_the_samples(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Embedding(ROWS, COLUMNS)
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    rows = UpdatedRows(state["optimizer"], {"model/weight": model.weight}, trust=True)
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        for step in range(2):
            rows.saved(run.save(step, state, changed=rows.changed(), wait=True))
        train(state, [1])
        with pytest.raises(StateChanged, match="'model/weight'"):
            run.save(2, state, changed=rows.changed()).result()


def test_a_closure_may_use_any_gradient() -> None:
    state, rows = job("SGD")
    state["optimizer"].step(lambda: torch.zeros(()))
    assert len(updated(rows)) == ROWS


def test_a_gradient_that_is_not_a_number_counts() -> None:
    state, rows = job("SGD")
    weight = state["model"].weight
    weight.grad = torch.zeros_like(weight)
    weight.grad[5, 3] = torch.nan
    state["optimizer"].step()
    assert updated(rows) == [5]


JOB = """
import sys
import numpy as np, torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
import unickpt
from unickpt.plugins.incremental.updated_rows import UpdatedRows

dist.init_process_group("gloo")
options = unickpt.SaveOptions(chunk_bytes=4096, fsync=False, timeout_s=60)
for kind in ("ddp", "fsdp"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(1001, 64))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    else:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (weight,) = model.parameters()
    rows = UpdatedRows(optimizer, {"model/0.weight": weight})
    with unickpt.Checkpointer(f"{sys.argv[1]}/{kind}", reuse=True, options=options) as run:
        for step in range(6):
            for batch in range(2):  # each rank looks up other rows
                number = 100 * step + 10 * batch + dist.get_rank()
                model(torch.tensor([number, 1000 - number])).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            changed = rows.changed()
            pending = run.save(step, {"model": model}, changed=changed)
            rows.saved(pending)
            report = pending.result()
            if step:
                assert changed["model/0.weight"].sum() <= 8 * 2, changed
                assert report.written_bytes <= 8 * 4096
        (weight,) = model.parameters()
        full = weight.full_tensor() if kind == "fsdp" else weight
        stored = unickpt.load(run.path(5))["model"]["0.weight"]
        assert np.array_equal(stored, full.detach().numpy())
dist.destroy_process_group()
"""


def test_other_processes_look_up_other_rows(processes: Processes, tmp_path: Path) -> None:
    processes.finish(processes.torch(2, JOB, tmp_path))


def test_a_zero_that_changes_its_sign_is_an_update() -> None:
    weight = torch.nn.Parameter(-torch.zeros(3, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    rows = UpdatedRows(optimizer, {"w": weight})
    weight.grad = torch.tensor([[0.0, 0.0], [0.0, -0.0], [0.0, 0.0]])
    optimizer.step()
    assert weight.signbit().all(1).tolist() == [True, False, True]
    assert rows.changed()["w"].tolist() == [False, True, False]
