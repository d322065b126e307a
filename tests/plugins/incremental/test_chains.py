"""Chains of patches: each version opens with few of them, on disks and in object storage."""

from __future__ import annotations

import itertools
import math
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.quantized import errors_of
from support.run_folders import run_folder
from support.saving import in_job, same

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointExists,
    SaveConflict,
    SaveOptions,
    UnickptError,
)
from unickpt.format import chunk_grid
from unickpt.plugins.incremental import chains, patches
from unickpt.plugins.incremental.full_rewrites import Growth
from unickpt.storage import paths
from unickpt.tools import copying
from unickpt.types import Box, LocalFragments

CHUNK = 32 << 10
SHAPE = (64, 2048)


def tree() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    weights = rng.standard_normal(SHAPE, np.float32).astype(ml_dtypes.bfloat16)
    return {"w": weights, "other": rng.random(1000), "step": 0}


def changed(state: dict[str, Any], share: float = 0.01) -> dict[str, Any]:
    """The state after a step that moved few elements by their last bit, up or down."""
    bits, rng = state["w"].view(np.uint16).copy(), np.random.default_rng(state["step"])
    some = rng.random(bits.shape)
    bits[some < share / 2] += 1
    bits[(share / 2 <= some) & (some < share)] -= 1
    return state | {"w": bits.view(state["w"].dtype), "step": state["step"] + 1}


def save(path: Path | str, state: Any, **options: Any) -> unickpt.types.SaveReport:
    options = {"chunk_bytes": CHUNK, "fsync": False, "reuse": "patch", **options}
    return unickpt.save(path, state, options=SaveOptions(**options))


def is_whole(path: Path | str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


def patches_of(path: Path | str) -> list[int]:
    """How many patches each chunk has."""
    reader: Any = unickpt.open(path).reader
    entry = reader.index.arrays["w"]
    (part,) = chunk_grid.parts(entry)
    return [len(reader.chunk_values.values(entry, part, n)) - 1 for n in range(part.count)]


@pytest.fixture(params=["disk", "memory", "s3", "no links"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """A folder for checkpoints."""
    with run_folder(request, tmp_path) as folder:
        yield folder


# Memory has no links either; other tests here are of object storage in `make test`, too.
seldom_in_s3 = pytest.mark.parametrize(
    "run",
    ["disk", "memory", pytest.param("s3", marks=pytest.mark.slow), "no links"],
    indirect=True,
)


def remove(path: str) -> None:
    paths.resolve(path).remove(paths.context())


# --- 70 versions ----------------------------------------------------------------------------------


@pytest.mark.integration  # takes seconds
def test_each_of_70_versions_opens_with_few_patches(
    run: str, request: pytest.FixtureRequest
) -> None:
    count = {"s3": 9, "disk": 70}.get(request.node.callspec.params["run"], 20)
    states, written = [tree()], 0
    save(f"{run}/0", states[0])
    for n in range(1, count):
        states.append(changed(states[-1]))
        report = save(f"{run}/{n}", states[-1], base=f"{run}/{n - 1}")
        assert (report.chunks, report.patched_chunks) == (0, 8)
        written += report.written_bytes
        assert len(report.bases) <= math.log2(count) + 1
    assert written / (count - 1) < 0.021 * states[0]["w"].nbytes
    for n, state in enumerate(states):
        is_whole(f"{run}/{n}", state)
        assert max(patches_of(f"{run}/{n}")) <= 2 * math.log2(count)
        assert patches_of(f"{run}/{n}") == [2 * (n // 4).bit_count() + n % 4] * 8


def test_on_a_disk_each_version_is_complete_in_itself(tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "0", state)
    for n in range(1, 34):
        state = changed(state)
        save(tmp_path / str(n), state, base=tmp_path / str(n - 1))
        shutil.rmtree(tmp_path / str(n - 1))
    is_whole(tmp_path / "33", state)


@seldom_in_s3
def test_chunks_that_change_at_different_times(run: str) -> None:
    rng = np.random.default_rng(1)
    states = [tree()]
    save(f"{run}/0", states[0])
    for n in range(1, 8 if run.startswith("s3") else 12):
        bits = states[-1]["w"].view(np.uint16).copy()
        for chunk in np.flatnonzero(rng.random(8) < 0.5):
            rows = bits[chunk * 8 : chunk * 8 + 8]
            rows[rng.random(rows.shape) < 0.01] ^= 1
        if n == 6:
            bits[:8] = rng.integers(0, 1 << 16, (8, SHAPE[1]))
        states.append(states[-1] | {"w": bits.view(ml_dtypes.bfloat16), "step": n})
        report = save(f"{run}/{n}", states[-1], base=f"{run}/{n - 1}", kept_cost=0.0)
        assert report.chunks == (n == 6)
    for n, state in enumerate(states):
        is_whole(f"{run}/{n}", state)
        assert max(patches_of(f"{run}/{n}")) <= 5


@seldom_in_s3
def test_the_last_patch_refers_to_the_save_before(run: str) -> None:
    states = [tree()]
    save(f"{run}/0", states[0])
    for n in range(1, 9):
        states.append(changed(states[-1]))
        save(f"{run}/{n}", states[-1], base=f"{run}/{n - 1}")
        reader: Any = unickpt.open(f"{run}/{n}").reader
        entry = reader.index.arrays["w"]
        (part,) = chunk_grid.parts(entry)
        values = reader.chunk_values.values(entry, part, 0)
        last = patches.state_of(reader.chunk_values.read_value(entry, values[-1], 0))
        before: Any = unickpt.open(f"{run}/{n - 1}").reader
        assert last == patches.PatchedState(int(before.digests_of("w")[0]["digest"]), n)


def test_chains_of_powers_of_two() -> None:
    chain = list[int]()
    for generation in range(1, 300):
        used = [state for state in chain if state <= chains.merge_generation(generation)]
        merged = [generation - 1] if len(used) < len(chain) else []
        chain = [*used, *merged, generation]
        assert len(chain) <= 2 * generation.bit_count()


@pytest.mark.integration  # takes seconds
def test_large_patches_are_merged_only_before_they_take_half_of_a_chunk(tmp_path: Path) -> None:
    state, counts, written = tree(), list[int](), 0
    save(tmp_path / "0", state)
    for n in range(1, 21):
        state = changed(state, 0.2)
        report = save(tmp_path / str(n), state, base=tmp_path / str(n - 1), kept_cost=0.0)
        assert report.patched_chunks == 8
        written += report.written_bytes
        counts.append(max(patches_of(tmp_path / str(n))))
        reader: Any = unickpt.open(tmp_path / str(n)).reader
        entry = reader.index.arrays["w"]
        (part,) = chunk_grid.parts(entry)
        for number in range(part.count):
            chain = reader.chunk_values.values(entry, part, number)
            additions = reader.chunk_values.additions(entry, part, number, chain)
            assert sum(map(len, additions)) <= CHUNK / 2
    is_whole(tmp_path / "20", state)
    assert counts[:4] == [1, 2, 3, 4]  # patches of a few percent would be merged by the fourth save
    assert max(counts) < 10
    assert written / 20 < 0.11 * state["w"].nbytes


@pytest.mark.parametrize("percent", [1, 2, 3, 4, 8, 20])
def test_chains_stay_short_whatever_patches_take(percent: int) -> None:
    chain, whole = list[tuple[int, int]](), 1000
    for generation in range(1, 300):
        used = chains.count_unmerged(chain, generation, whole)
        if used < len(chain):
            merged = min(sum(size for _, size in chain[used:]), 200)
            chain = [*chain[:used], (generation - 1, merged)]
        chain.append((generation, 10 * percent))
        assert len(chain) <= 2 * generation.bit_length() + 16


# --- a link is lost -------------------------------------------------------------------------------


@pytest.fixture
def beside(request: pytest.FixtureRequest) -> tuple[str, list[dict[str, Any]]]:
    """Eight checkpoints in memory; the last has values of four others."""
    run, states = f"memory://{secrets.token_hex(6)}", [tree()]
    save(f"{run}/0", states[0])
    for n in range(1, 8):
        states.append(changed(states[-1]))
        save(f"{run}/{n}", states[-1], base=f"{run}/{n - 1}")
    assert [base.name for base in unickpt.open(f"{run}/7").index.bases] == ["0", "4", "5", "6"]
    return run, states


@pytest.mark.parametrize("how", ["removed", "replaced"])
@pytest.mark.parametrize("lost", ["0", "4", "5", "6"])
def test_a_chain_that_lost_a_checkpoint_names_it_and_the_way_out(
    lost: str, how: str, beside: tuple[str, list[dict[str, Any]]]
) -> None:
    run, states = beside
    remove(f"{run}/{lost}")
    if how == "replaced":
        save(f"{run}/{lost}", states[int(lost)])
    what = "is missing" if how == "removed" else "was replaced by another checkpoint"
    message = rf"{run}/7: array 'w'.*: .*{run}/{lost}, which {what}; put it back, .*`unickpt copy`"
    for use in (
        lambda: unickpt.load(f"{run}/7"),
        lambda: unickpt.open(f"{run}/7"),
        lambda: copying.copy(f"{run}/7", f"{run}/whole"),
    ):
        with pytest.raises(CheckpointCorrupt, match=message):
            use()
    report = unickpt.verify(f"{run}/7")
    assert not report.ok
    assert re.search(message, str(report.damage))


def test_a_save_goes_on_without_a_base_that_lost_a_link(
    beside: tuple[str, list[dict[str, Any]]], caplog: pytest.LogCaptureFixture
) -> None:
    run, states = beside
    remove(f"{run}/4")
    state = changed(states[-1])
    report = save(f"{run}/8", state, base=f"{run}/7")
    assert (report.patched_chunks, report.bases) == (0, ())
    assert re.search(rf"{run}/4, which is missing", caplog.text)
    is_whole(f"{run}/8", state)


def test_a_value_that_is_missing_in_a_base_is_named(
    beside: tuple[str, list[dict[str, Any]]],
) -> None:
    run, _ = beside
    location = paths.resolve(f"{run}/6")
    store = location.store(paths.context())
    for name in store.list().result():
        if b"/d/" in name:
            store.write(name.decode(), None).result()
    with pytest.raises(
        UnickptError, match=rf"{run}/7: array 'w' .* which {run}/6 should have; bring"
    ):
        unickpt.load(f"{run}/7")


def test_what_others_need_is_neither_replaced_nor_removed(
    beside: tuple[str, list[dict[str, Any]]],
) -> None:
    run, states = beside
    for needed in ("0", "4", "5", "6"):
        with pytest.raises(CheckpointExists, match=f"{needed} has chunks of .*"):
            unickpt.save(f"{run}/{needed}", states[0], overwrite=True)
    unickpt.save(f"{run}/3", states[3], overwrite=True)  # nothing of it is needed
    is_whole(f"{run}/7", states[7])


def test_retention_keeps_what_is_needed(run: str) -> None:
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    state, count = tree(), 8 if run.startswith("s3") else 24
    with Checkpointer(run, keep_last=1, reuse="patch", options=options) as checkpointer:
        for step in range(count):
            checkpointer.save(step, state, wait=True)
            checkpointer.wait()
            state = changed(state)
        there = checkpointer.steps()
        bases = unickpt.open(f"{run}/step_{count - 1}").index.bases
        needed = {int(base.name.removeprefix("step_")) for base in bases}
        assert set(there) == {count - 1} | needed
        assert len(there) <= 1 + math.log2(count) + 1
        if needed:
            with pytest.raises(SaveConflict, match="has chunks of"):
                checkpointer.delete(min(needed))
        assert same(checkpointer.load(), {**state, **before(state)})


def before(state: dict[str, Any]) -> dict[str, Any]:
    """The state a step before."""
    bits, last = state["w"].view(np.uint16).copy(), state["step"] - 1
    some = np.random.default_rng(last).random(bits.shape)
    bits[some < 0.005] -= 1
    bits[(some >= 0.005) & (some < 0.01)] += 1
    return {"w": bits.view(state["w"].dtype), "step": last}


def test_what_a_killed_save_left_is_cleaned_and_nothing_else(run: str) -> None:
    if not run.startswith("/"):
        pytest.skip("needs files")
    states = [tree()]
    save(f"{run}/step_0", states[0])
    for n in range(1, 4):
        states.append(changed(states[-1]))
        save(f"{run}/step_{n}", states[-1], base=f"{run}/step_{n - 1}")
    shutil.copytree(f"{run}/step_3/processes", f"{run}/step_4/processes")
    with Checkpointer(run, keep_last=2, options=SaveOptions(fsync=False)) as checkpointer:
        assert checkpointer.steps()[-1] == 3
        checkpointer.wait()
    for n in (2, 3):
        is_whole(f"{run}/step_{n}", states[n])


# --- everything else ------------------------------------------------------------------------------


# Each storage with two kinds of codes, in object storage with one.
@pytest.mark.parametrize(
    ("codes", "run"),
    [
        ("uint8", "disk"),
        ("uint8", "memory"),
        ("int4", "disk"),
        ("int4", "no links"),
        ("int4", "s3"),
        ("bfloat16", "memory"),
        ("bfloat16", "no links"),
    ],
    indirect=["run"],
)
def test_quantised_chunks_and_rows_of_them(codes: str, run: str) -> None:
    rng = np.random.default_rng(0)
    state = {"w": rng.standard_normal((512, 256)).astype(np.float32)}
    options: dict[str, Any] = {"quantize": {"w": codes}, "chunk_bytes": 64 << 10}
    plain = [save(f"{run}/0", state, **options).stored_bytes]
    for n in range(1, 5):
        rows = rng.integers(0, 512, 5)
        state = {"w": state["w"].copy()}
        state["w"][rows] += rng.standard_normal((5, 256)).astype(np.float32)
        report = save(f"{run}/{n}", state, base=f"{run}/{n - 1}", **options)
        save(f"{run}/plain", state, quantize={"w": codes}, chunk_bytes=64 << 10, reuse="digest")
        assert (
            unickpt.load(f"{run}/{n}")["w"].tobytes() == unickpt.load(f"{run}/plain")["w"].tobytes()
        )
        assert unickpt.verify(f"{run}/{n}").ok
        assert report.quantized["w"] == pytest.approx(
            errors_of(unickpt.open(f"{run}/plain").index.arrays["w"]), rel=0.7
        )
        remove(f"{run}/plain")
        assert report.patched_chunks >= 3
        if n == 1:  # rows with their codes, and little else
            assert report.stored_bytes < 1.5 * 5 / 512 * plain[0]


def test_processes_save_together(run: str) -> None:
    def save_rows(group: Any, state: dict[str, Any], path: str, base: str | None) -> Any:
        size = SHAPE[0] // 2
        own = slice(group.index * size, (group.index + 1) * size)
        box = Box((own.start, 0), (own.stop, SHAPE[1]))
        own_rows = LocalFragments(SHAPE, [(box, state["w"][own])])
        return save(path, {**state, "w": own_rows}, group=group, base=base, timeout_s=20)

    states = [tree()]
    in_job(2, lambda group: save_rows(group, states[0], f"{run}/0", None))
    for n in range(1, 6):
        states.append(changed(states[-1]))
        work = (states[-1], f"{run}/{n}", f"{run}/{n - 1}")
        reports = in_job(2, lambda group, work=work: save_rows(group, *work))
        assert [report.patched_chunks for report in reports] == [4, 4]
    for n, state in enumerate(states):
        is_whole(f"{run}/{n}", state)
    # One process goes on from what two wrote.
    later = changed(states[-1])
    assert save(f"{run}/6", later, base=f"{run}/5").chunks <= 9
    is_whole(f"{run}/6", later)


def test_copies_of_a_chain_are_whole(beside: tuple[str, list[dict[str, Any]]]) -> None:
    run, states = beside
    report = copying.copy(f"{run}/7", f"{run}/whole")
    assert report.borrowed == 8 * 5 + 1  # full chunks, four patches each; another array
    for n in range(8):
        remove(f"{run}/{n}")
    is_whole(f"{run}/whole", states[7])
    later = changed(states[7])
    again = save(f"{run}/later", later, base=f"{run}/whole")
    assert (again.patched_chunks, again.bases) == (8, ("whole",))
    is_whole(f"{run}/later", later)


@pytest.mark.parametrize("compression", ["zstd", "blosc"])
def test_compressed_chunks(compression: str, tmp_path: Path) -> None:
    state = tree()
    save(tmp_path / "0", state, compression=compression)
    for n in range(1, 6):
        state = changed(state)
        base = tmp_path / str(n - 1)
        assert save(tmp_path / str(n), state, base=base, compression=compression).chunks == 0
        is_whole(tmp_path / str(n), state)


def test_readers_of_many_threads_read_one_chain(tmp_path: Path) -> None:
    states = [tree()]
    save(tmp_path / "0", states[0])
    for n in range(1, 4):
        states.append(changed(states[-1]))
        save(tmp_path / str(n), states[-1], base=tmp_path / str(n - 1))
    stored = unickpt.open(tmp_path / "3")["w"]
    for first, last in itertools.pairwise((0, 3, 9, 30, 64)):
        assert stored[first:last].tobytes() == states[3]["w"][first:last].tobytes()


# --- when to start anew ---------------------------------------------------------------------------


def test_a_full_save_is_predicted_from_how_the_others_grew() -> None:
    growth = Growth(0, 1000)
    assert not growth.predicts_full(1.0)  # nothing is known yet
    one = growth.then(written=100, kept=1100)
    assert one == Growth(1, 1000, 100, 100, 100)
    assert not one.predicts_full(1.0)  # (1000 + 100 + 100) / 2 > 100 + 100
    assert one.predicts_full(10.0)  # (1000 + 100 + 1000) / 2 <= 100 + 1000
    # Steady: it pays never to start anew; growing: it pays the sooner, the faster it grows.
    steady = Growth(0, 1000)
    for _ in range(500):
        steady = steady.then(20, 1020)
    assert not steady.predicts_full(0.1)
    assert [saves_until(growth) for growth in (1, 10, 100, 1000)] == [45, 14, 4, 1]


def saves_until(increase: int) -> int:
    growth, beside = Growth(0, 1000), 0
    while not growth.predicts_full(1.0):
        beside += increase
        growth = growth.then(0, 1000 + beside)
    return growth.saves


@pytest.mark.parametrize("run", ["disk", "memory"], indirect=True)
def test_a_run_starts_anew_when_that_pays(run: str) -> None:
    state = tree()
    save(f"{run}/0", state)
    anew = []
    for n in range(1, 16):
        state = changed(state, 0.05)
        report = save(f"{run}/{n}", state, base=f"{run}/{n - 1}", kept_cost=2.0)
        growth = Growth.of(unickpt.open(f"{run}/{n}").index.extra)
        if not report.patched_chunks:
            anew.append(n)
            assert growth is None
        else:
            assert growth is not None
            assert growth.saves == n - max(anew, default=0)
            assert growth.last >= report.stored_bytes
        is_whole(f"{run}/{n}", state)
    assert 1 <= len(anew) <= 4
    with pytest.raises(ValueError, match="kept_cost"):
        SaveOptions(kept_cost=-1.0)
