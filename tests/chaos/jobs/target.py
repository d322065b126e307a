"""What every job here does alike, so that ckpt-chaos and `run.py` can judge it.

A job is `python JOB FOLDER`. It trains to the step `STEPS`, saves after each one, keeps the newest,
and goes on from what it finds in the folder. What it tells stands beside the folder, not in it,
where ckpt-chaos would take it for a part of a save.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
import warnings
from collections.abc import Mapping
from typing import Any

warnings.simplefilter("ignore")

STEPS = 2
KEPT = 1
FOLDER = os.path.abspath(sys.argv[1])
RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
OWN = os.environ.get("CHAOS_SAVES") == "own"
"""Whether the trainer saves as it does without unickpt; where a job has that."""
LOST_WORK = 7
"""The exit code of a job that would go on from an earlier step than was reported as saved."""


def committed(report: Any, more: int = 0) -> None:
    """Notes that a step is saved: `SaveOptions(metrics=committed)`, or called with its number.

    Arguments:
        report: of the save, or the number of its step.
        more: by how much the step is later than the number in the name of the checkpoint.
    """
    if not isinstance(report, int):
        numbers = re.findall(r"\d+", report.url.rstrip("/").rpartition("/")[2])
        if not numbers:  # "last.ckpt" beside one with a number
            return
        report = int(numbers[-1]) + more
    handle = os.open(f"{FOLDER}.saved.{RANK}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, b"%d\n" % report)
    os.close(handle)


def reported() -> int:
    """The newest step that a rank has reported as saved; 0 if none has."""
    newest = 0
    for rank in range(max(WORLD, int(os.environ.get("CHAOS_RANKS", "1")))):
        try:
            with open(f"{FOLDER}.saved.{rank}") as file:
                newest = max((newest, *map(int, file.read().split())))
        except FileNotFoundError:
            continue
    return newest


def resumed(step: int, saved: int | None = None) -> None:
    """Tells from which step the job goes on, 0 being the beginning; ends the job if a rank has
    reported a later one as saved.

    Arguments:
        step: which it is.
        saved: `reported()` of before the job went on, if that is not now.
    """
    print(f"resumed from step {step}", flush=True)
    newest = reported() if saved is None else saved
    if newest > step:
        print(f"a rank reported step {newest} as saved, and step {step} is found", flush=True)
        os._exit(LOST_WORK)


def ended(state: Mapping[str, Any]) -> None:
    """Tells what the training came to: digests of arrays, which every rank has whole."""
    import numpy as np

    lines = []
    for name in sorted(state):
        array = np.ascontiguousarray(state[name])
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        lines.append(f"{name} {array.dtype} {array.shape} {digest}\n")
    with open(f"{FOLDER}.result.{RANK}", "w") as file:
        file.writelines(lines)
    warm()


def warm() -> None:
    """Tells launcher.py which modules the job has imported, if it asks."""
    if at := os.environ.get("CHAOS_MODULES"):
        with open(at, "w") as file:
            file.write("\n".join(sys.modules))


def whole(module: Any) -> dict[str, Any]:
    """The state of a torch module, sharded or not, as arrays."""
    return {
        name.removeprefix("module."): getattr(x, "full_tensor", lambda x=x: x)().detach().numpy()
        for name, x in module.state_dict().items()
    }


def join() -> None:
    """Makes torch's process group, of one rank, too."""
    import torch.distributed as dist

    os.environ.setdefault("LOCAL_RANK", str(RANK))
    if WORLD == 1:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")


def leave() -> None:
    """Ends a rank without the destructors of gloo, whose threads may abort the process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
