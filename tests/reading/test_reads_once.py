"""A load reads each chunk that it needs once, and nothing else; independent counts say so."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from support.counts import chunks_read, keys_read

import unickpt
from unickpt.reading import read_plan

# Chunks of either size are read in ways of their own.
SIZES = {"small chunks": ((48, 32), 256), "large chunks": ((512, 512), 128 << 10)}
Chunk = tuple[str, int]
Counting = Callable[[Callable[[], Any]], tuple[Any, Counter[Chunk], int]]


def on_mesh(spec: P, *grid: int) -> Callable[[], NamedSharding]:
    devices = np.array(jax.devices()[: math.prod(grid)])
    return lambda: NamedSharding(Mesh(devices.reshape(grid), ("a", "b")[: len(grid)]), spec)


SHARDINGS: dict[str, Callable[[], Any]] = {
    "rows": on_mesh(P("a"), 8),
    "columns": on_mesh(P(None, "a"), 8),
    "squares": on_mesh(P("a", "b"), 4, 2),
    "replicated": on_mesh(P(), 8),
    "half replicated": on_mesh(P("b"), 2, 4),
    "one device": on_mesh(P(), 1),
    "numpy": lambda: None,
}


def bytes_read() -> int:
    """What this process asked the operating system to read, as that counts it."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.fixture
def counting() -> Counting:
    """Runs something; returns its result, the chunks that were read, and the keys that were."""

    def run(work: Callable[[], Any]) -> tuple[Any, Counter[Chunk], int]:
        with keys_read() as read, chunks_read() as seen:
            result = work()
        return result, Counter((key, number) for key, number, _ in seen), read.keys

    return run


def needed(path: Path | str, name: str, *boxes: tuple[slice, ...]) -> Counter[Chunk]:
    """The chunks that hold an element of these boxes, found by looking at every one."""
    stored = unickpt.open(path)[name]
    wanted = np.zeros(stored.shape, bool)
    for box in boxes:
        wanted[box] = True
    return Counter(
        (part.key, number)
        for part in stored.parts
        for number in range(math.prod(part.grid))
        if wanted[part.chunk_box(number).slices].any()
    )


@pytest.fixture(params=("local", "memory"))
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Local files are read without TensorStore."""
    return tmp_path / "c" if request.param == "local" else f"memory://{tmp_path.name}/c"


@pytest.fixture(params=SIZES)
def whole(request: pytest.FixtureRequest) -> tuple[np.ndarray, unickpt.SaveOptions]:
    shape, chunk_bytes = SIZES[request.param]
    data = np.random.default_rng(5).random(shape, np.float32)
    return data, unickpt.SaveOptions(fsync=False, chunk_bytes=chunk_bytes)


@pytest.mark.parametrize("source", SHARDINGS)
def test_a_reshard_reads_each_chunk_once(
    source: str,
    whole: tuple[np.ndarray, unickpt.SaveOptions],
    counting: Counting,
    where: Path | str,
) -> None:
    data, options = whole
    home = SHARDINGS[source]()
    x = data if home is None else jax.device_put(data, home)
    unickpt.save(where, {"x": x, "other": x + 1}, options=options)
    every = needed(where, "x", ())
    assert len(every) >= 8
    for target in SHARDINGS.values():
        home = target()
        like = np.zeros_like(data) if home is None else jax.ShapeDtypeStruct(
            data.shape, data.dtype, sharding=home)  # fmt: skip
        found, chunks, keys = counting(
            lambda like=like: unickpt.load(where, {"x": like}, strict=False)
        )
        assert np.asarray(found["x"]).tobytes() == data.tobytes()
        assert chunks == every
        assert keys == len(every) + 2, "the index, the digests, the chunks"


def test_a_mesh_that_holds_a_part_reads_a_part(
    whole: tuple[np.ndarray, unickpt.SaveOptions], counting: Counting, where: Path | str
) -> None:
    """A process of several reads what its own devices hold: here, two fragments side by side."""
    data, options = whole
    rows = data.shape[0]
    x = jax.device_put(data, SHARDINGS["squares"]())
    unickpt.save(where, {"x": x}, options=options)
    boxes = [
        unickpt.types.Box((0, 3), (rows // 2, 9)),
        unickpt.types.Box((rows // 2, 3), (rows // 2 + 1, 9)),
    ]
    like = unickpt.types.LocalFragments(
        data.shape, [(box, np.zeros(box.shape, np.float32)) for box in boxes]
    )
    found, chunks, keys = counting(lambda: unickpt.load(where, {"x": like}))
    for box, filled in found["x"].fragments:
        assert filled.tobytes() == data[box.slices].tobytes()
    assert chunks == needed(where, "x", *(box.slices for box in boxes))
    assert len(chunks) < len(needed(where, "x", ()))
    assert keys == len(chunks) + 2


INDICES = [
    np.s_[5],
    np.s_[3:9],
    np.s_[:, 3:9],
    np.s_[20:30, 5:6],
    np.s_[-1, -1],
    np.s_[7:7],
    np.s_[40:10:-7, ::5],
    np.s_[..., 4],
    np.s_[...],
]


@pytest.mark.parametrize("source", ["rows", "squares", "one device"])
def test_a_slice_reads_the_chunks_under_it(
    source: str,
    whole: tuple[np.ndarray, unickpt.SaveOptions],
    counting: Counting,
    where: Path | str,
) -> None:
    data, options = whole
    x = jax.device_put(data, SHARDINGS[source]())
    unickpt.save(where, {"x": x}, options=options)
    for index in INDICES:
        stored, _, keys = counting(lambda: unickpt.open(where)["x"])
        assert keys == 1, "the index"
        found, chunks, keys = counting(lambda stored=stored, index=index: stored[index])
        assert found.tobytes() == np.ascontiguousarray(data[index]).tobytes()
        assert chunks == needed(where, "x", span(index, data.shape))
        assert keys == len(chunks) + 1, "the digests, the chunks"


def span(index: Any, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The smallest box around what an index picks."""
    picked = [np.asarray(at[index]) for at in np.indices(shape)]
    if picked[0].size == 0:
        return (slice(0, 0),) * len(shape)
    return tuple(slice(int(at.min()), int(at.max()) + 1) for at in picked)


def test_what_is_not_asked_for_is_not_read(counting: Counting, where: Path | str) -> None:
    tree = {name: np.full((64, 8), i, np.float32) for i, name in enumerate("abc")}
    unickpt.save(where, tree, options=unickpt.SaveOptions(chunk_bytes=256))
    like = {"b": np.zeros((64, 8), np.float32)}
    _, chunks, _ = counting(lambda: unickpt.load(where, like, strict=False))
    assert {key for key, _ in chunks} == {"b"}
    _, chunks, keys = counting(lambda: list(unickpt.open(where)))
    assert (chunks, keys) == (Counter(), 1)


def test_a_reshard_reads_no_byte_twice(tmp_path: Path) -> None:
    """Replicas and columns of what was saved as rows: one pass over the file, however it is cut."""
    data = np.random.default_rng(5).random((1024, 2048), np.float32)
    x = jax.device_put(data, SHARDINGS["rows"]())
    options = unickpt.SaveOptions(fsync=False, chunk_bytes=256 << 10)
    unickpt.save(tmp_path / "c", {"x": x}, options=options)
    for target in ("columns", "replicated", "half replicated"):
        like = jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=SHARDINGS[target]())
        before = bytes_read()
        found = unickpt.load(tmp_path / "c", {"x": like})
        rest = bytes_read() - before - data.nbytes
        assert np.asarray(found["x"]).tobytes() == data.tobytes()
        assert 0 <= rest < 64 << 10, f"{target}: {rest} bytes beside the chunks"


def test_diff_starts_threads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each array that differs, of which there may be 20,000."""
    for seed in (0, 1):
        tree = {f"w{i}": np.full(5, i + seed, np.float32) for i in range(50)}
        unickpt.save(f"memory://diff/threads/{seed}", tree)
    made = []
    init = ThreadPoolExecutor.__init__

    def counted(self: ThreadPoolExecutor, *args: Any, **kwargs: Any) -> None:
        made.append(self)
        init(self, *args, **kwargs)

    monkeypatch.setattr(ThreadPoolExecutor, "__init__", counted)
    report = unickpt.diff("memory://diff/threads/0", "memory://diff/threads/1")
    assert len(report.differences) == 50
    assert len(made) == 2


@pytest.mark.parametrize("kept", [1, 2, 1024])
def test_plans_of_equal_arrays_are_kept_within_a_bound(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_plan, "_KEPT_PLANS", kept)
    planned, plan, bound = [], read_plan._plan, []
    reads = read_plan.Planner.reads

    def counted(self: Any, consumers: Any) -> Any:
        yield from reads(self, consumers)
        bound.append(len(self._known))

    monkeypatch.setattr(read_plan, "_plan", lambda *a: planned.append(a) or plan(*a))
    monkeypatch.setattr(read_plan.Planner, "reads", counted)
    shapes = [(3, 5), (4,), (6,), (2, 3, 4)]  # of several chunks, or they are read whole
    state = {f"{n:02}": np.random.default_rng(n).random(shapes[n % 4]) for n in range(12)}
    unickpt.save(tmp_path / "c", state, options=unickpt.SaveOptions(fsync=False, chunk_bytes=16))
    found = unickpt.load(tmp_path / "c")
    assert all(found[name].tobytes() == array.tobytes() for name, array in state.items())
    assert max(bound) == min(kept, len(shapes))
    assert len(planned) == (len(shapes) if kept == 1024 else len(state))
