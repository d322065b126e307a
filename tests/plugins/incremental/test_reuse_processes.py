"""Saves of several processes that refer to an earlier checkpoint; processes that die meanwhile."""

from __future__ import annotations

import random
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.dying import start_job
from support.forks import Forks, kills
from support.saving import in_job, same

import unickpt
from unickpt import SaveOptions
from unickpt.types import Box, LocalFragments

ROWS, CHUNK = 96, 2048

# A job that goes on from the newest step, refers to it, and kills itself at a step of its work.
PROCESS = f"""
import json, sys
sys.path.insert(0, {TESTS!r})
import unickpt.runs.checkpointer
from support.dying import die_at
from unickpt.commit import participant as commit
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_reuse_processes import state_of

root, local, index, count, session, first, many, reuse, step, when = ARGS
commit._GRACE_S = 0.3
if local and count > 1:
    unickpt.runs.requested_removal.check_shared = lambda *_: None  # they cannot agree
    unickpt.runs.requested_removal.Removal._remove_abandoned = lambda *_: None
group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(group=group, timeout_s=5, chunk_bytes=2048, fsync=False)
try:
    arguments = {{"keep_last": 2, "reuse": reuse, "local": local, "options": options}}
    with unickpt.Checkpointer(root, **arguments) as run:
        run._steps.resume_from(first - 1, is_coordinator=group.index == 0)
        for number in range(first, first + many):
            if number == first + 1:
                die_at(step, when)
            run.save(number, state_of(number, index, count), wait=True)
            print(json.dumps(number), flush=True)
        run.wait()
except unickpt.UnickptError as error:
    print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
"""


def full(step: int) -> np.ndarray[Any, Any]:
    """Rows of which one changes a little with each step."""
    rows = np.arange(ROWS * 64.0).reshape(ROWS, 64)
    for changed in range(step):
        rows[changed * 5 % ROWS, :8] -= changed + 1
    return rows


def state_of(step: int, process: int, count: int) -> dict[str, Any]:
    """What a process holds of a step: rows of its own, and arrays that all of them have."""
    size = ROWS // count
    own = slice(process * size, (process + 1) * size)
    box = Box((own.start, 0), (own.stop, 64))
    rows = full(step)
    return {
        "own": LocalFragments(rows.shape, [(box, rows[own])]),
        "same": rows,
        "frozen": np.arange(5000),
        "step": step,
    }


def check(path: Path, step: int) -> None:
    found = unickpt.load(path)
    rows = full(step)
    assert same(found, {"own": rows, "same": rows, "frozen": np.arange(5000), "step": step})
    report = unickpt.verify(path)
    assert report.ok, report.damage


def save_together(path: Path, step: int, count: int, base: Path | None) -> list[Any]:
    def save(group: unickpt.ProcessGroup) -> unickpt.types.SaveReport:
        options = SaveOptions(group=group, chunk_bytes=CHUNK, fsync=False, timeout_s=20, base=base)
        return unickpt.save(path, state_of(step, group.index, count), options=options)

    reports = in_job(count, save)
    assert all(isinstance(report, unickpt.types.SaveReport) for report in reports), reports
    return reports


@pytest.mark.parametrize("count", [1, 2, 3])
def test_each_process_refers_to_what_it_would_have_written(count: int, tmp_path: Path) -> None:
    save_together(tmp_path / "0", 0, count, None)
    for step in range(1, 4):
        reports = save_together(tmp_path / str(step), step, count, tmp_path / str(step - 1))
        written = sum(report.written_bytes for report in reports)
        reused = sum(report.reused_bytes for report in reports)
        assert written + reused == reports[0].bytes
        assert written <= 2 * (CHUNK + 512)
        assert reused == unickpt.open(tmp_path / str(step)).index.reused
        shutil.rmtree(tmp_path / str(step - 1))
    check(tmp_path / "3", 3)


@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 1), (2, 3), (3, 2)])
def test_another_number_of_processes(before: int, after: int, tmp_path: Path) -> None:
    save_together(tmp_path / "0", 0, before, None)
    save_together(tmp_path / "1", 1, after, tmp_path / "0")
    reports = save_together(tmp_path / "2", 2, after, tmp_path / "1")
    assert sum(report.reused_bytes for report in reports) > 0.5 * reports[0].bytes
    shutil.rmtree(tmp_path / "0")
    for step in (1, 2):
        check(tmp_path / str(step), step)


def test_a_process_whose_replica_differs_gives_none_of_its_chunks(tmp_path: Path) -> None:
    def save(path: Path, base: Path | None, differs: bool) -> list[Any]:
        def work(group: unickpt.ProcessGroup) -> unickpt.types.SaveReport:
            options = SaveOptions(
                group=group, chunk_bytes=CHUNK, fsync=False, timeout_s=20, base=base
            )
            tree = {"same": full(0) + (differs and group.index == 1)}
            return unickpt.save(path, tree, options=options)

        return in_job(2, work)

    save(tmp_path / "0", None, False)
    with pytest.warns(unickpt.errors.ReplicasDiffer):
        reports = save(tmp_path / "1", tmp_path / "0", True)
    assert reports[0].replicas_differ == ("same",)
    assert np.array_equal(unickpt.load(tmp_path / "1")["same"], full(0))
    assert unickpt.verify(tmp_path / "1").ok


# --- processes that die ---------------------------------------------------------------------------

REUSES = ("digest", "patch")
STEPS = [
    ("plugins.incremental.base.Base:offer", "during"),
    ("storage.regular_files.RegularFiles:link", "before"),
    ("storage.regular_files.RegularFiles:link", "after"),
    ("plugins.incremental.linked_files.LinkedFiles:take", "during"),
    ("plugins.incremental.linked_files.LinkedFiles:take", "after"),
]
COORDINATORS_STEPS = [
    *STEPS,
    ("commit.coordinator.Coordinator:_build_root", "before"),
    ("commit.coordinator.Coordinator:_write_root", "before"),
    ("commit.coordinator.Coordinator:_write_root", "during"),
    ("commit.coordinator.Coordinator:_write_root", "after"),
    ("runs.step_folder.StepFolder:remove", "during"),
]


def start(
    forks: Forks, root: Path, count: int, first: int, doomed: int, step: str, when: str,
    local: Path | None = None, many: int = 4, reuse: str = "digest",
) -> list[int]:  # fmt: skip
    folders = (str(root), local and str(local))
    return start_job(forks, PROCESS, folders, count, (first, many, reuse), doomed, (step, when))


def committed(root: Path) -> list[int]:
    """The steps there are; each is whole."""
    steps = sorted(
        int(path.parent.name.removeprefix("step_")) for path in root.glob("*/manifest.ocdbt")
    )
    for step in steps:
        check(root / f"step_{step}", step)
    return steps


@kills(COORDINATORS_STEPS, STEPS)
def test_killed_at_any_step(
    count: int, doomed: int, steps: list[tuple[str, str]], forks: Forks, tmp_path: Path
) -> None:
    jobs = [
        start(forks, tmp_path / str(n), count, 1, doomed, step, when, reuse=REUSES[n % 2])
        for n, (step, when) in enumerate(steps)
    ]
    for n, (pids, (step, when)) in enumerate(zip(jobs, steps, strict=True)):
        ended = forks.wait_all(pids)
        assert ended[doomed].code == -9, f"{step} {when}: {ended[doomed].out}"
        root = tmp_path / str(n)
        newest = committed(root)[-1]
        assert newest >= 1
        others = start(forks, root, count, newest + 1, 0, "", "", many=2, reuse="patch")
        again = forks.wait_all(others)
        assert [e.code for e in again] == [0] * count, again[0].out
        assert committed(root)[-2:] == [newest + 1, newest + 2]
        for step_folder in root.glob("step_*"):
            assert len(list((step_folder / "processes").iterdir())) == 1, "remains are left"


@pytest.mark.parametrize(("tiers", "reuse"), [(1, "patch"), (2, "digest")])
def test_killed_at_any_moment(tiers: int, reuse: str, forks: Forks, tmp_path: Path) -> None:
    rng = random.Random(tiers)
    root, local = tmp_path / "root", tmp_path / "local" if tiers == 2 else None
    newest = 0
    for _ in range(4):
        pids = start(forks, root, 2, newest + 1, -1, "", "", local, many=50, reuse=reuse)
        first = (local or root) / f"step_{newest + 1}" / "manifest.ocdbt"
        until = time.monotonic() + 60
        while not first.exists() and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(rng.uniform(0, 0.7))
        for pid in pids:
            forks.kill(pid)
        forks.wait_all(pids)
        steps = [step for top in (root, local) if top for step in committed(top)]
        assert max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert newest >= 4
