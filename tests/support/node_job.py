"""A job on several nodes: ranks of gloo, or processes of jax.distributed, that save and resume.

Each has the name of its node; what is there is a function of the step alone.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from typing import Any

import numpy as np
import pytest

import unickpt
from support import faulty_node

SHAPE = (91, 103)


def whole(step: int) -> np.ndarray:
    """What the array "w" has at a step."""
    return (np.arange(np.prod(SHAPE), dtype=np.float32) * (step + 1)).reshape(SHAPE)


class TorchSide:
    """The state in torch: an uneven split, its transpose, a replicated array and a number."""

    def __init__(self) -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self._mesh = init_device_mesh("cpu", (self.count,))

    def state(self, step: int | None) -> dict[str, Any]:
        import torch
        from torch.distributed.tensor import Shard, distribute_tensor

        filled = torch.zeros(SHAPE) if step is None else torch.from_numpy(whole(step))
        turned = filled.T.contiguous()
        return {
            "w": distribute_tensor(filled, self._mesh, [Shard(0)]),
            "v": distribute_tensor(turned, self._mesh, [Shard(0)]),
            "b": torch.full((5,), -1.0 if step is None else float(step)),
            "step": -1 if step is None else step,
        }

    def check(self, state: dict[str, Any], step: int) -> None:
        assert state["step"] == step
        assert bool((state["b"] == float(step)).all())
        expected = self.state(step)
        for name in ("w", "v"):
            mine, wanted = state[name].to_local(), expected[name].to_local()
            assert mine.numpy().tobytes() == wanted.numpy().tobytes(), name

    def barrier(self) -> None:
        import torch.distributed as dist

        dist.barrier()


class JaxSide:
    """The same state in JAX; "w" is split by its second dimension, whose size is uneven."""

    def __init__(self) -> None:
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        self.rank, self.count = jax.process_index(), jax.process_count()
        mesh = Mesh(np.array(jax.devices()), ("x",))
        self._whole = NamedSharding(mesh, PartitionSpec())
        self._split = NamedSharding(mesh, PartitionSpec("x"))

    def state(self, step: int | None) -> dict[str, Any]:
        import jax

        filled = np.zeros(SHAPE, np.float32) if step is None else whole(step)

        def put(array: np.ndarray, sharding: Any) -> Any:
            return jax.make_array_from_callback(array.shape, sharding, lambda i: array[i])

        turned = np.ascontiguousarray(filled.T)
        even = len(jax.devices()) == 1
        return {
            "w": put(filled, self._split if even else self._whole),
            "v": put(turned, self._whole),
            "b": put(np.full(5, -1.0 if step is None else step, np.float32), self._whole),
            "step": -1 if step is None else step,
        }

    def check(self, state: dict[str, Any], step: int) -> None:
        assert int(state["step"]) == step
        for name, expected in (("w", whole(step)), ("v", whole(step).T)):
            for shard in state[name].addressable_shards:
                wanted = np.ascontiguousarray(expected[shard.index])
                assert np.asarray(shard.data).tobytes() == wanted.tobytes(), name

    def barrier(self) -> None:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices("node job")


def check_error(side: Any, checkpointer: Any, text: str) -> None:
    """Process 0 cannot load the newest step, soon, and says why; so no process does."""
    began = time.monotonic()
    with pytest.raises(unickpt.UnickptError, match="" if side.rank else text) as caught:
        checkpointer.load(side.state(None))
    print("error", caught.value, "seconds", time.monotonic() - began, flush=True)
    side.barrier()


def close(checkpointer: Any, *, is_refused: bool) -> None:
    try:
        checkpointer.close()
    except unickpt.UnickptError as error:
        if not is_refused:
            raise
        print("refused", error, flush=True)


def run(kind: str, root: str, folders: list[str], order: dict[str, Any]) -> None:
    """What each process does.

    Arguments:
        kind: "torch" or "jax".
        root: of the run.
        folders: of the node of each process.
        order: `load`: the step that must be resumed, or None for none; `save`: how many steps;
            `then`: "kill" after these are committed, "stop" without closing the run, or "close";
            `arguments`: of the Checkpointer; `options`: further ones of its saves; `fault`: what
            process 1 does when others read its files, from the load or (`early_fault`) from the
            beginning; see `faulty_node`; `began`: a file for each process, written before it loads;
            `racks`: the variable RACK of each process; `refused`: closing the run may raise, and
            the error is printed.
    """
    logging.basicConfig()  # to stderr
    side: Any = TorchSide() if kind == "torch" else JaxSide()
    chosen = {"fsync": False, "timeout_s": 60, "chunk_bytes": 4096, **order.get("options", {})}
    options = unickpt.SaveOptions(**chosen)
    if side.rank == 1 and "early_fault" in order:
        faulty_node.replace_early(order["early_fault"])
    if "racks" in order:
        os.environ["RACK"] = order["racks"][side.rank]
    checkpointer = unickpt.Checkpointer(
        root, node_local=folders[side.rank], options=options, **order.get("arguments", {})
    )
    if "fault" in order:
        if side.rank == 1:
            nodes = checkpointer._steps.first._nodes
            faulty_node.replace(nodes.server, nodes.folder.path, order["fault"])
        side.barrier()
    if "error" in order:
        check_error(side, checkpointer, order["error"])
        os._exit(0)
    first, began = 0, time.monotonic()
    if "began" in order:
        open(f"{order['began']}-{side.rank}", "w").close()
    if "load" in order:
        assert checkpointer.latest() == order["load"], checkpointer.steps()
    if checkpointer.latest() is not None:
        side.check(checkpointer.load(side.state(None)), checkpointer.loaded_step)
        first = checkpointer.loaded_step + 1
    print("resumed", first - 1, "seconds", time.monotonic() - began, flush=True)
    if "marks" in order:
        checkpointer.wait()
        open(f"{order['marks']}-{side.rank}", "w").close()
    for step in range(first, first + order.get("save", 0)):
        checkpointer.save(step, side.state(step)).result()
        print("saved", step, flush=True)
        time.sleep(order.get("pause_s", 0.0))
    then = order.get("then", "close")
    if then != "close":
        for _ in range(order.get("waits", 0)):
            checkpointer.wait()
        side.barrier()
        print("survives", checkpointer.survives(), flush=True)
        side.barrier()
        if then == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(0)
    close(checkpointer, is_refused="refused" in order)
    print("survives", checkpointer.survives(), flush=True)
    side.barrier()
