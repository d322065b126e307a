"""`unickpt rules observe`, `draft` and `check`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

CONVERTER = """
import numpy as np

def to_hf(state):
    return {"up.weight": state["params"]["up"].T, "norm.weight": state["params"]["norm"] + 1}

def quantise(state):
    return {"up": np.round(state["params"]["up"]), "norm": state["params"]["norm"]}

number = 3
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("a_converter.py").write_text(CONVERTER)
    up = np.random.default_rng(0).random((4, 4), np.float32)
    unickpt.save("a", {"params": {"up": up, "norm": np.zeros(4, np.float32)}})
    unickpt.save("b", {"up.weight": up.T.copy(), "norm.weight": np.ones(4, np.float32)})


def run(*words: str) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["rules", *words])
    return found.exit_code, found.stdout, found.stderr


@pytest.mark.parametrize("function", ["a_converter:to_hf", "./a_converter.py:to_hf"])
def test_observe_and_check(function: str) -> None:
    code, out, err = run("observe", function, "--example", "a", "-o", "my.rules")
    assert (code, out) == (0, "")
    assert "2 arrays by 2 rules" in err
    text = Path("my.rules").read_text()
    assert "params/up [i o]     <-> up.weight [o i]" in text
    assert "params/norm [a] + 1 <-> norm.weight [a]" in text
    assert run("check", "my.rules", "a", "b")[0] == 0
    assert run("check", "my.rules", "--inverse", "b", "a")[0] == 0
    unickpt.convert("a", "c", rules=unickpt.Rules.load("my.rules"))
    assert unickpt.diff("c", "b").same


def test_check_finds_a_wrong_transpose() -> None:
    Path("wrong.rules").write_text(
        "params/up <-> up.weight\nparams/norm [e] + 1 <-> norm.weight [e]\n"
    )
    code, out, _ = run("check", "wrong.rules", "a", "b")
    assert code == 1
    assert "axes exchanged" in out
    code, out, _ = run("check", "wrong.rules", "a", "b", "--json")
    assert code == 1
    assert list(json.loads(out)["differences"]) == ["up.weight"]


def test_shapes_in_a_file() -> None:
    shapes = {"params/up": [3, 5], "params/norm": {"shape": [4], "dtype": "bfloat16"}}
    Path("shapes.json").write_text(json.dumps(shapes))
    code, out, _ = run("observe", "a_converter:to_hf", "--example", "shapes.json", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["report"]["moved"] == ["up.weight"]
    assert found["report"]["scaled"] == ["norm.weight"]


def test_what_is_no_rule_is_not_written_unless_asked() -> None:
    arguments = "observe", "a_converter:quantise", "--example", "a", "-o", "q.rules"
    code, _, err = run(*arguments)
    assert code == 2
    assert "'up' depends on values: element [" in err
    assert not Path("q.rules").exists()
    assert run(*arguments, "--partial")[0] == 0
    assert "params/norm <-> norm" in Path("q.rules").read_text()


def test_draft() -> None:
    code, _, err = run("draft", "a", "b", "-o", "my.rules")
    assert code == 0
    assert "1 rule certain" in err
    assert "params/up [i o] <-> up.weight [o i]" in Path("my.rules").read_text()


@pytest.mark.parametrize(
    ("function", "example", "message"),
    [
        ("a_converter", "a", "is not MODULE:FUNCTION"),
        ("a_converter:nothing", "a", "a_converter has no nothing"),
        ("no_such_module:f", "a", "cannot be imported"),
        ("none.py:f", "a", "there is no file none.py"),
        ("a_converter:number", "a", "is of type int, not a function"),
        ("a_converter:to_hf", "nowhere", "nowhere"),
        ("a_converter:to_hf", "bad.json", "must have {name: shape}"),
    ],
)
def test_mistakes(function: str, example: str, message: str) -> None:
    Path("bad.json").write_text("[1, 2]")
    code, _, err = run("observe", function, "--example", example)
    assert code == 2
    assert message in err


def test_a_part_of_a_checkpoint_is_an_example() -> None:
    Path("parts.py").write_text("def turn(state):\n    return {'up.weight': state['up'].T}\n")
    code, out, _ = run("observe", "parts:turn", "--example", "a", "--under", "params")
    assert (code, "up [i o] <-> up.weight [o i]" in out) == (0, True)
    Path("shapes.json").write_text('{"up": [3, 4]}')
    code, _, err = run("observe", "parts:turn", "--example", "shapes.json", "--under", "params")
    assert (code, "--under is for a checkpoint" in err) == (2, True)


def test_an_error_of_the_converter_is_shown_with_the_names_of_the_example() -> None:
    Path("wrong.py").write_text("def turn(state):\n    return {'up.weight': state['up'].T}\n")
    code, _, err = run("observe", "wrong:turn", "--example", "a")
    said = " ".join(err.split())
    assert code == 2
    assert "the converter turn raised KeyError: 'up'" in said
    assert "wrong.py:2" in said
    assert "the example has 2 arrays: 'params/up', 'params/norm'" in said
    assert "--under NAME" in said
