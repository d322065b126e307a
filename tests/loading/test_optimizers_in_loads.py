"""Loads of optimizers: no moments are lost, and none go to another parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.errors import RuleError

torch = pytest.importorskip("torch")
from unickpt.adapters.torch import NamedOptimizer  # noqa: E402  (after torch)


def net(names: str = "ab") -> Any:
    torch.manual_seed(0)
    return torch.nn.ModuleDict({name: torch.nn.Linear(4, 4) for name in names})


def step(model: Any, optimizer: Any) -> None:
    sum(layer(torch.ones(5, 4)).square().mean() for layer in model.values()).backward()
    optimizer.step()


def trained(model: Any, make: Any = torch.optim.AdamW) -> dict[str, Any]:
    optimizer = make(model.parameters())
    step(model, optimizer)
    return {"model": model, "optim": optimizer}


def sgd(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1)


def refused(path: Any, like: Any, **options: Any) -> str:
    with pytest.raises(LoadMismatch) as caught:
        unickpt.load(path, like, **options)
    return str(caught.value)


# --- shapes --------------------------------------------------------------------------------------


def grouped(model: Any, biases_first: bool, make: Any = torch.optim.AdamW) -> Any:
    parameters = list(model.parameters())
    groups = [[p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim == 1]]
    return make([{"params": g} for g in (groups[::-1] if biases_first else groups)])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        torch.optim.RMSprop,
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        lambda groups: torch.optim.Adam(groups, amsgrad=True),
        lambda groups: torch.optim.Adam(groups, capturable=False, foreach=True),
    ],
)
def test_moments_of_another_shape_are_refused(make: Any, tmp_path: Path) -> None:
    model = net()
    optimizer = grouped(model, False, make)
    step(model, optimizer)
    unickpt.save(tmp_path / "c", {"model": model, "optim": optimizer})
    fresh = net()
    resumed = grouped(fresh, True, make)
    said = refused(tmp_path / "c", {"model": fresh, "optim": resumed})
    assert "moments under 'optim' belong to other parameters, such as 'optim/state/0/" in said
    assert "stored [4, 4], requested [4]" in said
    assert "in another order or in other groups" in said
    assert "NamedOptimizer" in said


def test_kept_misfits_leave_the_optimizer_to_make_its_moments(tmp_path: Path) -> None:
    model = net()
    optimizer = grouped(model, False)
    step(model, optimizer)
    unickpt.save(tmp_path / "c", {"model": model, "optim": optimizer})
    fresh = net()
    resumed = grouped(fresh, True)
    like = {"model": fresh, "optim": resumed}
    _, report = unickpt.load(
        tmp_path / "c", like, mismatched="keep", strict=False, return_report=True
    )
    assert [name for name, _, _ in report.mismatched][:1] == ["optim/state/0/exp_avg"]
    assert not any(resumed.state.values())
    step(fresh, resumed)


# --- names ---------------------------------------------------------------------------------------


def named_parameters(model: Any) -> Any:
    return torch.optim.AdamW(model.named_parameters())


def test_moments_do_not_go_to_a_parameter_of_another_name(tmp_path: Path) -> None:
    model = net()
    optimizer = named_parameters(model)
    step(model, optimizer)
    unickpt.save(tmp_path / "c", {"model": model, "optim": optimizer})
    other = net("ba")
    for warm in (False, True):
        resumed = named_parameters(other)
        if warm:
            step(other, resumed)
        said = refused(tmp_path / "c", {"model": other, "optim": resumed})
        assert "'optim/param_groups/0': parameter 0 was 'a.weight' when it was saved" in said
        assert "is 'b.weight' in `like`" in said
        assert "in the order in which they were saved" in said
        assert "skip='optim/param_groups/0/param_names/**'" in said
    resumed = named_parameters(other)
    renamed = {"skip": "optim/param_groups/0/param_names/**"}
    unickpt.load(tmp_path / "c", {"model": other, "optim": resumed}, **renamed)
    assert resumed.param_groups[0]["param_names"][0] == "b.weight"
    assert torch.equal(
        resumed.state[other["b"].weight]["exp_avg"], optimizer.state[model["a"].weight]["exp_avg"]
    )


def test_names_of_wrappers_are_no_other_names(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW([(f"module.{n}", p) for n, p in model.named_parameters()])
    step(model, optimizer)
    unickpt.save(tmp_path / "c", optimizer)
    other = net()
    resumed = named_parameters(other)
    unickpt.load(tmp_path / "c", resumed)
    assert torch.equal(
        resumed.state[other["b"].weight]["exp_avg"], optimizer.state[model["b"].weight]["exp_avg"]
    )


def test_a_named_optimizer_keeps_names_beside_their_parameters(tmp_path: Path) -> None:
    model = net()
    optimizer = named_parameters(model)
    step(model, optimizer)
    unickpt.save(tmp_path / "c", {"optim": NamedOptimizer(optimizer, model)})
    other = net("ba")
    resumed = named_parameters(other)
    unickpt.load(tmp_path / "c", {"optim": NamedOptimizer(resumed, other)})
    assert torch.equal(
        resumed.state[other["a"].weight]["exp_avg"], optimizer.state[model["a"].weight]["exp_avg"]
    )
    assert resumed.param_groups[0]["param_names"] == [n for n, _ in other.named_parameters()]


# --- no state at all -----------------------------------------------------------------------------


def test_an_optimizer_does_not_stay_without_moments_that_are_stored(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", trained(net()))
    model = net()
    named = NamedOptimizer(torch.optim.AdamW(model.parameters()), model)  # stored by numbers
    state_dict = torch.optim.AdamW(model.parameters()).state_dict()
    for optimizer in (named, state_dict):
        said = refused(tmp_path / "c", {"model": model, "optim": optimizer}, strict=False)
        assert "the optimizer under 'optim' would get no state" in said
        assert "'optim/state/0/exp_avg'" in said
        assert "skip='optim/**'" in said
        like = {"model": model, "optim": optimizer}
        unickpt.load(tmp_path / "c", like, strict=False, skip="optim/**")
    assert not named.optimizer.state


def test_an_optimizer_without_slots_needs_none(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "adam", trained(net()))
    model = net()
    like = {"model": model, "optim": sgd(model.parameters())}
    unickpt.load(tmp_path / "adam", {**like, "optim": sgd(model.parameters())}, skip="optim/**")
    unickpt.save(tmp_path / "sgd", trained(net(), sgd))
    unickpt.load(tmp_path / "sgd", like)
    unickpt.load(tmp_path / "sgd", {**like, "optim": sgd(model.parameters())}, strict=False)


def test_before_the_first_step_nothing_is_lost(tmp_path: Path) -> None:
    model = net()
    unickpt.save(tmp_path / "c", {"model": model, "optim": torch.optim.AdamW(model.parameters())})
    resumed = torch.optim.AdamW(model.parameters())
    unickpt.load(tmp_path / "c", {"model": model, "optim": resumed})
    unickpt.load(tmp_path / "c", {"model": model, "optim": resumed}, strict=False)
    unickpt.save(tmp_path / "weights", {"model": model})
    unickpt.load(tmp_path / "weights", {"model": model, "optim": resumed}, strict=False)


def test_another_optimizer_is_named_and_skipped(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", trained(net()))
    model = net()
    for make in (sgd, lambda ps: torch.optim.Adafactor(ps), lambda ps: torch.optim.Adagrad(ps)):
        like = {"model": model, "optim": make(model.parameters())}
        said = refused(tmp_path / "c", like)
        assert "another optimizer was saved under 'optim': its groups have betas" in said
        assert "skip='optim/**'" in said
        unickpt.load(tmp_path / "c", like, skip="optim/**")
        stored = unickpt.load(tmp_path / "c", only="model/**")["model"]
        assert model["a"].bias.tolist() == stored["a.bias"].tolist()


def test_a_parameter_that_was_added_is_named(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    unickpt.save(tmp_path / "c", {"model": model, "optim": NamedOptimizer(optimizer, model)})
    larger = net("abc")
    resumed = torch.optim.AdamW(larger.parameters())
    like = {"model": larger, "optim": NamedOptimizer(resumed, larger)}
    said = refused(tmp_path / "c", like)
    assert "has 2 parameters that were not in its groups when it was saved: 'c.weight'" in said
    unickpt.load(tmp_path / "c", like, missing="keep")
    assert not resumed.state[larger["c"].weight]
    assert resumed.state[larger["a"].weight]["step"] == 1


def test_frozen_parameters_have_no_state(tmp_path: Path) -> None:
    model = net()
    model["a"].requires_grad_(False)
    unickpt.save(tmp_path / "c", trained(model))
    other = net()
    resumed = torch.optim.AdamW(other.parameters())
    unickpt.load(tmp_path / "c", {"model": other, "optim": resumed})
    assert resumed.state[other["b"].weight]["step"] == 1
    assert not resumed.state[other["a"].weight]


def test_missing_slots_of_amsgrad_are_not_called_a_run_before_its_first_step(
    tmp_path: Path,
) -> None:
    unickpt.save(tmp_path / "c", trained(net()))
    like = trained(net(), lambda ps: torch.optim.AdamW(ps, amsgrad=True))
    said = refused(tmp_path / "c", like)
    assert "max_exp_avg_sq" in said
    assert "nothing is stored under" not in said


# --- through rules -------------------------------------------------------------------------------

RULES = """
    params/{m...}/kernel [i o] <-> model/{m...}.weight [o i]
    params/{m...}/bias [o] <-> model/{m...}.bias [o]
    step <-> step
"""
ADAM = "include optax-adam under %s <-> optim/ for params/{p} <-> model/{p}\n"
DROPS = """
    opt_state/1/0/count <-> drop
    opt_state/1/0/mu/{x...} <-> drop
    opt_state/1/0/nu/{x...} <-> drop
"""


def rules(text: str) -> Rules:
    return Rules.parse("\n".join(line.strip() for line in (RULES + text).splitlines()))


def jax_job() -> dict[str, Any]:
    jax, optax = pytest.importorskip("jax"), pytest.importorskip("optax")
    layer = {"kernel": jax.numpy.ones((4, 4)), "bias": jax.numpy.ones(4)}
    params = {name: dict(layer) for name in "ab"}
    transform = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return {"params": params, "opt_state": transform.init(params), "step": 3}


def torch_job() -> tuple[dict[str, Any], Any]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    return {"model": model, "optim": NamedOptimizer(optimizer, model), "step": 0}, optimizer


def test_a_preset_under_the_wrong_prefix_says_where_its_names_are(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", jax_job())
    like, optimizer = torch_job()
    for drops in ("", DROPS):
        with pytest.raises(RuleError) as caught:
            unickpt.load(tmp_path / "c", like, rules=rules(ADAM % "opt_state/" + drops))
        said = str(caught.value)
        assert "preset optax-adam, line 2: lift opt_state/0/mu/{p}" in said
        assert "matches nothing: it takes names under 'opt_state/'" in said
        assert "'opt_state/1/0/mu/a/kernel'" in said
        assert "are stored under 'opt_state/1/'" in said
        assert "`under` of the include" in said
        assert "<-> drop\n" not in said
        assert "1 problem" in said
    unickpt.load(tmp_path / "c", like, rules=rules(ADAM % "opt_state/1/"))
    assert len(optimizer.state) == 4


def test_the_wrong_prefix_is_found_from_torch_to_jax_too(tmp_path: Path) -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    named = NamedOptimizer(optimizer, model)
    unickpt.save(tmp_path / "c", {"model": model, "optim": named, "step": 1})
    with pytest.raises(RuleError, match=r"matches nothing.*are requested under 'opt_state/1/'"):
        unickpt.load(tmp_path / "c", jax_job(), rules=rules(ADAM % "opt_state/").inverse)
    state = unickpt.load(tmp_path / "c", jax_job(), rules=rules(ADAM % "opt_state/1/").inverse)
    assert int(state["opt_state"][1][0].count) == 1


def test_dropped_moments_are_no_state_of_an_optimizer(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", jax_job())
    like, optimizer = torch_job()
    drops = rules(DROPS + "drop <-> optim/param_groups/{x...}")
    said = refused(tmp_path / "c", like, rules=drops)
    assert "the optimizer under 'optim' would get no state" in said
    assert "'opt_state/1/0/mu/a/bias'" in said
    said = refused(tmp_path / "c", like, rules=rules(ADAM % "opt_state/"), strict=False)
    assert "would get no state" in said
    unickpt.load(tmp_path / "c", like, rules=drops, skip="optim/**")
    assert not optimizer.state


def test_parameters_called_as_moments_are(tmp_path: Path) -> None:
    """A layer of a variational autoencoder is called `mu`; it is dropped, and no moment."""
    jax = pytest.importorskip("jax")
    job = {
        "params": {
            "mu": {"kernel": jax.numpy.ones((4, 2))},
            "a": {"kernel": jax.numpy.ones((4, 4))},
        }
    }
    unickpt.save(tmp_path / "c", job)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False)})
    like = {"model": model, "optim": torch.optim.AdamW(model.parameters())}
    text = "params/a/kernel [i o] <-> model/a.weight [o i]\nparams/mu/kernel <-> drop\n"
    unickpt.load(tmp_path / "c", like, rules=Rules.parse(text + "drop <-> optim/{x...}"))
