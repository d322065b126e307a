"""Exports that meet something else: a checkpoint that they replace, another export, a kill."""

from __future__ import annotations

import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.forks import Forks
from support.saving import in_job

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    SaveConflict,
    SaveOptions,
    StorageError,
)
from unickpt.commit import lease
from unickpt.plugins.export import destinations
from unickpt.plugins.export import job as export_job
from unickpt.runs import save_leftovers
from unickpt.storage import local_folders
from unickpt.storage.errors import Failed

FAST = SaveOptions(fsync=False)


def sources(tmp_path: Path) -> None:
    for version in (1, 2):
        state = {f"w{n}": np.full((50, 100), version * 100 + n, "f4") for n in range(6)}
        unickpt.save(tmp_path / f"c{version}", state, options=FAST)


def export(tmp_path: Path, version: int, to: Any, kind: str = "hf", **more: Any) -> None:
    if kind == "hf":
        more["max_shard_size"] = "30KB" if version == 1 else "50KB"
    unickpt.convert(tmp_path / f"c{version}", to, to=kind, **{"options": FAST, **more})


def version_at(path: Any) -> int:
    """Which of the two checkpoints is at a path; all of its arrays are of one."""
    (found,) = {int(array[0, 0]) // 100 for array in unickpt.load(path).values()}
    return found


KILLED = """
import os, unickpt
os.chdir(ARGS[2])
from unickpt.storage import local_folders
from unickpt.plugins.export import destinations
kind, where, _ = ARGS
def die(*args):
    os.kill(os.getpid(), 9)
if where == "between":
    rename, count = os.rename, []
    def renamed(*args, **options):
        count.append(1)
        if len(count) == 2:
            die()
        return rename(*args, **options)
    os.rename = renamed
    local_folders.exchange = lambda *args: False
else:
    above = os.getcwd()
    local_folders.sync_folder = lambda path: die() if path == above else None
options = unickpt.SaveOptions(fsync=True)
unickpt.convert("c2", "out", to=kind, overwrite=True, options=options)
"""


@pytest.mark.parametrize("kind", ["hf", "dcp", "orbax"])
def test_a_folder_that_is_replaced_is_there_at_every_moment(kind: str, tmp_path: Path) -> None:
    sources(tmp_path)
    to = tmp_path / "out"
    export(tmp_path, 1, to, kind)
    ended, seen = threading.Event(), set[int]()

    def look() -> None:
        while not ended.is_set():
            seen.add(os.path.isdir(to))

    with ThreadPoolExecutor(1) as pool:
        looking = pool.submit(look)
        for _ in range(5):
            export(tmp_path, 2, to, kind, overwrite=True)
            assert version_at(to) == 2
        ended.set()
        looking.result()
    assert seen == {True}
    assert sorted(os.listdir(tmp_path)) == ["c1", "c2", "out"]


def killed(forks: Forks, tmp_path: Path, where: str) -> list[str]:
    """What lies beside the destination after an export was killed at a moment."""
    sources(tmp_path)
    export(tmp_path, 1, tmp_path / "out")
    (ended,) = forks.wait_all([forks.start(KILLED, "hf", where, str(tmp_path))])
    assert ended.code == -9, ended
    return sorted(name for name in os.listdir(tmp_path) if name.startswith(".out"))


def test_what_a_killed_export_moved_away_is_put_back_by_the_next(
    tmp_path: Path, forks: Forks
) -> None:
    beside = killed(forks, tmp_path, "between")
    assert not (tmp_path / "out").exists()
    assert {name.rpartition(".")[2] for name in beside} == {"old", "partial", "__lock"}
    with pytest.raises(CheckpointExists, match="overwrite=True"):
        export(tmp_path, 2, tmp_path / "out")
    assert version_at(tmp_path / "out") == 1
    export(tmp_path, 2, tmp_path / "out", overwrite=True)
    assert version_at(tmp_path / "out") == 2


def test_clean_puts_back_what_a_killed_export_moved_away(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(forks, tmp_path, "between")
    found = save_leftovers.find(tmp_path)
    assert found.orphans == ()
    assert sorted(r.kind for r in found.under_way) == ["export", "replaced"]
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    found = save_leftovers.find(tmp_path)
    assert len(save_leftovers.clean(tmp_path, found.orphans)) == 2
    assert version_at(tmp_path / "out") == 1
    assert save_leftovers.find(tmp_path).orphans == ()
    assert {name for name in os.listdir(tmp_path) if name.endswith((".old", ".partial"))} == set()


def test_a_kill_after_the_exchange_leaves_the_new_one(
    tmp_path: Path, forks: Forks, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Killed when it flushes, which it does before it removes what was replaced.
    beside = killed(forks, tmp_path, "flush")
    assert version_at(tmp_path / "out") == 2
    assert any(name.endswith(".partial") for name in beside)
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    (orphan,) = save_leftovers.find(tmp_path).orphans
    assert (orphan.kind, orphan.files > 2) == ("export", True)
    assert save_leftovers.clean(tmp_path, [orphan]) == [orphan]
    assert version_at(tmp_path / "out") == 2


def test_clean_beside_an_export_that_only_reads_never_makes_it_lose_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading back what was written may take longer than an orphan is young."""
    sources(tmp_path)
    export(tmp_path, 1, tmp_path / "out")
    commit = destinations.LocalDestination.commit

    def cleaned(self: Any, files: Any) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(save_leftovers, "RECENT_S", 0.0)
            found = save_leftovers.find(tmp_path).orphans
            assert [r.kind for r in found] == ["export"]
            save_leftovers.clean(tmp_path, found)
        commit(self, files)

    monkeypatch.setattr(destinations.LocalDestination, "commit", cleaned)
    with pytest.raises(StorageError, match=r"out: .* was removed .* nothing was replaced"):
        export(tmp_path, 2, tmp_path / "out", overwrite=True)
    assert version_at(tmp_path / "out") == 1


def test_two_local_exports_replace_one_after_the_other(tmp_path: Path) -> None:
    sources(tmp_path)
    for number in range(6):
        to = tmp_path / "x" / str(number)
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(export, tmp_path, v, to, overwrite=True) for v in (1, 2)]
        assert [job.exception() for job in both] == [None, None]
        assert version_at(to) in (1, 2)
        with ThreadPoolExecutor(2) as pool:
            to = tmp_path / "y" / str(number)
            both = [pool.submit(export, tmp_path, v, to) for v in (1, 2)]
        errors = [e for job in both if (e := job.exception()) is not None]
        assert len(errors) < 2
        assert all(isinstance(e, CheckpointExists) for e in errors)
        assert version_at(to) in (1, 2)
    assert sorted(os.listdir(tmp_path / "x")) == [str(number) for number in range(6)]


def test_the_local_loser_is_told_that_another_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources(tmp_path)
    commit, to = destinations.LocalDestination.commit, tmp_path / "out"

    def overtaken(self: Any, files: Any) -> None:
        monkeypatch.setattr(destinations.LocalDestination, "commit", commit)
        export(tmp_path, 1, to)
        commit(self, files)

    monkeypatch.setattr(destinations.LocalDestination, "commit", overtaken)
    with pytest.raises(CheckpointExists, match="another was faster; pass overwrite=True"):
        export(tmp_path, 2, to)
    assert version_at(to) == 1
    assert sorted(os.listdir(tmp_path)) == ["c1", "c2", "out"]


@pytest.mark.parametrize("storage", ["memory", "s3"])
@pytest.mark.parametrize("kind", ["hf", "orbax"])
def test_exports_to_one_prefix_never_mix(
    kind: str, storage: str, request: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.2)
    top = f"memory://{tmp_path.name}"
    if storage == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "exportbucket")
        top = f"s3://exportbucket/{tmp_path.name}"
    sources(tmp_path)
    for number, verify in enumerate((True, False, True)):
        to = f"{top}/{number}"
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(export, tmp_path, v, to, kind, verify=verify) for v in (1, 2)]
        (error,) = (e for job in both if (e := job.exception()) is not None)
        assert isinstance(error, SaveConflict | CheckpointExists)
        winner = 1 if both[0].exception() is None else 2
        assert version_at(to) == winner


def test_an_export_under_way_is_named_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    sources(tmp_path)
    complete, at = export_job.ExportJob._complete, f"memory://{tmp_path.name}/x"
    begun, go = threading.Event(), threading.Event()

    def waiting(self: Any, sums: Any) -> None:
        begun.set()
        assert go.wait(30)
        complete(self, sums)

    monkeypatch.setattr(export_job.ExportJob, "_complete", waiting)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(export, tmp_path, 1, at)
        assert begun.wait(30)
        told = rf"another export to {at} is under way in this process; wait for it, or choose"
        for overwrite in (False, True):
            with pytest.raises(SaveConflict, match=told):
                export(tmp_path, 2, at, overwrite=overwrite)
        go.set()
        first.result()
    assert version_at(at) == 1


def test_an_export_that_seemed_dead_and_was_replaced_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease, "_EXPIRES_S", 0.2)
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease._LeaseObject, "_renew", lambda self: None)  # as of a stopped process
    sources(tmp_path)
    complete, at = export_job.ExportJob._complete, f"memory://{tmp_path.name}/y"

    def overtaken(self: Any, sums: Any) -> None:
        monkeypatch.setattr(export_job.ExportJob, "_complete", complete)
        export(tmp_path, 2, at, overwrite=True)
        complete(self, sums)

    monkeypatch.setattr(export_job.ExportJob, "_complete", overtaken)
    with pytest.raises(SaveConflict, match=r"another export to .* is under way"):
        export(tmp_path, 1, at)
    assert version_at(at) == 2


@pytest.mark.parametrize("target", ["local", "memory"])
@pytest.mark.parametrize("processes", [1, 3])
def test_a_failed_check_leaves_nothing_readable_and_what_was_there(
    processes: int, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources(tmp_path)
    to = tmp_path / "out" if target == "local" else f"memory://{tmp_path.name}/out{processes}"
    export(tmp_path, 1, to)
    as_it_is = export_job._bytes_of

    def damaged(array: np.ndarray) -> memoryview:
        data = bytearray(as_it_is(array))
        data[0] ^= float(array.flat[0]) == 203
        return memoryview(data)

    monkeypatch.setattr(export_job, "_bytes_of", damaged)

    def run(group: unickpt.ProcessGroup | None) -> None:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        export(tmp_path, 2, to, overwrite=True, options=mine)

    if processes == 1:
        with pytest.raises(CheckpointCorrupt, match=r"'w3': .*differ"):
            run(None)
    else:
        errors = in_job(processes, run)
        assert sum(isinstance(error, CheckpointCorrupt) for error in errors) == 1
        assert all(isinstance(error, unickpt.UnickptError) for error in errors)
    if target == "local":
        assert version_at(to) == 1
        assert sorted(os.listdir(tmp_path)) == ["c1", "c2", "out"]
    else:
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(to)


def test_names_are_exchanged_where_the_system_can(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not local_folders.exchange(str(tmp_path / "a"), str(tmp_path / "b")):
        pytest.skip("this system cannot")
    assert os.listdir(tmp_path / "a") == ["b"]
    shutil.rmtree(tmp_path / "b")
    with pytest.raises(Failed):
        local_folders.exchange(str(tmp_path / "a"), str(tmp_path / "b"))
