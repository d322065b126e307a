"""Objects of classes that no reader knows: kept as pickles, never run; their tensors are arrays."""

from __future__ import annotations

import collections
import json
import optparse
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import file_writers
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, Opaque
from unickpt.backends._files import pickles
from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global
from unickpt.cli.app import app
from unickpt.errors import UnsupportedFormat
from unickpt.format import index_json

WRITERS = {"zip": file_writers.torch_zip, "legacy": file_writers.torch_legacy}


def facts(value: Any) -> Any:
    """An object as its pickle describes it."""
    return pickles.read(pickle.dumps(value, 2), {})


def written(path: Path, value: Any, kind: str = "zip") -> Path:
    path.mkdir(exist_ok=True)
    (path / "x.pt").write_bytes(WRITERS[kind](value))
    return path


def ours(state: Any = None, args: tuple[Any, ...] = (), **more: Any) -> PickledCall:
    return PickledCall(Global("mine.Ours"), args, state, **more)


ARGS = optparse.Values(
    {"lr": 0.1, "names": {"a": (1, 2)}, "order": collections.OrderedDict(b=1, a={2})}
)


@pytest.mark.parametrize("kind", WRITERS)
def test_an_object_is_kept_as_a_pickle_of_it(kind: str, tmp_path: Path) -> None:
    shared = facts(ARGS)
    path = written(tmp_path / "x", {"args": shared, "list": [shared, 1], "step": 3}, kind)
    for found in (unickpt.open(path).values, unickpt.load(path)):
        value = found["args"]
        assert isinstance(value, Opaque)
        assert value.class_name == "optparse.Values"
        again = pickle.loads(value.pickle)
        assert again == ARGS
        assert type(again.order) is collections.OrderedDict
    assert unickpt.load(path)["list"] == [value, 1]


def test_it_passes_through_all_of_ours(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {"args": facts(ARGS), "w": np.arange(3.0)})
    unickpt.convert(path, tmp_path / "one")
    rules = unickpt.Rules.parse("args <-> config/args\nw <-> w")
    unickpt.convert(tmp_path / "one", tmp_path / "two", rules=rules)
    value = unickpt.open(path).values["args"]
    assert unickpt.open(tmp_path / "one").values["args"] == value
    assert unickpt.open(tmp_path / "two").values["config/args"] == value
    assert unickpt.diff(path, tmp_path / "one").same
    assert unickpt.load(tmp_path / "two")["config"]["args"] == value
    like = {"config": {"args": None}, "w": np.zeros(3)}
    assert unickpt.load(tmp_path / "two", like)["config"]["args"] == value
    assert unickpt.verify(tmp_path / "two").ok
    state = {"mine": unickpt.PerProcess(value), "all": [value], "raw": b"x"}
    unickpt.save(tmp_path / "three", state)
    loaded = unickpt.load(tmp_path / "three")
    assert (loaded["all"], loaded["raw"]) == ([value], b"x")
    assert list(loaded["mine"].values) == [value]
    other = written(
        tmp_path / "y", {"args": facts(optparse.Values({"lr": 1})), "w": np.arange(3.0)}
    )
    assert not unickpt.diff(tmp_path / "one", other).same


def test_a_reader_that_does_not_know_it_finds_bytes(tmp_path: Path) -> None:
    value = Opaque("mine.Ours", b"pickle")
    unickpt.save(tmp_path / "x", {"a": value})
    index = unickpt.open(tmp_path / "x").index
    stored = json.loads(index_json.encode(index))
    assert stored["tree"] == {"dict": [["a", {"wrapper": "*", "type": "pickle:mine.Ours"}]]}
    assert stored["values"] == {"a": {"bytes": "cGlja2xl"}}
    assert stored["features"] == []


def test_inspect_shows_it(tmp_path: Path) -> None:
    path = written(tmp_path / "x", {"args": facts(ARGS), "w": np.arange(3.0)})
    size = len(unickpt.open(path).values["args"].pickle)
    shown = CliRunner().invoke(app, ["inspect", str(path)]).output
    assert "opaque optparse.Values" in shown
    assert f"{size} B" in shown
    found = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(path)]).stdout)
    assert found["values"]["args"] == {"opaque": "optparse.Values", "size": size}
    one = CliRunner().invoke(app, ["inspect", str(path), "args"]).output
    assert f"<opaque 'optparse.Values', {size} bytes>" in one


@pytest.mark.parametrize("kind", WRITERS)
def test_tensors_in_objects_are_arrays(kind: str, tmp_path: Path) -> None:
    w, v = np.arange(6.0).reshape(2, 3), np.arange(4)
    state = {
        "plain": ours({"w": w, "lr": 0.1, "args": facts(ARGS)}),
        "slots": ours(({"a": 1}, {"w": w})),
        "other": ours([w]),
        "made": ours({"x": 1}, (5, v)),
        "items": ours(None, (), appended=[w], items=[("k", v)]),
        "deep": ours({"inner": ours({"w": w}), "again": [ours({"w": v})]}),
    }
    pickled = file_writers.TorchPickle
    original = pickled._facts

    def inside(self: Any, value: Any) -> Any:  # also in what follows a call
        made = original(self, value)
        if isinstance(made, PickledCall):
            made.appended, made.items = original(self, made.appended), original(self, made.items)
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pickled, "_facts", inside)
        found = unickpt.open(written(tmp_path / "x", state, kind))
    expected = {
        "plain/w": w, "slots/w": w, "other/state/0": w, "made/args/1": v, "items/0": w,
        "items/k": v, "deep/inner/w": w, "deep/again/0/w": v,
    }  # fmt: skip
    assert {name: found[name][...].tolist() for name in found} == {
        name: array.tolist() for name, array in expected.items()
    }
    assert (found.values["plain/lr"], found.values["slots/a"]) == (0.1, 1)
    assert (found.values["made/x"], found.values["made/args/0"]) == (1, 5)
    assert isinstance(found.values["plain/args"], Opaque)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "x")]).output
    assert "plain" in shown
    assert unickpt.load(tmp_path / "x")["deep"]["inner"]["w"].tolist() == w.tolist()


def test_names_that_meet_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "x", ours({"w": np.ones(1), "args": 5}, (1,)))
    with pytest.raises(UnsupportedFormat, match="two keys are both called 'args'"):
        unickpt.open(path)


def test_shared_objects_do_not_multiply(tmp_path: Path) -> None:
    large = ["x" * 10] * 3 + list(range(20_000))
    many = [ours({"large": large}) for _ in range(3000)]
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps(many))
    with pytest.raises(CheckpointCorrupt, match="more than"):
        unickpt.open(path)


def test_an_object_in_itself(tmp_path: Path) -> None:
    loop = ours({"x": 1})
    loop.state["self"] = loop
    path = tmp_path / "x.pt"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", dumps([loop, loop]))
    first, second = (unickpt.open(path).values[name] for name in ("0", "1"))
    found = pickles.read(first.pickle, {})
    assert found.state["self"] is found
    assert first == second


@pytest.mark.integration
def test_a_module_that_torch_saved_whole(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    state = {"net": net, "device": torch.device("cpu"), "rng": np.random.default_rng(0)}
    for zipped in (True, False):
        torch.save(state, tmp_path / "x.pt", _use_new_zipfile_serialization=zipped)
        found = unickpt.open(tmp_path / "x.pt")
        modules = {f"net/_modules/{n}/{kind}" for n in (0, 1) for kind in ("_parameters",)}
        assert {name.rpartition("/")[0] for name in found} >= modules
        weight = found["net/_modules/0/_parameters/weight"][...]
        assert np.array_equal(weight, net[0].weight.detach().numpy())
        device, rng = found.values["device"], found.values["rng"]
        assert pickle.loads(device.pickle) == torch.device("cpu")
        assert pickle.loads(rng.pickle).random() == np.random.default_rng(0).random()
