"""The preset of DeepSpeed's checkpoints, with slots of optimizers other than Adam."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unickpt
from unickpt import Rules


@pytest.mark.parametrize(
    "slots",
    [
        ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "step"),
        ("momentum_buffer",),
        ("sum", "step"),
        ("square_avg", "grad_avg", "momentum_buffer"),
    ],
)
def test_slots_of_torchs_optimizers(slots: tuple[str, ...], tmp_path: Path) -> None:
    stored = {
        slot: {"up.weight": np.full((2, 3), number, np.float32)}
        for number, slot in enumerate(("fp32", "module", *slots))
    }
    unickpt.save(tmp_path / "c", {**stored, "global_steps": 3})
    unickpt.convert(tmp_path / "c", tmp_path / "own", rules=Rules.preset("deepspeed"))
    found = unickpt.open(tmp_path / "own")
    assert sorted(found.index.arrays) == sorted(
        ["model/up.weight", *(f"optim/state/up.weight/{slot}" for slot in slots)]
    )
    for slot in slots:
        array = found[f"optim/state/up.weight/{slot}"][...]
        assert array.tobytes() == stored[slot]["up.weight"].tobytes()
