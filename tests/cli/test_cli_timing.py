"""`unickpt inspect --timing`: which processes and phases a save took its time in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import save_in_job
from typer.testing import CliRunner

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.cli.app import app
from unickpt.cli.timing_table import print_timing
from unickpt.format import timing
from unickpt.tools.terminal import output


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [*map(str, arguments)])


def test_the_table_says_who_was_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    seconds = np.full(4096, 10.0)
    seconds[17], seconds[203] = 40, 30
    columns = {
        "describe_s": np.full(4096, 0.25),
        "write_at": np.full(4096, 0.25),
        "write_s": seconds,
        "written": np.full(4096, 2e9),
    }
    print_timing(output.console(), timing.from_columns(41.0, 42.0, columns, 4096), False)
    text = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0].startswith("4,096 processes: all were done after 40.2 s, the median after 10.2")
    assert lines[1] == "the others waited 30.0 s on average for process 17, the last"
    assert "write 10.0 s 10.0 s 40.0 s 17 4.00" in lines
    assert "written 2.0 GB 2.0 GB 2.0 GB 0 1.00" in lines
    begin = next(n for n, line in enumerate(lines) if line.startswith("process began"))
    assert lines[begin + 1].startswith("17 0.000 s 0.250 s 40.0 s 40.2 s 0.000 s 2.0 GB 0.05")
    assert lines[begin + 2].startswith("203 0.000 s 0.250 s 30.0 s 30.2 s 10.0 s")
    assert lines[-1] == "4,080 more were done earlier; --all shows each"
    assert len(lines) < 30


def test_a_save_is_shown(tmp_path: Path) -> None:
    save_in_job(tmp_path, 3, lambda index: {"w": np.arange(50_000.0)})
    text = run("inspect", tmp_path, "--timing").output
    assert "3 processes: all were done after" in text
    assert "400.0 kB" in text
    found = json.loads(run("inspect", tmp_path, "--timing", "--json").output)["timing"]
    stored = unickpt.open(tmp_path).timing
    assert stored is not None
    assert found["processes"] == 3
    assert found["written"] == stored.written.tolist()
    assert found["seconds"]["write"] == pytest.approx(stored.seconds["write"].tolist(), abs=1e-5)
    assert set(found["at"]) == set(timing.PHASES)


def test_all_shows_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    columns = {"write_s": np.arange(40.0)}
    print_timing(output.console(), timing.from_columns(41.0, 42.0, columns, 40), True)
    text = capsys.readouterr().out
    assert "more were done" not in text
    assert text.splitlines()[-1].split()[0] == "0"


def test_a_checkpoint_without_it_says_so(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.ones(3)})
    np.savez(tmp_path / "w.npz", w=np.ones(3))
    for name, why in ("c", "and with SaveOptions(timing=True)"), ("w.npz", "its format is"):
        result = run("inspect", tmp_path / name, "--timing")
        assert result.exit_code == 0
        assert "does not say how long its save took" in result.output
        assert why in " ".join(result.output.split())
    found = json.loads(run("inspect", tmp_path / "c", "--timing", "--json").output)
    assert found["timing"] is None


def test_it_is_not_of_an_array(tmp_path: Path) -> None:
    unickpt.save(tmp_path, {"w": np.ones(3)})
    assert run("inspect", tmp_path, "w", "--timing").exit_code == 2


def test_both_tiers_have_it(tmp_path: Path) -> None:
    options = SaveOptions(timing=True)
    with Checkpointer(tmp_path / "root", local=tmp_path / "local", options=options) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, {"w": np.arange(9.0) + step})
    for tier in ("root", "local"):
        found = unickpt.open(tmp_path / tier / "step_2").timing
        assert found is not None
        assert found.written.tolist() == [72]
