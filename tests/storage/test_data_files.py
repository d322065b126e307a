"""Data files: each value is where it is said to be, looked at as it is written, durably."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import unickpt
from unickpt import SaveOptions
from unickpt.storage import data_files, paths
from unickpt.storage.data_files import DataFile, Flushes
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

SIZES = st.sampled_from([0, 1, 7, 99, 100, 101, 1000, (64 << 10), (64 << 10) + 1, 200_000])
VALUES = st.lists(st.tuples(SIZES, st.integers(0, 3)), max_size=6)


def location(path: Path | str) -> Location:
    found = paths.resolve(path)
    found.child(data_files.FOLDER).make()
    return found


def new_file(folder: Location, flushes: Flushes | None = None, *, fsync: bool = False) -> DataFile:
    return data_files.new_file(folder, paths.context(fsync=fsync), 30_000, flushes)


def add(file: DataFile, value: bytes, cuts: int = 0) -> bytes:
    """Adds a value in parts; returns what was looked at."""
    looked: list[bytes] = []
    at = len(value) // (cuts + 1)
    file.add((memoryview(value)[:at], memoryview(value)[at:]), lambda p: looked.append(bytes(p)))
    return b"".join(looked)


def values_of(folder: Location, file: DataFile) -> list[bytes]:
    """The values of a file, read where it says that they are."""
    stored = b""
    if any(offset >= 0 for offset in file.offsets):
        stored = folder.store(paths.context()).read(file.path).result().value
    inline = iter(file.inline)
    return [
        next(inline) if offset < 0 else stored[offset : offset + length]
        for offset, length in zip(file.offsets, file.lengths, strict=True)
    ]


@pytest.mark.parametrize("where", ["local", "memory"])
@settings(max_examples=40)
@given(values=VALUES)
def test_values_are_where_they_are_said_to_be(
    where: str, values: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files")
    folder = location(path if where == "local" else f"memory:/{path}")
    file, written = new_file(folder), [os.urandom(size) for size, _ in values]
    for value, (_, cuts) in zip(written, values, strict=True):
        assert add(file, value, cuts) == value
    file.close()
    assert values_of(folder, file) == written
    large = [value for value in written if len(value) > 100]
    assert bool(folder.child("d").files(paths.context())) == bool(large)
    if where == "memory" and large:
        told = data_files.written_in(file.path.removeprefix("d/"))
        assert told is not None
        assert told[1] == sum(map(len, large))


@pytest.fixture
def flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were flushed, by their paths."""
    paths_flushed: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        paths_flushed.append(os.path.relpath(os.readlink(f"/proc/self/fd/{handle}"), tmp_path))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths_flushed


def open_handles() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_a_file_is_flushed_after_others_if_that_is_asked(
    tmp_path: Path, flushed: list[str]
) -> None:
    before, flushes = open_handles(), Flushes()
    for durable in True, False:
        files = [new_file(location(tmp_path), flushes, fsync=durable) for _ in range(3)]
        for file in files:
            add(file, b"1" * 300)
            file.close()
        assert flushed == []
        for flush in flushes.take():
            flush()
        assert flushed == ([file.path for file in files] if durable else [])
        flushed.clear()
    assert open_handles() == before


def test_a_single_file_is_flushed_when_it_is_closed(tmp_path: Path, flushed: list[str]) -> None:
    file = new_file(location(tmp_path), fsync=True)
    add(file, b"1" * 300)
    file.close()
    assert flushed == [file.path]


def test_few_files_wait_for_their_flush(
    tmp_path: Path, flushed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_MOST_UNFLUSHED", 3)
    monkeypatch.setattr(data_files, "_MOST_UNFLUSHED_BYTES", 100_000)
    with Flushes() as flushes:
        files = [new_file(location(tmp_path), flushes, fsync=True) for _ in range(6)]
        for file, size, waiting in zip(
            files, (300, 300, 300, 300, 200_000, 300), (1, 2, 3, 3, 0, 1), strict=True
        ):
            add(file, b"1" * size)
            file.close()
            assert len(flushed) == files.index(file) + 1 - waiting
    assert flushed == [file.path for file in files[:5]]  # a failed save needs no flush


def test_no_file_stays_open_if_a_flush_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = open_handles()

    def fsync(handle: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def write(flushes: Flushes) -> None:
        for _ in range(4):
            file = new_file(location(tmp_path), flushes, fsync=True)
            add(file, b"1" * 300)
            file.close()
        for flush in flushes.take():
            flush()

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Failed, match=r"cannot flush .*/d/"), Flushes() as flushes:
        write(flushes)
    monkeypatch.setattr(data_files, "_MOST_UNFLUSHED", 2)
    with pytest.raises(Failed, match=r"cannot flush .*/d/"), Flushes() as flushes:
        write(flushes)
    assert open_handles() == before


class View:
    """Notes what it sees of a file, and what the system has of it at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.seen, self.completed = folder, b"", list[str]()

    def add(self, piece: memoryview) -> None:
        self.seen += bytes(piece)

    def complete(self, path: str, parts: data_files.Value) -> None:
        assert b"".join(parts) == self.seen
        if (self._folder / "d").is_dir():
            assert (self._folder / path).read_bytes() == self.seen
        self.completed.append(path)


@pytest.mark.parametrize("where", ["local", "memory"])
@settings(max_examples=40)
@given(values=VALUES)
def test_a_view_sees_the_whole_file(
    where: str, values: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("files")
    folder = location(path if where == "local" else f"memory:/{path}")
    file, view, written = new_file(folder), View(path), b""
    file.views = [view]
    for size, cuts in values:
        value = os.urandom(size)
        add(file, value, cuts)
        written += value if size > 100 else b""
    file.close()
    assert view.seen == written
    assert view.completed == ([file.path] if written else [])


@pytest.mark.parametrize("piece", [30_000, 200_000])
def test_the_disk_begins_before_the_flush(
    piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, int]] = []

    def advise(handle: int, start: int, nbytes: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        assert os.fstat(handle).st_size == start + nbytes
        begun.append((start, nbytes))
        raise OSError(errno.ESPIPE, "a file system that knows no advice")

    monkeypatch.setattr(os, "posix_fadvise", advise)
    monkeypatch.setattr(data_files, "_SEND_BYTES", 100_000)
    for durable in True, False:
        context = paths.context(fsync=durable)
        file = data_files.new_file(location(tmp_path), context, piece)
        for size in (250_000, 70_000, 60_000):
            add(file, b"1" * size)
        file.close()
        assert sum(nbytes for _, nbytes in begun) == (380_000 if durable else 0)
        assert len(begun) > 1 or not durable
        begun.clear()
    monkeypatch.delattr(os, "posix_fadvise")  # as on macOS
    file = new_file(location(tmp_path), fsync=True)
    add(file, b"1" * 200_000)
    file.close()


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
    file = new_file(location(tmp_path))

    def write() -> None:
        for _ in range(4):
            add(file, os.urandom(size))
        file.close()

    with files_of_at_most(100_001), pytest.raises(Failed) as raised:
        write()
    assert raised.value.errno == errno.EFBIG
    file.abandon()


def test_a_short_write_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, data[:777]))
    values = [os.urandom(100_000), os.urandom(5000), os.urandom(70_000)]
    file = new_file(location(tmp_path))
    for value in values:
        add(file, value)
    file.close()
    monkeypatch.undo()
    assert values_of(location(tmp_path), file) == values


def test_a_file_that_is_there_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\xab" * count)
    (tmp_path / "d").mkdir()
    (tmp_path / "target").write_bytes(b"mine")
    (tmp_path / "d" / ("ab" * 16)).symlink_to(tmp_path / "target")
    file = new_file(location(tmp_path))
    with pytest.raises(Failed):
        add(file, b"1" * 100_000)
    assert (tmp_path / "target").read_bytes() == b"mine"


def test_files_are_closed_after_a_failure(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = new_file(location(tmp_path))
    add(file, b"1" * 100_000)
    assert len(os.listdir("/proc/self/fd")) == before + 1
    file.abandon()
    file.abandon()
    full = new_file(location(tmp_path))
    add(full, b"2" * 60_000)
    add(full, b"2" * 20_000)
    with files_of_at_most(61_000), pytest.raises(Failed):
        full.close()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("name", ["0" * 32, "0" * 32 + "-1-x", "x-1-1", "records", "1-2-3-4"])
def test_other_names_tell_nothing(name: str) -> None:
    assert data_files.written_in(name) is None


BLOCK = 4096
BLOCKS = st.sampled_from([BLOCK, BLOCK - 1, 3 * BLOCK, (2 << 20) - BLOCK, (2 << 20) + 5, 5 << 20])


def direct_file(folder: Location) -> DataFile:
    return data_files.new_file(folder, paths.context(), 8 << 20, direct=True)


def is_on_a_device(folder: Location) -> bool:
    files = folder.regular_files()
    assert files is not None
    return os.major(os.stat(files.folder).st_dev) != 0


def is_cached(path: str) -> bool:
    """Whether the first block of a file is in the page cache. A read without waiting would begin to
    bring it there, and on a fast disk may find it."""
    with open(path, "rb") as file:
        memory = mmap.mmap(file.fileno(), BLOCK, flags=mmap.MAP_PRIVATE)  # none of it is touched
        where, found = ctypes.c_char.from_buffer(memory), (ctypes.c_ubyte * 1)()
        failed = ctypes.CDLL(None).mincore(ctypes.byref(where), ctypes.c_size_t(BLOCK), found)
        assert not failed
        del where
        memory.close()
        return bool(found[0] & 1)


def in_memory(value: bytes, shift: int) -> memoryview:
    """A value so many bytes behind the start of a page."""
    memory = mmap.mmap(-1, shift + max(1, len(value)))
    memory[shift : shift + len(value)] = value
    return memoryview(memory)[shift : shift + len(value)]


@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.tuples(SIZES | BLOCKS, st.sampled_from([0, 0, 512, 1])), max_size=5))
def test_values_bypass_the_page_cache(
    values: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("direct")
    folder = location(path)
    file, view = direct_file(folder), View(path)
    written = [os.urandom(size) for size, _ in values]
    file.views = [view]
    for value, (_, shift) in zip(written, values, strict=True):
        file.add((in_memory(value, shift),))
    file.close()
    assert view.seen == b"".join(value for value in written if len(value) > 100)
    assert values_of(folder, file) == written


def test_the_page_cache_gets_no_whole_block(tmp_path: Path) -> None:
    folder = location(tmp_path)
    for direct in True, False:
        file = data_files.new_file(folder, paths.context(), 8 << 20, direct=direct)
        file.add((in_memory(os.urandom(3 << 20), 1),))
        file.close()
        assert is_cached(str(tmp_path / file.path)) is not (direct and is_on_a_device(folder))


def test_saves_in_the_background_bypass_the_page_cache(tmp_path: Path) -> None:
    state = {"w": np.arange(3 << 17, dtype=np.float64)}
    fast = SaveOptions(fsync=False)
    unickpt.save_async(tmp_path / "background", state).result()
    unickpt.save_async(tmp_path / "not flushed", state, options=fast).result()
    unickpt.save(tmp_path / "plain", state)
    for name in "background", "not flushed", "plain":
        (file,) = tmp_path.glob(f"{name}/**/d/*")
        on_disk = name == "background" and is_on_a_device(location(tmp_path))
        assert is_cached(str(file)) is not on_disk, name
    assert np.array_equal(unickpt.load(tmp_path / "background")["w"], state["w"])


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EFAULT])
@pytest.mark.parametrize("refuses", ["open", "open, having made the file", "write", "later write"])
def test_where_the_system_refuses_the_page_cache_is_used(
    refuses: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real_open, real_write, writes = location(tmp_path), os.open, os.write, list[int]()

    def is_direct(handle: int) -> bool:
        return bool(fcntl.fcntl(handle, fcntl.F_GETFL) & os.O_DIRECT)

    def open_file(path: str, flags: int, mode: int = 0o777) -> int:
        if refuses.startswith("open") and flags & os.O_DIRECT:
            if "made" in refuses:
                os.close(real_open(path, flags & ~os.O_DIRECT, mode))
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return real_open(path, flags, mode)

    def write(handle: int, data: memoryview) -> int:
        if is_direct(handle):
            writes.append(len(data))
            if refuses == "write" or (refuses == "later write" and len(writes) > 1):
                raise OSError(code, os.strerror(code))
        return real_write(handle, data)

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(os, "write", write)
    file, values = direct_file(folder), [os.urandom(3 << 20) for _ in range(3)]
    for shift, value in enumerate(values):
        file.add((in_memory(value, shift * 512),))
    file.close()
    assert values_of(folder, file) == values
    if is_on_a_device(folder):
        assert len(writes) == {"write": 1, "later write": 2}.get(refuses, 0)


def test_the_system_takes_fewer_bytes_than_it_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, real_write = location(tmp_path), os.write
    counts = iter([BLOCK, 3 * BLOCK, 1000, 5000, *[1 << 30] * 100])
    monkeypatch.setattr(os, "write", lambda h, data: real_write(h, data[: next(counts)]))
    file, values = direct_file(folder), [os.urandom(1 << 20) for _ in range(3)]
    for value in values:
        file.add((in_memory(value, 0),))
    file.close()
    assert values_of(folder, file) == values
