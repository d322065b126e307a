"""Checkpoints in Google Cloud Storage, as support/gcs_server.py speaks it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, gcs_server
from support.forks import Forks
from support.gcs_server import Bucket
from support.saving import numbers, save_in_job, sound

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
)
from unickpt.reading.checkpoints_below import checkpoints_below
from unickpt.storage import paths

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[gcs_server.Server]:
    with gcs_server.running() as running:
        yield running


@pytest.fixture
def bucket(server: gcs_server.Server, monkeypatch: pytest.MonkeyPatch) -> Bucket:
    """The empty bucket `bucket`."""
    gcs_server.use(server, monkeypatch)
    server.buckets["bucket"] = Bucket()
    return server.buckets["bucket"]


@pytest.mark.parametrize("path", ["plain/1", "a b/ü/100%25/x+y", "deep/er/and/deep/er"])
@pytest.mark.parametrize("count", [1, 3])
def test_save_load_overwrite_verify(path: str, count: int, bucket: Bucket) -> None:
    url = f"gs://bucket/{path}"
    save_in_job(url, count, lambda index: numbers(1))
    assert sound(url, 1)
    with pytest.raises(CheckpointExists, match="already holds a checkpoint"):
        unickpt.save(url, numbers(2))
    for saved in save_in_job(url, count, lambda index: numbers(2), overwrite=True):
        assert isinstance(saved, unickpt.types.SaveReport), saved
    assert sound(url, 2)
    folder = path.replace("%25", "%") + "/"
    keys = [name.removeprefix(folder) for name in bucket.objects]
    assert len({key.split("/")[1] for key in keys if "/" in key}) == 1, "the old one is left"
    assert [key for key in keys if "/" not in key] == ["manifest.ocdbt"]
    assert unickpt.open(url)["large"][5:7, 3].tolist() == numbers(2)["large"][5:7, 3].tolist()


def test_the_commit_is_a_conditional_write(bucket: Bucket) -> None:
    """What the commit relies on: the server refuses a second first write."""
    store = paths.resolve("gs://bucket/run").store(paths.context())
    nothing = store.read("k").result().stamp.generation
    first = store.write("k", b"1", if_equal=nothing).result().generation
    assert first
    assert not store.write("k", b"2", if_equal=nothing).result().generation
    second = store.write("k", b"3", if_equal=first).result().generation
    assert second
    assert not store.write("k", b"4", if_equal=first).result().generation
    assert store.read("k").result().value == b"3"


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_jobs_one_wins(overwrite: bool, bucket: Bucket) -> None:
    for k in range(3):
        url = f"gs://bucket/race/{k}"
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


def test_a_run_of_more_objects_than_one_answer_lists(bucket: Bucket) -> None:
    url = "gs://bucket/run"
    with unickpt.Checkpointer(url, keep_last=7) as run:
        for step in range(1, 10):
            run.save(step, {"w": np.full(3, step)}, wait=True)
    assert len(bucket.objects) > gcs_server.PAGE
    assert [c.name for c in checkpoints_below(url)] == [f"step_{n}" for n in range(3, 10)]
    unickpt.copy(f"{url}/step_9", "gs://bucket/copy")
    assert unickpt.load("gs://bucket/copy")["w"].tolist() == [9] * 3


def test_damage_is_named(bucket: Bucket) -> None:
    unickpt.save("gs://bucket/damaged", {"w": np.arange(3000.0)})
    (name,) = [name for name in bucket.objects if "/d/" in name]
    data, generation = bucket.objects[name]
    at = data.index(np.arange(3000.0).tobytes()) + 8
    bucket.objects[name] = (data[:at] + b"!" + data[at + 1 :], generation)
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        unickpt.load("gs://bucket/damaged")
    del bucket.objects[name]
    with pytest.raises(CheckpointCorrupt, match="array 'w'"):
        unickpt.load("gs://bucket/damaged")


PROCESS = """
import sys
sys.path.insert(0, ARGS[3])
import unickpt
from support.saving import numbers
group = unickpt.ProcessGroup(ARGS[1], 3, "real-gs-processes")
unickpt.save(ARGS[0], numbers(4), options=unickpt.SaveOptions(group=group, timeout_s=ARGS[2]))
"""


def test_real_processes(bucket: Bucket, tmp_path: Path) -> None:
    forks = Forks(tmp_path)
    try:
        url = "gs://bucket/processes"
        for ended in forks.wait_all([forks.start(PROCESS, url, i, 30, TESTS) for i in range(3)]):
            assert ended.code == 0, ended.out
    finally:
        forks.close()
    assert sound(url, 4)


def test_a_missing_bucket_is_said(bucket: Bucket) -> None:
    for error in save_in_job("gs://no-such-bucket/run", 2, lambda index: numbers(1)):
        assert isinstance(error, StorageError)
        assert "gs://no-such-bucket/run: the storage failed" in str(error)
    with pytest.raises(CheckpointNotFound, match="no checkpoint at gs://no-such-bucket/run"):
        unickpt.load("gs://no-such-bucket/run")
