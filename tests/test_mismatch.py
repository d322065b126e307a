"""The table of differences: all at once, folded, with what to do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import unickpt


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
    assert ["step", "kind", "plain", "int", "float64[2]"] in rows
    assert "5 differences" in text
    assert "cast=True" in text
    assert "strict=False" in text


def test_layers_fold() -> None:
    layer = {"q": np.zeros(2), "k": np.zeros(3)}
    text = message({"layers": [layer] * 1}, {"layers": [dict(layer) for _ in range(32)]})
    assert "layers/{1..31}/q" in text
    assert "layers/{1..31}/k" in text
    assert text.count("missing") == 3  # two rows and the advice


def test_a_near_miss_is_suggested() -> None:
    text = message({"encoder/w0": np.zeros(2)}, {"encoder/w1": np.zeros(2)})
    assert "did you mean: asked 'encoder%2Fw1', stored 'encoder%2Fw0'?" in text


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
