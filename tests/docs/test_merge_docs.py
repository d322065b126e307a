"""The examples of docs/merge.md run as they stand there, and its table has every method."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
from support import TESTS
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

PAGE = (Path(TESTS).parent / "docs" / "merge.md").read_text()
FAST = unickpt.SaveOptions(fsync=False)


@pytest.fixture(autouse=True)
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with unickpt.Checkpointer("runs/a", options=FAST) as run:
        for step in (100, 200, 300):
            state = {"w": rng.standard_normal((8, 9)).astype(np.float32)}
            run.save(step, state, metrics={"loss": 50 / step})
    for name in ("llama", "math", "code"):
        unickpt.save(name, {"w": rng.standard_normal((8, 9)).astype(np.float32)}, options=FAST)


def test_the_examples_in_python(capsys: pytest.CaptureFixture[str]) -> None:
    names = {"unickpt": unickpt, "evaluate": lambda w: -float(np.abs(w - 0.1).sum())}
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert "(0.3333333333333333, 0.3333333333333333, 0.3333333333333333)" in capsys.readouterr().out
    merged = ("average", "tuned", "ema", "best", "halfway", "both", "sum", "sparse", "tuned_for")
    assert {path.name for path in Path("runs").iterdir()} == {"a", *merged}


def test_the_examples_of_the_command() -> None:
    lines = re.findall(r"^unickpt (merge .*?)(?: +#.*)?$", PAGE, re.M)
    assert len(lines) == 4
    with unickpt.Checkpointer("runs/a", options=FAST) as run:
        for step in (400, 500):
            run.save(step, {"w": np.ones((8, 9), np.float32)}, metrics={"loss": 1.0})
    for line in lines:
        result = CliRunner().invoke(app, [*line.split(), *["--overwrite"] * ("dry" not in line)])
        assert result.exit_code == 0, (line, result.output)


def test_the_table_has_every_method_with_its_parameters() -> None:
    for kind in (*unickpt.merge_methods.METHODS, unickpt.merge_methods.Search):
        assert f"{kind.__name__}(" in PAGE
        for name in (field.name for field in dataclasses.fields(kind)):
            assert re.search(rf"{kind.__name__}\([^)]*\b{name}\b", PAGE), (kind, name)
