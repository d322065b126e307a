"""The states that a save and its attempt move through."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import numbers, save_in_job

import unickpt
from unickpt import SaveConflict, SaveOptions, StorageError
from unickpt.commit.attempt import NEXT, REMOVABLE, Attempt, AttemptState
from unickpt.commit.coordinator import Coordinator
from unickpt.errors import ProcessFailed
from unickpt.saving.task import SaveTask
from unickpt.saving.writer import ChunkWriter

States = dict[int, list[str]]


def entered(monkeypatch: pytest.MonkeyPatch, kind: type[Any]) -> States:
    """The states that saves enter, by process."""
    found: States = {}
    name = "become" if kind is Attempt else "_become"
    real = getattr(kind, name)

    def become(self: Any, state: Any) -> None:
        found.setdefault(self.group.index, []).append(state.name)
        real(self, state)

    monkeypatch.setattr(kind, name, become)
    return found


def test_what_may_be_committed_is_never_removable() -> None:
    assert AttemptState.PUBLISHED not in REMOVABLE, "the coordinator may commit at any moment"
    assert AttemptState.COMMITTING not in REMOVABLE, "the storage has not answered yet"
    assert not NEXT[AttemptState.COMMITTED], "a checkpoint that exists cannot fail any more"
    assert NEXT.keys() == set(AttemptState)


def test_the_states_of_a_job_that_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempts, saves = entered(monkeypatch, Attempt), entered(monkeypatch, SaveTask)
    save_in_job(tmp_path, 2, lambda index: numbers(1))
    assert attempts[0] == ["WRITING", "MERGING", "COMMITTING", "COMMITTED"]
    assert attempts[1] == ["WRITING", "PUBLISHED", "COMMITTED"]
    assert saves[0] == saves[1] == ["DESCRIBED", "WRITING", "COMMITTING", "COMMITTED"]


def test_the_states_of_a_job_of_which_one_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = ChunkWriter.write_all

    def fail(self: Any, items: Any) -> Any:
        if self._attempt.group.index == 1:
            raise StorageError("no space left")
        return real(self, items)

    monkeypatch.setattr(ChunkWriter, "write_all", fail)
    attempts, saves = entered(monkeypatch, Attempt), entered(monkeypatch, SaveTask)
    errors = save_in_job(tmp_path, 2, lambda index: numbers(1))
    assert isinstance(errors[0], ProcessFailed)
    assert attempts[0][:1] == attempts[1] == ["WRITING"]
    assert set(attempts[0]) <= {"WRITING", "MERGING"}, "process 0 cannot have begun to commit"
    assert saves[0][-1] == saves[1][-1] == "FAILED"


def test_the_states_of_a_save_that_another_job_overtakes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real: Callable[..., Any] = Coordinator._write_root

    def overtaken(self: Any, *arguments: Any) -> Any:
        monkeypatch.setattr(Coordinator, "_write_root", real)
        unickpt.save(tmp_path, {"w": np.zeros(3)}, options=SaveOptions(fsync=False))
        attempts.clear()
        return real(self, *arguments)

    monkeypatch.setattr(Coordinator, "_write_root", overtaken)
    attempts = entered(monkeypatch, Attempt)
    with pytest.raises(SaveConflict):
        unickpt.save(tmp_path, {"w": np.ones(3)}, options=SaveOptions(fsync=False))
    assert attempts[0] == ["FAILED"], "its files are gone, so it does not begin to write the root"
