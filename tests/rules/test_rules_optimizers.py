"""Training that goes on in the other framework: optax's state and torch.optim's, through rules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.adapters.torch import NamedOptimizer
from unickpt.errors import RuleError
from unickpt.testing.readers import nested

SIZES = (5, 7, 3)
MODEL = """
    params/up/kernel [i o]    <-> model/up.weight [o i]
    params/up/bias            <-> model/up.bias
    params/down/kernel [i o]  <-> model/down.weight [o i]
    params/scale [e] + 1      <-> model/scale [e]
"""


class Net(torch.nn.Module):
    """`norm` is stored with an offset on the other side, as Gemma's are."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        i, h, o = SIZES
        self.up, self.down = torch.nn.Linear(i, h), torch.nn.Linear(h, o, bias=False)
        self.scale = torch.nn.Parameter(torch.randn(h))

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)) * self.scale)


def forward(params: Any, x: Any, offset: int) -> Any:
    scale = params["scale"] + offset
    hidden = jnp.tanh(x @ params["up"]["kernel"] + params["up"]["bias"]) * scale
    return hidden @ params["down"]["kernel"]


def fresh(seed: int) -> Any:
    i, h, o = SIZES
    rng = np.random.default_rng(seed)
    shapes = {"up": {"kernel": (i, h), "bias": (h,)}, "down": {"kernel": (h, o)}, "scale": (h,)}
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(0, 0.5, s), jnp.float32), shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )  # fmt: skip


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(100 + step)
    return rng.random((8, SIZES[0]), np.float32), rng.random((8, SIZES[2]), np.float32)


def train_jax(state: Any, optimizer: Any, steps: range, offset: int = 1) -> tuple[Any, list[float]]:
    def loss_of(params: Any, x: Any, y: Any) -> Any:
        return ((forward(params, x, offset) - y) ** 2).mean()

    losses = []
    for step in steps:
        loss, gradients = jax.value_and_grad(loss_of)(state["params"], *batch(step))
        updates, opt_state = optimizer.update(gradients, state["opt_state"], state["params"])
        state = {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}
        losses.append(float(loss))
    return state, losses


def train_torch(model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        x, y = map(torch.from_numpy, batch(step))
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


class Lion(torch.optim.Optimizer):
    """As in "Symbolic Discovery of Optimization Algorithms" (Chen et al., 2023)."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p -= group["lr"] * torch.lerp(p.grad, mean, group["betas"][0]).sign()
                mean.lerp_(p.grad, 1 - group["betas"][1])


# optax's optimizer, torch's, and the rules of the optimizer's state. Weight decay sees an offset of
# parameters, so that models with one train differently in the two forms.
ADAM = "include optax-adam under opt_state/ <-> optimizer/ for params/{p} <-> model/{p}"
SGD = "include optax-sgd under opt_state/ <-> optimizer/ for params/{p} <-> model/{p}"
PAIRS: dict[str, tuple[Any, Callable[[Any], Any], str]] = {
    "adam": (optax.adam(1e-2), lambda p: torch.optim.Adam(p, 1e-2), ADAM),
    "adamw": (
        optax.adamw(1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1), ADAM,
    ),
    "momentum": (
        optax.sgd(1e-2, momentum=0.9), lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9), SGD,
    ),
    "nesterov": (
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, nesterov=True), SGD,
    ),
    "lion": (
        optax.lion(1e-3, b1=0.9, b2=0.99, weight_decay=0.0), Lion, ADAM.replace("adam", "lion"),
    ),
    "chained": (
        optax.chain(optax.clip_by_global_norm(1e6), optax.adamw(1e-2, weight_decay=0.1)),
        lambda p: torch.optim.AdamW(p, 1e-2, weight_decay=0.1),
        ADAM.replace("opt_state/", "opt_state/1/"),
    ),
}  # fmt: skip


def offset_of(pair: str) -> int:
    return 0 if pair in ("adamw", "chained") else 1


def rules_of(pair: str) -> Rules:
    return Rules.parse(MODEL.replace("+ 1", f"+ {offset_of(pair)}") + PAIRS[pair][2])


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "used"])
def test_jax_to_torch(pair: str, used: bool, tmp_path: Path) -> None:
    """The losses after the handoff are those of the run that stayed in JAX."""
    (theirs, ours, _), offset = PAIRS[pair], offset_of(pair)
    params = fresh(0)
    state = {"params": params, "opt_state": theirs.init(params)}
    state, _ = train_jax(state, theirs, range(5), offset)
    unickpt.save(tmp_path / "jax", state)
    _, expected = train_jax(state, theirs, range(5, 12), offset)

    model = Net(1)
    optimizer = ours(model.parameters())
    if used:
        train_torch(model, optimizer, range(2))
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    loaded = unickpt.load(tmp_path / "jax", tree, rules=rules_of(pair))
    assert all(loaded[part] is tree[part] for part in tree)
    assert np.array_equal(model.up.weight.detach().numpy().T, state["params"]["up"]["kernel"])
    assert train_torch(model, optimizer, range(5, 12)) == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("pair", PAIRS)
def test_torch_to_jax(pair: str, tmp_path: Path) -> None:
    theirs, ours, _ = PAIRS[pair]
    model = Net(1)
    optimizer = ours(model.parameters())
    train_torch(model, optimizer, range(5))
    unickpt.save(
        tmp_path / "torch", {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    )
    expected = train_torch(model, optimizer, range(5, 12))

    params = fresh(3)
    like = jax.eval_shape(lambda: {"params": params, "opt_state": theirs.init(params)})
    state = unickpt.load(tmp_path / "torch", like, rules=rules_of(pair).inverse)
    _, losses = train_jax(state, theirs, range(5, 12), offset_of(pair))
    assert losses == pytest.approx(expected, rel=2e-5)


def test_moments_follow_the_scale_of_their_parameter(tmp_path: Path) -> None:
    """A parameter that is 4 times as large has gradients that are a fourth: losses go on the same
    with an optimizer that does not see the scale."""
    rules = Rules.parse(MODEL.replace("[e] + 1", "[e] * 4") + ADAM)
    params = fresh(0)
    moments = jax.tree.map(lambda x: jnp.ones_like(x) * 8, params)
    adam = optax.ScaleByAdamState(jnp.int32(3), moments, moments)
    unickpt.save(tmp_path / "c", {"params": params, "opt_state": (adam,)})
    made = unickpt.load(tmp_path / "c", rules=rules)["optimizer"]["state"]
    assert made["scale"]["exp_avg"].tolist() == [2] * SIZES[1]
    assert made["scale"]["exp_avg_sq"].tolist() == [0.5] * SIZES[1]
    assert made["up.bias"]["exp_avg_sq"].tolist() == [8] * SIZES[1]
    assert made["up.bias"]["step"] == 3
    assert made["up.bias"]["step"].dtype == np.float32


@pytest.mark.parametrize("whole", [False, True])
def test_a_lift_finds_slots_with_or_without_the_first_component(
    whole: bool, tmp_path: Path
) -> None:
    """`params/` is no part of the moments' names where optax was given what is below it."""
    lifts = """
        lift opt_state/0/mu/{p} <-> optimizer/state/{p}/exp_avg
        lift opt_state/0/nu/{p} <-> optimizer/state/{p}/exp_avg_sq
        lift opt_state/0/count as int32 <-> optimizer/state/{p}/step as float32
        drop <-> optimizer/param_groups/{g...}
    """
    rules = Rules.parse(MODEL + lifts)
    theirs = optax.adam(1e-2)
    params = fresh(0)
    state, _ = train_jax({"params": params, "opt_state": theirs.init(params)}, theirs, range(3))
    if whole:  # optax was given {"params": ...}
        adam = state["opt_state"][0]
        state["opt_state"] = (adam._replace(mu={"params": adam.mu}, nu={"params": adam.nu}),)
    unickpt.save(tmp_path / "c", state)
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    unickpt.load(tmp_path / "c", tree, rules=rules)
    slots = optimizer.state[model.down.weight]
    nu = state["opt_state"][0].nu
    nu = nu["params"] if whole else nu
    assert np.array_equal(slots["exp_avg_sq"].numpy().T, nu["down"]["kernel"])
    assert slots["step"].item() == 3
    unickpt.save(tmp_path / "d", tree)
    like = jax.eval_shape(lambda: state)
    back = unickpt.load(tmp_path / "d", like, rules=rules.inverse)
    assert jax.tree.all(
        jax.tree.map(lambda a, b: bool((a == b).all()), back["opt_state"], state["opt_state"])
    )
    alone = unickpt.load(tmp_path / "c", rules=rules)["optimizer"]["state"]
    assert all(set(slots) == {"exp_avg", "exp_avg_sq", "step"} for slots in leaves_of(alone))


def leaves_of(state: Any) -> list[Any]:
    """The innermost dicts."""
    if not any(isinstance(value, dict) for value in state.values()):
        return [state]
    return [slots for value in state.values() for slots in leaves_of(value)]


def test_masked_parameters_have_no_slots(tmp_path: Path) -> None:
    """optax.masked: the bias is frozen on one side, and requires no gradient on the other."""
    mask = {"up": {"kernel": True, "bias": False}, "down": {"kernel": True}, "scale": True}
    theirs = optax.masked(optax.adam(1e-2), mask)
    params = fresh(0)
    state, _ = train_jax({"params": params, "opt_state": theirs.init(params)}, theirs, range(3))
    unickpt.save(tmp_path / "c", state)
    model = Net(1)
    model.up.bias.requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    lifts = ADAM.replace("opt_state/", "opt_state/inner_state/")
    unickpt.load(tmp_path / "c", tree, rules=Rules.parse(MODEL + lifts))
    assert set(optimizer.state) == {model.up.weight, model.down.weight, model.scale}
    nu = state["opt_state"].inner_state[0].nu["down"]["kernel"]
    assert np.array_equal(optimizer.state[model.down.weight]["exp_avg_sq"].numpy().T, nu)
    assert optimizer.state[model.scale]["step"].item() == 3


def test_a_conversion_for_an_optimizer_that_is_fresh(tmp_path: Path) -> None:
    """What is converted then loads strictly, hyper-parameters included, and trains on."""
    theirs = optax.adam(1e-2)
    params = fresh(0)
    state, _ = train_jax({"params": params, "opt_state": theirs.init(params)}, theirs, range(5))
    unickpt.save(tmp_path / "jax", state)
    _, expected = train_jax(state, theirs, range(5, 12))
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    unickpt.convert(tmp_path / "jax", tmp_path / "torch", rules=rules_of("adam"), like=tree)
    unickpt.load(tmp_path / "torch", tree)
    assert train_torch(model, optimizer, range(5, 12)) == pytest.approx(expected, rel=2e-5)


def test_a_padded_vocabulary_under_a_fresh_optimizer(tmp_path: Path) -> None:
    """Slots have the sizes of their parameters, which only the model tells."""
    theirs = optax.adam(1e-2)
    params = {"embed": jnp.arange(24.0).reshape(8, 3), "up": jnp.ones((3, 2))}
    state = {"params": params, "opt_state": theirs.init(params)}
    _, opt_state = theirs.update(params, state["opt_state"])
    unickpt.save(tmp_path / "c", {"params": params, "opt_state": opt_state})
    rules = Rules.parse(
        """
        params/embed [(v + _) e] <-> model/embed.weight [v e]
        params/up [i o] <-> model/up.weight [o i]
        """
        + ADAM
    )
    for embed_first in (True, False):
        model = torch.nn.ModuleDict(
            {"embed": torch.nn.Embedding(5, 3), "up": torch.nn.Linear(3, 2, bias=False)}
        )
        optimizer = torch.optim.Adam(model.parameters(), 1e-2)
        tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
        order = ["model", "optimizer"] if embed_first else ["optimizer", "model"]
        unickpt.load(tmp_path / "c", {key: tree[key] for key in order}, rules=rules)
        slots = optimizer.state[model["embed"].weight]
        assert np.array_equal(slots["exp_avg"], opt_state[0].mu["embed"][:5])
        assert slots["step"] == 1


def test_groups_of_parameters_with_counts_of_their_own(tmp_path: Path) -> None:
    """optax.multi_transform: two optimizers, each for some parameters, become one with groups."""
    theirs = optax.multi_transform(
        {"large": optax.adam(1e-2), "small": optax.adam(1e-3)},
        {"up": {"kernel": "large", "bias": "small"}, "down": {"kernel": "large"}, "scale": "small"},
    )
    params = fresh(0)
    state, _ = train_jax({"params": params, "opt_state": theirs.init(params)}, theirs, range(5))
    small = state["opt_state"].inner_states["small"]
    adam = small.inner_state[0]._replace(count=jnp.int32(7))  # as if it had begun before the other
    inner = (adam, *small.inner_state[1:])
    states = {**state["opt_state"].inner_states, "small": small._replace(inner_state=inner)}
    state["opt_state"] = state["opt_state"]._replace(inner_states=states)
    unickpt.save(tmp_path / "jax", state)
    _, expected = train_jax(state, theirs, range(5, 12))
    rules = Rules.parse(
        MODEL
        + "".join(
            ADAM.replace("opt_state/", f"opt_state/inner_states/{group}/inner_state/") + "\n"
            for group in ("large", "small")
        )
    )
    model = Net(1)
    optimizer = torch.optim.Adam(
        [
            {"params": [model.up.weight, model.down.weight], "lr": 1e-2},
            {"params": [model.up.bias, model.scale], "lr": 1e-3},
        ]
    )
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    unickpt.load(tmp_path / "jax", tree, rules=rules)
    assert optimizer.state[model.up.bias]["step"] == 7
    assert optimizer.state[model.up.weight]["step"] == 5
    unickpt.save(tmp_path / "torch", tree)
    back = unickpt.load(tmp_path / "torch", jax.eval_shape(lambda: state), rules=rules.inverse)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), back["opt_state"], state["opt_state"])
    assert jax.tree.all(same), same
    assert train_torch(model, optimizer, range(5, 12)) == pytest.approx(expected, rel=2e-5)


ADAFACTOR = """
    # Both keep means over rows and over columns; optax calls those over the larger axis v_row.
    opt_state/0/v_row/up/kernel [i]     <-> optimizer/state/up.weight/col_var [1 i]
    opt_state/0/v_col/up/kernel [o]     <-> optimizer/state/up.weight/row_var [o 1]
    opt_state/0/v_row/down/kernel [o]   <-> optimizer/state/down.weight/row_var [o 1]
    opt_state/0/v_col/down/kernel [i]   <-> optimizer/state/down.weight/col_var [1 i]
    opt_state/0/v/up/bias               <-> optimizer/state/up.bias/variance
    opt_state/0/v/scale                 <-> optimizer/state/scale/variance
    # and stands in with one zero for what it has not
    opt_state/0/{v_row|v_col}/up/bias [1] <-> 0
    opt_state/0/{v_row|v_col}/scale [1]   <-> 0
    opt_state/0/v/{up|down}/kernel [1]    <-> 0
    lift opt_state/0/count as int32 <->
        optimizer/state/{p}/step as float32 for params/{p} <-> model/{p}
    drop <-> optimizer/param_groups/{g...}
"""


def test_factored_moments_there_and_back(tmp_path: Path) -> None:
    theirs = optax.adafactor(1e-2, min_dim_size_to_factor=2)
    params = fresh(0)
    state = {"params": params, "opt_state": theirs.init(params)}
    state, _ = train_jax(state, theirs, range(5), 0)
    unickpt.save(tmp_path / "jax", state)
    _, expected = train_jax(state, theirs, range(5, 12), 0)

    rules = Rules.parse(MODEL.replace("+ 1", "+ 0") + ADAFACTOR)
    model = Net(1)
    optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    unickpt.load(tmp_path / "jax", tree, rules=rules)
    unickpt.save(tmp_path / "torch", tree)
    like = jax.eval_shape(lambda: state)
    back = unickpt.load(tmp_path / "torch", like, rules=rules.inverse)
    same = jax.tree.map(lambda a, b: bool((a == b).all()), back, state)
    assert jax.tree.all(same), same
    assert train_torch(model, optimizer, range(5, 12)) == pytest.approx(expected, rel=1e-4)


def test_hyper_parameters_are_values(tmp_path: Path) -> None:
    theirs = optax.inject_hyperparams(optax.sgd)(learning_rate=0.25, momentum=0.9)
    params = fresh(0)
    state, _ = train_jax({"params": params, "opt_state": theirs.init(params)}, theirs, range(2))
    unickpt.save(tmp_path / "c", state)
    rules = Rules.parse(
        MODEL
        + """
        lift opt_state/inner_state/0/trace/{p} <->
            optimizer/state/{p}/momentum_buffer for params/{p} <-> model/{p}
        opt_state/hyperparams/learning_rate    <-> optimizer/param_groups/0/lr
        opt_state/hyperparams/momentum         <-> optimizer/param_groups/0/momentum
        opt_state/count                        <-> drop
        opt_state/hyperparams_states/{m...}    <-> drop
        drop <-> optimizer/param_groups/0/{dampening|weight_decay|nesterov|maximize}
        drop <-> optimizer/param_groups/0/{foreach|differentiable|fused}
        drop <-> optimizer/param_groups/0/params/{i}
    """
    )
    model = Net(1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    unickpt.load(tmp_path / "c", tree, rules=rules)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.25, pytest.approx(0.9))
    assert group["params"][0] is model.scale


def test_names_survive_another_order(tmp_path: Path) -> None:
    """State by number would come to other parameters, without a word."""
    model = Net(0)
    optimizer = torch.optim.Adam(model.parameters())
    train_torch(model, optimizer, range(2))
    unickpt.save(tmp_path / "c", {"o": NamedOptimizer(optimizer, model)})
    other = Net(0)
    turned = torch.optim.Adam(list(other.parameters())[::-1])
    unickpt.load(tmp_path / "c", {"o": NamedOptimizer(turned, other)})
    for name, parameter in model.named_parameters():
        twin = other.get_parameter(name)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], turned.state[twin]["exp_avg"])
    assert "o/state/down.weight/exp_avg" in unickpt.open(tmp_path / "c")

    groups = [{"params": [other.scale]}, {"params": [other.up.weight]}]
    apart = torch.optim.Adam(groups)
    with pytest.raises(LoadMismatch):
        unickpt.load(tmp_path / "c", {"o": NamedOptimizer(apart, other)})
    split = Net(0)
    first = torch.optim.Adam([{"params": [split.scale]}, {"params": [split.up.weight]}])
    for parameter in (split.scale, split.up.weight):
        parameter.grad = torch.ones_like(parameter)
    first.step()
    unickpt.save(tmp_path / "d", {"o": NamedOptimizer(first, split)})
    second = torch.optim.Adam([{"params": [split.up.weight]}, {"params": [split.scale]}])
    with pytest.raises(LoadMismatch, match="o: group 0 had other parameters when it was saved"):
        unickpt.load(tmp_path / "d", {"o": NamedOptimizer(second, split)})


def test_an_optimizer_of_another_module() -> None:
    optimizer = torch.optim.Adam(Net(0).parameters())
    with pytest.raises(ValueError, match="4 parameters that are not the module's, the first of"):
        NamedOptimizer(optimizer, Net(0))
    with pytest.raises(ValueError, match="takes an optimizer and its module, in this order"):
        NamedOptimizer(Net(0), optimizer)


def test_slots_that_only_one_side_has(tmp_path: Path) -> None:
    """amsgrad keeps a slot that optax.adam has not: the plan says so."""
    theirs = optax.adam(1e-2)
    params = fresh(0)
    unickpt.save(tmp_path / "c", {"params": params, "opt_state": theirs.init(params)})
    model = Net(1)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    train_torch(model, optimizer, range(1))
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    with pytest.raises(RuleError, match=r"max_exp_avg_sq' .* is requested, and no rule makes it"):
        unickpt.load(tmp_path / "c", tree, rules=Rules.parse(MODEL + ADAM))


@pytest.mark.parametrize("slot", ["{s}/{p}", "state/{p}/{s}", "state/{s}/{p}"])
def test_a_count_beside_moments_whatever_comes_first(slot: str, tmp_path: Path) -> None:
    """DeepSpeed has the slot before the parameter."""
    names = [f"layers.{n}.weight" for n in range(2)]
    stored: dict[str, Any] = {f"model/{name}": np.full(3, 1.0, np.float32) for name in names}
    for name in names:
        stored[slot.format(s="exp_avg", p=name)] = np.full(3, 2.0, np.float32)
        stored[slot.format(s="step", p=name)] = np.float32(5)
    unickpt.save(tmp_path / "c", nested(stored))
    rules = Rules.parse(
        "model/layers.{l}.weight [e] <-> params/w [l e]\n"
        f"lift {slot.format(s='exp_avg', p='{p}')} <-> opt/mu/{{p}} law=gradient\n"
        f"lift {slot.format(s='step', p='{p}')} as float32 <-> opt/count as int32"
    )
    both = np.zeros((2, 3), np.float32)
    like = {
        "params": {"w": both.copy()},
        "opt": {"mu": {"w": both.copy()}, "count": np.zeros((), np.int32)},
    }
    found = unickpt.load(tmp_path / "c", like, rules=rules)
    assert (int(found["opt"]["count"]), found["opt"]["mu"]["w"].min()) == (5, 2.0)
