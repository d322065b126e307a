"""Leaves that are not stored, but are the memory of one that is: of tied weights, Hugging Face's
files hold only one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import unickpt
from unickpt import LoadMismatch

VALUES = torch.arange(15.0).reshape(5, 3)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize("as_module", [True, False])
def test_the_error_says_how_a_tied_weight_is_loaded(tmp_path: Path, as_module: bool) -> None:
    unickpt.save(tmp_path / "c", {"embed.weight": VALUES})  # as a file of Hugging Face has it
    model = Model()
    like = model if as_module else model.state_dict()
    said = "'head.weight' is the memory of 'embed.weight', which is stored"
    with pytest.raises(LoadMismatch, match=said):
        unickpt.load(tmp_path / "c", like)
    unickpt.load(tmp_path / "c", like, missing="keep")
    assert torch.equal(model.head.weight, VALUES)
    with pytest.raises(LoadMismatch) as error:
        unickpt.load(tmp_path / "c", {"embed.weight": VALUES.clone(), "x": VALUES})
    assert "is the memory of" not in str(error.value)
