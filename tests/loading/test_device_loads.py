"""Loads into tensors on devices: host memory is copied there while more is read.

The devices are simulated: a copy is made when something waits for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.simulated import simulate_torch
from support.strategies import examples, laid_out

import unickpt
from unickpt import CheckpointCorrupt, Checkpointer, LoadOptions, Rules, SaveOptions
from unickpt.adapters import torch as torch_adapter
from unickpt.adapters import torch_cuda
from unickpt.format import chunk_grid
from unickpt.format.index import ArrayEntry
from unickpt.reading import staging
from unickpt.testing import Threads
from unickpt.types import Box, LocalFragments

CHUNK = 4096
FAST = SaveOptions(fsync=False, chunk_bytes=CHUNK)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Tensors are on a device, whose copies wait in this stream."""
    return simulate_torch(monkeypatch)


def values(n: int) -> dict[str, torch.Tensor]:
    return {
        "vector": torch.arange(7.0) + n,
        "bfloat16": torch.full((3, 5), n, dtype=torch.bfloat16),
        "scalar": torch.tensor(n),
        "flags": torch.arange(9) % (n + 2) == 0,
        "complex": torch.full((4,), n + 1j),
        "float8": torch.full((3,), float(n)).to(torch.float8_e5m2),
        "int16": torch.arange(5, dtype=torch.int16) + n,
        "empty": torch.zeros(0, 3),
        "large": torch.arange(300_000.0).reshape(300, 1000) + n,
        "whole chunk": torch.arange(1024.0) + n,
    }


def memory_like(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of each shape and dtype, in memory of many kinds."""
    like = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    like["vector"] = torch.nn.Parameter(like["vector"])
    like["complex"] = torch.zeros(4, dtype=torch.complex64).conj()
    like["large"] = torch.zeros(1000, 300).T
    like["int16"] = torch.zeros(10, dtype=torch.int16)[::2]
    with torch.inference_mode():
        like["bfloat16"] = torch.zeros(3, 5, dtype=torch.bfloat16)
    return like


def bits(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    plain = (
        tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    )
    raw = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return tensor.dtype, tuple(tensor.shape), raw


def all_bits(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: bits(tensor) for name, tensor in tree.items()}


def both_bits(state: dict[str, Any], like: dict[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Compares the bits of two trees, which are on the host again."""
    patch.undo()
    assert all_bits(like) == all_bits(state)


@pytest.mark.parametrize("budget", [None, 1, 20_000])
@pytest.mark.parametrize("verify", [True, False])
def test_tensors_of_every_kind(
    budget: int | None, verify: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = values(3)
    unickpt.save(tmp_path / "c", state, options=FAST)
    like = memory_like(state)
    simulate_torch(monkeypatch)
    options = LoadOptions(verify=verify, budget_bytes=budget)
    loaded, report = unickpt.load(tmp_path / "c", like, return_report=True, options=options)
    assert all(loaded[name] is like[name] for name in like)
    assert report.read_bytes == report.bytes == unickpt.open(tmp_path / "c").nbytes
    both_bits(state, like, monkeypatch)


def test_small_tensors_are_copied_together(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{n} {dtype}": torch.full((n, 3), n).to(dtype) for n in range(60)
             for dtype in (torch.float32, torch.int32, torch.bool, torch.float64)}  # fmt: skip
    unickpt.save(tmp_path / "c", state, options=FAST)
    like = {name: torch.ones_like(tensor) for name, tensor in state.items()}
    stream.copies = 0
    unickpt.load(tmp_path / "c", like)
    assert stream.copies == 1
    both_bits(state, like, monkeypatch)


def test_the_host_has_no_more_memory_than_the_budget(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budget, make = 8 * CHUNK, torch_cuda.buffer_for_cuda
    state = {
        "large": torch.arange(100.0 * CHUNK),
        "wide": torch.arange(50.0 * CHUNK).reshape(2, -1),
    }
    unickpt.save(tmp_path / "c", state, options=FAST)
    like = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stream.run()
    sizes: list[int] = []

    def made(shape: tuple[int, ...], dtype: Any) -> Any:
        memory = make(shape, dtype)
        sizes.append(memory.nbytes)
        return memory

    monkeypatch.setattr(torch_cuda, "buffer_for_cuda", made)
    monkeypatch.setattr(torch_adapter, "buffer_for_cuda", made)
    loading = LoadOptions(budget_bytes=budget)
    _, report = unickpt.load(tmp_path / "c", like, return_report=True, options=loading)
    assert report.read_bytes == sum(tensor.nbytes for tensor in state.values())  # each byte once
    assert max(sizes) <= budget // 2
    both_bits(state, like, monkeypatch)


def test_only_so_many_copies_are_under_way(stream: Any) -> None:
    uploader = torch_cuda.CudaUploader(torch.device("cpu"))
    tensors = [torch.zeros(5) for _ in range(9)]
    most = 0
    for number, tensor in enumerate(tensors):
        (memory,), start = uploader.stage([tensor])
        memory[:] = number
        start()
        most = max(most, len(uploader._copying))
    assert most == torch_cuda._COPIES
    uploader.close()
    assert not uploader._copying
    assert not stream.queue
    assert [tensor[0].item() for tensor in tensors] == list(range(9))


def test_tied_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tied = torch.arange(4096.0).reshape(64, 64)
    unickpt.save(tmp_path / "c", {"a": tied, "b": tied}, options=FAST)
    memory = torch.zeros(64, 64)
    like = {"a": memory, "b": memory.detach()}
    stream = simulate_torch(monkeypatch)
    _, report = unickpt.load(tmp_path / "c", like, return_report=True)
    assert stream.copies == 1
    assert report.read_bytes == tied.nbytes
    both_bits({"a": tied, "b": tied}, like, monkeypatch)


def test_tensors_that_share_a_part_of_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"whole": torch.arange(4000.0), "head": torch.arange(10.0)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    memory = torch.zeros(4000)
    like = {"whole": memory, "head": memory[:10]}
    simulate_torch(monkeypatch)
    unickpt.load(tmp_path / "c", like)
    both_bits(state, like, monkeypatch)


def test_casts_compressed_arrays_and_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = torch.arange(300 * 200.0).reshape(300, 200)
    unickpt.save(tmp_path / "c", {"up": {"kernel": kernel}}, options=FAST)
    rules = Rules.parse("{m...}/kernel [i o] <-> {m...}.weight [o i]")
    turned, half = {"up.weight": torch.zeros(200, 300)}, {"up": {"kernel": kernel.half() * 0}}
    with monkeypatch.context() as patch:
        simulate_torch(patch)
        unickpt.load(tmp_path / "c", turned, rules=rules)
        unickpt.load(tmp_path / "c", half, cast=True)
    assert bits(turned["up.weight"]) == bits(kernel.T)
    assert bits(half["up"]["kernel"]) == bits(kernel.half())


@pytest.mark.plugins
@pytest.mark.parametrize("codec", ["zstd", "auto"])
def test_compressed_arrays(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(50_000.0), "b": torch.arange(30).bfloat16()}
    options = SaveOptions(fsync=False, chunk_bytes=CHUNK, compression=codec)
    unickpt.save(tmp_path / "c", state, options=options)
    like = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    simulate_torch(monkeypatch)
    unickpt.load(tmp_path / "c", like)
    both_bits(state, like, monkeypatch)


def test_fragments(stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.arange(90 * 70.0).reshape(90, 70)
    unickpt.save(tmp_path / "c", {"w": whole}, options=FAST)
    boxes = [Box((3, 0), (50, 70)), Box((50, 2), (90, 9)), Box((0, 0), (0, 70))]
    tensors = [torch.zeros(box.shape) for box in boxes]
    stream.copies = 0
    like = {"w": LocalFragments((90, 70), list(zip(boxes, tensors, strict=True)))}
    unickpt.load(tmp_path / "c", like)
    assert stream.copies == 1
    monkeypatch.undo()
    for box, tensor in zip(boxes, tensors, strict=True):
        assert bits(tensor) == bits(whole[box.slices])


def test_tensors_on_devices_and_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if both load one array."""
    state = {"a": np.arange(5000.0), "b": np.arange(9), "c": np.arange(3000.0)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    tied = {"a": torch.zeros(5000, dtype=torch.float64), "x": np.zeros(5000), "b": np.zeros(9, int)}
    rules = Rules.parse("a <-> a = x\nb <-> b\nc <-> drop")
    simulate_torch(monkeypatch)
    unickpt.load(tmp_path / "c", tied, rules=rules)
    monkeypatch.undo()
    assert np.array_equal(tied["a"].numpy(), state["a"])
    assert np.array_equal(tied["x"], state["a"])
    assert np.array_equal(tied["b"], state["b"])


def test_without_room_on_the_device(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"{n}": torch.arange(n) for n in range(9)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    like = {name: torch.zeros_like(tensor) for name, tensor in state.items()}

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    unickpt.load(tmp_path / "c", like)
    both_bits(state, like, monkeypatch)


def damage(path: Path) -> None:
    """Changes a byte in the middle of the largest data file."""
    file = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def test_after_damage_no_copy_is_under_way(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {str(n): torch.arange(5000.0) + n for n in range(40)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    damage(tmp_path / "c")
    like = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stream.copies = 0
    with pytest.raises(CheckpointCorrupt, match="do not match their digest"):
        unickpt.load(tmp_path / "c", like, options=LoadOptions(budget_bytes=50_000))
    assert stream.copies
    assert not stream.queue
    monkeypatch.undo()
    for name, tensor in like.items():  # what was not read was not copied
        assert bits(tensor) in (bits(state[name]), bits(tensor * 0)), name


def test_a_damaged_step_gives_way_to_the_one_before(
    stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = [{str(n): torch.arange(5000.0) + n + 100 * step for n in range(40)} for step in (1, 2)]
    with Checkpointer(tmp_path, options=FAST) as run:
        for step, state in enumerate(states, 1):
            run.save(step, state, wait=True)
        damage(next(path for path in tmp_path.iterdir() if path.name.endswith("2")))
        like = {name: torch.zeros(5000) for name in states[0]}
        run.load(like, fallback=True)
    both_bits(states[0], like, monkeypatch)


@pytest.mark.plugins
def test_only_what_changed(stream: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = values(1), {**values(1), "large": values(2)["large"]}
    unickpt.save(tmp_path / "1", before, options=FAST)
    unickpt.save(tmp_path / "2", after, options=FAST)
    like = {name: tensor.clone() for name, tensor in before.items()}
    stream.run()
    stream.copies = 0
    unickpt.load(tmp_path / "2", like, since=tmp_path / "1")
    assert stream.copies
    both_bits(after, like, monkeypatch)


@pytest.mark.plugins
def test_processes_that_read_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = values(4)
    unickpt.save(tmp_path / "c", state, options=FAST)
    likes = [memory_like(state) for _ in range(3)]

    def load(index: int, options: LoadOptions) -> None:
        unickpt.load(tmp_path / "c", likes[index], options=options)

    simulate_torch(monkeypatch)
    assert Threads(3).run(load) == [None] * 3
    monkeypatch.undo()
    for like in likes:
        assert all_bits(like) == all_bits(state)


def test_strided_tensors_on_the_host_are_filled_without_other_memory(tmp_path: Path) -> None:
    state = {"turned": torch.arange(6000.0).reshape(60, 100), "steps": torch.arange(700)}
    unickpt.save(tmp_path / "c", state, options=FAST)
    like = {"turned": torch.zeros(100, 60).T, "steps": torch.zeros(1400, dtype=torch.int64)[::2]}
    versions = [tensor._version for tensor in like.values()]
    for tensor in like.values():
        memory = torch_adapter.target(tensor).buffer(0)
        assert memory.__array_interface__["data"][0] == tensor.data_ptr()
    unickpt.load(tmp_path / "c", like)
    assert all_bits(like) == all_bits(state)
    assert all(t._version > v for t, v in zip(like.values(), versions, strict=True))


@examples(100)
@given(st.data())
def test_parts_of_a_box_cover_it_and_share_no_chunk(data: st.DataObject) -> None:
    shape, layout = data.draw(laid_out())
    chunk = tuple(data.draw(st.integers(1, max(1, n))) for n in shape)
    cut = tuple(d for d, axes in enumerate(layout.dims) if axes and data.draw(st.booleans()))
    entry = ArrayEntry("w", shape, "float32", chunk, layout, cut)
    bounds = [sorted((data.draw(st.integers(0, n)), data.draw(st.integers(0, n)))) for n in shape]
    box = Box(tuple(a for a, _ in bounds), tuple(b for _, b in bounds))
    assume(not box.empty)
    most = data.draw(st.integers(1, 200))
    pieces = staging.pieces_of(entry, box, most)
    covered = np.zeros(shape, int)
    for piece in pieces:
        covered[piece.slices] += 1
    assert (covered[box.slices] == 1).all()
    assert covered.sum() == box.size
    for part in chunk_grid.parts(entry):
        for number in range(part.count):
            needing = [p for p in pieces if p.intersect(part.chunk_box(number)) is not None]
            assert len(needing) <= 1, (part.chunk_box(number), pieces)
    if not cut and shape and len(pieces) == 1 and 4 * box.size > most:  # no chunk ends within it
        assert any(
            a // c == (b - 1) // c for a, b, c in zip(box.start, box.stop, chunk, strict=True)
        )
