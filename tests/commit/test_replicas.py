"""Plain arrays that should be the same on all processes, and are not: those of one are stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt.commit import writer_choice
from unickpt.commit.writer_choice import Shared
from unickpt.format import chunk_grid
from unickpt.saving import fingerprints

TORCH = """
import json, sys, warnings
import numpy as np
import torch
import torch.distributed as dist
import unickpt
from unickpt.saving.fingerprints import sample_indices

root, = sys.argv[1:]
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
told, errors = {}, {}

def options(**more):
    return unickpt.SaveOptions(timeout_s=60, fsync=False, chunk_bytes=256 << 10, **more)

def gather(x):
    every = [None] * world
    dist.all_gather_object(every, x)
    return every

def case(name, tree, **more):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        report = error = None
        try:
            if "staging" in more:
                pending = unickpt.save_async(f"{root}/{name}", tree, options=options(**more))
                pending.wait_staged()
                for x in tree.values():
                    x.fill_(99)
                report = pending.result()
            else:
                report = unickpt.save(f"{root}/{name}", tree, options=options(**more))
        except unickpt.UnickptError as raised:
            error = f"{type(raised).__name__}: {raised}"
    told[name] = {
        "written": gather(report and report.written_bytes),
        "differ": gather(report and report.replicas_differ),
        "warned": gather([f"{w.category.__name__}: {w.message}" for w in seen]),
        "error": gather(error),
    }

large = 1 << 20
case("filled", {"w": torch.full((large,), float(rank)), "ok": torch.arange(float(large))})

def one_element(at, by=2):
    w = torch.arange(float(large)).reshape(256, 4096)
    w[at] += float(rank == by)
    return w

at = tuple(int(i[-2]) for i in sample_indices((256, 4096), 4))
case("sampled", {"w": one_element(at)})
case("unseen", {"w": one_element((255, 4095))})
case("checked", {"w": one_element((255, 4095))}, check_replicas=True)
case("checked little", {"a": {str(i): torch.full((3,), float(rank == 3)) for i in range(4)}},
     check_replicas=True)
case("checked equal", {"w": one_element((0, 0), by=9), "b": torch.ones(3)}, check_replicas=True)
case("equal", {"w": one_element((0, 0), by=9), "n": np.arange(1 << 20), "b": torch.ones(3)})
case("transposed", {"w": torch.ones(256, 4096).T if rank else torch.ones(4096, 256)})
odd = torch.tensor([2, 0, 1], dtype=torch.uint8) if rank else torch.tensor([1, 0, 1]).byte()
case("bools", {"w": odd.view(torch.bool)})
case("numpy", {"n": np.full(large, rank), "s": np.float64(rank), "e": np.zeros((0, rank * 0))})
for mode in ("auto", "copy", "lazy", "reference", "device"):
    case(f"async {mode}", {"w": torch.full((large,), float(rank)), "b": torch.full((3,), rank)},
         staging=mode)
    case(f"async checked {mode}", {"w": torch.full((large,), float(rank == 3))}, staging=mode,
         check_replicas=True)
    case(f"async equal {mode}", {"w": torch.ones(large)}, staging=mode, check_replicas=True)
case("async tight", {"w": torch.full((large,), float(rank))}, staging="auto",
     budget_bytes=1 << 20)

# Stages that hold parts of the tree; the last two have an array that differs.
stage = rank // 2
tree = {"shared": torch.arange(float(large)), f"s{stage}": torch.full((large,), 1.0),
        f"b{stage}": torch.full((5,), float(rank)), f"c{stage}": torch.full((5,), float(rank))}
if stage:
    tree["d"] = torch.full((large,), float(rank))
case("stages", tree)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), *(torch.nn.BatchNorm1d(8) for _ in range(5)))
model = torch.nn.parallel.DistributedDataParallel(model)
torch.manual_seed(rank)
for _ in range(3):
    model(torch.randn(16, 8) * (rank + 1)).square().mean().backward()
state = model.module.state_dict()
mine = {k: v.numpy().copy() for k, v in state.items() if "running" in k}
case("ddp", dict(state))
if rank == 0:
    np.savez(f"{root}/statistics.npz", **mine)
    print(json.dumps(told))
dist.destroy_process_group()
"""


def every(root: Path, name: str) -> dict[str, Any]:
    assert unickpt.verify(root / name).ok
    return unickpt.load(root / name)


def test_four_torch_ranks(processes: Processes, tmp_path: Path) -> None:
    outputs = processes.finish(processes.torch(4, TORCH, tmp_path))
    told = json.loads(outputs[0].splitlines()[-1])
    large = 1 << 20
    arange = np.arange(large, dtype=np.float32)

    def warned(name: str, *words: str, differ: list[str]) -> None:
        case = told[name]
        assert case["error"] == [None] * 4, name
        assert case["differ"] == [differ, [], [], []], name
        assert [len(w) for w in case["warned"]] == [1, 0, 0, 0], name
        (text,) = case["warned"][0]
        assert text.startswith("ReplicasDiffer: "), name
        for word in (*words, "unickpt.PerProcess", "check_replicas=True"):
            assert word in text, (name, text)

    def silent(name: str) -> None:
        case = told[name]
        assert case["error"] == [None] * 4, (name, case)
        assert case["differ"] == [[]] * 4, name
        assert case["warned"] == [[]] * 4, name

    def refused(name: str, *words: str) -> None:
        errors = told[name]["error"]
        assert [e.partition(":")[0] for e in errors] == ["CoverageError", *["ProcessFailed"] * 3]
        for word in (*words, "check_replicas", "Nothing was saved"):
            assert all(word in e for e in errors), (name, errors)
        with pytest.raises(unickpt.CheckpointNotFound):
            unickpt.open(tmp_path / name)

    warned("filled", "'w' (different on processes 1, 2, 3 than on process 0)", differ=["w"])
    found = every(tmp_path, "filled")
    assert (found["w"] == 0).all()
    assert np.array_equal(found["ok"], arange)
    table = unickpt.open(tmp_path / "filled")
    assert table["w"].shape == (large,)

    warned("sampled", "'w' (different on process 2 than on process 0)", differ=["w"])
    assert np.array_equal(every(tmp_path, "sampled")["w"], arange.reshape(256, 4096))
    silent("unseen")  # a sample is a sample
    refused("checked", "'w' (different on process 2 than on process 0)")
    refused("checked little", "'a/{0..3}' (different on process 3 than on process 0)")
    for name in ("checked equal", "equal", "transposed", "bools"):
        silent(name)
    for name in ("checked equal", "equal"):
        assert max(told[name]["written"]) <= 1.1 * sum(told[name]["written"]) / 4
    assert np.array_equal(every(tmp_path, "equal")["w"], arange.reshape(256, 4096))

    warned("numpy", "'n', 's' (different on processes 1, 2, 3 than", differ=["n", "s"])
    assert (every(tmp_path, "numpy")["n"] == 0).all()
    for mode in ("auto", "copy", "lazy", "reference", "device"):
        warned(f"async {mode}", "'w', 'b' (different on processes 1, 2, 3", differ=["w", "b"])
        assert not any(x.any() for x in every(tmp_path, f"async {mode}").values())
        refused(f"async checked {mode}", "'w' (different on process 3")
        silent(f"async equal {mode}")
    warned("async tight", "'w'", differ=["w"])
    assert not every(tmp_path, "async tight")["w"].any()

    warned("stages", "'b0', 'c0' (different on process 1 than on process 0)",
           "(different on process 3 than on process 2)",
           differ=["b0", "c0", "b1", "c1", "d"])  # fmt: skip
    found = every(tmp_path, "stages")
    assert np.array_equal(found["shared"], arange)
    assert (found["s0"] == 1).all()
    assert (found["s1"] == 1).all()
    assert (found["d"] == 2).all()
    assert [set(found[n]) for n in ("b0", "c0", "b1", "c1")] == [{0}, {0}, {2}, {2}]

    warned("ddp", "'{1..5}.running_mean'", "BatchNorm", differ=told["ddp"]["differ"][0])
    found, expected = every(tmp_path, "ddp"), np.load(tmp_path / "statistics.npz")
    assert len(expected.files) == 10
    for name in expected.files:
        assert np.array_equal(found[name], expected[name]), name


JAX = """
import json, sys, warnings
import numpy as np
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import unickpt

root, = sys.argv[1:]
me = jax.process_index()
local = NamedSharding(Mesh(jax.local_devices(), ("x",)), P("x"))
options = unickpt.SaveOptions(timeout_s=60, fsync=False, chunk_bytes=1 << 20)
told = {}
for name, by in ("differ", me), ("equal", 0):
    tree = {
        "w": jnp.full((1 << 20,), by, jnp.float32),
        "split": jax.device_put(np.full((1 << 20, 2), by, np.int32), local),
        "scalar": jnp.asarray(by),
        "key": jax.random.key(by),
    }
    for kind in ("save", "save_async"):
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            report = getattr(unickpt, kind)(f"{root}/{name}_{kind}", tree, options=options)
            report = report if kind == "save" else report.result()
        told[f"{name}_{kind}"] = [report.replicas_differ, [str(w.message) for w in seen]]
print(json.dumps(told))
"""


def test_two_jax_processes_with_arrays_of_their_own(processes: Processes, tmp_path: Path) -> None:
    told = [
        json.loads(t.splitlines()[-1]) for t in processes.finish(processes.jax(2, 2, JAX, tmp_path))
    ]
    for kind in ("save", "save_async"):
        differ, (text,) = told[0][f"differ_{kind}"]
        assert sorted(differ) == ["key", "scalar", "split", "w"]
        assert "(different on process 1 than on process 0)" in text
        assert told[1][f"differ_{kind}"] == [[], []]
        found = every(tmp_path, f"differ_{kind}")
        assert not any(np.asarray(found[name]).any() for name in ("w", "split", "scalar"))
        assert [t[f"equal_{kind}"] for t in told] == [[[], []]] * 2


# --- planning -----------------------------------------------------------------------------------


def gpt2(layers: int = 12, width: int = 768) -> dict[str, tuple[int, ...]]:
    """Shapes of GPT-2 with the moments of AdamW."""
    one: dict[str, tuple[int, ...]] = {"wte": (50257, width), "wpe": (1024, width)}
    for i in range(layers):
        for name, shape in {
            "qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width),
            "down": (4 * width, width), "ln": (width,), "b": (4 * width,),
        }.items():  # fmt: skip
            one[f"h.{i}.{name}"] = shape
    return {f"{kind}/{n}": s for kind in ("p", "m", "v") for n, s in one.items()}


TREES = {
    "gpt2": gpt2(),
    "one dominant embedding": {"wte": (250_000, 1024)} | {f"b{i}": (1024,) for i in range(100)},
    "many small": {f"w{i}": (512, 512) for i in range(400)},
    "many little": {f"b{i}": (1024,) for i in range(9000)} | {"big": (40_000, 4096)},
}


@pytest.mark.parametrize("count", [2, 4, 8, 64])
@pytest.mark.parametrize("tree", TREES)
def test_the_processes_write_as_much_each(tree: str, count: int) -> None:
    units = []
    for name, shape in TREES[tree].items():
        layout = unickpt.types.Layout.replicated(len(shape), count)
        chunk, _ = chunk_grid.chunk_grid(shape, 4, layout, 8 << 20)
        entry = chunk_grid.ArrayEntry(name, shape, "float32", chunk, layout)
        (part,) = chunk_grid.parts(entry)
        units.append(assumed(name, entry.nbytes, part.count, count))
    shares = [writer_choice.shares_of_assumed(units, process) for process in range(count)]
    for at, unit in enumerate(units):
        assert sorted(k for of in shares for k in of[at]) == list(range(unit.chunks))
    single = [(unit.nbytes, bool(shares[0][n])) for n, unit in enumerate(units) if unit.chunks == 1]
    first = [nbytes for nbytes, is_first in single if is_first]
    others = [nbytes for nbytes, is_first in single if not is_first]
    assert max(first, default=0) <= min(others, default=1 << 60), "the smallest come first"
    assert min(others, default=1 << 60) > 64 << 10
    written = [
        sum(unit.nbytes * len(run) / unit.chunks for unit, run in zip(units, of, strict=True))
        for of in shares
    ]
    balance = max(written) / np.mean(written)
    print(f"{tree}, {count} processes: busiest over mean {balance:.3f}")
    # Of thousands of little arrays on many processes, process 0 writes all, and nothing else.
    little = sum(unit.nbytes for unit in units if writer_choice.is_little(unit.nbytes))
    assert balance <= max(1.1, little / np.mean(written))
    assert max(written[1:]) <= 1.1 * np.mean(written)


def assumed(name: str, nbytes: int, chunks: int, processes: int) -> Shared:
    return Shared(name, (0,), tuple(range(processes)), chunks, nbytes)


@pytest.mark.parametrize(
    ("given", "written"),
    [
        ([(8, 1)] * 5, [[5], [0], [0], [0]]),
        ([(8, 1), (12, 3)], [[1, 0], [0, 1], [0, 1], [0, 1]]),
        ([(1 << 20, 1)] * 8, [[2], [2], [2], [2]]),
        ([(1 << 20, 1), (9 << 20, 9)], [[1, 4], [0, 5]]),
        ([(7, 2)], [[2]]),
    ],
)
def test_all_of_what_is_little_comes_from_process_0(
    given: list[tuple[int, int]], written: list[list[int]]
) -> None:
    units = [assumed(str(n), *of, len(written)) for n, of in enumerate(given)]
    for process, expected in enumerate(written):
        chunks: dict[int, int] = {}
        for unit, run in zip(units, writer_choice.shares_of_assumed(units, process), strict=True):
            chunks[unit.nbytes] = chunks.get(unit.nbytes, 0) + len(run)
        assert list(chunks.values()) == expected


def test_a_sample_is_all_of_a_little_array_and_spread_over_a_large_one() -> None:
    assert len(fingerprints.sample_indices((1024,), 4)[0]) == 1024
    rows, columns = fingerprints.sample_indices((256, 4096), 4)
    assert 512 <= len(rows) <= 1024
    assert len(set(rows.tolist())) > 200
    assert len(set(columns.tolist())) > 400
    assert [i.tolist() for i in fingerprints.sample_indices((), 8)] == [[0]]
