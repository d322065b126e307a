"""Partial loads: `only`, `skip`, `missing`, `unexpected`; alike for torch, JAX and NumPy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import unickpt
from unickpt import LoadMismatch, LoadOptions, Rules
from unickpt.errors import RuleError
from unickpt.testing.thread_groups import Threads
from unickpt.types import LoadReport

PATH = "memory://selection/c"
MAKERS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda x: np.asarray(x, np.float32),
    "torch": lambda x: torch.tensor(x, dtype=torch.float32),
    "jax": lambda x: jnp.asarray(x, jnp.float32),
}


@pytest.fixture(params=list(MAKERS))
def make(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return MAKERS[request.param]


def load(stored: Any, like: Any = None, **options: Any) -> tuple[Any, LoadReport]:
    unickpt.save(PATH, stored, overwrite=True)
    got, report = unickpt.load(PATH, like, return_report=True, **options)
    assert isinstance(report, LoadReport)
    return got, report


def test_only_a_part_is_loaded_and_the_rest_stays_as_it_is(make: Callable[[Any], Any]) -> None:
    stored = {"params": {"w": make([1, 2]), "b": make([3])}, "opt": {"m": make([4, 4])}, "step": 7}
    like = {"params": {"w": make([0, 0]), "b": make([0])}, "opt": {"v": make([9] * 3)}, "step": 0}
    got, report = load(stored, like, only="params/**")
    assert np.asarray(got["params"]["w"]).tolist() == [1, 2]
    assert np.asarray(got["params"]["b"]).tolist() == [3]
    assert got["opt"]["v"] is like["opt"]["v"]
    assert got["step"] == 0
    assert type(got["params"]["w"]) is type(like["params"]["w"])
    assert report == LoadReport(
        PATH,
        loaded=("params/w", "params/b"),
        skipped=("opt/m",),
        left_out=("opt/v", "step"),
    )


def test_skip_leaves_out_what_only_selects(make: Callable[[Any], Any]) -> None:
    stored = {"a": {"w": make([1]), "head": make([2])}, "b": make([3])}
    like = {"a": {"w": make([0]), "head": make([0] * 5)}, "b": make([0])}
    got, report = load(stored, like, only=["a/**", "b"], skip="**/head")
    assert [np.asarray(x).tolist() for x in jax.tree.leaves(got)] == [[0] * 5, [1], [3]]
    assert report.left_out == ("a/head",)
    assert "left out  a/head  not selected, keeps its value" in str(report)


def test_what_is_selected_must_fit_as_ever() -> None:
    stored = {"params": {"w": np.ones(2), "old": np.ones(2)}, "opt": np.ones(2)}
    like = {"params": {"w": np.zeros(3), "new": np.zeros(2)}, "opt": np.zeros(3)}
    with pytest.raises(LoadMismatch, match="3 differences") as caught:
        load(stored, like, only="params/**")
    assert "opt" not in str(caught.value)
    assert like["params"]["w"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("missing", ["error", "keep"])
@pytest.mark.parametrize("unexpected", ["error", "skip"])
def test_missing_and_unexpected_leaves_are_apart(missing: Any, unexpected: Any) -> None:
    both: dict[str, Any] = {"missing": missing, "unexpected": unexpected}
    with_new, with_old = {"w": np.zeros(2), "new": np.full(1, 5)}, {"w": np.ones(2), "old": 1}
    w = {"w": np.ones(2)}
    for stored, like, fits in (
        (w, with_new, missing == "keep"),
        (with_old, {"w": np.zeros(2)}, unexpected == "skip"),
        (with_old, with_new, (missing, unexpected) == ("keep", "skip")),
    ):
        if fits:
            got, report = load(stored, like, **both)
            assert got["w"].tolist() == [1, 1]
            assert report.kept == (("new",) if "new" in like else ())
            assert report.skipped == (("old",) if "old" in stored else ())
        else:
            with pytest.raises(LoadMismatch):
                load(stored, like, **both)


def test_bad_arguments_are_named() -> None:
    like = {"w": np.zeros(2)}
    with pytest.raises(LoadMismatch, match=r"only=\['param/\*\*'\] matches no leaf; there are 'w'"):
        load({"w": np.ones(2)}, like, only="param/**")
    with pytest.raises(LoadMismatch, match=r"skip=\['v'\] matches no leaf"):
        load({"w": np.ones(2)}, None, skip=["w", "v"])
    with pytest.raises(LoadMismatch, match="together select no leaf"):
        load({"w": np.ones(2)}, like, only="w", skip="*")
    with pytest.raises(TypeError, match="only must be a pattern"):
        load({"w": np.ones(2)}, like, only=3)
    with pytest.raises(ValueError, match="missing='skip' is neither"):
        load({"w": np.ones(2)}, like, missing="skip")


def test_without_like_the_selected_leaves_come_in_their_containers() -> None:
    w = np.arange(3)
    stored = {"layers": [{"w": w, "b": w + 1}, {"w": w + 2, "b": w + 3}], "pair": (1, 2), "n": {}}
    stored["tied"] = w
    got, report = load(stored, None, only=["layers/*/w", "pair/1", "tied"])
    assert got["tied"].tolist() == [0, 1, 2]
    assert [layer["w"].tolist() for layer in got["layers"]] == [[0, 1, 2], [2, 3, 4]]
    assert [set(layer) for layer in got["layers"]] == [{"w"}, {"w"}]
    assert got["pair"] == {1: 2}
    assert set(got) == {"layers", "pair", "n", "tied"}  # n was empty
    assert report.skipped == ("layers/0/b", "layers/1/b", "pair/0")
    assert set(report.loaded) == {"layers/0/w", "layers/1/w", "pair/1", "tied"}
    got, _ = load(stored, None, only="tied")  # its elements are stored under another name
    assert got["tied"].tolist() == [0, 1, 2]


def test_many_names_may_be_selected_and_left_out() -> None:
    # Not each name with each: that took minutes.
    state = {f"layer_{n}": np.full(1, n) for n in range(8000)}
    unickpt.save("memory://run/many", state, overwrite=True)
    half = [f"layer_{n}" for n in range(0, 8000, 2)]
    loaded = unickpt.load("memory://run/many", only=[*half, "layer_77*"], skip=half[:3000])
    expected = set(range(6000, 8000, 2)) | {77, *range(770, 780), *range(7700, 7800)}
    expected -= set(range(0, 6000, 2))
    assert {name: array.tolist() for name, array in loaded.items()} == {
        f"layer_{n}": [n] for n in sorted(expected)
    }
    with pytest.raises(unickpt.LoadMismatch, match=r"only=.*'absent'.* matches no leaf"):
        unickpt.load("memory://run/many", only=[*half, "absent"])


def test_two_sources_fill_one_tree(make: Callable[[Any], Any], tmp_path: Path) -> None:
    base, adapter = str(tmp_path / "base"), str(tmp_path / "adapter")
    unickpt.save(base, {"block": {"w": make([1, 2])}, "head": make([5])})
    unickpt.save(adapter, {"block": {"lora_a": make([3]), "lora_b": make([4])}})
    like = {
        "block": {"w": make([0, 0]), "lora_a": make([0]), "lora_b": make([0])},
        "head": make([8, 8, 8]),
    }
    found = unickpt.load(base, like, skip="**/lora_*", mismatched="keep")
    found, report = unickpt.load(adapter, found, only="**/lora_*", return_report=True)
    leaves = [np.asarray(x).tolist() for x in jax.tree.leaves(found)]
    assert leaves == [[3], [4], [1, 2], [8, 8, 8]]
    assert report.left_out == ("block/w", "head")


def test_abstract_leaves_that_are_left_out_stay_abstract() -> None:
    spec = jax.ShapeDtypeStruct((2,), jnp.float32)
    meta = torch.empty(2, device="meta")
    got, _ = load({"a": np.ones(2, np.float32)}, {"a": spec, "b": spec, "c": meta}, only="a")
    assert got["a"].tolist() == [1, 1]
    assert got["b"] is spec
    assert got["c"] is meta


class Loader:
    """Fails if it is loaded."""

    def __init__(self, loads: bool) -> None:
        self.loads, self.at = loads, 3

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert self.loads, "it was loaded"
        self.at = state["at"]


def test_objects_that_are_left_out_are_not_loaded() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    stored = {"model": model, "optim": optimizer, "loader": Loader(True)}
    fresh = torch.nn.Linear(2, 2)
    other = torch.optim.AdamW(fresh.parameters(), lr=7.0)
    like = {"model": fresh, "optim": other, "loader": Loader(False)}
    got, report = load(stored, like, only="model/**")
    assert torch.equal(fresh.weight, model.weight)
    assert other.state_dict()["state"] == {}
    assert other.param_groups[0]["lr"] == 7.0
    assert (got["optim"], got["loader"]) == (other, like["loader"])
    assert report.loaded == ("model/weight", "model/bias")


def test_leaves_that_cannot_be_loaded_into_may_be_left_out() -> None:
    sparse = torch.eye(2).to_sparse()
    got, _ = load({"w": np.ones(2)}, {"w": np.zeros(2), "s": sparse}, only="w")
    assert got["s"] is sparse


def test_with_rules_names_are_those_of_like() -> None:
    rules = Rules.parse("model/{n} <-> params/{n}\nopt/{n} <-> state/{n}")
    stored = {"model": {"w": np.ones(2), "b": np.ones(1)}, "opt": {"w": np.full(2, 3.0)}}
    like = {"params": {"w": np.zeros(2), "b": np.zeros(1)}, "state": {"v": np.full(4, 9.0)}}
    got, report = load(stored, like, rules=rules, only="params/**")
    assert (got["params"]["w"].tolist(), got["state"]["v"].tolist()) == ([1, 1], [9] * 4)
    assert (report.left_out, report.skipped) == (("state/v",), ("opt/w",))
    with pytest.raises(LoadMismatch, match=r"params/x +missing"):
        load(stored, {"params": {"w": np.zeros(2), "x": np.zeros(1)}}, rules=rules, only="params/*")
    got, report = load(stored, None, rules=rules, skip="state/**")
    assert set(got) == {"params"}
    assert report.skipped == ("state/w",)


@pytest.mark.parametrize("argument", ["only", "skip"])
def test_with_rules_a_name_of_the_other_side_says_so(argument: str) -> None:
    rules = Rules.parse("model/{n} <-> params/{n}\nopt <-> drop")
    stored = {"model": {"w": np.ones(2)}, "opt": np.ones(2)}
    for like in (None, {"params": {"w": np.zeros(2)}}):
        for name in ("model/w", "opt"):
            wrong: Any = {argument: name}
            with pytest.raises(LoadMismatch, match=f"{name}', which are on the other side") as said:
                load(stored, like, rules=rules, **wrong)
            assert "match requested names" in str(said.value)
            assert "'params/w'" in str(said.value)


def test_a_checkpointer_passes_them_on(tmp_path: Path) -> None:
    with unickpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": np.ones(2), "old": np.ones(2)}, wait=True)
        like = {"w": np.zeros(2), "new": np.zeros(1)}
        got, report = checkpointer.load(like, only="w", return_report=True)
        assert (got["w"].tolist(), report.left_out) == ([1, 1], ("new",))
        checkpointer.load(like, skip="old", missing="keep")
        with pytest.raises(LoadMismatch, match=r"old +unexpected"):
            checkpointer.load(like, missing="keep")
        checkpointer.load(like, missing="keep", unexpected="skip")


@pytest.mark.plugins
def test_processes_that_read_together_load_a_part(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    unickpt.save(path, {"a": np.arange(4000.0), "b": np.arange(5000.0)})

    def one(index: int, options: LoadOptions) -> Any:
        like = {"a": np.zeros(4000), "b": np.zeros(3)}
        return unickpt.load(path, like, only="a", options=options)

    for got in Threads(2).run(one):
        assert np.array_equal(got["a"], np.arange(4000.0))
        assert got["b"].tolist() == [0, 0, 0]


@pytest.mark.parametrize("missing", ["error", "keep"])
@pytest.mark.parametrize("unexpected", ["error", "skip"])
def test_missing_and_unexpected_leaves_are_apart_with_rules(missing: Any, unexpected: Any) -> None:
    rules = Rules.parse("model/{n} <-> params/{n}")
    both: dict[str, Any] = {"missing": missing, "unexpected": unexpected, "rules": rules}
    w, with_old = {"model": {"w": np.ones(2)}}, {"model": {"w": np.ones(2), "old": np.ones(1)}}
    with_new = {"params": {"w": np.zeros(2), "new": np.full(1, 5.0)}}
    for stored, like, fits in (
        (w, with_new, missing == "keep"),
        (with_old, {"params": {"w": np.zeros(2)}}, unexpected == "skip"),
        (with_old, with_new, (missing, unexpected) == ("keep", "skip")),
    ):
        if fits:
            got, report = load(stored, like, **both)
            assert got["params"]["w"].tolist() == [1, 1]
            assert report.skipped == (("model/old",) if "old" in stored["model"] else ())
        else:
            with pytest.raises((LoadMismatch, RuleError)):
                load(stored, like, **both)


def test_of_a_fresh_optimizer_only_what_is_selected_is_made() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    fresh = torch.optim.AdamW(torch.nn.Linear(2, 2).parameters(), lr=7.0)
    load({"optim": optimizer}, {"optim": fresh}, only="optim/param_groups/**")
    assert fresh.param_groups[0]["lr"] == 0.5
    assert fresh.state_dict()["state"] == {}
