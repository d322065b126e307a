"""The files of a checkpoint: only regular ones, only what is there, in any storage."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from support import s3_server

from unickpt.foreign.files import Files
from unickpt.storage import contexts
from unickpt.storage.errors import Damaged
from unickpt.storage.paths import resolve

DATA = bytes(range(200))


@pytest.fixture(params=["local", "s3"])
def files(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    url = str(tmp_path / "c")
    if request.param == "s3":
        moto = request.getfixturevalue("moto")
        s3_server.use(moto, monkeypatch)
        s3_server.make_bucket(moto, "files")
        url = "s3://files/c"
    else:
        (tmp_path / "c" / "below").mkdir(parents=True)
    store = resolve(url).store(contexts.context())
    for name in ("x", "below/y"):
        store.write(name, DATA).result()
    store.write("empty", b"").result()
    return Files(resolve(url))


def test_names_ranges_and_tails(files: Files) -> None:
    assert [name for name in files.names if "lock" not in name] == ["below/y", "empty", "x"]
    assert files.exists("x")
    assert not files.exists("z")
    assert files.size("x") in (200, None)
    assert files.read("below/y", 7, 5) == DATA[7:12]
    assert files.tail("x", 10) == DATA[-10:]
    for most in (200, 201, 100_000_000):
        assert files.tail("x", most) == DATA
    out = bytearray(6)
    files.read_into("x", 100, memoryview(out))
    assert out == DATA[100:106]


@pytest.mark.parametrize(
    ("name", "offset", "length"),
    [("x", 199, 2), ("x", 500, 1), ("z", 0, 1), ("x", 0, 1 << 50), ("x", 1 << 63, 1),
     ("x", (1 << 64) - 1, 1 << 64), ("x", -1, 5), ("empty", 0, 1)],
)  # fmt: skip
def test_ranges_beyond_a_file_are_damage(files: Files, name: str, offset: int, length: int) -> None:
    with pytest.raises(Damaged):
        files.read(name, offset, length)


def test_links_are_followed_and_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(DATA)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "link").symlink_to(tmp_path / "blob")
    (tmp_path / "c" / "zero").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "c" / "pipe")
    (tmp_path / "c" / "folder").mkdir()
    files = Files(resolve(tmp_path / "c"))
    assert files.read("link", 0, 200) == DATA
    began = time.perf_counter()
    for name in ("pipe", "zero", "folder"):
        with pytest.raises(Damaged, match=r"is (a FIFO|a device|a directory), not a file"):
            files.read(name, 0, 1)
    assert time.perf_counter() - began < 5
