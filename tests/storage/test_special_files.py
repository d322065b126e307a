"""Only regular files inside the folder are opened: no FIFO, no socket, no link that leads out."""

from __future__ import annotations

import os
import shutil
import socket
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from support.forks import Forks
from support.reading import read_all

import unickpt
from unickpt import LoadOptions
from unickpt.storage.database import Database
from unickpt.storage.errors import Damaged
from unickpt.storage.paths import resolve
from unickpt.storage.regular_files import RegularFiles


@pytest.fixture(params=[None, "zstd"])
def saved(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    options = unickpt.SaveOptions(compression=request.param, fsync=False)
    unickpt.save(tmp_path / "c", {"w": np.arange(50_000.0)}, options=options)
    return tmp_path / "c"


def leads(path: Path) -> list[Path]:
    """The files that a reader opens: the manifest, nodes, and data."""
    values = Database(resolve(path), ts.Context()).reader()
    return [path / "manifest.ocdbt", *(path / name for name in sorted(values.tree.files("")))]


def test_only_files_are_opened(saved: Path, forks: Forks) -> None:
    def bind(file: Path) -> None:
        here = os.getcwd()
        os.chdir(file.parent)  # a socket's path must be short
        try:
            with socket.socket(socket.AF_UNIX) as made:
                made.bind(file.name)
        finally:
            os.chdir(here)

    makers: dict[str, Callable[[Path], object]] = {
        "a FIFO": os.mkfifo,
        "a socket": bind,
        "a directory": os.mkdir,
    }
    opened = leads(saved)
    assert len(opened) == 3
    for file in opened:
        kept = file.with_suffix(".kept")
        file.rename(kept)
        for kind, make in makers.items():
            make(file)
            for said in read_all(forks, saved):
                assert f"{file} is {kind}, not a file" in said, said
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        kept.rename(file)
    assert unickpt.verify(saved).ok


def test_a_lock_is_a_file(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name, act in {
        "run/.unickpt.lock": lambda: unickpt.Checkpointer(tmp_path / "run").save(
            1, {"w": 1}, wait=True
        ),
        "c/manifest.ocdbt.__lock": lambda: unickpt.save(tmp_path / "c", {"w": 1}),
    }.items():
        lock = tmp_path / name
        lock.parent.mkdir()
        for make in (lambda f: f.symlink_to(precious), lambda f: os.mkfifo(f)):
            make(lock)
            with pytest.raises(unickpt.UnickptError, match="is not a regular file; remove it"):
                act()
            assert stat.S_ISLNK(lock.lstat().st_mode) or stat.S_ISFIFO(lock.lstat().st_mode)
            lock.unlink()
    assert precious.read_text() == "mine"


SAVED_BY_TWO = """
import numpy as np, unickpt
path, index = ARGS
group = unickpt.ProcessGroup(index, 2, "s")
options = unickpt.SaveOptions(group=group, timeout_s=20, fsync=False)
try:
    print(unickpt.save(path, {"w": np.ones(3)}, options=options).arrays)
except unickpt.UnickptError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("name", "who"),
    [("records/00001.ok", 0), ("notes/error-00001", 0), ("notes/request", 1)],
)
def test_what_processes_tell_each_other_is_in_files(
    name: str, who: int, forks: Forks, tmp_path: Path
) -> None:
    """A FIFO would block a process for ever; a link may lead to any file."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for number, make in enumerate((os.mkfifo, lambda f: f.symlink_to(precious))):
        path = tmp_path / str(number)
        file = path / "processes/s-000000" / name
        file.parent.mkdir(parents=True)
        make(file)
        out = forks.wait(forks.start(SAVED_BY_TWO, str(path), who)).out
        assert f"{file} is " in out, out
        assert "a FIFO, not a file" in out or "outside of the checkpoint's folder" in out
    assert precious.read_text() == "mine"


def test_a_reader_of_locks_is_not_blocked(tmp_path: Path, forks: Forks) -> None:
    (tmp_path / "run").mkdir()
    os.mkfifo(tmp_path / "run/.unickpt.lock")
    os.mkfifo(tmp_path / "run/manifest.ocdbt.exclusive.__lock")
    out = forks.wait(
        forks.start(
            """
import unickpt
from unickpt.runs import save_leftovers
from unickpt.storage import local_folders
print(save_leftovers.find(ARGS[0]).holder)
print(local_folders._why_held(ARGS[0] + "/manifest.ocdbt.exclusive.__lock"))
""",
            str(tmp_path / "run"),
        )
    ).out
    assert "None\n" in out
    assert "another process has held it" in out


def test_a_link_does_not_lead_out(saved: Path, forks: Forks, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    folders = {file.parent for file in leads(saved)} - {saved}
    for entry in [*leads(saved), *folders]:
        moved = outside / entry.name
        shutil.move(entry, moved)
        entry.symlink_to(moved)
        for said in read_all(forks, saved):
            assert "outside of the checkpoint's folder" in said, said
        entry.unlink()
        inside = saved / "inside"
        shutil.move(moved, inside)
        entry.symlink_to(inside)
        assert unickpt.verify(saved).ok, "a link that stays inside is fine"
        entry.unlink()
        shutil.move(inside, entry)
    for file in leads(saved):
        os.link(file, outside / file.name)
    assert unickpt.verify(saved).ok, "a file may have several names"
    saved.rename(tmp_path / "elsewhere")
    saved.symlink_to(tmp_path / "elsewhere")
    assert unickpt.verify(saved).ok, "the folder itself may be a link"
    (tmp_path / "above").symlink_to(tmp_path)
    assert unickpt.verify(tmp_path / "above" / "c").ok, "and lie below one"
    options = LoadOptions(verify=False)
    assert unickpt.load(tmp_path / "above" / "c", options=options)["w"][9] == 9


def test_a_folder_that_becomes_a_link_is_looked_at_again(tmp_path: Path) -> None:
    (tmp_path / "inside" / "d").mkdir(parents=True)
    for name in ("a", "b"):
        (tmp_path / "inside" / "d" / name).write_text("mine")
    files = RegularFiles(f"{tmp_path}/inside/")
    assert files.size("d/a") == 4
    shutil.move(tmp_path / "inside" / "d", tmp_path / "kept")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "b").write_text("precious")
    (tmp_path / "inside" / "d").symlink_to(tmp_path / "outside")
    with pytest.raises(Damaged, match="outside of the checkpoint's folder"):
        files.size("d/b")
