"""Models like those of vLLM and SGLang, loaded from any checkpoint: all of a parameter, or an
error that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.served_checkpoints import SAVES

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


def load(default_path: Path, model: torch.nn.Module, **settings: Any) -> None:
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


LLAMA = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
LLAMA |= {"vocab_size": 128, "num_key_value_heads": 2, "intermediate_size": 96}


class Rank(torch.nn.Module):
    """The rows of each matrix of a model that a rank of an engine has.

    Arguments:
        state: of the model.
        rank, count: which of how many.
    """

    def __init__(self, state: dict[str, torch.Tensor], rank: int, count: int) -> None:
        super().__init__()
        self.rank, self.count = rank, count
        for name, tensor in state.items():
            part = torch.full_like(self.part(tensor), torch.nan)
            self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(part))

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() < 2:
            return tensor
        rows = tensor.shape[0] // self.count
        return tensor.narrow(0, self.rank * rows, rows)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            parameters[name.replace(".", "_")].data.copy_(self.part(tensor))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("system", SAVES)
def test_each_rank_gets_its_part_of_a_checkpoint_of_any_system(
    tmp_path: Path, system: str, count: int
) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    settings = SAVES[system](model, tmp_path / "ckpt", tmp_path)
    files = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    state = dict(model.state_dict())
    for number in range(count):
        rank = Rank(state, number, count)
        load(tmp_path / "ckpt", rank, **settings)
        for name, tensor in state.items():
            parameter = rank.get_parameter(name.replace(".", "_"))
            assert torch.equal(parameter, rank.part(tensor)), name
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == files


def test_what_a_training_state_lacks_is_named(tmp_path: Path) -> None:
    state = {name: torch.zeros(3, 2) for name in "ab"}
    unickpt.save(tmp_path / "ckpt", {"model": {"a": state["a"]}, "b": state["b"], "step": 3})
    with pytest.raises(LoadMismatch, match="does not fill b of Rank"):
        load(tmp_path / "ckpt", Rank(state, 0, 1))


def test_settings(tmp_path: Path) -> None:
    state, model = stored(), Model(False)
    rules = "stored.{n} <-> {n}"
    unickpt.save(tmp_path / "ckpt", {f"stored.{name}": each for name, each in state.items()})
    load(Path("unused"), model, path=str(tmp_path / "ckpt"), rules=rules)
    assert not model.qkv.isnan().any()
    assert Rules.parse(rules)
    with pytest.raises(ValueError, match="extra_config has threads; it takes path, rules"):
        CheckpointLoader({"threads": 3}, "extra_config")


def test_changed_bytes_are_an_error_unless_they_are_not_compared(tmp_path: Path) -> None:
    state = stored()
    unickpt.save(tmp_path / "ckpt", state)
    for file in tmp_path.glob("ckpt/processes/*/00000/d/*"):
        file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
    with pytest.raises(unickpt.CheckpointCorrupt, match="digest"):
        load(tmp_path / "ckpt", Model(False))
    model = Model(False)
    load(tmp_path / "ckpt", model, verify=False)
    assert not torch.equal(model.qkv, torch.cat([state[name] for name in "qkv"]))
    with pytest.raises(TypeError, match="verify='no' must be True or False"):
        CheckpointLoader({"verify": "no"}, "extra_config")


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
