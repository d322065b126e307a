"""What cannot be taken is an error before anything is written into the caller's state."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch, UnsupportedLeaf

torch = pytest.importorskip("torch")

from unickpt.adapters.torch import NamedOptimizer  # noqa: E402


def of(kind: Any = torch.optim.AdamW, groups: Any = None, **settings: Any) -> dict[str, Any]:
    model = torch.nn.Linear(2, 3)
    torch.nn.init.zeros_(model.weight)
    named = dict(model.named_parameters())
    parameters = [{"params": [named[n] for n in g]} for g in groups or [["weight", "bias"]]]
    return {"a": model, "optim": NamedOptimizer(kind(parameters, **settings), model)}


def stepped(tree: dict[str, Any]) -> dict[str, Any]:
    optimizer = tree["optim"].optimizer
    tree["a"](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    return tree


def assert_untouched(tree: dict[str, Any]) -> None:
    assert not tree["a"].weight.any()
    assert not tree["optim"].optimizer.state


KINDS = {
    torch.optim.Adam: "exp_avg", torch.optim.AdamW: "exp_avg_sq", torch.optim.RAdam: "step",
    torch.optim.NAdam: "mu_product", torch.optim.Adamax: "exp_inf", torch.optim.ASGD: "ax",
    torch.optim.Adadelta: "acc_delta", torch.optim.RMSprop: "square_avg",
    torch.optim.Rprop: "prev",
}  # fmt: skip


@pytest.mark.parametrize(("kind", "slot"), KINDS.items())
def test_a_state_that_lacks_a_slot_is_refused_before_anything_is_written(
    kind: Any, slot: str, tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "whole", stepped(of(kind)))
    whole = unickpt.load(tmp_path / "whole", only=["a/*", "optim/**"])
    for state in whole["optim"]["state"].values():
        del state[slot]
    unickpt.save(tmp_path / "part", whole)
    for kwargs in ({}, {"strict": False}, {"missing": "keep"}):
        tree = of(kind)
        with pytest.raises(LoadMismatch, match=rf"optim/state/weight.*'{slot}' is not stored"):
            unickpt.load(tmp_path / "part", tree, **kwargs)
        assert_untouched(tree)
    tree = of(kind)
    unickpt.load(tmp_path / "part", tree, skip="optim/state/**")  # as the message says
    assert tree["a"].weight.any()
    assert not tree["optim"].optimizer.state


def test_the_slots_that_are_required_are_those_that_torch_creates(tmp_path: Path) -> None:
    from unickpt.adapters.torch_fresh_state import _SLOTS

    for name in sorted(_SLOTS.keys() - {"SparseAdam", "Muon"}):
        tree = stepped(of(getattr(torch.optim, name)))
        state = tree["optim"].optimizer.state[tree["a"].weight]
        assert set(_SLOTS[name]) <= state.keys(), name


def test_other_groups_are_noticed_before_anything_is_written(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", stepped(of(groups=[["weight"], ["bias"]])))
    tree = of(groups=[["bias"], ["weight"]])
    with pytest.raises(LoadMismatch, match="group 0 had other parameters"):
        unickpt.load(tmp_path / "c", tree, cast=True)
    assert_untouched(tree)


def test_hyper_parameters_that_are_arrays_are_loaded(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", stepped(of(lr=torch.tensor(0.5))))
    tree = unickpt.load(tmp_path / "c", of(lr=torch.tensor(0.25)))
    assert tree["optim"].optimizer.param_groups[0]["lr"] == 0.5


def test_untied_weights_of_a_module_without_memory_are_noticed_first(tmp_path: Path) -> None:
    unickpt.save(
        tmp_path / "c",
        {"a": np.ones(3), "b": {"0.weight": torch.ones(2, 2), "1.weight": torch.zeros(2, 2)}},
    )
    with torch.device("meta"):
        module = torch.nn.Sequential(*(torch.nn.Linear(2, 2, bias=False) for _ in range(2)))
    module[1].weight = module[0].weight
    first = np.zeros(3)
    with pytest.raises(LoadMismatch, match="are tied"):
        unickpt.load(tmp_path / "c", {"a": first, "b": module})
    assert not first.any()


class Refuses:
    """An object whose own function fails."""

    def state_dict(self) -> dict[str, int]:
        return {"x": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        raise KeyError("y")


def test_an_object_that_refuses_its_state_says_that_a_part_was_loaded(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(3), "b": Refuses()})
    with pytest.raises(KeyError) as caught:
        unickpt.load(tmp_path / "c", {"a": np.zeros(3), "b": Refuses()})
    assert "some objects of `like` hold new values" in caught.value.__notes__[0]


@pytest.mark.parametrize("shape", [(4,), (2, 4)])
def test_an_array_of_numpy_whose_elements_share_memory_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(3), "z": np.arange(np.prod(shape)).reshape(shape)})
    steps = (0, 8)[-len(shape) :] if len(shape) > 1 else (0,)
    shared = np.lib.stride_tricks.as_strided(np.zeros(4, int), shape, steps)
    first = np.zeros(3)
    with pytest.raises(UnsupportedLeaf, match="share memory"):
        unickpt.load(tmp_path / "c", {"a": first, "z": shared})
    assert not first.any()
