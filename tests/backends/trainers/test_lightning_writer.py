"""Files of Lightning that unickpt writes, of what its plugin saved, as torch reads them."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import in_job

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf
from unickpt.backends.trainers import lightning

if find_spec("lightning") is None:  # not imported here: `lightning_jobs` makes that faster
    pytest.skip("needs lightning", allow_module_level=True)
pytestmark = pytest.mark.integration

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from support.lightning_jobs import UnickptCheckpointIO, torch
    from support.lightning_values import VALUES, assert_same

    from unickpt.integrations.lightning import values

FAST = SaveOptions(fsync=False)


def saved(state: dict[str, Any], path: Path) -> Path:
    UnickptCheckpointIO(FAST, background=False).save_checkpoint(state, path)
    return path


def exported(state: dict[str, Any], folder: Path, **given: Any) -> Any:
    """What torch reads in the file that is made of a checkpoint of the plugin."""
    path = saved(state, folder / "ours.ckpt")
    unickpt.convert(path, folder / "theirs.ckpt", to="lightning", options=FAST)
    return torch.load(folder / "theirs.ckpt", **given)


def test_values_of_all_types_come_back_as_lightning_would_have_pickled_them(tmp_path: Path) -> None:
    more = {
        "tied": [VALUES["state_dict"]["w"], VALUES["state_dict"]["w"]],
        "more": {
            "days": np.array(["2020-01-01", "NaT"], "M8[D]"),
            "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            "deep": {(Path("a"), (1.5, frozenset({(2, "b")}))): [np.int8(3)]},
            "strange keys": {(1.5, 2): torch.ones(2), 1 << 70: {1, "a", None}},
            "default": VALUES["hyper_parameters"]["counts"].__class__(None, {"a": torch.ones(1)}),
        },
    }
    found = exported(VALUES | more, tmp_path, weights_only=False)
    torch.save(VALUES | more, tmp_path / "pickled.ckpt")
    assert_same(found, torch.load(tmp_path / "pickled.ckpt", weights_only=False))
    assert "unickpt_types" not in found


def test_every_type_that_the_plugin_stores_is_written() -> None:
    assert {kind.name for kind in values._TYPES} == set(lightning._TYPED)


def test_what_torch_takes_without_pickle_it_takes_of_an_export(tmp_path: Path) -> None:
    taken = ("dtype", "device", "size", "sizes", "complex", "number", "raw", "milestones")
    state = {**VALUES, "hyper_parameters": {n: VALUES["hyper_parameters"][n] for n in taken}}
    del state["callbacks"]  # they have a Path
    state["hyper_parameters"]["by float"] = {0.5: 1, None: [2]}
    found = exported(state, tmp_path, weights_only=True, mmap=True)
    assert_same(found, state)


def test_arrays_of_numpy_are_taken_by_those_who_allow_them(tmp_path: Path) -> None:
    state = {"state_dict": {}, "random": np.random.default_rng(1).integers(0, 256, 900, np.uint8)}
    np_core: Any = np.core if not hasattr(np, "_core") else np._core
    allowed = [np_core.multiarray._reconstruct, np.ndarray, np.dtype, np.dtypes.UInt8DType]
    with torch.serialization.safe_globals(allowed):
        assert_same(exported(state, tmp_path, weights_only=True), state)


def test_configurations_of_omegaconf_come_back(tmp_path: Path) -> None:
    omegaconf = pytest.importorskip("omegaconf")
    create, of = omegaconf.OmegaConf.create, omegaconf.OmegaConf
    config, items = create({"lr": 0.1, "of": "${lr}", "later": "???"}), create([1, {"a": None}])
    of.set_struct(config, True)
    of.set_readonly(items, True)
    state = {"state_dict": {}, "a": config, "b": items, "c": create({}), "d": omegaconf.ListConfig}
    found = exported(state, tmp_path, weights_only=False)
    assert found == state
    assert [type(x) for x in found.values()] == [type(x) for x in state.values()]
    flags = [(of.is_struct(found[x]), of.is_readonly(found[x])) for x in "abc"]
    assert flags == [(True, None), (None, True), (None, None)]
    assert found["a"].of == 0.1


def test_processes_write_the_same_file(tmp_path: Path) -> None:
    state = {**VALUES, "texts": {"a", "b", ("c", 1), None}}
    path = saved({**state, "large": torch.arange(100_000.0)}, tmp_path / "ours.ckpt")
    unickpt.convert(path, tmp_path / "one.ckpt", to="lightning", options=FAST)

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(path, tmp_path / "three.ckpt", to="lightning", options=mine)

    in_job(3, run)
    assert (tmp_path / "one.ckpt").read_bytes() == (tmp_path / "three.ckpt").read_bytes()


def test_what_cannot_become_a_file_of_lightning_is_refused(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(3)}, options=FAST)
    with pytest.raises(UnsupportedLeaf, match=r"no dict with 'state_dict'; `--to torch`"):
        unickpt.convert(tmp_path / "c", tmp_path / "c.ckpt", to="lightning")
    path = saved({"state_dict": {"w": torch.ones(3)}, "p": Path("a")}, tmp_path / "ours.ckpt")
    with pytest.raises(
        unickpt.errors.InvalidPath, match=r"one file: choose a path that ends in \.ckpt"
    ):
        unickpt.convert(path, tmp_path / "theirs", to="lightning")
    renamed = unickpt.Rules.parse("p <-> q\ndefault {leaf...} <-> {leaf...}")
    with pytest.raises(UnsupportedLeaf, match=r"'p' is stored as a path, and rules renamed"):
        unickpt.convert(path, tmp_path / "theirs.ckpt", to="lightning", rules=renamed)
    few = SaveOptions(budget_bytes=1000)
    array = saved({"state_dict": {}, "a": np.ones(300), "b": np.ones(3)}, tmp_path / "array.ckpt")
    with pytest.raises(UnsupportedLeaf, match=r"'a': float64\[300\].*budget_bytes=14544.*a <-> dr"):
        unickpt.convert(array, tmp_path / "theirs.ckpt", to="lightning", options=few)
    assert [x.name for x in tmp_path.glob("*theirs*")] == []


@pytest.mark.parametrize(
    ("types", "value", "words"),
    [
        ("torch.dtype", "load", "has no dtype 'load'"),
        ("torch.device", "os.system", "has no device"),
        ("omegaconf type", "os", "'x' is not a omegaconf type"),
        ("omegaconf", 3, "neither a dict nor a list"),
        ("items", [["a"]], "'x' is not a items"),
    ],
)
def test_forged_types_name_nothing_else(tmp_path: Path, types: str, value: Any, words: str) -> None:
    unickpt.save(
        tmp_path / "c",
        {"state_dict": {}, "x": value, "unickpt_types": f'{{"x": ["{types}"]}}'},
        options=FAST,
    )
    with pytest.raises(unickpt.CheckpointCorrupt, match=words):
        unickpt.convert(tmp_path / "c", tmp_path / "c.ckpt", to="lightning")
