"""Processes that load together read each chunk once in all; failures of one are errors of all."""

from __future__ import annotations

import json
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TESTS
from support.counts import ChunkRead
from support.processes import Processes
from support.rule_cases import flat_names

import unickpt
from unickpt import (
    CheckpointCorrupt,
    CheckpointNotFound,
    LoadMismatch,
    LoadOptions,
    ProcessGroup,
    Rules,
    SaveOptions,
)
from unickpt.errors import CheckpointReplaced, ProcessFailed
from unickpt.format import index
from unickpt.plugins.exchange import collective_read
from unickpt.plugins.exchange.shared_read import Waiting, moved_bytes, schedule
from unickpt.reading.array_reader import LoadCounts
from unickpt.testing.thread_groups import Threads
from unickpt.types import Box, LocalFragments

HERE = Path(TESTS)
RULES = """
    q   [l e h (pair half)] <-> layers.{l}.q [(h half pair) e]    half=2
    qkv [l e (a + b)]       <-> layers.{l}.a [a e], layers.{l}.b [b e]            a=40
    mlp [l e f]             <-> layers.{l}.mlp [e f]
    norm [l e] * 2          <-> layers.{l}.norm [e]
"""
L, E, H, D, A, B, F = 4, 48, 3, 16, 40, 24, 80
SHAPES = {"q": (L, E, H, D), "qkv": (L, E, A + B), "mlp": (L, E, F), "norm": (L, E)}
SMALL = SaveOptions(chunk_bytes=16 * E, fsync=False)


def left() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.random(shape, np.float32) for name, shape in SHAPES.items()}


# --- what a load reports ------------------------------------------------------------------------


@pytest.mark.parametrize("slow", [0, 2])
def test_a_report_says_what_was_read_and_received_and_for_whom_it_waited(
    slow: int, tmp_path: Path
) -> None:
    state = {"w": np.arange(3000.0)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(chunk_bytes=1000, fsync=False))

    def load(process: int, options: LoadOptions) -> Any:
        if process == slow:
            time.sleep(1.0)
        _, report = unickpt.load(tmp_path / "c", options=options, return_report=True)
        return report, report.gather(options.group)

    loads = Threads(3).run(load)
    reports = [report for report, _ in loads]
    assert sum(report.read_bytes for report in reports) == 24_000, "each byte once"
    for process, (report, figures) in enumerate(loads):
        assert report.bytes == 24_000 == report.read_bytes + report.received_bytes
        assert 0 < report.received_bytes < 24_000
        assert report.gb_per_s == report.bytes / 1e9 / report.seconds
        assert f"{report.seconds:.3g} s" in report.speed_text
        assert len(figures) == 3
        for other, theirs in zip(reports, figures, strict=True):
            assert theirs.read_bytes == other.read_bytes
            assert theirs.waited_for == pytest.approx(other.waited_for)
        if process != slow:
            assert report.waited_for[slow] > 0.5
            assert report.waited_s >= report.waited_for[slow]
            assert f"most for process {slow}" in report.speed_text
        else:
            assert slow not in report.waited_for
        assert str(report) == f"{tmp_path / 'c'}: loaded 1 leaf\n  {report.speed_text}"


SECONDS = st.lists(st.floats(0, 100), min_size=3, max_size=3)


@settings(deadline=None)
@given(st.lists(SECONDS, max_size=6))
def test_a_process_waits_for_the_one_that_comes_last(steps: list[list[float]]) -> None:
    for process in range(3):
        counts = LoadCounts()
        waiting = Waiting(counts, process, [10, 11, 12])
        for seconds in steps:
            waiting.learn(seconds)
        waited = [seconds[process] - min(seconds) for seconds in steps]
        assert counts.waited_s == pytest.approx(sum(waited))
        assert sum(counts.waited_for.values()) == pytest.approx(counts.waited_s)
        last = {10 + seconds.index(min(seconds)) for seconds in steps}
        assert set(counts.waited_for) <= last - {10 + process}


# --- who reads what -------------------------------------------------------------------------------


@st.composite
def wanted(draw: st.DrawFn) -> tuple[Any, list[dict[str, list[Box]]]]:
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    chunk = tuple(draw(st.integers(1, n)) for n in shape)
    layout = unickpt.types.Layout.replicated(len(shape), 1)
    entry = index.ArrayEntry("x", shape, "int16", chunk, layout)

    def box() -> Box:
        ends = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
        return Box(tuple(a for a, _ in ends), tuple(max(b, a) for a, b in ends))

    wants = []
    for _ in range(draw(st.integers(1, 5))):
        boxes = [b for b in (box() for _ in range(draw(st.integers(0, 3)))) if not b.empty]
        wants.append({"x": boxes})
    return entry, wants


@settings(deadline=None, max_examples=150)
@given(wanted(), st.integers(1, 200))
def test_every_box_comes_out_of_chunks_that_one_process_reads(case: Any, budget: int) -> None:
    entry, wants = case
    rounds = schedule([entry], wants, moved_bytes, budget)
    found = [np.zeros(entry.shape, int) for _ in wants]
    for chunks in rounds:
        held: Counter[int] = Counter()
        for chunk in chunks:
            assert chunk.owner in chunk.wanted_boxes
            for process, boxes in chunk.wanted_boxes.items():
                for box in boxes:
                    assert chunk.box.contains(box)
                    found[process][box.slices] += 1
                    held[process] += 2 * box.size
                    held[chunk.owner] += 2 * box.size if process != chunk.owner else 0
        assert len(chunks) == 1 or max(held.values()) <= budget
    for process, of_process in enumerate(wants):
        expected = np.zeros(entry.shape, int)
        for box in of_process["x"]:
            expected[box.slices] += 1
        assert np.array_equal(found[process], expected)
    numbers = [chunk.number for chunks in rounds for chunk in chunks]
    assert numbers == sorted(set(numbers)), "each chunk once"


def test_the_reading_is_spread_evenly() -> None:
    """Replicas of all, and a chunk that only one needs."""
    layout = unickpt.types.Layout.replicated(1, 1)
    entry = index.ArrayEntry("x", (64,), "int8", (4,), layout)
    whole, last = Box((0,), (64,)), Box((60,), (64,))
    rounds = schedule([entry], [{"x": [whole]}] * 3 + [{"x": [last]}], moved_bytes, 1 << 20)
    owners = Counter(chunk.owner for chunks in rounds for chunk in chunks)
    assert sorted(owners.values()) == [1, 5, 5, 5]
    assert owners[3] == 1


# --- loads together -------------------------------------------------------------------------------


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 12])
def test_threads_with_boxes_of_their_own(
    budget_bytes: int, tmp_path: Path, chunk_reads: list[ChunkRead]
) -> None:
    """Any boxes, any trees, replicas, arithmetic and casts: all in one load."""
    data = left()
    unickpt.save(tmp_path / "c", {**data, "step": 3}, options=SMALL)
    rules = Rules.parse(RULES + "step <-> step")
    made = flat_names(unickpt.load(tmp_path / "c", rules=rules))
    chunk_reads.clear()
    rng = np.random.default_rng(5)

    def likes(index: int) -> dict[str, Any]:
        found: dict[str, Any] = {"step": 0}
        for name, x in made.items():
            if name == "step" or (index == 3 and name != "layers.1.q"):
                continue  # the last one wants a little
            if index == 2:
                found[name] = np.zeros(x.shape, x.dtype)  # all
                continue
            start = [int(rng.integers(0, n)) for n in x.shape]
            stop = [int(rng.integers(a, n)) + 1 for a, n in zip(start, x.shape, strict=True)]
            box = Box(tuple(start), tuple(stop))
            found[name] = LocalFragments(x.shape, [(box, np.zeros(box.shape, np.float64))])
        return found

    every = [likes(index) for index in range(4)]

    def work(index: int, options: LoadOptions) -> Any:
        like = every[index]
        return unickpt.load(
            tmp_path / "c", like, rules=rules, strict=False, cast=True, options=options
        )

    for process, result in enumerate(Threads(4).run(work, budget_bytes=budget_bytes)):
        if isinstance(result, Exception):
            raise result
        assert result["step"] == 3
        for name in every[process].keys() - {"step"}:
            if isinstance(result[name], LocalFragments):
                ((box, found),) = result[name].fragments
                assert np.array_equal(found, made[name][box.slices].astype(np.float64)), name
            else:
                assert np.array_equal(result[name], made[name]), name
    stored = unickpt.open(tmp_path / "c")
    every_chunk = {
        (p.key, n) for array in stored.values() for p in array.parts for n in range(p.count)
    }
    assert Counter(chunk[:2] for chunk in chunk_reads) == Counter(every_chunk)


def test_without_like_and_tied(tmp_path: Path, chunk_reads: list[ChunkRead]) -> None:
    x = np.arange(600.0).reshape(30, 20)
    tree = {
        "a": x,
        "b": x,
        "none": np.zeros((0, 2)),
        "one": np.float32(3),
        "s": "text",
        "failed": x,
    }
    unickpt.save(tmp_path / "c", tree, options=SaveOptions(chunk_bytes=500))
    for result in Threads(3).run(lambda i, o: unickpt.load(tmp_path / "c", options=o)):
        assert result["a"] is result["b"]
        assert np.array_equal(result["a"], x)
        assert (result["none"].shape, result["one"], result["s"]) == ((0, 2), 3, "text")
    assert len(chunk_reads) == len(set(chunk_reads))
    assert chunk_reads


def test_one_process_alone_needs_nobody(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones(3)})
    found = unickpt.load(tmp_path / "c", options=LoadOptions(exchange=True))
    assert np.array_equal(found["a"], np.ones(3))


# --- failures -------------------------------------------------------------------------------------


def failing(results: list[Any], one: int, error: type[Exception], text: str) -> None:
    """One failed so, and the others tell it."""
    others = error if error in (CheckpointCorrupt, CheckpointNotFound) else ProcessFailed
    for process, result in enumerate(results):
        assert type(result) is (error if process == one else others), result
        assert text in str(result)
        assert process == one or str(result).startswith(f"process {one} failed: {error.__name__}")


@pytest.mark.parametrize(
    ("path", "like", "error", "text"),
    [
        ("c", {"b": np.zeros(3)}, LoadMismatch, "missing"),
        ("c", {"a": np.zeros((5, 3))}, LoadMismatch, "shape"),
        ("nowhere", {"a": np.zeros((3, 5))}, CheckpointNotFound, "nowhere"),
    ],
)
def test_a_process_that_asks_for_what_is_not_there(
    path: str, like: Any, error: type[Exception], text: str, tmp_path: Path
) -> None:
    unickpt.save(tmp_path / "c", {"a": np.ones((3, 5))})

    def work(index: int, options: LoadOptions) -> Any:
        if index == 1:
            return unickpt.load(tmp_path / path, like, options=options)
        return unickpt.load(tmp_path / "c", {"a": np.zeros((3, 5))}, options=options)

    failing(Threads(3).run(work), 1, error, text)


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 12])
def test_a_damaged_chunk(budget_bytes: int, tmp_path: Path) -> None:
    """Whoever reads it knows; the others are told, in an early round or in the last one."""
    x = np.random.default_rng(0).random((64, 64))
    for row in (5, 40, 63):
        path = tmp_path / str(row)
        unickpt.save(path, {"x": x}, options=SaveOptions(chunk_bytes=1 << 10))
        whole = x[row].tobytes()
        (file,) = (f for f in path.rglob("*") if f.is_file() and whole in f.read_bytes())
        file.write_bytes(file.read_bytes().replace(whole[:8], whole[8:16]))
        results = Threads(3).run(
            lambda i, o, path=path: unickpt.load(path, {"x": np.zeros_like(x)}, options=o),
            budget_bytes=budget_bytes,
        )
        (one,) = (i for i, r in enumerate(results) if not str(r).startswith("process "))
        failing(results, one, CheckpointCorrupt, "array 'x'")


def test_the_first_of_several_failures_decides(tmp_path: Path) -> None:
    """All go on in the same way, as with an older step, or not at all."""
    unickpt.save(tmp_path / "c", {"a": np.ones(3)})

    def work(index: int, options: LoadOptions) -> Any:
        path = tmp_path / ("none" if index == 1 else "c")
        like = {"b" if index == 2 else "a": np.zeros(3)}
        return unickpt.load(path, like, options=options)

    results = Threads(4).run(work)
    assert [type(result) for result in results] == [CheckpointNotFound] * 4
    assert isinstance(results[2].__cause__, LoadMismatch)
    assert str(results[2]).startswith("process 1 failed: CheckpointNotFound: ")


@pytest.mark.parametrize("name", ["c", "c.npz"])
def test_processes_with_different_paths_are_an_error_that_names_them(
    name: str, tmp_path: Path
) -> None:
    """Checkpoints of other systems have no identity but their paths."""
    for number in range(2):
        (tmp_path / f"{number}").mkdir()
        path, x = tmp_path / f"{number}" / name, np.full((30, 20), float(number))
        np.savez(path, x=x) if name == "c.npz" else unickpt.save(path, {"x": x})

    def work(process: int, options: LoadOptions) -> Any:
        path = tmp_path / f"{int(process == 1)}" / name
        return unickpt.load(path, {"x": np.zeros((30, 20))}, options=options)

    for result in Threads(3).run(work):
        assert type(result) is CheckpointReplaced
        assert f"process 0 opened {tmp_path / '0' / name}" in str(result)
        assert f"process 1 opened {tmp_path / '1' / name}" in str(result)


def test_a_process_that_compares_no_digests_does_not_read_for_others(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"x": np.ones((30, 20))})

    def work(process: int, options: LoadOptions) -> Any:
        options = replace(options, verify=process != 1)
        return unickpt.load(tmp_path / "c", {"x": np.zeros((30, 20))}, options=options)

    for result in Threads(3).run(work):
        assert type(result) is CheckpointReplaced
        assert "verify= differ" in str(result)


def test_all_fall_back_to_an_older_step(tmp_path: Path) -> None:
    for step in (1, 2):
        unickpt.save(tmp_path / f"step_{step}", {"x": np.full(64, step)})
    damaged = np.full(64, 2).tobytes()
    for found in (tmp_path / "step_2").rglob("*"):
        if found.is_file() and damaged in found.read_bytes():
            found.write_bytes(found.read_bytes().replace(damaged, np.full(64, 3).tobytes()))

    def work(index: int, options: LoadOptions) -> Any:
        save = SaveOptions(group=options.group)
        with unickpt.Checkpointer(tmp_path, options=save) as checkpointer:
            return checkpointer.load({"x": np.zeros(64, int)}, fallback=True, options=options)

    for result in Threads(3).run(work):
        assert (result["x"] == 1).all(), result


def test_a_value_that_does_not_fit_in_one_process(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"n": np.arange(8) << 40})

    def work(index: int, options: LoadOptions) -> Any:
        like = {"n": np.zeros(8, np.int32 if index == 2 else np.int64)}
        return unickpt.load(tmp_path / "c", like, cast=True, options=options)

    failing(Threads(3).run(work), 2, LoadMismatch, "requested as int32, which does not hold")


def test_a_group_without_a_way_to_exchange(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"n": np.arange(8)})
    options = LoadOptions(exchange=True, group=ProcessGroup(0, 2, "s"))
    with pytest.raises(ValueError, match=r"give ProcessGroup\(..., exchange=\)"):
        unickpt.load(tmp_path / "c", options=options)


# --- real processes -------------------------------------------------------------------------------

TOGETHER = f"""
    import json, os, sys, time
    import numpy as np
    import unickpt
    from unickpt import LoadOptions
    sys.path.insert(0, {str(HERE)!r})
    from support.counts import chunks_read

    TOGETHER = LoadOptions(exchange=True)
"""


def script(text: str) -> str:
    return textwrap.dedent(TOGETHER) + textwrap.dedent(text)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    unickpt.save(tmp_path / "left", left(), options=SMALL)
    (tmp_path / "rules").write_text(RULES)
    made = flat_names(unickpt.load(tmp_path / "left", rules=Rules.parse(RULES)))
    np.savez(tmp_path / "made.npz", **made)
    return tmp_path


def whole() -> int:
    return sum(x.nbytes for x in left().values())


def test_dtensors_on_four_ranks(stored: Path, processes: Processes) -> None:
    """Every layout, through rules that turn axes: each rank reads a fourth, and all of them one."""
    jobs = processes.torch(
        4,
        script("""
            import torch, torch.distributed as dist
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Replicate, Shard, empty

            folder = sys.argv[1]
            dist.init_process_group("gloo")
            expected = dict(np.load(folder + "/made.npz"))
            rules = unickpt.Rules.load(folder + "/rules")
            rows, columns = Shard(0), Shard(1)
            layouts = [
                ((4,), [rows]), ((4,), [columns]), ((4,), [Replicate()]), ((2, 2), [columns, rows]),
                ((2, 2), [Replicate(), rows]), ((4, 1), [rows, rows]), None,
            ]
            told = []
            for layout in layouts:
                if layout is None:
                    like = {n: torch.zeros(x.shape) for n, x in expected.items()}
                else:
                    mesh = init_device_mesh("cpu", layout[0])
                    with torch.device("meta" if len(layout[0]) == 2 else "cpu"):
                        like = {
                            n: empty(*x.shape, device_mesh=mesh, placements=layout[1])
                            for n, x in expected.items()
                            if x.ndim > 1 or columns not in layout[1]
                        }
                with chunks_read() as seen:
                    made = unickpt.load(
                        folder + "/left", like, rules=rules, strict=False, options=TOGETHER
                    )
                full = {n: x if layout is None else x.full_tensor() for n, x in made.items()}
                right = all(np.array_equal(full[n].numpy(), expected[n]) for n in like)
                told.append([right, sum(chunk.nbytes for chunk in seen)])
            print(json.dumps(told))
            dist.destroy_process_group()
        """),
        stored,
    )
    told = [json.loads(out.splitlines()[-1]) for out in processes.finish(jobs)]
    for of_layout in zip(*told, strict=True):
        assert all(right for right, _ in of_layout), told
        read = [nbytes for _, nbytes in of_layout]
        assert whole() - left()["norm"].nbytes <= sum(read) <= whole(), told
        assert max(read) <= 0.3 * whole(), told


def test_any_layout_into_any_other(processes: Processes, tmp_path: Path) -> None:
    """Also of some ranks, with plain tensors, uneven, and in many rounds; nobody says what it
    needs, but for arrays that no layout describes."""
    jobs = processes.torch(
        4,
        script("""
            import torch, torch.distributed as dist
            from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
            from torch.distributed.tensor import Replicate, Shard, distribute_tensor, empty
            from unickpt.plugins.exchange import collective_read

            dist.init_process_group("gloo")
            rank, rows, columns, copies = dist.get_rank(), Shard(0), Shard(1), Replicate()
            line, square = init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))
            pairs = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
            x = {
                n: torch.from_numpy(np.random.default_rng(len(n)).random(shape, np.float32))
                for n, shape in {"w": (37, 22), "wide": (5, 64), "small": (3, 3)}.items()
            }
            layouts = {
                "rows": (line, [rows]), "columns": (line, [columns]), "plain": None,
                "both": (square, [rows, columns]), "turned": (square, [columns, rows]),
                "twice": (square, [rows, rows]), "copies": (square, [copies, columns]),
                "half": (pairs[rank // 2], [rows]),
            }

            def tree(layout, make):
                if layout is None:
                    return {n: make(full, None, None) for n, full in x.items()}
                mesh, placements = layout
                return {n: make(full, mesh, placements) for n, full in x.items()}

            def new(full, mesh, placements):
                if mesh is None:
                    return torch.zeros(full.shape)
                return empty(*full.shape, device_mesh=mesh, placements=placements)

            assign = collective_read.assign
            nodes = "abab", "aabb", "aaaa", "abbb", "abcd"  # of the ranks
            told, loads = {}, 0
            for number, saved in enumerate(("rows", "both", "twice", "copies")):
                mesh, placements = layouts[saved]
                state = {n: distribute_tensor(full, mesh, placements) for n, full in x.items()}
                options = unickpt.SaveOptions(chunk_bytes=400, fsync=False)
                unickpt.save(f"{sys.argv[1]}/{saved}", state, options=options)
                for name, layout in layouts.items():
                    said = []
                    collective_read.assign = lambda *a: said.append(1) or assign(*a)
                    number += 1  # each layout, saved or loaded, meets both
                    node = nodes[loads % len(nodes)][rank]
                    collective_read.node_name = lambda node=node: node
                    loads += 1
                    budget = (1 << 30, 20_000)[number % 2]
                    options = unickpt.LoadOptions(exchange=True, budget_bytes=budget)
                    like = tree(layout, new)
                    with chunks_read() as seen:
                        unickpt.load(f"{sys.argv[1]}/{saved}", like, options=options)
                    for n, full in x.items():
                        got = like[n] if layout is None else like[n].full_tensor()
                        assert torch.equal(got, full), (saved, name, n)
                    key = f"{saved} {name} {budget}"
                    told[key] = [sum(chunk.nbytes for chunk in seen), len(said)]
            print(json.dumps(told))
            dist.destroy_process_group()
        """),
        tmp_path,
    )
    outs = processes.finish(jobs)
    told = [json.loads(out.splitlines()[-1]) for out in outs]
    nbytes = 4 * (37 * 22 + 5 * 64 + 3 * 3)
    for key in told[0]:
        assert sum(of_rank[key][0] for of_rank in told) == nbytes, key
        # Two meshes that hold the same arrays: to read them once, they say what they need.
        assert all(bool(of_rank[key][1]) == (" half " in key) for of_rank in told), key


@pytest.mark.parametrize("budget_bytes", [1 << 30, 1 << 14])
def test_replicas_on_other_nodes_get_each_byte_once(
    budget_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five processes on two nodes need all of an array: it crosses between them once."""
    state = {"w": np.arange(12_000.0), "n": np.arange(7)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(chunk_bytes=2000, fsync=False))
    nodes, here, crossing = ["x", "y", "x", "y", "y"], threading.local(), Counter[tuple[str, str]]()
    monkeypatch.setattr(collective_read, "node_name", lambda: here.node)

    def load(process: int, options: LoadOptions) -> Any:
        here.node = nodes[process]
        exchange = options.group._exchange

        def counted(data: Any, sent: Sequence[int], received: Sequence[int]) -> Any:
            for other, nbytes in enumerate(sent):
                crossing[nodes[process], nodes[other]] += nbytes
            return exchange(data, sent, received)

        monkeypatch.setattr(options.group, "_exchange", counted)
        return unickpt.load(tmp_path / "c", options=options, return_report=True)

    loaded = Threads(5).run(load, budget_bytes=budget_bytes)
    for values, report in loaded:
        assert np.array_equal(values["w"], state["w"])
        assert np.array_equal(values["n"], state["n"])
        assert report.read_bytes + report.received_bytes == report.bytes
    assert sum(report.read_bytes for _, report in loaded) == 96_056
    between = crossing["x", "y"] + crossing["y", "x"]
    assert 96_056 <= between < 1.6 * 96_056, "with headers; without relays 2.4 times"


def test_rounds_in_which_nothing_is_relayed_have_one_exchange(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four processes, each with rows of its own, and for comparison with replicas."""
    unickpt.save(tmp_path / "c", {"w": np.arange(4096.0)}, options=SMALL)
    here, counts = threading.local(), dict[tuple[str, bool], int]()
    monkeypatch.setattr(collective_read, "node_name", lambda: here.node)
    for nodes in "aaaa", "abab":
        for replicas in False, True:

            def load(process: int, options: LoadOptions) -> Any:
                here.node = nodes[process]  # noqa: B023
                exchange, calls = options.group._exchange, list[int]()

                def counted(*arguments: Any) -> Any:
                    calls.append(1)
                    return exchange(*arguments)

                monkeypatch.setattr(options.group, "_exchange", counted)
                rows, like = np.zeros(1024), None
                if not replicas:  # noqa: B023
                    box = Box((1024 * process,), (1024 * (process + 1),))
                    like = {"w": LocalFragments((4096,), [(box, rows)])}
                unickpt.load(tmp_path / "c", like, options=options)
                if like is not None:
                    assert np.array_equal(rows, np.arange(4096.0)[box.slices])
                return len(calls)

            (counts[nodes, replicas],) = {*Threads(4).run(load)}
    assert counts["abab", False] == counts["aaaa", False]
    assert counts["abab", True] > counts["aaaa", True]


def test_jax_in_two_processes(stored: Path, processes: Processes) -> None:
    jobs = processes.jax(
        2,
        4,
        script("""
            from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

            folder = sys.argv[1]
            expected = dict(np.load(folder + "/made.npz"))
            rules = unickpt.Rules.load(folder + "/rules")
            ordered = sorted(jax.devices(), key=lambda d: (d.process_index, d.id))
            mesh = Mesh(np.array(ordered).reshape(4, 2), ("a", "b"))
            told = []
            for spec in [P("a"), P(None, "a"), P("b", "a"), P(), None]:
                home = None if spec is None else NamedSharding(mesh, spec)
                like = None if spec is None else {
                    n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=home)
                    for n, x in expected.items() if x.ndim > 1 or len(spec) < 2
                }
                with chunks_read() as seen:
                    made = unickpt.load(
                        folder + "/left", like, rules=rules, strict=False, options=TOGETHER
                    )
                right = all(
                    np.array_equal(shard.data, expected[n][shard.index])
                    for n, x in made.items() if like is not None for shard in x.addressable_shards
                )
                told.append([right, sum(chunk.nbytes for chunk in seen)])
            print(json.dumps(told))
        """),
        stored,
    )
    told = [json.loads(out.splitlines()[-1]) for out in processes.finish(jobs)]
    for of_spec in zip(*told, strict=True):
        assert all(right for right, _ in of_spec), told
        assert sum(nbytes for _, nbytes in of_spec) <= whole(), told


def test_a_rank_that_is_killed_is_an_error_soon(stored: Path, processes: Processes) -> None:
    jobs = processes.torch(
        3,
        script("""
            import signal
            import torch.distributed as dist
            from unickpt.format.ocdbt_reader import OcdbtReader

            dist.init_process_group("gloo")
            def die(self, *arguments):
                os.kill(os.getpid(), signal.SIGKILL)
            if dist.get_rank() == 1:
                OcdbtReader.read = die
            begun = time.monotonic()
            try:
                unickpt.load(sys.argv[1] + "/left", options=TOGETHER)
            except unickpt.errors.ProcessFailed as error:
                assert "one of them may have ended" in str(error), error
                assert time.monotonic() - begun < 60
                print("told")
                sys.stdout.flush()
                os._exit(0)  # the process group is broken
        """),
        stored,
    )
    begun = time.monotonic()
    outs = [job.communicate(timeout=120) for job in jobs]
    assert time.monotonic() - begun < 120
    assert [job.returncode for job in jobs] == [0, -9, 0], outs
    assert [out.split() for out, _ in outs] == [["told"], [], ["told"]], outs
