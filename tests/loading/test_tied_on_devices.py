"""Tensors on a device that share memory: each gets what was stored, once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from support.simulated import simulate_torch

import unickpt


def test_tied_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = torch.arange(4096.0).reshape(64, 64)
    unickpt.save(tmp_path / "c", {"a": tied, "b": tied})
    memory = torch.zeros(64, 64)
    like = {"a": memory, "b": memory.detach()}
    with monkeypatch.context() as patch:
        stream = simulate_torch(patch)
        unickpt.load(tmp_path / "c", like)
        stream.run()
    for tensor in like.values():
        assert np.array_equal(tensor.numpy(), np.arange(4096.0, dtype=np.float32).reshape(64, 64))
