"""How long a DeepSpeed job waits for its checkpoints: its own `save_checkpoint` beside unickpt's.

    python benchmarks/deepspeed_wait.py                # 2 ranks, ZeRO 1, 256 MiB of training state
    python benchmarks/deepspeed_wait.py --stage 3 --mib 1024 --ranks 4

One job, with real ranks (gloo). In each round every contender takes a turn, in an order shuffled
anew: a save of an engine that has made steps, when nothing is in flight, then a step. Round 0 warms
up, is not counted, and checks what each contender loads. Medians of seconds of the slowest rank.

waits: the call. step: the step after it, less one without a save; with staging="lazy" it waits
for copies. all: until the checkpoint is complete. DeepSpeed does not flush its files; so "no
flush" does not either. --elsewhere makes a step as long as one whose forward and backward pass run
on an accelerator, which leaves the cores alone; without it, work in the background takes them away
from the step.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import shutil
import socket
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

COLUMNS = ("waits", "step", "all")


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--mib", type=int, default=256, help="of weights and AdamW's state")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--elsewhere", type=float, default=0.0, help="seconds of a step on an accelerator (a sleep)"
    )
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=run, args=(rank, port, options, Path(folder)))
            for rank in range(options.ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


def run(rank: int, port: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank."""
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        DS_ACCELERATOR="cpu", OMP_NUM_THREADS="1",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    engine = trained(options)
    contenders = make_contenders(engine)
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(sorted(contenders), len(contenders)):
            path = folder / f"{number}"
            seconds = turn(engine, options.elsewhere, *contenders[name], path, not number)
            if number:
                times[name].append(seconds)
    if rank == 0:
        report(options, times)
    dist.barrier()
    dist.destroy_process_group()


def trained(options: argparse.Namespace) -> Any:
    """An engine that has made two steps."""
    import logging

    import deepspeed
    import torch

    deepspeed.utils.logging.logger.setLevel(logging.ERROR)
    per_weight = 12 if options.stage == 0 else 16  # the masters come to it
    side = int((options.mib * (1 << 20) / per_weight / options.layers) ** 0.5)
    layers = (torch.nn.Linear(side, side, bias=False) for _ in range(options.layers))
    model = torch.nn.Sequential(*layers)
    config = {
        "train_batch_size": options.ranks,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": options.stage, "overlap_comm": False},
    }
    params = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    for _ in range(2):
        step(engine, 0)
    return engine


def step(engine: Any, elsewhere: float) -> float:
    """Makes a step; returns its seconds."""
    import torch

    start = perf_counter()
    time.sleep(elsewhere)
    side = next(iter(engine.module.children())).in_features
    engine.backward(engine(torch.ones(1, side)).square().mean())
    engine.step()
    return perf_counter() - start


def make_contenders(engine: Any) -> dict[str, Any]:
    """For each contender what saves, what waits for it, and what loads."""
    import unickpt
    from unickpt.integrations.deepspeed import EngineCheckpoints

    def ours(**options: Any) -> Any:
        made = EngineCheckpoints(engine, options=unickpt.SaveOptions(**options))
        return made.save_checkpoint, made.wait, made.load_checkpoint

    return {
        "DeepSpeed": (engine.save_checkpoint, lambda: None, engine.load_checkpoint),
        "unickpt": ours(),
        "unickpt, no flush": ours(fsync=False),
        "unickpt, no flush, lazy": ours(fsync=False, staging="lazy"),
    }


def turn(
    engine: Any, elsewhere: float, save: Any, wait: Any, load: Any, path: Path, check: bool
) -> list[float]:
    """The times of one contender, in the order of the columns, of the slowest rank."""
    import torch
    import torch.distributed as dist

    plain = step(engine, elsewhere)
    os.sync()
    dist.barrier()
    start = perf_counter()
    save(str(path))
    waits = perf_counter() - start
    held = max(0.0, step(engine, elsewhere) - plain)
    wait()
    everything = perf_counter() - start
    if check:  # what was saved is of before the step
        load(str(path))
        assert engine.global_steps >= 2
    slowest = torch.tensor([waits, held, everything])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    time.sleep(0.2)
    return [float(n) for n in slowest]


def report(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    """Prints the table."""
    import deepspeed
    import torch

    print(
        f"ZeRO {options.stage}, {options.ranks} ranks, {options.mib} MiB in {options.layers} "
        f"layers, {options.elsewhere} s of a step elsewhere, {options.rounds} rounds, DeepSpeed "
        f"{deepspeed.__version__}, torch {torch.__version__}, {os.cpu_count()} cores; "
        "seconds, medians",
        flush=True,
    )
    print(f"{'':26}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):10.3f}" for c in zip(*rows, strict=True))
        print(f"{name:26}{cells}", flush=True)


if __name__ == "__main__":
    main()
