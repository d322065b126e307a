"""Staging: host memory is contiguous, native, used again, and never more than was said."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from itertools import zip_longest
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import unickpt
from unickpt.arrays import strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.format import chunk_encoding
from unickpt.frameworks.adapter_protocol import Fragment
from unickpt.frameworks.host_memory import HostBuffers, stage
from unickpt.threads import Window, collection_paused, in_batches

MIB = 1 << 20


def holder(array: Array) -> Fragment:
    return Fragment(Box.whole(array.shape), (0,), lambda box, room: array[box.slices])


@st.composite
def views(draw: st.DrawFn) -> Array:
    """Arrays of any strides: transposed, reversed, with gaps, of either byte order."""
    rank = draw(st.integers(0, 4))
    shape = draw(st.tuples(*[st.integers(1, 9)] * rank))
    steps = draw(st.tuples(*[st.sampled_from((1, 2, -1, -3))] * rank))
    dtype = draw(st.sampled_from(("<f4", ">f4", "u1", "<c16", ">i2", "?")))
    size = int(np.prod([n * abs(s) for n, s in zip(shape, steps, strict=True)], dtype=int))
    base = (np.arange(size) * 7919 % 251).astype(dtype)
    base = base.reshape([n * abs(s) for n, s in zip(shape, steps, strict=True)])
    view = base[tuple(slice(None, None, s) for s in steps)] if rank else base
    return view.transpose(draw(st.permutations(range(rank))))


@given(views())
def test_what_is_staged_is_contiguous_and_native(array: Array) -> None:
    dtype = array.dtype.newbyteorder("=")
    found = stage(holder(array), Box.whole(array.shape), dtype, HostBuffers(0).take)
    assert (found.shape, found.dtype) == (array.shape, dtype)
    assert found.flags.c_contiguous
    assert found.tobytes() == np.ascontiguousarray(array, dtype).tobytes()


@given(views(), st.data())
def test_a_box_of_it_is_staged(array: Array, data: st.DataObject) -> None:
    start = tuple(data.draw(st.integers(0, n - 1)) for n in array.shape)
    stop = tuple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, array.shape, strict=True))
    dtype = array.dtype.newbyteorder("=")
    found = stage(holder(array), Box(start, stop), dtype, HostBuffers(0).take)
    assert found.tobytes() == np.ascontiguousarray(array[Box(start, stop).slices], dtype).tobytes()


def test_what_lies_well_is_not_copied() -> None:
    array = np.arange(12.0).reshape(3, 4)
    found = stage(holder(array), Box((1, 0), (3, 4)), array.dtype, pytest.fail)
    assert np.shares_memory(found, array)


def test_a_bool_that_is_no_bit_becomes_one() -> None:
    array = np.array([0, 1, 2, 255], np.uint8).view(np.bool_)
    found = stage(holder(array), Box.whole((4,)), array.dtype, HostBuffers(0).take)
    assert found.view(np.uint8).tolist() == [0, 1, 1, 1]
    assert array.view(np.uint8).tolist() == [0, 1, 2, 255], "the source stays as it is"


@pytest.mark.parametrize("turn", [(1, 0), (2, 1, 0), (1, 2, 0), (0, 2, 1), (2, 0, 1)])
@pytest.mark.parametrize("dtype", ["u1", "f4", "c16"])
def test_planes_that_are_worth_tiles(turn: tuple[int, ...], dtype: str) -> None:
    shape = (517, 1031) if len(turn) == 2 else (129, 3, 2111)
    source = (np.arange(np.prod(shape)) % 253).astype(dtype).reshape(shape).transpose(turn)
    out = np.full(source.shape, 7, dtype)
    strided_copy.copy(out, source)
    assert np.array_equal(out, source)
    back = np.zeros(shape, dtype)
    strided_copy.copy(back.transpose(turn), out)
    assert np.array_equal(back.transpose(turn), source)


def test_memory_is_used_again() -> None:
    buffers = HostBuffers(8 * MIB)
    first = buffers.take(2 * MIB)
    buffers.give(first)
    assert np.shares_memory(buffers.take(2 * MIB - 5), first)
    assert not np.shares_memory(buffers.take(2 * MIB), first), "it is in use"


def test_a_small_request_takes_no_large_piece() -> None:
    """Else a few bytes would hold what the budget takes to be free."""
    buffers = HostBuffers(64 * MIB)
    large = buffers.take(32 * MIB)
    buffers.give(large)
    assert not np.shares_memory(buffers.take(2 * MIB), large)
    assert len(buffers.take(1000)) == 1000


@given(st.lists(st.tuples(st.integers(MIB, 5 * MIB), st.booleans()), max_size=40))
def test_no_more_is_held_than_was_said(requests: list[tuple[int, bool]]) -> None:
    most = 16 * MIB
    buffers = HostBuffers(most)
    taken: list[Array] = []
    for nbytes, give in requests:
        if give and taken:
            buffers.give(taken.pop(0))
        if sum(map(len, taken)) + nbytes + nbytes // 4 + (64 << 10) <= most:
            taken.append(buffers.take(nbytes))
            assert len(taken[-1]) >= nbytes
        assert sum(map(len, [*taken, *buffers._free])) <= most


def test_a_window_waits_for_the_oldest() -> None:
    window, done = Window(10), []
    for i, size in enumerate((4, 4, 4, 20, 1)):
        window.make_room(size)
        window.add(size, finish(done, i))
        assert done == {0: [], 1: [], 2: [0], 3: [0, 1, 2], 4: [0, 1, 2, 3]}[i]
    window.drain()
    assert done == [0, 1, 2, 3, 4]


@given(st.lists(st.integers(0, 9)), st.integers(1, 5), st.integers(1, 12))
def test_batches_are_in_order_and_no_larger_than_allowed(
    sizes: list[int], most: int, most_bytes: int
) -> None:
    batches = list(in_batches(sizes, most, most_bytes, int))
    assert [size for batch in batches for size in batch] == sizes
    for batch, after in zip_longest(batches, batches[1:]):
        assert 1 <= len(batch) <= most
        assert len(batch) == 1 or sum(batch) <= most_bytes
        if after is not None:
            assert len(batch) == most or sum(batch) + after[0] > most_bytes, "it had room for more"


def finish(done: list[int], number: int) -> Callable[[], None]:
    return lambda: done.append(number)


def test_memory_is_used_again_only_when_it_was_hashed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit may be faster than the hashing of what it writes."""
    real = chunk_encoding.digest

    def slow(chunk: Array) -> int:
        time.sleep(0.05)
        return real(chunk)

    tree = {f"w{i}": (np.arange(MIB, dtype=np.float32) + i).reshape(1024, 1024).T for i in range(9)}
    options = unickpt.SaveOptions(budget_bytes=16 * MIB, chunk_bytes=4 * MIB, fsync=False)
    with monkeypatch.context() as patch:
        patch.setattr(chunk_encoding, "digest", slow)
        unickpt.save(tmp_path / "c", tree, options=options)
    found = unickpt.load(tmp_path / "c")
    assert all(np.array_equal(found[name], tree[name]) for name in tree)


def test_memory_that_the_system_refused_is_not_held() -> None:
    refuses = [True]

    def allocate(nbytes: int) -> Array:
        if refuses.pop(0) if refuses else False:
            raise MemoryError
        return np.empty(nbytes, np.uint8)

    buffers = HostBuffers(8 * MIB, allocate)
    with pytest.raises(MemoryError):
        buffers.take(8 * MIB)
    first, second = buffers.take(4 * MIB), buffers.take(3 * MIB)
    buffers.give(first)
    assert second.nbytes
    assert not np.shares_memory(buffers.take(MIB), first), "it is too large for that"
    assert np.shares_memory(buffers.take(4 * MIB), first), "and was kept, because it fits"


def test_garbage_collection_is_paused_and_goes_on_as_it_was(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"w": np.arange(3)}, options=unickpt.SaveOptions(fsync=False))
    assert gc.isenabled()
    with collection_paused():
        unickpt.load(tmp_path / "c")
        assert not gc.isenabled(), "the inner pause does not end the outer one"
    assert gc.isenabled()
    gc.disable()
    try:
        unickpt.load(tmp_path / "c")
        assert not gc.isenabled(), "it was switched off before"
    finally:
        gc.enable()
