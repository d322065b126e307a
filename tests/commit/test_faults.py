"""Processes that die: kill -9 at every step of a save, and at any moment."""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import TESTS
from support.forks import Ended, Forks
from support.saving import files, numbers, same, save_in_job, session

import unickpt
from unickpt import CheckpointNotFound

# One process of a job. It kills itself `when` ("before", "during" or "after") it takes `step`.
PROCESS = f"""
import json, sys, time
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import die_at
from support.saving import numbers
from unickpt.commit import participant as commit

path, index, count, session, seed, overwrite, timeout_s, step, when = ARGS
commit._GRACE_S = 0.3

die_at(step, when)
started = time.monotonic()
group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(group=group, timeout_s=timeout_s, chunk_bytes=4096)
try:
    unickpt.save(path, numbers(seed), overwrite=overwrite, options=options)
    outcome = "saved"
except unickpt.UnickptError as error:
    outcome = f"{{type(error).__name__}}: {{error}}"
print(json.dumps([outcome, time.monotonic() - started]))
"""

# In the order in which they are taken. The last field: whether the checkpoint is there after it.
STEPS = [
    ("saving.task:describe", "before", False),  # planning
    ("saving.write_plan:stage", "after", False),  # staging
    ("storage.data_files.DataFile:add", "after", False),  # writing
    ("commit.attempt.Attempt:publish", "before", False),  # before the record
    ("commit.attempt.Attempt:publish", "during", None),
    ("commit.attempt.Attempt:publish", "after", None),
]
COORDINATORS_STEPS = [
    *[(step, when, False) for step, when, _ in STEPS],
    ("commit.coordinator.Coordinator:_merge", "before", False),
    ("commit.coordinator.Coordinator:_build_root", "during", False),
    ("commit.coordinator.Coordinator:_write_root", "before", False),  # before the commit
    ("commit.coordinator.Coordinator:_write_root", "during", None),  # during the commit
    ("commit.coordinator.Coordinator:_write_root", "after", True),
    ("commit.coordinator.Coordinator:_remove_older_attempts", "during", True),
]
TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Job:
    """A running job that saves `numbers(seed)`."""

    forks: Forks
    path: Path
    seed: int
    pids: list[int]

    @classmethod
    def start(
        cls,
        forks: Forks,
        path: Path,
        seed: int,
        count: int,
        doomed: int = -1,
        step: str = "",
        when: str = "",
        timeout_s: float = TIMEOUT_S,
    ) -> Job:
        name = session()
        pids = [
            forks.start(
                PROCESS, str(path), index, count, name, seed, True, timeout_s,
                step if index == doomed else "", when,
            )
            for index in range(count)
        ]  # fmt: skip
        return cls(forks, path, seed, pids)

    def end(self) -> list[Ended]:
        return self.forks.wait_all(self.pids)


def seed_at(path: Path) -> int | None:
    """Which `numbers` are at a path, whole and verified; None where there is no checkpoint."""
    try:
        found = unickpt.load(path)
    except CheckpointNotFound:
        return None
    assert same(found, numbers(found["seed"])), f"half a checkpoint at {path}"
    report = unickpt.verify(path)
    assert report.ok, report.damage
    seed: int = found["seed"]
    return seed


def check_survivors(ended: list[Ended], doomed: int, committed: bool) -> None:
    for index, process in enumerate(ended):
        if index == doomed and process.code == -9:
            continue
        assert process.code == 0, process.out
        outcome, seconds = process.last
        if not committed:
            assert outcome.startswith(("SaveTimeout", "ProcessFailed")), outcome
            assert seconds < TIMEOUT_S + 30, "the deadline is not kept"
        else:
            assert outcome == "saved"


@pytest.mark.parametrize("first_commit", [True, False])
@pytest.mark.parametrize("doomed", [0, 1])
def test_a_process_killed_at_any_step_leaves_the_old_or_the_new_checkpoint(
    doomed: int, first_commit: bool, forks: Forks, tmp_path: Path
) -> None:
    steps = [STEPS, COORDINATORS_STEPS][doomed == 0]
    jobs = []
    for number, (step, when, _) in enumerate(steps):
        path = tmp_path / str(number)
        if not first_commit:
            save_in_job(path, 1, lambda index: numbers(1))
        jobs.append(Job.start(forks, path, 2, 2, doomed, step, when))
    for job, (step, when, expected) in zip(jobs, steps, strict=True):
        ended = job.end()
        assert ended[doomed].code == -9, f"{step} {when}: {ended[doomed].out}"
        found = seed_at(job.path)
        assert found in (2, None if first_commit else 1), f"{step} {when}"
        if expected is not None:
            assert (found == 2) == expected, f"{step} {when}"
        check_survivors(ended, doomed, found == 2)
        save_in_job(job.path, 2, lambda index: numbers(3), overwrite=True)
        assert seed_at(job.path) == 3
        assert len(os.listdir(job.path / "processes")) == 1, f"{step} {when}: debris is left"


def test_a_job_of_one_process_killed_at_any_step(forks: Forks, tmp_path: Path) -> None:
    jobs = []
    for number, (step, when, _) in enumerate(COORDINATORS_STEPS):
        path = tmp_path / str(number)
        save_in_job(path, 1, lambda index: numbers(1))
        jobs.append(Job.start(forks, path, 2, 1, 0, step, when))
    for job, (step, when, expected) in zip(jobs, COORDINATORS_STEPS, strict=True):
        (ended,) = job.end()
        assert ended.code == -9, f"{step} {when}: {ended.out}"
        found = seed_at(job.path)
        assert found in (1, 2)
        if expected is not None:
            assert (found == 2) == expected, f"{step} {when}"
        unickpt.save(job.path, numbers(3), overwrite=True)
        assert seed_at(job.path) == 3
        assert len(os.listdir(job.path / "processes")) == 1


def kill_at_random(forks: Forks, folder: Path, rounds: int, lanes: int) -> set[str]:
    """Job after job overwrites what the one before it left, and each loses a process.

    Returns:
        What was seen to happen.
    """
    rng = random.Random(rounds)
    last: list[int | None] = [None] * lanes
    seen: set[str] = set()
    slowest = 0.3
    for seed in range(rounds):
        jobs = [Job.start(forks, folder / str(k), seed, 2) for k in range(lanes)]
        killed = [rng.randrange(2) for _ in jobs]
        due = sorted((time.monotonic() + rng.uniform(0, slowest), k) for k in range(lanes))
        for moment, k in due:
            time.sleep(max(0.0, moment - time.monotonic()))
            forks.kill(jobs[k].pids[killed[k]])
        for k, job in enumerate(jobs):
            ended = job.end()
            found = seed_at(job.path)
            assert found in (seed, last[k]), f"{found} is there, not {seed} or {last[k]}"
            committed = found == seed
            check_survivors(ended, killed[k], committed)
            seen.add(
                f"{'committed' if committed else 'kept'}, killed {ended[killed[k]].code == -9}"
            )
            last[k] = found
    return seen


def test_processes_killed_at_random_moments(forks: Forks, tmp_path: Path) -> None:
    seen = kill_at_random(forks, tmp_path, rounds=3, lanes=6)
    assert seen, "something happened"
    save_in_job(tmp_path / "0", 2, lambda index: numbers(99), overwrite=True)
    assert seed_at(tmp_path / "0") == 99
    assert len(files(tmp_path / "0")) < 12, "debris of killed jobs is left"


@pytest.mark.slow
def test_many_processes_killed_at_random_moments(forks: Forks, tmp_path: Path) -> None:
    seen = kill_at_random(forks, tmp_path, rounds=40, lanes=8)
    assert len(seen) >= 3, f"the moments were all alike: {seen}"


def test_a_process_that_never_comes_fails_the_others_at_one_deadline(
    forks: Forks, tmp_path: Path
) -> None:
    name = session()
    pids = [
        forks.start(PROCESS, str(tmp_path / "c"), index, 4, name, 1, False, 1.0, "", "")
        for index in (0, 1, 3)
    ]
    for ended in forks.wait_all(pids):
        outcome, seconds = ended.last
        assert outcome.startswith(("SaveTimeout", "ProcessFailed"))
        assert "process 2 (not begun) did not finish within 1 s" in outcome
        assert 1 <= seconds < 10
    assert seed_at(tmp_path / "c") is None
