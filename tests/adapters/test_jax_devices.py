"""Chunks that several devices of one process share, and those that they do not.

The functions that take a folder run in the processes themselves.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support import TESTS
from support.processes import Processes

import unickpt
from unickpt.format import chunk_grid

QUICK = unickpt.SaveOptions(fsync=False)
WHOLE = np.random.default_rng(3).random((48, 16), np.float32)


def named(grid: tuple[int, ...], spec: P, *numbers: int) -> NamedSharding:
    """A sharding over all devices, or over these, in this order."""
    ordered = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    devices = np.array(ordered)[list(numbers or range(8))].reshape(grid)
    return NamedSharding(Mesh(devices, ("a", "b", "c")[: len(grid)]), spec)


def put(whole: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(whole.shape, sharding, lambda at: whole[at])


def chunks(path: Path | str) -> int:
    return unickpt.open(path).index.chunks


def check(found: jax.Array, whole: np.ndarray) -> None:
    for shard in found.addressable_shards:
        assert np.asarray(shard.data).tobytes() == whole[shard.index].tobytes()


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Chunks end with every device, as those of earlier versions, until this is undone."""
    monkeypatch.setattr(chunk_grid, "_JOINED_BYTES", 0)
    chunk_grid.chunk_grid.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    chunk_grid.chunk_grid.cache_clear()


SHARDINGS = {
    "rows": lambda: named((8,), P("a")),
    "columns": lambda: named((8,), P(None, "a")),
    "both": lambda: named((4, 2), P("a", "b")),
    "both on one dimension": lambda: named((4, 2), P(("b", "a"))),
    "devices in another order": lambda: named((8,), P("a"), 3, 1, 4, 0, 5, 7, 2, 6),
    "replicas": lambda: named((2, 4), P("b")),
    "only replicas": lambda: named((8,), P()),
    "some devices": lambda: named((4,), P("a"), 6, 1, 2, 7),
}


@pytest.mark.parametrize("kind", SHARDINGS)
def test_a_small_array_is_one_chunk_on_any_devices_of_a_process(kind: str, tmp_path: Path) -> None:
    sharding = SHARDINGS[kind]()
    unickpt.save(tmp_path, {"w": put(WHOLE, sharding)}, options=QUICK)
    assert chunks(tmp_path) == 1
    assert np.array_equal(unickpt.load(tmp_path)["w"], WHOLE)
    for other in SHARDINGS.values():
        like = jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=other())
        check(unickpt.load(tmp_path, {"w": like})["w"], WHOLE)
    assert unickpt.verify(tmp_path).ok


@pytest.mark.usefixtures("apart")
def test_chunks_that_end_with_every_device_stay_readable(tmp_path: Path) -> None:
    unickpt.save(tmp_path, {"w": put(WHOLE, named((8,), P("a")))}, options=QUICK)
    assert chunks(tmp_path) == 8
    check(unickpt.load(tmp_path, {"w": put(WHOLE * 0, named((4, 2), P("a", "b")))})["w"], WHOLE)


def test_a_large_device_keeps_its_chunks_and_its_memory(tmp_path: Path) -> None:
    large = np.arange(8 << 13, dtype=np.float32)  # 32 KiB on each
    unickpt.save(tmp_path, {"w": put(large, named((8,), P("a")))}, options=QUICK)
    assert chunks(tmp_path) == 8
    assert unickpt.open(tmp_path).index.arrays["w"].chunk == (1 << 13,)


@pytest.mark.parametrize("staging", ["auto", "copy", "reference", "lazy", "device"])
def test_joined_chunks_are_of_the_state_at_the_call(staging: str, tmp_path: Path) -> None:
    shared = np.zeros((64, 64), np.float32)
    state = {
        "joined": put(WHOLE, named((8,), P("a"))),
        "bool": put(WHOLE > 0.5, named((4, 2), P("a", "b"))),
        # Its devices may share the memory of the NumPy array, which is written to.
        "alias": jax.device_put(shared, named((8,), P("a"))),
        "shared": shared,
    }
    options = unickpt.SaveOptions(fsync=False, staging=staging)  # type: ignore[arg-type]
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    pending.wait_staged()
    shared[:] = 7
    jax.jit(lambda x: x + 1, donate_argnums=0)(state["joined"])
    pending.result()
    found = unickpt.load(tmp_path / "c")
    assert np.array_equal(found["joined"], WHOLE)
    assert np.array_equal(found["bool"], WHOLE > 0.5)
    assert not found["shared"].any()
    assert not found["alias"].any()
    assert chunks(tmp_path / "c") == 4


def test_a_base_with_other_chunks_is_written_again_once(
    apart: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tree = {"w": put(WHOLE, named((8,), P("a"))), "big": put(np.ones(8 << 15), named((8,), P("a")))}
    big = tree["big"].nbytes
    unickpt.save(tmp_path / "0", tree, options=QUICK)
    apart.undo()
    chunk_grid.chunk_grid.cache_clear()
    reused = []
    for step in (1, 2):
        base = unickpt.SaveOptions(fsync=False, base=tmp_path / str(step - 1))
        reused.append(unickpt.save(tmp_path / str(step), tree, options=base).reused_bytes)
        assert np.array_equal(unickpt.load(tmp_path / str(step))["w"], WHOLE)
    assert reused == [big, big + WHOLE.nbytes]


def test_patches_and_codes_of_joined_chunks(tmp_path: Path) -> None:
    whole = np.random.default_rng(0).random((256, 64), np.float32)
    sharding = named((8,), P("a"))
    quantize = {"q": "uint8", "**": None}
    tree = {"w": put(whole, sharding), "q": put(whole, sharding)}
    options = unickpt.SaveOptions(fsync=False, quantize=quantize)
    unickpt.save(tmp_path / "0", tree, options=options)
    changed = whole.copy()
    changed[::32, 5] += 1  # one element on each device
    tree["w"] = put(changed, sharding)
    options = unickpt.SaveOptions(
        fsync=False, quantize=quantize, base=tmp_path / "0", reuse="patch"
    )
    report = unickpt.save(tmp_path / "1", tree, options=options)
    assert report.patched_chunks == 1
    found = unickpt.load(tmp_path / "1")
    assert np.array_equal(found["w"], changed)
    assert np.abs(found["q"] - whole).max() < 0.01
    assert chunks(tmp_path / "1") == 2


def two_processes(folder: str) -> None:
    cases = {
        "rows": (named((8,), P("a")), 2),
        "woven": (named((8,), P("a"), 0, 4, 1, 5, 2, 6, 3, 7), 8),
        "pairs": (named((8,), P("a"), 0, 1, 4, 5, 2, 3, 6, 7), 4),
        "tiles": (named((4, 2), P("a", "b")), 2),
        "tiles, columns by process": (named((2, 4), P("b", "a")), 2),
        "replicas within": (named((2, 4), P("a")), 2),
        "replicas between": (named((2, 4), P("b")), 1),
        "everywhere": (named((8,), P()), 1),
    }
    told = {}
    for name, (sharding, expected) in cases.items():
        for save in (unickpt.save, unickpt.save_async):
            path = f"{folder}/{name}"
            done = save(path, {"w": put(WHOLE, sharding)}, overwrite=True, options=QUICK)
            if save is unickpt.save_async:
                done.result()
            told[name] = [chunks(path), expected]
            assert np.array_equal(unickpt.load(path)["w"], WHOLE)
            for other, _ in cases.values():
                like = jax.ShapeDtypeStruct(WHOLE.shape, WHOLE.dtype, sharding=other)
                check(unickpt.load(path, {"w": like})["w"], WHOLE)
    print(json.dumps(told))


def test_chunks_end_where_a_process_does(processes: Processes, tmp_path: Path) -> None:
    source = (
        f"import sys\nsys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]\n"
        f"import {__name__}\n{__name__}.two_processes(sys.argv[1])"
    )
    for output in processes.finish(processes.jax(2, 4, source, tmp_path)):
        for name, (found, expected) in json.loads(output.splitlines()[-1]).items():
            assert found == expected, name
