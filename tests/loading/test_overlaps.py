"""Leaves of `like` that share a part of their memory, not all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unickpt
from unickpt import Checkpointer, LoadMismatch, LoadOptions, SaveOptions
from unickpt.types import Box, LocalFragments

FAST = SaveOptions(fsync=False)


class Net(torch.nn.Module):
    """A head that is a slice of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = torch.nn.Embedding(8, 3)
        self.register_buffer("head", self.emb.weight.detach()[:5])


def numpy_pair() -> dict[str, Any]:
    memory = np.zeros(4)
    return {"a": memory[:3], "b": memory[1:]}


def fragments() -> dict[str, Any]:
    memory = np.zeros(4)
    return {"a": LocalFragments((3,), [(Box((0,), (3,)), memory[:3])]), "b": memory[1:]}


def both() -> dict[str, Any]:
    memory = np.zeros(4)
    return {"a": memory[:3], "b": torch.from_numpy(memory)[1:]}


@pytest.mark.parametrize("make", [numpy_pair, fragments, both])
@pytest.mark.parametrize("verify", [True, False])
def test_other_values_for_shared_memory_are_a_mismatch_that_names_both(
    make: Any, verify: bool, tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(3), "b": np.full(3, 2.0)}, options=FAST)
    with pytest.raises(LoadMismatch, match="share a part of their memory") as caught:
        unickpt.load(tmp_path / "c", make(), options=LoadOptions(verify=verify))
    row = next(line for line in str(caught.value).splitlines() if "memory of a" in line)
    assert row.split()[:2] == ["b", "overlap"]


def test_a_sound_step_is_not_passed_over(tmp_path: Path) -> None:
    state = {name: value.clone() for name, value in Net().state_dict().items()}
    with Checkpointer(tmp_path, options=FAST) as run:
        run.save(1, {"model": state}, wait=True)
        run.save(2, {"model": {**state, "head": state["head"] + 1}}, wait=True)
        with pytest.raises(LoadMismatch, match=r"model/head .*memory of model/emb\.weight"):
            run.load({"model": Net()}, fallback=True)


def test_the_same_values_for_shared_memory_are_loaded(tmp_path: Path) -> None:
    net, other = Net(), Net()
    flat = np.arange(6.0)
    views = {"flat": flat, "views": [flat[:2], flat[1:5], flat[::2]]}
    unickpt.save(tmp_path / "c", {"model": net, "views": views}, options=FAST)
    zeros = np.zeros(6)
    like = {"flat": zeros, "views": [zeros[:2], zeros[1:5], zeros[::2]]}
    loaded = unickpt.load(tmp_path / "c", {"model": other, "views": like})
    assert torch.equal(other.emb.weight, net.emb.weight)
    assert torch.equal(other.head, net.head)
    assert loaded["views"]["flat"] is zeros
    assert zeros.tolist() == flat.tolist()


def test_memory_that_interleaves_is_not_shared(tmp_path: Path) -> None:
    stored = {"q": np.full((4, 2), 1.0), "k": np.full((4, 3), 2.0), "odd": np.ones((2, 5))}
    unickpt.save(tmp_path / "c", stored, options=FAST)
    fused = torch.zeros(6, 5, dtype=torch.float64)
    like = {"q": fused[:4, :2], "k": fused[:4, 2:], "odd": fused[4:].numpy()}
    unickpt.load(tmp_path / "c", like)
    assert fused[:4].tolist() == [[1, 1, 2, 2, 2]] * 4
    assert fused[4:].tolist() == [[1] * 5] * 2
