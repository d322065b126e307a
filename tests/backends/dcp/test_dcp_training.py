"""Training goes on from what torch saved with `flatten_optimizer_state_dict=True`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.processes import Processes

import unickpt
from unickpt import LoadMismatch, Rules

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:.*single process.*:UserWarning"),
]


class Net(torch.nn.Module):
    """Parameters whose names have one component, and several."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(4))
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x * self.scale)


def made(
    kind: str = "AdamW", seed: int = 0, lr: float = 1e-2, wrap: Callable[[Any], Any] = lambda m: m
) -> tuple[Any, Any]:
    """A module and its optimizer, of two groups with hyper-parameters of their own."""
    torch.manual_seed(seed)
    module = wrap(Net())
    wide = [p for p in module.parameters() if p.ndim > 1]
    narrow = [p for p in module.parameters() if p.ndim < 2]
    settings = {"momentum": 0.9} if kind == "SGD" else {}
    groups = [{"params": wide, "weight_decay": 0.1}, {"params": narrow, "lr": lr / 3}]
    return module, getattr(torch.optim, kind)(groups, lr=lr, **settings)


def step(module: Any, optimizer: Any, number: int) -> float:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    loss = (module(data) - 1).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def saved(path: Path, module: Any, optimizer: Any, name: str = "optim") -> Path:
    options = state_dict.StateDictOptions(flatten_optimizer_state_dict=True)
    weights, flat = state_dict.get_state_dict(module, optimizer, options=options)
    assert all(key.startswith(("state.", "param_groups.")) for key in flat)
    state: dict[str, Any] = {"model": weights}
    *above, last = name.split("/")
    state = {above[0]: {**state, last: flat}} if above else {**state, last: flat}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=path)
    return path


def load(path: Path, module: Any, optimizer: Any) -> None:
    from unickpt.adapters.torch import NamedOptimizer

    like = {"model": module, "optim": NamedOptimizer(optimizer, module)}
    unickpt.load(path, like, rules=Rules.preset("dcp"))


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("AdamW", "optim"),
        ("Adam", "app/optim"),
        ("SGD", "optimizer"),
        ("Adagrad", "app/optimizer"),
        ("RMSprop", "optim"),
    ],
)
def test_training_goes_on(kind: str, name: str, used: bool, tmp_path: Path) -> None:
    module, optimizer = made(kind)
    for number in range(3):
        step(module, optimizer, number)
    path = saved(tmp_path / "c", module, optimizer, name)
    expected = [step(module, optimizer, number) for number in range(3, 7)]
    other, into = made(kind, seed=1, lr=7.0)
    if used:
        step(other, into, 50)
    load(path, other, into)
    assert [group["lr"] for group in into.param_groups] == [1e-2, 1e-2 / 3]
    assert [step(other, into, number) for number in range(3, 7)] == expected
    for ours, theirs in zip(other.parameters(), module.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_groups_may_be_others_if_their_settings_are_equal(tmp_path: Path) -> None:
    module, optimizer = made()
    step(module, optimizer, 0)
    path = saved(tmp_path / "c", module, optimizer)
    other, _ = made(seed=1)
    every = torch.optim.AdamW([{"params": [p]} for p in other.parameters()], lr=7.0)
    load(path, other, every)
    expected = {id(p): g["lr"] for g in optimizer.param_groups for p in g["params"]}
    ours = [group["lr"] for group in every.param_groups]
    assert ours == [expected[id(p)] for p in module.parameters()]
    assert step(other, every, 1) == step(module, optimizer, 1)
    one = torch.optim.AdamW(made(seed=1)[0].parameters())
    with pytest.raises(ValueError, match="not the module's"):
        load(path, other, one)
    one = torch.optim.AdamW(other.parameters())
    with pytest.raises(LoadMismatch, match=r"in group 0, 'lr' was 0\.0033.*for 'scale' and 0\.01"):
        load(path, other, one)


ON_TWO_RANKS = """
import sys
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/backends"]
import torch
import torch.distributed as dist
import test_dcp_training as case
from pathlib import Path
from torch.distributed.fsdp import fully_shard

def steps(module, optimizer, numbers):
    found = []
    for number in numbers:
        mean = torch.tensor(case.step(module, optimizer, 2 * number + dist.get_rank()))
        dist.all_reduce(mean)
        found.append(float(mean / 2))
    return found

dist.init_process_group("gloo")
module, optimizer = case.made(wrap=fully_shard)
steps(module, optimizer, range(3))
case.saved(Path(sys.argv[1]), module, optimizer)
expected = steps(module, optimizer, range(3, 7))
other, into = case.made(seed=1, lr=7.0, wrap=fully_shard)
case.load(Path(sys.argv[1]), other, into)
assert steps(other, into, range(3, 7)) == expected, expected
dist.destroy_process_group()
"""


def test_two_ranks_of_fsdp_and_one_process_after_them(processes: Processes, tmp_path: Path) -> None:
    processes.finish(processes.torch(2, ON_TWO_RANKS, tmp_path / "c", TESTS))
    module, optimizer = made(seed=1, lr=7.0)
    load(tmp_path / "c", module, optimizer)
    ours = {name: optimizer.state[p]["exp_avg"] for name, p in module.named_parameters()}
    like = {"optim": {f"state.{name}.exp_avg": torch.empty_like(p) for name, p in ours.items()}}
    dcp.load(like, checkpoint_id=tmp_path / "c")
    for name, slot in ours.items():
        assert torch.equal(like["optim"][f"state.{name}.exp_avg"], slot)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2, 1e-2 / 3]
