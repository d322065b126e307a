"""File systems of many kinds: each that this machine can mount."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import mounts, s3_server
from support.mounts import state
from support.processes import Processes
from typer.testing import CliRunner

import unickpt
from unickpt import StorageError
from unickpt.cli.app import app

pytestmark = pytest.mark.integration
SEQUENTIAL = {"rclone"}  # writes a file only from its beginning to its end
SLOW = {"sshfs", "s3fs"}


@pytest.fixture(params=mounts.KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def mount(kind: str, moto: str, tmp_path: Path) -> Iterator[Path]:
    s3_server.make_bucket(moto, "bucket")
    work = tmp_path / "work"
    work.mkdir()
    try:
        with mounts.mounted(kind, work, moto) as folder:
            yield folder
    except mounts.NoMount as error:
        pytest.skip(f"{kind}: {error}")


def is_state(tree: object, number: int) -> bool:
    expected = state(number)
    assert isinstance(tree, dict)
    arrays = all(np.array_equal(tree[name], expected[name]) for name in ("frozen", "w"))  # type: ignore[arg-type]
    return arrays and tree["step"] == number


SAVES = """
import sys
import numpy as np
import unickpt
sys.path.insert(0, sys.argv[2])
from support.mounts import state
for number in range(2, 1000):
    unickpt.save(sys.argv[1], state(number), overwrite=True)
    print(number, flush=True)
"""
SECOND = """
import sys
import unickpt
sys.path.insert(0, sys.argv[2])
from support.mounts import state
try:
    unickpt.Checkpointer(sys.argv[1]).save(9, state(9), wait=True)
    print("saved")
except unickpt.SaveConflict as error:
    print("SaveConflict", error)
"""
TESTS = str(Path(__file__).parents[1])


@pytest.mark.plugins
def test_what_a_save_promises_holds_in_a_file_system(
    kind: str, mount: Path, processes: Processes
) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no locks", category=RuntimeWarning)
        check_overwrite(mount / "overwritten")
        if kind not in SLOW:
            check_copy(mount / "overwritten")
        check_run(mount / "run", processes)
        check_killed(mount / "killed", processes)
        check_export(kind, mount)


def check_overwrite(path: Path) -> None:
    unickpt.save(path, state(1))
    assert is_state(unickpt.load(path), 1)
    unickpt.save(path, state(2), overwrite=True)
    assert is_state(unickpt.load(path), 2)
    assert unickpt.verify(path).ok
    assert sorted(os.listdir(path)) == ["manifest.ocdbt", "processes"]


def check_copy(path: Path) -> None:
    copied = path.with_name("copied")
    unickpt.copy(path, copied)
    assert is_state(unickpt.load(copied), 2)


def check_run(path: Path, processes: Processes) -> None:
    with unickpt.Checkpointer(path, keep_last=2, reuse=True) as run:
        for number in range(4):
            run.save(number, state(number), wait=True)
        run.wait()
        assert run.steps()[-2:] == [2, 3], "without hard links, bases stay longer"
        assert is_state(run.load(), 3)
        (said,) = processes.finish([processes.forked(SECOND, path, TESTS)])
        assert said.startswith("SaveConflict"), said
    assert all(unickpt.verify(path / f"step_{step}").ok for step in (2, 3))


def check_killed(path: Path, processes: Processes) -> None:
    unickpt.save(path, state(1))
    process = processes.forked(SAVES, path, TESTS)
    assert process.stdout is not None
    assert process.stdout.readline() == "2\n", process.communicate()[1]
    folder = path / "processes"
    deadline = time.monotonic() + 60
    while len(os.listdir(folder)) < 2:
        assert time.monotonic() < deadline
    process.send_signal(signal.SIGKILL)
    process.wait()
    number = unickpt.load(path)["step"]
    assert is_state(unickpt.load(path), number)
    unickpt.save(path, state(5), overwrite=True)
    assert is_state(unickpt.load(path), 5)
    assert len(os.listdir(folder)) == 1, "what the killed process wrote is gone"


def check_export(kind: str, mount: Path) -> None:
    arrays = {"frozen": state(1)["frozen"], "w": state(1)["w"]}
    unickpt.save(mount / "arrays", arrays)
    file = mount / "model.safetensors"

    def export() -> None:
        unickpt.convert(mount / "arrays", file, to="safetensors", overwrite=file.exists())

    if kind in SEQUENTIAL:
        with pytest.raises(StorageError, match=r"cannot write .*from its beginning to its end"):
            unickpt.convert(mount / "arrays", mount / "dcp", to="dcp")
        return
    for _ in range(1 if kind in SLOW else 2):
        export()
        found = unickpt.load(file)
        assert all(np.array_equal(found[name], arrays[name]) for name in arrays)  # type: ignore[arg-type]
    if kind in SLOW:
        return
    unickpt.convert(mount / "arrays", mount / "dcp", to="dcp")
    unickpt.convert(mount / "arrays", mount / "dcp", to="dcp", overwrite=True)
    assert np.array_equal(unickpt.load(mount / "dcp")["w"], arrays["w"])  # type: ignore[arg-type]


def test_a_checkpoint_on_a_read_only_mount_is_read_by_all_that_only_read(tmp_path: Path) -> None:
    folder, mount = tmp_path / "folder", tmp_path / "mnt"
    with unickpt.Checkpointer(folder) as run:
        run.save(1, state(1), wait=True)
    mount.mkdir()
    try:
        if os.geteuid():
            raise mounts.NoMount("to mount needs root")
        mounts.run("mount", "--bind", folder, mount)
        mounts.run("mount", "-o", "remount,bind,ro", mount)
    except mounts.NoMount as error:
        pytest.skip(str(error))
    try:
        step = mount / "step_1"
        assert is_state(unickpt.load(step), 1)
        assert unickpt.verify(step).ok
        assert is_state(unickpt.Checkpointer(mount).load(), 1)
        assert unickpt.Checkpointer(mount).steps() == [1]
        for command in (["inspect", str(step)], ["verify", str(step)], ["ls", str(mount)]):
            done = CliRunner().invoke(app, command)
            assert done.exit_code == 0, done.output
        with pytest.raises(StorageError, match="Read-only file system"):
            unickpt.save(step, state(2), overwrite=True)
        with pytest.raises(StorageError, match="Read-only file system"):
            unickpt.Checkpointer(mount).save(2, state(2), wait=True)
    finally:
        mounts.run("umount", "--lazy", mount)
