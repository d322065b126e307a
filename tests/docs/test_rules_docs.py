"""Every example of docs/rules.md does what the text beside it says, in both directions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.rule_cases import Case, flat_names, flat_tree, leaf, read_case

import unickpt
from unickpt import Rules
from unickpt.rules import parser

DOCS = (Path(TESTS).parent / "docs" / "rules.md").read_text()
EXAMPLES = re.findall(r"```rules\n(.*?)```", DOCS, re.S)


def fact(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return (value.dtype.name, value.shape)
    return value


def same(a: Any, b: Any) -> bool:
    return fact(a) == fact(b) and (not isinstance(a, np.ndarray) or a.tobytes() == b.tobytes())


@pytest.mark.parametrize("text", EXAMPLES, ids=[e.splitlines()[0][:40] for e in EXAMPLES])
def test_example(text: str, tmp_path: Path) -> None:
    case = read_case(text)
    assert case.stored, "an example says what is stored"
    rng = np.random.default_rng(0)
    stored = {name: leaf(value, rng) for name, value in case.stored.items()}
    unickpt.save(tmp_path / "left", flat_tree(stored))
    rules = Rules.parse(text)

    made = flat_names(unickpt.load(tmp_path / "left", rules=rules))
    assert {name: fact(value) for name, value in made.items()} == case.makes

    asked = {name: leaf(value, rng) for name, value in case.makes.items()}
    asked |= {"rotary.inv_freq": np.arange(3.0)} if "inv_freq" in text else {}
    given = flat_names(unickpt.load(tmp_path / "left", flat_tree(asked), rules=rules))
    assert all(same(made[name], given[name]) for name in made)
    check_back(case, rules, stored, made, tmp_path)


def check_back(
    case: Case, rules: Rules, stored: dict[str, Any], made: dict[str, Any], path: Path
) -> None:
    unickpt.save(path / "right", flat_tree(made))
    like = {name: leaf(value, np.random.default_rng(1)) for name, value in case.stored.items()}
    back = flat_names(unickpt.load(path / "right", flat_tree(like), rules=rules.inverse))
    if not case.inexact:
        assert all(same(back[name], stored[name]) for name in stored)


def test_the_other_texts_of_the_page_are_read() -> None:
    blocks = DOCS.split("```")[1::2]
    plain = [block for block in blocks if block.startswith("\n")]
    assert len(plain) == 4
    for text in plain:
        assert parser.parse(text)


def test_the_function_of_elements_of_the_page(tmp_path: Path) -> None:
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", DOCS, re.S) if "decay" in c]
    names: dict[str, Any] = {}
    exec(code, names)
    stored = np.random.default_rng(0).random((2, 3, 5))
    unickpt.save(tmp_path / "c", {"ssm": {"A_log": stored}})
    made = unickpt.load(tmp_path / "c", rules=names["rules"])
    assert same(made["layers.1.A"], -np.exp(stored[1].T))
    unickpt.save(tmp_path / "d", made)
    back = unickpt.load(tmp_path / "d", rules=names["rules"].inverse)
    assert np.allclose(back["ssm"]["A_log"], stored)


def test_the_function_of_the_page(tmp_path: Path) -> None:
    (code,) = [c for c in re.findall(r"```python\n(.*?)```", DOCS, re.S) if "cumulative" in c]
    names: dict[str, Any] = {}
    exec(code, names)
    steps = np.arange(12, dtype=np.int32).reshape(4, 3)
    unickpt.save(tmp_path / "c", {"steps": steps})
    made = unickpt.load(tmp_path / "c", rules=names["rules"])
    assert same(made["positions"], steps.cumsum(axis=0, dtype=np.int32))
    with pytest.raises(unickpt.errors.RuleError, match="no inverse"):
        _ = names["rules"].inverse
