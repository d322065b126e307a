"""Checkpoints that earlier versions of the format wrote stay readable."""

from __future__ import annotations

import importlib
import itertools
import runpy
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from support import TESTS

import unickpt
import unickpt.data
from unickpt import PerProcess
from unickpt.types import PerProcessValues

FIXTURES = Path(TESTS) / "fixtures"


@pytest.fixture
def known(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FIXTURES)
    return importlib.import_module("known_1_0")


def leaves(node: Any, at: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves with their place and the types of all containers above."""
    if isinstance(node, PerProcessValues):
        node = node.values
    if isinstance(node, dict):
        items: Any = node.items()
    elif isinstance(node, list | tuple):
        items = zip(getattr(node, "_fields", itertools.count()), node, strict=False)
    else:
        yield at, node
        return
    yield at, type(node).__name__
    for key, child in items:
        yield from leaves(child, f"{at}/{key!r}")


def same(found: Any, expected: Any) -> None:
    ours, theirs = dict(leaves(expected)), dict(leaves(found))
    assert list(ours) == list(theirs)
    for at, value in ours.items():
        if isinstance(value, np.ndarray):
            assert (theirs[at].dtype, theirs[at].shape) == (value.dtype, value.shape), at
            assert theirs[at].tobytes() == value.tobytes(), at
        else:
            assert (type(theirs[at]), repr(theirs[at])) == (type(value), repr(value)), at


@pytest.mark.parametrize("name", ["one_process", "two_processes"])
def test_old_checkpoints_stay_readable(name: str, known: ModuleType) -> None:
    path = FIXTURES / f"{name}_1_0"
    same(unickpt.load(path), getattr(known, name)())
    report = unickpt.verify(path)
    assert report.ok, report.damage


def test_fixtures_hold_every_kind_of_part(known: ModuleType) -> None:
    one = unickpt.open(FIXTURES / "one_process_1_0")
    two = unickpt.open(FIXTURES / "two_processes_1_0")
    assert one.metadata == known.METADATA
    assert one.index.aliases == {"params/tied": "params/even"}
    assert one.index.arrays["key"].prng == "threefry2x32"
    assert one.index.arrays["params/cut"].cut == (0,)
    assert len(one["params/cut"].parts) == 2
    assert len(one["params/even"].fragments) == 8
    assert len(one["params/rows"].fragments) == 8
    assert len(two["zero"].parts) == 4
    assert writers(two, "zero") == [0, 0, 1, 1]
    assert two.index.codecs[0]["name"] == "zstd"


@pytest.mark.parametrize(
    ("name", "step"), [("linked_1_2", 1), ("borrowed_1_2/step_0", 0), ("borrowed_1_2/step_1", 1)]
)
def test_chunks_of_an_earlier_checkpoint_stay_readable(name: str, step: int) -> None:
    path = FIXTURES / name
    found = unickpt.load(path)
    rows = np.arange(400.0).reshape(40, 10)
    rows[step] *= -1
    assert np.array_equal(found["rows"], rows)
    assert np.array_equal(found["frozen"], np.arange(300))
    assert found["step"] == step
    assert unickpt.verify(path).ok
    index = unickpt.open(path).index
    assert bool(index.reused) == (step > 0)
    assert len(index.bases) == (name == "borrowed_1_2/step_1")


def test_the_timing_of_a_save_stays_readable() -> None:
    path = FIXTURES / "timing_1_3"
    assert np.array_equal(unickpt.load(path)["w"], np.arange(300.0))
    assert unickpt.verify(path).ok
    found = unickpt.open(path).timing
    assert found is not None
    assert found.processes == 3
    assert found.written.sum() == 2400
    assert 0 < found.done.max() <= found.collected + 1e-3


def test_quantised_arrays_stay_readable() -> None:
    path = FIXTURES / "quantised_1_2"
    found = unickpt.load(path)
    steps = np.arange(4, dtype=np.float32) / 2 - 1
    expected = {
        "few": np.resize(steps, (6, 70)),
        "many": np.resize([0.0, 255.0, 17.0, 3.0], (3, 300)),
        "none": np.resize(steps, (5,)),
    }
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)
    entries = unickpt.open(path).index.arrays
    assert [entry.quantized for entry in entries.values()] == ["int2", "uint8", None]
    assert unickpt.verify(path).ok


def test_digests_in_blocks_stay_readable() -> None:
    path = FIXTURES / "blocks_1_3"
    opened = unickpt.open(path)
    assert np.array_equal(opened["few"][:], np.arange(60.0).reshape(6, 10))
    assert np.array_equal(opened["many"][:], np.arange(400, dtype=np.int32).reshape(40, 10))
    assert opened["one"][()] == np.float32(0.5)
    blocks = opened.index.digest_blocks
    assert blocks is not None
    assert (blocks.rows, len(blocks.digests)) == (8, 6)
    assert unickpt.verify(path).ok


def test_a_key_in_a_per_process_value_stays_readable() -> None:
    path = FIXTURES / "key_per_process_1_1"
    like = PerProcess({"key": jax.random.key(0, impl="rbg"), "seen": 0})
    found = unickpt.load(path, {"rng": like})["rng"].value
    assert found["seen"] == 12
    assert found["key"].dtype == like.value["key"].dtype
    assert jax.random.key_data(found["key"]).tolist() == [0, 7, 0, 7]
    assert unickpt.verify(path).ok


def writers(stored: unickpt.Checkpoint, name: str) -> list[int]:
    found: list[int] = stored.reader.digests_of(name)["process"].tolist()
    return found


def test_binary_per_process_values_stay_readable() -> None:
    path = FIXTURES / "binary_3_0"
    for process, found in enumerate(unickpt.load(path)["large"].values):
        assert found["array"].tolist() == (np.arange(100.0) + process).tolist()
        assert found["tokens"] == list(range(process, 2100))
        assert found["floats"] == [0.5 * i for i in range(2100)]
        assert found["bytes"] == bytes([process]) * 4100
        assert found["small"] == (1, None, "x", b"y")
    make = runpy.run_path(str(FIXTURES / "make_format_3_0_values.py"))["loaders"]
    for count in (2, 3):  # as many ranks, and others
        shards, samples, buffer = list[int](), list[int](), list[int]()
        for rank in range(count):
            like = make(unickpt.data.Ranks(rank, count))
            unickpt.load(path, like, unexpected="skip")
            shards += like["shards"]
            samples += [i for batch in like["samples"] for i in batch]
            buffer += [int(each[0]) for each in like["buffer"]]
        # Two ranks drew four each.
        drawn = [0, 2, 4, 6, 1, 3, 5, 7]
        assert sorted(shards) == [i for i in range(30) if i not in drawn]
        assert len(set(samples)) == len(samples) == 22
        assert sorted(buffer) == [0, 1, 2, 200, 201, 202]
    assert unickpt.verify(path).ok


def test_patched_chunks_stay_readable() -> None:
    path = FIXTURES / "patched_2_0"
    found = unickpt.load(path)
    rows = np.arange(4000.0).reshape(40, 100)
    rows[::3, 7] *= -2
    near, far = np.arange(3000, dtype=np.uint16), np.arange(70_000, dtype=np.uint8)
    near[2::40] += 1
    far[600::2000] += 1
    expected = {"rows": rows, "near": near, "far": far, "frozen": np.arange(300), "step": 2}
    same(found, expected)
    assert unickpt.verify(path).ok
    entries = unickpt.open(path).index.arrays
    assert {name: entry.patched for name, entry in entries.items()} == {
        "rows": 4,
        "near": 1,
        "far": 9,
        "frozen": 0,
    }


@pytest.mark.parametrize("name", ["patched_3_0", "chained_3_0/step_3"])
def test_chains_of_patches_stay_readable(name: str) -> None:
    found = unickpt.load(FIXTURES / name)
    near, rows = np.arange(3000, dtype=np.uint16), np.arange(4000.0).reshape(40, 100)
    codes = np.resize(np.arange(256, dtype=np.float32), (40, 512))
    for step in range(1, 4):
        near[step::40] += step
        rows[step] *= -1
        codes[step] = codes[step, ::-1]
    same(found, {"near": near, "rows": rows, "codes": codes, "frozen": np.arange(300), "step": 3})
    assert unickpt.verify(FIXTURES / name).ok
    index = unickpt.open(FIXTURES / name).index
    patched = {name: (entry.patched, entry.patches) for name, entry in index.arrays.items()}
    assert patched == {"near": (1, 2), "rows": (1, 2), "codes": (1, 1), "frozen": (0, 0)}
    assert index.growth is not None
    assert index.growth.saves == 3
    assert len(index.bases) == 2 * name.startswith("chained")


def test_arrays_with_codecs_of_their_own_stay_readable() -> None:
    path = FIXTURES / "compressed_4_0"
    w = np.resize(np.arange(-40, 40), (160, 250)).astype(ml_dtypes.bfloat16)
    noise = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
    w[1, ::50] = -1
    noise[100] ^= 1
    same(
        unickpt.load(path), {"w": w, "noise": noise, "mask": np.arange(66_000) % 7 == 0, "step": 1}
    )
    assert unickpt.verify(path).ok
    index = unickpt.open(path).index
    found = {n: (bool(e.encoding), e.patches) for n, e in index.arrays.items()}
    assert found == {"w": (True, 1), "noise": (False, 1), "mask": (True, 0)}


def test_experts_in_retired_steps_stay_readable() -> None:
    path = FIXTURES / "retired_1_2" / "step_5"
    experts = np.arange(4 * 300.0).reshape(4, 300)
    experts += 10_000 * np.array([[5], [2], [3], [4]])
    same(unickpt.load(path), {"dense": np.arange(50.0) - 5, "experts": experts, "step": 5})
    assert unickpt.verify(path).ok
    bases = unickpt.open(path).index.bases
    assert [base.name for base in bases] == ["step_2", "step_3", "step_4"]
    for step in (2, 3, 4):
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.load(FIXTURES / "retired_1_2" / f"step_{step}")
