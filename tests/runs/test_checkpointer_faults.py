"""Training jobs that die while they save: kill -9 at every step of a save, and at any moment."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.forks import Ended, Forks
from support.saving import in_agreeing_job, numbers, same, session

import unickpt
from unickpt import Checkpointer, SaveOptions

MANY = 4

# One process of a job that saves steps from `first` on, and tells of each that is committed.
PROCESS = f"""
import json, sys, time
sys.path.insert(0, {TESTS!r})
import unickpt.runs.checkpointer
from support.dying import die_at
from support.saving import numbers
from unickpt.commit import participant as commit

root, local, index, count, session, first, many, step, when, timeout_s = ARGS
commit._GRACE_S = 0.3
die_at(step, when)
group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(group=group, timeout_s=timeout_s, chunk_bytes=4096, fsync=False)
arguments = {{"keep_last": 2, "options": options, "local": local}}
arguments["keep"] = unickpt.Retention(keep_every=5)
if local and count > 1:
    unickpt.runs.requested_removal.check_shared = lambda *_: None  # they cannot agree
    unickpt.runs.requested_removal.Removal._remove_abandoned = lambda *_: None
try:
    with unickpt.Checkpointer(root, **arguments) as checkpointer:
        pending = {{}}
        for step in range(first, first + many):
            pending[step] = checkpointer.save(step, numbers(step))
            for other in [s for s in pending if pending[s].done() or s <= step - {MANY}]:
                pending.pop(other).result()
                print(json.dumps(other), flush=True)
        for other in pending:
            pending[other].result()
            print(json.dumps(other), flush=True)
except unickpt.UnickptError as error:
    print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
"""

STEPS = [
    ("saving.task:describe", "before"),  # planning
    ("saving.snapshot:stage", "after"),  # staging
    ("storage.data_files.DataFile:add", "after"),  # writing
    ("commit.attempt.Attempt:publish", "before"),  # before the record
    ("commit.attempt.Attempt:publish", "during"),
    ("commit.attempt.Attempt:publish", "after"),
]
COORDINATORS_STEPS = [
    *STEPS,
    ("commit.lease.Lease:take", "after"),
    ("runs.step_folder.StepFolder:_remove_orphans", "during"),
    ("commit.coordinator.Coordinator:_build_root", "during"),
    ("commit.coordinator.Coordinator:_write_root", "before"),  # before the commit
    ("commit.coordinator.Coordinator:_write_root", "during"),  # during the commit
    ("commit.coordinator.Coordinator:_write_root", "after"),
    ("runs.step_folder.StepFolder:remove", "before"),
    ("runs.step_folder.StepFolder:remove", "during"),  # during the deletion
    # Its files are gone, its folder is not.
    ("runs.attempt_folders:remove_empty", "before"),
]


@dataclass
class Run:
    """A training run, one job after another in one folder."""

    forks: Forks
    root: Path
    local: Path | None = None
    committed: int = 0
    pids: list[int] = field(default_factory=list)

    def start(
        self,
        count: int,
        doomed: int = -1,
        step: str = "",
        when: str = "",
        *,
        many: int = MANY,
        timeout_s: float = 2.0,
    ) -> None:
        """Starts a job that saves `many` steps after the newest one."""
        name = session()
        self.pids = [
            self.forks.start(
                PROCESS, str(self.root), self.local and str(self.local), index, count, name,
                self.committed + 1, many, step if index == doomed else "", when, timeout_s,
            )
            for index in range(count)
        ]  # fmt: skip

    def end(self) -> list[Ended]:
        """Waits for the job's end, and checks what it left."""
        return self.check(self.forks.wait_all(self.pids))

    def check(self, ended: list[Ended]) -> list[Ended]:
        """Checks what a job left that has ended."""
        lines = [line for process in ended for line in process.out.splitlines()]
        told = [int(line) for line in lines if line.isdecimal()]
        checkpointer = Checkpointer(self.root, local=self.local)
        steps = checkpointer.steps()
        newest = max(steps, default=0)
        assert newest >= max([*told, self.committed]), f"a committed step is lost: {ended}"
        for step in steps:
            assert same(checkpointer.load(step=step), numbers(step)), f"step {step}"
            assert unickpt.verify(checkpointer.path(step)).ok
        for process in ended:
            if process.code != -9:
                assert process.code == 0, process.out
        self.committed = newest
        return ended

    def save(self, group: unickpt.ProcessGroup, steps: range) -> None:
        """What a process does of a job that is not killed: a thread does for it."""
        # On a busy machine it takes long, and must not fail.
        options = SaveOptions(group=group, timeout_s=50, chunk_bytes=4096, fsync=False)
        kept: Any = {"keep_last": 2, "keep": unickpt.Retention(keep_every=5)}
        with Checkpointer(self.root, local=self.local, options=options, **kept) as checkpointer:
            for step in steps:
                checkpointer.save(step, numbers(step))

    def check_clean(self) -> None:
        """After a job that was not killed, nothing is left but what retention keeps."""
        first, last = self.committed + 1, self.committed + MANY
        for each in in_agreeing_job(2, lambda group: self.save(group, range(first, last + 1))):
            assert each is None, each
        self.check([Ended(0, f"{last}\n")])
        steps = Checkpointer(self.root).steps()
        kept = {self.committed - 1, self.committed, *range(5, self.committed, 5)}
        assert set(steps) <= kept
        assert {self.committed - 1, self.committed} <= set(steps)
        for folder in [self.root, *([self.local] if self.local else [])]:
            for name in os.listdir(folder):
                if name != ".unickpt.lock":
                    assert int(name.removeprefix("step_")) in steps, f"debris: {name}"
                    assert len(os.listdir(folder / name / "processes")) == 1


COPY_STEPS = [
    ("tools.copying:_copy_values", "during"),
    ("commit.root.Root:replace", "before"),
    ("tools.copying:check_copy", "after"),
]
COMMITS = {"publish", "_write_root", "remove"}
"""The steps at which a job with two tiers is killed as well; `make soak` tries all."""


def killed_jobs() -> Iterator[Any]:
    for doomed, steps in enumerate((COORDINATORS_STEPS, STEPS)):
        yield pytest.param(doomed, 1, steps, id=f"{doomed}-1")
        commits = [each for each in steps if each[0].rpartition(":")[2] in COMMITS]
        copies = [] if doomed else COPY_STEPS
        yield pytest.param(doomed, 2, commits + copies, id=f"{doomed}-2")
        yield pytest.param(doomed, 2, steps + copies, id=f"{doomed}-2-all", marks=pytest.mark.slow)


@pytest.mark.parametrize(("doomed", "tiers", "steps"), [*killed_jobs()])
def test_a_job_killed_at_any_step_loses_nothing(
    doomed: int, tiers: int, steps: list[tuple[str, str]], forks: Forks, tmp_path: Path
) -> None:
    runs = []
    for number, (step, when) in enumerate(steps):
        local = tmp_path / f"local_{number}" if tiers == 2 else None
        run = Run(forks, tmp_path / str(number), local)
        with Checkpointer(run.root, options=SaveOptions(fsync=False)) as checkpointer:
            for earlier in (1, 2):
                checkpointer.save(earlier, numbers(earlier))
        run.committed = 2
        run.start(2, doomed, step, when)
        runs.append(run)
    for run, (step, when) in zip(runs, steps, strict=True):
        ended = run.end()
        assert ended[doomed].code == -9, f"{step} {when}: {ended[doomed].out}"
    for run in runs:
        run.check_clean()


def kill_at_random(forks: Forks, folder: Path, rounds: int, lanes: int) -> None:
    rng = random.Random(rounds)
    runs = [
        Run(forks, folder / str(k), folder / f"local_{k}" if k % 3 == 0 else None)
        for k in range(lanes)
    ]
    killed = 0
    for _ in range(rounds):
        for run in runs:
            run.start(2, many=50)  # more than it saves before it is killed
        victims = [rng.randrange(2) for _ in runs]
        due = sorted((time.monotonic() + rng.uniform(0, 0.6), k) for k in range(lanes))
        for moment, k in due:
            time.sleep(max(0.0, moment - time.monotonic()))
            forks.kill(runs[k].pids[victims[k]])
        for run, victim in zip(runs, victims, strict=True):
            killed += run.end()[victim].code == -9
    assert killed >= rounds * lanes // 3, "the moments came too late"
    for run in runs:
        run.check_clean()


def test_jobs_killed_at_random_moments(forks: Forks, tmp_path: Path) -> None:
    kill_at_random(forks, tmp_path, rounds=3, lanes=5)


@pytest.mark.slow
def test_many_jobs_killed_at_random_moments(forks: Forks, tmp_path: Path) -> None:
    kill_at_random(forks, tmp_path, rounds=40, lanes=8)


def test_what_a_killed_job_asked_its_processes_by_is_removed(tmp_path: Path) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    local.mkdir()
    (local / ".unickpt-7fae10a15bc30d8").touch()  # as `requested_removal.check_shared` writes it
    (local / ".keep").touch()
    with Checkpointer(root, local=local, options=SaveOptions(fsync=False)) as checkpointer:
        checkpointer.save(1, numbers(1))
    assert sorted(os.listdir(local)) == [".keep", ".unickpt.lock", "step_1"]
