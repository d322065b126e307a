"""The table of differences: all at once, folded, with what to do."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unickpt
from unickpt.loading import suggestions
from unickpt.trees.name_ranges import fold


def message(stored: Any, like: Any, **options: Any) -> str:
    path = "memory://mismatch/table"
    unickpt.save(path, stored, overwrite=True)
    with pytest.raises(unickpt.LoadMismatch) as caught:
        unickpt.load(path, like, **options)
    return str(caught.value)


def test_all_differences_in_one_table() -> None:
    text = message(
        {"w": np.zeros((2, 3)), "b": np.zeros(3, np.float32), "old": np.zeros(1), "step": 3},
        {"w": np.zeros((3, 2)), "b": np.zeros(3), "new": np.zeros(1), "step": np.zeros(2)},
    )
    rows = [line.split() for line in text.splitlines()]
    assert ["w", "shape", "[2,", "3]", "[3,", "2]"] in rows
    assert ["b", "dtype", "float32", "float64"] in rows
    assert ["new", "missing", "-", "float64[1]"] in rows
    assert ["old", "unexpected", "float64[1]", "-"] in rows
    assert ["step", "kind", "plain", "int", "3", "float64[2]"] in rows
    assert "5 differences" in text
    assert "cast=True" in text
    assert 'missing="keep"' in text
    assert 'unexpected="skip"' in text


def test_rules_are_named_where_a_missing_array_is_like_an_unexpected_one() -> None:
    stored = {"tower": {"kernel": np.zeros((2, 3))}, "step": 3}
    assert "renamed: rules= maps" in message(stored, {"block.weight": np.zeros((2, 3)), "step": 0})
    assert "renamed" not in message(stored, {"block.weight": np.zeros((2, 4)), "step": 0})


def test_layers_fold() -> None:
    layer = {"q": np.zeros(2), "k": np.zeros(3)}
    layers = [{name: array.copy() for name, array in layer.items()} for _ in range(32)]
    text = message({"layers": [layer]}, {"layers": layers})
    assert "layers/{1..31}/q" in text
    assert "layers/{1..31}/k" in text
    assert text.count("missing") == 4  # two rows, and the advice with its argument


def test_a_near_miss_is_suggested() -> None:
    text = message({"encoder/w0": np.zeros(2)}, {"encoder/w1": np.zeros(2)})
    assert "did you mean: requested 'encoder%2Fw1', stored 'encoder%2Fw0'?" in text


def test_names_of_one_folder_are_no_near_misses_for_that() -> None:
    text = message({"groups": {"eps": 1e-8}}, {"groups": {"nesterov": False}})
    assert "groups/nesterov" in text
    assert "likely cause" not in text


def test_not_strict_keeps_what_is_missing_and_skips_what_is_unexpected() -> None:
    path = "memory://mismatch/strict"
    unickpt.save(path, {"a": np.ones(2), "b": np.ones(2)}, overwrite=True)
    got = unickpt.load(path, {"a": np.zeros(2), "c": np.full(2, 7.0), "d": 5}, strict=False)
    assert (got["a"].tolist(), got["c"].tolist(), got["d"]) == ([1, 1], [7, 7], 5)
    with pytest.raises(unickpt.LoadMismatch, match="shape"):
        unickpt.load(path, {"a": np.zeros(3)}, strict=False)


def test_kinds_do_not_mix() -> None:
    text = message(
        {"a": np.zeros(()), "b": 1, "r": unickpt.PerProcess(1), "v": np.zeros(1, int)},
        {"a": 0, "b": np.zeros(()), "r": 1, "v": 0},
    )
    assert "float64[]" in text
    assert "a PerProcess" in text
    assert text.count("kind") == 5


def test_a_0d_array_loads_into_a_plain_number_of_its_kind() -> None:
    path = "memory://mismatch/numbers"
    stored = {"step": np.int32(7), "lr": np.float32(0.5), "on": np.bool_(True)}
    unickpt.save(path, stored, overwrite=True)
    got = unickpt.load(path, {"step": 0, "lr": 0.0, "on": False})
    assert repr(got) == "{'step': 7, 'lr': 0.5, 'on': True}"
    for wrong in (0.0, True, "7", None):
        with pytest.raises(unickpt.LoadMismatch, match="kind"):
            unickpt.load(path, {"step": wrong, "lr": 0.0, "on": False})


def test_a_plain_value_comes_back_as_it_was_stored_whatever_plain_value_is_asked() -> None:
    path = "memory://mismatch/plain"
    unickpt.save(path, {"lr": 0.5, "fused": None}, overwrite=True)
    assert unickpt.load(path, {"lr": 1, "fused": True}) == {"lr": 0.5, "fused": None}


# --- likely causes -------------------------------------------------------------------------------


def layers(count: int, **leaves: Any) -> dict[str, Any]:
    return {"layers": {str(i): dict(leaves) for i in range(count)}}


PAIR = {"q": np.zeros((2, 3)), "k": np.zeros(3)}


def test_one_renamed_component_is_told_first_and_once() -> None:
    text = message(
        {"model": {"encodr": layers(35, **PAIR)}, "step": 1, "old": np.zeros(7)},
        {"model": {"encoder": layers(35, **PAIR)}, "step": 1},
    )
    lines = text.splitlines()
    assert lines[0].endswith("141 differences")
    assert lines[1].startswith(
        "likely cause: requested 'encoder/', stored 'encodr/'? (70 leaves): requested "
        "'model/encoder/layers/0/k', stored 'model/encodr/layers/0/k'. Rename it in `like`"
    )
    assert [line.split()[0] for line in lines[2:]] == ["unexpected:", "leaf", "old"]


@pytest.mark.parametrize(
    ("stored", "asked", "cause"),
    [
        ({"model": layers(3, **PAIR)}, layers(3, **PAIR), "`like` is stored under 'model/': pass"),
        (layers(3, **PAIR), {"p": layers(3, **PAIR)}, "requested under 'p/', but stored without"),
        (
            {"a": layers(3, w=np.ones(2))},
            {"b": layers(3, w=np.ones(2))},
            "requested 'b/', stored 'a/'",
        ),
        (
            layers(3, kernel=np.ones(2)),
            layers(3, weight=np.ones(2)),
            "requested 'weight', stored 'ker",
        ),
        (
            {"m": {f"l.{i}.w": np.zeros(2) for i in range(3)}},
            {"m": {"l": [{"w": np.zeros(2)}] * 3}},
            "differ only in dots and slashes (3 leaves): requested 'm/l/0/w', stored 'm/l.0.w'",
        ),
        (
            {"l": [{"w": np.zeros(2)}] * 3},
            {f"l.{i}.w": np.zeros(2) for i in range(3)},
            "differ only in dots and slashes (3 leaves): requested 'l.0.w', stored 'l/0/w'",
        ),
        (
            {f"l/{i}": np.zeros(2) for i in range(3)},
            {"l": [np.zeros(2)] * 3},
            "differ only in dots and slashes (3 leaves): requested 'l/0', stored 'l%2F0'",
        ),
        (
            {f"l.{i}.w": np.zeros(2) for i in range(3)},
            {f"module.l.{i}.w": np.zeros(2) for i in range(3)},
            "parts that a wrapper (DDP, torch.compile) adds (3 leaves): requested 'module.l.0.w'",
        ),
        (
            {"a": np.zeros((2, 3)), "b": np.zeros((4, 5))},
            {"a": np.zeros((3, 2)), "b": np.zeros((5, 4))},
            "2 arrays are stored transposed, such as 'a': [2, 3] instead of [3, 2]",
        ),
    ],
)  # fmt: skip
def test_the_likely_cause_stands_first(stored: Any, asked: Any, cause: str) -> None:
    first = message(stored, asked).splitlines()[1]
    assert first.startswith("likely cause: ")
    assert cause in first


def test_a_part_of_the_checkpoint_is_told_by_one_line() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    step = {"model": model, "optim": optimizer, "step": 1}
    assert message(step, torch.nn.Linear(3, 2)).splitlines()[1:] == [
        "likely cause: `like` is stored under 'model/': pass under='model/' to load this part alone"
    ]
    for options in ({"unexpected": "skip"}, {"strict": False}):
        assert "pass under='model/'" in message(step, torch.nn.Linear(3, 2), **options)
    lines = message(step, {"model": torch.nn.Linear(3, 2)}).splitlines()
    assert "only='model/**' loads this part alone" in lines[1]
    settings = len(optimizer.param_groups[0]) + 2  # both betas, and both parameters
    leaves = 6 + settings
    assert lines[4].split() == ["optim/**", "unexpected", str(leaves), "leaves", "-"]
    assert len(lines) == 6


def test_what_differs_in_the_part_is_told_with_it() -> None:
    step = {"params": {"w": np.ones((2, 3)), "b": np.ones(3), "c": 1, "d": np.ones(1)}, "n": 0}
    like = {"w": np.ones((2, 4)), "b": np.ones(3, np.float32), "c": np.ones(2), "e": np.ones(2)}
    text = message(step, like)
    assert "pass under='params/' to load this part alone\nthat part would still differ:" in text
    rows = {line.split()[0]: line.split()[1] for line in text.splitlines()[-5:]}
    assert rows == {"b": "dtype", "c": "kind", "d": "unexpected", "e": "missing", "w": "shape"}


def test_moments_are_not_taken_for_the_parameters() -> None:
    params = {"w": np.ones((2, 3)), "b": np.ones(3)}
    step = {"opt": {"mu": params, "nu": params}, "params": params}
    assert "under 'params/', and also under 'opt/mu/', 'opt/nu/': pass under='params/'" in message(
        {"opt": {"mu": {k: x + 1 for k, x in params.items()}, "nu": step["opt"]["nu"]},
         "params": {k: x + 2 for k, x in params.items()}}, params
    )  # fmt: skip


def test_the_rule_for_transposed_arrays_works() -> None:
    stored = {"a": np.arange(6.0).reshape(2, 3)}
    text = message(stored, {"a": np.zeros((3, 2))})
    rule = text.partition("such as `")[2].partition("`")[0]
    got = unickpt.load(
        "memory://mismatch/table", {"a": np.zeros((3, 2))}, rules=unickpt.Rules.parse(rule)
    )
    assert np.array_equal(got["a"], stored["a"].T)


def flax(**modules: Any) -> dict[str, Any]:
    return {"params": modules}


class Net(torch.nn.Module):
    def __init__(self, convolution: bool = False) -> None:
        super().__init__()
        self.up = torch.nn.Linear(3, 2)
        if convolution:
            self.conv = torch.nn.Conv2d(3, 4, (2, 5))


UP = {"kernel": np.arange(6, dtype=np.float32).reshape(3, 2), "bias": np.ones(2, np.float32)}
CONV = {"kernel": np.ones((2, 5, 3, 4), np.float32), "bias": np.ones(4, np.float32)}


@pytest.mark.parametrize(
    ("stored", "like", "rules"),
    [
        (flax(up=UP), Net(), 'Rules.preset("flax")'),
        (flax(up=UP), {"model": Net()}, 'Rules.parse("include flax under <-> model/")'),
        (
            {"a": flax(up=UP)},
            {"a": {"b": Net()}},
            'Rules.parse("include flax under a/ <-> a/b/")',
        ),
        (
            flax(up=UP, conv=CONV),
            Net(convolution=True),
            r'Rules.parse("include flax\ninclude flax-conv")',
        ),
        (Net(), flax(up=UP), 'Rules.preset("flax").inverse'),
        (
            {"model": Net()},
            flax(up=UP),
            'Rules.parse("include flax under <-> model/").inverse',
        ),
    ],
)  # fmt: skip
def test_the_rules_between_flax_and_torch_work(stored: Any, like: Any, rules: str) -> None:
    lines = message(stored, like).splitlines()
    assert len(lines) == 2  # the cause explains all differences
    assert lines[1].endswith(f" Load with rules=unickpt.{rules}")
    parsed = eval(f"unickpt.{rules}", {"unickpt": unickpt})
    unickpt.load("memory://mismatch/table", like, rules=parsed)


def test_weights_of_torch_are_not_taken_for_flax() -> None:
    """A bias alone, names with signs of the notation, and other shapes."""
    for stored, like in (
        (flax(up={"bias": np.ones(2)}), {"up.bias": np.ones(2)}),
        ({"a b": flax(up={"kernel": np.ones(2)})}, {"up.weight": np.ones(2)}),
        (flax(up={"kernel": np.ones((3, 2))}), {"up.weight": np.ones((2, 4))}),
    ):
        assert "Flax" not in message(stored, like)


def test_a_renamed_matrix_that_is_transposed_gets_a_rule() -> None:
    stored = {"m": {name: {"kernel": np.ones((3, 2))} for name in "ab"}}
    like = {"m": {name: {"weight": np.zeros((2, 3))} for name in "ab"}}
    rule = message(stored, like).partition("such as `")[2].partition("`")[0]
    assert rule == "m/a/kernel [i o] <-> m/a/weight [o i]"


def test_a_leaf_of_both_sides_that_no_rule_maps_gets_a_rule() -> None:
    options = {"rules": unickpt.Rules.parse("a <-> b"), "unexpected": "skip"}
    lines = message({"a": 1, "step": 3}, {"b": 1, "step": 0}, **options).splitlines()
    assert lines[1].endswith("requested 'step', stored 'step'. Add rules such as `step <-> step`")


def test_what_has_another_shape_is_no_renamed_leaf() -> None:
    text = message({"old": [np.zeros(2)] * 3}, {"new": [np.zeros(5)] * 3})
    assert "likely cause" not in text


def test_the_table_is_sorted_and_short() -> None:
    names = [f"{kind}{i * 7919 % 101}" for i in range(90) for kind in "zy"]
    stored = {name: np.zeros(at) for at, name in enumerate(names)}
    text = message(stored, {})
    lines = text.splitlines()
    assert len(lines) <= 40
    assert lines[-1] == "  ... and 144 more rows"
    shown = [line.split()[0] for line in lines[3:-1]]
    assert shown == sorted(names, key=lambda name: (name[0], int(name[1:])))[: len(shown)]


def test_every_process_prints_the_same_table() -> None:
    """Whatever the seed of its hashes."""
    program = """
import numpy as np, unickpt
stored = {f"{i * 7}/a": np.zeros(i) for i in range(20)} | {"r": unickpt.PerProcess(1)}
unickpt.save("memory://c", stored)
try:
    unickpt.load("memory://c", {f"{i * 5}/b": np.zeros(i) for i in range(20)} | {"x": 1})
except unickpt.LoadMismatch as error:
    print(error)
"""
    texts = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(texts) == 1
    assert "difference" in texts.pop()


def test_many_names_take_no_quadratic_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by how many pairs of names are looked at."""
    looked = []
    difference = suggestions._difference
    monkeypatch.setattr(
        suggestions, "_difference", lambda a, b: looked.append(1) or difference(a, b)
    )
    rows = {f"{{}}/{i}/{j}/w": "float32[2]" for i in range(50) for j in range(40)}
    found = suggestions.causes(
        {name.format("params"): text for name, text in rows.items()},
        {name.format("model"): text for name, text in rows.items()},
    )
    assert [len(cause.pairs) for cause in found] == [2000]
    assert len(looked) <= 10 * 2000
    looked.clear()
    one = {f"l/{i}/w": "float32[2]" for i in range(2000)}
    assert (
        suggestions.causes(one, {f"l/{i + 2000}/w": text for i, text in enumerate(one.values())})
        == []
    )
    assert len(looked) <= 10 * 2000


def test_hostile_names_take_no_more_than_others() -> None:
    """As many numbers as would make a product that no memory holds; more digits than an int takes;
    and so many components that all their endings would fill gigabytes."""
    wide = ["/".join(str(i * k % 7) for k in range(1, 60)) for i in range(40)]
    assert fold(wide) == wide
    names = [*wide, "9" * 5000, "x/" * 400_000]
    unickpt.save("memory://mismatch/hostile", {"w": 1})
    like = {"values": dict.fromkeys(names, 1)}
    with pytest.raises(unickpt.LoadMismatch):
        unickpt.load("memory://mismatch/hostile", like)
    assert suggestions.causes({"y." * 400_000: ""}, {"x." * 400_000: ""}) == []
    assert suggestions.causes({"a" * 600 + "x": ""}, {"a" * 600 + "y": ""}) == []


def test_keywords_that_load_does_not_take_are_refused_by_name(tmp_path: Path) -> None:
    """Also where there is nothing to load."""
    wrong: dict[str, Any] = {"strikt": False}
    with pytest.raises(TypeError, match="'strikt'"):
        unickpt.load(tmp_path / "none", **wrong)
    with unickpt.Checkpointer(tmp_path) as run:
        with pytest.raises(TypeError, match="'strikt'"):
            run.load(**wrong)
        with pytest.raises(unickpt.CheckpointNotFound):
            run.load()
