"""Processes of a node read shared chunks once, if all come; else, and after any failure, alone."""

from __future__ import annotations

import json
import signal
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support import TESTS
from support.counts import ChunkRead
from support.processes import Processes
from support.s3_server import make_bucket, use

import unickpt
from unickpt import CheckpointCorrupt, LoadMismatch, LoadOptions, SaveOptions
from unickpt.format import chunk_grid, index
from unickpt.frameworks import leaves
from unickpt.plugins.exchange import node_read
from unickpt.plugins.exchange.node_read import SharedMemory
from unickpt.plugins.exchange.node_rendezvous import Arrival, Rendezvous, RendezvousEnded
from unickpt.plugins.exchange.shared_read import Waiting, schedule
from unickpt.reading.array_reader import LoadCounts
from unickpt.types import Box, LocalFragments

SMALL = SaveOptions(chunk_bytes=1 << 10, fsync=False)
X = np.random.default_rng(0).random((64, 32))


is_slow = node_read._is_slow


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four threads are the processes of a node, for which any reading twice is worth rendezvous."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(leaves.LocalTarget, "processes", 4)
    monkeypatch.setattr(node_read, "_is_slow", lambda stored: True)
    for name, value in {"_LEAST_BYTES": 1, "_LEAST_ARRAY_BYTES": 1, "_PATIENCE_S": 5.0}.items():
        monkeypatch.setattr(node_read, name, value)


def together(work: Callable[[int], Any], count: int = 4) -> list[Any]:
    """What each thread returns or raises."""

    def one(process: int) -> Any:
        try:
            return work(process)
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def part(array: Any, start: tuple[int, ...], stop: tuple[int, ...]) -> LocalFragments:
    box = Box(start, stop)
    return LocalFragments(array.shape, [(box, np.zeros(box.shape, array.dtype))])


def columns(process: int, array: Any = X) -> LocalFragments:
    """A shard across all chunks, which consist of rows."""
    width = array.shape[1] // 4
    return part(array, (0, width * process), (array.shape[0], width * (process + 1)))


def is_right(found: LocalFragments, array: Any = X) -> bool:
    return all(np.array_equal(data, array[box.slices]) for box, data in found.fragments)


def load(path: Path, like: Any, **options: Any) -> Any:
    return unickpt.load(path, like, strict=False, options=LoadOptions(**options))


# --- who reads what -------------------------------------------------------------------------------


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Any, list[dict[str, list[Box]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunk = tuple(draw(st.integers(1, n)) for n in shape)
    layout = unickpt.types.Layout.replicated(len(shape), 1)
    entry = index.ArrayEntry("x", shape, "int16", chunk, layout)

    def box() -> Box:
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))

    def boxes() -> list[Box]:
        return [b for b in (box() for _ in range(draw(st.integers(0, 3)))) if not b.empty]

    return entry, [{"x": boxes()} for _ in range(draw(st.integers(1, 5)))]


class _Here(Rendezvous):
    """Processes that are all this one."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(index, [], [0] * count)

    def share(self, nbytes: int) -> list[Any]:
        return [np.zeros(nbytes, np.uint8) for _ in range(self.count)]


def many_rounds() -> tuple[Any, list[dict[str, list[Box]]]]:
    entry = index.ArrayEntry("x", (60,), "int16", (4,), unickpt.types.Layout.replicated(1, 1))
    return entry, [{"x": [Box((0,), (60,))]}] * 3


@settings(deadline=None, max_examples=150)
@example(many_rounds(), 64)
@given(wanted(), st.integers(64, 1000))
def test_each_chunk_is_read_once_into_memory_of_its_own(case: Any, most: int) -> None:
    entry, wants = case
    rounds = schedule([entry], wants, node_read._shared_bytes, most)
    numbers: list[int] = []
    memory = SharedMemory(_Here(0, len(wants)), rounds, Waiting(LoadCounts(), 0))
    for number, chunks in enumerate(rounds):
        begun, used = memory.begin(number, chunks), Counter[int]()
        for chunk in chunks:
            numbers.append(chunk.number)
            assert chunk.owner in chunk.wanted_boxes
            assert begun.is_received(chunk) == (len(chunk.wanted_boxes) > 1)
            for box, there in begun.to_fill(chunk):
                assert box == chunk.box
                assert there.shape == box.shape
                assert not there.any(), "two chunks of a round never overlap"
                there[...] = 1 + chunk.number
                used[chunk.owner] += -(-there.nbytes // 64) * 64
        assert len(chunks) == 1 or max(used.values(), default=0) <= most
        for chunk in chunks:
            if begun.is_received(chunk):
                ((box, there),) = begun.received(chunk)
                assert (there == 1 + chunk.number).all()
        before = rounds[max(0, number - 2) : number]
        for number_before, chunks in enumerate(before, max(0, number - 2)):
            for chunk in chunks:
                for _, there in memory.begin(number_before, chunks).to_fill(chunk):
                    assert (there == 1 + chunk.number).all(), "two rounds later it is still there"
        for chunk in rounds[number - 2] if number > 1 else ():
            for _, there in memory.begin(number - 2, rounds[number - 2]).to_fill(chunk):
                there[...] = 0
    expected = {
        n
        for of in wants
        for box in of["x"]
        for p in chunk_grid.parts(entry)
        for n in p.chunks_in(box)
    }
    assert sorted(numbers) == sorted(expected), "each chunk once"


# --- loads together -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 11])
@pytest.mark.usefixtures("eager")
def test_chunks_that_several_need_are_read_once(
    budget_bytes: int, tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    tree = {str(i): X + i for i in range(3)} | {"step": 7}
    unickpt.save(tmp_path / "c", tree, options=SMALL)

    def work(process: int) -> Any:
        like = {str(i): columns(process) for i in range(3)} | {"step": 0}
        return load(tmp_path / "c", like, budget_bytes=budget_bytes)

    for found in together(work):
        assert found["step"] == 7
        assert all(is_right(found[str(i)], X + i) for i in range(3)), found
    assert len(chunk_reads) == len(set(chunk_reads)) == 3 * X.nbytes >> 10


@pytest.mark.usefixtures("eager")
def test_a_report_counts_what_other_processes_of_the_node_have_read(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)

    def work(process: int) -> Any:
        if process == 1:
            time.sleep(0.5)
        return unickpt.load(tmp_path / "c", {"x": columns(process)}, return_report=True)[1]

    reports = together(work)
    assert sum(report.read_bytes for report in reports) == X.nbytes
    assert sum(report.bytes for report in reports) == X.nbytes
    assert all(report.received_bytes < report.bytes for report in reports)
    assert sum(report.received_bytes for report in reports) > 0
    assert sum(report.waited_s for report in reports) > 0.3


@pytest.mark.usefixtures("eager")
def test_the_smallest_budget_counts_and_plans_must_agree(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_reads: list[ChunkRead]
) -> None:
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)

    def work(process: int) -> Any:
        budget_bytes = 1 << (11 if process == 2 else 30)
        return load(tmp_path / "c", {"x": columns(process)}, budget_bytes=budget_bytes)

    assert all(is_right(found["x"]) for found in together(work))
    assert len(chunk_reads) == X.nbytes >> 10

    def otherwise(entries: Any, wants: Any, held_for: Any, most: int) -> Any:
        changed = threading.current_thread().name.endswith("_1")
        return schedule(entries, wants, held_for, 2048 if changed else most)

    chunk_reads.clear()
    monkeypatch.setattr(node_read, "schedule", otherwise)
    assert all(is_right(found["x"]) for found in together(work))
    assert len(chunk_reads) == X.nbytes >> 8, "each read alone"


@pytest.mark.usefixtures("eager")
def test_processes_that_need_different_arrays_and_parts(
    tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    """Through rules that turn axes, with replicas, and chunks that only one of them needs."""
    unickpt.save(tmp_path / "c", {"a": X, "b": X + 1, "c": X + 2}, options=SMALL)
    rules = unickpt.Rules.parse("a [i o] <-> a [o i]\nb <-> b\nc <-> c")
    likes = [
        {"a": columns(0, X.T), "b": part(X, (0, 0), X.shape)},
        {"a": columns(1, X.T), "b": part(X, (0, 0), X.shape), "c": part(X, (9, 3), (60, 5))},
        {"b": part(X, (0, 0), X.shape)},
        {"a": part(X.T, (0, 0), X.T.shape), "b": columns(3)},
    ]

    def work(process: int) -> Any:
        return unickpt.load(tmp_path / "c", likes[process], rules=rules, strict=False)

    expected = {"a": X.T, "b": X + 1, "c": X + 2}
    for found in together(work):
        assert all(is_right(found[name], expected[name]) for name in found), found
    assert len(chunk_reads) == len(set(chunk_reads))


@pytest.mark.usefixtures("eager")
def test_nobody_waits_for_others_without_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = []

    def never(*given: Any) -> Any:
        met.append(given)
        raise RendezvousEnded("they do not need to meet")

    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    monkeypatch.setattr(node_read, "Arrival", never)
    rows = part(X, (0, 0), (16, 32))  # where chunks end
    assert is_right(load(tmp_path / "c", {"x": rows})["x"])
    assert is_right(load(tmp_path / "c", {"x": columns(1)}, exchange=False)["x"])
    monkeypatch.setattr(leaves.LocalTarget, "processes", 1)  # of this process alone, as is known
    assert is_right(load(tmp_path / "c", {"x": columns(1)})["x"])
    assert np.array_equal(load(tmp_path / "c", {"x": np.zeros_like(X)})["x"], X)
    monkeypatch.setattr(leaves.LocalTarget, "processes", 4)
    monkeypatch.setattr(node_read, "_is_slow", is_slow)
    corner = part(X, (0, 0), (32, 16))  # in half of the chunks: four of them read all twice
    assert is_right(load(tmp_path / "c", {"x": corner})["x"])  # from a disk
    unickpt.save("memory://node/c", {"x": X}, options=SMALL)
    assert is_right(unickpt.load("memory://node/c", {"x": columns(1)})["x"])
    assert not met
    assert is_right(load(tmp_path / "c", {"x": columns(1)})["x"])  # all four times
    assert len(met) == 1
    monkeypatch.setattr(node_read, "_is_slow", lambda stored: True)
    assert is_right(load(tmp_path / "c", {"x": corner})["x"])
    assert len(met) == 2


# --- whoever does not come, or leaves -------------------------------------------------------------


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("missing", ["absent", "elsewhere", "mismatch"])
def test_a_process_that_does_not_come(
    missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_read, "_PATIENCE_S", 0.3)
    for name in ("c", "other"):
        unickpt.save(tmp_path / name, {"x": X}, options=SMALL)

    def work(process: int) -> Any:
        if process != 2 or missing == "elsewhere":
            path = tmp_path / ("other" if process == 2 else "c")
            return load(path, {"x": columns(process)})
        if missing == "mismatch":
            return load(tmp_path / "c", {"x": np.zeros(3)})
        return None

    begun = time.monotonic()
    found = together(work)
    assert time.monotonic() - begun < 4, "nobody waits long"
    assert all(is_right(found[p]["x"]) for p in (0, 1, 3)), found
    if missing == "mismatch":
        assert isinstance(found[2], LoadMismatch)


@pytest.mark.usefixtures("eager")
def test_those_who_read_alone_go_on_together_once_the_last_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_reads: list[ChunkRead]
) -> None:
    """Nobody waits: each reads one array after the other, and looks whether all have come."""
    arrays, alone = {str(i): X + i for i in range(12)}, threading.Semaphore(0)
    unickpt.save(tmp_path / "c", arrays, options=SMALL)
    read_arrays = node_read.read_arrays

    def slowly(*given: Any, **options: Any) -> Any:
        found = read_arrays(*given, **options)
        alone.release()
        time.sleep(0.05)
        return found

    monkeypatch.setattr(node_read, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(node_read, "_ALONE_BYTES", 1)
    monkeypatch.setattr(node_read, "read_arrays", slowly)

    def work(process: int) -> Any:
        if process == 3:
            for _ in range(3):
                alone.acquire(timeout=10)
        return load(tmp_path / "c", {name: columns(process) for name in arrays})

    for found in together(work):
        assert all(is_right(found[name], arrays[name]) for name in arrays), found
    once = len(arrays) * X.nbytes >> 10
    assert once + 3 * X.nbytes // 1024 <= len(chunk_reads) < 3 * once


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("fails", ["os.memfd_create", "os.ftruncate", "mmap"])
def test_without_shared_memory_each_reads_alone(
    fails: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk_reads: list[ChunkRead]
) -> None:
    from unickpt.plugins.exchange import node_rendezvous

    def fail(*given: Any, **options: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    monkeypatch.setattr(f"{node_rendezvous.__name__}.{fails}", fail)
    assert all(is_right(one["x"]) for one in together(lambda p: load_columns(tmp_path, p)))
    assert len(chunk_reads) == 4 * X.nbytes >> 10


def load_columns(folder: Path, process: int) -> Any:
    return load(folder / "c", {"x": columns(process)})


@pytest.mark.usefixtures("eager")
def test_loads_one_after_another_and_of_two_jobs_at_once(
    tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    """Whoever comes makes up the number: it does not matter of which job."""
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    for _ in range(3):
        found = together(lambda p: load(tmp_path / "c", {"x": columns(p % 4)}), 8)
        assert all(is_right(one["x"]) for one in found), found
        assert len(chunk_reads) == 2 * X.nbytes >> 10
        chunk_reads.clear()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("gathers", [1, 2, 3, 4, 5])
def test_a_process_that_leaves_at_any_time(
    gathers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first, which passes on what is told, or another."""
    real, leaves_now = Rendezvous.gather, threading.local()
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    for leaver in (0, 2):

        def gather(self: Rendezvous, told: bytes, leaver: int = leaver) -> list[bytes]:
            leaves_now.count = getattr(leaves_now, "count", 0) + 1
            if self.index == leaver and leaves_now.count == gathers:
                raise MemoryError("no memory")
            return real(self, told)

        monkeypatch.setattr(Rendezvous, "gather", gather)
        found = together(lambda p: load(tmp_path / "c", {"x": columns(p)}, budget_bytes=1 << 11))
        assert all(is_right(one["x"]) for one in found), found


@pytest.mark.usefixtures("eager")
def test_a_damaged_chunk_is_an_error_of_those_who_need_it(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    row = X[40].tobytes()
    (file,) = (f for f in tmp_path.rglob("*") if f.is_file() and row in f.read_bytes())
    file.write_bytes(file.read_bytes().replace(row[:8], row[8:16]))

    def work(process: int) -> Any:
        like = columns(process) if process else part(X, (0, 0), (32, 32))
        return load(tmp_path / "c", {"x": like})

    found = together(work)
    assert is_right(found[0]["x"])
    for error in found[1:]:
        assert isinstance(error, CheckpointCorrupt)
        assert "array 'x'" in str(error)


def test_exchange_is_said_or_left_to_unickpt() -> None:
    with pytest.raises(TypeError, match="exchange='auto' must be True, False or None"):
        LoadOptions(exchange="auto")  # type: ignore[arg-type]


def test_meetings_end_in_time_and_leave_the_name_free() -> None:
    def come(process: int) -> Any:
        with Arrival("test", 3, 5) as others:
            met = others.wait(0.2 if process == 9 else 5)
            if met is None:
                return None
            told = met.gather(bytes([met.index]))
            shared = met.share(100)
            shared[met.index][:] = met.index + 1
            met.gather(b"")
            return met.index, told, [int(memory[99]) for memory in shared]

    assert come(9) is None
    for _ in range(2):
        found = together(come, 3)
        assert sorted(number for number, _, _ in found) == [0, 1, 2]
        assert all(told == [b"\0", b"\1", b"\2"] for _, told, _ in found)
        assert all(ends == [1, 2, 3] for _, _, ends in found)


def test_who_has_come_may_do_other_things_and_leave() -> None:
    def together_with(others: Any) -> int:
        met = others.wait(5)
        assert met is not None
        return len(met.gather(b""))

    with ExitStack() as stack:
        first, third = (stack.enter_context(Arrival("later", 3, 5)) for _ in range(2))
        assert first.wait(0) is None
        with Arrival("later", 3, 5) as second:
            assert second.wait(0) is None
        assert third.wait(0) is None
        assert first.wait(0) is None, "the second has left"
        last = stack.enter_context(Arrival("later", 3, 5))
        come = [first, third, last]
        assert together(lambda process: together_with(come[process]), 3) == [3, 3, 3]
    with ExitStack() as stack:
        with Arrival("later", 2, 5) as first:
            assert first.wait(0) is None
            second = stack.enter_context(Arrival("later", 2, 5))
            assert second.wait(0) is None
        assert second.wait(0) is None, "it is the first now"
        come = [second, stack.enter_context(Arrival("later", 2, 5))]
        assert together(lambda process: together_with(come[process]), 2) == [2, 2]


def test_a_process_that_keeps_others_waiting() -> None:
    def come(process: int) -> Any:
        with Arrival("slow", 2, 0.2) as others:
            met = others.wait(5)
            assert met is not None
            if met.index == 1:
                time.sleep(0.6)
            return met.gather(b"")

    assert all(isinstance(error, RendezvousEnded) for error in together(come, 2))


# --- real processes -------------------------------------------------------------------------------

RANKS = f"""
import json, os, signal, sys, time
import numpy as np
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, empty
import unickpt
from unickpt.plugins.exchange import node_read
sys.path.insert(0, {str(TESTS)!r})
from support.counts import chunks_read

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
os.environ["LOCAL_WORLD_SIZE"] = str(world)
node_read._LEAST_BYTES = node_read._LEAST_ARRAY_BYTES = 1
mesh = init_device_mesh("cpu", (world,))
path, way = sys.argv[1:3]

def like(placement):
    with torch.device("meta"):
        return {{"x": empty(64, 32, dtype=torch.float64, device_mesh=mesh, placements=[placement])}}
"""


@pytest.mark.parametrize("storage", ["object storage", "disk"])
def test_ranks_read_once(
    storage: str, moto: str, processes: Processes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = str(tmp_path / "c")
    if storage == "object storage":
        path = "s3://node-read/c"
        make_bucket(moto, "node-read")
        use(moto, monkeypatch)
    unickpt.save(path, {"x": X}, options=SMALL)
    source = RANKS + textwrap.dedent("""
        node_read._PATIENCE_BYTES = 1
        told = []
        for placement in (Shard(0), Shard(1), Replicate()):
            for exchange in (None, False):
                dist.barrier()
                options = unickpt.LoadOptions(exchange=exchange)
                with chunks_read() as seen:
                    found = unickpt.load(path, like(placement), options=options)["x"]
                whole = found.full_tensor().numpy().tobytes().hex()
                told.append([whole, sum(chunk.nbytes for chunk in seen)])
        print(json.dumps(told))
        dist.destroy_process_group()
    """)
    jobs = processes.torch(4, source, path, "")
    told = [json.loads(out.splitlines()[-1]) for out in processes.finish(jobs)]
    assert all(whole == X.tobytes().hex() for of_rank in told for whole, _ in of_rank)
    read = [sum(nbytes for _, nbytes in of) / X.nbytes for of in zip(*told, strict=True)]
    assert read == [1, 1, 1, 4, 1, 4]


def test_ranks_of_a_role_read_once_among_themselves(processes: Processes, tmp_path: Path) -> None:
    """Three of the four ranks of a node; the fourth loads the same alone, and waits for nobody."""
    unickpt.save(tmp_path / "c", {"x": X}, options=SMALL)
    source = RANKS + textwrap.dedent("""
        node_read._PATIENCE_BYTES, node_read._PATIENCE_S = 1, 30.0
        os.environ["LOCAL_RANK"] = str(rank)
        parts = [0, 2, 3], [1]
        groups, meshes = [], []
        for ranks in parts:
            groups.append(dist.new_group(ranks))
            meshes.append(dist.device_mesh.DeviceMesh("cpu", ranks))
        own = int(rank == 1)
        mesh = meshes[own]
        options = unickpt.LoadOptions(group=groups[own])
        dist.barrier()
        with chunks_read() as seen:
            found = unickpt.load(path, like(Shard(1)), options=options)["x"]
        whole = found.full_tensor().numpy().tobytes().hex()
        print(json.dumps([whole, sum(chunk.nbytes for chunk in seen)]))
        dist.destroy_process_group()
    """)
    jobs = processes.torch(4, source, tmp_path / "c", "")
    told = [json.loads(out.splitlines()[-1]) for out in processes.finish(jobs)]
    assert all(whole == X.tobytes().hex() for whole, _ in told)
    read = [nbytes / X.nbytes for _, nbytes in told]
    assert (read[0] + read[2] + read[3], read[1]) == (1, 1)


def test_ranks_that_do_not_load_alike(processes: Processes, tmp_path: Path) -> None:
    """Each has a path of its own; one loads alone; one is killed amid the load."""
    for name in ("0", "1", "2"):
        unickpt.save(tmp_path / name, {"x": X}, options=SMALL)
    source = RANKS + textwrap.dedent("""
        from unickpt.format.ocdbt_reader import OcdbtReader

        node_read._is_slow = lambda stored: True
        told = []
        for way in ("paths", "alone", "killed"):
            dist.barrier()
            begun = time.monotonic()
            if way == "killed" and rank == 1:
                OcdbtReader.read = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
            if way != "alone" or rank == 1:
                at = f"{path}/{rank if way == 'paths' else 0}"
                found = unickpt.load(at, like(Shard(1)))["x"].to_local().numpy()
                told.append([found.tobytes().hex(), time.monotonic() - begun])
                print(json.dumps(told), flush=True)
        os._exit(0)  # the process group is broken
    """)
    jobs = processes.torch(3, source, tmp_path, "")
    outs = [job.communicate(timeout=120)[0] for job in jobs]
    assert [job.returncode for job in jobs] == [0, -signal.SIGKILL, 0], outs
    for out, begin, end in zip(outs, (0, 11, 22), (11, 22, 32), strict=True):
        told = json.loads(out.splitlines()[-1])
        assert len(told) == 2
        expected = np.ascontiguousarray(X[:, begin:end]).tobytes().hex()
        assert all(found == expected and seconds < 30 for found, seconds in told), told
