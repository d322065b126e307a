"""Transfers to page-locked host memory, with JAX's CPU devices in place of accelerators."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from support.processes import Processes

import unickpt
from unickpt.adapters import jax as jax_adapter
from unickpt.adapters import jax_transfer
from unickpt.arrays.box import Box
from unickpt.frameworks.process_group import alone

KINDS = {memory.kind for memory in jax.devices("cpu")[0].addressable_memories()}
pytestmark = pytest.mark.skipif("pinned_host" not in KINDS, reason="CPUs of this JAX have none")


@pytest.fixture(autouse=True)
def _accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)


def sharded(shape: tuple[int, ...], spec: P, dtype: Any = jnp.float32) -> Any:
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    whole = jnp.arange(np.prod(shape), dtype=dtype).reshape(shape)
    return jax.device_put(whole, NamedSharding(mesh, spec))


def transfer(array: Any, boxes: list[Box]) -> Any:
    (memory,) = {fragment.memory for fragment in jax_adapter.source(array, alone()).fragments}
    return memory.transfer(boxes)


def read(found: Any, box: Box, dtype: Any = np.float32) -> Any:
    return found.read(box, lambda: np.full(box.shape, 77, dtype))


@pytest.mark.parametrize("spec", [P("a", "b"), P("a"), P(None, "b"), P(), P(("a", "b"))])
def test_boxes_within_and_across_devices(spec: P) -> None:
    array = sharded((8, 12), spec)
    whole = np.arange(96, dtype=np.float32).reshape(8, 12)
    for boxes in (
        [Box((0, 0), (8, 12))],
        [Box((0, 0), (3, 12)), Box((3, 0), (8, 12))],
        [Box((2, 5), (7, 11))],  # the rest is for others to write
        [Box((0, 0), (1, 1)), Box((7, 11), (8, 12))],
    ):
        found = transfer(array, boxes)
        array_before, array_deleted = np.asarray(array), jnp.copy(array)
        for box in boxes:
            assert np.array_equal(read(found, box), whole[box.slices])
        assert np.array_equal(array_before, np.asarray(array_deleted))


def test_the_array_may_be_donated_and_deleted_after_it_began() -> None:
    array = sharded((8, 12), P("a"))
    found = transfer(array, [Box((0, 0), (8, 12))])
    jax.jit(lambda x: x * 0, donate_argnums=0)(array)
    array.delete()
    expected = np.arange(96, dtype=np.float32).reshape(8, 12)
    assert np.array_equal(read(found, Box((0, 0), (8, 12))), expected)


def test_scalars_and_keys() -> None:
    found = transfer(jnp.float32(3), [Box((), ())])
    assert read(found, Box((), ())) == 3
    key = jax.random.key(5)
    found = transfer(key, [Box((0,), (2,))])
    expected = np.asarray(jax.random.key_data(key))
    assert np.array_equal(read(found, Box((0,), (2,)), np.uint32), expected)


@pytest.mark.parametrize("mode", ["auto", "copy", "lazy", "reference", "device"])
def test_pieces_at_a_place_of_a_larger_array(mode: Any, tmp_path: Path) -> None:
    """Once what came after the first piece was what happened to be in memory."""
    numbers = np.arange(80, dtype=np.float32).reshape(8, 10)
    boxes = [Box((4, 0), (8, 10)), Box((0, 0), (4, 7)), Box((0, 7), (4, 10))]
    pieces = [(box, jnp.array(numbers[box.slices])) for box in boxes]
    options = unickpt.SaveOptions(staging=mode, chunk_bytes=64, fsync=False)
    state = {"w": unickpt.types.LocalFragments((8, 10), pieces)}
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    pending.wait_staged()
    for _, array in pieces:
        array.delete()
    pending.result()
    assert np.array_equal(unickpt.load(tmp_path / "c")["w"], numbers)


def test_pieces_that_lack_elements_are_not_transferred() -> None:
    array = sharded((8, 12), P("a"))
    with pytest.raises(AssertionError, match="lack 12 elements"):
        transfer(array, [Box((7, 0), (9, 12))])


@pytest.mark.parametrize("most", [0, 3000, 1 << 30])
def test_lazily_copied_arrays(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has room is transferred in the background, too; `wait_staged` need not wait for it."""
    monkeypatch.setattr(jax_transfer, "_MOST_BYTES", most)
    for number in range(5):
        state = {str(i): jnp.arange(1000.0) + number + i for i in range(4)}
        expected = {name: np.array(array) for name, array in state.items()}
        options = unickpt.SaveOptions(staging="lazy", chunk_bytes=512, fsync=False)
        pending = unickpt.save_async(tmp_path / str(number), state, options=options)
        pending.wait_staged()
        for array in state.values():
            array.delete()
        report = pending.result()
        assert report.staged_bytes == 16_000
        found = unickpt.load(tmp_path / str(number))
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_an_array_that_is_deleted_before_it_is_transferred(tmp_path: Path) -> None:
    late: list[str] = []
    for number in range(20):
        state = {"w": jnp.arange(1000.0) + number}
        options = unickpt.SaveOptions(staging="lazy", chunk_bytes=512, fsync=False)
        pending = unickpt.save_async(tmp_path / str(number), state, options=options)
        state["w"].delete()
        try:
            pending.result()
        except unickpt.errors.StateChanged as error:
            late.append(str(error))
        else:
            assert unickpt.load(tmp_path / str(number))["w"][-1] == 999 + number
    assert late
    assert all("'w'" in message for message in late)
    del pending
    gc.collect()  # what the errors refer to
    assert jax_transfer._Arriving._bytes == 0


def test_offloaded_arrays_are_left_where_they_are() -> None:
    home = SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    offloaded = jax.device_put(jnp.arange(9.0), home)
    assert transfer(offloaded, [Box((0,), (9,))]) is None


def test_room_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_transfer, "_MOST_BYTES", 1040)
    array = jnp.arange(200.0)
    box = Box((0,), (200,))
    found = transfer(array, [box])
    assert transfer(array, [box]) is None
    assert read(found, box)[7] == 7
    # What only passes through has room beside it.
    whole, part = np.empty(200, np.float32), Box((3,), (20,))
    assert jax_transfer.copied(array, box, lambda: whole) is not whole
    out = np.empty(17, np.float32)
    assert jax_transfer.copied(array, part, lambda: out) is out
    assert np.array_equal(out, np.arange(3, 20))
    del found
    gc.collect()
    assert transfer(array, [box]) is not None


@pytest.mark.parametrize("most", [0, 4600, 1 << 30])
def test_a_save_with_more_or_less_room(
    most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jax_transfer, "_MOST_BYTES", most)
    started: list[int] = []
    real = jax_transfer.transfer

    def counted(gather: Any, pieces: Any, boxes: Any) -> Any:
        found = real(gather, pieces, boxes)
        started.append(found is not None)
        return found

    monkeypatch.setattr(jax_transfer, "transfer", counted)
    state = {
        "rows": sharded((40, 24), P("a")),
        "both": sharded((40, 24), P("a", "b")),
        "bfloat16": sharded((40, 24), P("b"), jnp.bfloat16),
        "flags": sharded((40, 24), P("b")) > 50,
        "scalar": jnp.int32(3),
        "empty": jnp.zeros((0, 4)),
    }
    expected = jax.tree.map(np.asarray, state)
    options = unickpt.SaveOptions(chunk_bytes=256, fsync=False)
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    for array in state.values():
        array.delete()
    report = pending.result()
    assert report.staged_bytes == sum(array.nbytes for array in expected.values())
    assert sum(started) == {0: 0, 4600: 2}.get(most, len(started))
    found = unickpt.load(tmp_path / "c")
    for name, array in expected.items():
        assert found[name].tobytes() == array.tobytes(), name
    assert unickpt.verify(tmp_path / "c").ok


def test_what_does_not_fit_into_the_budget_is_copied(tmp_path: Path) -> None:
    state = {str(i): jnp.arange(1000.0) + i for i in range(20)}
    options = unickpt.SaveOptions(chunk_bytes=1024, budget_bytes=20_000, fsync=False)
    pending = unickpt.save_async(tmp_path / "c", state, options=options)
    for array in state.values():
        array.delete()
    pending.result()
    found = unickpt.load(tmp_path / "c")
    for i in range(20):
        assert np.array_equal(found[str(i)], np.arange(1000, dtype=np.float32) + i)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"compression": "auto"},
        {"quantize": {"w": "uint8"}},
        {"reuse": "patch"},
        {"reuse": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [0, 3000, 1 << 30])
def test_steps_of_the_same_tree(
    more: dict[str, Any], most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their plan is known; each step is what it was when it was saved, whoever copied it."""
    monkeypatch.setattr(jax_transfer, "_MOST_BYTES", most)
    reuse = more.get("reuse", False)
    given = {name: value for name, value in more.items() if name != "reuse"}
    options = unickpt.SaveOptions(chunk_bytes=1024, fsync=False, **given)
    first = np.random.default_rng(1).random((64, 32), np.float32)
    expected: dict[int, Any] = {}
    with unickpt.Checkpointer(tmp_path, keep_last=9, reuse=reuse, options=options) as run:
        for step in range(4):
            values = first.copy()
            values[:step] += step
            state = {"w": jnp.array(values), "rows": sharded((40, 24), P("a")) + step, "n": step}
            expected[step] = {name: np.asarray(x).copy() for name, x in state.items()}
            run.save(step, state)
            state["w"].delete()
            state["rows"].delete()
    for step, arrays in expected.items():
        found = unickpt.load(tmp_path / f"step_{step}")
        assert found["rows"].tobytes() == arrays["rows"].tobytes()
        if "quantize" not in more:
            assert found["w"].tobytes() == arrays["w"].tobytes()
        else:
            assert np.abs(found["w"] - arrays["w"]).max() < 0.02
        assert unickpt.verify(tmp_path / f"step_{step}").ok
    assert jax_transfer._Arriving._bytes == 0


JOB = """
import sys
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import unickpt
from unickpt.adapters import jax as jax_adapter, jax_transfer

jax_adapter._on_cpu = lambda sharding: False
moved = []
real = jax_transfer._Arriving.start.__func__


def counted(cls, parts, shardings, *, passing=False):
    found = real(cls, parts, shardings, passing=passing)
    moved.append(0 if found is None or passing else sum(part.nbytes for part in parts.values()))
    return found


jax_transfer._Arriving.start = classmethod(counted)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("a", "b"))
specs = {"rows": P("a"), "columns": P(None, "b"), "both": P("a", "b"), "all": P()}
state = {
    name: jax.jit(
        lambda n=number: jnp.arange(40 * 64.0).reshape(40, 64) + n,
        out_shardings=NamedSharding(mesh, spec),
    )()
    for number, (name, spec) in enumerate(specs.items())
}
jax.block_until_ready(state)
step = jax.jit(lambda s: {k: x * 0 for k, x in s.items()}, donate_argnums=0)
options = unickpt.SaveOptions(chunk_bytes=1024, fsync=False, timeout_s=60)
pending = unickpt.save_async(sys.argv[1], state, options=options)
step(state)
pending.result()
print("moved", sum(moved))
"""


@pytest.mark.integration
def test_a_job_transfers_what_each_process_writes(processes: Processes, tmp_path: Path) -> None:
    """Of what several processes hold, each moves its share, cut out on the device."""
    outputs = processes.finish(processes.jax(2, 2, JOB, tmp_path / "c"))
    moved = [int(n) for out in outputs for n in re.findall(r"moved (\d+)", out)]
    assert sum(moved) == 4 * 40 * 64 * 4
    assert max(moved) < 0.6 * sum(moved)
    found = unickpt.load(tmp_path / "c")
    for number, name in enumerate(["rows", "columns", "both", "all"]):
        expected = np.arange(40 * 64, dtype=np.float32).reshape(40, 64) + np.float32(number)
        assert np.array_equal(found[name], expected), name
