"""A part of a checkpoint as a checkpoint of its own: `under`."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import unickpt
from unickpt import LoadMismatch
from unickpt.cli.app import app
from unickpt.types import Box


def run(*arguments: str) -> str:
    """What a command prints."""
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def step(tmp_path: Path) -> str:
    """A training step with ties across its parts, plain values, and values by process."""
    weight = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {
        "model": {"a": {"w": weight, "list": [1, (2.5, "x")]}, "b.c": np.arange(4)},
        "ema": {"w": weight, "again": weight},
        "rng": unickpt.PerProcess({"seed": 3}),
        "step": 7,
    }
    unickpt.save(tmp_path / "step", state)
    return str(tmp_path / "step")


def test_a_container_is_loaded_as_if_it_were_all(step: str) -> None:
    found = unickpt.load(step, under="model")
    assert found["a"]["list"] == [1, (2.5, "x")]
    assert np.array_equal(found["b.c"], np.arange(4))
    assert list(unickpt.open(step).under("model/a")) == ["w"]
    like = {"w": np.zeros((2, 3), np.float32), "list": [0, (0.0, "")]}
    assert unickpt.load(step, like, under="model/a/")["w"] is like["w"]
    assert like["w"][1, 2] == 5


def test_a_leaf_and_a_list_have_names_too(step: str) -> None:
    assert unickpt.load(step, under="step") == 7
    assert unickpt.load(step, under="model/a/list/1") == (2.5, "x")
    assert unickpt.load(step, under="rng").values == ({"seed": 3},)
    whole = unickpt.load(step, under="model/a/w")
    assert np.array_equal(whole, np.arange(6, dtype=np.float32).reshape(2, 3))


def test_parts_of_names_end_with_a_dot(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    unickpt.save(tmp_path / "c", {"model." + n: x for n, x in model.state_dict().items()})
    fresh = torch.nn.Linear(3, 4)
    unickpt.load(tmp_path / "c", fresh, under="model.1.")
    assert torch.equal(fresh.weight, model[1].weight)
    said = r"nothing is stored under 'model' \(did you mean 'model\.'\?\)"
    with pytest.raises(LoadMismatch, match=said):
        unickpt.load(tmp_path / "c", fresh, under="model")


@pytest.mark.parametrize("under", ["model.", "/model", "./model/", "mdoel"])
def test_a_container_is_suggested_for_what_is_nearly_its_name(step: str, under: str) -> None:
    with pytest.raises(LoadMismatch, match=r"did you mean 'model'\?"):
        unickpt.load(step, under=under)


def test_a_slash_at_the_end_changes_nothing(step: str) -> None:
    assert unickpt.open(step).under("model/").index == unickpt.open(step).under("model").index


def test_what_is_tied_to_a_leaf_outside_is_an_array_inside(step: str) -> None:
    part = unickpt.open(step).under("ema")
    assert len(part.index.arrays) == 1
    assert len(part.index.aliases) == 1
    found = unickpt.load(step, under="ema")
    assert found["w"] is found["again"]
    assert found["w"][1, 0] == 3


def test_parts_of_parts_and_pickles(step: str) -> None:
    part = unickpt.open(step).under("model").under("a")
    assert part.reader.under == "model/a/"
    again = pickle.loads(pickle.dumps(part))
    assert repr(again) == repr(part)
    assert np.array_equal(again["w"][1], [3, 4, 5])
    assert np.array_equal(part["w"].read(part["w"].parts[0].box), part["w"][:])


def test_what_is_cut_into_parts_is_read_from_them(tmp_path: Path) -> None:
    data = np.arange(7 * 5, dtype=np.int32).reshape(7, 5)
    boxes = [Box((0, 0), (3, 5)), Box((3, 0), (7, 5))]
    fragments = unickpt.types.LocalFragments((7, 5), [(box, data[box.slices]) for box in boxes])
    unickpt.save(tmp_path / "c", {"m": {"w": fragments}, "w": np.zeros(3)})
    part = unickpt.open(tmp_path / "c").under("m")
    assert np.array_equal(part["w"][2:5, 1:], data[2:5, 1:])
    assert len(part["w"].parts) == 2
    one = part["w"].parts[1]
    assert np.array_equal(part.reader.open_part(part["w"]._entry, one).read().result(), data[3:])
    stored = unickpt.open(tmp_path / "c")
    assert part.reader.part_url(one) == stored.reader.part_url(stored["m/w"].parts[1])


def test_nothing_there_lists_what_is(step: str) -> None:
    said = r"under 'modle' \(did you mean 'model'\?\); there are 'model/' \(5 leaves\), 'ema/"
    with pytest.raises(LoadMismatch, match=said):
        unickpt.load(step, under="modle")
    with pytest.raises(LoadMismatch, match=r"step, under 'model/a/' does not fit `like`"):
        unickpt.load(step, {"w": np.zeros(3)}, under="model/a")


def test_rules_and_selections_name_leaves_without_it(step: str) -> None:
    rules = unickpt.Rules.parse("a/w [i o] <-> kernel [o i]\nb.c <-> bias\na/list/{x...} <-> drop")
    found = unickpt.load(step, under="model", rules=rules)
    assert found["kernel"].shape == (3, 2)
    assert set(unickpt.load(step, under="model", only="a/**")) == {"a"}


def test_damage_is_found_and_named(tmp_path: Path) -> None:
    data = np.arange(30_000, dtype=np.float32)
    unickpt.save(tmp_path / "c", {"model": {"w": data}})
    needle = data[:9].tobytes()
    for file in [path for path in (tmp_path / "c").rglob("*") if path.is_file()]:
        file.write_bytes(file.read_bytes().replace(needle, b"!" + needle[1:]))
    with pytest.raises(unickpt.CheckpointCorrupt, match="c: under 'model/', array 'w'"):
        unickpt.load(tmp_path / "c", under="model")


def test_the_record_of_a_conversion_goes_with_its_arrays(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"m": {"w": np.ones(3)}, "v": np.ones(2)})
    rules = unickpt.Rules.parse("m/w [n] <-> m/w [n] * 2\nv <-> v")
    unickpt.convert(tmp_path / "a", tmp_path / "b", rules=rules)
    again = unickpt.Rules.parse("w [n] <-> w [n] * 2")
    with pytest.raises(unickpt.errors.RuleError, match="second time"):
        unickpt.load(tmp_path / "b", rules=again, under="m")


@pytest.mark.plugins
def test_conversions_exports_and_comparisons_of_a_part(step: str, tmp_path: Path) -> None:
    rules = unickpt.Rules.parse("a/list/{y...} <-> drop\na/w <-> w\nb.c <-> c")
    unickpt.convert(step, tmp_path / "m.safetensors", to="safetensors", under="model", rules=rules)
    assert unickpt.diff(step, tmp_path / "m.safetensors", under="model", rules=rules).same
    unickpt.convert(step, tmp_path / "part", under="model")
    assert unickpt.verify(tmp_path / "part").ok
    assert unickpt.diff(step, tmp_path / "part", under="model").same
    assert unickpt.diff(step, step, under="ema").arrays == 2
    with pytest.raises(LoadMismatch, match="nothing is stored under 'optim'"):
        unickpt.diff(step, tmp_path / "part", under="optim")


@pytest.mark.plugins
def test_the_command_line(step: str, tmp_path: Path) -> None:
    run("export", step, str(tmp_path / "e.npz"), "--to", "npz", "--under", "ema")
    assert set(np.load(tmp_path / "e.npz")) == {"w", "again"}
    run("convert", step, str(tmp_path / "part"), "--under", "model")
    assert "same" in run("diff", step, str(tmp_path / "part"), "--under", "model")
    shown = run("inspect", step, "--under", "model/a")
    assert "under 'model/a/'" in shown
    assert "ema" not in shown


@pytest.mark.parametrize("exchange", [None, True, False])
def test_it_is_read_by_all_engines(step: str, exchange: Any) -> None:
    options = unickpt.LoadOptions(exchange=exchange)
    found = unickpt.load(step, under="ema", options=options)
    assert found["w"][0, 2] == 2


def test_a_run_loads_a_part_of_its_newest_step(tmp_path: Path) -> None:
    run = unickpt.Checkpointer(tmp_path / "run")
    run.save(3, {"model": {"w": np.ones(2)}, "step": 3})
    run.wait()
    assert run.load(under="model")["w"].tolist() == [1, 1]
