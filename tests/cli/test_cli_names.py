"""Names out of a checkpoint fake no lines of the output, do not change a terminal, and are cut."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

FAKE = "ERROR: damaged"
NAMES = [f"a\n{FAKE}", f"b\r{FAKE}", "c\x1b[2Jx", "[red]d", "e\u202ef", "g\u2028\u0085\x0bh"]
ODD = set("\x1b\r\u202e\u2028\u0085\x0b")
LONG = "L" * 50_000


@pytest.fixture(autouse=True)
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    state = {name: np.ones(3, np.float32) for name in [*NAMES, LONG]}
    texts = {f"v\n{FAKE}": f"t\n{FAKE}\x1b[1m"}
    unickpt.save("a", {**state, **texts, "w" * 10**6: 3}, metadata={f"m\n{FAKE}": "y\n\x1b"})
    more = {NAMES[0]: np.zeros(3, np.float32), NAMES[1]: np.ones(4), f"n\n{FAKE}": np.ones(1)}
    unickpt.save("b", {**state, **texts, **more})
    header, at = {}, 0
    for name in [*NAMES, "M" * 10**6]:
        header[name] = {"dtype": "F32", "shape": [1], "data_offsets": [at, at + 4]}
        at += 4
    text = json.dumps(header).encode()
    Path("s.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    Path("my.rules").write_text("w [i] <-> w [i]\n")


@pytest.mark.parametrize(
    "command",
    [
        "ls .", "inspect a", "inspect s.safetensors", "inspect a --timing", "inspect a nope",
        "verify a", "verify s.safetensors", "diff a b", "diff a s.safetensors",
        "convert a c --dry-run", "convert s.safetensors c --dry-run", "convert s.safetensors c",
        "convert a c --rules my.rules --dry-run", "convert a c --rules my.rules",
        "export a c.npz --to npz", "export s.safetensors c.npz --to npz", "export a c --to hf",
        "merge a b c", "merge s.safetensors a c", "rules check my.rules a", "copy a c",
    ],
)  # fmt: skip
def test_the_output_of_a_command(command: str) -> None:
    result = CliRunner().invoke(app, command.split())
    assert result.exception is None or isinstance(result.exception, SystemExit | OSError)
    assert not ODD & set(result.output)
    assert not [line for line in result.output.split("\n") if line.strip().startswith(FAKE)]
    assert max(map(len, result.output.split("\n"))) < 3000


@pytest.mark.parametrize("name", NAMES)
def test_inspecting_one(name: str) -> None:
    result = CliRunner().invoke(app, ["inspect", "a", name])
    assert result.exit_code == 0, result.output
    assert not ODD & set(result.output)
    assert f"\n{FAKE}" not in result.output


def test_json_has_names_as_they_are() -> None:
    result = CliRunner().invoke(app, ["inspect", "a", "--json"])
    assert {*NAMES, LONG} <= {array["name"] for array in json.loads(result.output)["arrays"]}


def test_messages_and_reprs() -> None:
    opened = unickpt.open("s.safetensors")
    texts = [repr(opened), *(repr(opened[name]) for name in opened)]
    for asked in ({"z": np.ones(3)}, {"z": np.ones(3), NAMES[0]: np.ones(7)}):
        with pytest.raises(unickpt.LoadMismatch) as caught:
            unickpt.load("a", asked)
        texts.append(str(caught.value))
    with pytest.raises(unickpt.errors.RuleError) as caught_rule:
        unickpt.load("a", {"z": np.ones(3)}, rules=unickpt.Rules.parse("w [i] <-> z [i]"))
    texts.append(str(caught_rule.value))
    with pytest.raises(KeyError) as missing:
        opened["z"]
    texts += [str(missing.value), str(unickpt.diff("a", "b"))]
    for text in texts:
        assert not ODD & set(text)
        assert f"\n{FAKE}" not in text
        assert len(text) < 10_000
