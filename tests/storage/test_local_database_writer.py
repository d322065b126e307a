"""Databases that unickpt writes itself in local folders: TensorStore reads the same, durably."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.storage import contexts, local_database_writer, ocdbt, paths
from unickpt.storage.btree import builder
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.local_database_writer import DataFile, LocalDatabaseWriter

SIZES = st.sampled_from([0, 1, 7, 99, 100, 101, 1000, (64 << 10), (64 << 10) + 1, 200_000])
FILES = st.lists(st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=6), min_size=1, max_size=4)


def database(path: Path, *, fsync: bool = False) -> Database:
    return Database(paths.resolve(path), contexts.context(fsync=fsync))


def writer_of(path: Path, *, fsync: bool = False) -> LocalDatabaseWriter:
    writer = database(path, fsync=fsync).local_writer()
    assert writer is not None
    return writer


def by_tensorstore(path: Path) -> dict[str, bytes]:
    spec = ocdbt.spec({"driver": "file", "path": f"{path}/"})
    store = ts.KvStore.open(spec, context=contexts.context()).result()
    return {key.decode(): store.read(key).result().value for key in store.list().result()}


def by_ours(path: Path) -> dict[str, bytes]:
    reader = database(path).reader()
    keys = [key.decode() for leaf in reader.tree.leaves() for key in leaf.keys]
    return {key: reader.read(key) or b"" for key in keys}


def write(
    writer: LocalDatabaseWriter, values: dict[str, bytes], *, last: bool, cuts: int = 0
) -> dict[str, bytes]:
    """Writes a file of values, each in parts; returns what was looked at."""
    looked: dict[str, list[bytes]] = {key: [] for key in values}
    file = writer.new_file(30_000)
    for key, value in values.items():
        at = len(value) // (cuts + 1)
        parts = memoryview(value)[:at], memoryview(value)[at:]
        file.add(key, parts, lambda piece, key=key: looked[key].append(bytes(piece)))
    writer.add(file, last=last)
    return {key: b"".join(pieces) for key, pieces in looked.items()}


@settings(max_examples=40)
@given(FILES, st.integers(2, 5), st.booleans())
def test_tensorstore_reads_what_was_written(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[list[tuple[int, int]]],
    entries: int,
    last: bool,
) -> None:
    path = tmp_path_factory.mktemp("db")
    written: dict[str, bytes] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "_ENTRIES", entries)
        writer = writer_of(path)
        for number, sizes in enumerate(files):
            values = {f"{n}/{number}": os.urandom(size) for n, (size, _) in enumerate(sizes)}
            cuts = sizes[0][1] if sizes else 0
            is_last = last and number == len(files) - 1
            assert write(writer, values, last=is_last, cuts=cuts) == values
            written |= values
        writer.finish()
    assert by_tensorstore(path) == written
    assert by_ours(path) == written
    names = os.listdir(path / "d")
    assert len(names) == len(files) + (not last), "the B-tree is in the last file"


def test_more_is_added_to_what_is_there(tmp_path: Path) -> None:
    writer, first, second = writer_of(tmp_path), {"a": b"1" * 300, "c": b"2"}, {"b": b"3" * 300}
    write(writer, first, last=True)
    writer.finish()
    assert by_tensorstore(tmp_path) == first
    write(writer, second, last=True)
    writer.finish()
    assert by_tensorstore(tmp_path) == first | second == by_ours(tmp_path)


def test_threads_write_files_of_their_own(tmp_path: Path) -> None:
    writer = writer_of(tmp_path)
    values = {n: {f"{n}/{k}": os.urandom(1000 + k) for k in range(200)} for n in range(8)}
    threads = [
        threading.Thread(target=write, args=(writer, values[n]), kwargs={"last": False})
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.finish()
    expected = {key: value for each in values.values() for key, value in each.items()}
    assert by_ours(tmp_path) == expected
    assert len(os.listdir(tmp_path / "d")) == 9


def test_everything_is_on_the_disk_before_the_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    real_fsync, real_write = os.fsync, local_database_writer.KvStore.write

    def fsync(handle: int) -> None:
        events.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        real_fsync(handle)

    def written(self: Any, key: str, *arguments: Any, **options: Any) -> Any:
        events.append(key)
        return real_write(self, key, *arguments, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(local_database_writer.KvStore, "write", written)
    writer = writer_of(tmp_path, fsync=True)
    write(writer, {"a": b"1" * 300}, last=False)
    write(writer, {"b": b"2" * 300}, last=True)
    writer.finish()
    assert events[-2:] == ["d", "manifest.ocdbt"]
    assert sorted(events[:-2]) == sorted(f"d/{name}" for name in os.listdir(tmp_path / "d"))
    events.clear()
    write(plain := writer_of(tmp_path / "other"), {"a": b"1" * 300}, last=True)
    plain.finish()
    assert events == ["manifest.ocdbt"]


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [300_000, 50_000])
def test_a_write_that_is_cut_short_fails(size: int, tmp_path: Path) -> None:
    # The system writes what fits, and says so; only the next write fails.
    writer = writer_of(tmp_path)
    with files_of_at_most(100_001), pytest.raises(Failed) as raised:
        write(writer, {str(n): os.urandom(size) for n in range(4)}, last=False)
    assert raised.value.errno == errno.EFBIG


def test_a_short_write_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:777]))
    values = {"a": os.urandom(100_000), "b": os.urandom(5000), "c": os.urandom(70_000)}
    write(writer := writer_of(tmp_path), values, last=True)
    writer.finish()
    monkeypatch.undo()
    assert by_ours(tmp_path) == values


def test_a_file_that_is_there_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\xab" * count)
    (tmp_path / "d").mkdir()
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "d" / ("ab" * 16)).symlink_to(tmp_path / "target")
    with pytest.raises(Failed):
        writer_of(tmp_path).new_file()
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_a_key_that_is_too_long_is_named(tmp_path: Path) -> None:
    write(writer := writer_of(tmp_path), {"x" * 65_535: b"1" * 300}, last=True)
    writer.finish()
    assert list(by_tensorstore(tmp_path)) == ["x" * 65_535]
    write(writer := writer_of(tmp_path / "b"), {"layer/" + "x" * 65_530: b"1" * 300}, last=True)
    with pytest.raises(Failed, match=r"the key 'layer/xx.*' has 65536 bytes.*shorter name"):
        writer.finish()


def test_files_are_closed_after_a_failure(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    writer = writer_of(tmp_path)
    file = writer.new_file()
    file.add("a", [memoryview(b"1" * 300)])
    file.abandon()
    file.abandon()
    write(writer, {"b": b"2" * 300}, last=True)
    writer.abandon()
    write(full := writer_of(tmp_path / "full"), {str(n): b"3" * 200 for n in range(600)}, last=True)
    with files_of_at_most(121_000), pytest.raises(Failed):
        full.finish()
    assert isinstance(file, DataFile)
    assert len(os.listdir("/proc/self/fd")) == before
