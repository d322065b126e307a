"""A job whose processes have two experts each of a mixture of eight, and a part of a dense array.

All values of a step are its number.
"""

from __future__ import annotations

import json
import logging
import os
import signal
from typing import Any

import numpy as np

import unickpt
from unickpt.types import Box, LocalFragments

EXPERTS = 8
SHAPE = (37, 41)


def state(rank: int, count: int, step: int) -> dict[str, Any]:
    """What a process saves."""
    per_process = EXPERTS // count
    first = rank * per_process
    end = EXPERTS if rank == count - 1 else first + per_process

    def filled(box: Box, value: int) -> np.ndarray:
        return np.full(box.shape, value, np.float32)

    whole = Box.whole(SHAPE)
    experts = {
        str(n): {
            "up": LocalFragments(
                SHAPE,
                [(box, filled(box, step)) for box in ([whole] if first <= n < end else [])],
                dtype="float32",
            )
        }
        for n in range(EXPERTS)
    }
    return {"experts": experts, "dense": np.full(500, step, np.float32), "step": step}


def run(root: str, folders: list[str], order: dict[str, Any]) -> None:
    """What each process does.

    Arguments:
        root: of the run.
        folders: of the node of each process.
        order: `load`: the step that must be resumed; `save`: how many steps; `then`: "kill" after
            these are uploaded; `arguments`: of the Checkpointer; `parity`: of its options.
    """
    import torch.distributed as dist

    logging.basicConfig()  # to stderr
    dist.init_process_group("gloo")
    rank, count = dist.get_rank(), dist.get_world_size()
    parity = tuple(order["parity"]) if "parity" in order else None
    options = unickpt.SaveOptions(fsync=False, timeout_s=60, chunk_bytes=4096, parity=parity)
    checkpointer = unickpt.Checkpointer(
        root,
        node_local=folders[rank],
        experts=unickpt.Experts({"experts/{x}/up": 2}),
        options=options,
        **order.get("arguments", {}),
    )
    first = 1
    if "load" in order:
        assert checkpointer.latest() == order["load"], checkpointer.steps()
        loaded, report = checkpointer.load(return_report=True)
        assert loaded["step"] == order["load"]
        assert (loaded["dense"] == order["load"]).all()
        steps = {int(n): int(e["up"][0, 0]) for n, e in loaded["experts"].items()}
        assert all((e["up"] == steps[int(n)]).all() for n, e in loaded["experts"].items())
        older = {n: step for _, n, step in report.older_experts}
        assert {n: s for n, s in steps.items() if s != order["load"]} == older
        print("experts", json.dumps(steps), flush=True)
        first = order["load"] + 1
    for step in range(first, first + order["save"]):
        checkpointer.save(step, state(rank, count, step)).result()
        checkpointer.wait()
    dist.barrier()
    if order.get("then") == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    checkpointer.close()
    dist.barrier()
