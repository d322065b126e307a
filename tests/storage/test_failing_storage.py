"""Storage that fails: permissions, full disks, files in the way."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support import TESTS
from support.forks import Forks
from support.saving import files, numbers, save_in_job, sound

import unickpt
from unickpt import StorageError
from unickpt.errors import InvalidPath, ProcessFailed, UnsupportedFormat
from unickpt.storage import local_folders


def test_folders_are_made_while_a_failed_save_removes_their_empty_parents(tmp_path: Path) -> None:
    path = f"{tmp_path}/runs/c/"
    done = threading.Event()

    def remove() -> None:
        while not done.is_set():
            local_folders.remove_made(path, 2)
            time.sleep(0.0001)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for attempt in range(2000):
            local_folders.make(f"{path}processes/{attempt}/")
            os.rmdir(f"{path}processes/{attempt}/")
    finally:
        done.set()
        thread.join()


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    def save(path: Path) -> None:
        unickpt.save(path, numbers(1))

    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "below", file / "far" / "below"):
        for act in (save, unickpt.load, unickpt.verify):
            if path == file and act != save:
                with pytest.raises(UnsupportedFormat, match="is a file, and of no format"):
                    act(path)
            else:
                with pytest.raises(InvalidPath, match=r"file' is not a directory"):
                    act(path)
    assert file.read_text() == "precious"
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(InvalidPath, match="is not a directory"):
        unickpt.save(tmp_path / "dangling", numbers(1))


def test_a_place_where_nobody_can_write(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="/proc/unickpt"):
        unickpt.save("/proc/unickpt/step_1", numbers(1))
    for error in save_in_job("/proc/unickpt/step_1", 2, lambda index: numbers(1), timeout_s=2):
        assert isinstance(error, StorageError | ProcessFailed | unickpt.errors.SaveTimeout)
        assert "/proc/unickpt" in str(error)


AS_NOBODY = """
import json, os, sys
sys.path.insert(0, ARGS[2])
if os.getuid() == 0:
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
import unickpt
from support.saving import numbers, same
said = []
for act in (
    lambda: unickpt.save(ARGS[0], numbers(2), overwrite=True),
    lambda: unickpt.load(ARGS[0]),
    lambda: unickpt.save(ARGS[1], numbers(2)),
    lambda: unickpt.load(ARGS[1]),
):
    try:
        found = act()
        said.append("fine" if isinstance(found, dict) and same(found, numbers(1)) else "?")
    except BaseException as error:
        said.append(f"{type(error).__name__}: {error}")
print(json.dumps(said))
"""


def test_missing_permissions_are_named(tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    readable, hidden = tmp_path / "readable", tmp_path / "hidden" / "c"
    unickpt.save(readable, numbers(1))
    unickpt.save(hidden, numbers(1))
    for path in (tmp_path, *tmp_path.parents):
        if path.stat().st_mode & 0o005 != 0o005:
            path.chmod(0o755)
    for at, folders, names in os.walk(readable):
        for name in (*folders, *names):
            os.chmod(os.path.join(at, name), 0o555)
    readable.chmod(0o555)
    hidden.parent.chmod(0)
    try:
        here = TESTS
        ended = forks.wait(forks.start(AS_NOBODY, str(readable), str(hidden), here))
    finally:
        forks.close()
        hidden.parent.chmod(0o755)
    assert ended.code == 0, ended.out
    overwriting, reading, saving, loading = ended.last
    assert overwriting.startswith(f"StorageError: saving to {readable}"), overwriting
    made = readable / "processes"
    assert f"cannot make the directory {made}" in overwriting
    assert "Permission denied" in overwriting
    assert reading == "fine"
    for said in (saving, loading):
        assert said.startswith("StorageError"), said
        assert str(hidden) in said
        assert "ermission" in said or "PERMISSION" in said
    assert sound(readable, 1)


# The output of the process is a file too, and must not meet the limit.
WITH_A_LIMIT = """
import json, resource, signal, sys
sys.path.insert(0, ARGS[1])
import unickpt
from support.saving import numbers
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kind = resource.RLIMIT_FSIZE
before = resource.getrlimit(kind)
resource.setrlimit(kind, (ARGS[2], before[1]))
try:
    unickpt.save(ARGS[0], numbers(2), overwrite=True)
    said = "saved"
except BaseException as error:
    said = f"{type(error).__name__}: {error}"
resource.setrlimit(kind, before)
print(json.dumps(said))
"""


@pytest.mark.parametrize("limit", [0, 100, 1000, 100_000])
def test_a_file_that_cannot_grow_fails_the_save_and_keeps_the_old(
    limit: int, tmp_path: Path
) -> None:
    path = tmp_path / "c"
    unickpt.save(path, numbers(1))
    (tmp_path / "out").mkdir()
    forks = Forks(tmp_path / "out")
    try:
        ended = forks.wait(forks.start(WITH_A_LIMIT, str(path), TESTS, limit))
    finally:
        forks.close()
    assert ended.code == 0, ended.out
    assert ended.last.startswith(f"StorageError: saving to {path}"), ended.last
    assert sound(path, 1)
    assert len([n for n in files(path) if "/d/" in n]) == 1, "what was written is taken back"
    unickpt.save(path, numbers(3), overwrite=True)
    assert sound(path, 3)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_fails_the_save_and_keeps_the_old(small_disk: Path) -> None:
    path = small_disk / "c"
    unickpt.save(path, numbers(1))
    large = {"w": np.ones(400_000), "v": np.zeros(300_000)}
    with pytest.raises(StorageError, match="No space left on device"):
        unickpt.save(path, large, overwrite=True)
    assert sound(path, 1)
    started = time.monotonic()
    for error in save_in_job(path, 2, lambda index: large, overwrite=True):
        assert "No space left on device" in str(error)
    assert time.monotonic() - started < 10, "the message must find room"
    assert sound(path, 1)
    assert os.statvfs(path).f_bavail * os.statvfs(path).f_bsize > 1 << 20, "space is given back"
    save_in_job(path, 2, lambda index: numbers(3), overwrite=True)
    assert sound(path, 3)


@pytest.mark.plugins
def test_a_full_disk_is_an_error_that_says_how_much_is_needed_and_free(
    small_disk: Path, tmp_path: Path
) -> None:
    (small_disk / "filler").write_bytes(bytes(1 << 20))
    tree = {"w": np.ones(150_000)}
    source = tmp_path / "source"
    unickpt.save(source, tree)

    def save_with_tiers() -> None:
        with unickpt.Checkpointer(small_disk / "run", local=tmp_path / "local") as run:
            run.save(1, tree, wait=True)

    for number, act in enumerate(
        (
            lambda path: unickpt.save(path, tree),
            lambda path: unickpt.save_async(path, tree).result(),
            lambda path: unickpt.convert(source, path),
            lambda path: unickpt.convert(source, f"{path}.safetensors", to="safetensors"),
            lambda path: unickpt.copy(source, path),
            lambda path: save_with_tiers(),
        )
    ):
        with pytest.raises(StorageError, match="No space left on device") as caught:
            act(small_disk / str(number))
        text = str(caught.value)
        assert re.search(r"1\.2 MB to write, and 1\.0 MB were free before\. Remove", text), text
        for left in small_disk.glob(f"{number}*"):
            shutil.rmtree(left)  # `copy` resumes from what is there


def test_a_disk_without_any_room_left(small_disk: Path) -> None:
    path = small_disk / "c"
    unickpt.save(path, numbers(1))
    with open(small_disk / "filler", "wb", buffering=0) as filler:
        while os.statvfs(small_disk).f_bavail:
            filler.write(bytes(4096))
    with pytest.raises(StorageError, match="No space left on device"):
        unickpt.save(path, numbers(2), overwrite=True)
    assert sound(path, 1)
    (small_disk / "filler").unlink()
    unickpt.save(path, numbers(3), overwrite=True)
    assert sound(path, 3)


def test_a_file_that_fails_when_it_is_closed_fails_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on NFS, which sends data at the latest then."""
    real = os.close

    def close(handle: int) -> None:
        at = os.readlink(f"/proc/self/fd/{handle}")
        real(handle)
        if "/d/" in at:
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    unickpt.save(tmp_path / "c", numbers(1))
    monkeypatch.setattr(os, "close", close)
    with pytest.raises(StorageError) as caught:
        unickpt.save(tmp_path / "c", numbers(2), overwrite=True)
    text = str(caught.value)
    assert re.search(rf"cannot close {tmp_path}/c/processes/.*: Disk quota exceeded; this", text)
    assert "but the quota of this user or project is used up" in text
    assert sound(tmp_path / "c", 1)


def test_a_lock_that_fails_when_it_is_closed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.close

    def close(handle: int) -> None:
        at = os.readlink(f"/proc/self/fd/{handle}")
        real(handle)
        if at.endswith("lock"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "close", close)
    for number in (1, 2):
        unickpt.save(tmp_path / "c", numbers(number), overwrite=True)
    with unickpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, numbers(1), wait=True)
    assert sound(tmp_path / "c", 2)


@pytest.mark.plugins
def test_a_probe_of_links_that_cannot_be_removed_fails_no_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def unlink(path: str, **options: object) -> None:
        if str(path).endswith("/probe"):
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "unlink", unlink)
    with unickpt.Checkpointer(tmp_path, reuse=True) as run:
        for step in (1, 2):
            run.save(step, numbers(1), wait=True)
    assert sound(tmp_path / "step_2", 1)
