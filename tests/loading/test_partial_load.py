"""Loading a part: what was loaded, kept, skipped and cast is told; nothing is left out silently."""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.adapters.torch import NamedOptimizer
from unickpt.errors import RuleError
from unickpt.types import LoadReport


def load(stored: Any, like: Any, **options: Any) -> tuple[Any, LoadReport]:
    unickpt.save("memory://partial/c", stored, overwrite=True)
    got, report = unickpt.load("memory://partial/c", like, return_report=True, **options)
    assert isinstance(report, LoadReport)
    return got, report


def layers(count: int, *shape: int) -> dict[str, Any]:
    return {str(i): {"w": np.full(shape, i, np.float32)} for i in range(count)}


# --- the report ----------------------------------------------------------------------------------


@dataclass
class State:
    params: Any
    step: int


class Slots(NamedTuple):
    mu: Any


def test_a_report_names_containers_that_are_not_of_their_class() -> None:
    stored = {"s": State({"w": np.ones(2)}, 3), "layers": [Slots(np.ones(1)), Slots(np.ones(1))]}
    got, report = load(stored, None)
    assert report.untyped == (
        ("s", "State", "a dict"),
        ("layers/0", "Slots", "a namedtuple with its fields"),
        ("layers/1", "Slots", "a namedtuple with its fields"),
    )
    assert (type(got["s"]), got["layers"][0].mu.tolist()) == (dict, [1])
    assert not isinstance(got["layers"][0], Slots)
    assert "saved as State, without `like` a dict" in str(report)
    assert "layers/{0..1}" in str(report)
    _, report = load(stored, None, only="s/**")
    assert [name for name, _, _ in report.untyped] == ["s"]
    like = {"s": State({"w": np.zeros(2)}, 0), "layers": [Slots(np.zeros(1)), Slots(np.zeros(1))]}
    got, report = load(stored, like)
    assert (type(got["s"]), report.untyped) == (State, ())


def test_built_in_containers_and_empty_ones_are_what_they_were() -> None:
    stored = {"a": OrderedDict(x=1), "b": [1, (2, {})]}
    got, report = load(stored, None)
    assert (got, report.untyped) == (stored, ())


def test_a_report_tells_what_became_of_every_leaf() -> None:
    stored = {"a": np.ones(2), "b": np.ones(3, np.float32), "c": np.ones(4), "old": 1, "n": 7}
    like = {"a": np.zeros(2), "b": np.zeros(3), "c": np.full(5, 9.0), "new": np.full(1, 5), "n": 0}
    got, report = load(stored, like, strict=False, cast=True, mismatched="keep")
    assert report == LoadReport(
        "memory://partial/c",
        loaded=("a", "b", "n"),
        kept=("new",),
        skipped=("old",),
        mismatched=(("c", (4,), (5,)),),
        cast=(("b", "float32", "float64"),),
    )
    assert (got["c"].tolist(), got["new"].tolist(), got["n"]) == ([9] * 5, [5], 7)
    assert (got["a"].tolist(), got["b"].tolist()) == ([1, 1], [1, 1, 1])


def test_the_text_of_a_report_folds_layers_and_has_its_speed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "unickpt")
    stored = {"layers": layers(12, 2), "old": layers(12, 3)}
    _, report = load(stored, {"layers": layers(12, 2), "new": layers(12, 1)}, strict=False)
    assert str(report).splitlines() == [
        "memory://partial/c: loaded 12 leaves, kept 12, skipped 12",
        "  kept     new/{0..11}/w  not stored, `like` keeps its value",
        "  skipped  old/{0..11}/w  stored, and not requested",
        f"  {report.speed_text}",
    ]
    assert caplog.messages[-1] == str(report)
    _, report = load(stored, stored)
    first = "memory://partial/c: loaded 24 leaves"
    assert str(report) == f"{first}\n  {report.speed_text}" == caplog.messages[-1]
    unickpt.load("memory://partial/c")
    assert caplog.messages[-1].splitlines()[0] == first


def test_a_report_says_how_long_a_load_took_and_what_it_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "unickpt")
    state = {"a": np.ones((500, 40)), "b": np.ones(7, np.int8), "step": 3}
    unickpt.save("memory://partial/d", state)
    for like in (None, state):
        _, report = unickpt.load("memory://partial/d", like, return_report=True)
        assert report.bytes == report.read_bytes == 160_007
        assert (report.received_bytes, report.waited_s, report.waited_for) == (0, 0.0, {})
        assert 0 < report.seconds < 60
        assert report.gather()[0].seconds == report.seconds
        assert f"160.0 kB in {report.seconds:.3g} s ({report.gb_per_s:.3g} GB/s)" in str(report)
        assert "waited" not in report.speed_text
    only = {"a": np.zeros((500, 40))}
    _, part = unickpt.load("memory://partial/d", only, strict=False, return_report=True)
    assert part.bytes == part.read_bytes == 160_000
    assert part.speed_text in part._repr_html_()
    assert repr(part) == "LoadReport('memory://partial/d', loaded 1 leaf, skipped 2)"


def test_a_checkpointer_gives_the_report_too(tmp_path: Path) -> None:
    with unickpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, {"w": np.ones(2), "head": np.ones(4)}, wait=True)
        like = {"w": np.zeros(2), "head": np.zeros(5)}
        got, report = checkpointer.load(like, mismatched="keep", return_report=True)
        assert report.mismatched == (("head", (4,), (5,)),)
        assert checkpointer.load(like, mismatched="keep") == got
        with pytest.raises(LoadMismatch, match=r"head +shape"):
            checkpointer.load(like, strict=False)


# --- nothing is swallowed ------------------------------------------------------------------------


@pytest.mark.parametrize("step", [{}, {"step": 3}], ids=["arrays alone", "beside a step"])
def test_that_nothing_matches_is_an_error_that_tells_the_prefix(step: dict[str, int]) -> None:
    with pytest.raises(LoadMismatch) as caught:
        load({"model": layers(5, 2), **step}, {"params": layers(5, 2), **step}, strict=False)
    assert "would load nothing\nlikely cause: requested 'params/', stored 'model/'?" in str(
        caught.value
    )


def test_that_no_value_matches_is_an_error_too() -> None:
    with pytest.raises(LoadMismatch, match="no leaf of `like` is stored"):
        load({"steps": 3}, {"step": 0}, strict=False)
    assert load({"steps": 3}, {}, strict=False)[1].skipped == ("steps",)


def test_a_shape_is_left_alone_only_on_request() -> None:
    stored, like = {"a": np.ones(2), "b": np.ones(2)}, {"a": np.zeros(3), "b": np.zeros(2)}
    for strict in (True, False):
        with pytest.raises(LoadMismatch, match=r"a +shape +\[2\] +\[3\]"):
            load(stored, like, strict=strict)
        got, report = load(stored, like, strict=strict, mismatched="keep")
        assert (got["a"].tolist(), report.mismatched) == ([0, 0, 0], (("a", (2,), (3,)),))
    with pytest.raises(ValueError, match="'skip' is neither"):
        load(stored, like, mismatched="skip")


def test_what_holds_nothing_is_not_kept() -> None:
    like = {"a": torch.empty(3, device="meta"), "b": torch.zeros(2)}
    with pytest.raises(LoadMismatch, match=r"a +shape +\[2\] +\[3\]"):
        load({"a": torch.ones(2), "b": torch.ones(2)}, like, mismatched="keep")
    with pytest.raises(LoadMismatch, match=r"a +missing"):
        load({"b": torch.ones(2)}, like, strict=False, mismatched="keep")


# --- optimizers ----------------------------------------------------------------------------------


def trained(width: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, width))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("named", [False, True])
def test_a_new_head_keeps_its_fresh_state_and_trains(named: bool, tmp_path: Path) -> None:
    def tree(model: Any, optimizer: Any) -> Any:
        return {"m": model, "o": NamedOptimizer(optimizer, model) if named else optimizer}

    unickpt.save(tmp_path / "c", tree(*trained(5)))
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    before = model[1].weight.detach().clone()
    for options in ({}, {"strict": False}, {"mismatched": "keep"}):
        with pytest.raises(LoadMismatch):
            unickpt.load(tmp_path / "c", tree(model, optimizer), **options)  # type: ignore[call-overload]
    _, report = unickpt.load(
        tmp_path / "c", tree(model, optimizer), strict=False, mismatched="keep", return_report=True
    )
    kept = [name for name, _, _ in report.mismatched]
    assert [name for name in kept if name.startswith("m")] == ["m/1.bias", "m/1.weight"]
    assert len(kept) == 6  # and two moments for each of the two
    assert len(report.skipped) == 2  # a count for each
    assert torch.equal(model[1].weight, before)
    assert optimizer.state[model[1].weight] == {}
    assert optimizer.state[model[0].weight]["step"] == 1
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["step"] == 2


# --- through rules -------------------------------------------------------------------------------

RULES = "a [l i o] <-> w.{l} [o i]\nb [n] <-> c [n]\n"
STORED = {"a": np.arange(60, dtype=np.float32).reshape(4, 3, 5), "b": np.ones(2)}


def test_rules_do_not_swallow_shapes() -> None:
    like = {"w.1": np.zeros((5, 3), np.float32), "c": np.full(7, 9.0)}
    with pytest.raises(RuleError, match=r"b \[n\] <-> c \[n\][\s^]+'c' is float64\[7\]"):
        load(STORED, like, rules=Rules.parse(RULES), strict=False)
    got, report = load(STORED, like, rules=Rules.parse(RULES), strict=False, mismatched="keep")
    assert report.mismatched == (("c", (2,), (7,)),)
    assert got["c"].tolist() == [9] * 7
    assert np.array_equal(got["w.1"], STORED["a"][1].T)
    assert report.loaded == ("w.1",)


def test_rules_keep_another_shape_with_all_names_the_same() -> None:
    like = {f"w.{i}": np.zeros((5, 3), np.float32) for i in range(4)} | {"c": np.full(7, 9.0)}
    got, report = load(STORED, like, rules=Rules.parse(RULES), mismatched="keep")
    assert (report.mismatched, report.skipped) == ((("c", (2,), (7,)),), ())
    assert np.array_equal(got["w.3"], STORED["a"][3].T)


def test_rules_tell_names_that_nobody_has() -> None:
    """A typo in a rule is an error, one in `like` is told."""
    like = {"w.1": np.zeros((5, 3), np.float32), "cc": np.full(2, 9.0)}
    got, report = load(STORED, like, rules=Rules.parse(RULES), strict=False)
    assert (report.kept, report.skipped, got["cc"].tolist()) == (("cc",), ("b",), [9, 9])
    typo = Rules.parse(RULES.replace("b [n]", "bb [n]"))
    with pytest.raises(RuleError, match=r"bb \[n\] <-> c \[n\]\n +matches nothing that is stored"):
        load(STORED, like, rules=typo, strict=False)
    optional = Rules.parse(RULES.replace("b [n]", "optional bb [n]"))
    assert load(STORED, like, rules=optional, strict=False)[1].skipped == ("b",)
    with pytest.raises(LoadMismatch, match="would load nothing"):
        load(STORED, {"cc": np.zeros(2)}, rules=Rules.parse(RULES), strict=False)
