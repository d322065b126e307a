"""Where checkpoints live: paths and URLs, local disks and S3, and what storage does wrong."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support import TESTS, s3_server
from support.forks import Forks
from support.saving import files, in_job, numbers, same, save_in_job

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    CheckpointReplaced,
    InvalidPath,
    ProcessFailed,
    ProcessGroup,
    SaveConflict,
    SaveOptions,
    StorageError,
)
from unickpt.format.chunk_store import ChunkStore
from unickpt.reading.listing import checkpoints_below
from unickpt.storage import contexts, locations

ODD_NAMES = ["a b", "ä ö 漢", "100%", "a%20b", "a'b\"c", "x|y", "q?r#s", "~", "-rf", "a:b", "[c]*"]


def sound(path: Path | str, seed: int) -> bool:
    return same(unickpt.load(path), numbers(seed)) and unickpt.verify(path).ok


# --- paths --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_local_path_may_hold_any_character(name: str, tmp_path: Path) -> None:
    path = tmp_path / name / "step_1"
    report = unickpt.save(path, numbers(1))
    assert os.listdir(tmp_path) == [name]
    assert sound(path, 1)
    assert report.url == unickpt.open(path).url == path.as_uri() + "/"
    assert sound(report.url, 1), "its URL leads to it as well"
    array = ts.open(unickpt.open(path)["large"].url).result()
    np.testing.assert_array_equal(array.read().result(), numbers(1)["large"])


def test_paths_may_be_relative_or_in_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    unickpt.save("run/../run/step_1/", numbers(1))
    unickpt.save("~/step_2", numbers(2))
    assert sound(tmp_path / "run" / "step_1", 1)
    assert sound(str(tmp_path) + "//home///step_2", 2)
    assert sound(f"file://localhost{tmp_path}/run/step_1", 1)


def test_a_checkpoint_in_memory(tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/step 1"
    save_in_job(url, 3, lambda index: numbers(1))
    save_in_job(url, 3, lambda index: numbers(2), overwrite=True)
    assert sound(url, 2)
    with pytest.raises(CheckpointExists):
        unickpt.save(url, numbers(1))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("", "is not a path"),
        ("a\0b", "is not a path"),
        (b"bytes", "is not a path"),
        ("ftp://host/x", "unknown scheme 'ftp'; known are file://, memory://, s3://, gs://"),
        ("file://host/x", "three slashes"),
        ("file:relative", None),
        ("file:///a?b", "no '\\?' or '#'"),
        ("s3://bucket/a#b", "no '\\?' or '#'"),
        ("s3://bucket", "add the checkpoint's path, such as s3://bucket/run/1"),
        ("s3:/bucket/run", "two slashes after its scheme: s3://bucket/run"),
        ("file:/run/1", "two slashes after its scheme: file:///run/1"),
        ("s3:///path", "give a bucket and a path"),
        ("s3://Not_A_Bucket!/x", "Invalid S3 bucket name"),
        ("s3://[bucket/x", "is not a valid URL"),
        ("s3://bucket/a/../b", "'\\.\\.'"),
        ("gs://bucket/", "add the checkpoint's path, such as gs://bucket/run/1"),
        ("memory://", "add the checkpoint's path, such as memory://run/1"),
        ("back\\slash", "TensorStore accepts no"),
        ("x.__lock/y", "TensorStore accepts no"),
        ("sur\udcffrogate", "not valid Unicode"),
    ],
)
def test_what_names_no_storage_is_refused(
    path: Any, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if reason is None:  # a single colon is part of a file name
        unickpt.save(path, numbers(1))
        assert sound(tmp_path / path, 1)
        return
    for act in (lambda: unickpt.save(path, numbers(1)), lambda: unickpt.load(path)):
        with pytest.raises(InvalidPath, match=reason):
            act()
    assert os.listdir(tmp_path) == []


def test_cloud_urls_become_the_specs_of_their_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert locations.resolve("gs://bucket/a%20b/c/").spec == {
        "driver": "gcs",
        "bucket": "bucket",
        "path": "a b/c/",
    }
    plain = {"driver": "s3", "bucket": "bucket", "path": "run/1/"}
    plain["aws_credentials"] = "aws_credentials#anonymous"
    assert locations.resolve("s3://bucket/run/1").spec == plain
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-central-1")
    assert locations.resolve("s3://bucket/run/1").spec == {**plain, "aws_region": "eu-central-1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://minio:9000/")
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    expected = {**plain, "aws_region": "eu-west-1", "endpoint": "http://minio:9000"}
    assert locations.resolve("s3://bucket/run/1").spec == expected
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://s3:1")
    assert locations.resolve("s3://bucket/run/1").spec == {**expected, "endpoint": "http://s3:1"}
    for url in ("s3://bucket/run/1", "gs://bucket/run/1"):
        location = locations.resolve(url)
        assert location.is_remote
        assert str(location) == url
        assert str(location.child("processes/x")) == f"{url}/processes/x"


def test_nothing_is_there(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", "memory://nobody"):
        with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
            unickpt.load(path)
        with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
            unickpt.verify(path)
    assert os.listdir(tmp_path) == [], "looking leaves no trace"


# --- moving and reading by others ---------------------------------------------------------------


def test_a_checkpoint_can_be_moved_and_copied(tmp_path: Path) -> None:
    old = tmp_path / "old"
    save_in_job(old, 2, lambda index: numbers(1))
    save_in_job(old, 2, lambda index: numbers(2), overwrite=True)
    copied = tmp_path / "elsewhere" / "copy"
    shutil.copytree(old, copied)
    moved = tmp_path / "moved"
    old.rename(moved)
    assert sound(copied, 2)
    assert sound(moved, 2)
    save_in_job(moved, 2, lambda index: numbers(3), overwrite=True)
    assert sound(moved, 3)
    assert sound(copied, 2)


def test_a_reader_keeps_what_it_opened_or_says_that_it_is_gone(tmp_path: Path) -> None:
    unickpt.save(tmp_path, numbers(1))
    opened = unickpt.open(tmp_path)
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    with pytest.raises(CheckpointReplaced, match="another save replaced this checkpoint"):
        opened["large"][...]
    assert opened.values["seed"] == 1
    assert sound(tmp_path, 2)


def test_tensorstore_alone_reads_every_array(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    tree = {
        "plain": rng.standard_normal((30, 40)),
        "nested": {"a b": {"100%|?#": np.arange(7)}},
        "half": rng.standard_normal((3, 5)).astype(ml_dtypes.bfloat16),
        "bits": np.array([1, -2, 7], ml_dtypes.int4),
        "flag": np.array([True, False]),
        "complex": np.array([1 + 2j]),
        "scalar": np.float32(2.5),
        "empty": np.zeros((0, 4)),
    }
    for compression in (None, "zstd", "gzip", "blosc"):
        path = tmp_path / str(compression)
        unickpt.save(path, tree, options=SaveOptions(compression=compression, chunk_bytes=2000))
        moved = path.rename(tmp_path / f"moved {compression}")
        stored = unickpt.open(moved)
        for name in stored:
            found = ts.open(stored[name].url).result()
            assert found.read().result().tobytes() == stored[name][...].tobytes(), name


# --- S3 -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Server:
    """A server that speaks S3, with the bucket `bucket`."""

    endpoint: str

    def url(self, path: str) -> str:
        return f"s3://bucket/{path}"

    def keys(self, path: str) -> list[str]:
        """All objects below a path."""
        store = locations.resolve(self.url(path)).store(contexts.context())
        return sorted(key.decode() for key in store.list().result())


@pytest.fixture
def s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> Server:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "bucket")
    return Server(moto)


@pytest.mark.parametrize("path", ["plain/1", "a b/ü/100%25/x+y", "deep/er/and/deep/er"])
@pytest.mark.parametrize("count", [1, 3])
def test_s3_save_load_overwrite_verify(path: str, count: int, s3: Server) -> None:
    url = s3.url(f"{count}/{path}")
    save_in_job(url, count, lambda index: numbers(1))
    assert sound(url, 1)
    with pytest.raises(CheckpointExists, match="already holds a checkpoint"):
        unickpt.save(url, numbers(2))
    save_in_job(url, count, lambda index: numbers(2), overwrite=True)
    assert sound(url, 2)
    keys = s3.keys(f"{count}/{path}")
    assert len({key.split("/")[1] for key in keys if "/" in key}) == 1, "the old one is left"
    assert [key for key in keys if "/" not in key] == ["manifest.ocdbt"]
    assert unickpt.open(url)["large"][5:7, 3].tolist() == numbers(2)["large"][5:7, 3].tolist()


def test_a_network_that_fails_is_no_damage(
    s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local chunk that cannot be read is one: nobody else will read it either."""
    for path in (s3.url("failing"), tmp_path / "c"):
        unickpt.save(path, numbers(1))

    def fail(*arguments: Any, **options: Any) -> None:
        raise StorageError("no answer")

    monkeypatch.setattr(ChunkStore, "read", fail)
    with pytest.raises(StorageError, match="no answer"):
        unickpt.verify(s3.url("failing"))
    report = unickpt.verify(tmp_path / "c")
    assert {damage.reason for damage in report.damage} == {"no answer"}


def test_s3_a_bucket_is_listed(s3: Server) -> None:
    request = urllib.request.Request(f"{s3.endpoint}/listed", method="PUT")
    urllib.request.urlopen(request, timeout=5).close()
    for step in (10, 9):
        unickpt.save(f"s3://listed/a b {step}", numbers(step))
    unickpt.save("s3://listed/deeper/1", numbers(1))
    found = checkpoints_below("s3://listed")
    assert [(c.name, c.path) for c in found] == [
        ("a b 9", "s3://listed/a%20b%209"),
        ("a b 10", "s3://listed/a%20b%2010"),
    ]
    assert all(sound(c.path, int(c.name.split()[-1])) for c in found)


def test_s3_tensorstore_alone_reads_every_array(s3: Server) -> None:
    unickpt.save(s3.url("alone"), {"a b": {"100%": np.arange(700.0)}})
    spec = {
        "driver": "zarr3",
        "kvstore": {
            "driver": "ocdbt",
            "base": {
                "driver": "s3",
                "bucket": "bucket",
                "path": "alone/",
                "endpoint": s3.endpoint,
                "aws_region": "us-east-1",
            },
            "path": "a b/100%25/",
        },
    }
    found = ts.open(spec).result().read().result()
    np.testing.assert_array_equal(found, np.arange(700.0))


def test_s3_damage_is_named(s3: Server) -> None:
    url = s3.url("damaged")
    unickpt.save(url, {"w": np.arange(3000.0)})
    store = locations.resolve(url).store(contexts.context())
    (name,) = [key for key in s3.keys("damaged") if "/d/" in key]
    data = bytearray(store.read(name).result().value)
    data[data.index(np.arange(3000.0).tobytes()) + 8] ^= 1
    store.write(name, bytes(data)).result()
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        unickpt.load(url)
    assert [d.array for d in unickpt.verify(url).damage] == ["w"]
    store.write(name, bytes(data[:100])).result()
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        unickpt.load(url)
    store.write(name, None).result()
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        unickpt.load(url)


@pytest.mark.parametrize("overwrite", [False, True])
def test_s3_of_two_jobs_one_wins(overwrite: bool, s3: Server) -> None:
    for k in range(5):
        url = s3.url(f"race/{overwrite}/{k}")
        if overwrite:
            unickpt.save(url, numbers(9))
        barrier = threading.Barrier(2)
        outcomes: list[Any] = [None, None]

        def job(number: int, url: str = url, barrier: Any = barrier, out: Any = outcomes) -> None:
            barrier.wait()
            (out[number],) = save_in_job(url, 1, lambda index: numbers(number), overwrite=overwrite)

        threads = [threading.Thread(target=job, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [n for n in range(2) if not isinstance(outcomes[n], Exception)]
        assert won, outcomes
        assert overwrite or len(won) == 1
        for outcome in outcomes:
            ok = isinstance(outcome, unickpt.SaveReport | SaveConflict | CheckpointExists)
            assert ok, outcome
        assert any(sound(url, n) for n in won)


def test_s3_the_commit_is_a_conditional_write(s3: Server) -> None:
    """What the commit relies on: the server, and not the client, refuses a second first write."""
    store = locations.resolve(s3.url("conditional")).store(contexts.context())
    nothing = store.read("k").result().stamp.generation
    first = store.write("k", b"1", if_equal=nothing).result().generation
    assert first
    assert not store.write("k", b"2", if_equal=nothing).result().generation
    second = store.write("k", b"3", if_equal=first).result().generation
    assert second
    assert not store.write("k", b"4", if_equal=first).result().generation
    assert store.read("k").result().value == b"3"
    signed = {"Authorization": "AWS4-HMAC-SHA256 Credential=anyone/20260101/us-east-1/s3/x, a=b"}
    for condition in ({"If-None-Match": "*"}, {"If-Match": '"0123"'}):
        request = urllib.request.Request(
            f"{s3.endpoint}/bucket/conditional/k",
            data=b"5",
            headers={**signed, **condition},
            method="PUT",
        )
        with pytest.raises(urllib.error.HTTPError, match="412"):
            urllib.request.urlopen(request, timeout=5)


S3_PROCESS = """
import sys
sys.path.insert(0, ARGS[3])
import unickpt
from support.saving import numbers
group = unickpt.ProcessGroup(ARGS[1], 3, "real-s3-processes")
unickpt.save(ARGS[0], numbers(4), options=unickpt.SaveOptions(group=group, timeout_s=ARGS[2]))
"""


def test_s3_real_processes(s3: Server, tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    try:
        here = TESTS
        url = s3.url("processes")
        for ended in forks.wait_all([forks.start(S3_PROCESS, url, i, 30, here) for i in range(3)]):
            assert ended.code == 0, ended.out
    finally:
        forks.close()
    assert sound(url, 4)


def test_s3_a_missing_bucket_is_said_at_once(s3: Server) -> None:
    started = time.monotonic()
    for error in save_in_job("s3://no-such-bucket/run", 2, lambda index: numbers(1)):
        assert isinstance(error, StorageError)
        assert "s3://no-such-bucket/run: the storage failed: NOT_FOUND: NoSuchBucket" in str(error)
    with pytest.raises(CheckpointNotFound, match="no checkpoint at s3://no-such-bucket/run"):
        unickpt.load("s3://no-such-bucket/run")
    assert time.monotonic() - started < 10


def test_s3_a_dead_endpoint_is_said_soon(s3: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    for act in (
        lambda: unickpt.save(s3.url("x"), numbers(1)),
        lambda: unickpt.load(s3.url("x")),
        lambda: unickpt.verify(s3.url("x")),
    ):
        with pytest.raises(StorageError, match=r"s3://bucket/x: .*Could not connect to server"):
            act()
    assert time.monotonic() - started < 20


def test_requests_are_tried_as_often_as_the_aws_variable_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("AWS_MAX_ATTEMPTS", raising=False)
    assert locations.s3.retries()["max_retries"] == 9
    for text, retries in (("3", 2), ("1", 0), ("nonsense", 9), ("0", 9)):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", text)
        assert locations.s3.retries()["max_retries"] == retries


# --- storage that fails -------------------------------------------------------------------------


def test_a_file_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("precious")
    for path in (file, file / "below", file / "far" / "below"):
        for act in (lambda p: unickpt.save(p, numbers(1)), unickpt.load, unickpt.verify):
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
        assert isinstance(error, StorageError | ProcessFailed | unickpt.SaveTimeout)
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


@pytest.mark.integration
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


@pytest.mark.integration
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


def test_the_lock_of_a_killed_process_spoils_nothing(tmp_path: Path) -> None:
    """TensorStore itself would append what is in a lock file to what it writes next."""
    unickpt.save(tmp_path, numbers(1))
    for name in ("manifest.ocdbt.__lock", "manifest.ocdbt_0a1b.__lock"):
        (tmp_path / name).write_bytes(b"x" * 1000)
    unickpt.save(tmp_path, numbers(2), overwrite=True)
    assert sound(tmp_path, 2)
    assert [name for name in files(tmp_path) if "/" not in name] == ["manifest.ocdbt"]


def test_only_one_process_at_a_time_holds_the_lock(tmp_path: Path) -> None:
    location = locations.resolve(tmp_path)
    with (
        location.locked(1),
        pytest.raises(StorageError, match="another process holds this lock"),
        location.locked(0.1),
    ):
        pass
    with location.locked(0.1):
        pass
    held = []

    def work(group: ProcessGroup) -> None:
        for _ in range(20):
            with location.locked(30):
                held.append(group.index)
                assert len(held) == 1
                time.sleep(0.0005)
                held.pop()

    assert in_job(4, work) == [None] * 4
    assert os.listdir(tmp_path) == []


def test_a_path_that_is_none_is_named() -> None:
    for wrong in ({"w": 1}, None, 3):
        with pytest.raises(
            InvalidPath, match=f"the path is of type {type(wrong).__name__}; pass the"
        ):
            unickpt.save(wrong, "run/1")  # type: ignore[arg-type]
