"""Steps of Keras' OrbaxCheckpoint that unickpt writes; test_keras_jobs.py goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import PerProcess, Rules, SaveOptions, UnsupportedLeaf
from unickpt.backends.orbax.keras_writer import CONFIG, OTHERS, TRAINED, VARIABLES

FAST = SaveOptions(fsync=False)
NOTED = {
    CONFIG: {"class_name": "Sequential", "config": {"name": "m"}},
    VARIABLES: {TRAINED: ["m/dense/kernel", "m/norm/gamma"], OTHERS: ["m/norm/mean"]},
}


def step() -> dict[str, Any]:
    norm = {"gamma": np.ones(3, np.float32), "mean": np.arange(3.0)}
    return {
        "model": {"m": {"dense": {"kernel": np.eye(3)}, "norm": norm}},
        "optimizer": {"adam": {"iteration": np.int32(7)}},
        "metrics": {"loss": {"total": np.float32(0.5)}},
        "fit": {"epoch": 2, "best": 0.25, "random": PerProcess({"now": 1})},
    }


def test_variables_are_where_set_state_tree_looks_for_them(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", step(), metadata=NOTED, options=FAST)
    report = unickpt.convert(tmp_path / "c", tmp_path / "7", to="keras", options=FAST)
    assert sorted(report.left_out) == ["fit/best", "fit/epoch", "fit/random"]
    assert report.arrays == 5
    found = unickpt.load(tmp_path / "7")
    assert set(found) == {"pytree", "model_config"}
    state = found["pytree"]
    assert state[TRAINED].keys() == state[OTHERS].keys() == {"m"}
    assert {key: [*part] for key, part in state[TRAINED]["m"].items()} == {
        "dense": ["kernel"],
        "norm": ["gamma"],
    }
    assert np.array_equal(state[OTHERS]["m"]["norm"].pop("mean"), np.arange(3.0))
    assert state[OTHERS] == {"m": {"norm": {}}}
    assert state["optimizer_variables"]["adam"]["iteration"].dtype == np.int32
    assert state["metrics_variables"]["loss"]["total"] == np.float32(0.5)
    assert '"class_name": "Sequential"' in found["model_config"]["config"]


def test_a_checkpoint_of_weights_has_no_configuration(tmp_path: Path) -> None:
    noted = {VARIABLES: {TRAINED: ["m/dense/kernel"], OTHERS: []}}
    weights = {"model": {"m": {"dense": {"kernel": np.eye(2)}}}}
    unickpt.save(tmp_path / "c", weights, metadata=noted, options=FAST)
    unickpt.convert(tmp_path / "c", tmp_path / "7", to="keras", options=FAST)
    assert sorted(found.name for found in (tmp_path / "7").iterdir()) == [
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
        "pytree",
    ]
    assert unickpt.load(tmp_path / "7")[OTHERS] == {}


@pytest.mark.parametrize(
    ("change", "noted", "rules", "words"),
    [
        ({"ema": {"w": np.ones(2)}}, NOTED, None, "it holds 'ema'"),
        ({"model": np.ones(2)}, NOTED, None, "it holds no 'model'"),
        ({}, {}, None, "do not say which variables of the model are trained"),
        ({}, {VARIABLES: {TRAINED: 3}}, None, "do not say which variables"),
        (
            {},
            NOTED,
            "model/m/{p...} <-> model/n/{p...}\ndefault {x...} <-> {x...}",
            "'model/n/dense/kernel'.*rules gave it another name",
        ),
        ({"metrics": {"p": PerProcess(1)}}, NOTED, None, "'metrics/p' differs by process"),
    ],
)
def test_what_keras_would_skip_is_refused(
    change: dict[str, Any], noted: Any, rules: str | None, words: str, tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "c", step() | change, metadata=noted, options=FAST)
    parsed = None if rules is None else Rules.parse(rules)
    with pytest.raises(UnsupportedLeaf, match=words):
        unickpt.convert(tmp_path / "c", tmp_path / "7", to="keras", rules=parsed, options=FAST)
    assert not (tmp_path / "7").exists()
