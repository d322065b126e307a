"""What the ranks of test_dcp_ranks.py do together: the scenarios of torch DCP's own tests.

Every rank runs all cases, one after the other. The truth is what torch puts where: `full_tensor`
of DTensors, and training that was never interrupted.
"""

from __future__ import annotations

import faulthandler
import shutil
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import unickpt
import unickpt.integrations.dcp as dcp

Case = Callable[[Path], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


# --- helpers --------------------------------------------------------------------------------------


@cache  # each new mesh of several axes makes process groups
def mesh(*shape: int) -> Any:
    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def spread(full: Any, *shape_and_placements: Any) -> Any:
    shape, placements = shape_and_placements[:-1], shape_and_placements[-1]
    return distribute_tensor(full, mesh(*shape), placements, src_data_rank=None)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)


def same(a: Any, b: Any) -> bool:
    a, b = (x.full_tensor() if isinstance(x, DTensor) else x for x in (a, b))
    return bool(a.dtype == b.dtype and torch.equal(a, b))


@contextmanager
def fails(*kinds: type[BaseException], text: str = "") -> Iterator[None]:
    caught = ""
    try:
        yield
    except kinds as error:
        caught = f"{type(error).__name__}: {error}"
    assert caught, f"none of {kinds} was raised"
    assert text in caught, caught


class Net(torch.nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 12)
        self.second = torch.nn.Linear(12, 6)
        self.head = torch.nn.Linear(6, classes)

    def forward(self, x: Any) -> Any:
        return self.head(torch.relu(self.second(torch.relu(self.first(x)))))


def sharded(kind: str, classes: int = 3) -> Any:
    """A model, in one of the ways in which its parameters can be spread over 4 ranks."""
    model, world = Net(classes), dist.get_world_size()
    if kind == "fsdp":
        fully_shard(model.second)
        fully_shard(model)
    elif kind == "hsdp":
        fully_shard(model, mesh=mesh(2, world // 2))
    elif kind in ("tp", "2d"):
        both = mesh(world // 2, 2) if kind == "2d" else mesh(world)
        plan: Any = {"first": ColwiseParallel(), "second": RowwiseParallel()}
        parallelize_module(model, both["b"] if kind == "2d" else both, plan)
        if kind == "2d":
            fully_shard(model, mesh=both["a"])
    else:
        assert kind == "ddp"
        return torch.nn.parallel.DistributedDataParallel(model)
    return model


def train(model: Any, optimizer: Any, *steps: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 8, generator=generator)).square().mean().backward()
        optimizer.step()


class App:
    """What DCP's tutorial saves: a model and its optimizer as one Stateful."""

    def __init__(self, model: Any, lr: float = 1e-2) -> None:
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=lr)
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts: Any = {f"{name}_state_dict": part for name, part in state.items()}
        set_state_dict(self.model, self.optimizer, **parts)
        self.loads += 1

    def whole(self) -> dict[str, Any]:
        options = StateDictOptions(full_state_dict=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        slots = {f"{n}/{k}": v for n, s in optimizer["state"].items() for k, v in s.items()}
        return {name: tensor.clone() for name, tensor in {**model, **slots}.items()}


def check_equal(a: dict[str, Any], b: dict[str, Any]) -> None:
    assert a.keys() == b.keys()
    assert len(a) > 12
    differ = [name for name in a if not same(a[name], b[name])]
    assert not differ, differ


# --- resharding, nested dicts ---------------------------------------------------------------------

LAYOUTS: list[tuple[Any, ...]] = [
    (4, [Shard(0)]),
    (4, [Shard(1)]),
    (4, [Replicate()]),
    (2, 2, [Shard(0), Shard(1)]),
    (2, 2, [Shard(0), Shard(0)]),
    (2, 2, [Replicate(), Shard(1)]),
]


@case
def dtensors_are_loaded_in_every_other_layout(root: Path) -> None:
    full = numbers(7, 10)
    for number, layout in enumerate(LAYOUTS):
        path = root / f"layout_{number}"
        dcp.save({"w": spread(full, *layout), "plain": full}, checkpoint_id=path)
        for other in LAYOUTS:
            state = {"w": spread(torch.zeros(7, 10), *other), "plain": torch.zeros(7, 10)}
            before = state["w"]
            dcp.load(state, checkpoint_id=path)
            assert state["w"] is before
            assert same(state["w"], full)
            assert same(state["plain"], full)


@case
def nested_dicts_and_lists_are_filled_in_place(root: Path) -> None:
    full = numbers(4, 4)
    stored = {
        "a": {"b": [spread(full, 4, [Shard(0)]), {"c": full + 1}], "name": "x", "losses": [1.5, 2]},
        "rng": (1, b"\x00\xff", None),
    }
    dcp.save(stored, checkpoint_id=root / "nested")
    zero = torch.zeros(4, 4)
    like: dict[str, Any] = {
        "a": {"b": [spread(zero, 4, [Shard(1)]), {"c": zero.clone()}], "name": "", "losses": []},
        "rng": None,
    }
    inner, listed = like["a"], like["a"]["b"]
    dcp.load(like, checkpoint_id=root / "nested")
    assert like["a"] is inner
    assert inner["b"] is listed
    assert same(listed[0], full)
    assert same(listed[1]["c"], full + 1)
    assert (inner["name"], inner["losses"]) == ("x", [1.5, 2])
    assert like["rng"] == (1, b"\x00\xff", None)


@case
def ranks_hold_different_keys_in_different_orders(root: Path) -> None:
    rank = dist.get_rank()
    state = {f"stage{rank}": {"w": numbers(3) * (rank + 1)}, "shared": numbers(2)}
    if rank % 2:
        state = dict(reversed(state.items()))
    dcp.save(state, checkpoint_id=root / "stages")
    other = (rank + 1) % dist.get_world_size()
    like = {f"stage{other}": {"w": torch.zeros(3)}, "shared": torch.zeros(2)}
    dcp.load(like, checkpoint_id=root / "stages")
    assert same(like[f"stage{other}"]["w"], numbers(3) * (other + 1))
    stages = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})  # of a pipeline
    dcp.save({"model": stages}, checkpoint_id=root / "pipeline")
    loaded = torch.nn.ModuleDict({f"layer{rank}": torch.nn.Linear(2, 2)})
    dcp.load({"model": loaded}, checkpoint_id=root / "pipeline")
    assert same(loaded[f"layer{rank}"].weight, stages[f"layer{rank}"].weight)


class Collective:
    """A Stateful that uses collectives, of a size of its own."""

    def __init__(self, size: int) -> None:
        self.size, self.sums = size, list[float]()

    def state_dict(self) -> dict[str, Any]:
        return {"size": self.size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        ones = torch.ones(self.size)
        dist.all_reduce(ones)
        self.sums = ones.tolist()


@case
def objects_with_collectives_are_loaded_in_one_order(root: Path) -> None:
    state = {"a": Collective(2), "b": Collective(3)}
    if dist.get_rank():
        state = dict(reversed(state.items()))
    dcp.save(state, checkpoint_id=root / "collectives")
    dcp.load(state, checkpoint_id=root / "collectives")
    assert (state["a"].sums, state["b"].sums) == ([4.0] * 2, [4.0] * 3)


@case
def experts_are_on_the_ranks_that_have_them(root: Path) -> None:
    rank = dist.get_rank()
    pairs = [DeviceMesh("cpu", ranks) for ranks in ([0, 2], [1, 3])]
    mine, name = pairs[rank % 2], f"expert{rank % 2}"

    def state(full: Any) -> dict[str, Any]:
        shared = spread(full, 4, [Shard(0)])
        expert = DTensor.from_local(full.chunk(2)[rank // 2].clone(), mine, [Shard(0)])
        return {"shared": shared, name: expert}

    stored = state(numbers(8, 2) + rank % 2)
    stored["shared"] = spread(numbers(8, 2), 4, [Shard(0)])
    dcp.save(stored, checkpoint_id=root / "experts")
    like = state(torch.zeros(8, 2))
    dcp.load(like, checkpoint_id=root / "experts")
    assert same(like[name].to_local(), (numbers(8, 2) + rank % 2).chunk(2)[rank // 2])
    both = {f"expert{n}": torch.zeros(8, 2) for n in (0, 1)}
    dcp.load(both, checkpoint_id=root / "experts")
    assert all(same(both[f"expert{n}"], numbers(8, 2) + n) for n in (0, 1))


# --- training: FSDP2, HSDP, TP, both, DDP ---------------------------------------------------------

KINDS = ["fsdp", "hsdp", "tp", "2d", "ddp"]


@case
def training_goes_on_bit_for_bit(root: Path) -> None:
    for kind in KINDS:
        app = App(sharded(kind))
        train(app.model, app.optimizer, 0, 1)
        dcp.save({"app": app, "step": 2}, checkpoint_id=root / kind)
        saved = app.whole()
        fresh = App(sharded(kind), lr=9.0)
        state = {"app": fresh, "step": 0}
        dcp.load(state, checkpoint_id=root / kind)
        assert state == {"app": fresh, "step": 2}
        assert fresh.loads == 1
        check_equal(fresh.whole(), saved)
        for one in (app, fresh):
            train(one.model, one.optimizer, 2)
        check_equal(fresh.whole(), app.whole())


@case
def a_state_goes_from_one_kind_to_another(root: Path) -> None:
    truth: dict[str, Any] = {}
    for kind in KINDS:
        whole = {"app": {"model": get_model_state_dict(sharded(kind))}}
        dcp.load(whole, checkpoint_id=root / kind)
        truth[kind] = {k: v.full_tensor() if isinstance(v, DTensor) else v.clone()
                       for k, v in whole["app"]["model"].items()}  # fmt: skip
    for kind, other in zip(KINDS, KINDS[2:] + KINDS[:2], strict=True):
        app = App(sharded(other))
        dcp.load({"app": app}, checkpoint_id=root / kind)
        found = get_model_state_dict(app.model)
        assert all(same(found[name], truth[kind][name]) for name in found), (kind, other)


@case
def modules_and_optimizers_need_no_state_dict(root: Path) -> None:
    model = sharded("fsdp")
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=root / "objects")
    fresh = sharded("fsdp")
    other = torch.optim.AdamW(fresh.parameters())
    dcp.load({"model": fresh, "optim": other}, checkpoint_id=root / "objects")
    ours, theirs = optimizer.state_dict()["state"], other.state_dict()["state"]
    assert len(ours) == 6
    assert all(same(ours[p][k], theirs[p][k]) for p in ours for k in ours[p])


@case
def fine_tuning_loads_the_body_and_keeps_the_head(root: Path) -> None:
    body = get_model_state_dict(sharded("fsdp", classes=5))
    kept = {name: x for name, x in body.items() if not name.startswith("head")}
    state = {"app": {"model": kept}}
    dcp.load(state, checkpoint_id=root / "fsdp")
    new = sharded("fsdp", classes=5)
    set_model_state_dict(new, kept, options=StateDictOptions(strict=False))
    old = {"app": {"model": get_model_state_dict(sharded("fsdp"))}}
    dcp.load(old, checkpoint_id=root / "fsdp")
    assert same(new.state_dict()["first.weight"], old["app"]["model"]["first.weight"])

    adapter = {"app": {"model": {**kept, "lora": torch.full((2,), 7.0)}}}
    with fails(unickpt.LoadMismatch, text="lora"):
        dcp.load(adapter, checkpoint_id=root / "fsdp")
    planner = torch_dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(adapter, checkpoint_id=root / "fsdp", planner=planner)
    assert adapter["app"]["model"]["lora"].tolist() == [7, 7]


# --- asynchronous ---------------------------------------------------------------------------------


@case
def a_state_may_change_after_async_save(root: Path) -> None:
    app = App(sharded("fsdp"))
    train(app.model, app.optimizer, 0)
    then = app.whole()
    future = dcp.async_save({"app": app}, checkpoint_id=root / "async")
    assert isinstance(future, Future)
    train(app.model, app.optimizer, 1, 2)
    assert future.result().processes == dist.get_world_size()
    fresh = App(sharded("2d"))
    dcp.load({"app": fresh}, checkpoint_id=root / "async")
    check_equal(fresh.whole(), then)


@case
def with_a_stager_that_copies_later_both_futures_come(root: Path) -> None:
    stager = DefaultStager(StagingOptions(False, False, True, False))
    state = {"w": numbers(300, 300), "d": spread(numbers(8, 8), 4, [Shard(0)])}
    response = dcp.async_save(state, checkpoint_id=root / "later", async_stager=stager)
    assert isinstance(response, AsyncSaveResponse)
    response.staging_completion.result(60)
    state["w"].zero_()
    response.upload_completion.result(60)
    stager.close()
    like = {"w": torch.ones(300, 300)}
    dcp.load(like, checkpoint_id=root / "later")
    assert same(like["w"], numbers(300, 300))


# --- groups ---------------------------------------------------------------------------------------


@case
def a_rank_alone_and_a_group_of_all(root: Path) -> None:
    rank = dist.get_rank()
    dcp.save({"w": numbers(3) + rank}, checkpoint_id=root / f"alone_{rank}", no_dist=True)
    like = {"w": torch.zeros(3)}
    dcp.load(like, checkpoint_id=root / f"alone_{rank}", no_dist=True)
    assert same(like["w"], numbers(3) + rank)
    all_ranks, pair = dist.new_group(), dist.new_group([0, 1])
    mesh = DeviceMesh("cpu", [0, 1])
    dcp.save({"w": numbers(3)}, checkpoint_id=root / "group", process_group=all_ranks)
    if rank > 1:
        with fails(ValueError, text=f"rank {rank} is not a member of this process group"):
            dcp.save({"w": numbers(3)}, checkpoint_id=root / "pair", process_group=pair)
        return
    state = {"w": distribute_tensor(numbers(7, 2), mesh, [Shard(0)], src_data_rank=None)}
    dcp.save(state, checkpoint_id=root / "pair", process_group=pair)
    dcp.async_save(state, checkpoint_id=root / "later", process_group=pair).result(60)
    for name in ("pair", "later"):
        like = {"w": torch.zeros(7, 2)}
        dcp.load(like, checkpoint_id=root / name, process_group=pair)
        assert same(like["w"], numbers(7, 2))


# --- storage for torch's own functions ------------------------------------------------------------


@case
def torch_plans_and_unickpt_stores(root: Path) -> None:
    app = App(sharded("2d"))
    train(app.model, app.optimizer, 0, 1)
    torch_dcp.save({"app": app, "step": [2]}, storage_writer=dcp.StorageWriter(root / "planned"))
    for kind in ("2d", "fsdp"):
        fresh = App(sharded(kind))
        state = {"app": fresh, "step": [0]}
        torch_dcp.load(state, storage_reader=dcp.StorageReader(root / "planned"))
        assert state["step"] == [2]
        check_equal(fresh.whole(), app.whole())
    like = {"app": {"model": get_model_state_dict(sharded("hsdp"))}}
    dcp.load(like, checkpoint_id=root / "planned")
    assert same(like["app"]["model"]["head.bias"], app.whole()["head.bias"])
    # What our functions saved, torch's planners load too, and what torch saved ours do.
    fresh = App(sharded("tp"))
    torch_dcp.load({"app": fresh}, storage_reader=dcp.StorageReader(root / "async"))
    torch_dcp.save({"app": app, "step": 2}, checkpoint_id=root / "torchs")
    fresh, step = App(sharded("hsdp")), {"step": 0}
    dcp.load({"app": fresh}, checkpoint_id=root / "torchs")
    dcp.load(step, checkpoint_id=root / "torchs")
    assert step == {"step": 2}
    check_equal(fresh.whole(), app.whole())


@case
def torch_saves_in_the_background_into_a_writer(root: Path) -> None:
    state = {"d": spread(numbers(8, 8), 4, [Shard(1)])}
    future = torch_dcp.async_save(state, storage_writer=dcp.StorageWriter(root / "behind"))
    assert isinstance(future, Future)
    future.result()
    like = {"d": torch.zeros(8, 8)}
    dcp.load(like, checkpoint_id=root / "behind")
    assert same(like["d"], numbers(8, 8))


# --- faults ---------------------------------------------------------------------------------------


class Faulty:
    def __init__(self, rank: int) -> None:
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == self.rank:
            raise ValueError("its state is broken")
        return {"x": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if dist.get_rank() == self.rank:
            raise ValueError("it cannot be loaded")


class FaultyPlanner(torch_dcp.DefaultSavePlanner):
    def resolve_data(self, item: Any) -> Any:
        if dist.get_rank() == 2:
            raise ValueError("no data")
        return super().resolve_data(item)


@case
def a_folder_may_be_removed_as_soon_as_a_load_returns(root: Path) -> None:
    dcp.save({"w": numbers(8)}, checkpoint_id=root / "short")
    like = {"w": torch.zeros(8)}
    if dist.get_rank() > 0:
        time.sleep(0.5)
    dcp.load(like, checkpoint_id=root / "short")
    if dist.get_rank() == 0:
        shutil.rmtree(root / "short")
    assert same(like["w"], numbers(8))
    dist.barrier()
    mine = {"w": torch.zeros(8 if dist.get_rank() else 9)}
    dcp.save({"w": numbers(8)}, checkpoint_id=root / "short")
    error = unickpt.errors.ProcessFailed if dist.get_rank() else unickpt.LoadMismatch
    with fails(error, text="another rank" if dist.get_rank() else "like"):
        dcp.load(mine, checkpoint_id=root / "short")


@case
def a_folder_of_torch_is_gone_on_with(root: Path) -> None:
    """Loaded, trained, saved to again: torch's files stay until ours are committed."""
    path, full = root / "over", numbers(8)

    def saved_by_torch() -> None:
        torch_dcp.save({"w": spread(full, 4, [Shard(0)])}, checkpoint_id=path)

    def ours(more: int) -> dict[str, Any]:
        return {"w": spread(full + more, 4, [Shard(0)])}

    def is_ours(more: int) -> None:
        dist.barrier()
        assert {found.name for found in path.iterdir()} == {"manifest.ocdbt", "processes"}
        like = {"w": torch.zeros(8)}
        dcp.load(like, checkpoint_id=path)
        assert same(like["w"], full + more)

    saved_by_torch()
    like = {"w": torch.zeros(8)}
    dcp.load(like, checkpoint_id=path)
    assert same(like["w"], full)
    with fails(unickpt.CheckpointExists, unickpt.errors.ProcessFailed, text="other files"):
        dcp.save(ours(1), storage_writer=dcp.StorageWriter(path, overwrite=False))
    dist.barrier()
    with fails(BaseException, text="its state is broken"):
        dcp.save({**ours(1), "bad": Faulty(1)}, checkpoint_id=path)
    dist.barrier()
    like = {"w": torch.zeros(8)}
    torch_dcp.load(like, checkpoint_id=path)
    assert same(like["w"], full), "the failed saves have left it as it was"
    dcp.save(ours(1), checkpoint_id=path)
    is_ours(1)
    dcp.save(ours(2), checkpoint_id=path)
    is_ours(2)
    saved_by_torch()
    dcp.async_save(ours(3), checkpoint_id=path).result()
    is_ours(3)
    saved_by_torch()
    torch_dcp.save(ours(4), storage_writer=dcp.StorageWriter(path))
    is_ours(4)


@case
def a_rank_that_fails_fails_the_save_everywhere_and_leaves_the_last(root: Path) -> None:
    path = root / "faults"
    dcp.save({"w": spread(numbers(8), 4, [Shard(0)])}, checkpoint_id=path)
    broken = {"w": spread(numbers(8) + 1, 4, [Shard(0)]), "bad": Faulty(1)}
    mine = (ValueError,) if dist.get_rank() == 1 else (unickpt.errors.ProcessFailed,)
    with fails(*mine, text="its state is broken"):
        dcp.save(broken, checkpoint_id=path)
    dist.barrier()
    with fails(*mine, text="its state is broken"):
        dcp.async_save(broken, checkpoint_id=path).result()
    dist.barrier()
    with fails(BaseException, text="no data"):
        torch_dcp.save(
            {"w": broken["w"]}, storage_writer=dcp.StorageWriter(path), planner=FaultyPlanner()
        )
    like = {"w": torch.zeros(8)}
    dcp.load(like, checkpoint_id=path)
    assert same(like["w"], numbers(8))


def main() -> None:
    faulthandler.dump_traceback_later(110, exit=True)
    dist.init_process_group("gloo")
    cases = [one for one in CASES if one.__name__ in (sys.argv[2:] or (one.__name__,))]
    for function in cases:
        began = time.monotonic()
        try:
            function(Path(sys.argv[1]))
        except BaseException:
            print(f"case {function.__name__} on rank {dist.get_rank()}:", flush=True)
            traceback.print_exc(file=sys.stdout)
            sys.stdout.flush()
            raise
        dist.barrier()
        print(f"{time.monotonic() - began:5.1f} s {function.__name__}", flush=True)
    print(f"{len(cases)} cases", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
