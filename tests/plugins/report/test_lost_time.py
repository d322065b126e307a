"""What interruptions cost a run, from the lines of jobs that were killed; loads and failures."""

from __future__ import annotations

import json
import re
import textwrap
import threading
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.forks import Forks
from support.saving import damage

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.integrations.metrics import JsonLines

JOB = """
import os, signal, time
import numpy as np, unickpt
from unickpt.integrations.metrics import JsonLines

folder, last, dies = ARGS[0], int(ARGS[1]), ARGS[2]
options = unickpt.SaveOptions(metrics=JsonLines(folder + "/lines", every_s=0), fsync=False)
run = unickpt.Checkpointer(folder + "/run", save_every=10, options=options)
state = {"w": np.zeros(1000), "step": 0}
if run.latest() is not None:
    state = run.load(state, fallback=True)
for step in range(state["step"] + 1, last + 1):
    time.sleep(0.005)
    if run.should_save(step):
        run.save(step, state | {"step": step}, wait=True)
if dies == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
run.close()
"""


def data_of(folder: Path) -> Any:
    page = unickpt.report(folder / "run", folder / "report.html", metrics=folder / "lines")
    match = re.search(r'id="data">(.*?)</script>', page.read_text())
    assert match is not None
    return json.loads(match[1])


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "lines").read_text().splitlines()]


def moment(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def run_job(forks: Forks, folder: Path, last: int, dies: str) -> None:
    code = forks.wait(forks.start(JOB, str(folder), last, dies)).code
    assert code == (-9 if dies == "kill" else 0)


def test_what_killed_jobs_lost_is_counted_from_their_lines(forks: Forks, tmp_path: Path) -> None:
    for last, dies in ((25, "kill"), (32, "kill"), (33, "ends"), (40, "ends")):
        run_job(forks, tmp_path, last, dies)
    lost, lines = data_of(tmp_path)["lost"], lines_of(tmp_path)
    jobs = list(dict.fromkeys(line["job"] for line in lines))
    began = {line["job"]: moment(line) for line in lines if line.get("kind") == "began"}
    rows = lost["rows"]
    assert [row["reached"] for row in rows] == [25, 32, 33]
    assert [row["resumed"] for row in rows] == [20, 30, 30]
    assert [row["lost_steps"] for row in rows] == [5, 2, 3]
    assert lost["steps"] == 10
    assert [row["closed"] for row in rows] == [False, False, True]
    for row, before, after in zip(rows, jobs, jobs[1:], strict=False):
        sign = max(moment(line) for line in lines if line["job"] == before)
        (load,) = (line for line in lines if line["job"] == after and line.get("kind") == "load")
        assert row["last_sign"] == sign
        assert row["down_s"] == pytest.approx(began[after] - sign)
        assert row["load_s"] == load["seconds"]
        kept = [
            moment(x) - x["seconds"] if "kind" not in x else moment(x)
            for x in lines
            if x["job"] == before
            and x["step"] == row["resumed"]
            and x.get("kind", "load") == "load"
        ]
        lost_s = moment(load) - max(kept)
        assert row["lost_s"] == pytest.approx(lost_s, abs=0.002), "from its save, or its load"
    ends = [moment(line) for line in lines]
    assert lost["wall"] == pytest.approx(max(ends) - began[jobs[0]])
    first = [line for line in lines if line["job"] == jobs[0]]
    at_20 = [moment(x) - x["seconds"] for x in first if "kind" not in x and x["step"] == 20]
    blocked = sum(x["blocked_s"] for x in first if "kind" not in x and x["step"] == 10)
    assert lost["effective"] > at_20[0] - began[jobs[0]] - blocked - 0.002
    assert lost["effective"] + sum(row["lost_s"] for row in rows) <= lost["wall"] + 0.01


def test_a_job_that_starts_over_after_damage_lost_the_older_steps_too(
    forks: Forks, tmp_path: Path
) -> None:
    run_job(forks, tmp_path, 23, "kill")
    damage(tmp_path / "run" / "step_20")
    run_job(forks, tmp_path, 15, "kill")
    data = data_of(tmp_path)
    (row,) = data["lost"]["rows"]
    assert (row["reached"], row["resumed"], row["lost_steps"]) == (23, 10, 13)
    (failure,) = data["failures"]
    assert (failure["kind"], failure["name"], failure["processes"]) == ("fallback", "step_20", [0])
    assert "step_20" in failure["error"]


def test_a_job_that_dies_before_its_load_lost_nothing_more(forks: Forks, tmp_path: Path) -> None:
    run_job(forks, tmp_path, 12, "kill")
    source = """
        import os, signal, unickpt
        from unickpt.integrations.metrics import JsonLines
        options = unickpt.SaveOptions(metrics=JsonLines(ARGS[0] + "/lines"))
        run = unickpt.Checkpointer(ARGS[0] + "/run", options=options)
        unickpt.runs.step_loader.load = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        run.load()
    """
    ended = forks.wait(forks.start(textwrap.dedent(source), str(tmp_path)))
    assert ended.code == -9, ended.out
    run_job(forks, tmp_path, 14, "ends")
    first, second = data_of(tmp_path)["lost"]["rows"]
    assert (first["lost_steps"], first["resumed"], first["lost_s"]) == (None, None, None)
    assert (second["reached"], second["resumed"], second["lost_steps"]) == (12, 10, 2)


def test_a_load_in_the_middle_is_no_interruption(tmp_path: Path) -> None:
    options = SaveOptions(metrics=JsonLines(tmp_path / "lines", every_s=0), fsync=False)
    with Checkpointer(tmp_path / "run", options=options) as run:
        for step in (1, 2, 3):
            run.save(step, {"w": np.ones(3)}, wait=True)
        run.load(step=1)
        run.should_save(4)
    assert data_of(tmp_path)["lost"]["rows"] == []


def test_the_failures_of_all_processes_are_one_row(forks: Forks, tmp_path: Path) -> None:
    source = """
        import numpy as np, unickpt
        from unickpt.integrations.metrics import JsonLines
        folder, index = ARGS[0], int(ARGS[1])
        group = unickpt.ProcessGroup(index, 2, ARGS[2])
        options = unickpt.SaveOptions(metrics=JsonLines(folder + "/lines"), group=group)
        run = unickpt.Checkpointer(folder + "/run", options=options)
        run.save(1, {"w": np.arange(1000.0)}, wait=True)
        run.load(step=1)
        bad = {"bad": object()} if index else {}
        try:
            run.save(2, {"w": np.ones(3), **bad}, wait=True)
        except unickpt.errors.UnickptError:
            pass
    """
    session = unickpt.extend.new_session()
    jobs = [forks.start(textwrap.dedent(source), str(tmp_path), n, session) for n in range(2)]
    ended = [forks.wait(job) for job in jobs]
    assert [job.code for job in ended] == [0, 0], ended
    data = data_of(tmp_path)
    (failure,) = data["failures"]
    assert (failure["kind"], failure["name"]) == ("save failed", "step_2")
    assert sorted(failure["processes"]) == [0, 1]
    (load,) = data["loads"]
    own = {x["process"]: x for x in lines_of(tmp_path) if x.get("kind") == "load"}
    assert (load["told"], load["processes"], load["bytes"]) == (2, 2, 16_000)
    assert load["seconds"] == max(x["seconds"] for x in own.values())
    assert load["each"]["process"] == [0, 1]
    assert load["each"]["seconds"] == [round(own[n]["seconds"], 5) for n in (0, 1)]
    assert load["each"]["read"] == [own[n]["read_bytes"] for n in (0, 1)]


def test_steps_that_were_due_and_not_saved_are_counted(tmp_path: Path) -> None:
    go, lines = threading.Event(), JsonLines(tmp_path / "lines")

    class Metrics:
        def __call__(self, report: Any) -> None:
            assert go.wait(20)
            lines(report)

        def run_event(self, event: Any) -> None:
            lines.run_event(event)

    save_every = unickpt.SaveEvery(steps=1, when_busy="skip")
    options = SaveOptions(metrics=Metrics(), fsync=False)
    with Checkpointer(tmp_path / "run", save_every=save_every, options=options) as run:
        for step in range(1, 5):
            if run.should_save(step):
                run.save(step, {"w": np.ones(3)})
        go.set()
    assert run.steps() == [1]
    assert data_of(tmp_path)["lost"]["skipped"] == 3
