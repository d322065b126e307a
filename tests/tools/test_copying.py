"""copy(): whole checkpoints in another place."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.saving import in_job, same

import unickpt
from unickpt import CheckpointCorrupt, CheckpointExists, CheckpointNotFound, PerProcess, SaveOptions
from unickpt.errors import UnsupportedFormat
from unickpt.tools import copying

CHUNK = 4096


@pytest.fixture(params=["path", "memory", "s3"])
def elsewhere(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder in some storage."""
    if request.param == "path":
        yield str(tmp_path / "elsewhere")
    elif request.param == "memory":
        yield f"memory://{secrets.token_hex(6)}"
    else:
        with pytest.MonkeyPatch.context() as patch:
            endpoint, bucket = request.getfixturevalue("moto"), f"copy-{secrets.token_hex(4)}"
            s3_server.use(endpoint, patch)
            s3_server.make_bucket(endpoint, bucket)
            yield f"s3://{bucket}/run"


def state(step: int = 0) -> dict[str, Any]:
    rows = np.random.default_rng(0).random((64, 128))
    rows[step] -= 1
    return {"w": rows, "n": np.arange(7), "empty": np.zeros((0, 2)), "step": step}


def save(path: Path | str, step: int = 0, **options: Any) -> unickpt.types.SaveReport:
    made = SaveOptions(chunk_bytes=CHUNK, fsync=False, **options)
    return unickpt.save(path, state(step), options=made, metadata={"of": "a run"})


def without_links(patch: pytest.MonkeyPatch) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError("no links")

    patch.setattr(os, "link", link)


def test_a_copy_is_the_same_checkpoint(tmp_path: Path, elsewhere: str) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", 3, base=tmp_path / "a", compression=None)
    report = unickpt.copy(tmp_path / "b", f"{elsewhere}/b")
    shutil.rmtree(tmp_path / "a")
    assert (report.arrays, report.borrowed) == (3, 0)
    found = unickpt.open(f"{elsewhere}/b")
    assert same(unickpt.load(found), state(3))
    assert found.index == unickpt.open(tmp_path / "b").index
    assert unickpt.verify(found).ok
    again = unickpt.copy(f"{elsewhere}/b", tmp_path / "c")  # and back
    assert again.bytes == report.bytes
    manifests = [(tmp_path / name / "manifest.ocdbt").read_bytes() for name in "bc"]
    assert manifests[0] == manifests[1]


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_borrowed_chunks_are_in_the_copy_itself(
    compression: str | None, tmp_path: Path, elsewhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_links(monkeypatch)
    save(tmp_path / "a", compression=compression)
    assert save(tmp_path / "b", 3, base=tmp_path / "a", compression=compression).reused_bytes
    report = unickpt.copy(tmp_path / "b", f"{elsewhere}/b")
    shutil.rmtree(tmp_path / "a")
    assert report.borrowed > 10
    found = unickpt.open(f"{elsewhere}/b")
    assert (found.index.bases, found.metadata) == ((), {"of": "a run"})
    assert same(unickpt.load(found), state(3))
    assert unickpt.verify(found).ok
    assert np.array_equal(found["w"].tensorstore().read().result(), state(3)["w"])


def test_values_of_processes_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_links(monkeypatch)
    for name, base in (("a", None), ("b", tmp_path / "a")):

        def work(
            group: Any, name: str = name, base: Path | None = base
        ) -> unickpt.types.SaveReport:
            tree = state() | {"own": PerProcess(group.index + 1)}
            options = SaveOptions(chunk_bytes=CHUNK, group=group, base=base, timeout_s=20)
            return unickpt.save(tmp_path / name, tree, options=options)

        assert all(isinstance(r, unickpt.types.SaveReport) for r in in_job(3, work))
    unickpt.copy(tmp_path / "b", tmp_path / "c")
    shutil.rmtree(tmp_path / "a")
    assert unickpt.load(tmp_path / "c")["own"].values == (1, 2, 3)
    assert unickpt.verify(tmp_path / "c").ok


def test_an_interrupted_copy_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", 1, base=tmp_path / "a")

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(copying, "check_copy", interrupt)
        with pytest.raises(KeyboardInterrupt):
            unickpt.copy(tmp_path / "b", tmp_path / "c")
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path / "c")
    files = {f: f.stat().st_mtime_ns for f in (tmp_path / "c").rglob("*/d/*")}
    assert files
    unickpt.copy(tmp_path / "b", tmp_path / "c")
    assert {f: f.stat().st_mtime_ns for f in files} == files
    assert same(unickpt.load(tmp_path / "c"), state(1))


def test_what_an_interrupted_copy_left_damaged_is_copied_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "c")
    (tmp_path / "c" / "manifest.ocdbt").unlink()
    (largest,) = sorted((tmp_path / "c").rglob("d/*"), key=lambda f: f.stat().st_size)[-1:]
    largest.write_bytes(bytes(largest.stat().st_size))
    unickpt.copy(tmp_path / "a", tmp_path / "c")
    assert same(unickpt.load(tmp_path / "c"), state())


def test_a_damaged_source_is_not_copied(tmp_path: Path) -> None:
    save(tmp_path / "a")
    (largest,) = sorted((tmp_path / "a").rglob("d/*"), key=lambda f: f.stat().st_size)[-1:]
    data = bytearray(largest.read_bytes())
    data[1000] ^= 1
    largest.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=r"copying .*a to .*b: it is damaged: 'w'"):
        unickpt.copy(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path / "b")


def test_destinations(tmp_path: Path) -> None:
    save(tmp_path / "a")
    save(tmp_path / "b", 1)
    with pytest.raises(CheckpointExists, match="pass overwrite=True"):
        unickpt.copy(tmp_path / "a", tmp_path / "b")
    with pytest.raises(CheckpointExists, match="is the source itself"):
        unickpt.copy(tmp_path / "a", tmp_path / "a")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExists, match="holds other files"):
        unickpt.copy(tmp_path / "a", tmp_path / "other", overwrite=True)
    unickpt.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert same(unickpt.load(tmp_path / "b"), state())
    assert len(os.listdir(tmp_path / "b" / "processes")) == 1
    unickpt.copy(tmp_path / "a", tmp_path / "b")  # it is there already
    np.savez(tmp_path / "x.npz", w=np.ones(3))
    with pytest.raises(UnsupportedFormat, match=r"of the format 'npz'; use unickpt\.convert"):
        unickpt.copy(tmp_path / "x.npz", tmp_path / "y")
    with pytest.raises(CheckpointNotFound):
        unickpt.copy(tmp_path / "nowhere", tmp_path / "y")
