"""Models like those of vLLM and SGLang, loaded from any checkpoint: all of a parameter, or an
error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.integrations.serving.fill_record import FillRecord
from unickpt.integrations.serving.loading import CheckpointLoader

pytestmark = [pytest.mark.integration, pytest.mark.plugins]
WIDTH = 6


class Model(torch.nn.Module):
    """Has a fused projection, as engines do.

    Arguments:
        says: whether `load_weights` returns what it loaded.
    """

    def __init__(self, says: bool) -> None:
        super().__init__()
        self.qkv = torch.nn.Parameter(torch.full((3 * WIDTH, WIDTH), torch.nan))
        self.columns = torch.nn.Parameter(torch.full((4, WIDTH), torch.nan))
        self.embed = torch.nn.Parameter(torch.full((8, WIDTH), torch.nan))
        self.says = says

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str] | None:
        loaded = set[str]()
        for name, tensor in weights:
            if name in "qkv":
                start, loaded = "qkv".index(name) * WIDTH, loaded | {"qkv"}
                self.qkv.data.narrow(0, start, WIDTH).copy_(tensor)
            elif name in ("left", "right"):
                start, loaded = 3 * (name == "right"), loaded | {"columns"}
                self.columns.data[:, start : start + 3] = tensor
            elif name == "embed":
                loaded.add("embed")
                self.embed.data[:5].copy_(tensor)
                self.embed.data[5:].fill_(0)  # rows that pad the vocabulary
        return loaded if self.says else None


def stored() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    state = {name: torch.randn(WIDTH, WIDTH) for name in "qkv"}
    halves = {name: torch.randn(4, 3) for name in ("left", "right")}
    return {**state, **halves, "embed": torch.randn(5, WIDTH)}


def load(default_path: Path, model: Model, **settings: Any) -> None:
    loader = CheckpointLoader(settings, "extra_config")
    loader.load(model, str(default_path), must_fill=True)


@pytest.mark.parametrize("says", [True, False])
def test_a_model_gets_all_it_needs(tmp_path: Path, says: bool) -> None:
    state, model = stored(), Model(says)
    unickpt.save(tmp_path / "ckpt", {"model": state, "step": 3})
    load(tmp_path / "ckpt", model, under="model")
    assert torch.equal(model.qkv, torch.cat([state[name] for name in "qkv"]))
    assert torch.equal(model.columns, torch.cat([state["left"], state["right"]], 1))
    assert torch.equal(model.embed[:5], state["embed"])
    assert not model.embed[5:].any()


@pytest.mark.parametrize("says", [True, False])
@pytest.mark.parametrize(
    ("missing", "named"), [("k", "qkv"), ("right", "columns"), ("embed", "embed")]
)
def test_what_is_filled_in_part_or_not_at_all_is_named(
    tmp_path: Path, missing: str, named: str, says: bool
) -> None:
    state = stored()
    del state[missing]
    unickpt.save(tmp_path / "ckpt", state)
    with pytest.raises(LoadMismatch, match=f"does not fill {named} of Model"):
        load(tmp_path / "ckpt", Model(says))


def test_settings(tmp_path: Path) -> None:
    state, model = stored(), Model(False)
    rules = "stored.{n} <-> {n}"
    unickpt.save(tmp_path / "ckpt", {f"stored.{name}": each for name, each in state.items()})
    load(Path("unused"), model, path=str(tmp_path / "ckpt"), rules=rules)
    assert not model.qkv.isnan().any()
    assert Rules.parse(rules)
    with pytest.raises(ValueError, match="extra_config has threads; it takes path, rules"):
        CheckpointLoader({"threads": 3}, "extra_config")


def in_other_memory(parameter: torch.nn.Parameter) -> None:
    parameter.data = torch.zeros(parameter.shape)


def transposed(parameter: torch.nn.Parameter) -> None:
    parameter.data.t().copy_(torch.zeros(3, 4))


def by_elements(parameter: torch.nn.Parameter) -> None:
    for row in parameter.data[:, ::2], parameter.data[:, 1::2]:
        row.zero_()


def in_place(parameter: torch.nn.Parameter) -> None:
    torch._foreach_add_([parameter.data[:1], parameter.data[1:]], 1.0)


def all_but_one(parameter: torch.nn.Parameter) -> None:
    parameter.data.view(-1)[1:].fill_(1)


def twice_the_same(parameter: torch.nn.Parameter) -> None:
    for _ in range(2):
        parameter.data[:2].fill_(1)


@pytest.mark.parametrize(
    ("write", "is_filled"),
    [
        (in_other_memory, True),
        (transposed, True),
        (by_elements, True),
        (in_place, True),
        (all_but_one, False),
        (twice_the_same, False),
    ],
)
def test_writes(write: Callable[[torch.nn.Parameter], None], is_filled: bool) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    parameter = torch.nn.Parameter(torch.empty(4, 3))
    record = FillRecord({"w": parameter, "empty": torch.empty(0, 3)})

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            record.add_outputs(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    with Mode():
        write(parameter)
    assert record.incomplete() == ([] if is_filled else ["w"])
