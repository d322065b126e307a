"""Cases for test_torch_multiprocess.py: what the ranks of a torch job do together.

Every rank runs all cases of its world, one after the other; a case fails by raising. The truth of
a layout is what torch itself puts where: `distribute_tensor` and FSDP2's own shards, compared
element by element with a global tensor of unique values.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import unickpt
from support.quantized import errors_of
from unickpt.saving import saver

Case = Callable[[Path], None]
CASES: dict[int, list[Case]] = {}
CPU = torch.device("cpu")
SMALL = unickpt.SaveOptions(chunk_bytes=48, fsync=False, timeout_s=20)


def ranks(*worlds: int, of: dict[int, list[Case]] = CASES) -> Callable[[Case], Case]:
    """Says in which worlds a case runs.

    Arguments:
        worlds: numbers of ranks.
        of: where it is listed; other modules have lists of their own.
    """

    def register(case: Case) -> Case:
        for world in worlds:
            of.setdefault(world, []).append(case)
        return case

    return register


# --- helpers --------------------------------------------------------------------------------------

make_mesh = cache(init_device_mesh)  # each new mesh of several axes makes process groups


def numbers(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.arange(1, 1 + int(np.prod(shape))).reshape(shape).to(dtype)


def raw(tensor: Any) -> bytes:
    """The bits of a tensor; of a DTensor those of this rank's part."""
    local = tensor.detach()
    local = (local.to_local() if isinstance(local, DTensor) else local).contiguous()
    data: bytes = local.reshape(-1).view(torch.uint8).numpy().tobytes()
    return data


def spread(full: Any, mesh: DeviceMesh, placements: Sequence[Any]) -> Any:
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def save(path: Path, tree: Any, options: unickpt.SaveOptions = SMALL) -> unickpt.types.SaveReport:
    return unickpt.save(path, tree, options=options)


def check(path: Path, name: str, full: Any) -> unickpt.types.StoredArray:
    """What is stored is the global tensor, whoever asks."""
    stored = unickpt.open(path)[name]
    like = got = torch.zeros_like(full)
    for key in reversed(name.split("/")):
        like = {key: like}
    unickpt.load(path, like, strict=False)
    assert raw(got) == raw(full), f"{name}: {got} is not {full}"
    return stored


def fails(error: type[Exception], action: Callable[[], Any], *words: str) -> None:
    """On every rank: this error, and all words in its message."""
    try:
        action()
    except error as caught:
        message = str(caught)
        assert all(word in message for word in words), message
        return
    raise AssertionError(f"no {error.__name__}")


def refused_here_alone(rank: int, path: Path, tree: Any, *words: str) -> None:
    """One rank cannot save; the others are told why, within seconds, and nothing is committed."""
    started = time.monotonic()
    error = unickpt.UnsupportedLeaf if dist.get_rank() == rank else unickpt.errors.ProcessFailed
    fails(error, lambda: save(path, tree), *words)
    assert time.monotonic() - started < 10
    dist.barrier()
    fails(unickpt.CheckpointNotFound, lambda: unickpt.open(path))


def same_local_state(one: Any, two: Any) -> bool:
    a, b = one.state_dict(), two.state_dict()
    return list(a) == list(b) and all(raw(a[k]) == raw(b[k]) for k in a)


# --- random layouts -------------------------------------------------------------------------------

FUZZED = 12  # with three of each size of chunks
CHUNK_BYTES = (8, 40, 200, 8 << 20)
EXTENTS = (1, 2, 3, 4, 5, 7, 8, 12, 13)
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


@cache
def meshes() -> list[DeviceMesh]:
    """All kinds of meshes of this world, with and without all of its ranks."""
    world = dist.get_world_size()
    grids = {
        4: [(4,), (2, 2), (2, 1, 2)],
        6: [(6,), (3, 2), (2, 3), (1, 3, 2)],
        8: [(8,), (2, 2, 2), (4, 2), (2, 2, 1, 2)],
    }[world]
    parts: list[Any] = [[1, 2], [[0, 2], [1, world - 1]], [2]]
    found = [
        make_mesh("cpu", grid, mesh_dim_names=("a", "b", "c", "d")[: len(grid)]) for grid in grids
    ]
    return found + [
        DeviceMesh("cpu", part, mesh_dim_names=("p", "q")[: np.ndim(part)]) for part in parts
    ]


def fuzzed_full(number: int) -> Any:
    rng = np.random.default_rng([1, number])
    shape = [int(n) for n in rng.choice(EXTENTS, rng.integers(1, 4))]
    return numbers(*shape, dtype=DTYPES[number % len(DTYPES)])


def fuzzed_layout(number: int, seed: int, among: list[DeviceMesh]) -> tuple[DeviceMesh, list[Any]]:
    rng = np.random.default_rng([seed, number])
    mesh = among[int(rng.integers(len(among)))]
    rank = fuzzed_full(number).ndim
    choices = [int(rng.integers(-1, rank)) for _ in range(mesh.ndim)]
    return mesh, [Replicate() if dim < 0 else Shard(dim) for dim in choices]


def fuzzed(number: int, seed: int, among: list[DeviceMesh], empty: bool = False) -> Any:
    full = fuzzed_full(number)
    mesh, placements = fuzzed_layout(number, seed, among)
    return spread(torch.zeros_like(full) if empty else full, mesh, placements)


def load_fuzzed(source: Path, seed: int, among: list[DeviceMesh], meta: bool) -> None:
    for k in range(len(CHUNK_BYTES)):
        like = {
            f"x{i}": fuzzed(i, seed, among, empty=True) for i in range(k, FUZZED, len(CHUNK_BYTES))
        }
        if meta:
            like = {name: torch.empty_like(x, device="meta") for name, x in like.items()}
        got = unickpt.load(source / str(k), like)
        for name, x in got.items():
            want = fuzzed(int(name[1:]), seed, among)
            where = f"{name} {tuple(want.shape)} {want.placements} {want.device_mesh}"
            assert (x.placements, x.shape) == (want.placements, want.shape), where
            assert raw(x) == raw(want), f"{where}: {x.to_local()} is not {want.to_local()}"


@ranks(4, 6, 8)
def random_layouts(folder: Path) -> None:
    among, world = meshes(), dist.get_world_size()
    for k, chunk_bytes in enumerate(CHUNK_BYTES):
        tree = {f"x{i}": fuzzed(i, world, among) for i in range(k, FUZZED, len(CHUNK_BYTES))}
        options = unickpt.SaveOptions(chunk_bytes=chunk_bytes, fsync=False)
        report = save(folder / str(k), tree, options)
        written: list[Any] = [None] * world
        dist.all_gather_object(written, report.written_bytes)
        assert sum(written) == report.bytes  # every element has one writer
        for name in tree:
            check(folder / str(k), name, fuzzed_full(int(name[1:])))
    load_fuzzed(folder, 100 + world, among, meta=False)


@ranks(4)
def random_layouts_of_another_world(folder: Path) -> None:
    six = folder.parent.parent / "6" / "random_layouts"
    among = meshes()
    load_fuzzed(six, 200, among, meta=False)
    load_fuzzed(six, 201, among, meta=True)


@ranks(4)
def a_tree_that_is_saved_again_and_again(folder: Path) -> None:
    """From the third save on it is recognised, and only its data are looked at."""
    line = make_mesh("cpu", (4,))
    placements = {"rows": [Shard(0)], "columns": [Shard(1)], "all": [Replicate()]}
    tree = {name: spread(numbers(5, 7), line, how) for name, how in placements.items()}
    plain = numbers(5, 7)
    for step in range(4):
        save(folder / str(step), {**tree, "plain": plain, "step": step})
        for name in (*tree, "plain"):
            check(folder / str(step), name, numbers(5, 7) + step)
        for tensor in (*tree.values(), plain):
            tensor += 1
    known = saver._plans(os.getpid())._free[-1]
    kept = sum(len(group.numbers) for group in known.together), len(known.singles)
    assert kept == (2, 1 if dist.get_rank() == 3 else 2), kept


@ranks(4, 6)
def what_one_mesh_quantised_every_mesh_loads(folder: Path) -> None:
    world = dist.get_world_size()
    full = torch.randn(24, 70, generator=torch.Generator().manual_seed(1))
    line = make_mesh("cpu", (world,))
    grid = make_mesh("cpu", (world // 2, 2), mesh_dim_names=("a", "b"))
    options = unickpt.SaveOptions(chunk_bytes=1000, fsync=False, quantize={"w": "int4"})
    report = save(folder / "c", {"w": spread(full, line, [Shard(0)])}, options)
    whole = torch.from_numpy(unickpt.load(folder / "c")["w"])
    errors = errors_of(unickpt.open(folder / "c").index.arrays["w"])
    assert 0 < errors[0] == float((whole - full).abs().max())
    assert report.quantized == ({"w": errors} if dist.get_rank() == 0 else {})
    for mesh, how in (
        (line, [Shard(1)]),
        (grid, [Shard(1), Shard(0)]),
        (grid, [Replicate(), Shard(0)]),
    ):
        like = spread(torch.zeros_like(full), mesh, how)
        unickpt.load(folder / "c", {"w": like})
        assert raw(like) == raw(spread(whole, mesh, how))


# --- layouts one by one ---------------------------------------------------------------------------


@ranks(6)
def the_stored_layout_names_mesh_axes(folder: Path) -> None:
    mesh = make_mesh("cpu", (3, 2), mesh_dim_names=("data", "model"))
    unnamed = make_mesh("cpu", (6,))
    rows, columns, both = Shard(0), Shard(1), Replicate()
    expected = {
        ("data", None): (rows, both),
        (None, "model"): (both, columns),
        ("model", "data"): (columns, rows),
        (("data", "model"), None): (rows, rows),
        (None, None): (both, both),
    }
    tree = {str(spec): spread(numbers(7, 5), mesh, how) for spec, how in expected.items()}
    save(folder / "c", tree | {"unnamed": spread(numbers(7, 5), unnamed, [Shard(-1)])})
    stored = unickpt.open(folder / "c")
    for spec in expected:
        layout = stored[str(spec)].layout
        assert layout.spec == spec, layout
        assert (layout.mesh.axes, layout.mesh.shape) == (("data", "model"), (3, 2))
        assert layout.mesh.processes == tuple(range(6))
        check(folder / "c", str(spec), numbers(7, 5))
    assert stored["unnamed"].layout.spec == (None, "dim_0")


class Blocks(torch.nn.Module):
    """A column-parallel and a row-parallel layer, and one that is not, of uneven sizes."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.wide = torch.nn.Linear(4, rows)
        self.narrow = torch.nn.Linear(rows, 5)
        self.free = torch.nn.Linear(5, 3, bias=False)
        self.norm = torch.nn.BatchNorm1d(3)  # has buffers
        for k, parameter in enumerate(self.parameters()):
            parameter.data = numbers(*parameter.shape) + 1000 * k

    def zeroed(self) -> Blocks:
        for tensor in self.state_dict().values():
            tensor.zero_()
        return self


def fsdp_over_tp(mesh: DeviceMesh, rows: int, device: str = "cpu") -> Blocks:
    tensor_parallel = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    model = Blocks(rows).to(device)
    parallelize_module(model, mesh["tp"], tensor_parallel, src_data_rank=None)
    names = mesh.mesh_dim_names
    assert names is not None
    fully_shard(model, mesh=mesh[tuple(n for n in names if n != "tp")])
    return model


def check_fsdp_over_tp(folder: Path, mesh: DeviceMesh, rows_of_wide: Sequence[int]) -> None:
    for rows in rows_of_wide:
        path = folder / str(rows)
        model = fsdp_over_tp(mesh, rows)
        save(path, model)
        whole = Blocks(rows).state_dict()
        for name, full in whole.items():
            check(path, name, full)
        stored = unickpt.open(path)
        assert stored["wide.weight"].layout.spec == (("tp", "dp"), None)
        assert stored["wide.bias"].layout.spec == (("tp", "dp"),)
        assert stored["narrow.weight"].layout.spec == ("dp", "tp")
        assert stored["narrow.bias"].layout.spec == ("dp",)
        assert stored["free.weight"].layout.spec == ("dp", None)
        other = fsdp_over_tp(mesh, rows).zeroed()
        assert unickpt.load(path, other) is other
        assert same_local_state(other, model), rows
        meta = fsdp_over_tp(mesh, rows, "meta")
        unickpt.load(path, meta)
        assert same_local_state(meta, model), rows


@ranks(6)
def fsdp2_over_tensor_parallelism(folder: Path) -> None:
    """dp=3, tp=2, 7 rows: torch's own offsets are wrong there."""
    mesh = make_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    check_fsdp_over_tp(folder, mesh, (7, 1))


@ranks(6, 8)
def hybrid_sharding_over_tensor_parallelism(folder: Path) -> None:
    grid = {6: (1, 3, 2), 8: (2, 2, 2)}[dist.get_world_size()]
    mesh = make_mesh("cpu", grid, mesh_dim_names=("rep", "dp", "tp"))
    check_fsdp_over_tp(folder, mesh, (13, 2) if dist.get_world_size() == 8 else (13,))


@ranks(6)
def a_shard_order_other_than_left_to_right(folder: Path) -> None:
    from torch.distributed.tensor import _dtensor_spec as spec

    if not hasattr(spec, "ShardOrderEntry"):  # before torch 2.10 there was no other order
        return
    mesh = make_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    strided = fsdp_over_tp(mesh, 7).wide.weight.detach()
    meta = spec.TensorMeta(strided.shape, strided.stride(), strided.dtype)
    order = (spec.ShardOrderEntry(0, (1, 0)),)
    ordered = DTensor(
        strided.to_local(),
        spec.DTensorSpec(mesh, (Shard(0), Shard(0)), meta, shard_order=order),
        requires_grad=False,
    )
    full = Blocks(7).wide.weight.detach()
    save(folder / "c", {"w": ordered})
    assert check(folder / "c", "w", full).layout.spec == (("tp", "dp"), None)
    for device in ("cpu", "meta"):
        local = torch.zeros_like(strided.to_local(), device=device)
        like = DTensor(local, ordered._spec, requires_grad=False)
        got = unickpt.load(folder / "c", {"w": like})["w"]
        assert (raw(got), got._spec) == (raw(strided), ordered._spec)


@ranks(6)
def meshes_on_which_some_ranks_have_no_part(folder: Path) -> None:
    part = DeviceMesh("cpu", [1, 4], mesh_dim_names=("part",))
    save(folder / "c", {"w": spread(numbers(7, 3), part, [Shard(0)])})
    layout = check(folder / "c", "w", numbers(7, 3)).layout
    assert layout.mesh.processes == (1, 4)
    like = spread(torch.zeros(7, 3), part, [Shard(1)])
    got = unickpt.load(folder / "c", {"w": like})["w"]
    assert raw(got) == raw(spread(numbers(7, 3), part, [Shard(1)]))
    meta = unickpt.load(folder / "c", {"w": torch.empty_like(like, device="meta")})["w"]
    assert (raw(meta), meta.placements, meta.device.type) == (raw(got), got.placements, "cpu")


@ranks(4)
def meshes_that_list_ranks_out_of_order(folder: Path) -> None:
    """Process groups sort their ranks; the truth is what torch itself gathers."""
    names, places = ("dp", "tp"), (Shard(0), Shard(1))
    reverse = DeviceMesh("cpu", [[3, 2], [1, 0]], mesh_dim_names=names)
    full = numbers(4, 6)
    scattered = distribute_tensor(full, reverse, places)
    assert torch.equal(scattered.full_tensor(), full)
    save(folder / "reverse", {"w": scattered})
    assert check(folder / "reverse", "w", full).layout.mesh.processes == (0, 1, 2, 3)
    like = distribute_tensor(torch.zeros(4, 6), reverse, places)
    assert raw(unickpt.load(folder / "reverse", {"w": like})["w"]) == raw(scattered)

    model, other = Blocks(7), Blocks(7).zeroed()
    for m in (model, other):
        fully_shard(m, mesh=DeviceMesh("cpu", [2, 0, 3, 1], mesh_dim_names=("dp",)))
    save(folder / "fsdp", model)
    for name, whole in Blocks(7).state_dict().items():
        check(folder / "fsdp", name, whole)
    assert same_local_state(unickpt.load(folder / "fsdp", other), model)

    tangled = DeviceMesh("cpu", [[0, 3], [2, 1]], mesh_dim_names=names)
    tree = {"w": DTensor.from_local(torch.ones(2, 3), tangled, places)}
    words = ("'w'", "[[0, 3], [2, 1]]", "contradictory", "ascending order")
    fails(unickpt.UnsupportedLeaf, lambda: save(folder / "tangled", tree), *words)


@ranks(6)
def a_mesh_per_replica(folder: Path) -> None:
    """Tensor parallelism without a data axis: three meshes that do not know of each other."""
    mine = make_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))["tp"]
    save(folder / "c", {"w": spread(numbers(7, 4), mine, [Shard(0)])})
    assert check(folder / "c", "w", numbers(7, 4)).layout.spec == ("tp", None)
    like = spread(torch.zeros(7, 4), mine, [Shard(1)])
    unickpt.load(folder / "c", {"w": like})
    assert raw(like) == raw(spread(numbers(7, 4), mine, [Shard(1)]))
    error = unickpt.errors.CoverageError if dist.get_rank() == 0 else unickpt.errors.ProcessFailed
    differ = spread(numbers(7, 4) + dist.get_rank() // 2, mine, [Shard(0)])
    fails(error, lambda: save(folder / "d", {"w": differ}), "array 'w'", "different data")


@ranks(6)
def pipeline_stages(folder: Path) -> None:
    mesh = make_mesh("cpu", (2, 3), mesh_dim_names=("pp", "dp"))
    stage = dist.get_rank() // 3
    tree = {f"stage{stage}": spread(numbers(7, 4) + stage, mesh["dp"], [Shard(0)]), "step": 5}
    save(folder / "c", tree)
    for other in range(2):
        stored = check(folder / "c", f"stage{other}", numbers(7, 4) + other)
        assert stored.layout.mesh.processes == tuple(range(3 * other, 3 * other + 3))
    like = {f"stage{1 - stage}": spread(torch.zeros(7, 4), mesh["dp"], [Shard(1)])}
    got = unickpt.load(folder / "c", like, strict=False)[f"stage{1 - stage}"]
    assert raw(got) == raw(spread(numbers(7, 4) + 1 - stage, mesh["dp"], [Shard(1)]))


@ranks(4)
def local_tensors_of_every_form(folder: Path) -> None:
    mesh = make_mesh("cpu", (4,), mesh_dim_names=("data",))
    rank = dist.get_rank()
    full = numbers(8, 6)
    mine = full[2 * rank : 2 * rank + 2]
    forms = {
        "transposed": mine.T.contiguous().T,
        "padded": torch.nn.functional.pad(mine, (1, 2, 3, 4))[3:5, 1:7],
        "conjugate": torch.complex(mine, mine + 1).conj(),
    }
    wholes = {"conjugate": torch.complex(full, full + 1).conj()}
    tree = {name: DTensor.from_local(x, mesh, [Shard(0)]) for name, x in forms.items()}
    tree["pending"] = spread(full, mesh, [Replicate()]).redistribute(mesh, [Shard(0)])
    tree["pending"] = tree["pending"].redistribute(mesh, [Replicate()], async_op=True)
    save(folder / "c", tree)
    for name in tree:
        check(folder / "c", name, wholes.get(name, full).resolve_conj())
    like = {name: torch.zeros_like(forms[name]) for name in forms}
    like = {name: DTensor.from_local(x, mesh, [Shard(0)]) for name, x in like.items()}
    got = unickpt.load(folder / "c", like, strict=False)
    assert all(raw(got[name].to_local().resolve_conj()) == raw(forms[name].resolve_conj())
               for name in forms)  # fmt: skip


# --- modules and optimizers -----------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self, seed: int, device: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = torch.nn.Embedding(5, 3, device=device)  # fewer rows than 2 per rank
        self.body = torch.nn.Linear(3, 3, bias=False, device=device)
        self.head = torch.nn.Linear(3, 5, bias=False, device=device)
        self.head.weight = self.embed.weight
        self.frozen = torch.nn.Parameter(torch.randn(2, 3, device=device), requires_grad=False)
        self.register_buffer("count", torch.full((3,), float(seed), device=device))

    def forward(self, tokens: Any) -> Any:
        x = self.body(self.embed(tokens)).tanh() + self.frozen.sum() + self.count
        return self.head(x).logsumexp(-1).mean()


@ranks(4)
def hybrid_sharded_modules_with_ties_and_buffers(folder: Path) -> None:
    mesh = make_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    model, other, meta = Tied(0), Tied(1), Tied(2, "meta")
    for m in (model, other, meta):
        fully_shard(m, mesh=mesh)
    save(folder / "c", {"model": model})
    stored = unickpt.open(folder / "c")
    assert stored["model/body.weight"].layout.spec == ("shard", None)
    assert stored["model/count"].layout.spec == (None,)
    assert dict(stored.index.aliases) == {"model/head.weight": "model/embed.weight"}
    for name, full in Tied(0).state_dict().items():
        check(folder / "c", f"model/{name}", full)
    for m in (other, meta):
        unickpt.load(folder / "c", {"model": m})
        assert same_local_state(m, model)
        assert m.head.weight is m.embed.weight
        assert [p.requires_grad for p in m.parameters()] == [False, True, True]
        assert torch.equal(m(torch.arange(5)), model(torch.arange(5)))


class Factored(torch.optim.Optimizer):
    """Has state of another shape than its parameter, which DTensor makes a replicated one."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                state = self.state[p]
                state.setdefault("columns", p.new_zeros(1, p.shape[1])).add_(1)
                p.sub_(p.grad / (1 + state["columns"]), alpha=self.param_groups[0]["lr"])


class Training:
    def __init__(self, optimizer: str, mesh: DeviceMesh, seed: int) -> None:
        self.model = Tied(seed)
        fully_shard(self.model.body, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        parameters = list(self.model.parameters())
        self.optimizer = {
            "AdamW": lambda: torch.optim.AdamW(parameters, lr=0.1),
            "SGD": lambda: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
            "Factored": lambda: Factored(parameters),
        }[optimizer]()
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3)
        self.step = 0

    def train(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            seed = 10 * self.step + dist.get_rank()
            tokens = torch.randint(5, (4,), generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            loss = self.model(tokens)
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses

    def tree(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "step": self.step}


def check_training(folder: Path, optimizer: str) -> None:
    mesh = make_mesh("cpu", (4,), mesh_dim_names=("data",))
    run = Training(optimizer, mesh, seed=0)
    run.train(2)
    save(folder / optimizer, run.tree())
    expected = run.train(3)
    other = Training(optimizer, mesh, seed=1)
    other.step = unickpt.load(folder / optimizer, other.tree())["step"]
    assert other.train(3) == expected
    assert same_local_state(other.model, run.model)
    ours, theirs = (x.optimizer.state_dict()["state"] for x in (other, run))
    for k, slots in theirs.items():
        for name, value in slots.items():
            assert type(ours[k][name]) is type(value), name
            assert raw(ours[k][name]) == raw(value), name


@ranks(4)
def fsdp2_training_goes_on_with_adamw(folder: Path) -> None:
    check_training(folder, "AdamW")
    spec = unickpt.open(folder / "AdamW")["optimizer/state/1/exp_avg"].layout.spec
    assert spec == ("data", None)


@ranks(4)
def fsdp2_training_goes_on_with_sgd(folder: Path) -> None:
    check_training(folder, "SGD")


@ranks(4)
def fsdp2_training_goes_on_with_factored_moments(folder: Path) -> None:
    check_training(folder, "Factored")


# --- what each rank says itself -------------------------------------------------------------------

SHAPE = (7, 5)
CUTS = {4: [(0, 4, 4, 21, 35), (0, 11, 12, 30, 35)]}


def flat(cuts: Sequence[int], data: Any) -> unickpt.types.LocalFragments:
    """This rank's flat range of a whole; one rank's may be empty."""
    start, stop = cuts[dist.get_rank()], cuts[dist.get_rank() + 1]
    mine = [(start, data.reshape(-1)[start:stop].clone())] if start < stop else []
    return unickpt.types.LocalFragments.flat(SHAPE, mine, dtype="bfloat16")


@ranks(4)
def flat_ranges_of_a_sharded_optimizer(folder: Path) -> None:
    one, two = CUTS[4]
    whole = numbers(*SHAPE, dtype=torch.bfloat16)
    save(folder / "flat", {"m": flat(one, whole)})
    check(folder / "flat", "m", whole)
    mesh = make_mesh("cpu", (4,), mesh_dim_names=("data",))
    like = spread(torch.zeros_like(whole), mesh, [Shard(1)])
    unickpt.load(folder / "flat", {"m": like})
    assert raw(like) == raw(spread(whole, mesh, [Shard(1)]))
    save(folder / "sharded", {"m": like})
    for source in ("flat", "sharded"):
        marked = flat(two, torch.zeros_like(whole))
        assert unickpt.load(folder / source, {"m": marked})["m"] is marked
        got, want = marked.fragments, flat(two, whole).fragments
        assert [(box, raw(x)) for box, x in got] == [(box, raw(x)) for box, x in want]


@ranks(4)
def flat_ranges_that_overlap_or_leave_a_hole(folder: Path) -> None:
    rank = dist.get_rank()
    error = unickpt.errors.CoverageError if rank == 0 else unickpt.errors.ProcessFailed

    def part(start: int, stop: int) -> unickpt.types.LocalFragments:
        return unickpt.types.LocalFragments.flat(SHAPE, [(start, torch.ones(stop - start))])

    bounds = [(0, 10), (10, 20), (20, 30), (30, 35)]
    overlapping = part(*[*bounds[:2], (15, 30), bounds[3]][rank])
    words = ("array 'm'", "of process 1 overlaps", "of process 2")
    fails(error, lambda: save(folder / "overlap", {"m": overlapping}), *words)
    holed = part(*[*bounds[:2], (20, 29), bounds[3]][rank])
    words = ("array 'm'", "no process holds [5:6, 4:5]")
    fails(error, lambda: save(folder / "hole", {"m": holed}), *words)
    save(folder / "right", {"m": part(*bounds[rank])})


@ranks(4)
def rng_states_of_each_rank(folder: Path) -> None:
    rank = dist.get_rank()
    torch.manual_seed(rank)
    rng = unickpt.PerProcess({"cpu": torch.get_rng_state(), "rank": rank})
    save(folder / "c", {"rng": rng, "step": 3})
    expected = torch.rand(5)
    torch.manual_seed(99)
    like = {"rng": unickpt.PerProcess({"cpu": torch.get_rng_state(), "rank": -1}), "step": 0}
    state = unickpt.load(folder / "c", like)["rng"].value
    assert state["rank"] == rank
    torch.set_rng_state(state["cpu"])
    assert raw(torch.rand(5)) == raw(expected)


# --- refusals -------------------------------------------------------------------------------------


@ranks(4)
def partial_sums_are_refused_by_name(folder: Path) -> None:
    mesh = make_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    sums = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Partial()])
    words = ("'grad'", "Partial(sum)", "redistribute")
    fails(unickpt.UnsupportedLeaf, lambda: save(folder / "c", {"grad": sums}), *words)
    whole = spread(torch.ones(4, 3), mesh, [Shard(0), Replicate()])
    save(folder / "d", {"grad": whole})
    fails(unickpt.UnsupportedLeaf, lambda: unickpt.load(folder / "d", {"grad": sums}), *words)


@ranks(6)
def shards_of_other_sizes_are_refused(folder: Path) -> None:
    from torch.distributed.tensor.placement_types import _StridedShard

    line = make_mesh("cpu", (6,), mesh_dim_names=("data",))
    rank = dist.get_rank()
    own = DTensor.from_local(
        torch.ones(3 if rank == 2 else 1 if rank == 3 else 2, 4), line, [Shard(0)],
        run_check=False, shape=torch.Size((12, 4)), stride=(4, 1),
    )  # fmt: skip
    error = unickpt.UnsupportedLeaf if rank in (2, 3) else unickpt.errors.ProcessFailed
    words = ("'w'", "has shape", "LocalFragments")
    fails(error, lambda: save(folder / "own", {"w": own}), *words)
    # distribute_tensor cuts uneven strided shards in another way than FSDP2 does.
    mesh = make_mesh("cpu", (3, 2), mesh_dim_names=("dp", "tp"))
    strided = [_StridedShard(0, split_factor=2), Shard(0)]
    error = unickpt.UnsupportedLeaf if rank >= 4 else unickpt.errors.ProcessFailed
    odd = spread(numbers(7, 4), mesh, strided)
    fails(error, lambda: save(folder / "odd", {"w": odd}), "'w'", "_StridedShard", "has shape")
    save(folder / "even", {"w": spread(numbers(12, 4), mesh, strided)})
    assert check(folder / "even", "w", numbers(12, 4)).layout.spec == (("tp", "dp"), None)
    # Pieces of one rank that are not adjacent are no box.
    torn = spread(numbers(12, 4), mesh, [_StridedShard(0, split_factor=2), Replicate()])
    words = ("'w'", "_StridedShard", "are not adjacent")
    fails(unickpt.UnsupportedLeaf, lambda: save(folder / "torn", {"w": torn}), *words)


@ranks(4)
def a_dtensor_belongs_to_all_ranks(folder: Path) -> None:
    mesh = make_mesh("cpu", (4,), mesh_dim_names=("data",))
    sharded = spread(numbers(8, 2), mesh, [Shard(0)])
    group = unickpt.ProcessGroup(0, 1, session=f"rank-{dist.get_rank()}")
    alone = unickpt.SaveOptions(group=group)
    path = folder / str(dist.get_rank())
    words = ("'w'", "4 ranks of torch.distributed", "to_local()")
    fails(unickpt.UnsupportedLeaf, lambda: save(path, {"w": sharded}, alone), *words)
    save(path, {"w": sharded.to_local()}, alone)
    words = ("'w'", "4 ranks")
    marked = unickpt.PerProcess(sharded)
    fails(unickpt.UnsupportedLeaf, lambda: save(folder / "c", {"w": marked}), *words)


@ranks(4)
def a_leaf_that_one_rank_cannot_save(folder: Path) -> None:
    good = {"a": torch.ones(3), "b": torch.ones(2)}
    bad = good | {"b": torch.eye(2).to_mkldnn()}
    for culprit in (2, 0):
        tree = bad if dist.get_rank() == culprit else good
        refused_here_alone(culprit, folder / "c", tree, "'b': a _mkldnn tensor")
    save(folder / "c", good)
    check(folder / "c", "b", torch.ones(2))


@ranks(4)
def ranks_that_disagree(folder: Path) -> None:
    rank = dist.get_rank()
    error = unickpt.errors.CoverageError if rank == 0 else unickpt.errors.ProcessFailed
    shapes = torch.ones(3 if rank == 3 else 2)
    fails(error, lambda: save(folder / "shape", {"w": shapes}), "'w'", "[2]", "[3]")


@ranks(4)
def a_leaf_that_one_rank_has(folder: Path) -> None:
    tree = {"v": numbers(5)} | ({"w": numbers(7)} if dist.get_rank() == 2 else {})
    save(folder / "c", tree)
    check(folder / "c", "v", numbers(5))
    check(folder / "c", "w", numbers(7))


# --- wrapped modules ------------------------------------------------------------------------------


@ranks(4)
def wrapped_modules_have_the_names_of_the_module(folder: Path) -> None:
    def plain() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 4))

    def fill(model: Any) -> Any:
        with torch.no_grad():
            for value in model.state_dict(keep_vars=True).values():
                value.fill_(7)
        return model

    def ddp() -> Any:
        return torch.compile(DistributedDataParallel(checkpoint_wrapper(plain())), backend="eager")

    def fsdp() -> Any:
        inner = plain()
        inner[0] = FullyShardedDataParallel(checkpoint_wrapper(inner[0]), device_id=CPU)
        return FullyShardedDataParallel(inner, device_id=CPU)

    for at, make in enumerate((plain, ddp, fsdp)):
        save(folder / f"c{at}", {"m": make()})
        names = list(unickpt.open(folder / f"c{at}"))
        assert names == [f"m/{key}" for key in plain().state_dict()], names
        official = get_model_state_dict(make(), options=StateDictOptions(full_state_dict=True))
        if official:  # rank 0 alone has the full one of FSDP1
            assert set(official) == set(plain().state_dict())
    for at in range(3):
        for make in (plain, ddp, fsdp):
            other = fill(make())
            unickpt.load(folder / f"c{at}", {"m": other})
            values = zip(other.state_dict().values(), plain().state_dict().values(), strict=True)
            assert all(torch.equal(a, b) for a, b in values)


@ranks(4)
def numbers_become_arrays_in_every_process(folder: Path) -> None:
    mesh = make_mesh("cpu", (4,))
    save(folder / "c", {"step": 7, "lr": 0.5, "w": spread(numbers(8), mesh, [Shard(0)])})
    for exchange in (False, True):
        step = spread(torch.zeros((), dtype=torch.int32), mesh, [Replicate()])
        like = {"step": step, "lr": torch.empty((), device="meta"), "w": torch.zeros(8)}
        got = unickpt.load(folder / "c", like, options=unickpt.LoadOptions(exchange=exchange))
        assert (step.to_local().item(), got["lr"].item()) == (7, 0.5)
        assert torch.equal(got["w"], numbers(8))


# --- the group ------------------------------------------------------------------------------------


@ranks(4)
def replicas_share_the_writing(folder: Path) -> None:
    weights = {f"w{i}": numbers(64, 16) for i in range(4)}
    report = save(folder / "c", weights, unickpt.SaveOptions(chunk_bytes=1024, fsync=False))
    assert 0.5 < report.written_bytes / (report.bytes / 4) < 2


@ranks(4)
def a_step_that_is_in_flight_on_one_rank_is_deleted_on_none(folder: Path) -> None:
    options = unickpt.SaveOptions(fsync=False, timeout_s=5)
    with unickpt.Checkpointer(folder / "run", options=options) as checkpointer:
        checkpointer.save(1, {"w": torch.ones(3)}, wait=True)
        if dist.get_rank() == 2:  # where the save has ended on the others alone
            checkpointer._removal.is_in_flight = lambda step: step == 1  # type: ignore[method-assign]
        with pytest.raises(unickpt.SaveConflict, match="step_1 is being saved"):
            checkpointer.delete(1)
        assert checkpointer.steps() == [1]


@ranks(4)
def a_new_process_group_agrees_anew(folder: Path) -> None:
    """Comes last: the meshes of the old group are gone with it."""
    for k in range(2):
        for n in range(2):
            save(folder / f"{k}{n}", {"w": torch.ones(3)})
        dist.destroy_process_group()
        store = f"file://{folder}/store{k}"
        dist.init_process_group("gloo", store, **_WHO)
    attempts = [unickpt.open(folder / at).index.attempt for at in ("00", "01", "10", "11")]
    sessions = [attempt.rpartition("-")[0] for attempt in attempts]
    assert sessions[0] == sessions[1] != sessions[2] == sessions[3]
    assert len(set(attempts)) == 4


_WHO: dict[str, int] = {}


def main(
    root: Path, only: Sequence[str], cases: Callable[[int], Sequence[Case]] = CASES.__getitem__
) -> None:
    """Runs all cases of this world, or those named; rank 0 prints what came of them."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    rank, world = dist.get_rank(), dist.get_world_size()
    _WHO.update(rank=rank, world_size=world)
    outcomes = {}
    for case in cases(world):
        name = case.__name__
        if only and name not in only:
            continue
        folder = root / str(world) / name
        folder.mkdir(parents=True, exist_ok=True)
        started = time.monotonic()
        try:
            case(folder)
            outcome = "ok"
        except Exception:
            outcome = f"rank {rank}: {traceback.format_exc()}"
            print(f"{name} failed on {outcome}", file=sys.stderr)  # others may now wait in vain
        all_outcomes: list[Any] = [None] * world
        dist.all_gather_object(all_outcomes, outcome)
        outcomes[name] = next((o for o in all_outcomes if o != "ok"), "ok")
        print(f"{name}: {time.monotonic() - started:.1f} s", file=sys.stderr)
    if rank == 0:
        print(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
