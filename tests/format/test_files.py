"""The files of a checkpoint: only regular ones, only what is there, in any storage."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support import s3_server

from unickpt.errors import StorageError
from unickpt.format.files import Files
from unickpt.storage import paths
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
    store = resolve(url).store(paths.context())
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


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(DATA)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("x")
    (tmp_path / "below").symlink_to("folder")
    (tmp_path / "folder" / "up").symlink_to("../x")
    (tmp_path / "loop").symlink_to("loop")
    files = Files(resolve(tmp_path))
    for name in ("x", "link", "folder/up", "below/up"):
        assert files.read(name, 0, 200) == DATA
    assert files.here == ["link", "loop", "pipe", "x"]
    for name, what in (("pipe", "a FIFO"), ("folder", "a directory"), ("below", "a directory")):
        with pytest.raises(Damaged, match=f"is {what}, not a file"):
            files.read(name, 0, 1)
    for name in ("loop", "n" * 300, "link/x", "a\0b", "\ud800"):
        with pytest.raises(StorageError):
            files.read(name, 0, 1)


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "secret").write_bytes(DATA)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(DATA)
    (tmp_path / "c" / "again").symlink_to("link")
    (tmp_path / "c" / "link").symlink_to(tmp_path / "secret")
    (tmp_path / "c" / "folder").symlink_to("../outside")
    (tmp_path / "c" / "zero").symlink_to("/dev/zero")
    (tmp_path / "c" / "environment").symlink_to("/proc/self/environ")
    files = Files(resolve(tmp_path / "c"))
    names = ("link", "again", "folder/x", "zero", "environment", "../secret")
    for name in names:
        for read in (files.size, files.whole, files.head):
            with pytest.raises(Damaged, match="may not lead out of it"):
                read(name)
    for given in (tmp_path / "c" / "link", tmp_path / "secret"):  # the user gave it
        assert Files(resolve(given, or_file=True), is_file=True).whole(given.name) == DATA
    (tmp_path / "all").symlink_to("outside")
    assert Files(resolve(tmp_path / "all")).whole("x") == DATA


def test_the_cache_of_hugging_face_is_one_folder(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--a--b"
    below = repository / "snapshots" / ("f" * 40) / "below"
    (repository / "blobs").mkdir(parents=True)
    below.mkdir(parents=True)
    (repository / "blobs" / "abc").write_bytes(DATA)
    (repository / "refs").write_bytes(DATA)
    (below / "x").symlink_to("../../../blobs/abc")
    (below / "y").symlink_to("../../../refs")
    for top, name in ((below, ""), (below.parent, "below/")):
        files = Files(resolve(top))
        assert files.whole(name + "x") == DATA
        with pytest.raises(Damaged, match="may not lead out of it"):
            files.whole(name + "y")
