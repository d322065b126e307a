"""torch optimizers and schedulers: a resumed run goes on bit for bit as if it had never stopped."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import unickpt

torch = pytest.importorskip("torch")
optim = torch.optim
schedulers = torch.optim.lr_scheduler

OPTIMIZERS = {
    "SGD": lambda ps: optim.SGD(ps, lr=0.1),
    "SGD momentum": lambda ps: optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    "Adam": lambda ps: optim.Adam(ps, lr=0.1),
    "Adam, fused": lambda ps: optim.Adam(ps, lr=0.1, fused=True),
    "Adam, lr a tensor": lambda ps: optim.Adam(ps, lr=torch.tensor(0.1)),
    "AdamW, amsgrad": lambda ps: optim.AdamW(ps, lr=0.1, amsgrad=True),
    "AdamW, groups": lambda ps: optim.AdamW(
        [{"params": ps[:1], "weight_decay": 0.0}, {"params": ps[1:], "lr": 0.3}], lr=0.1
    ),
    "Adadelta": lambda ps: optim.Adadelta(ps),
    "Adafactor": lambda ps: optim.Adafactor(ps, lr=0.1),
    "Adagrad": lambda ps: optim.Adagrad(ps, lr=0.1),
    "Adamax": lambda ps: optim.Adamax(ps, lr=0.1),
    "ASGD": lambda ps: optim.ASGD(ps, lr=0.1, t0=2),
    "NAdam": lambda ps: optim.NAdam(ps, lr=0.1),
    "RAdam": lambda ps: optim.RAdam(ps, lr=0.1),
    "RMSprop": lambda ps: optim.RMSprop(ps, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda ps: optim.Rprop(ps, lr=0.1),
}
SCHEDULERS = {
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4]),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.5, total_steps=10),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.ExponentialLR(o, 0.5)], milestones=[2]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0),
}


class Model(torch.nn.Module):
    """Has what optimizers trip over: a scalar, a frozen and an unused parameter, two dtypes."""

    def __init__(self, dtype: Any, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Linear(6, 9, dtype=dtype)
        self.unused = torch.nn.Parameter(torch.randn(3))
        self.scale = torch.nn.Parameter(torch.randn(()))
        self.last = torch.nn.Linear(9, 4)
        self.first.bias.requires_grad_(False)

    def forward(self, x: Any) -> Any:
        return self.last(self.first(x.to(self.first.weight.dtype)).float().tanh() * self.scale)


class Run:
    """A training run; the same batches in the same order for everyone."""

    def __init__(
        self,
        optimizer: str,
        scheduler: str = "StepLR",
        dtype: Any = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.model = Model(dtype, seed).to(device)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.scheduler = SCHEDULERS[scheduler](self.optimizer)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.step))
            self.optimizer.zero_grad()
            loss = self.model(batch.to(self.model.scale.device)).square().mean()
            loss.backward()
            self.optimizer.step()
            plateau = isinstance(self.scheduler, schedulers.ReduceLROnPlateau)
            self.scheduler.step(*[loss.item()] * plateau)
            losses.append(loss.item())
            self.step += 1
        return losses

    def tree(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "step": self.step,
        }

    def load(self, path: Path) -> Run:
        self.step = unickpt.load(path, self.tree())["step"]
        return self


def bits(state: Any) -> Any:
    """A state_dict with the bits of its tensors, their dtypes and shapes."""
    if isinstance(state, torch.Tensor):
        flat = state.detach().contiguous().reshape(-1)
        return state.dtype, tuple(state.shape), flat.view(torch.uint8).tolist()
    if isinstance(state, dict):
        return {key: bits(value) for key, value in state.items()}
    return [bits(value) for value in state] if isinstance(state, list | tuple) else state


def check_resume(path: Path, steps_before: int = 0, **setting: Any) -> None:
    """Trains 3 steps, saves, trains 3 more; another run loads and must repeat these."""
    run = Run(**setting)
    run.train(3)
    unickpt.save(path, run.tree())
    other = Run(**setting, seed=1)
    other.train(steps_before)
    other.load(path)
    assert other.step == 3
    assert other.train(3) == run.train(3)
    for part in ("model", "optimizer", "scheduler"):
        ours, theirs = getattr(other, part).state_dict(), getattr(run, part).state_dict()
        assert bits(ours) == bits(theirs), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_fresh_optimizer_goes_on(optimizer: str, dtype: Any, tmp_path: Path) -> None:
    check_resume(tmp_path / "c", optimizer=optimizer, dtype=dtype)


@pytest.mark.parametrize("optimizer", ["SGD momentum", "AdamW, groups", "NAdam"])
def test_an_optimizer_that_was_used_goes_on(optimizer: str, tmp_path: Path) -> None:
    check_resume(tmp_path / "c", steps_before=2, optimizer=optimizer, dtype=torch.bfloat16)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_go_on(scheduler: str, tmp_path: Path) -> None:
    check_resume(tmp_path / "c", optimizer="SGD momentum", scheduler=scheduler)


def test_the_state_of_each_parameter_has_a_name(tmp_path: Path) -> None:
    run = Run("AdamW, groups")
    run.train(1)
    unickpt.save(tmp_path / "c", {"opt": run.optimizer})
    stored = unickpt.open(tmp_path / "c")
    trained = [i for i, p in enumerate(run.model.parameters()) if p.grad is not None]
    assert len(trained) == 4  # neither the frozen bias nor the unused parameter
    slots = ("exp_avg", "exp_avg_sq", "step")
    assert set(stored) == {f"opt/state/{i}/{slot}" for i in trained for slot in slots}
    assert stored.values["opt/param_groups/1/lr"] == 0.3


def test_state_is_made_where_it_is_missing_alone(tmp_path: Path) -> None:
    run = Run("AdamW, amsgrad")
    run.train(2)
    unickpt.save(tmp_path / "c", run.tree())
    other = Run("AdamW, amsgrad", seed=1)
    other.model.last.requires_grad_(False)  # has no state after these steps
    other.train(1)
    other.model.last.requires_grad_(True)
    kept = other.optimizer.state[other.model.scale]["exp_avg"]
    other.load(tmp_path / "c")
    assert other.optimizer.state[other.model.scale]["exp_avg"] is kept
    assert other.train(2) == run.train(2)


def test_an_optimizer_without_a_stored_state_is_loaded_too(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", Run("Adam").tree())
    other = Run("Adam", seed=1).load(tmp_path / "c")
    assert other.optimizer.state_dict()["state"] == {}
    assert other.train(2) == Run("Adam").train(2)


def test_an_optimizer_as_the_root(tmp_path: Path) -> None:
    run = Run("Adam")
    run.train(2)
    unickpt.save(tmp_path / "c", run.optimizer)
    other = Run("Adam", seed=1).optimizer
    assert unickpt.load(tmp_path / "c", other) is other
    assert bits(other.state_dict()) == bits(run.optimizer.state_dict())


class Odd(optim.SGD):
    """Has a state_dict of its own form."""

    def state_dict(self) -> dict[str, Any]:
        return {"own": torch.tensor([self.param_groups[0]["lr"]])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.param_groups[0]["lr"] = state["own"].item()


def test_an_optimizer_with_a_state_dict_of_its_own(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    unickpt.save(tmp_path / "c", {"opt": Odd([weight], lr=0.5)})
    other = Odd([weight], lr=0.25)
    unickpt.load(tmp_path / "c", {"opt": other})
    assert other.param_groups[0]["lr"] == 0.5


class Wide(optim.Optimizer):
    """Keeps a float32 master copy and moment of bfloat16 parameters, as many trainers do."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["master"] = p.detach().float()
                    state["moment"] = torch.zeros_like(state["master"])
                state["moment"].mul_(0.9).add_(p.grad.float())
                state["master"].sub_(state["moment"], alpha=group["lr"])
                with torch.no_grad():
                    p.copy_(state["master"])


@pytest.mark.parametrize("steps_before", [0, 1])
def test_state_wider_than_its_parameter_keeps_its_bits(
    steps_before: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Wide", Wide)
    check_resume(tmp_path / "c", steps_before, optimizer="Wide", dtype=torch.bfloat16)


class Nesting(optim.Optimizer):
    """Has all that states can be nested of, and makes an empty one for every parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {}

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"], state["kind"], state["nothing"] = 0, "nested", None
                    state["blocks"] = {
                        "block_0": {"factors": (torch.zeros(2, 3), [torch.ones(4).double(), None])},
                        5: torch.zeros_like(p, dtype=torch.float32),
                    }
                    state["past"], state["empty"] = [], {"inner": []}
                state["steps"] += 1
                state["past"].append(p.grad.float().mean())
                state["blocks"][5].add_(p.grad).mul_(0.5)
                first, (second, _) = state["blocks"]["block_0"]["factors"]
                first.add_(state["past"][-1])
                second.mul_(0.75)
                scale = first.mean() + second.mean() + len(state["past"])
                with torch.no_grad():
                    p.sub_((group["lr"] * scale * state["blocks"][5]).to(p.dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("steps_before", [0, 2])
def test_nested_state_is_made(
    steps_before: int, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Nesting", Nesting)
    check_resume(tmp_path / "c", steps_before, optimizer="Nesting", dtype=dtype)


def test_nested_state_keeps_its_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Nesting", Nesting)
    run = Run("Nesting", dtype=torch.bfloat16)
    run.train(2)
    unickpt.save(tmp_path / "c", run.tree())
    other = Run("Nesting", dtype=torch.bfloat16, seed=1).load(tmp_path / "c")
    state = other.optimizer.state[other.model.first.weight]
    assert (state["steps"], state["kind"], state["nothing"]) == (2, "nested", None)
    assert type(state["past"]) is list
    assert [x.dtype for x in state["past"]] == [torch.float32] * 2
    assert state["empty"] == {"inner": []}
    factors = state["blocks"]["block_0"]["factors"]
    assert type(factors) is tuple
    assert factors[1][1] is None
    assert (factors[0].dtype, factors[1][0].dtype) == (torch.float32, torch.float64)
    assert list(state["blocks"]) == ["block_0", 5]


def test_nested_state_through_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Nesting", Nesting)
    run = Run("Nesting")
    run.train(2)
    unickpt.save(tmp_path / "c", {"old": run.optimizer})
    other = Run("Nesting", seed=1)
    rules = unickpt.Rules.parse("old/{x...} <-> new/{x...}")
    unickpt.load(tmp_path / "c", {"new": other.optimizer}, rules=rules)
    assert bits(other.optimizer.state_dict()) == bits(run.optimizer.state_dict())


def test_a_part_of_a_nested_state_needs_a_step_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIMIZERS, "Nesting", Nesting)
    run = Run("Nesting")
    run.train(1)
    unickpt.save(tmp_path / "c", {"opt": run.optimizer})
    other = Run("Nesting", seed=1)
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'opt/state/1/blocks'.*take one step"):
        unickpt.load(tmp_path / "c", {"opt": other.optimizer}, skip="opt/state/1/blocks/5")


def test_nested_state_without_containers_needs_a_step_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Formats with names alone have dicts where lists were."""
    monkeypatch.setitem(OPTIMIZERS, "Nesting", Nesting)
    run = Run("Nesting")
    run.train(1)
    state = run.optimizer.state_dict()
    state["state"] = {
        at: {**slots, "past": {str(n): x for n, x in enumerate(slots["past"])}}
        for at, slots in state["state"].items()
        if slots
    }
    unickpt.save(tmp_path / "c", {"opt": state})
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"'opt/state/\d/past'.*take one step"):
        unickpt.load(tmp_path / "c", {"opt": Run("Nesting", seed=1).optimizer})


def lbfgs(model: Any) -> Any:
    return optim.LBFGS(
        model.parameters(), lr=0.1, max_iter=3, history_size=4, line_search_fn="strong_wolfe"
    )


def minimise(model: Any, optimizer: Any, steps: int) -> list[float]:
    batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        return loss

    return [optimizer.step(closure).item() for _ in range(steps)]


@pytest.mark.parametrize("steps_before", [0, 1, 5])
@pytest.mark.parametrize("steps", [1, 3])
def test_lbfgs_goes_on(steps: int, steps_before: int, tmp_path: Path) -> None:
    model, other = Model(torch.float32, 0), Model(torch.float32, 1)
    used, fresh = lbfgs(model), lbfgs(other)
    minimise(model, used, steps)
    minimise(other, fresh, steps_before)
    unickpt.save(tmp_path / "c", {"model": model, "opt": used})
    unickpt.load(tmp_path / "c", {"model": other, "opt": fresh})
    assert bits(fresh.state_dict()) == bits(used.state_dict())
    assert minimise(other, fresh, 3) == minimise(model, used, 3)
    assert bits(fresh.state_dict()) == bits(used.state_dict())


def test_muon_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def muon(parameters: Any) -> Any:
        return optim.Muon([p for p in parameters if p.ndim == 2], lr=0.05)

    if not hasattr(optim, "Muon"):
        pytest.skip("torch 2.9 has it first")
    monkeypatch.setitem(OPTIMIZERS, "Muon", muon)
    check_resume(tmp_path / "c", optimizer="Muon", dtype=torch.bfloat16)


def _two_kinds(parameters: Any) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in parameters if (p.ndim == 2) is matrix], "use_muon": matrix}
        for matrix in (True, False)
    ]


# Of packages that need not be installed: CONTRIBUTING.md says how to run these.
ELSEWHERE = {
    "schedulefree.AdamWScheduleFree": lambda of, ps: of(ps, lr=0.1, warmup_steps=2),
    "schedulefree.SGDScheduleFree": lambda of, ps: of(ps, lr=0.1),
    "schedulefree.RAdamScheduleFree": lambda of, ps: of(ps, lr=0.1),
    "torch_optimizer.Shampoo": lambda of, ps: of(ps, lr=0.1, momentum=0.5),
    "pytorch_optimizer.Shampoo": lambda of, ps: of(ps, lr=0.1),
    "pytorch_optimizer.Muon": lambda of, ps: of(_two_kinds(ps), lr=0.1),
}


@pytest.mark.integration  # some of these packages take seconds to import
@pytest.mark.parametrize("name", ELSEWHERE)
def test_optimizers_of_other_packages(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package, kind = name.split(".")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        of = getattr(pytest.importorskip(package), kind)

    def make(parameters: Any) -> Any:
        # No scalars, of which Shampoo has no matrices.
        optimizer = ELSEWHERE[name](of, [p for p in parameters if p.ndim])
        if package == "schedulefree":
            optimizer.train()
        return optimizer

    monkeypatch.setitem(OPTIMIZERS, name, make)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what they use of torch
        check_resume(tmp_path / "c", optimizer=name)


def test_an_optimizer_of_meta_parameters_is_refused(tmp_path: Path) -> None:
    run = Run("Adam")
    run.train(1)
    unickpt.save(tmp_path / "c", {"opt": run.optimizer})
    meta = optim.Adam(Model(torch.float32, 0).to("meta").parameters())
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"opt.*meta device; load the module first"):
        unickpt.load(tmp_path / "c", {"opt": meta})


def test_a_dtype_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    np, ml_dtypes = pytest.importorskip("numpy"), pytest.importorskip("ml_dtypes")
    state = {"state": {0: {"exp_avg": np.zeros(3, ml_dtypes.float8_e3m4)}}, "param_groups": []}
    unickpt.save(tmp_path / "c", {"opt": state})
    adam = optim.Adam([torch.nn.Parameter(torch.ones(3))])
    with pytest.raises(unickpt.UnsupportedLeaf, match="exp_avg': torch has no dtype float8_e3m4"):
        unickpt.load(tmp_path / "c", {"opt": adam})


def test_another_number_of_parameters_is_told_by_name(tmp_path: Path) -> None:
    run = Run("SGD momentum")
    run.train(1)
    unickpt.save(tmp_path / "c", {"opt": run.optimizer})
    fewer = OPTIMIZERS["SGD momentum"](list(run.model.parameters())[:3])
    with pytest.raises(unickpt.LoadMismatch, match=r"opt/state/4/momentum_buffer +unexpected"):
        unickpt.load(tmp_path / "c", {"opt": fewer})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("optimizer", ["SGD momentum", "Adam, fused", "AdamW, amsgrad", "NAdam"])
def test_cuda_training_goes_on(optimizer: str, tmp_path: Path) -> None:
    check_resume(tmp_path / "c", optimizer=optimizer, dtype=torch.bfloat16, device="cuda")
