"""Locks in local folders."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support.saving import files, in_job, numbers, sound

import unickpt
from unickpt import ProcessGroup, StorageError
from unickpt.storage import paths
from unickpt.storage.errors import LockHeld
from unickpt.storage.local_folders import FileLock
from unickpt.storage.locations import manifest_locked


def test_the_lock_of_a_killed_process_spoils_nothing(tmp_path: Path) -> None:
    """TensorStore itself would append what is in a lock file to what it writes next."""
    unickpt.save(tmp_path, numbers(1))
    for name in ("manifest.ocdbt.__lock", "manifest.ocdbt_0a1b.__lock"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    assert sound(tmp_path, 2)
    assert [name for name in files(tmp_path) if "/" not in name] == ["manifest.ocdbt"]


def test_only_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    location = paths.resolve(tmp_path)
    with (
        manifest_locked(location, 1),
        pytest.raises(StorageError, match="another process holds this lock"),
        manifest_locked(location, 0.1),
    ):
        pass
    with manifest_locked(location, 0.1):
        pass
    held = []

    def work(group: ProcessGroup) -> None:
        for _ in range(20):
            with manifest_locked(location, 30):
                held.append(group.index)
                assert len(held) == 1
                time.sleep(0.0005)
                held.pop()

    assert in_job(4, work) == [None] * 4
    assert os.listdir(tmp_path) == []


def test_who_is_refused_a_lock_is_told_its_holder(tmp_path: Path) -> None:
    location = paths.resolve(tmp_path / "new")
    first, second = (FileLock(location.path, "lock") for _ in range(2))
    assert second.holder() is None
    first.acquire("job 1")
    with pytest.raises(LockHeld) as caught:
        second.acquire("job 2")
    assert caught.value.holder == second.holder() == "job 1"
    assert first.is_valid()
    first.release()
    second.acquire("job 2")
    assert first.holder() == "job 2"
    second.release()
    assert location.has_file("lock", paths.context())


def test_object_storage_has_no_locks() -> None:
    location = paths.resolve("memory://run/1")
    with manifest_locked(location, 0.1), manifest_locked(location, 0.1):
        pass
