"""Cases for test_torch_roles.py: what ranks do that save in parts of their job.

As in torch_ranks.py, every rank runs all cases. Most have an actor on ranks 0, 2 and 3, and a
critic on rank 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

import unickpt
from support import torch_ranks
from support.saving import damage
from support.torch_ranks import Case, Training, check, fails, numbers, raw, spread
from support.torch_ranks import same_local_state as same_state

CASES: list[Case] = []
ACTOR, CRITIC = (0, 2, 3), (1,)


def four_ranks(case: Case) -> Case:
    CASES.append(case)
    return case


class Role(NamedTuple):
    """The part of the job to which this rank belongs."""

    name: str
    ranks: Sequence[int]
    group: Any
    mesh: DeviceMesh

    def saving(self, **more: Any) -> unickpt.SaveOptions:
        given = {"chunk_bytes": 48, "fsync": False, "timeout_s": 60, **more}
        return unickpt.SaveOptions(group=self.group, **given)

    def loading(self, **more: Any) -> unickpt.LoadOptions:
        return unickpt.LoadOptions(group=self.group, timeout_s=60, **more)

    def save(self, path: Path, tree: Any, **more: Any) -> unickpt.types.SaveReport:
        return unickpt.save(path, tree, options=self.saving(**more))


def part(name: str, ranks: Sequence[int]) -> Role | None:
    """A role, which all ranks of the job make; None for those that are not in it."""
    group, mesh = dist.new_group(ranks), DeviceMesh("cpu", list(ranks), mesh_dim_names=("dp",))
    return Role(name, ranks, group, mesh) if dist.get_rank() in ranks else None


def own(actor: Sequence[int] = ACTOR, critic: Sequence[int] = CRITIC) -> Role:
    """This rank's of two roles that have all ranks."""
    found = [part("actor", actor), part("critic", critic)]
    return next(role for role in found if role is not None)


def values(role: Role, step: int = 0) -> Any:
    """A whole array, different for each role and step."""
    return numbers(7, 5) + 1000 * step + (100 if role.name == "critic" else 0)


# --- what is stored -------------------------------------------------------------------------------


@four_ranks
def training_goes_on_in_each_role(folder: Path) -> None:
    """FSDP2, on three ranks and on one, of sizes that three do not divide."""
    role = own()
    run = Training("AdamW", role.mesh, seed=len(role.ranks))
    run.train(2)
    rng = unickpt.PerProcess({"rank": dist.get_rank(), "state": torch.get_rng_state()})
    report = role.save(folder / role.name, {**run.tree(), "rng": rng})
    assert (report.processes, report.process) == (len(role.ranks), dist.get_rank(role.group))
    expected = run.train(3)
    other = Training("AdamW", role.mesh, seed=9)
    like = {**other.tree(), "rng": unickpt.PerProcess()}
    found = unickpt.load(folder / role.name, like, options=role.loading())
    other.step = found["step"]
    assert found["rng"].value["rank"] == dist.get_rank()
    assert other.train(3) == expected
    assert same_state(other.model, run.model)

    stored = unickpt.open(folder / role.name)
    count = len(role.ranks)
    assert stored.index.processes == count
    assert len(unickpt.load(folder / role.name)["rng"].values) == count
    layout = stored["model/body.weight"].layout
    assert (layout.spec, layout.mesh.processes) == (("dp", None), tuple(range(count)))
    assert stored["model/count"].layout.mesh.processes == tuple(range(count) if count > 1 else (0,))


@four_ranks
def what_a_role_saved_loads_everywhere(folder: Path) -> None:
    role, rank = own(), dist.get_rank()
    rng = unickpt.PerProcess(100 + rank)
    full = values(role)
    tree = {"w": spread(full, role.mesh, [Shard(0)]), "plain": full.clone(), "rng": rng}
    role.save(folder / role.name, tree)
    dist.barrier()
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    pair = part("pair", (1, 3))
    for name in ("actor", "critic"):
        path, whole = folder / name, numbers(7, 5) + (100 if name == "critic" else 0)
        ranks = {"actor": ACTOR, "critic": CRITIC}[name]
        check(path, "w", whole)
        check(path, "plain", whole)

        def first(saved: Sequence[int], index: int, count: int) -> tuple[Any, int, int]:
            return tuple(saved), index, count

        def like(mesh: DeviceMesh, first: Any = first) -> Any:
            w = spread(torch.zeros(7, 5), mesh, [Shard(1)])
            return {"w": w, "plain": torch.zeros(7, 5), "rng": unickpt.PerProcess(None, first)}

        for exchange in (False, True):  # all ranks of the job
            options = unickpt.LoadOptions(exchange=exchange, timeout_s=20)
            got = unickpt.load(path, like(world), options=options)
            assert raw(got["w"]) == raw(spread(whole, world, [Shard(1)]))
            assert got["rng"].value == (tuple(100 + r for r in ranks), rank, 4)
        if pair is not None:  # two ranks, one of each role
            for exchange in (False, True):
                got = unickpt.load(path, like(pair.mesh), options=pair.loading(exchange=exchange))
                assert raw(got["w"]) == raw(spread(whole, pair.mesh, [Shard(1)]))
                assert got["rng"].value == (tuple(100 + r for r in ranks), (1, 3).index(rank), 2)
        assert np.array_equal(unickpt.load(path)["w"], whole.numpy())  # whoever asks, alone


@four_ranks
def what_is_stored_does_not_depend_on_where_a_role_is(folder: Path) -> None:
    found = []
    for ranks in ((0, 1, 2), (1, 2, 3), (0, 2, 3)):
        role = part("actor", ranks)
        path = folder / "".join(map(str, ranks))
        if role is not None:
            at = dist.get_rank(role.group)
            tree = {
                "w": spread(numbers(7, 5), role.mesh, [Shard(0)]),
                "all": spread(numbers(7, 5), role.mesh, [Replicate()]),
                "plain": numbers(3, 11),
                "own": unickpt.types.LocalFragments(
                    (3, 2),
                    [(unickpt.types.Box((at, 0), (at + 1, 2)), torch.full((1, 2), float(at)))],
                ),
                "rng": unickpt.PerProcess(at),
            }  # fmt: skip
            role.save(path, tree)
        dist.barrier()
        index = unickpt.open(path).index
        found.append((index.arrays, index.per_process, index.tree, index.processes))
    assert found[0] == found[1] == found[2]


@four_ranks
def ranks_of_a_group_in_another_order(folder: Path) -> None:
    """Of new_group(sort_ranks=False) the first rank is process 0."""
    ranks = [3, 0, 2]
    group = dist.new_group(ranks, sort_ranks=False)
    mesh = DeviceMesh("cpu", [0, 2, 3], mesh_dim_names=("dp",))
    if dist.get_rank() in ranks:
        at = ranks.index(dist.get_rank())
        options = unickpt.SaveOptions(group=group, fsync=False, timeout_s=20, chunk_bytes=48)
        tree = {"w": spread(numbers(7, 5), mesh, [Shard(0)]), "at": unickpt.PerProcess(at)}
        report = unickpt.save(folder / "c", tree, options=options)
        assert report.process == at
        assert check(folder / "c", "w", numbers(7, 5)).layout.mesh.processes == (1, 2, 0)
        assert unickpt.load(folder / "c")["at"].values == (0, 1, 2)


@four_ranks
def a_group_of_all_ranks_is_the_job(folder: Path) -> None:
    world = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    for name, group in ("world", dist.group.WORLD), ("made", dist.new_group()):
        options = unickpt.SaveOptions(group=group, fsync=False, timeout_s=20)
        unickpt.save(
            folder / name, {"w": spread(numbers(7, 5), world, [Shard(0)])}, options=options
        )
        assert check(folder / name, "w", numbers(7, 5)).layout.mesh.processes == (0, 1, 2, 3)


@four_ranks
def replicas_are_those_of_the_role(folder: Path) -> None:
    role = own()
    plain = numbers(64, 16) + (5 if role.name == "critic" else 0)
    for checked in (False, True):
        path = folder / f"{role.name}{checked}"
        report = role.save(path, {"p": plain}, check_replicas=checked, chunk_bytes=1024)
        assert 0.5 < report.written_bytes * len(role.ranks) / report.bytes < 2
        assert report.replicas_differ == ()
        check(path, "p", plain)
    if role.name == "actor":
        differing = plain + (dist.get_rank() == 3)
        error = (
            unickpt.errors.CoverageError if dist.get_rank() == 0 else unickpt.errors.ProcessFailed
        )
        words = ("'p'", "different on process 2 than on process 0", "in order, ranks 0, 2, 3")
        fails(
            error,
            lambda: role.save(folder / "d", {"p": differing}, check_replicas=True),
            *words,
        )


# --- ranks in two roles ---------------------------------------------------------------------------


@four_ranks
def roles_that_share_a_rank_save_at_once(folder: Path) -> None:
    roles = [role for role in (part("a", (0, 1, 2)), part("b", (2, 3))) if role is not None]
    runs = {
        role.name: unickpt.Checkpointer(folder / role.name, options=role.saving(chunk_bytes=4096))
        for role in roles
    }
    pending = []
    for step in range(4):
        for role in roles:
            full = torch.randn(130, 70, generator=torch.Generator().manual_seed(step))
            tree = {"w": spread(full, role.mesh, [Shard(0)]), "p": full * 2, "role": role.name}
            pending.append(runs[role.name].save(step, tree))
    for save in pending:
        save.result(60)
    for role in roles:
        runs[role.name].close()
        for step in range(4):
            full = torch.randn(130, 70, generator=torch.Generator().manual_seed(step))
            path = folder / role.name / f"step_{step}"
            layout = check(path, "w", full).layout
            assert layout.mesh.processes == tuple(range(len(role.ranks)))
            check(path, "p", full * 2)
            assert unickpt.open(path).index.values["role"] == role.name


@four_ranks
def a_tree_that_two_roles_save_again_and_again(folder: Path) -> None:
    """What is known of a tree in one role is not used in another one of the same size."""
    one, two = part("one", (0, 1)), part("two", (0, 2))
    mesh = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    tree = {"w": spread(numbers(8, 3), mesh, [Shard(0)]), "p": numbers(5)}
    for number in range(4):
        if one is not None:
            one.save(folder / f"one{number}", tree)
    if two is not None:
        words = ("'w'", "on ranks 0, 1 ", "by ranks 0, 2 of torch.distributed", "rank 1 is missing")
        fails(unickpt.UnsupportedLeaf, lambda: two.save(folder / "two", tree), *words)


# --- at the same time -----------------------------------------------------------------------------


@four_ranks
def roles_exchange_what_they_read_among_themselves(folder: Path) -> None:
    role = own((0, 3), (1, 2))
    rows = 300 if role.name == "actor" else 7000
    full = torch.randn(rows, 9, generator=torch.Generator().manual_seed(rows))
    role.save(folder / role.name, {"w": spread(full, role.mesh, [Shard(0)])}, chunk_bytes=4096)
    like = spread(torch.zeros(rows, 9), role.mesh, [Shard(1)])
    options = role.loading(exchange=True, budget_bytes=1 << 16)
    unickpt.load(folder / role.name, {"w": like}, options=options)
    assert raw(like) == raw(spread(full, role.mesh, [Shard(1)]))


@four_ranks
def what_one_rank_cannot_load_fails_on_those_of_its_role(folder: Path) -> None:
    role = own()
    role.save(folder / role.name, {"w": numbers(7, 5)})
    bad = dist.get_rank() == 2
    like = {"w": torch.zeros(7, 6) if bad else torch.zeros(7, 5)}

    def load() -> None:
        unickpt.load(folder / role.name, like, options=role.loading(exchange=True))

    if role.name == "critic":
        load()
    else:
        error = unickpt.LoadMismatch if bad else unickpt.errors.ProcessFailed
        fails(error, load, *(() if bad else ("rank 2 failed: LoadMismatch",)))


@four_ranks
def each_role_decides_for_itself_when_to_save(folder: Path) -> None:
    role, rank = own(), dist.get_rank()
    when = unickpt.SaveEvery(seconds=1000, preemption=True)
    with unickpt.Checkpointer(folder / role.name, save_every=when, options=role.saving()) as run:
        run.save(1, {"w": values(role, 1)}, wait=True)
        assert not run.should_save(2)
        if rank == 2:
            run.preempt()
        assert run.should_save(3) == run.preempted == (role.name == "actor")
        if rank == 0:  # the coordinator's clock decides
            run._saved_at -= 2000
        assert run.should_save(4) == (role.name == "actor")
        run.save(4, {"w": values(role, 4)}, wait=True)


@four_ranks
def a_damaged_step_is_passed_over_by_its_role_alone(folder: Path) -> None:
    role = own()
    large = {step: torch.full((300, 40), float(step)) for step in (1, 2)}
    with unickpt.Checkpointer(folder / role.name, options=role.saving()) as run:
        for step in (1, 2):
            run.save(step, {"w": large[step]}, wait=True)
        if dist.get_rank() == 0:
            damage(folder / "actor/step_2")
        dist.barrier()
        like = {"w": torch.zeros(300, 40)}
        run.load(like, fallback=True)
        assert run.loaded_step == (1 if role.name == "actor" else 2)
        assert raw(like["w"]) == raw(large[run.loaded_step])


@four_ranks
def a_step_of_a_run_counts_once_all_roles_have_it(folder: Path) -> None:
    role = own()
    roots = [folder / name for name in ("actor", "critic")]

    def opened() -> Any:
        return unickpt.Checkpointer(
            folder / role.name, roles=roots, keep_last=1, options=role.saving()
        )

    with opened() as run:
        dist.barrier()  # the Checkpointers of all roles are there before any of them saves
        for step in (10, 20) if role.name == "actor" else (10,):
            run.save(step, {"w": values(role, step)}, wait=True)
        run.wait()
        dist.barrier()
        assert run.steps() == [10]
    with opened() as run:  # the job is started again
        like = {"w": spread(torch.zeros(7, 5), role.mesh, [Shard(1)])}
        run.load(like)
        assert run.loaded_step == 10
        assert raw(like["w"]) == raw(spread(values(role, 10), role.mesh, [Shard(1)]))
        dist.barrier()
        for step in (20, 30):
            run.save(step, {"w": values(role, step + 1)}, wait=True)
        run.wait()
        dist.barrier()
        assert run.latest() == 30
        run.save(40, {"w": values(role, 41)}, wait=True)
        run.wait()
        dist.barrier()
        assert run.latest() == 40
        check(folder / role.name / "step_40", "w", values(role, 41))


# --- refusals -------------------------------------------------------------------------------------


@four_ranks
def a_dtensor_of_ranks_outside_of_the_role(folder: Path) -> None:
    role = own()
    world = init_device_mesh("cpu", (4,))
    tree = {"w": spread(numbers(8, 2), world, [Shard(0)])}
    outside = {"actor": "rank 1 is missing", "critic": "ranks 0, 2, 3 are missing"}[role.name]
    words = ("'w'", "on ranks 0, 1, 2, 3 cannot be saved by", "SaveOptions.group", outside)
    fails(unickpt.UnsupportedLeaf, lambda: role.save(folder / role.name, tree), *words)
    # A group of the user's does not say which of torch's ranks its processes are.
    index = role.ranks.index(dist.get_rank())
    group = unickpt.ProcessGroup(index, len(role.ranks), f"s-{role.name}")
    options = unickpt.SaveOptions(group=group, timeout_s=20)
    tree = {"w": spread(numbers(8, 2), role.mesh, [Shard(0)])}
    words = ("'w'", "4 ranks of torch.distributed", "give SaveOptions(group=) their torch process")
    fails(
        unickpt.UnsupportedLeaf,
        lambda: unickpt.save(folder / f"{role.name}2", tree, options=options),
        *words,
    )
    dist.barrier()
    assert not list(folder.glob("*/manifest.ocdbt"))


@four_ranks
def a_rank_outside_of_a_group(folder: Path) -> None:
    group = dist.new_group([0, 2, 3])
    outside = dist.get_rank() == 1
    for options in (unickpt.SaveOptions, unickpt.LoadOptions):
        if outside:
            words = ("rank 1 is not a member", "NON_GROUP_MEMBER")
            fails(ValueError, lambda options=options: options(group=group), *words)
        else:
            assert options(group=group).group.index == dist.get_rank(group)
    dist.barrier()
    if not outside:
        dist.destroy_process_group(group)
        fails(ValueError, lambda: unickpt.SaveOptions(group=group), "was destroyed")


# --- ranks that are missing -----------------------------------------------------------------------


@four_ranks
def a_rank_that_does_not_save_is_named(folder: Path) -> None:
    role, rank = own(), dist.get_rank()
    tree = {"w": values(role)}
    started = time.monotonic()
    if role.name == "critic":
        role.save(folder / "critic", tree)
    elif rank == 0:  # it begins, and waits for what rank 3 has written
        # Rank 2 may be the first whose time is up, and says the same.
        words, save = ("process 2 (not begun)",), role.save
        fails(unickpt.UnickptError, lambda: save(folder / "actor", tree, timeout_s=2), *words)
    elif rank == 2:
        fails(unickpt.UnickptError, lambda: role.save(folder / "actor", tree, timeout_s=2))
    assert time.monotonic() - started < 15
    dist.barrier()

    role = own()
    if rank in (2, 3):
        words = (f"rank {rank} in the group of ranks 0, 2, 3", "waited for rank 0, which did not")
        save = role.save
        fails(unickpt.errors.SaveTimeout, lambda: save(folder / "b", tree, timeout_s=1), *words)
    elif role.name == "critic":
        role.save(folder / "critic2", tree)
    dist.barrier()

    role = own()
    if rank in (0, 2):
        every = unickpt.SaveEvery(seconds=5)
        options = role.saving(timeout_s=1)
        with unickpt.Checkpointer(folder / "run", save_every=every, options=options) as run:
            others = "ranks 2, 3" if rank == 0 else "ranks 0, 3"
            words = (f"rank {rank} in the group of ranks 0, 2, 3", f"waited for {others}, but not")
            fails(unickpt.errors.SaveTimeout, lambda: run.should_save(1), *words)
    dist.barrier()


@four_ranks
def a_rank_that_cannot_save_stops_its_own_role(folder: Path) -> None:
    role, rank = own(), dist.get_rank()
    for number in range(2):
        tree = {"w": values(role), "bad": object() if (rank, number) == (2, 0) else 1}
        path = folder / f"{role.name}{number}"
        if role.name == "critic" or number == 1:
            role.save(path, tree)
            check(path, "w", values(role))
        elif rank == 2:
            fails(unickpt.UnsupportedLeaf, lambda: role.save(path, tree), "'bad'")  # noqa: B023
        else:
            words = ("process 1 failed", "'bad'", "in order, ranks 0, 2, 3 of torch.distributed")
            fails(unickpt.errors.ProcessFailed, lambda: role.save(path, tree), *words)  # noqa: B023


if __name__ == "__main__":
    torch_ranks.main(Path(sys.argv[1]), sys.argv[2:], lambda world: CASES)
