"""Checkpoints in S3."""

from __future__ import annotations

import threading
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support import TESTS, s3_server
from support.forks import Forks
from support.saving import numbers, save_in_job, sound

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
)
from unickpt.commit.messages import NO_CHUNKS, OK, Notes, Record
from unickpt.format.verified_chunks import ChunkStore
from unickpt.frameworks.process_group import ProcessGroup
from unickpt.reading.checkpoints_below import checkpoints_below
from unickpt.storage import paths
from unickpt.storage.tensorstore_calls import KvStore


@dataclass(frozen=True)
class Server:
    """A server that speaks S3, with the bucket `bucket`."""

    endpoint: str

    def url(self, path: str) -> str:
        return f"s3://bucket/{path}"

    def keys(self, path: str) -> list[str]:
        """All objects below a path."""
        store = paths.resolve(self.url(path)).store(paths.context())
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


def test_a_process_that_saves_alone_makes_few_requests(s3: Server) -> None:
    with s3_server.requests() as seen:
        unickpt.save(s3.url("requests"), {"w": np.arange(100.0)})
    written = [request.key for request in seen if request.method == "PUT"]
    # What it wrote, the root's nodes, and the manifest: nobody reads a record.
    assert len(written) == 3, written
    assert written[-1].endswith("/manifest.ocdbt")
    assert len(seen) == 8, seen


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
    store = paths.resolve(url).store(paths.context())
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
            ok = isinstance(outcome, unickpt.types.SaveReport | SaveConflict | CheckpointExists)
            assert ok, outcome
        assert any(sound(url, n) for n in won)


def test_s3_the_commit_is_a_conditional_write(s3: Server) -> None:
    """What the commit relies on: the server, and not the client, refuses a second first write."""
    store = paths.resolve(s3.url("conditional")).store(paths.context())
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
    with pytest.raises(CheckpointNotFound, match="at s3://no-such-bucket/run: the storage failed"):
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
        with pytest.raises(
            StorageError, match=r"s3://bucket/x: .*port 9 .*AWS_ENDPOINT_URL; AWS_MAX"
        ):
            act()
    assert time.monotonic() - started < 20


def test_the_coordinator_reads_many_records_at_the_same_time(
    s3: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, context = paths.resolve(s3.url("1/.tmp-attempt")), paths.context()
    data, count = Record(0, NO_CHUNKS).encode(), 40
    store = folder.child("records").store(context)
    for write in [store.write(f"{process:05d}{OK}", data) for process in range(count)]:
        write.result()
    notes = Notes(folder, ProcessGroup(0, count, "session"), context, 1)
    real, limits = KvStore.open, list[Any]()

    def opened(spec: Any, context: ts.Context) -> KvStore:
        limits.append(context["s3_request_concurrency"].to_json())
        return real(spec, context)

    monkeypatch.setattr(KvStore, "open", opened)
    records = notes.records(range(count), OK)
    assert [process for process, _ in records] == list(range(count))
    assert limits == [{"limit": 128}], "32 at the same time would take 94 s for 100,000 processes"
