"""Patterns of other people's converters: each failed, or took many lines, before it was mended."""

from __future__ import annotations

import itertools

import numpy as np

from unickpt import Rules


def test_numbers_that_mean_kinds_on_both_sides_are_few_lines() -> None:
    """Mixtral in litgpt: `w1` becomes `fc_1`, `w3` becomes `fc_2`, for each expert."""
    kinds = {"w1": "fc_1", "w3": "fc_2", "w2": "proj"}

    def convert(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {name[:-2] + kinds[name[-2:]]: x for name, x in state.items()}

    example = {
        f"layers.{n}.experts.{x}.{kind}": (3, 5)
        for n, x, kind in itertools.product(range(3), range(4), kinds)
    }
    rules = Rules.observe(convert, example)
    assert rules.report is not None
    assert rules.report.lines <= 3


def test_numbers_of_kinds_that_no_formula_gives_are_listed() -> None:
    kinds = {"w1": "m7", "w3": "m2", "w4": "m5"}

    def convert(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {f"n.{name.split('.')[1]}.{kinds[name[-2:]]}": x for name, x in state.items()}

    example = {f"layers.{n}.{kind}": (3, 5) for n, kind in itertools.product(range(9), kinds)}
    rules = Rules.observe(convert, example)
    assert rules.report is not None
    assert rules.report.lines == 1


def test_scales_that_rounding_spreads_are_one() -> None:
    """Gemma 3 in MaxText: `/ sqrt(20)`, whose scales as seen lie on both sides of a rounded one."""
    divisor = np.float32(20**0.5)

    def convert(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"embedding": state["weight"] / divisor}

    rules = Rules.observe(convert, {"weight": (53, 20)})
    assert rules.report is not None
    assert not rules.report.refused
