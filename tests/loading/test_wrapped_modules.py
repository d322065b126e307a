"""Modules and optimizers inside of wrappers: stored as what they wrap; see also torch_ranks.py."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import StepLR

import unickpt
from unickpt import LoadMismatch
from unickpt.adapters.torch import NamedOptimizer
from unickpt.adapters.torch_modules import canonical_names


class Inner(torch.nn.Module):
    """It has modules of its own whose names are those that wrappers use."""

    def __init__(self) -> None:
        super().__init__()
        self.module = torch.nn.Linear(2, 3)
        self._orig_mod = torch.nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        return self._orig_mod(self.module(x))


def compiled(module: Any) -> Any:
    """Not with the default backend, whose import takes many seconds."""
    return torch.compile(module, backend="eager")


def plain() -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"a": Inner(), "b": torch.nn.Sequential(Inner(), Inner())})


def wrapped() -> Any:
    """The same module in wrappers of several kinds, also deep inside, and within each other."""
    model = plain()
    model["b"][0] = compiled(model["b"][0])
    model["b"][1].module = checkpoint_wrapper(torch.nn.DataParallel(model["b"][1].module))
    model["a"] = checkpoint_wrapper(compiled(model["a"]))
    return compiled(checkpoint_wrapper(torch.nn.DataParallel(model)))


def ones(model: Any) -> Any:
    with torch.no_grad():
        for tensor in model.state_dict(keep_vars=True).values():
            tensor.fill_(1)
    return model


def same(a: Any, b: Any) -> bool:
    return all(
        torch.equal(x, y)
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def test_a_wrapped_module_has_the_names_of_the_module(tmp_path: Path) -> None:
    model = wrapped()
    assert any("module." in key for key in model.state_dict())
    unickpt.save(tmp_path / "c", {"m": model})
    unickpt.save(tmp_path / "d", {"m": plain()})
    stored = unickpt.open(tmp_path / "c")
    assert set(stored) == {f"m/{key}" for key in plain().state_dict()}
    assert set(stored) == set(unickpt.open(tmp_path / "d"))
    assert "m/b.1.module.weight" in stored  # which is no wrapper's


@pytest.mark.parametrize("name", ["c", "d"])
def test_a_module_loads_wrapped_or_not_what_was_wrapped_or_not(name: str, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"m": wrapped()})
    unickpt.save(tmp_path / "d", {"m": plain()})
    for other in (ones(plain()), ones(wrapped())):
        report = unickpt.load(tmp_path / name, {"m": other}, return_report=True)[1]
        assert same(other, plain())
        assert not report.renamed


def test_a_wrapped_module_on_the_meta_device(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"m": plain()})
    with torch.device("meta"):
        model = compiled(plain())
    assert unickpt.load(tmp_path / "c", {"m": model})["m"] is model
    assert same(model, plain())


def test_a_plain_dict_keeps_its_keys(tmp_path: Path) -> None:
    state = wrapped().state_dict()
    unickpt.save(tmp_path / "c", {"m": state})
    assert set(unickpt.open(tmp_path / "c")) == {f"m/{key}" for key in state}


def test_names_that_would_become_one_stay() -> None:
    model = compiled(torch.nn.Linear(2, 3))
    names = ["_orig_mod.weight", "weight", "_orig_mod.bias"]  # as a hook may give them
    assert canonical_names(model, names) == {
        "_orig_mod.weight": "_orig_mod.weight", "weight": "weight", "_orig_mod.bias": "bias",
    }  # fmt: skip


class Sized(torch.nn.Module):
    _version = 5

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.ones(2))
        self.versions: list[Any] = []

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: Any, *more: Any
    ) -> None:
        self.versions.append(local_metadata.get("version"))
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *more)


def test_versions_of_modules_come_through(tmp_path: Path) -> None:
    sized = Sized()
    model = compiled(torch.nn.Sequential(sized))
    unickpt.save(tmp_path / "c", {"m": model})
    unickpt.load(tmp_path / "c", {"m": model})
    assert sized.versions == [5]


# --- checkpoints that still have the names of wrappers -------------------------------------------


def test_older_checkpoints_load_and_the_report_tells(tmp_path: Path) -> None:
    model = torch.nn.DataParallel(plain())
    unickpt.save(tmp_path / "c", {"m": dict(model.state_dict()), "module.x": 1})
    for other in (ones(plain()), ones(wrapped())):
        like = {"m": other, "module.x": 0}
        _, report = unickpt.load(tmp_path / "c", like, return_report=True)
        assert same(other, plain())
        assert ("m/module.a.module.weight", "m/a.module.weight") in report.renamed
        assert len(report.renamed) == len(plain().state_dict())
        assert "loaded without 'module' in its name" in str(report)
    like = {"m": {key: torch.zeros_like(v) for key, v in plain().state_dict().items()}}
    _, report = unickpt.load(tmp_path / "c", like, strict=False, return_report=True)
    assert report.skipped == ("module.x",)


def test_names_that_may_mean_two_leaves_are_not_guessed(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"module.w": torch.ones(2), "_orig_mod.w": torch.zeros(2)})
    with pytest.raises(LoadMismatch, match=r"under '_orig_mod\.', and also under 'module\.'"):
        unickpt.load(tmp_path / "c", {"w": torch.zeros(2)})
    unickpt.save(tmp_path / "d", {"w": torch.ones(2), "module.w": torch.zeros(2)})
    with pytest.raises(LoadMismatch, match=r"module\.w +unexpected"):
        unickpt.load(tmp_path / "d", {"w": torch.zeros(2)})
    # A component is left out of what is stored, and never out of what is asked.
    unickpt.save(tmp_path / "e", {"w": torch.ones(2)})
    with pytest.raises(LoadMismatch, match="wrapper"):
        unickpt.load(tmp_path / "e", {"module.w": torch.zeros(2)})


def trained(model: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return model, optimizer


def test_named_optimizers_have_the_names_of_the_module(tmp_path: Path) -> None:
    model, optimizer = trained(wrapped())
    named = NamedOptimizer(optimizer, model)
    assert named.names == [name for name, _ in plain().named_parameters()]
    unickpt.save(tmp_path / "c", {"o": named})
    # As it was stored before: with the names that the wrapped module gave.
    named.names = [f"_orig_mod.module.{name}" for name in named.names]
    unickpt.save(tmp_path / "d", {"o": named})
    for name in "cd":
        for other in (plain(), wrapped()):
            fresh = torch.optim.AdamW(other.parameters())
            like = {"o": NamedOptimizer(fresh, other)}
            _, report = unickpt.load(tmp_path / name, like, return_report=True)
            assert bool(report.renamed) == (name == "d")
            assert fresh.param_groups[0]["lr"] == 0.5
            for p, q in zip(other.parameters(), model.parameters(), strict=True):
                for slot, value in optimizer.state[q].items():
                    assert torch.equal(fresh.state[p][slot], value)


# --- wrappers of optimizers ----------------------------------------------------------------------


class Thin:
    """A wrapper of one's own that is no torch optimizer."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)


class Accelerated(Thin, torch.optim.Optimizer):
    """As accelerate's: it never calls the constructor of torch's optimizer."""

    @property
    def state(self) -> Any:
        return self.optimizer.state


@pytest.mark.parametrize("wrap", [Accelerated, Thin, lambda x: Thin(Accelerated(x))])
def test_wrapped_optimizers_guard_and_resume(wrap: Any, tmp_path: Path) -> None:
    model, optimizer = trained(torch.nn.Linear(300, 300))
    outer = wrap(optimizer)
    before = model.weight.detach().clone()
    options = unickpt.SaveOptions(staging="lazy")
    with unickpt.Checkpointer(tmp_path, optimizers=[outer], options=options) as checkpointer:
        checkpointer.save(1, {"m": model, "o": outer})
        outer.step()  # waits until all is copied
        assert not torch.equal(model.weight, before)
    assert len(optimizer._optimizer_step_pre_hooks) == 0
    other = torch.nn.Linear(300, 300)
    fresh = torch.optim.AdamW(other.parameters())
    for _ in range(2):  # the second time it has a state
        like = {"m": other, "o": wrap(fresh)}
        unickpt.load(tmp_path / "step_1", like)
        assert torch.equal(other.weight, before)
        assert fresh.state[other.weight]["step"] == 1
        assert fresh.param_groups[0]["lr"] == 0.5
    assert NamedOptimizer(wrap(optimizer), model).names == ["weight", "bias"]


def test_a_scheduler_is_no_optimizer(tmp_path: Path) -> None:
    _, optimizer = trained(torch.nn.Linear(2, 3))
    scheduler = StepLR(optimizer, 5)
    unickpt.save(tmp_path / "c", {"s": scheduler})
    assert "s/last_epoch" in unickpt.open(tmp_path / "c").values
    with pytest.raises(ValueError, match=r"StepLR is not a torch\.optim\.Optimizer"):
        unickpt.Checkpointer(tmp_path / "run", optimizers=[scheduler])


def test_state_dicts_of_a_kind_of_their_own(tmp_path: Path) -> None:
    """A module may give any mapping; its kind and its order stay."""
    model = compiled(torch.nn.Linear(2, 3))
    unickpt.save(tmp_path / "c", model)
    got = unickpt.load(tmp_path / "c")
    assert list(got) == ["weight", "bias"]
    assert isinstance(got, OrderedDict)
