"""Checkpoints of format 1 that were stored long ago stay readable."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from support.format_1 import names, states, unpacked
from support.quantized import codes_of

import unickpt
from unickpt import PerProcess
from unickpt.types import PerProcessValues


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


QUANTISED = {"quantised", "patched", "chained/step_0", "chained/step_2", "chained/step_3"}
"""The fixtures with arrays that a plug-in reads."""


def marked(name: str, *others: Any) -> Any:
    """Arguments of a test, with the mark of what they need."""
    needs_plug_ins = name in QUANTISED or name == "compressed"  # which has patches, too
    return pytest.param(name, *others, marks=[pytest.mark.plugins] * needs_plug_ins)


@pytest.mark.parametrize("name", list(map(marked, names())))
def test_each_fixture_is_intact(name: str) -> None:
    report = unickpt.verify(unpacked() / name)
    assert report.ok, report.damage


@pytest.mark.parametrize("name", ["one_process", "two_processes"])
def test_every_kind_of_leaf_stays_readable(name: str) -> None:
    same(unickpt.load(unpacked() / name), getattr(states(), name)())


def test_fixtures_hold_every_kind_of_part() -> None:
    one, two = (unickpt.open(unpacked() / f"{name}") for name in ("one_process", "two_processes"))
    assert one.metadata == states().METADATA
    assert one.index.aliases == {"params/tied": "params/even"}
    assert one.index.arrays["key"].prng == "threefry2x32"
    assert two.index.arrays["cut"].cut == (0,)
    assert [part.key for part in two["cut"].parts] == ["cut/part_0_0", "cut/part_61_0"]
    assert len(one["params/even"].fragments) == 8
    assert len(one["params/rows"].fragments) == 8
    assert len(two["zero"].parts) == 4
    assert writers(two, "zero") == [0, 0, 1, 1]
    assert two.index.codecs == ["zstd"]


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("one_process", []),
        ("two_processes", []),
        ("compressed", ["patches"]),
        marked("quantised", ["quantized"]),
        ("sections", ["sections"]),
        ("linked", []),
        ("borrowed/step_0", []),
        ("borrowed/step_1", ["references"]),
        marked("patched", ["patches", "quantized"]),
        marked("chained/step_3", ["patches", "quantized", "references"]),
        ("retired/step_5", ["references"]),
    ],
)
def test_an_index_names_the_features_that_it_uses(name: str, features: list[str]) -> None:
    reader = unickpt.open(unpacked() / name).reader
    assert (reader.version, reader.index.features) == ("1", features)


@pytest.mark.parametrize(
    ("name", "step"), [("linked", 1), ("borrowed/step_0", 0), ("borrowed/step_1", 1)]
)
def test_chunks_of_an_earlier_checkpoint_stay_readable(name: str, step: int) -> None:
    path = unpacked() / name
    same(unickpt.load(path), states().steps_of_rows(step))
    index = unickpt.open(path).index
    assert bool(index.reused) == (step > 0)
    assert len(index.bases) == (name == "borrowed/step_1")


def test_the_timing_of_a_save_stays_readable() -> None:
    path = unpacked() / "timing"
    assert np.array_equal(unickpt.load(path)["w"], np.arange(300.0))
    found = unickpt.open(path).timing
    assert found is not None
    assert found.processes == 3
    assert found.written.sum() == 2400
    assert 0 < found.done.max() <= found.collected + 1e-3


@pytest.mark.plugins
def test_quantised_arrays_stay_readable() -> None:
    path = unpacked() / "quantised"
    same(unickpt.load(path), states().floats())
    entries = unickpt.open(path).index.arrays
    assert [codes_of(entry) for entry in entries.values()] == ["int2", "uint8", None]


def test_digests_in_blocks_stay_readable() -> None:
    path = unpacked() / "blocks"
    same(unickpt.load(path), states().of_many_chunks())
    blocks = unickpt.open(path).index.digest_blocks
    assert blocks is not None
    assert (blocks.rows, len(blocks.digests)) == (8, 6)


def test_a_key_in_a_per_process_value_stays_readable() -> None:
    like = PerProcess({"key": jax.random.key(0, impl="rbg"), "seen": 0})
    found = unickpt.load(unpacked() / "key_per_process", {"rng": like})["rng"].value
    assert found["seen"] == 12
    assert found["key"].dtype == like.value["key"].dtype
    assert jax.random.key_data(found["key"]).tolist() == [0, 7, 0, 7]


def writers(stored: unickpt.Checkpoint, name: str) -> list[int]:
    found: list[int] = stored.reader.digests_of(name)["process"].tolist()
    return found


def test_values_in_sections_stay_readable() -> None:
    path = unpacked() / "sections"
    for process, found in enumerate(unickpt.load(path)["large"].values):
        same(found, states().large(process))


@pytest.mark.plugins
def test_loaders_stay_readable() -> None:
    from unickpt.data import Ranks

    path = unpacked() / "sections"
    for count in (2, 3):  # as many ranks, and others
        shards, samples, buffer = list[int](), list[int](), list[int]()
        for rank in range(count):
            like = states().loaders(Ranks(rank, count))
            unickpt.load(path, like, unexpected="skip")
            shards += like["shards"]
            samples += [i for batch in like["samples"] for i in batch]
            buffer += [int(each[0]) for each in like["buffer"]]
        # Two ranks drew four each.
        drawn = [0, 2, 4, 6, 1, 3, 5, 7]
        assert sorted(shards) == [i for i in range(30) if i not in drawn]
        assert len(set(samples)) == len(samples) == 22
        assert sorted(buffer) == [0, 1, 2, 200, 201, 202]


@pytest.mark.parametrize("name", list(map(marked, ["patched", "chained/step_3"])))
def test_chains_of_patches_stay_readable(name: str) -> None:
    same(unickpt.load(unpacked() / name), states().steps_of_patches(3))
    index = unickpt.open(unpacked() / name).index
    patched = {name: (entry.composed, entry.additions) for name, entry in index.arrays.items()}
    assert patched == {"near": (1, 2), "rows": (1, 2), "codes": (1, 1), "frozen": (0, 0)}
    assert index.extra["incremental"]["growth"][0] == 3  # saves
    assert len(index.bases) == 2 * name.startswith("chained")


@pytest.mark.plugins
def test_arrays_with_codecs_of_their_own_stay_readable() -> None:
    path = unpacked() / "compressed"
    same(unickpt.load(path), states().steps_of_noise(1))
    index = unickpt.open(path).index
    found = {n: (e.encoding, e.additions) for n, e in index.arrays.items()}
    assert {n: (bool(encoding), patches) for n, (encoding, patches) in found.items()} == {
        "w": (True, 1),
        "noise": (False, 1),
        "mask": (True, 0),
    }
    assert found["noise"][0] == ()  # tried, and it does not pay
    assert index.compression == "auto"


def test_experts_in_retired_steps_stay_readable() -> None:
    path = unpacked() / "retired" / "step_5"
    experts = np.arange(4 * 300.0).reshape(4, 300)
    experts += 10_000 * np.array([[5], [2], [3], [4]])
    same(unickpt.load(path), {"dense": np.arange(50.0) - 5, "experts": experts, "step": 5})
    bases = unickpt.open(path).index.bases
    assert [base.name for base in bases] == ["step_2", "step_3", "step_4"]
    for step in (2, 3, 4):
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.load(unpacked() / "retired" / f"step_{step}")
