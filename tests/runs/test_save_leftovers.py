"""What failed and killed saves leave behind: found, told apart from saves under way, removed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.processes import Processes
from support.saving import files, numbers, same
from typer.testing import CliRunner

import unickpt
from unickpt import Checkpointer, SaveConflict, StorageError
from unickpt.cli.app import app
from unickpt.commit import lease
from unickpt.runs import save_leftovers
from unickpt.storage import locations, paths
from unickpt.storage.locations import Location
from unickpt.tools.terminal import output

HOUR = 3600.0


@pytest.fixture(params=["path", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run with a committed step, a step that was never committed, and an unused attempt."""
    if request.param == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "orphanbucket")
        where = f"s3://orphanbucket/{tmp_path.name}"
    else:
        where = str(tmp_path / "run") if request.param == "path" else f"memory://{tmp_path.name}"
    for step in (1, 2):
        unickpt.save(f"{where}/step_{step}", numbers(step))
    unfinish(f"{where}/step_2")
    copy_attempt(f"{where}/step_1", "f00d-000007")
    return where


def run(*arguments: str, code: int = 0, answer: str | None = None) -> str:
    result = CliRunner().invoke(app, list(arguments), input=answer)
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def store(where: str) -> Any:
    return paths.resolve(where).store(paths.context())


def keys(where: str) -> list[str]:
    return sorted(key.decode() for key in store(where).list().result())


def unfinish(where: str) -> None:
    """Takes a checkpoint's manifest away, so that its save was never committed."""
    store(where).write("manifest.ocdbt", None).result()


def copy_attempt(where: str, name: str) -> None:
    for key in keys(where):
        if key.startswith("processes/"):
            data = store(where).read(key).result().value
            store(where).write(f"processes/{name}/{key.split('/', 2)[2]}", data).result()


def grow_old(folder: Path | str) -> None:
    for path in [Path(folder), *Path(folder).rglob("*")]:
        if not path.is_symlink():
            os.utime(path, (time.time() - HOUR, time.time() - HOUR))


def test_what_was_written_just_now_may_be_of_a_save_under_way(root: str) -> None:
    before = keys(root)
    found = json.loads(run("ls", root, "--json"))
    assert [c["name"] for c in found["checkpoints"]] == ["step_1"]
    assert found["orphans"] == found["unknown_age"] == []
    names = [r["name"] for r in found["under_way"]]
    assert names == ["step_1/processes/f00d-000007", "step_2"]
    assert "perhaps of a save in progress, " in run("ls", root)
    assert "nothing to remove" in run("clean", root, "--yes")
    assert keys(root) == before


def test_orphans_are_told_and_removed_and_nothing_else(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("notes.txt", "step_3/readme", "logs/processes/x/events", "step_4/processes/a-1/my"):
        store(root).write(key, b"mine").result()
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    before = keys(root)
    listed = json.loads(run("ls", root, "--json"))["orphans"]
    assert [(r["name"], r["kind"]) for r in listed] == [
        ("step_1/processes/f00d-000007", "unused"),
        ("step_2", "unfinished"),
    ]
    assert all(r["bytes"] > 500 and r["files"] >= 2 and r["age_s"] < 100 for r in listed)
    assert "left by failed saves; `unickpt clean" in run("ls", root)
    assert keys(root) == before

    assert "no terminal to ask on; pass --yes" in run("clean", root, code=1)
    assert keys(root) == before
    removed = json.loads(run("clean", root, "--yes", "--json"))
    assert [r["name"] for r in removed["removed"]] == [r["name"] for r in listed]
    gone = set(before) - set(keys(root))
    assert gone == {k for k in before if k.startswith("step_2/") or "/f00d-000007/" in k}
    assert same(unickpt.load(f"{root}/step_1"), numbers(1))
    assert json.loads(run("ls", root, "--json"))["orphans"] == []
    assert "nothing to remove" in run("clean", root)


def test_one_checkpoint(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    where = f"{root}/step_1"
    (found,) = json.loads(run("ls", where, "--json"))["orphans"]
    assert found["name"] == "processes/f00d-000007"
    run("clean", where, "--yes")
    assert not any("f00d" in key for key in keys(where))
    assert same(unickpt.load(where), numbers(1))
    (unfinished,) = save_leftovers.find(f"{root}/step_2").orphans
    assert (unfinished.name, unfinished.kind) == (".", "unfinished")
    run("clean", f"{root}/step_2", "--yes")
    assert [key for key in keys(root) if key.startswith("step_2/")] in (
        [],
        ["step_2/.unickpt.lock"],
    )


def test_what_changes_between_the_question_and_the_answer_stays(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    found = save_leftovers.find(root).orphans
    copy_attempt(f"{root}/step_2", "beef-000000")  # another job begins to save the same step
    assert [r.name for r in save_leftovers.clean(root, found)] == ["step_1/processes/f00d-000007"]
    assert any("/beef-000000/" in key for key in keys(root))


def test_a_person_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unickpt.save(tmp_path / "x" / "step_1", numbers(1))
    unfinish(str(tmp_path / "x" / "step_1"))
    grow_old(tmp_path / "x")
    monkeypatch.setattr(output, "is_interactive", lambda: True)
    before = files(tmp_path / "x")
    assert "Remove 1 orphan?" in run("clean", str(tmp_path / "x"), answer="n\n", code=1)
    assert files(tmp_path / "x") == before
    assert "step_1  unfinished" in run("clean", str(tmp_path / "x"), answer="y\n")
    assert not (tmp_path / "x" / "step_1").exists()


def test_not_while_a_job_has_the_lease(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)  # who asks waits that long to see it
    before = {key for key in keys(root) if key.startswith("step_")}
    stale = save_leftovers.find(root).orphans
    with Checkpointer(root) as job:
        monkeypatch.setattr("unickpt.runs.step_folder.StepFolder._remove_orphans", lambda *_: None)
        job.save(9, numbers(9)).result()
        listed = json.loads(run("ls", root, "--json"))
        assert listed["orphans"] == []
        assert f"process {os.getpid()} on " in listed["holder"]
        assert "a job saves here now (process " in run("ls", root)
        assert f"a job saves here now (process {os.getpid()} on " in run(
            "clean", root, "--yes", code=2
        )
        if not root.startswith("s3"):
            with pytest.raises(SaveConflict, match="another Checkpointer of this same process"):
                save_leftovers.clean(root, stale)
        assert before <= set(keys(root))
    assert len(save_leftovers.find(root).orphans) == 2


KILLED = """
import os, signal, sys
import numpy as np
import unickpt
from unickpt.commit import root

root.Root.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
unickpt.save(sys.argv[1], {"w": np.arange(1000.0)})
"""


def test_a_save_that_was_killed(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step_1", numbers(1))
    for step in ("step_1", "step_2"):
        code = KILLED.replace("argv[1], {", "argv[1], overwrite=True, tree={")
        done = subprocess.run([sys.executable, "-c", code, tmp_path / step], check=False)
        assert done.returncode == -signal.SIGKILL
    for _ in range(2):  # the first time, it may still be under way
        assert save_leftovers.find(tmp_path).holder is None
        found = save_leftovers.find(tmp_path)
        grow_old(tmp_path)
    assert [r.kind for r in found.under_way] == []
    assert {r.name.partition("/")[0] for r in found.orphans} == {"step_1", "step_2"}
    assert all(r.nbytes > 8000 for r in found.orphans if r.kind != "lock")
    run("clean", str(tmp_path), "--yes")
    assert sorted(os.listdir(tmp_path)) == [".unickpt.lock", "step_1"]
    assert same(unickpt.load(tmp_path / "step_1"), numbers(1))
    assert unickpt.verify(tmp_path / "step_1").ok
    assert len(os.listdir(tmp_path / "step_1" / "processes")) == 1


def test_never_through_links(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "elsewhere" / "step_1", numbers(1))
    unfinish(str(tmp_path / "elsewhere" / "step_1"))
    run_folder = tmp_path / "run"
    (run_folder / "step_3" / "processes").mkdir(parents=True)
    (run_folder / "step_4").mkdir()
    unfinished = tmp_path / "elsewhere" / "step_1"
    (attempt,) = (unfinished / "processes").iterdir()
    (run_folder / "step_2").symlink_to(unfinished)
    (run_folder / "step_3" / "processes" / attempt.name).symlink_to(attempt)
    (run_folder / "step_4" / "processes").symlink_to(unfinished / "processes")
    (run_folder / "step_5" / "processes" / "a-000000" / "00000" / "d").mkdir(parents=True)
    (run_folder / "step_5" / "processes" / "a-000000" / "00000" / "d" / "x").symlink_to(attempt)
    grow_old(tmp_path)
    before = files(tmp_path)
    assert "nothing to remove" in run("clean", str(run_folder), "--yes", "--unknown-age")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "is a symbolic link; give " in run("clean", str(tmp_path / "link"), "--yes", code=2)
    (tmp_path / "link").unlink()
    assert files(tmp_path) == before


@pytest.mark.parametrize("manifest", [None, b"damaged"])
def test_nothing_tells_when_it_was_written(manifest: bytes | None, tmp_path: Path) -> None:
    """Objects carry no time that TensorStore tells; only the manifests of processes hold one."""
    where = f"memory://{tmp_path.name}/run"
    unickpt.save(f"{where}/step_1", {"w": np.zeros(3)})
    unfinish(f"{where}/step_1")
    for key in keys(where):
        if key.endswith("manifest.ocdbt"):
            store(where).write(key, manifest).result()
    found = json.loads(run("ls", where, "--json"))
    assert [r["name"] for r in found["unknown_age"]] == ["step_1"]
    assert "of unknown age" in run("clean", where, "--yes")
    assert keys(where)
    run("clean", where, "--yes", "--unknown-age")
    assert not any(key.startswith("step_1/") for key in keys(where))


# --- what the next Checkpointer removes ----------------------------------------------------------

# A job that dies while it saves.
DYING = f"""
import sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import die_at
from support.saving import numbers

die_at("commit.coordinator.Coordinator:_write_root", "before")
with unickpt.Checkpointer(sys.argv[1]) as checkpointer:
    checkpointer.save(1, numbers(7), overwrite=True)
"""


@pytest.mark.parametrize("storage", ["path", "s3"])
def test_what_a_killed_job_left_for_a_step_that_is_not_the_newest_is_removed(
    storage: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    processes: Processes,
) -> None:
    root = str(tmp_path / "run")
    if storage == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "killedbucket")
        root = f"s3://killedbucket/{tmp_path.name}"
    monkeypatch.setattr(lease, "_RENEW_S", 0.1)
    monkeypatch.setattr(lease, "_EXPIRES_S", 0.5)
    monkeypatch.setattr(lease, "_SETTLES_S", 0.0)
    unickpt.save(f"{root}/step_1", numbers(1))
    killed = processes.forked(DYING, root)
    assert killed.wait(60) == -signal.SIGKILL
    unickpt.save(f"{root}/step_2", numbers(2))
    assert len(attempts_in(f"{root}/step_1")) == 2
    with Checkpointer(root) as checkpointer:
        checkpointer.save(3, numbers(3))
    assert len(attempts_in(f"{root}/step_1")) == 1
    for step in (1, 2, 3):
        assert same(unickpt.load(f"{root}/step_{step}"), numbers(step))


def attempts_in(where: str) -> set[str]:
    return {key.split("/")[1] for key in keys(where) if key.startswith("processes/")}


def frozen_beside(tmp_path: Path) -> tuple[dict[str, np.ndarray], unickpt.SaveOptions]:
    """An old checkpoint `a`, and how another one is saved that links its files."""
    state = {f"f{n}": np.random.default_rng(n).standard_normal((60, 300)) for n in range(4)}
    unickpt.save(tmp_path / "a", state, options=unickpt.SaveOptions(chunk_bytes=50_000))
    grow_old(tmp_path)
    return state, unickpt.SaveOptions(base=tmp_path / "a", chunk_bytes=50_000)


@contextlib.contextmanager
def paused_after_links(count: int) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Saves pause after so many links: events that one has, and that it may go on."""
    from unickpt.plugins.incremental.linked_files import LinkedFiles  # the core has none

    paused, go, links = threading.Event(), threading.Event(), []
    take = LinkedFiles.take

    def taking(self: LinkedFiles, *args: Any, **options: Any) -> bool:
        found = take(self, *args, **options)
        links.append(1)
        if len(links) == count:
            paused.set()
            assert go.wait(30)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinkedFiles, "take", taking)
        yield paused, go
        go.set()


@pytest.mark.plugins
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_save_that_has_only_linked_old_files_is_under_way(name: str, tmp_path: Path) -> None:
    state, options = frozen_beside(tmp_path)
    with paused_after_links(3) as (paused, go), ThreadPoolExecutor(1) as pool:
        save = partial(unickpt.save, overwrite=True, options=options)
        saving = pool.submit(save, tmp_path / name, state | {"n": 1})
        assert paused.wait(30)
        found = save_leftovers.find(tmp_path)
        assert (found.orphans, [r.is_recent for r in found.under_way]) == ((), [True])
        assert save_leftovers.clean(tmp_path, found.under_way) == []
        go.set()
        saving.result()
    assert unickpt.load(tmp_path / name)["n"] == 1


@pytest.mark.plugins
@pytest.mark.parametrize("name", ["a", "b"])
def test_a_save_whose_files_are_removed_is_never_reported_as_committed(
    name: str, tmp_path: Path
) -> None:
    state, options = frozen_beside(tmp_path)
    with paused_after_links(3) as (paused, go), ThreadPoolExecutor(1) as pool:
        save = partial(unickpt.save, overwrite=True, options=options)
        saving = pool.submit(save, tmp_path / name, state | {"n": 1})
        assert paused.wait(30)
        (attempt,) = (p.parent for p in (tmp_path / name).glob("processes/*/00000/reused"))
        for file in (attempt / "reused").iterdir():  # of a `clean` that believes it is old
            file.unlink()
        go.set()
        with pytest.raises(StorageError, match=r"files written for this checkpoint are gone"):
            saving.result()
    if name == "a":
        assert same(unickpt.load(tmp_path / "a"), state)
    else:
        assert not (tmp_path / "b" / "manifest.ocdbt").exists()


def test_a_save_that_commits_while_clean_waits_for_it_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "a", {"n": 1})
    unfinished = (tmp_path / "a" / "manifest.ocdbt").rename(tmp_path / "kept")
    monkeypatch.setattr(save_leftovers, "RECENT_S", 0.0)
    found = save_leftovers.find(tmp_path).orphans
    locked = locations.manifest_locked

    def committing(location: Location, timeout_s: float) -> Any:
        unfinished.rename(tmp_path / "a" / "manifest.ocdbt")
        return locked(location, timeout_s)

    monkeypatch.setattr(locations, "manifest_locked", committing)
    assert [r.kind for r in found] == ["unfinished"]
    assert save_leftovers.clean(tmp_path, found) == []
    assert unickpt.load(tmp_path / "a")["n"] == 1
