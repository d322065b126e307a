"""`unickpt report`: writes the page, and says where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import unickpt
from unickpt import SaveOptions
from unickpt.cli.app import app
from unickpt.integrations.metrics import JsonLines


def test_it_writes_a_page_of_a_run_with_what_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = SaveOptions(metrics=JsonLines("saves.jsonl"))
    unickpt.save("run/step_1", {"w": np.ones(3)}, options=options)
    result = CliRunner().invoke(app, ["report", "run", "-o", "r.html", "--metrics", "saves.jsonl"])
    assert result.exit_code == 0
    assert result.output.startswith("r.html: ")
    assert '"has_lines":true' in Path("r.html").read_text()
    assert CliRunner().invoke(app, ["report", "run/step_1"]).exit_code == 0
    assert '"is_run":false' in Path("report.html").read_text()


def test_what_cannot_be_done_ends_with_2_and_a_message(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no checkpoint at" in result.output
