"""The preset `torchtitan`: a step of unickpt's manager <-> one of torchtitan's own (DCP)."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.torch_versions import DCP_ALONE

import unickpt

torch = pytest.importorskip("torch")


@pytest.mark.filterwarnings("ignore")  # of torch, about a job of one process
def test_dcp_loads_an_export_with_the_keys_of_torchtitan(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp

    weights = {"tok.weight": torch.rand(3, 2), "layers.0.w": torch.rand(4)}
    rest = {
        "optimizer": {"state.tok.exp_avg": torch.rand(3, 2), "param_groups.tok.lr": 0.1},
        "lr_scheduler": {"last_epoch": 3},
        "dataloader": {"dp_rank_0": b"bytes", "buffer": [1, 2], "empty": []},
        "train_state": {"step": torch.tensor(3)},
    }  # fmt: skip
    unickpt.save(tmp_path / "ours", {"model": weights, **rest})
    rules = unickpt.Rules.preset("torchtitan")
    unickpt.convert(tmp_path / "ours", tmp_path / "theirs", to="dcp", rules=rules)
    found = {name: torch.zeros_like(value) for name, value in weights.items()}
    found |= {
        "optimizer": {"state.tok.exp_avg": torch.zeros(3, 2), "param_groups.tok.lr": 0},
        "lr_scheduler": {"last_epoch": 0},
        "dataloader": {"dp_rank_0": b"", "buffer": [], "empty": [0]},
        "train_state": {"step": torch.tensor(0)},
    }  # fmt: skip
    dcp.load(found, checkpoint_id=tmp_path / "theirs", **DCP_ALONE)
    for name, value in weights.items():
        assert torch.equal(found.pop(name), value)
    assert str(found) == str(rest)
    unickpt.convert(tmp_path / "theirs", tmp_path / "again", rules=rules.inverse)
    assert unickpt.diff(tmp_path / "again", tmp_path / "ours").same
