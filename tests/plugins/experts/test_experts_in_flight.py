"""Saves of some experts at a time that do not wait for the one before, which may fail."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.experts import in_run
from support.saving import in_job
from test_experts_processes import EXPERTS, KEYS, check, full, state_of

import unickpt
from unickpt import Checkpointer, Experts, ProcessGroup, SaveOptions, StorageError
from unickpt.commit.coordinator import Coordinator
from unickpt.plugins.experts.in_run import PartialSaves


class Commits:
    """The commits of a job, which may have to wait, or fail."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.may = threading.Event()
        self.waiting: str | None = None
        self.failing: str | None = None
        real = Coordinator.commit

        def commit(coordinator: Coordinator, *arguments: Any) -> Any:
            name = coordinator.attempt.location.url.rstrip("/").rpartition("/")[2]
            if name == self.waiting:
                assert self.may.wait(20)
            if name == self.failing:
                raise StorageError("the disk is full")
            return real(coordinator, *arguments)

        patch.setattr(Coordinator, "commit", commit)


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    return Commits(monkeypatch)


def in_processes(
    root: Path | str, count: int, work: Callable[[Checkpointer, int], Any], **given: Any
) -> list[Any]:
    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, chunk_bytes=8192, fsync=False, timeout_s=20)
        with Checkpointer(root, experts=Experts(KEYS, **given), options=options) as checkpointer:
            return work(checkpointer, group.index)

    return in_job(count, run)


@pytest.mark.parametrize("count", [1, 2])
def test_the_call_does_not_wait_for_the_last_commit(
    count: int, commits: Commits, tmp_path: Path
) -> None:
    commits.waiting = "step_3"
    began = threading.Barrier(count)

    def work(run: Checkpointer, index: int) -> None:
        for step in (1, 2):
            run.save(step, state_of(step, index, count), wait=True)
        third = run.save(3, state_of(3, index, count))
        fourth = run.save(4, state_of(4, index, count))
        assert not third.done()
        began.wait(20)
        commits.may.set()
        assert fourth.result().reused_bytes > 0
        run.save(5, state_of(5, index, count), wait=True)

    assert in_processes(tmp_path, count, work) == [None] * count
    for step in range(1, 6):
        steps = check(tmp_path / f"step_{step}")
        if step > 1:
            assert all(sum(s == step for s in of.values()) == 1 for of in steps.values())


@pytest.mark.parametrize("where", ["links", "memory"])
@pytest.mark.parametrize("count", [1, 2])
def test_if_the_save_before_fails_experts_are_taken_from_the_one_before_that(
    count: int, where: str, commits: Commits, tmp_path: Path
) -> None:
    commits.waiting = commits.failing = "step_3"
    root = tmp_path if where == "links" else f"memory://{secrets.token_hex(6)}"
    began = threading.Barrier(count)

    def work(run: Checkpointer, index: int) -> None:
        for step in (1, 2):
            run.save(step, state_of(step, index, count), wait=True)
        third = run.save(3, state_of(3, index, count))
        fourth = run.save(4, state_of(4, index, count))
        began.wait(20)
        commits.may.set()
        assert fourth.result().reused_bytes > 0
        with pytest.raises(unickpt.UnickptError, match="the disk is full"):
            third.result()
        assert run.steps() == [1, 2, 4]
        run.save(5, state_of(5, index, count), wait=True)
        assert run.save(6, state_of(6, index, count)).result().reused_bytes > 0

    assert in_processes(root, count, work) == [None] * count
    old = {step: check_at(f"{root}/step_{step}") for step in (2, 4, 5, 6)}
    for key, of in old[4].items():
        assert sorted(of.values()) == [1, 1, 2, 4], "what the third step wrote is older"
        assert [x for x, s in old[2][key].items() if s == 2] == [x for x in of if of[x] == 2]
    assert all(set(of.values()) == {5} for of in old[5].values()), "the next one writes all"
    assert all(sorted(of.values()) == [5, 5, 5, 6] for of in old[6].values())


def check_at(path: str) -> Any:
    class Named(str):
        @property
        def name(self) -> str:
            return self.rpartition("/")[2]

    return check(Named(path))  # type: ignore[arg-type]


def test_if_a_whole_save_fails_the_next_one_does_too(commits: Commits, tmp_path: Path) -> None:
    """Nothing else has its experts."""
    commits.waiting = commits.failing = "step_1"
    with Checkpointer(tmp_path, experts=Experts(KEYS), options=SaveOptions(fsync=False)) as run:
        first, second = run.save(1, full(1)), run.save(2, full(2))
        commits.may.set()
        with pytest.raises(StorageError, match="Nothing was saved; the next save writes all"):
            second.result()
        with pytest.raises(StorageError, match="the disk is full"):
            first.result()
        run.save(3, full(3), wait=True)
        run.save(4, full(4), wait=True)
    assert {s for of in check(tmp_path / "step_3").values() for s in of.values()} == {3}
    check(tmp_path / "step_4")


def test_what_is_known_beforehand_is_what_was_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without reading it: steps, and tokens on process 0."""
    read = list[int]()
    real = PartialSaves._remember

    def remember(saves: PartialSaves, step: int, *arguments: Any, **named: Any) -> None:
        read.append(step)
        real(saves, step, *arguments, **named)

    monkeypatch.setattr(PartialSaves, "_remember", remember)

    def work(run: Checkpointer, index: int) -> None:
        for step in range(1, 8):
            run.save(step, state_of(step, index, 2), tokens={"own/{x}/*": [step * 3] * EXPERTS})
        run.wait()
        known = in_run(run)._known
        path = tmp_path / "step_7"
        stored = unickpt.open(path).metadata["unickpt"]["experts"]
        steps = {key: {int(x): s for x, s in of.items()} for key, of in stored["steps"].items()}
        assert known.base is not None
        assert known.base.steps == steps
        assert known.base.attempt == unickpt.open(path).index.attempt
        assert known.base.before is None
        if index == 0:
            assert known.record.to_json() == stored
            assert stored["plt"] > 0

    assert in_processes(tmp_path, 2, work) == [None, None]
    assert read == [1, 1], "only the whole one, whose other experts the processes do not know"


def test_a_choice_by_tokens_waits_for_them_in_a_job_of_several_processes(tmp_path: Path) -> None:
    """Only process 0 gives them."""

    def work(run: Checkpointer, index: int) -> None:
        for step in range(1, 7):
            seen = [step * 100 + 7 * x * step for x in range(EXPERTS)]
            tokens = {"own/{x}/*": seen} if index == 0 else None
            run.save(step, state_of(step, index, 2), tokens=tokens)

    assert in_processes(tmp_path, 2, work, choose="most_lost") == [None, None]
    chosen = []
    for step in range(2, 7):
        of = check(tmp_path / f"step_{step}")["own/{x}/*"]
        chosen += [x for x, s in of.items() if s == step]
    assert chosen[:4] == [0, 3, 2, 1]


def test_most_lost_goes_by_tokens_then_by_age() -> None:
    from unickpt.plugins.experts.expert_choice import ExpertFacts, most_lost

    steps = {0: 4, 1: 2, 2: 3, 3: 2}
    assert most_lost(ExpertFacts("k", (0, 1, 2, 3), 3, steps, {0: 9.0})) == [0, 1, 3]
    assert most_lost(ExpertFacts("k", (0, 1, 2, 3), 2, steps, {})) == [1, 3]


def test_tokens_that_a_failed_save_counted_are_lost_in_the_next(
    commits: Commits, tmp_path: Path
) -> None:
    commits.waiting = commits.failing = "step_2"
    options = SaveOptions(fsync=False)
    with Checkpointer(tmp_path, experts=Experts({"{x}/w": 1}), options=options) as run:

        def save(step: int) -> Any:
            tree = {str(x): {"w": np.full(900, step * 10.0 + x)} for x in range(3)}
            return run.save(step, tree, tokens={"{x}/w": [10 * step] * 3})

        save(1).result()
        second, third = save(2), save(3)
        commits.may.set()
        third.result()
        with pytest.raises(StorageError, match="the disk is full"):
            second.result()
    found = unickpt.open(tmp_path / "step_3").metadata["unickpt"]["experts"]
    assert found["steps"] == {"{x}/w": {"0": 1, "1": 3, "2": 1}}
    assert found["layers"]["{x}/w"]["lost"] == {"0": 20.0, "2": 20.0}
