"""How long torchtitan's loop waits for its own checkpoint manager, and for unickpt's.

    torchrun --nproc-per-node 2 benchmarks/titan_wait.py --rounds 5

torchtitan's trainer with its debug model (76 MB of parameters and AdamW's state) on CPUs, gloo,
FSDP2; see tests/support/titan_job.py for what that takes. In each round all contenders save a step,
in an order shuffled anew, each into its own run, of which two steps are kept; at the end each loads
its last one, three times. A figure is that of the slowest rank; the table gives medians. Round 0
warms up, and is not counted.

The third mode, "async_with_pinned_mem", needs an accelerator, and is not measured.

waits: the call of save, and of maybe_wait_for_staging. committed: until the save is over. load: the
call, from the page cache.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
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
    modes = ("disabled", "async")
    contenders = [(who, mode) for who in ("torchtitan", "unickpt") for mode in modes]
    managers = {name: made(trainer, *name, folder) for name in contenders}
    saves: dict[tuple[str, str], list[list[float]]] = {name: [] for name in contenders}
    loads: dict[tuple[str, str], list[float]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(contenders, len(contenders)):
            seconds = saved(managers[name], number + 1)
            if number:
                saves[name].append(seconds)
    for number in range(3):
        for name in random.Random(number).sample(contenders, len(contenders)):
            loads[name].append(timed(managers[name].load))
    for manager in managers.values():
        manager.close()
    timed(lambda: None)
    if dist.get_rank() == 0:
        shutil.rmtree(folder)
        report(saves, loads)
    del manager, managers, trainer
    gc.collect()  # frees the model first: see "terminate called" in docs/troubleshooting.md
    dist.destroy_process_group()


def made(trainer: Any, who: str, mode: str, folder: Path) -> Any:
    """A contender."""
    from torchtitan.components.checkpointer import CheckpointManager as Theirs

    from unickpt.integrations.torchtitan import CheckpointManager as Ours

    config = (Theirs if who == "torchtitan" else Ours).Config(
        enable=True,
        interval=1,
        keep_latest_k=2,
        async_mode=mode,
        folder=str(folder / f"{who}_{mode}"),
        last_save_model_only=False,
    )
    return config.build(
        dataloader=trainer.dataloader,
        model_parts=trainer.model_parts,
        optimizers=trainer.optimizers,
        lr_schedulers=trainer.lr_schedulers,
        states={"train_state": trainer},
        sd_adapter=None,
    )


def saved(manager: Any, step: int) -> list[float]:
    """How long the loop waits for a save, and how long until it is committed."""
    began = perf_counter()

    def call() -> None:
        manager.save(step)
        manager.maybe_wait_for_staging()

    waits = timed(call)
    manager.maybe_wait_for_saving()
    committed = slowest(perf_counter() - began)
    os.sync()
    timed(lambda: None)
    return [waits, committed]


def timed(call: Callable[[], object]) -> float:
    """Of the slowest rank; all begin together."""
    slowest(0.0)
    began = perf_counter()
    call()
    return slowest(perf_counter() - began)


def slowest(seconds: float) -> float:
    """The largest of all ranks' times, and a barrier."""
    import torch
    import torch.distributed as dist

    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most)


def report(
    saves: dict[tuple[str, str], list[list[float]]], loads: dict[tuple[str, str], list[float]]
) -> None:
    print(f"{'':30}" + "".join(f"{name:>12}" for name in COLUMNS))
    for name, rows in saves.items():
        columns = [*zip(*rows, strict=True), loads[name]]
        medians = "".join(f"{statistics.median(column):12.3f}" for column in columns)
        print(f"{', '.join(name):30}{medians}")


if __name__ == "__main__":
    main()
