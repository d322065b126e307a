"""A job whose nodes have a mixture of eight experts, and a part of a dense array; on two levels.

All values are a function of the expert, the position and the step.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from support.dying import die_at
from support.processes import Processes
from unickpt.types import Box, LocalFragments

EXPERTS = 8
SHAPE = (37, 41)
KEYS: dict[str, Any] = {"experts/{x}/up": 2}
STACKED: dict[str, Any] = {"moe/up": (0, 2)}
_JOB = """
import json, sys
from support import expert_job
expert_job.run(*json.loads(sys.argv[1]))
"""


def expert(number: int, step: int) -> np.ndarray:
    """What an expert has at a step."""
    positions = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return (positions + 2000 * number) * np.float32(step + 1)


def stacked(step: int) -> np.ndarray:
    """What all experts have at a step."""
    return np.stack([expert(n, step) for n in range(EXPERTS)])


def dense(step: int) -> np.ndarray:
    """What the dense array has at a step."""
    return np.arange(500, dtype=np.float32) * np.float32(step + 1)


def experts_of(tree: Mapping[str, Any]) -> dict[int, np.ndarray]:
    """The experts that a tree has, by number."""
    if "moe" in tree:
        return dict(enumerate(tree["moe"]["up"]))
    return {int(n): np.asarray(arrays["up"]) for n, arrays in tree["experts"].items()}


def check(tree: Mapping[str, Any], step: int, older: Mapping[int, int]) -> dict[int, int]:
    """Checks what was loaded against the steps that were reported; returns these by expert."""
    assert int(tree["step"]) == step
    assert np.asarray(tree["dense"]).tobytes() == dense(step).tobytes()
    steps = {n: older.get(n, step) for n in range(EXPERTS)}
    for n, values in experts_of(tree).items():
        assert values.tobytes() == expert(n, steps[n]).tobytes(), (n, steps[n], values.flat[1])
    return steps


class _TorchSide:
    """Ranks of gloo, with arrays of NumPy.

    Arguments:
        is_stacked: whether the experts are one array, of which each process has some rows of each
            expert; else each process has whole ones.
    """

    def __init__(self, is_stacked: bool) -> None:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.barrier, self._is_stacked = dist.barrier, is_stacked

    def state(self, step: int) -> dict[str, Any]:
        """What a process saves."""
        state = {"dense": dense(step), "step": step}
        if self._is_stacked:
            edges = [SHAPE[0] * r // self.count for r in (self.rank, self.rank + 1)]
            box = Box((0, edges[0], 0), (EXPERTS, edges[1], SHAPE[1]))
            part = np.ascontiguousarray(stacked(step)[:, edges[0] : edges[1]])
            return {**state, "moe": {"up": LocalFragments((EXPERTS, *SHAPE), [(box, part)])}}
        per_process = EXPERTS // self.count
        first = self.rank * per_process
        end = EXPERTS if self.rank == self.count - 1 else first + per_process
        parts = {
            n: [(Box.whole(SHAPE), expert(n, step))] if first <= n < end else []
            for n in range(EXPERTS)
        }
        experts = {str(n): {"up": LocalFragments(SHAPE, parts[n], dtype="float32")} for n in parts}
        return {**state, "experts": experts}

    def like(self) -> Any:
        return None

    def check(self, tree: Any, step: int, older: Mapping[int, int]) -> dict[int, int]:
        return check(tree, step, older)


class _JaxSide:
    """Processes of jax.distributed, with the experts in one array that is split over them."""

    def __init__(self, _: bool) -> None:
        import jax
        from jax.experimental import multihost_utils
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.rank, self.count = jax.process_index(), jax.process_count()
        mesh = Mesh(np.array(jax.devices()), ("expert",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        even = EXPERTS % len(jax.devices()) == 0
        self._split = NamedSharding(mesh, PartitionSpec("expert")) if even else self._whole
        self.barrier = lambda: multihost_utils.sync_global_devices("expert job")

    def state(self, step: int) -> dict[str, Any]:
        import jax

        def put(array: np.ndarray, sharding: Any) -> Any:
            return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

        moe = {"up": put(stacked(step), self._split)}
        return {"moe": moe, "dense": put(dense(step), self._whole), "step": step}

    def like(self) -> Any:
        return self.state(0)

    def check(self, tree: Any, step: int, older: Mapping[int, int]) -> dict[int, int]:
        steps = {n: older.get(n, step) for n in range(EXPERTS)}
        expected = np.stack([expert(n, steps[n]) for n in steps])
        for shard in tree["moe"]["up"].addressable_shards:
            assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), steps
        here = np.asarray(tree["dense"].addressable_data(0))
        return check({"dense": here, "step": tree["step"], "experts": {}}, step, older) and steps


def run(kind: str, root: str, folders: list[str], order: dict[str, Any]) -> None:
    """What each process does.

    Arguments:
        kind: "torch" or "jax".
        root: of the run.
        folders: of the node of each process.
        order: `load`: the step that must be resumed; `save`: how many steps; `then`: "kill" after
            these are uploaded; `arguments`: of the Checkpointer; `options`: of its saves; `keys`:
            of its experts; `stacked`: whether these are one array; `dies`: where process 0 kills
            itself, as for `die_at`.
    """
    logging.basicConfig()  # to stderr
    side: Any = (_TorchSide if kind == "torch" else _JaxSide)(order.get("stacked", False))
    chosen = {"fsync": False, "timeout_s": 60, "chunk_bytes": 4096, **order.get("options", {})}
    if "dies" in order and side.rank == 0:
        die_at(*order["dies"])
    is_stacked = kind == "jax" or order.get("stacked", False)
    keys = order.get("keys", STACKED if is_stacked else KEYS)
    keys = {key: tuple(v) if isinstance(v, list) else v for key, v in keys.items()}
    checkpointer = unickpt.Checkpointer(
        root,
        node_local=folders[side.rank],
        experts=unickpt.Experts(keys),
        options=unickpt.SaveOptions(**chosen),
        **order.get("arguments", {}),
    )
    first = 1
    if "load" in order:
        assert checkpointer.latest() == order["load"], checkpointer.steps()
        loaded, report = checkpointer.load(side.like(), return_report=True)
        older = {n: step for _, n, step in report.older_experts}
        steps = side.check(loaded, order["load"], older)
        print("experts", json.dumps(steps), flush=True)
        first = order["load"] + 1
    for step in range(first, first + order.get("save", 0)):
        checkpointer.save(step, side.state(step)).result()
        checkpointer.wait()
    side.barrier()
    if order.get("then") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    side.barrier()


class Job:
    """A job on nodes that each have a folder.

    Arguments:
        processes: starts it.
        folder: for all of them.
        root: of the run.
    """

    def __init__(self, processes: Processes, folder: Path, root: str | None = None) -> None:
        self._processes, self.folder = processes, folder
        self.root = root or str(folder / "root")

    def start(self, nodes: Sequence[str], kind: str = "torch", **order: Any) -> list[Any]:
        """Starts the processes of a job, each on a node."""
        folders = [str(self.folder / node) for node in nodes]
        text = json.dumps([kind, self.root, folders, order])
        if kind == "jax":
            return self._processes.jax(len(nodes), 1, _JOB, text)
        return self._processes.torch(len(nodes), _JOB, text)

    def run(self, nodes: Sequence[str], kind: str = "torch", **order: Any) -> list[str]:
        """Runs a job to its end; returns what each process printed."""
        started = self.start(nodes, kind, **order)
        if order.get("then") != "kill":
            return self._processes.finish(started)
        printed = []
        for process in started:
            out, err = process.communicate(timeout=120)
            assert process.returncode == -signal.SIGKILL, f"{out}\n{err}"
            printed.append(out)
        return printed

    def lose(self, node: str) -> None:
        shutil.rmtree(self.folder / node)

    def in_root(self, step: int) -> dict[int, int]:
        """The step of each expert's values in the root, which are those that it records."""
        return in_copy(f"{self.root}/step_{step}", step)


def in_copy(path: str, step: int) -> dict[int, int]:
    """The step of each expert's values in a checkpoint, which are those that it records."""
    tree, report = unickpt.load(path, return_report=True)
    older = {n: step for _, n, step in report.older_experts}
    return check(tree, step, older)


def resumed(printed: str) -> dict[int, int]:
    """The step of each expert that a process has after it resumed."""
    line = next(line for line in printed.splitlines() if line.startswith("experts "))
    return {int(n): s for n, s in json.loads(line.removeprefix("experts ")).items()}


def at(steps: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """By expert its step, from the experts of each step."""
    return dict(sorted((n, step) for step, numbers in steps.items() for n in numbers))
