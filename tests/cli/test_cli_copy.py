"""unickpt copy."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app


def test_copy(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {"w": np.arange(1000.0)})
    arguments = ["copy", str(tmp_path / "a"), str(tmp_path / "b")]
    first = CliRunner().invoke(app, arguments)
    assert first.exit_code == 0, first.output
    assert first.stdout.startswith("copied 1 array, 8.0 kB, to ")
    assert first.stdout.endswith("every digest matches\n")
    again = CliRunner().invoke(app, [*arguments, "--json"])
    assert json.loads(again.stdout)["arrays"] == 1
    unickpt.save(tmp_path / "b", {"w": np.arange(9.0)}, overwrite=True)
    refused = CliRunner().invoke(app, arguments)
    assert refused.exit_code == 2
    assert "--overwrite" in refused.stderr
    assert CliRunner().invoke(app, [*arguments, "--overwrite"]).exit_code == 0
    assert unickpt.diff(tmp_path / "a", tmp_path / "b").same
