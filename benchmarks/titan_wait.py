"""How long torchtitan's loop waits for its own checkpoint manager, and for unickpt's.

    torchrun --nproc-per-node 2 benchmarks/titan_wait.py --rounds 5

torchtitan's trainer with its debug model (76 MB of parameters and AdamW's state) on CPUs, gloo,
FSDP2; see tests/support/titan_job.py for what that takes. In each round all contenders take a turn,
in an order shuffled anew; a turn ends with its checkpoint committed, loaded and removed. A figure
is that of the slowest rank; the table gives medians. Round 0 warms up, and is not counted.

The third mode, "async_with_pinned_mem", needs an accelerator, and is not measured.

waits: the call of save, and of maybe_wait_for_staging. committed: until the save is over. load: the
call, from the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
os.environ.setdefault("OMP_NUM_THREADS", "1")

COLUMNS = ("waits", "committed", "load")


def main() -> None:
    """What each rank does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", help="where to save (default: a temporary folder)")
    options = parser.parse_args()

    import torch.distributed as dist
    from support import titan_job

    given = [tempfile.mkdtemp(dir=options.dir)] if os.environ["RANK"] == "0" else [""]
    dist.init_process_group("gloo")
    dist.broadcast_object_list(given)
    folder = Path(given[0])
    if dist.get_rank() == 0:
        titan_job.make_assets(folder / "assets")
    dist.barrier()
    config = titan_job.small_config(folder / "assets", "own", layers=6)
    config.training.steps, config.dump_folder = 1, str(folder / "run")
    config.checkpoint.enable = False
    trainer = config.build()
    trainer.train()
    times: dict[tuple[str, str], list[list[float]]] = {}
    contenders = [
        (who, mode) for who in ("torchtitan", "unickpt") for mode in ("disabled", "async")
    ]
    for number in range(options.rounds + 1):
        for who, mode in random.Random(number).sample(contenders, len(contenders)):
            seconds = turn(trainer, who, mode, folder / f"{who}_{mode}_{number}")
            if number:
                times.setdefault((who, mode), []).append(seconds)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        report(times)
    dist.destroy_process_group()


def turn(trainer: Any, who: str, mode: str, folder: Path) -> list[float]:
    """The times of one contender, in the order of the columns."""
    import torch.distributed as dist
    from torchtitan.components.checkpointer import CheckpointManager as Theirs

    from unickpt.integrations.torchtitan import CheckpointManager as Ours

    made = (Theirs if who == "torchtitan" else Ours).Config(
        enable=True, interval=1, async_mode=mode, folder=str(folder), last_save_model_only=False
    )
    manager = made.build(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer},
        sd_adapter=None,
    )
    slowest(0.0)
    began = perf_counter()
    manager.save(1)
    manager.maybe_wait_for_staging()
    waits = slowest(perf_counter() - began)
    manager.maybe_wait_for_saving()
    committed = slowest(perf_counter() - began)
    began = perf_counter()
    assert manager.load()
    load = slowest(perf_counter() - began)
    manager.close()
    slowest(0.0)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        os.sync()
    slowest(0.0)
    return [waits, committed, load]


def slowest(seconds: float) -> float:
    """The largest of all ranks' times, and a barrier."""
    import torch
    import torch.distributed as dist

    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def report(times: dict[tuple[str, str], list[list[float]]]) -> None:
    print(f"{'':30}" + "".join(f"{name:>12}" for name in COLUMNS))
    for (who, mode), rows in sorted(times.items()):
        medians = map(statistics.median, zip(*rows, strict=True))
        print(f"{who + ', ' + mode:30}" + "".join(f"{seconds:12.3f}" for seconds in medians))


if __name__ == "__main__":
    main()
