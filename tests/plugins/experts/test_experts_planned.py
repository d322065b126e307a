"""Experts in turn: a tree that was saved before is known, whichever experts a save writes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.processes import Processes
from support.recognised import note_recognised
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, Experts, ProcessGroup, SaveOptions
from unickpt.adapters import torch as torch_adapter
from unickpt.adapters.torch import NamedOptimizer
from unickpt.plugins.experts.expert_choice import ExpertRecord
from unickpt.plugins.experts.keys import ExpertKeys
from unickpt.plugins.experts.partial_save import PartialSave
from unickpt.saving import plan_cache, task, write_plan
from unickpt.saving.write_plan import Sharing, WritePlan

EXPERTS = 4
KEYS: dict[str, Any] = {"layers/{l}/experts/{x}/**": 1, "up": (0, 1)}


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the tree of each save was known."""
    return note_recognised(monkeypatch)


def facts(plan: WritePlan) -> list[list[Any]]:
    return [
        [(i.entry.name, i.position, i.box, i.unit, i.borrowed, id(i.fragment)) for i in items]
        for items in (plan.held_items, plan.own_items)
    ]


@pytest.fixture(autouse=True)
def plans_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that is made of a known one is what it would be without."""

    def compared(known: WritePlan, description: Any, sharing: Sharing) -> WritePlan:
        found = write_plan.plan_again(known, description, sharing)
        assert facts(found) == facts(write_plan.plan_writes(description, sharing))
        return found

    monkeypatch.setattr(task, "plan_again", compared)


def numpy_like(shape: tuple[int, ...], dtype: str, n: float) -> Any:
    return np.full(shape, n, dtype)


def torch_like(shape: tuple[int, ...], dtype: str, n: float) -> Any:
    return torch.full(shape, n, dtype=getattr(torch, dtype))


def jax_like(shape: tuple[int, ...], dtype: str, n: float) -> Any:
    return jnp.full(shape, n, dtype)


def changing(make: Callable[..., Any]) -> dict[str, Any]:
    """Arrays of many kinds: small ones, large ones, some that are described each time."""

    def expert(n: int) -> dict[str, Any]:
        return {
            "w": make((300, 500), "float32", n),
            "b": make((7,), "float32", n),
            "flag": make((3,), "bool", 0),
            "step": make((), "float32", n),
        }

    layers = {
        str(layer): {"experts": {str(x): expert(10 * x) for x in range(EXPERTS)}}
        for layer in range(2)
    }
    up = make((EXPERTS, 30, 40), "float32", 1)
    return {"layers": layers, "dense": make((50, 30), "float32", 0), "up": up, "n": 1}


def add(tree: Any) -> Any:
    """The tree one step later; memory that can change does."""
    if isinstance(tree, dict):
        return {key: add(value) for key, value in tree.items()}
    if isinstance(tree, int):
        return tree + 1
    if isinstance(tree, jax.Array):
        return ~tree if tree.dtype == bool else tree + 1
    if str(tree.dtype).endswith("bool"):
        tree[...] = ~tree
    else:
        tree += 1
    return tree


def copied(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: copied(value) for key, value in tree.items()}
    return tree if isinstance(tree, int) else np.asarray(tree).copy()


def check(path: Path, history: list[Any], step: int) -> None:
    """Each expert is as of its recorded step, all else as of the step's own."""
    found = unickpt.load(path)
    steps: Mapping[str, Any] = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
    assert np.array_equal(found["dense"], history[step]["dense"])
    assert found["n"] == history[step]["n"]
    for layer, of in history[step]["layers"].items():
        known = steps[f"layers/{layer}/experts/{{x}}/**"]
        for x in of["experts"]:
            wanted = history[known[x]]["layers"][layer]["experts"][x]
            for name, value in found["layers"][layer]["experts"][x].items():
                assert np.array_equal(np.asarray(value), wanted[name]), (step, layer, x, name)
    for x in range(EXPERTS):
        wanted = history[steps["up"][str(x)]]["up"][x]
        assert np.array_equal(np.asarray(found["up"])[x], wanted), (step, x)
    assert unickpt.verify(path).ok


@pytest.mark.parametrize(
    "framework", [numpy_like, torch_like, jax_like], ids=attrgetter("__name__")
)
@pytest.mark.parametrize("staging", ["auto", "copy", "lazy"])
def test_a_save_of_some_experts_is_recognised(
    framework: Callable[..., Any],
    staging: Any,
    recognised: list[bool],
    tmp_path: Path,
) -> None:
    state, history, pendings = changing(framework), list[Any](), list[Any]()
    options = SaveOptions(fsync=False, staging=staging)
    with Checkpointer(tmp_path, experts=Experts(KEYS), options=options) as run:
        for step in range(2 * EXPERTS + 2):
            history.append(copied(state))
            if step > 2:
                pendings[-2].result()  # on a busy machine a third one may be about to end
            pendings.append(run.save(step, state))
            pendings[-1].wait_staged()
            state = add(state)
            if step == 2:
                pendings[-1].result()
        run.wait()
    for step in range(len(history)):
        check(tmp_path / f"step_{step}", history, step)
    # Two may be in flight, and each needs a plan of its own.
    assert recognised[:1] + recognised[3:] == [False] + [True] * (len(history) - 3)


def test_what_a_save_leaves_out_is_not_even_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor copied: that is what makes a save of some experts cheap."""
    asked, source = list[int](), torch_adapter.source

    def noted(leaf: Any, group: Any) -> Any:
        asked.append(1)
        return source(leaf, group)

    def expert() -> dict[str, Any]:
        return {"w": torch.ones(300, 500), "b": torch.ones(7)}

    monkeypatch.setattr(torch_adapter, "source", noted)
    state = {"experts": {str(x): expert() for x in range(8)}, "dense": torch.ones(300, 500)}
    run = Checkpointer(
        tmp_path, experts=Experts({"experts/{x}/*": 1}), options=SaveOptions(fsync=False)
    )
    run.save(0, state, wait=True)
    assert len(asked) == 17
    for step in range(1, 4):
        asked.clear()
        report = run.save(step, state, wait=True).result()
        assert len(asked) == 2, "the large ones of an expert, and what is no expert"
        assert report.staged_bytes == 4 * (2 * 150_000 + 7)
    run.close()


def test_what_is_left_out_may_change_as_soon_as_the_call_returns(
    recognised: list[bool], tmp_path: Path
) -> None:
    state, history = changing(torch_like), list[Any]()
    options = SaveOptions(fsync=False, staging="lazy")
    with Checkpointer(tmp_path, experts=Experts(KEYS), options=options) as run:
        for step in range(6):
            history.append(copied(state))
            run.save(step, state, wait=True)
            known = unickpt.open(run.path(step)).metadata["unickpt"]["experts"]["steps"]
            add(state)
            for layer, of in state["layers"].items():
                for x, expert in of["experts"].items():
                    if known[f"layers/{layer}/experts/{{x}}/**"][x] != step:
                        expert["b"][...] = float("nan")
                        expert["b"].zero_().add_(step)
    for step in range(6):
        check(tmp_path / f"step_{step}", history, step)
    assert recognised == [False] + [True] * 5


@pytest.mark.integration  # takes seconds
def test_a_model_and_its_optimizer_are_recognised(recognised: list[bool], tmp_path: Path) -> None:
    class Mixture(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Linear(300, 300) for _ in range(EXPERTS))
            self.router = torch.nn.Linear(300, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(each(x) for each in self.experts) + self.router(x).sum()

    model = Mixture()
    optimizer = torch.optim.AdamW(model.parameters())
    named, history = NamedOptimizer(optimizer, model), list[Any]()
    experts = Experts({"**/experts/{x}/**": 1})
    with Checkpointer(tmp_path, experts=experts, options=SaveOptions(fsync=False)) as run:
        for step in range(7):
            model(torch.randn(5, 300)).sum().backward()
            optimizer.step()
            history.append([p.detach().clone() for p in model.parameters()])
            run.save(step, {"model": model, "optimizer": named}, wait=True)
    assert recognised == [False] + [True] * 6
    names = [name for name, _ in model.named_parameters()]
    for step in range(7):
        found = unickpt.load(tmp_path / f"step_{step}")
        (of,) = (
            unickpt.open(tmp_path / f"step_{step}").metadata["unickpt"]["experts"]["steps"].values()
        )
        for at, name in enumerate(names):
            x = name.split(".")[1] if name.startswith("experts") else ""
            wanted = history[of[x] if x else step][at]
            assert np.array_equal(np.asarray(found["model"][name]), wanted.numpy()), (step, name)
            moment = found["optimizer"]["state"][name]["step"]
            assert float(moment) == 1 + (of[x] if x else step), (step, name)


def test_after_a_save_that_failed_all_are_written_and_known_again(
    recognised: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, history = changing(torch_like), list[Any]()
    with Checkpointer(
        tmp_path, experts=Experts(KEYS), options=SaveOptions(fsync=False, timeout_s=20)
    ) as run:
        for step in range(5):
            history.append(copied(state))
            if step == 2:
                (tmp_path / "step_2").mkdir()
                (tmp_path / "step_2" / "in the way").touch()
                with pytest.raises(unickpt.CheckpointExists):
                    run.save(step, state, wait=True).result()
            else:
                run.save(step, state, wait=True)
            add(state)
    for step in (0, 1, 3, 4):
        check(tmp_path / f"step_{step}", history, step)
    assert recognised[0] is False
    assert recognised[-1] is True


def test_other_experts_are_another_plan(tmp_path: Path) -> None:
    """How arrays are cut depends on the keys."""
    cache, state = plan_cache.PlanCache(2), {"up": np.ones((4, 30)), "experts": {"0": np.ones(3)}}
    keys = [ExpertKeys({"up": (dim, 1)}) for dim in (0, 1)]

    class First(unickpt.extend.SaveFeature):
        name = "first"

        def write_filter(self, attempt: str) -> PartialSave:
            return PartialSave(keys[0], 0, ExpertRecord({}))

    job = task.SaveTask(tmp_path / "a", False, SaveOptions(fsync=False, features=[First()]))
    tree = cache.describe(job, state, {"unickpt": {}})
    for _ in range(2):  # a tree that is saved once is not cached
        tree.refer()
    assert tree.cached is not None
    tree.give_back()
    found = []
    for each in (keys[1], None, keys[0]):
        job.features.units = each
        found.append(isinstance(cache.find(state, job), plan_cache.SameTree))
    assert found == [False, False, True]


# --- several processes ----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 3])
def test_processes_find_what_they_would_without_a_known_plan(count: int, tmp_path: Path) -> None:
    """What is no expert is shared out anew in each save, to those that write fewer experts."""

    def work(group: ProcessGroup) -> None:
        dense = {str(n): np.full((40, 64), float(n)) for n in range(7)}
        experts = {str(x): {"w": np.zeros((30, 64)), "b": np.zeros(3)} for x in range(5)}
        state = {"layers": {"0": {"experts": experts}}, **dense}
        options = SaveOptions(fsync=False, chunk_bytes=4096, timeout_s=30, group=group)
        own = Experts({"layers/{l}/experts/{x}/**": 2})
        with Checkpointer(tmp_path / "run", experts=own, options=options) as run:
            for step in range(7):
                for array in dense.values():
                    array += 1
                for expert in experts.values():
                    expert["w"] += 1
                    expert["b"] += 1
                run.save(step, state, wait=True)

    assert in_job(count, work) == [None] * count
    for step in range(7):
        path = tmp_path / "run" / f"step_{step}"
        found = unickpt.load(path)
        (of,) = unickpt.open(path).metadata["unickpt"]["experts"]["steps"].values()
        for n in range(7):
            assert set(found[str(n)].flat) == {n + step + 1.0}
        for x, expert in found["layers"]["0"]["experts"].items():
            assert set(expert["w"].flat) | set(expert["b"].flat) == {of[x] + 1.0}, (step, x)
        assert unickpt.verify(path).ok


JOB = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
import unickpt
from unickpt import Checkpointer, Experts, SaveOptions
from unickpt.saving import plan_cache

known, find = [], plan_cache.PlanCache.find
def noted(*arguments):
    found = find(*arguments)
    known.append(isinstance(found, plan_cache.SameTree))
    return found
plan_cache.PlanCache.find = noted
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
def sharded(n):
    return distribute_tensor(torch.full((64, 32), float(n)), mesh, [Shard(0)])
experts = {str(x): {"w": sharded(x), "b": torch.full((5,), float(x))} for x in range(4)}
state = {"experts": experts, "dense": distribute_tensor(torch.zeros(90, 32), mesh, [Replicate()])}
options = SaveOptions(fsync=False, chunk_bytes=4096, timeout_s=60)
with Checkpointer(sys.argv[1], experts=Experts({"experts/{x}/*": 1}), options=options) as run:
    for step in range(6):
        state["dense"].to_local().add_(1)
        for expert in experts.values():
            expert["w"].to_local().add_(10)
            expert["b"].add_(10)
        run.save(step, state, wait=True)
print(json.dumps(known))
dist.destroy_process_group()
"""


def test_ranks_of_torch_recognise_their_trees(processes: Processes, tmp_path: Path) -> None:
    for out in processes.finish(processes.torch(2, JOB, tmp_path / "run")):
        line = next(line for line in out.splitlines() if line.startswith("["))
        assert json.loads(line) == [False] + [True] * 5
    for step in range(6):
        path = tmp_path / "run" / f"step_{step}"
        found = unickpt.load(path)
        (of,) = unickpt.open(path).metadata["unickpt"]["experts"]["steps"].values()
        assert set(found["dense"].flat) == {step + 1.0}
        for x, expert in found["experts"].items():
            wanted = {int(x) + 10.0 * (of[x] + 1)}
            assert set(expert["w"].flat) == set(expert["b"].flat) == wanted, (step, x)
        assert unickpt.verify(path).ok


def test_two_features_that_leave_parts_out_are_refused(tmp_path: Path) -> None:
    class Leaves(unickpt.extend.SaveFeature):
        def __init__(self, name: str) -> None:
            self.name = name

        def write_filter(self, attempt: str) -> PartialSave:
            return PartialSave(ExpertKeys({"up": (0, 1)}), 0, ExpertRecord({}))

    class Sees(unickpt.extend.SaveFeature):
        name = "tracer"

    features = [Leaves("first"), Sees(), Leaves("second")]
    options = SaveOptions(fsync=False, features=features)
    for save in (unickpt.save, unickpt.save_async):
        with pytest.raises(ValueError, match="features 'first' and 'second' would both leave"):
            save(tmp_path / "a", {"up": np.ones((4, 30))}, options=options)
    assert not (tmp_path / "a").exists()
