"""Files stay open while many values are read from them, and no longer."""

from __future__ import annotations

import gc
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from support.forks import Forks

import unickpt
from unickpt.storage import regular_files
from unickpt.storage.errors import Damaged
from unickpt.storage.regular_files import RegularFiles, files_kept_open


def open_here(folder: Path) -> list[str]:
    """The files of a folder that this process has open."""
    found = []
    for handle in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
        except OSError:  # the one that listed them
            continue
    return sorted(os.path.relpath(path, folder) for path in found if path.startswith(str(folder)))


def text(files: RegularFiles, path: str) -> bytes:
    with files.opened(path) as handle:
        return os.pread(handle, 100, 0)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are opened."""
    paths: list[str] = []
    really = regular_files.open_to_read

    def open_to_read(path: str) -> int:
        paths.append(os.path.basename(path))
        time.sleep(0.001)  # as on the file system of a cluster
        return really(path)

    monkeypatch.setattr(regular_files, "open_to_read", open_to_read)
    return paths


def test_a_file_is_opened_once_while_files_are_kept_open(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "a").write_bytes(b"one")
    files = RegularFiles(f"{tmp_path}/")
    with files_kept_open():
        with files_kept_open():
            assert text(files, "a") == text(files, "a") == b"one"
        assert open_here(tmp_path) == ["a"]  # another reader is still there
        assert text(RegularFiles(f"{tmp_path}/"), "a") == b"one"
        assert opened == ["a"]
    assert open_here(tmp_path) == []
    assert text(files, "a") == b"one"
    assert opened == ["a", "a"]
    assert open_here(tmp_path) == []


def test_few_files_are_kept_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regular_files, "_MOST_KEPT", 3)
    for name in "abcdef":
        (tmp_path / name).write_text(name)
    files = RegularFiles(f"{tmp_path}/")
    with files_kept_open():
        with files.opened("a") as handle:
            for name in "bcadef":
                assert text(files, name) == name.encode()
            assert os.pread(handle, 100, 0) == b"a"  # its user is not done
        assert open_here(tmp_path) == ["d", "e", "f"]


def test_a_file_in_anothers_place_is_not_taken_for_it(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one")
    before = RegularFiles(f"{tmp_path}/")
    with files_kept_open():
        assert text(before, "a") == b"one"
        (tmp_path / "new").write_bytes(b"two")
        os.replace(tmp_path / "new", tmp_path / "a")
        assert text(RegularFiles(f"{tmp_path}/"), "a") == b"two"
        assert text(before, "a") == b"one"  # what it began to read
        os.remove(tmp_path / "a")
        with pytest.raises(Damaged):
            text(RegularFiles(f"{tmp_path}/"), "a")


def test_a_load_opens_each_data_file_once_and_leaves_none_open(
    tmp_path: Path, opened: list[str]
) -> None:
    tree = {str(n): np.full((300, 1000), n) for n in range(4)}
    options = unickpt.SaveOptions(chunk_bytes=1 << 18, fsync=False)
    unickpt.save(tmp_path / "c", tree, options=options)
    like = {name: np.zeros_like(array) for name, array in tree.items()}
    data = sorted((tmp_path / "c").glob("**/d/*"), key=lambda file: file.stat().st_size)
    opened.clear()
    unickpt.load(tmp_path / "c", like)
    assert [opened.count(file.name) for file in data] == [1] * len(data)
    gc.collect()
    assert open_here(tmp_path) == []
    with open(data[-1], "r+b") as damaged:
        damaged.seek(2000)
        damaged.write(b"x" * 100)
    with pytest.raises(unickpt.CheckpointCorrupt):
        unickpt.load(tmp_path / "c", like)
    gc.collect()
    assert open_here(tmp_path) == []


def test_threads_that_want_one_file_open_it_once(tmp_path: Path, opened: list[str]) -> None:
    (tmp_path / "a").write_bytes(b"one")
    files, ready = RegularFiles(f"{tmp_path}/"), threading.Barrier(8)

    def read(thread: int) -> bytes:
        ready.wait()
        return text(files, "a")

    with files_kept_open(), ThreadPoolExecutor(8) as pool:
        assert set(pool.map(read, range(8))) == {b"one"}
    assert opened.count("a") == 1


def test_a_fork_reads_on_its_own(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "a").write_bytes(b"one")
    source = """
import os, signal
from unickpt.storage import regular_files
files = regular_files.RegularFiles(ARGS[0])
with regular_files.files_kept_open():
    with files.opened("a") as parent:
        pass
    regular_files._kept._lock.acquire()  # as by a thread that the child does not have
    if (child := os.fork()) == 0:
        signal.alarm(20)
        with regular_files.files_kept_open(), files.opened("a") as handle:
            os._exit(0 if os.pread(handle, 9, 0) == b"one" else 1)
    regular_files._kept._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert os.pread(parent, 9, 0) == b"one"
"""
    ended = forks.wait(forks.start(source, f"{tmp_path}/"))
    assert ended.code == 0, ended.out
