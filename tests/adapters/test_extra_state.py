"""Extra states of modules, which may have another form when they are fresh."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unickpt


class WithState(torch.nn.Module):
    def __init__(self, state: Any, device: str = "cpu") -> None:
        super().__init__()
        self.weight, self.state = torch.nn.Parameter(torch.ones(2, device=device)), state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def same(a: Any, b: Any) -> bool:
    if isinstance(a, io.BytesIO):
        return isinstance(b, io.BytesIO) and a.getvalue() == b.getvalue()
    if isinstance(a, torch.Tensor):
        return type(b) is torch.Tensor and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return type(b) is np.ndarray and a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and bool(a == b)


CASES = {
    "empty tensor": (torch.tensor([1, 2, 3], dtype=torch.uint8), torch.empty(0, dtype=torch.uint8)),
    "none, then a dict": ({"amax": torch.ones(3, dtype=torch.bfloat16), "n": 3}, None),
    "none, then a tensor": (torch.ones(3), None),
    "none, then bytes": (io.BytesIO(b"abc"), None),
    "list that grew": ([1, 2, 3], []),
    "list that became shorter": ([1], [1, 2, 3]),
    "dict that grew": ({"a": 1, "b": (2, [torch.ones(1)])}, {"a": 0}),
    "another structure": ({"a": [1]}, [torch.ones(2), {"b": 1}]),
    "arrays of NumPy": ({"a": np.arange(4)}, {"a": np.arange(2)}),
    "bytes": (io.BytesIO(b"abc"), io.BytesIO()),
    "as it was": ({"a": torch.ones(2), "n": 1}, {"a": torch.zeros(2), "n": 0}),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("case", CASES)
def test_a_fresh_module_gets_its_extra_state_as_it_was_saved(
    case: str, device: str, tmp_path: Path
) -> None:
    saved, fresh = CASES[case]
    inside = torch.nn.Sequential(torch.nn.Linear(1, 1), WithState(saved))
    for step in range(2):  # the second save knows the tree
        unickpt.save(tmp_path / f"{step}", {"model": inside})
        model = torch.nn.Sequential(torch.nn.Linear(1, 1), WithState(fresh, device))
        if device == "meta":
            model.to("meta")
        unickpt.load(tmp_path / f"{step}", {"model": model})
        assert same(saved, model[1].state), model[1].state
        assert torch.equal(model[1].weight, torch.ones(2))


def test_an_extra_state_below_a_wrapper_is_found_by_its_canonical_name(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"model": WithState([1, 2])})
    model = WithState([])
    unickpt.load(tmp_path / "c", {"model": torch.nn.DataParallel(model)})
    assert model.state == [1, 2]


def test_a_buffer_of_bytes_that_changed_is_saved_as_it_is(tmp_path: Path) -> None:
    buffer = io.BytesIO(b"abc")
    tree = {"buffer": buffer, "x": np.ones(2)}
    unickpt.save(tmp_path / "a", tree)
    buffer.write(b"xyz!")
    unickpt.save(tmp_path / "b", tree)
    assert unickpt.load(tmp_path / "b")["buffer"] == b"xyz!"
    assert unickpt.load(tmp_path / "a", {**tree})["buffer"].getvalue() == b"abc"


def test_parameters_of_other_names_are_still_refused(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"model": torch.nn.Sequential(torch.nn.Linear(1, 1))})
    with pytest.raises(unickpt.LoadMismatch, match=r"model/0.bias +unexpected"):
        unickpt.load(tmp_path / "c", {"model": torch.nn.Sequential(torch.nn.Linear(1, 1, False))})
