"""`unickpt report`: writes the page, and says where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import save_in_job
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


def test_a_trace_has_a_track_for_each_process_of_each_save(tmp_path: Path) -> None:
    for step in (1, 2):
        save_in_job(tmp_path / f"run/step_{step}", 3, lambda index: {"w": np.arange(50_000.0)})
    out, trace = str(tmp_path / "report.html"), tmp_path / "saves.json"
    arguments = ["report", str(tmp_path / "run"), "-o", out, "--trace", str(trace)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    assert f"{trace}: " in result.output
    found = json.loads(trace.read_text())
    assert set(found) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = found["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {named["process_name", pid, 0] for pid in (0, 1)} == {"step_1", "step_2"}
    assert named["thread_name", 1, 2] == "process 2"
    assert {kind for kind, _, _ in named} == {"process_name", "thread_name"}
    assert {event["ph"] for event in events} == {"M", "X", "i"}
    for event in events:
        assert isinstance(event["name"], str)
        assert {type(event["pid"]), type(event["tid"])} == {int}
        if event["ph"] != "M":
            assert type(event["ts"]) is int
        assert (type(event["dur"]) is int) if event["ph"] == "X" else ("dur" not in event)
    assert min(event["ts"] for event in events if event["ph"] == "X") == 0
    check_tracks(events, tmp_path / "run" / "step_2")


def check_tracks(events: list[dict[str, Any]], step: Path) -> None:
    """Compares the tracks of the second save with its timing."""
    timing = unickpt.open(step).timing
    assert timing is not None
    for process in range(3):
        track = [e for e in events if (e["ph"], e["pid"], e["tid"]) == ("X", 1, process)]
        of = {event["name"]: event for event in track}
        assert of["write"]["dur"] == pytest.approx(timing.seconds["write"][process] * 1e6, abs=20)
        assert of["write"]["args"]["bytes"] == timing.written[process]
        whole = of.pop("save")
        assert whole["args"]["chunks"] == timing.chunks[process]
        waited = of.pop("wait for the last process", None)
        if waited is not None:
            assert waited["ts"] == whole["ts"] + whole["dur"]
        end = whole["ts"]
        for event in sorted(of.values(), key=lambda event: event["ts"]):
            assert end <= event["ts"], "phases follow each other"
            end = event["ts"] + event["dur"]
        assert end <= whole["ts"] + whole["dur"]
    (merged,) = [e for e in events if e["ph"] == "i" and e["pid"] == 1]
    (start,) = [e["ts"] for e in events if (e["name"], e["pid"], e["tid"]) == ("save", 1, 0)]
    assert merged["ts"] - start == pytest.approx(timing.merged * 1e6, abs=20)


def test_a_trace_of_one_process_or_of_others_checkpoints_is_a_trace(tmp_path: Path) -> None:
    options = unickpt.SaveOptions(timing=True)
    unickpt.save(tmp_path / "own", {"step": 3}, options=options)
    np.savez(tmp_path / "state.npz", w=np.ones(4))
    for name, kinds in (("own", {"M", "X", "i"}), ("state.npz", set())):
        trace = tmp_path / f"{name}.json"
        unickpt.report(tmp_path / name, tmp_path / "report.html", trace=trace)
        assert {event["ph"] for event in json.loads(trace.read_text())["traceEvents"]} == kinds


def test_what_cannot_be_done_ends_with_2_and_a_message(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["report", str(tmp_path / "nothing")])
    assert result.exit_code == 2
    assert "no checkpoint at" in result.output
