"""Receivers of metrics hear of the events of a run: jobs, steps, loads, failures, fallbacks."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forks import Forks
from support.saving import damage

import unickpt
from unickpt import Checkpointer, SaveOptions, StorageError
from unickpt.integrations.metrics import JsonLines, each
from unickpt.types import RunEvent, SaveReport

TREE = {"w": np.arange(100_000.0)}


def lines_of(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if kind is None or line.get("kind") == kind]


def options_of(path: Path, **more: Any) -> SaveOptions:
    return SaveOptions(metrics=JsonLines(path, **more), fsync=False)


class Hears:
    """A receiver of reports and events."""

    def __init__(self) -> None:
        self.reports, self.events = list[SaveReport](), list[RunEvent]()

    def __call__(self, report: SaveReport) -> None:
        self.reports.append(report)

    def run_event(self, event: RunEvent) -> None:
        self.events.append(event)

    @property
    def kinds(self) -> list[tuple[str, int | None]]:
        return [(event.kind, event.step) for event in self.events]


FULL = """
import os, resource, signal
import numpy as np, unickpt
from unickpt.integrations.metrics import JsonLines

folder, how = ARGS
options = unickpt.SaveOptions(metrics=JsonLines(folder + "/lines"), fsync=False)
tree = {"w": np.arange(100_000.0)}
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))  # as a disk that is full
try:
    if how == "save":
        unickpt.save(folder + "/run/step_2", tree, options=options)
    elif how == "save_async":
        unickpt.save_async(folder + "/run/step_2", tree, options=options).result()
    else:
        unickpt.Checkpointer(folder + "/run", options=options).save(2, tree, wait=True)
except unickpt.StorageError as error:
    print(error, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["save", "save_async", "Checkpointer"])
def test_a_save_that_fails_has_a_line_before_its_error_is_raised(
    how: str, forks: Forks, tmp_path: Path
) -> None:
    ended = forks.wait(forks.start(FULL, str(tmp_path), how))
    assert ended.code == -9, ended.out
    (line,) = lines_of(tmp_path / "lines", "save failed")
    assert (line["step"], line["process"]) == (2, 0)
    assert line["url"] == f"file://{tmp_path}/run/step_2/"
    assert line["error"] == f"StorageError: {ended.out.strip()}"
    assert "File too large" in line["error"]


def test_a_save_that_is_refused_in_the_call_has_a_line_too(tmp_path: Path) -> None:
    hears = Hears()
    options = SaveOptions(metrics=hears, fsync=False)
    for save in (unickpt.save, unickpt.save_async):
        with pytest.raises(unickpt.UnsupportedLeaf, match="bad"):
            save(tmp_path / "a", {"bad": object()}, options=options)
    (first, second) = hears.events
    assert first.kind == second.kind == "save failed"
    assert "bad" in first.error
    assert first.error.startswith("UnsupportedLeaf: ")
    assert not hears.reports


def test_all_processes_hear_of_a_save_that_fails(forks: Forks, tmp_path: Path) -> None:
    source = """
        import numpy as np, unickpt
        from unickpt.integrations.metrics import JsonLines
        folder, index = ARGS[0], int(ARGS[1])
        group = unickpt.ProcessGroup(index, 2, ARGS[2])
        options = unickpt.SaveOptions(metrics=JsonLines(folder + "/lines"), group=group)
        try:
            bad = {"bad": object()} if index else {}
            unickpt.save(folder + "/step_1", {"w": np.ones(3), **bad}, options=options)
        except unickpt.errors.UnickptError as error:
            print(type(error).__name__)
    """
    session = unickpt.extend.new_session()
    jobs = [forks.start(textwrap.dedent(source), str(tmp_path), n, session) for n in range(2)]
    outs = [forks.wait(job).out.strip() for job in jobs]
    assert outs == ["ProcessFailed", "UnsupportedLeaf"]
    failed = sorted(lines_of(tmp_path / "lines", "save failed"), key=lambda line: line["process"])
    assert [line["process"] for line in failed] == [0, 1]
    assert all("bad" in line["error"] for line in failed)


@pytest.mark.plugins
def test_a_copy_that_fails_has_a_line(tmp_path: Path) -> None:
    root, local, lines = tmp_path / "root", tmp_path / "local", tmp_path / "lines"
    run = Checkpointer(root, local=local, options=options_of(lines))
    (root / "step_3").mkdir(parents=True)
    (root / "step_3" / "processes").write_text("no folder")
    run.save(3, TREE, wait=True)
    with pytest.raises(StorageError):
        run.close()
    (line,) = lines_of(lines, "copy failed")
    assert (line["step"], line["url"]) == (3, f"file://{local}/step_3/")
    assert str(root) in line["error"]


def test_a_damaged_step_that_a_load_passes_over_has_a_line(tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    with Checkpointer(tmp_path / "run", options=options_of(lines)) as run:
        for step in (10, 20):
            run.save(step, TREE, wait=True)
    damage(tmp_path / "run" / "step_20")
    with Checkpointer(tmp_path / "run", options=options_of(lines)) as run:
        tree, report = run.load(fallback=True, return_report=True)
        np.testing.assert_array_equal(tree["w"], TREE["w"])
        np.testing.assert_array_equal(run.load(step=10)["w"], TREE["w"])
    (line,) = lines_of(lines, "fallback")
    assert (line["step"], line["url"]) == (20, f"file://{tmp_path}/run/step_20/")
    assert "step_20" in line["error"]
    first, second = lines_of(lines, "load")
    assert first["step"] == second["step"] == 10
    assert (first["seconds"], first["bytes"]) == (report.seconds, 800_000)
    assert (first["process"], first["processes"]) == (0, 1)


def test_a_damaged_tier_that_a_load_passes_over_has_a_line(tmp_path: Path) -> None:
    hears = Hears()
    options = SaveOptions(metrics=hears, fsync=False)
    with Checkpointer(tmp_path / "root", local=tmp_path / "local", options=options) as run:
        run.save(10, TREE, wait=True)
        run.wait()
        damage(tmp_path / "local" / "step_10")
        np.testing.assert_array_equal(run.load()["w"], TREE["w"])
    kinds = [("began", None), ("step", 10), ("fallback", 10), ("loaded", 10), ("ended", None)]
    assert hears.kinds == kinds
    assert "local/step_10" in hears.events[2].error


def test_a_run_sends_its_steps_loads_and_end(tmp_path: Path) -> None:
    hears, plain = Hears(), list[SaveReport]()
    options = SaveOptions(metrics=each(hears, plain.append), fsync=False)

    def train() -> None:
        with Checkpointer(tmp_path, options=options) as run:
            for step in range(3):
                assert not run.should_save(step)
            run.save(2, TREE, wait=True)
            raise ZeroDivisionError("of the loop")

    with pytest.raises(ZeroDivisionError):
        train()
    steps = [("step", step) for step in (0, 1, 2, 2)]
    assert hears.kinds == [("began", None), *steps, ("ended", None)]
    assert hears.events[-1].error == "ZeroDivisionError: of the loop"
    assert hears.events[0].time <= hears.events[1].time
    assert hears.reports == plain
    assert len(plain) == 1


def test_lines_of_steps_come_at_most_so_often(tmp_path: Path) -> None:
    for name, every_s, count in (("all", 0, 50), ("few", 3600, 1)):
        with Checkpointer(tmp_path / name, options=options_of(tmp_path / f"{name}.jsonl",
                          every_s=every_s)) as run:  # fmt: skip
            for step in range(50):
                run.should_save(step)
        lines = lines_of(tmp_path / f"{name}.jsonl")
        assert [line["step"] for line in lines if line["kind"] == "step"] == [*range(count)]
        assert (lines[0]["kind"], lines[-1]["kind"]) == ("began", "ended")
        assert {line["job"] for line in lines} == {lines[0]["job"]}


def test_an_error_of_a_receiver_of_events_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Hears):
        def run_event(self, event: RunEvent) -> None:
            raise ZeroDivisionError(f"of {event.kind}")

    hears = Hears()
    options = SaveOptions(metrics=each(Broken(), hears), fsync=False)
    with Checkpointer(tmp_path, options=options) as run:
        run.save(1, TREE, wait=True)
        with pytest.raises(unickpt.UnsupportedLeaf, match="bad"):
            run.save(2, {"bad": object()})
        run.load()
    kinds = ["began", "step", "step", "save failed", "loaded", "ended"]
    assert [kind for kind, _ in hears.kinds] == kinds
    for kind in kinds:
        assert f"of {kind}" in caplog.text
