"""Saves of states of which scattered elements change, as patches of chunks of a base."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorstore as ts
from support.run_folders import refuse
from support.saving import in_job, same
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, LoadOptions, SaveOptions
from unickpt.cli.app import app
from unickpt.errors import UnsupportedFormat
from unickpt.format import chunk_encoding, chunk_grid, index_json
from unickpt.plugins.incremental import patches
from unickpt.saving import write_plan
from unickpt.tools import copying
from unickpt.types import Box, LocalFragments

CHUNK = 4096
COUNT = 16
"""Chunks of the large array."""


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "w": rng.random((COUNT * 4, CHUNK // 8)).astype(ml_dtypes.bfloat16),
        "other": rng.random(1000),
        "step": 0,
    }


def changed(state: dict[str, Any], share: float = 0.01, seed: int = 0) -> dict[str, Any]:
    """The state after a step in which few elements changed, each by its last bit."""
    bits = state["w"].view(np.uint16).copy()
    rng = np.random.default_rng([seed, state["step"]])
    bits ^= rng.random(bits.shape) < share
    return state | {"w": bits.view(state["w"].dtype), "step": state["step"] + 1}


def save(path: Path | str, state: Any, **options: Any) -> unickpt.types.SaveReport:
    options = {"chunk_bytes": CHUNK, "fsync": False, "reuse": "patch", **options}
    return unickpt.save(path, state, options=SaveOptions(**options))


def is_whole(path: Path | str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


def patched(path: Path, name: str = "w") -> int:
    return unickpt.open(path).index.arrays[name].composed


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint of patches, whose base is gone, and what it holds."""
    state = tree()
    save(tmp_path / "a", state)
    state = changed(state)
    save(tmp_path / "b", state, base=tmp_path / "a")
    shutil.rmtree(tmp_path / "a")
    assert patched(tmp_path / "b") == COUNT
    return tmp_path / "b", state


def test_of_chunks_that_changed_little_only_that_is_written(tmp_path: Path) -> None:
    state = tree()
    first = save(tmp_path / "0", state)
    assert first.patched_chunks == 0
    for n in range(1, 6):
        state = changed(state)
        report = save(tmp_path / str(n), state, base=tmp_path / str(n - 1))
        assert report.patched_chunks == patched(tmp_path / str(n)) == COUNT
        assert report.chunks == 0
        assert report.written_bytes < n * (0.01 * report.bytes + COUNT * 60)
        assert report.written_bytes + report.reused_bytes == report.bytes
        shutil.rmtree(tmp_path / str(n - 1))  # each is complete in itself
        is_whole(tmp_path / str(n), state)
    assert unickpt.open(tmp_path / "5").index.reused == report.reused_bytes


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dtype", ["bool", "uint8", "float8_e4m3", "float32", "complex128"])
def test_any_dtype_and_compression(dtype: str, compression: str | None, tmp_path: Path) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    rng = np.random.default_rng(0)
    # The last chunks are padded, and small ones are written without Zarr.
    state: dict[str, Any] = {"w": rng.integers(0, 2, (53, 70)).astype(kind), "step": 0}
    save(tmp_path / "a", state, chunk_shape=(16, 32), compression=compression)
    bits = state["w"].view(np.uint8).copy()
    bits.reshape(-1)[:: 31 * kind.itemsize] ^= 1
    if dtype == "float32":
        bits.view(np.uint32)[::9, 5] = 0x7FC01234  # a NaN with a payload
        bits.view(np.uint32)[::9, 6] = 0x80000000
    state = state | {"w": bits.view(kind), "step": 1}
    options = {"base": tmp_path / "a", "chunk_shape": (16, 32), "compression": compression}
    report = save(tmp_path / "b", state, **options)
    # A compressed chunk takes little itself; a patch has at most a quarter of it.
    assert report.patched_chunks >= (6 if compression is None else 0)
    is_whole(tmp_path / "b", state)


def test_compressed_chunks_can_be_patched(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state, compression="zstd")
    state = changed(state)
    report = save(tmp_path / "b", state, base=tmp_path / "a", compression="zstd")
    assert report.patched_chunks == COUNT
    is_whole(tmp_path / "b", state)


@pytest.mark.parametrize("size", [4, 40_000])
def test_a_chunk_that_changed_much_is_written_whole(size: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    states = [{"w": rng.integers(0, 1 << 16, size).astype(np.uint16)}]
    for share in (0.3, 0.6, 1):
        some = rng.integers(0, 1 << 16, size).astype(np.uint16)
        states.append({"w": np.where(rng.random(size) < share, some, states[-1]["w"])})
    save(tmp_path / "0", states[0])
    for n, chunks in ((1, 0), (2, 20), (3, 20)):
        report = save(tmp_path / str(n), states[n], base=tmp_path / str(n - 1))
        assert report.patched_chunks == (20 - chunks if size > 4 else 0)
        is_whole(tmp_path / str(n), states[n])
    assert report.written_bytes == report.bytes


def test_all_patches_of_a_chain_take_at_most_as_much_as_the_chunk(tmp_path: Path) -> None:
    state, whole = tree(), 0
    save(tmp_path / "0", state, kept_cost=0.0)
    for n in range(1, 24):
        some = np.random.default_rng(n).random(state["w"].shape)
        state["w"] = np.where(some < 0.1, (some * 10).astype(state["w"].dtype), state["w"])
        report = save(tmp_path / str(n), state, base=tmp_path / str(n - 1), kept_cost=0.0)
        whole += report.chunks
        assert all(sum(lengths[1:]) <= lengths[0] for lengths in lengths_of(tmp_path / str(n)))
    assert COUNT <= whole <= 16 * COUNT
    is_whole(tmp_path / "23", state)


def lengths_of(path: Path | str, name: str = "w") -> list[list[int]]:
    """For each chunk the bytes of its full chunk, and of each patch."""
    reader: Any = unickpt.open(path).reader
    entry = reader.index.arrays[name]
    (part,) = chunk_grid.parts(entry)
    return [
        [
            value.store.values.length(chunk_grid.chunk_key(value.part, number))
            for value in reader.chunk_values.values(entry, part, number)
        ]
        for number in range(part.count)
    ]


def test_elements_that_change_back_need_no_patch_of_their_own(tmp_path: Path) -> None:
    before = tree()
    save(tmp_path / "a", before)
    save(tmp_path / "b", changed(before), base=tmp_path / "a")
    again = before | {"step": 2}
    report = save(tmp_path / "c", again, base=tmp_path / "b")
    assert report.written_bytes == 0  # nothing differs from the full chunk
    is_whole(tmp_path / "c", again)


@pytest.mark.parametrize("reuse", ["digest", "compare"])
def test_without_the_option_no_patch_is_written(
    reuse: str, pair: tuple[Path, dict[str, Any]]
) -> None:
    path, state = pair
    report = save(path.with_name("c"), state, base=path, reuse=reuse)
    assert report.patched_chunks == 0
    assert report.written_bytes == report.bytes  # too little of the first file is used
    report = save(path.with_name("d"), state, base=path.with_name("c"), reuse=reuse)
    assert report.written_bytes == 0
    for name in "cd":
        is_whole(path.with_name(name), state)
    assert report.reused_bytes == report.bytes


def test_a_file_of_which_little_is_used_is_left(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "a", state)
    half = state["w"].copy()
    half[: COUNT * 4 * 9 // 16] = np.random.default_rng(8).random(half[: COUNT * 4 * 9 // 16].shape)
    state = state | {"w": half}
    assert save(tmp_path / "b", state, base=tmp_path / "a").chunks == 9
    state = changed(state)
    report = save(tmp_path / "c", state, base=tmp_path / "b")
    # Less than half of the first file is used: 7 of its 16 chunks, and the 2 of the other array.
    assert (report.chunks, report.patched_chunks) == (9, 9)
    is_whole(tmp_path / "c", state)


# --- never the full chunk instead -----------------------------------------------------------------


def test_tensorstore_does_not_take_the_full_chunk_for_the_chunk(
    pair: tuple[Path, dict[str, Any]],
) -> None:
    path, state = pair
    with pytest.raises(ValueError, match=r"unickpt\.patched"):
        ts.open(f"file://{path}/|ocdbt:w/").result()
    for below in ("full", "patch"):
        with pytest.raises(ValueError, match="detect format"):
            ts.open(f"file://{path}/|ocdbt:w/{below}/").result()
    stored = unickpt.open(path)["w"]
    assert stored.url == ""
    with pytest.raises(UnsupportedFormat, match="16 chunks of array 'w' are stored as patches"):
        stored.tensorstore()
    other = ts.open(f"file://{path}/|ocdbt:other/").result().read().result()
    assert np.array_equal(other, state["other"])


def test_an_array_of_the_same_shape_without_patches_is_a_zarr_array(tmp_path: Path) -> None:
    before = tree() | {"alike": np.ones_like(tree()["w"])}
    save(tmp_path / "a", before)
    save(tmp_path / "b", state := changed(before), base=tmp_path / "a")
    is_whole(tmp_path / "b", state)
    alike = ts.open(f"file://{tmp_path}/b/|ocdbt:alike/").result().read().result()
    assert np.array_equal(alike, state["alike"])
    with pytest.raises(ValueError, match=r"unickpt\.patched"):
        ts.open(f"file://{tmp_path}/b/|ocdbt:w/").result()


def test_readers_that_do_not_know_patches_refuse_it(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = pair
    assert unickpt.open(path).index.features == ["patches"]
    save(path.with_name("whole"), state, base=path, reuse="digest")
    assert not unickpt.open(path.with_name("whole")).index.features
    monkeypatch.setattr(index_json, "FEATURES", index_json.FEATURES - {"patches"})
    with pytest.raises(UnsupportedFormat, match="needs the feature 'patches'"):
        unickpt.load(path)


# --- damage ---------------------------------------------------------------------------------------


def flip(path: Path, needle: bytes, at: int) -> None:
    """Flips a bit in the files of a checkpoint, after the first occurrence of some bytes."""
    for file in (path / "processes").rglob("*"):
        data = file.read_bytes() if file.is_file() else b""
        if needle in data:
            bytes_of = bytearray(data)
            bytes_of[data.index(needle) + at] ^= 4
            file.write_bytes(bytes_of)
            return
    raise AssertionError("no file has these bytes")


@pytest.mark.parametrize("what", ["full chunk", "digest", "size", "gap", "value"])
def test_damage_is_found_and_inherited_by_no_patch(what: str, tmp_path: Path) -> None:
    before = tree()
    save(tmp_path / "a", before)
    state = changed(before, 0.04)  # shorter patches are in the nodes of the B-tree
    save(tmp_path / "b", state, base=tmp_path / "a")
    full = np.ascontiguousarray(before["w"][4:8])
    new = np.ascontiguousarray(state["w"][4:8])
    digest = unickpt.open(tmp_path / "a").reader.digests_of("w")[1]["digest"]  # type: ignore
    patch = patches.encode(full, new, patches.PatchedState(int(digest)), 1, CHUNK) or b""
    at = {"full chunk": 500, "digest": 3, "size": 21, "gap": 40, "value": len(patch) - 3}[what]
    flip(tmp_path / "b", full.tobytes() if what == "full chunk" else patch, at)
    if what == "digest":
        is_whole(tmp_path / "b", state)
    else:
        with pytest.raises(CheckpointCorrupt, match="'w'"):
            unickpt.load(tmp_path / "b")
        assert [damage.array for damage in unickpt.verify(tmp_path / "b").damage] == ["w"]
    # The next patch refers to the state before, whatever the patch of that says.
    later = changed(state)
    report = save(tmp_path / "c", later, base=tmp_path / "b")
    if what == "full chunk":
        assert (report.chunks, report.patched_chunks) == (1, COUNT - 1)
    is_whole(tmp_path / "c", later)


def test_a_patch_longer_than_a_chunk_is_refused_before_it_is_read(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = pair
    monkeypatch.setattr(chunk_encoding, "nbytes_as_stored", lambda entry, shape: 6)
    stored = unickpt.open(path)["w"]
    with pytest.raises(CheckpointCorrupt, match=r"a patch of \d+ bytes for a chunk of 6"):
        stored.read(Box((0, 0), (4, CHUNK // 8)))


# --- storage without links ------------------------------------------------------------------------


def test_without_links_values_stay_in_checkpoints_beside(
    pair: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, state = pair
    monkeypatch.setattr(os, "link", refuse)
    report = save(path.with_name("c"), state, base=path)
    assert (report.chunks, report.patched_chunks, report.bases) == (0, 0, ("b",))
    later = changed(state)
    report = save(path.with_name("d"), later, base=path.with_name("c"))
    assert (report.chunks, report.patched_chunks, report.bases) == (0, COUNT, ("b",))
    for name, expected in (("c", state), ("d", later)):
        is_whole(path.with_name(name), expected)


# --- everything else ------------------------------------------------------------------------------


def converted(path: Path, there: Path) -> None:
    unickpt.convert(path, there)


def copied(path: Path, there: Path) -> None:
    copying.copy(path, there)


@pytest.mark.parametrize("tool", [copied, converted, shutil.copytree])
def test_copies_and_conversions(
    tool: Callable[[Path, Path], Any], pair: tuple[Path, dict[str, Any]]
) -> None:
    path, state = pair
    tool(path, path.with_name("c"))
    shutil.rmtree(path)
    is_whole(path.with_name("c"), state)
    assert patched(path.with_name("c")) == (0 if tool is converted else COUNT)


def test_in_storage_without_files(pair: tuple[Path, dict[str, Any]]) -> None:
    path, state = pair
    there = f"memory://{secrets.token_hex(6)}/c"
    copying.copy(path, there)
    is_whole(there, state)
    rows = unickpt.open(there)["w"][3:5]
    assert rows.tobytes() == state["w"][3:5].tobytes()
    later = changed(state)
    report = save(f"{there}2", later, base=there)
    assert (report.chunks, report.patched_chunks, report.bases) == (0, COUNT, ("c",))
    is_whole(f"{there}2", later)
    report = save(f"{there}3", later, base=f"{there}2", reuse="digest")
    assert report.chunks == COUNT  # patches are not borrowed without the option
    copying.copy(f"{there}2", path.with_name("again"))
    is_whole(path.with_name("again"), later)
    assert not unickpt.open(path.with_name("again")).index.bases


def test_parts_of_arrays_and_differences(pair: tuple[Path, dict[str, Any]]) -> None:
    path, state = pair
    stored = unickpt.open(path)["w"]
    assert stored[5:9, 3:70].tobytes() == state["w"][5:9, 3:70].tobytes()
    later = changed(state)
    save(path.with_name("c"), later, base=path)
    (found, _) = unickpt.diff(path, path.with_name("c")).differences
    assert (found.name, found.problem) == ("w", "value")
    assert found.unequal == (later["w"] != state["w"]).sum()
    shutil.copytree(path, path.with_name("d"))
    assert unickpt.diff(path, path.with_name("d")).same


def test_ls_and_inspect_say_what_is_new(pair: tuple[Path, dict[str, Any]]) -> None:
    path, state = pair
    out = CliRunner().invoke(app, ["inspect", str(path), "--json"]).output
    facts = json.loads(out)
    assert [array["patched"] for array in facts["arrays"] if array["name"] == "w"] == [COUNT]
    assert facts["totals"]["reused_bytes"] > 0.9 * state["w"].nbytes
    text = CliRunner().invoke(app, ["inspect", str(path), "w"]).output
    assert "16 of the chunks are stored as patches" in text
    listed = json.loads(CliRunner().invoke(app, ["ls", str(path.parent), "--json"]).output)
    (row,) = listed if isinstance(listed, list) else listed["checkpoints"]
    assert row["new_bytes"] == row["bytes"] - facts["totals"]["reused_bytes"]


def test_two_tiers(tmp_path: Path) -> None:
    state = tree()
    local, root = tmp_path / "local", tmp_path / "root"
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    with Checkpointer(root, local=local, reuse="patch", keep_last=2, options=options) as run:
        for step in range(5):
            state = changed(state)
            report = run.save(step, state).result()
        assert report.patched_chunks == COUNT
        run.wait()
    shutil.rmtree(local)
    is_whole(root / "step_4", state)
    with Checkpointer(root, reuse="patch", options=options) as run:
        state = changed(run.load())
        assert run.save(5, state).result().patched_chunks == COUNT
    is_whole(root / "step_5", state)


def test_processes_save_and_load_together(tmp_path: Path) -> None:
    def save_rows(group: Any, state: dict[str, Any], path: Path, base: Path | None) -> Any:
        size = COUNT * 4 // 2
        own = slice(group.index * size, (group.index + 1) * size)
        box = Box((own.start, 0), (own.stop, CHUNK // 8))
        own_rows = LocalFragments(state["w"].shape, [(box, state["w"][own])])
        return save(path, {**state, "w": own_rows}, group=group, base=base, timeout_s=20)

    state, later = tree(), changed(tree())
    in_job(2, lambda group: save_rows(group, state, tmp_path / "a", None))
    reports = in_job(2, lambda group: save_rows(group, later, tmp_path / "b", tmp_path / "a"))
    assert [report.patched_chunks for report in reports] == [COUNT // 2] * 2
    is_whole(tmp_path / "b", later)
    options = [LoadOptions(exchange=True, group=None)]
    assert same(unickpt.load(tmp_path / "b", options=options[0]), later)


@pytest.fixture
def all_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process writes all that it holds, as replicas do that do not know of each other."""
    monkeypatch.setattr(write_plan, "_own_items", lambda held, *_: held)


@pytest.mark.usefixtures("all_write")
@pytest.mark.parametrize("reuse", [("patch", "digest"), ("digest", "patch"), ("patch", "patch")])
def test_what_two_replicas_wrote_is_not_mixed(reuse: tuple[str, str], tmp_path: Path) -> None:
    state = tree()
    bases = [tmp_path / "a", tmp_path / "b"]
    for seed, base in enumerate(bases):
        save(base, changed(state, seed=seed))
    later = changed(changed(state, seed=5), seed=5)

    def work(group: Any) -> Any:
        at = group.index
        options = {"base": bases[at], "reuse": reuse[at], "timeout_s": 20}
        return save(tmp_path / "c", later, group=group, **options)

    reports = in_job(2, work)
    assert [report.patched_chunks for report in reports] == [
        COUNT if each == "patch" else 0 for each in reuse
    ]
    is_whole(tmp_path / "c", later)
    assert patched(tmp_path / "c") == (COUNT if "digest" not in reuse else 0)
