"""Cases for test_torch_multiprocess.py: FSDP1's tensors, and DTensors that consist of tensors.

As in `torch_ranks`. Two ranks read what four wrote. What FSDP1 holds is put together from the
shards of all ranks without unickpt, and `<kind>.npz` keeps it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard as LocalPart
from torch.distributed._shard.sharded_tensor import ShardedTensor, init_from_local_shards
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import unickpt
from support.quantized_tensors import Float8, Pair, Recipe, bits, float8
from support.torch_ranks import CPU, SMALL, Case, fails, main, ranks, save
from unickpt.adapters.torch import NamedOptimizer

CASES: dict[int, list[Case]] = {}


def sharded_ranks(*worlds: int) -> Callable[[Case], Case]:
    return ranks(*worlds, of=CASES)


# --- FSDP1 ----------------------------------------------------------------------------------------


def net(seed: int) -> Any:
    """Sizes that four ranks cannot share equally; some ranks have nothing of some parameters."""
    torch.manual_seed(seed)
    inner = torch.nn.Sequential(torch.nn.Linear(7, 3), torch.nn.LayerNorm(3))
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), inner)


def fsdp1(seed: int, kind: str, shards: bool = True, **settings: Any) -> tuple[Any, Any]:
    """A model and its optimizer; the kind is "orig" or "flat", as optimizers see parameters."""
    settings |= {"device_id": CPU, "use_orig_params": kind == "orig"}
    model = net(seed)
    model[2] = FSDP(model[2], **settings)
    model = FSDP(model, **settings)
    if shards:
        FSDP.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def train(model: Any, optimizer: Any, first: int, steps: int) -> list[float]:
    """The same batches on all ranks, so that their number makes no difference."""
    losses = []
    for step in range(first, first + steps):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def gathered(tensors: dict[str, Any]) -> dict[str, Any]:
    """All of some tensors, put together from the shards of all ranks."""
    mine = {
        name: [(x.metadata.shard_offsets, x.tensor.numpy().copy()) for x in tensor.local_shards()]
        for name, tensor in tensors.items()
        if isinstance(tensor, ShardedTensor)
    }
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, mine)  # of all at once: each call takes milliseconds
    found = {}
    for name, tensor in tensors.items():
        if name not in mine:
            found[name] = tensor.numpy().copy()
            continue
        parts = [part for of_rank in of_ranks for part in of_rank[name]]
        found[name] = np.zeros(tuple(tensor.size()), parts[0][1].dtype)
        for start, part in parts:
            box = tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))
            found[name][box] = part
    return found


def states(model: Any, optimizer: Any) -> dict[str, Any]:
    """What FSDP1 gives, in shards."""
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}


def truth(model: Any, optimizer: Any) -> dict[str, Any]:
    found = states(model, optimizer)
    slots = found["optim"]["state"]
    return gathered(
        {f"model/{name}": x for name, x in found["model"].items()}
        | {
            f"optim/state/{name}/{slot}": slots[name][slot]
            for name in sorted(slots)
            for slot in sorted(slots[name])
        }
    )


def same(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one.keys() == two.keys()
    for name, x in one.items():
        assert (x.dtype, x.tobytes()) == (two[name].dtype, two[name].tobytes()), name


def objects(model: Any, optimizer: Any) -> dict[str, Any]:
    return {"model": model, "optim": NamedOptimizer(optimizer, model)}


def _fsdp1_is_saved(folder: Path, kind: str) -> None:
    model, optimizer = fsdp1(0, kind)
    train(model, optimizer, 0, 2)
    save(folder / "states", states(model, optimizer))
    save(folder / "objects", objects(model, optimizer))
    held = truth(model, optimizer)
    for tree in ("states", "objects"):
        stored = unickpt.open(folder / tree)
        same(held, {name: stored[name][...] for name in held})
    losses = train(model, optimizer, 2, 2)
    if dist.get_rank() == 0:
        np.savez(folder.parent / f"{kind}.npz", **held)
        np.savez(folder.parent / f"{kind}_after.npz", losses=losses)


@sharded_ranks(4)
def fsdp1_is_saved_by_orig(folder: Path) -> None:
    _fsdp1_is_saved(folder, "orig")


@sharded_ranks(4)
def fsdp1_is_saved_by_flat(folder: Path) -> None:
    _fsdp1_is_saved(folder, "flat")


def written(folder: Path, kind: str) -> tuple[Path, dict[str, Any], list[float]]:
    """What four ranks wrote, what they held, and how they went on."""
    root = folder.parents[1] / "4"
    after = np.load(root / f"{kind}_after.npz")["losses"].tolist()
    return root / f"fsdp1_is_saved_by_{kind}", dict(np.load(root / f"{kind}.npz")), after


@sharded_ranks(2, 4)
def fsdp1_loads_into_objects(folder: Path) -> None:
    for saved in ("orig", "flat"):
        path, held, after = written(folder, saved)
        for kind in ("orig", "flat"):
            model, optimizer = fsdp1(5, kind)
            unickpt.load(path / "objects", objects(model, optimizer))
            same(truth(model, optimizer), held)
            if kind == saved:  # the other one computes in another order
                assert train(model, optimizer, 2, 2) == after


@sharded_ranks(2, 4)
def fsdp1_loads_into_states_in_place(folder: Path) -> None:
    for kind in ("orig", "flat"):
        path, held, after = written(folder, kind)
        model, optimizer = fsdp1(5, kind)
        train(model, optimizer, 7, 1)
        tree = states(model, optimizer)
        memory = [x.tensor.data_ptr() for x in tree["model"]["0.weight"].local_shards()]
        unickpt.load(path / "states", tree)
        found = [x.tensor.data_ptr() for x in tree["model"]["0.weight"].local_shards()]
        assert found == memory
        model.load_state_dict(tree["model"])
        state = FSDP.optim_state_dict_to_load(model, optimizer, tree["optim"])
        optimizer.load_state_dict(state)
        same(truth(model, optimizer), held)
        assert train(model, optimizer, 2, 2) == after


@sharded_ranks(2)
def fsdp2_loads_what_fsdp1_saved(folder: Path) -> None:
    for kind in ("orig", "flat"):
        path, held, after = written(folder, kind)
        model, mesh = net(5), init_device_mesh("cpu", (2,))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        unickpt.load(path / "objects", objects(model, optimizer))
        for name, x in model.state_dict().items():
            assert x.full_tensor().numpy().tobytes() == held[f"model/{name}"].tobytes(), name
        for name, param in model.named_parameters():
            for slot, x in optimizer.state[param].items():
                whole = x.full_tensor() if isinstance(x, DTensor) else x
                stored = held[f"optim/state/{name}/{slot}"]
                assert whole.numpy().tobytes() == stored.tobytes(), (name, slot)
        assert train(model, optimizer, 2, 2) == after
        save(folder / kind, objects(model, optimizer))
        back, its_optimizer = fsdp1(6, kind)
        unickpt.load(folder / kind, objects(back, its_optimizer))
        for name, x in truth(back, its_optimizer).items():
            assert x.tobytes() == unickpt.open(folder / kind)[name][...].tobytes(), name


@sharded_ranks(4)
def fsdp1_in_two_groups_of_two(folder: Path) -> None:
    """Hybrid sharding: each group has everything, and knows nothing of the other."""
    groups = [dist.new_group(of) for of in ([0, 1], [2, 3], [0, 2], [1, 3])]
    group = groups[dist.get_rank() // 2], groups[2 + dist.get_rank() % 2]
    strategy = ShardingStrategy.HYBRID_SHARD
    model, optimizer = fsdp1(0, "orig", sharding_strategy=strategy, process_group=group)
    train(model, optimizer, 0, 2)
    save(folder / "c", objects(model, optimizer))
    stored, held = unickpt.open(folder / "c"), truth(model, optimizer)
    same(held, {name: stored[name][...] for name in held})
    other, its_optimizer = fsdp1(1, "orig", sharding_strategy=strategy, process_group=group)
    unickpt.load(folder / "c", objects(other, its_optimizer))
    same(truth(other, its_optimizer), held)
    weight = states(model, optimizer)["model"]
    if dist.get_rank() == 3:
        weight["0.weight"].local_shards()[0].tensor.add_(1)
    words = ("'w/0.weight'", "hold different data")
    error = unickpt.errors.CoverageError if dist.get_rank() == 0 else unickpt.errors.ProcessFailed
    fails(error, lambda: save(folder / "d", {"w": weight}), *words)


@sharded_ranks(4)
def fsdp1_with_full_states(folder: Path) -> None:
    """As it is without `set_state_dict_type`: the module's state is whole on each rank."""
    for kind in ("orig", "flat"):
        model, optimizer = fsdp1(0, kind, shards=False)
        train(model, optimizer, 0, 2)
        save(folder / kind, objects(model, optimizer))
        other, its_optimizer = fsdp1(1, kind, shards=False)
        unickpt.load(folder / kind, objects(other, its_optimizer))
        same(truth(other, its_optimizer), truth(model, optimizer))
        assert train(other, its_optimizer, 2, 2) == train(model, optimizer, 2, 2)


@sharded_ranks(4)
def an_optimizer_of_fsdp1_needs_names(folder: Path) -> None:
    for kind in ("orig", "flat"):
        _, optimizer = fsdp1(0, kind)
        words = ("'o'", "flattened by FSDP1", "NamedOptimizer(optimizer, model)")
        tree, path = {"o": optimizer}, folder / kind
        fails(unickpt.UnsupportedLeaf, lambda path=path, tree=tree: save(path, tree), *words)


@sharded_ranks(4)
def sharded_tensors_of_any_boxes(folder: Path) -> None:
    """Several shards on a rank, of different sizes, and none on another."""
    full = torch.arange(7 * 5.0).reshape(7, 5)
    boxes = {0: [((0, 0), (4, 2)), ((0, 2), (4, 3))], 1: [((4, 0), (3, 5))], 3: []}

    def make(whole: Any) -> Any:
        rank = dist.get_rank()
        local = [
            LocalPart.from_tensor_and_offsets(whole[a : a + n, b : b + m].clone(), [a, b], rank)
            for (a, b), (n, m) in boxes.get(rank, [])
        ]
        return init_from_local_shards(local, 7, 5)

    saved = make(full)
    save(folder / "c", {"a": saved, "b": saved})
    stored = unickpt.open(folder / "c")
    assert stored["a"][...].tobytes() == full.numpy().tobytes()
    assert dict(stored.index.aliases) == {"b": "a"}
    like = make(torch.zeros(7, 5))
    unickpt.load(folder / "c", {"a": like, "b": like})
    assert gathered({"": like})[""].tobytes() == full.numpy().tobytes()
    whole = torch.zeros(7, 5)
    unickpt.load(folder / "c", {"a": whole}, only="a")
    assert torch.equal(whole, full)


# --- DTensors that consist of tensors -------------------------------------------------------------


def spread(full: Any, mesh: Any, placements: list[Any]) -> Any:
    """A tensor of tensors as a DTensor: each rank slices it by itself."""
    local = full
    for at, placement in enumerate(placements):
        if isinstance(placement, Shard):
            count = -(-local.shape[placement.dim] // mesh.size(at))
            first = mesh.get_local_rank(at) * count
            count = max(0, min(count, local.shape[placement.dim] - first))
            local = local.narrow(placement.dim, first, count)
    local = clone(local)
    stride = torch.empty(full.shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=stride
    )


def clone(tensor: Any) -> Any:
    names, context = tensor.__tensor_flatten__()
    inner = {name: getattr(tensor, name) for name in names}
    copied = {
        name: clone(x) if hasattr(type(x), "__tensor_flatten__") else x.clone()
        for name, x in inner.items()
    }
    return type(tensor).__tensor_unflatten__(copied, context, tensor.shape, tensor.stride())


KINDS: dict[str, Callable[[int], Any]] = {
    "blocks": lambda seed: float8(16, 7, block=2, seed=seed),
    "one": lambda seed: float8(16, 7, seed=seed),
    "within": lambda seed: Pair(float8(16, 7, 2, seed=seed), float8(16, 7, seed=seed)),
}


@sharded_ranks(4)
def tensors_of_tensors_are_saved(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tree = {
        f"{kind}{dim}": spread(make(1), mesh, [Shard(dim)])
        for kind, make in KINDS.items()
        for dim in (0, 1)
    }
    save(folder / "c", tree)
    stored = unickpt.open(folder / "c")
    for name in tree:
        whole = KINDS[name[:-1]](2)
        unickpt.load(folder / "c", {name: whole}, only=f"{name}/**")
        assert bits(whole) == bits(KINDS[name[:-1]](1)), name
        assert stored.index.values[f"{name}/context/outer_shape/0"] == 16
    assert stored["blocks0/scale_inv"].shape == (8, 1)
    assert stored["one0/scale_inv"].shape == ()


@sharded_ranks(2, 4)
def tensors_of_tensors_load_onto_other_meshes(folder: Path) -> None:
    path = folder.parents[1] / "4" / "tensors_of_tensors_are_saved" / "c"
    world = dist.get_world_size()
    line, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    layouts = [
        (line, [Shard(0)]), (line, [Shard(1)]), (line, [Replicate()]),
        (grid, [Shard(0), Shard(1)]), (grid, [Replicate(), Shard(0)]), (grid, [Shard(0), Shard(0)]),
    ]  # fmt: skip
    for kind, make in KINDS.items():
        for dim in (0, 1):
            for mesh, placements in layouts:
                like = spread(make(3), mesh, placements)
                unickpt.load(path, {f"{kind}{dim}": like}, only=f"{kind}{dim}/**")
                expected = spread(make(1), mesh, placements)
                assert bits(like.to_local()) == bits(expected.to_local()), (kind, dim, placements)
    like = spread(KINDS["blocks"](3), line, [Shard(0)])
    abstract = DTensor.from_local(
        like.to_local().to("meta"), line, [Shard(0)], run_check=False,
        shape=like.shape, stride=like.stride(),
    )  # fmt: skip
    found = unickpt.load(path, {"blocks0": abstract}, only="blocks0/**")["blocks0"]
    expected = spread(KINDS["blocks"](1), line, [Shard(0)])
    assert bits(found.to_local()) == bits(expected.to_local())
    assert found.placements == (Shard(0),)


@sharded_ranks(4)
def parts_that_should_be_equal_are_compared(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    tree = {"w": spread(float8(16, 6), mesh, [Shard(0)])}
    tree["w"].to_local()._scale_inv.fill_(dist.get_rank() // 3)
    words = ("'w/scale_inv'", "processes 0 and 3 hold different data")
    error = unickpt.errors.CoverageError if dist.get_rank() == 0 else unickpt.errors.ProcessFailed
    fails(error, lambda: save(folder / "c", tree), *words)


@sharded_ranks(4)
def shards_that_cut_blocks_are_refused(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (4,))
    rows = (4, 4, 4, 2)[dist.get_rank()]
    local = Float8(torch.zeros(rows, 3, dtype=torch.uint8), torch.zeros(1, 1), recipe=Recipe(4))
    weight = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=torch.Size((14, 3)), stride=(3, 1)
    )
    error = unickpt.errors.ProcessFailed if dist.get_rank() == 3 else unickpt.UnsupportedLeaf
    fails(error, lambda: save(folder / "c", {"w": weight}), "not begin and end at block boundaries")


@sharded_ranks(4)
def a_rank_without_rows_does_not_know_the_parts(folder: Path) -> None:
    weight = spread(KINDS["blocks"](1), init_device_mesh("cpu", (4,)), [Shard(0)])
    empty = spread(float8(6, 6), init_device_mesh("cpu", (4,)), [Shard(0)])
    error = unickpt.UnsupportedLeaf if dist.get_rank() == 3 else unickpt.errors.ProcessFailed
    fails(error, lambda: save(folder / "c", {"v": weight, "w": empty}), "'w'", "over fewer ranks")


@sharded_ranks(4)
def fsdp2_for_training_in_float8(folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torchao.float8.float8_training_tensor import LinearMMConfig
            from torchao.float8.fsdp_utils import WeightWithDynamicFloat8CastTensor
    except ImportError:
        return

    def make(seed: int) -> Any:
        model = torch.nn.Linear(6, 10, bias=False)
        random = torch.randn(10, 6, generator=torch.Generator().manual_seed(seed))
        wrapped = WeightWithDynamicFloat8CastTensor(random, LinearMMConfig(), torch.float8_e4m3fn)
        model.weight = torch.nn.Parameter(wrapped)
        fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
        return model, random

    saved, random = make(1)
    save(folder / "c", {"m": saved})
    other, _ = make(2)
    unickpt.load(folder / "c", {"m": other})
    assert bits(other.weight.to_local()) == bits(saved.weight.to_local())
    rules = unickpt.Rules.parse("{m...}/tensor <-> {m...}\n{m...}/context/{x...} <-> drop")
    plain = {"m": {"weight": torch.zeros(10, 6)}}
    unickpt.load(folder / "c", plain, rules=rules)
    assert torch.equal(plain["m"]["weight"], random)


# --- optimizers -----------------------------------------------------------------------------------


class Distributed(torch.optim.Optimizer):
    """As a distributed Muon: the state of each parameter is on one rank, which sends the update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for at, p in enumerate(group["params"]):
                owner = at % dist.get_world_size()
                if owner == dist.get_rank():
                    state = self.state[p]
                    if not state:
                        state["momentum"] = torch.zeros_like(p)
                    state["momentum"].mul_(0.9).add_(p.grad)
                    p.data.sub_(state["momentum"], alpha=group["lr"])
                dist.broadcast(p.data, owner)


@sharded_ranks(4)
def each_rank_has_the_state_of_some_parameters(folder: Path) -> None:
    model, other = net(0), net(1)
    optimizer, fresh = Distributed(model.parameters()), Distributed(other.parameters())
    train(model, optimizer, 0, 2)
    save(folder / "c", objects(model, optimizer))
    names = [name for name, _ in model.named_parameters()]
    stored = unickpt.open(folder / "c")
    assert {f"optim/state/{name}/momentum" for name in names} <= set(stored)
    unickpt.load(folder / "c", objects(other, fresh))
    assert train(other, fresh, 2, 2) == train(model, optimizer, 2, 2)
    # Now ranks have states that they do not use any more: that is noticed.
    strict = unickpt.SaveOptions(fsync=False, check_replicas=True)
    fails(
        unickpt.errors.CoverageError if dist.get_rank() == 0 else unickpt.errors.ProcessFailed,
        lambda: unickpt.save(folder / "d", objects(other, fresh), options=strict),
        "differ between processes",
    )
    own = [name for at, name in enumerate(names) if at % 4 == dist.get_rank()]
    third = net(2)
    its_optimizer = Distributed(third.parameters())
    others = [f"optim/state/{name}/**" for name in names if name not in own]
    unickpt.load(folder / "c", objects(third, its_optimizer), skip=others)
    train(third, its_optimizer, 2, 2)
    unickpt.save(folder / "e", objects(third, its_optimizer), options=strict)


assert SMALL.chunk_bytes < 60, "arrays of several chunks"

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:], CASES.__getitem__)
