"""Several processes that save some experts at a time; processes that die meanwhile."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.dying import start_job
from support.experts import in_run
from support.forks import Forks, kills
from support.processes import Processes
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, Experts, ProcessGroup, SaveOptions
from unickpt.types import Box, LocalFragments

EXPERTS, ROWS, COLUMNS = 4, 24, 100
KEYS = {"own/{x}/*": 1, "plain/{x}/w": 1, "same/{x}": 1, "stacked/*": (0, 1)}


def numbers(step: int, *shape: int) -> Any:
    return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + 1e6 * step


def full(step: int) -> dict[str, Any]:
    """The state of all processes, in which no two steps share a chunk."""
    size = (ROWS, COLUMNS)
    return {
        "dense": numbers(step, 100, 30),
        "own": {
            str(x): {"w": numbers(step, *size) + x, "b": numbers(step, 3) + x}
            for x in range(EXPERTS)
        },
        "plain": {str(x): {"w": numbers(step, *size) - x} for x in range(EXPERTS)},
        "same": {str(x): numbers(step, *size) * (x + 2) for x in range(EXPERTS)},
        "stacked": {"up": numbers(step, EXPERTS, *size), "mu": -numbers(step, EXPERTS, *size)},
        "step": step,
    }


def state_of(step: int, process: int, count: int) -> dict[str, Any]:
    """What a process holds: experts of its own, declared so or not, and some that all hold."""
    state = full(step)
    mine = range(EXPERTS)[process * EXPERTS // count : (process + 1) * EXPERTS // count]
    box = Box((0, 0), (ROWS, COLUMNS))
    own = {
        x: {
            "w": LocalFragments((ROWS, COLUMNS), [(box, state["own"][x]["w"])]),
            "b": LocalFragments((3,), [(Box((0,), (3,)), state["own"][x]["b"])]),
        }
        for x in map(str, mine)
    }
    stacked = {}
    for name, value in state["stacked"].items():
        part = Box((mine.start, 0, 0), (mine.stop, ROWS, COLUMNS))
        stacked[name] = LocalFragments(value.shape, [(part, value[mine.start : mine.stop])])
    plain = {str(x): state["plain"][str(x)] for x in mine}
    return {**state, "own": own, "plain": plain, "stacked": stacked}


def check(path: Path, state: Callable[[int], Any] = full) -> Mapping[str, Mapping[int, int]]:
    """Each expert is as in its recorded step, all else as in the step's own."""
    checkpoint = unickpt.open(path)
    own = checkpoint.metadata["unickpt"]
    steps = {
        key: {int(x): step for x, step in of.items()} for key, of in own["experts"]["steps"].items()
    }
    assert {key: sorted(of) for key, of in steps.items()} == {
        key: [*range(EXPERTS)] for key in KEYS
    }
    found = unickpt.load(path)
    assert np.array_equal(found["dense"], state(own["step"])["dense"])
    assert found["step"] == own["step"]
    for x in range(EXPERTS):
        for key in list(KEYS)[:3]:
            name = key.partition("/")[0]
            ours, theirs = found[name][str(x)], state(steps[key][x])[name][str(x)]
            ours, theirs = (v if isinstance(v, dict) else {"": v} for v in (ours, theirs))
            assert ours.keys() == theirs.keys()
            equal = [np.array_equal(ours[n], theirs[n]) for n in theirs]
            assert all(equal), f"expert {x} of {key}"
        for name, value in state(steps["stacked/*"][x])["stacked"].items():
            assert np.array_equal(found["stacked"][name][x], value[x]), f"expert {x} of {name}"
    report = unickpt.verify(path)
    assert report.ok, report.damage
    return steps


def job(
    root: Path, count: int, work: Callable[[Checkpointer, int], Any], **arguments: Any
) -> list[Any]:
    def run(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, chunk_bytes=8192, fsync=False, timeout_s=20)
        given = {"experts": unickpt.Experts(KEYS), "options": options, **arguments}
        with Checkpointer(root, **given) as checkpointer:
            newest = checkpointer.latest() or 0
            checkpointer._features.loaded(newest, checkpointer.path(newest))
            return work(checkpointer, group.index)

    return in_job(count, run)


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_experts_of_several_processes(count: int, wait: bool, tmp_path: Path) -> None:
    def work(run: Checkpointer, index: int) -> Any:
        saves = [run.save(step, state_of(step, index, count), wait=wait) for step in range(1, 7)]
        return [save.result() for save in saves]

    reports = job(tmp_path, count, work)
    assert all(isinstance(each, list) for each in reports), reports
    for step in range(1, 7):
        steps = check(tmp_path / f"step_{step}")
        if step > 1:
            assert all(sum(s == step for s in of.values()) == 1 for of in steps.values())
            reused = sum(each[step - 1].reused_bytes for each in reports)
            checkpoint = unickpt.open(tmp_path / f"step_{step}")
            assert reused == checkpoint.index.reused >= 0.6 * checkpoint.nbytes


def test_small_experts_that_only_another_process_holds(tmp_path: Path) -> None:
    """Process 0 is to write them, and lacks them; the coordinator asks for them at the commit."""

    def work(run: Checkpointer, index: int) -> list[Any]:
        trees = [
            {"plain": {str(x): {"w": numbers(step, 100) + x} for x in range(EXPERTS)}}
            if index
            else {"dense": numbers(step, 100)}
            for step in range(4)
        ]
        return [run.save(step, tree).result() for step, tree in enumerate(trees)]

    _, reports = job(tmp_path, 2, work)
    assert [report.reused_bytes for report in reports] == [0, *[(EXPERTS - 1) * 800] * 3]
    found = unickpt.load(tmp_path / "step_3")
    for x, step in enumerate([1, 2, 3, 0]):
        assert np.array_equal(found["plain"][str(x)]["w"], numbers(step, 100) + x)
    assert unickpt.verify(tmp_path / "step_3").ok


@pytest.mark.parametrize("links", [True, False])
def test_chunks_that_the_coordinator_asks_for_are_reused(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without experts, too; and without links, where the new checkpoint names its base."""
    if not links:
        monkeypatch.setattr(os, "link", lambda *_, **__: (_ for _ in ()).throw(OSError(18, "no")))

    def work(run: Checkpointer, index: int) -> list[Any]:
        held = {str(x): {"w": numbers(0, 100) + x} for x in range(EXPERTS)}
        trees: list[Any] = [
            {"plain": held | {"0": {"w": numbers(step, 100)}}}
            if index
            else {"dense": numbers(step, 9)}
            for step in range(3)
        ]
        return [run.save(step, tree, wait=True).result() for step, tree in enumerate(trees)]

    def start(group: ProcessGroup) -> Any:
        options = SaveOptions(group=group, fsync=False, timeout_s=20)
        with Checkpointer(tmp_path, reuse=True, options=options) as run:
            return work(run, group.index)

    _, reports = in_job(2, start)
    assert [report.reused_bytes for report in reports] == [0, *[(EXPERTS - 1) * 800] * 2]
    found = unickpt.load(tmp_path / "step_2")
    assert np.array_equal(found["plain"]["0"]["w"], numbers(2, 100))
    assert np.array_equal(found["plain"]["3"]["w"], numbers(0, 100) + 3)
    assert unickpt.verify(tmp_path / "step_2").ok
    assert bool(unickpt.open(tmp_path / "step_2").index.bases) != links


def test_another_number_of_processes_goes_on(tmp_path: Path) -> None:
    for count, step in [(2, 1), (3, 4), (1, 7)]:

        def work(run: Checkpointer, index: int, count: int = count, step: int = step) -> None:
            for n in range(step, step + 3):
                run.save(n, state_of(n, index, count), wait=True)

        assert job(tmp_path, count, work) == [None] * count
    for step in range(1, 10):
        steps = check(tmp_path / f"step_{step}")
        assert [sum(s == step for s in of.values()) for of in steps.values()] == [
            EXPERTS if step == 1 else 1
        ] * len(KEYS)


def test_processes_that_choose_differently_save_nothing(tmp_path: Path) -> None:
    def work(run: Checkpointer, index: int) -> list[Any]:
        found = []
        for step in range(1, 5):
            if "experts" in run._features.of_run:
                wrong = step == 2 and index == 1
                in_run(run)._choose = (lambda facts: [3]) if wrong else None
            try:
                found.append(run.save(step, state_of(step, index, 2)).result())
            except Exception as error:
                found.append(error)
        return found

    first, second = job(tmp_path, 2, work)
    assert isinstance(first[1], unickpt.errors.CoverageError)
    assert "would be of two steps" in str(first[1])
    assert isinstance(second[1], unickpt.errors.ProcessFailed)
    assert not (tmp_path / "step_2" / "manifest.ocdbt").exists()
    steps = check(tmp_path / "step_3")
    assert {s for of in steps.values() for s in of.values()} == {3}
    check(tmp_path / "step_4")
    assert first[3].reused_bytes > 0


@pytest.mark.parametrize("compared", [True, False])
def test_replicas(compared: bool, tmp_path: Path) -> None:
    def work(run: Checkpointer, index: int) -> None:
        for step in range(1, 5):
            tree = full(step)
            if step == 3 and not compared:
                tree["stacked"]["up"][:, index] += index
            run.save(step, tree, wait=True)

    def options(group: ProcessGroup) -> Any:
        made = SaveOptions(
            group=group, chunk_bytes=8192, fsync=False, timeout_s=20, check_replicas=compared
        )
        with Checkpointer(tmp_path, experts=Experts(KEYS), options=made) as run:
            return work(run, group.index)

    if compared:
        assert in_job(2, options) == [None, None]
    else:
        with pytest.warns(unickpt.errors.ReplicasDiffer):
            assert in_job(2, options) == [None, None]
    for step in range(1, 5):
        check(tmp_path / f"step_{step}")


# --- processes that die ---------------------------------------------------------------------------

PROCESS = f"""
import json, sys
sys.path.insert(0, {TESTS!r})
import unickpt
from support.dying import die_at
from unickpt.commit import participant as commit
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_experts_processes import KEYS, state_of

root, index, count, session, first, many, step, when = ARGS
commit._GRACE_S = 0.3
group = unickpt.ProcessGroup(index, count, session)
options = unickpt.SaveOptions(group=group, timeout_s=5, chunk_bytes=8192, fsync=False)
try:
    experts = unickpt.Experts(KEYS)
    with unickpt.Checkpointer(root, experts=experts, keep_last=2, options=options) as run:
        run._steps.resume_from(first - 1, is_coordinator=group.index == 0)
        run._features.loaded(first - 1, run.path(first - 1))
        for number in range(first, first + many):
            if number == first + 2:
                die_at(step, when)
            run.save(number, state_of(number, index, count), wait=when != "moment")
            print(json.dumps(number), flush=True)
        run.wait()
except unickpt.UnickptError as error:
    print(json.dumps(f"{{type(error).__name__}}: {{error}}"))
"""
STEPS = [
    ("plugins.experts.partial_save.PartialSave:select", "during"),
    ("plugins.incremental.base.Base:take_spans", "before"),
    ("plugins.incremental.base.Base:take_spans", "during"),
    ("storage.regular_files.RegularFiles:link", "after"),
    ("plugins.incremental.base.Base:read", "during"),
    ("plugins.incremental.linked_files.LinkedFiles:take", "during"),
    ("saving.writer.ChunkWriter:write_more", "during"),
]
COORDINATORS_STEPS = [
    *STEPS[:-1],
    ("commit.coordinator.Coordinator:_build_root", "before"),
    ("commit.coordinator.Coordinator:_write_root", "during"),
    ("commit.coordinator.Coordinator:_write_root", "after"),
    ("runs.step_folder.StepFolder:remove", "during"),
]


def start(
    forks: Forks, root: Path, count: int, first: int, doomed: int, step: str, when: str, many: int
) -> list[int]:
    folders = (str(root),)
    return start_job(forks, PROCESS, folders, count, (first, many), doomed, (step, when))


def newest(root: Path) -> int:
    """The newest step; each is whole, and each of its experts of one step."""
    found = [p.parent for p in root.glob("*/manifest.ocdbt")]
    for path in found:
        check(path)
    return max((int(path.name.removeprefix("step_")) for path in found), default=0)


@kills(COORDINATORS_STEPS, STEPS)
def test_killed_at_any_step(
    count: int, doomed: int, steps: list[tuple[str, str]], forks: Forks, tmp_path: Path
) -> None:
    jobs = [
        start(forks, tmp_path / str(n), count, 1, doomed, step, when, 3)
        for n, (step, when) in enumerate(steps)
    ]
    for n, (pids, (step, when)) in enumerate(zip(jobs, steps, strict=True)):
        ended = forks.wait_all(pids)
        assert ended[doomed].code == -9, f"{step} {when}: {ended[doomed].out}"
        root = tmp_path / str(n)
        last = newest(root)
        assert last >= 2
        again = forks.wait_all(start(forks, root, count, last + 1, -1, "", "", 2))
        assert [each.code for each in again] == [0] * count, again[0].out
        assert newest(root) == last + 2
        for folder in root.glob("step_*"):
            assert len(list((folder / "processes").iterdir())) == 1, "remains are left"


def test_killed_at_any_moment(forks: Forks, tmp_path: Path) -> None:
    rng = random.Random(7)
    last = 0
    for _ in range(3):
        pids = start(forks, tmp_path, 2, last + 1, -1, "", "moment", 50)
        while not list(tmp_path.glob(f"step_{last + 2}/manifest.ocdbt")):
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.5))
        for pid in pids:
            forks.kill(pid)
        forks.wait_all(pids)
        assert newest(tmp_path) >= last
        last = newest(tmp_path)
    assert last > 5


# --- frameworks -----------------------------------------------------------------------------------

RANKS = f"""
import sys
sys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]
import torch, torch.distributed as dist
from test_experts_processes import torch_ranks
dist.init_process_group("gloo")
torch_ranks(sys.argv[1])
dist.destroy_process_group()
"""


def torch_ranks(root: str) -> None:
    """What each of two ranks does: expert parallelism, as stacked DTensors and as modules."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    rank = dist.get_rank()

    class Layer(torch.nn.Module):
        def __init__(self, step: int) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleDict(
                {str(x): torch.nn.Linear(30, 20) for x in range(rank * 2, rank * 2 + 2)}
            )
            for x, expert in self.experts.items():
                torch.nn.init.constant_(expert.weight, step * 10 + int(x))
                torch.nn.init.constant_(expert.bias, -step * 10 - int(x))

    def tree(step: int) -> dict[str, object]:
        up = (torch.arange(4 * 50 * 60).reshape(4, 50, 60) + step * 100_000).float()
        layer = Layer(step)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-9)
        for each in layer.parameters():
            each.grad = torch.full_like(each, step)
        optimizer.step()
        names = [name for name, _ in layer.named_parameters()]
        slots = {
            name: optimizer.state[each]["exp_avg"]
            for name, each in zip(names, layer.parameters(), strict=True)
        }
        weights = distribute_tensor(up, mesh, [Shard(0)])
        return {
            "model": layer.state_dict(),
            "opt": slots,
            "up": weights,
            "mu": {"up": distribute_tensor(-up, mesh, [Shard(0)])},
            "router": distribute_tensor(up[0, 0].clone(), mesh, [Replicate()]),
        }

    keys: dict[str, Any] = {"**/experts/{x}/**": 1, "**/up": ("ep", 1)}
    first: dict[int, dict[str, Any]] = {}
    for jobs in range(2):
        options = SaveOptions(fsync=False, timeout_s=30)
        with Checkpointer(root, experts=Experts(keys), options=options) as run:
            if jobs:
                like = tree(0)
                run.load(like, strict=False)  # another rank has the other experts
            for step in range(1 + 3 * jobs, 4 + 3 * jobs):
                state = tree(step)
                first[step] = state
                report = run.save(step, state).result()
                assert (report.reused_bytes > 0) == (step > 1)
    dist.barrier()
    for step in range(1, 7):
        path = Path(root) / f"step_{step}"
        steps = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
        assert {x for x, of in steps["**/up"].items() if of == step} == (
            {"0213"[(step - 2) % 4]} if step > 1 else set("0123")  # the ranks alternate
        ), (step, steps)
        found = unickpt.load(path)
        up = np.arange(4 * 50 * 60).reshape(4, 50, 60)
        for x in range(4):
            of = steps["**/up"][str(x)]
            assert (found["up"][x] == up[x] + of * 100_000).all()
            assert (found["mu"]["up"][x] == -up[x] - of * 100_000).all()
            of = steps["**/experts/{x}/**"][str(x)]
            assert np.allclose(found["model"][f"experts.{x}.weight"], of * 10 + x)
            assert np.allclose(found["model"][f"experts.{x}.bias"], -of * 10 - x)
            assert np.allclose(found["opt"][f"experts.{x}.weight"], 0.1 * of)
        assert (found["router"] == up[0, 0] + step * 100_000).all()
        assert unickpt.verify(path).ok


def test_expert_parallelism_in_torch(processes: Processes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    processes.finish(processes.torch(2, RANKS, tmp_path / "run"))
