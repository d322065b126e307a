"""Small arrays that are read many at a time: none is mixed up with another, none goes unchecked."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from jax.sharding import NamedSharding, PartitionSpec
from support.counts import chunks_read

import unickpt
from unickpt import CheckpointCorrupt, LoadOptions, SaveOptions
from unickpt.format import digest_table
from unickpt.format.index import DigestBlocks
from unickpt.format.verified_chunks import ChunkStore
from unickpt.reading import array_reader
from unickpt.storage.regular_files import RegularFiles

FAST = SaveOptions(fsync=False, chunk_bytes=4 << 10)
DTYPES = [np.float32, np.int8, ml_dtypes.bfloat16, np.bool_, np.float64, ml_dtypes.int4, np.uint16]
SHAPES = [(3, 5), (), (7,), (2, 3, 4), (1, 1), (0, 4), (40, 50), (16,)]  # (40, 50): several chunks


def states(count: int) -> dict[str, np.ndarray]:
    """Arrays of which no two have the same elements, but empty and boolean ones."""
    generator = np.random.default_rng(count)
    found = {}
    for n in range(count):
        dtype, shape = np.dtype(DTYPES[n % len(DTYPES)]), SHAPES[n % len(SHAPES)]
        bits = generator.integers(0, 1 << 16, shape)
        found[f"layers.{n % 97}.w{n}"] = (
            (bits % 2).astype(bool) if dtype.kind == "b" else bits.astype(dtype)
        )
    return found


def same(got: Any, wanted: np.ndarray) -> bool:
    host = np.asarray(got)
    return (
        host.dtype == wanted.dtype
        and host.shape == wanted.shape
        and host.tobytes() == wanted.tobytes()
    )


def strided(array: np.ndarray) -> np.ndarray:
    """Memory that is not contiguous."""
    wide = np.zeros((*array.shape[:-1], 2 * array.shape[-1]) if array.ndim else (), array.dtype)
    return wide[..., ::2] if array.ndim else wide


def shuffled(tree: dict[str, Any]) -> dict[str, Any]:
    names = list(tree)
    random.Random(3).shuffle(names)
    return {name: tree[name] for name in names}


@pytest.mark.parametrize("rows", [None, 5], ids=["one table", "digests in blocks"])
def test_many_arrays_of_all_kinds_keep_their_own_elements(
    rows: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if rows is not None:
        monkeypatch.setattr(digest_table, "BLOCK_ROWS", rows)
    state = states(700)
    unickpt.save(tmp_path / "c", state, options=FAST)
    makers: list[Callable[[np.ndarray], Any]] = [
        np.zeros_like,
        strided,
        lambda a: np.zeros(a.shape, a.dtype, order="F"),
        lambda a: jax.numpy.zeros(a.shape, a.dtype) if a.dtype != np.float64 else np.zeros_like(a),
    ]
    like = {name: makers[n % 4](a) for n, (name, a) in enumerate(shuffled(state).items())}
    for found in (unickpt.load(tmp_path / "c", like), unickpt.load(tmp_path / "c")):
        assert [name for name in state if not same(found[name], state[name])] == []
    assert all(same(a, state[n]) for n, a in like.items() if isinstance(a, np.ndarray)), "in place"


def test_tensors_and_sharded_arrays_beside_each_other_keep_their_own_elements(
    tmp_path: Path,
) -> None:
    shapes = {f"{n}": (8, 4 + n % 3) for n in range(300)}
    state = {
        name: 64 * int(name) + np.arange(8 * shape[1], dtype=np.float32).reshape(shape)
        for name, shape in shapes.items()
    }
    unickpt.save(tmp_path / "c", state, options=FAST)
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    specs = [PartitionSpec(), PartitionSpec("x"), PartitionSpec(None), PartitionSpec(("x", "y"))]

    def made(n: int, a: np.ndarray) -> Any:
        if n % 5 < 4:
            sharding = NamedSharding(mesh, specs[n % 5])
            return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
        return torch.zeros(a.shape[::-1]).T if n % 2 else torch.zeros(a.shape)

    like = shuffled({name: made(n, a) for n, (name, a) in enumerate(state.items())})
    versions = {n: x._version for n, x in like.items() if isinstance(x, torch.Tensor)}
    found = unickpt.load(tmp_path / "c", like)
    assert [name for name in state if not same(found[name], state[name])] == []
    for name, asked in like.items():
        if isinstance(asked, torch.Tensor):
            assert found[name] is asked
            assert asked._version > versions[name], "autograd sees that it was filled"
        else:
            assert found[name].sharding == asked.sharding
            assert found[name].committed


def test_only_the_array_whose_bytes_differ_is_named(tmp_path: Path) -> None:
    state = {f"w{n}": np.full((16, 16), n, np.int32) for n in range(400)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    wrong = state["w237"].tobytes()
    for file in (tmp_path / "c").rglob("d/*"):
        data = file.read_bytes()
        if wrong in data:
            file.write_bytes(data.replace(wrong, wrong[:-1] + b"\x01"))
    with pytest.raises(CheckpointCorrupt, match=r"'w237' \[0:16, 0:16\].* do not match") as caught:
        unickpt.load(tmp_path / "c", {name: np.zeros_like(a) for name, a in state.items()})
    assert "process 0" in str(caught.value)
    found = unickpt.load(tmp_path / "c", options=LoadOptions(verify=False))
    assert [n for n in state if not same(found[n], state[n])] == ["w237"]


def test_an_array_whose_bytes_are_missing_is_named(tmp_path: Path) -> None:
    state = {f"w{n}": np.full((16, 16), n, np.int32) for n in range(40)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    last = state["w39"].tobytes()
    (file,) = (f for f in (tmp_path / "c").rglob("d/*") if last in f.read_bytes())
    file.write_bytes(file.read_bytes()[: file.read_bytes().index(last) + 7])
    for verify in (True, False):
        with pytest.raises(CheckpointCorrupt, match=r"array 'w\d+' \[0:16, 0:16\]"):
            unickpt.load(tmp_path / "c", state, options=LoadOptions(verify=verify))


def test_many_small_arrays_take_few_reads_and_each_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"w{n}": np.full((16, 16), n, np.int32) for n in range(1000)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    reads, read, preadv = [], RegularFiles.read, os.preadv
    monkeypatch.setattr(RegularFiles, "read", lambda *a: reads.append(a) or read(*a))
    monkeypatch.setattr(os, "preadv", lambda *a: reads.append(a) or preadv(*a))
    with chunks_read() as seen:
        unickpt.load(tmp_path / "c", state)
    assert sorted(each.key for each in seen) == sorted(state)
    assert len(reads) < 40
    monkeypatch.setattr(ChunkStore, "_read_one", None)  # none was read for itself
    monkeypatch.setattr(array_reader, "TASK_CHUNKS", 7)
    found = unickpt.load(tmp_path / "c")
    assert all(same(found[name], array) for name, array in state.items())


def test_any_rows_of_a_table_in_blocks_are_those_of_the_table() -> None:
    table = np.zeros(23, digest_table.DTYPE)
    table["digest"], table["process"] = np.arange(23) * 7 + 1, np.arange(23) % 3
    blocks = digest_table.blocks(table, 5)
    assert isinstance(blocks, DigestBlocks)
    asked: list[tuple[int, int]] = []

    def read(offset: int, length: int) -> bytes:
        asked.append((offset, length))
        return table.tobytes()[offset : offset + length]

    known = digest_table.TableBlocks(blocks, 23, read)
    for which in ([22, 0, 7, 7], [1], [13, 12, 21], list(range(23))[::-1]):
        assert known.rows(np.array(which, np.int64)).tolist() == table[which].tolist()
    assert sum(length for _, length in asked) <= 23 * digest_table.DTYPE.itemsize, "each once"
    assert known.rows(slice(4, 17)).tolist() == table[4:17].tolist()
    damaged = digest_table.TableBlocks(blocks, 23, lambda a, n: b"\x01" * n)
    with pytest.raises(digest_table.Mismatch, match="block 4 "):
        damaged.rows(np.array([20], np.int64))


@pytest.mark.parametrize(
    "option",
    [
        {"compression": "zstd"},
        pytest.param({"quantize": {"**": "uint8"}}, marks=pytest.mark.plugins),
        {},
    ],
)
def test_small_chunks_are_read_together_however_they_are_stored(
    option: dict[str, Any], tmp_path: Path
) -> None:
    state = {f"w{n}": np.full((16, 16), n, np.float32) for n in range(20)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(fsync=False, **option))
    found = unickpt.load(tmp_path / "c", options=LoadOptions(verify=False))
    assert all(np.allclose(found[name], array, rtol=0.01) for name, array in state.items())


@pytest.mark.parametrize("count", [1, 64])
def test_one_small_piece_of_work_starts_no_thread(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = {str(n): np.zeros(100_000, np.int64) for n in range(count)}
    unickpt.save(tmp_path / "c", {name: zeros + 7 for name, zeros in like.items()})
    started: list[str] = []
    start = threading.Thread.start
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: (started.append(thread.name), start(thread))[1]
    )
    unickpt.load(tmp_path / "c", like)
    assert all((array == 7).all() for array in like.values())
    assert bool(started) == (count > 1), started
