"""Presets against the converters of other projects, whose results are fixtures.

`tests/fixtures/presets` has names, shapes and digests; test_presets_live.py holds them against the
projects themselves, where these are installed.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support import preset_cases
from support.broken_rules import each_broken, files, load
from support.list_presets import list_presets
from support.preset_cases import Arrays, PresetCase, digest, numbers, shapes_of
from support.rule_cases import flat_names, flat_tree

import unickpt
from unickpt import LoadMismatch, Rules
from unickpt.errors import RuleError
from unickpt.plugins.observe.agreement import through

CASES = [*preset_cases.all_cases()]
IDS = [f"{case.preset}-{case.model}-{at}" for at, case in enumerate(CASES)]
each_case = pytest.mark.parametrize("at", range(len(CASES)), ids=IDS)

NAMES = sorted({case.preset for case in CASES})
each_preset = pytest.mark.parametrize("preset", NAMES)


def asked(preset: str, side: str | None = None) -> set[str]:
    """The sizes that the head of a preset says are to be given.

    Arguments:
        preset: its name.
        side: the side that alone is known, as in `convert` from it.
    """
    tags = list_presets.comments(preset)[1]
    texts = [tags.get("Sizes", ""), tags.get(f"Sizes from the {side}", "")]
    return {name for text in texts for name in text.split(", ") if name}


MADE = "memory://sources/made"
NOT_ASKED = {"lm_head.weight"}
"""What ties may make more of, where nothing says what is asked for."""


def sizes_of(case: PresetCase, names: set[str]) -> dict[str, int]:
    return {name: size for name, size in case.sizes.items() if name in names}


def rules_of(case: PresetCase, side: str | None = None) -> Rules:
    return preset_with(case.preset, **sizes_of(case, asked(case.preset, side)))


@cache
def preset_with(preset: str, **sizes: int) -> Rules:
    return Rules.preset(preset, sizes=sizes)


def is_rounded(case: PresetCase, name: str) -> bool:
    """Whether the factor of an array, such as 50.5, does not come back in the last bit."""
    shape = case.left[name][0]
    return "embedding" in name and "gemma" in case.preset and shape[1] > 1000


@cache
def given(at: int) -> tuple[Arrays, Arrays]:
    """What a case's converters were given: both sides."""
    case = CASES[at]
    return numbers(shapes_of(case.left), 1), numbers(shapes_of(case.right), 2)


@cache
def stored(at: int) -> tuple[str, str]:
    """Checkpoints of both sides, which all tests of a case read."""
    paths = f"memory://sources/{at}/left", f"memory://sources/{at}/right"
    for path, arrays in zip(paths, given(at), strict=True):
        unickpt.save(path, flat_tree(arrays))
    return paths


def zeros(shapes: dict[str, tuple[int, ...]]) -> Arrays:
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


def expected(side: preset_cases.Side) -> dict[str, str]:
    return {name: text for name, (_, text) in side.items() if text is not None}


def digests(arrays: Arrays, names: dict[str, str]) -> dict[str, str]:
    return {name: digest(arrays[name]) for name in names if name in arrays}


@each_case
def test_to_the_right_and_back(at: int) -> None:
    case, left = CASES[at], given(at)[0]
    rules = rules_of(case)
    like = flat_tree(zeros(shapes_of(case.right)))
    made = flat_names(unickpt.load(stored(at)[0], like, rules=rules))
    assert made.keys() == case.right.keys()
    assert digests(made, expected(case.right)) == expected(case.right)

    unickpt.save(MADE, flat_tree(made), overwrite=True)
    again = flat_tree(zeros(shapes_of(case.left)))
    back = flat_names(unickpt.load(MADE, again, rules=rules.inverse))
    for name in left.keys() - {*case.dropped}:
        assert np.array_equal(back[name], left[name]) or is_rounded(case, name), name


@each_case
def test_to_the_left_and_back(at: int) -> None:
    case, right = CASES[at], given(at)[1]
    rules = rules_of(case)
    like = flat_tree(zeros(shapes_of(case.left)))
    made = flat_names(unickpt.load(stored(at)[1], like, rules=rules.inverse))
    assert digests(made, expected(case.left)) == expected(case.left)

    unickpt.save(MADE, flat_tree(made), overwrite=True)
    again = flat_tree(zeros(shapes_of(case.right)))
    back = flat_names(unickpt.load(MADE, again, rules=rules))
    for name, x in right.items():
        if name in case.dropped:
            continue
        assert np.array_equal(back[name], x), name


@each_case
def test_where_only_the_right_side_is_known(at: int) -> None:
    case = CASES[at]
    rules = rules_of(case, "right")
    made = flat_names(unickpt.load(stored(at)[1], rules=rules.inverse))
    assert made.keys() == case.left.keys() - {*case.dropped}
    assert digests(made, expected(case.left)) == expected(case.left)


@each_case
def test_where_only_the_left_side_is_known(at: int) -> None:
    case = CASES[at]
    rules = rules_of(case, "left")
    made = flat_names(unickpt.load(stored(at)[0], rules=rules))
    assert case.right.keys() - {*case.dropped} <= made.keys()
    assert made.keys() - case.right.keys() <= NOT_ASKED
    assert digests(made, expected(case.right)) == expected(case.right)


@each_preset
def test_it_asks_for_what_its_head_says(preset: str) -> None:
    at, case = next((at, case) for at, case in enumerate(CASES) if case.preset == preset)
    for side, path in zip(("left", "right"), stored(at), strict=True):
        names = asked(preset, side)
        for name in names:
            rules = Rules.preset(preset, sizes=sizes_of(case, names - {name}))
            with pytest.raises(RuleError, match=r"the size of .* unknown"):
                unickpt.load(path, rules=rules.inverse if side == "right" else rules)


@each_preset
def test_two_sizes_of_a_model_at_least(preset: str) -> None:
    matrices = [
        {shape for shape, _ in case.right.values() if len(shape) > 1} - dropped_shapes(case)
        for case in CASES
        if case.preset == preset
    ]
    assert any(one.isdisjoint(other) for one in matrices for other in matrices), "no other sizes"


def dropped_shapes(case: PresetCase) -> set[tuple[int, ...]]:
    return {case.right[name][0] for name in case.dropped if name in case.right}


# --- what would go wrong ------------------------------------------------------------------------


def passes(rules: Rules, at: int) -> bool:
    """Whether both directions of a case come out right."""
    case, (left, right) = CASES[at], given(at)
    try:
        there = through(rules, left, right)
        back = through(rules.inverse, there, left)
        made = through(rules.inverse, right, left)
    except (RuleError, LoadMismatch):
        return False
    return (
        digests(there, expected(case.right)) == expected(case.right)
        and digests(made, expected(case.left)) == expected(case.left)
        and all(
            np.array_equal(back[n], x) or is_rounded(case, n)
            for n, x in left.items()
            if n not in case.dropped
        )
    )


@pytest.mark.slow  # it tries hundreds of wrong presets
@pytest.mark.filterwarnings("ignore::unickpt.errors.RuleWarning")
@each_preset
def test_each_rule_matters(preset: str, tmp_path: Path) -> None:
    """A statement that is missing, or has another order of axes or names, is noticed."""
    at = [n for n, case in enumerate(CASES) if case.preset == preset]
    sizes = {n: sizes_of(CASES[n], asked(preset)) for n in at}

    def all_pass(texts: dict[str, list[str]]) -> bool:
        try:
            return all(passes(load(texts, preset, tmp_path, sizes[n]), n) for n in at)
        except RuleError:
            return False

    assert all_pass(files(preset))
    others = {*NAMES} - {preset}  # these have their own cases
    for wrong, what in each_broken(files(preset), others):
        assert not all_pass(wrong), what
