"""Saves that refer to chunks of an earlier checkpoint, in one process."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore as ts
from support.saving import same

import unickpt
from unickpt import Checkpointer, CheckpointNotFound, SaveOptions
from unickpt.format.chunk_values import ChunkValues
from unickpt.references.value_places import WriteItem
from unickpt.saving.write_plan import DirectSource, StagedChunk
from unickpt.storage import regular_files

CHUNK = 4096
ROWS = 64
"""Of an array of 16 chunks."""


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "w": rng.random((ROWS, CHUNK // 32)),
        "h": rng.random(3000).astype(np.float32),
        "count": np.array(7),
        "empty": np.zeros((0, 3)),
        "step": 1,
    }


def save(path: Path, state: Any, **options: Any) -> unickpt.types.SaveReport:
    made = SaveOptions(chunk_bytes=CHUNK, fsync=False, **options)
    return unickpt.save(path, state, options=made)


def chunk_bytes(path: Path, name: str = "w") -> int:
    entry = unickpt.open(path).index.arrays[name]
    return int(np.prod(entry.chunk)) * entry.itemsize


def is_whole(path: Path, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


def disk_bytes(*paths: Path) -> int:
    """What files take, each file once however many names it has."""
    files = {
        (found.st_dev, found.st_ino): found.st_size
        for path in paths
        for file in path.rglob("*")
        if file.is_file() and (found := file.stat())
    }
    return sum(files.values())


def test_only_changed_chunks_are_written(tmp_path: Path) -> None:
    state = tree()
    first = save(tmp_path / "a", state)
    assert first.reused_bytes == 0
    state["w"][5] += 1
    state["step"] = 2
    second = save(tmp_path / "b", state, base=tmp_path / "a")
    small = state["count"].nbytes  # it is stored in the B-tree
    assert second.written_bytes == chunk_bytes(tmp_path / "b") + small
    assert second.written_bytes + second.reused_bytes == first.written_bytes == second.bytes
    assert second.writers[0]["reused_bytes"] == second.reused_bytes
    assert unickpt.open(tmp_path / "b").index.reused == second.reused_bytes
    assert disk_bytes(tmp_path) < 1.2 * disk_bytes(tmp_path / "a")
    is_whole(tmp_path / "b", state)


def test_a_chunk_of_the_base_is_looked_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tree()
    chunks = save(tmp_path / "a", state).chunks
    asked, whole_places = [], ChunkValues.whole_places

    def counted(values: ChunkValues, chunks: Any) -> Any:
        asked.extend((part.key, number) for _, part, number in chunks)
        return whole_places(values, chunks)

    monkeypatch.setattr(ChunkValues, "whole_places", counted)
    assert save(tmp_path / "b", state, base=tmp_path / "a").reused_bytes > 0
    assert len(asked) == len(set(asked)) == chunks


def test_what_changed_last_time_is_written_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{n}/{kind}": np.full(512, n, np.float64) for n in range(8) for kind in "abcd"}
    asked, fetch = list[str](), DirectSource.fetch

    def noted(source: DirectSource, item: WriteItem) -> StagedChunk:
        asked.append(item.entry.name)
        return fetch(source, item)

    monkeypatch.setattr(DirectSource, "fetch", noted)
    for step in range(3):
        save(tmp_path / str(step), state, base=tmp_path / str(step - 1) if step else None)
        for n in range(8):
            state[f"{n}/a"] += 1
    in_order, third = asked[:32], asked[64:]
    assert asked[32:64] == in_order  # nobody knows yet
    assert third == sorted(in_order, key=lambda name: name[-1] != "a")


@pytest.mark.parametrize("gone", ["removed", "moved", "overwritten"])
def test_a_checkpoint_is_complete_without_its_base(gone: str, tmp_path: Path) -> None:
    state = tree()
    paths = [tmp_path / str(n) for n in range(4)]
    for n, path in enumerate(paths):
        state["w"][7 * n] += 1
        save(path, state, base=paths[n - 1] if n else None)
    for path in paths[:-1]:
        if gone == "removed":
            shutil.rmtree(path)
        elif gone == "moved":
            path.rename(path.with_name(f"moved-{path.name}"))
        else:
            unickpt.save(path, {"other": np.zeros(3)}, overwrite=True)
    paths[-1].rename(tmp_path / "last")
    is_whole(tmp_path / "last", state)
    alone = ts.open(f"file://{tmp_path}/last/|ocdbt:w/").result()
    assert np.array_equal(alone.read().result(), state["w"])


def test_a_step_may_be_its_own_base(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    state["h"] += 1
    options = SaveOptions(chunk_bytes=CHUNK, base=tmp_path / "a")
    report = unickpt.save(tmp_path / "a", state, overwrite=True, options=options)
    assert report.reused_bytes == state["w"].nbytes
    assert len(os.listdir(tmp_path / "a" / "processes")) == 1
    is_whole(tmp_path / "a", state)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s | {"v": s.pop("w")},  # another name
        lambda s: s | {"w": s["w"].view(np.int64)},
        lambda s: s | {"w": s["w"].reshape(-1)},
        lambda s: s | {"w": np.asfortranarray(s["w"]) + 1},
    ],
)
def test_other_arrays_are_written(change: Any, tmp_path: Path) -> None:
    state = tree()
    del state["h"]
    save(tmp_path / "a", state)
    state = change(dict(state))
    assert save(tmp_path / "b", state, base=tmp_path / "a").reused_bytes == 0
    is_whole(tmp_path / "b", state)


def test_another_array_with_the_same_elements_is_written(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    state["copy"] = state["w"].copy()
    report = save(tmp_path / "b", state, base=tmp_path / "a")
    assert report.reused_bytes == state["w"].nbytes + state["h"].nbytes
    is_whole(tmp_path / "b", state)


def test_other_chunks_and_another_compression_are_written(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    options = SaveOptions(chunk_bytes=2 * CHUNK, base=tmp_path / "a", fsync=False)
    assert unickpt.save(tmp_path / "b", state, options=options).reused_bytes == 0
    report = save(tmp_path / "c", state, base=tmp_path / "a", compression="zstd")
    assert report.reused_bytes == 0
    report = save(tmp_path / "d", state, base=tmp_path / "c", compression="zstd")
    assert report.reused_bytes == report.bytes - state["count"].nbytes
    for name in "bcd":
        is_whole(tmp_path / name, state)


def damaged(path: Path, chunk: np.ndarray[Any, Any]) -> None:
    """Flips a bit of a chunk in the data files of a checkpoint."""
    needle = chunk.tobytes()
    for file in (path / "processes").rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        if needle in data:
            changed = bytearray(data)
            changed[data.index(needle) + 9] ^= 4
            file.write_bytes(changed)
            return
    raise AssertionError("no file has this chunk")


def test_compare_refers_to_no_damaged_chunk(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    rows = chunk_bytes(tmp_path / "a") // state["w"][0].nbytes
    damaged(tmp_path / "a", state["w"][rows : 2 * rows])
    assert not unickpt.verify(tmp_path / "a").ok
    report = save(tmp_path / "b", state, base=tmp_path / "a", reuse="compare")
    assert report.written_bytes == chunk_bytes(tmp_path / "a") + state["count"].nbytes
    is_whole(tmp_path / "b", state)
    save(tmp_path / "c", state, base=tmp_path / "a")  # by digest, damage is inherited, and found
    assert [d.array for d in unickpt.verify(tmp_path / "c").damage] == ["w"]


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOENT])
def test_without_links_everything_is_written(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tree()
    save(tmp_path / "elsewhere" / "a", state)

    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    report = save(tmp_path / "b", state, base=tmp_path / "elsewhere" / "a")
    assert report.reused_bytes == 0
    assert report.written_bytes == report.bytes
    is_whole(tmp_path / "b", state)


def test_a_base_must_exist(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFound, match="nowhere"):
        save(tmp_path / "b", tree(), base=tmp_path / "nowhere")
    assert not (tmp_path / "b").exists()
    with pytest.raises(ValueError, match="reuse 'hope' is not one of digest, compare, patch"):
        SaveOptions(reuse="hope")  # type: ignore[arg-type]


def test_a_damaged_base_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = tree()
    save(tmp_path / "a", state)
    (manifest := tmp_path / "a" / "manifest.ocdbt").write_bytes(manifest.read_bytes()[:-3] + b"abc")
    with caplog.at_level(logging.WARNING):
        assert save(tmp_path / "b", state, base=tmp_path / "a").reused_bytes == 0
    assert "is damaged or cannot be read" in caplog.text
    is_whole(tmp_path / "b", state)


def test_a_data_file_that_is_gone_or_leads_outside_is_not_linked(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    (file,) = (f for f in (tmp_path / "a" / "processes").rglob("d/*") if f.stat().st_size > 50_000)
    outside = tmp_path / "outside"
    file.rename(outside)
    assert save(tmp_path / "b", state, base=tmp_path / "a").reused_bytes == 0
    file.symlink_to(outside)
    assert save(tmp_path / "c", state, base=tmp_path / "a").reused_bytes == 0
    os.unlink(file)
    inside = tmp_path / "a" / "processes" / "inside"
    outside.rename(inside)
    file.symlink_to(inside)
    report = save(tmp_path / "d", state, base=tmp_path / "a")
    assert report.reused_bytes > 0
    shutil.rmtree(tmp_path / "a")
    for name in "bcd":
        is_whole(tmp_path / name, state)


def test_linked_files_are_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = tree()
    save(tmp_path / "a", state)  # without fsync
    flushed = set[int]()
    real = os.fsync

    def flush(handle: int) -> None:
        flushed.add(os.fstat(handle).st_ino)
        real(handle)

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(regular_files, "_flush_data", flush)
    for fsync in (False, True):
        path = tmp_path / str(fsync)
        options = SaveOptions(chunk_bytes=CHUNK, base=tmp_path / "a", fsync=fsync)
        unickpt.save(path, state, options=options)
        (folder,) = path.rglob("reused")
        linked = {file.stat().st_ino for file in folder.iterdir() if file.stat().st_nlink > 1}
        assert linked
        assert linked | {folder.stat().st_ino} <= flushed if fsync else not linked & flushed


def test_a_file_of_which_little_is_used_is_left(tmp_path: Path) -> None:
    state = {"w": tree()["w"]}
    save(tmp_path / "0", state)
    for n, changed in enumerate([9, 0, 0], 1):
        state["w"][: changed * ROWS // 16] += 1
        report = save(tmp_path / str(n), state, base=tmp_path / str(n - 1))
        # 9 of 16 chunks are new in step 1, so that step 2 uses 7 of the first file's 16.
        assert report.written_bytes == [9, 7, 0][n - 1] * chunk_bytes(tmp_path / str(n))
        is_whole(tmp_path / str(n), state)


def test_equal_elements_in_chunks_of_another_shape_are_written(tmp_path: Path) -> None:
    # Chunk 1 has 600 zeros in both, and is stored with other padding.
    state = {"w": np.zeros((400, 6))}
    save(tmp_path / "a", state, chunk_shape=(300, 6))
    report = save(tmp_path / "b", state, chunk_shape=(300, 4), base=tmp_path / "a")
    assert report.reused_bytes == 0
    is_whole(tmp_path / "b", state)


def test_space_is_bounded_over_many_steps(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    state = tree()
    most = 0
    with Checkpointer(
        tmp_path, keep_last=1, reuse=True, options=SaveOptions(chunk_bytes=CHUNK, fsync=False)
    ) as run:
        for step in range(100):
            state["w"][rng.integers(0, ROWS, 3)] += 1
            run.save(step, state, wait=True)
            run.wait()
            most = max(most, disk_bytes(tmp_path))
    nbytes = state["w"].nbytes + state["h"].nbytes
    assert nbytes < most < 2.5 * nbytes + 100_000
    is_whole(tmp_path / "step_99", state)


def test_a_run_goes_on_from_the_step_that_it_loads(tmp_path: Path) -> None:
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    state = tree()
    with Checkpointer(tmp_path, reuse=True, keep_last=1, options=options) as run:
        assert run.save(1, state).result().reused_bytes == 0
        state["h"] += 1
        assert run.save(2, state).result().reused_bytes == state["w"].nbytes
    for reuse in (True, "compare", False):
        with Checkpointer(tmp_path, reuse=reuse, options=options) as run:  # type: ignore[arg-type]
            state = run.load()
            state["h"] += 1
            step = run.latest() or 0
            report = run.save(step + 1, state, overwrite=True).result()
            assert report.reused_bytes == (state["w"].nbytes if reuse else 0)
            is_whole(tmp_path / f"step_{step + 1}", state)


def test_two_tiers_have_whole_steps(tmp_path: Path) -> None:
    state = tree()
    local, root = tmp_path / "local", tmp_path / "root"
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    with Checkpointer(root, local=local, reuse=True, options=options) as run:
        for step in range(3):
            state["h"] += 1
            report = run.save(step, state).result()
        assert report.reused_bytes == state["w"].nbytes
        run.wait()
    shutil.rmtree(local)
    for step in range(2):
        shutil.rmtree(root / f"step_{step}")
    is_whole(root / "step_2", state)
