"""S3 takes at most 5 GiB in one request: no object becomes larger, or the save says why."""

from __future__ import annotations

import numpy as np
import pytest
from support import s3_server

import unickpt
from unickpt import SaveOptions
from unickpt.errors import StorageError
from unickpt.storage import paths

MOST = 1 << 20

pytestmark = pytest.mark.plugins


@pytest.fixture
def bucket(moto: str, monkeypatch: pytest.MonkeyPatch) -> str:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "large")
    location = type(paths.resolve("s3://large/x"))
    assert location.most_object_bytes == 5 << 30
    monkeypatch.setattr(location, "most_object_bytes", MOST)
    return "s3://large"


def test_files_are_smaller_than_the_storage_takes(bucket: str) -> None:
    state = {"w": np.arange(3 << 17, dtype=np.int64)}
    options = SaveOptions(chunk_bytes=MOST // 3)
    unickpt.save(f"{bucket}/a", state, options=options)
    location = paths.resolve(f"{bucket}/a")
    names = [key.decode() for key in location.store(paths.context()).list().result()]
    sizes = [int(name.rsplit("-", 1)[1], 16) for name in names if "/d/" in name]
    assert len(sizes) >= 3
    assert max(sizes) <= MOST
    assert (unickpt.load(f"{bucket}/a")["w"] == state["w"]).all()


def test_a_chunk_that_is_too_large_is_named(bucket: str) -> None:
    state = {"layer": {"w": np.zeros(1 << 20)}}
    with pytest.raises(StorageError, match=r"array 'layer/w': the chunk .* at most 1048576"):
        unickpt.save(f"{bucket}/b", state, options=SaveOptions(chunk_bytes=8 << 20))
    value = {"rng": unickpt.PerProcess(b"x" * (2 << 20))}
    with pytest.raises(StorageError, match=r"a value of this process has"):
        unickpt.save(f"{bucket}/c", value)
