"""What deepspeed_wait.py and megatron_wait.py share: real ranks, in which contenders take turns."""

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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Times = dict[str, list[list[float]]]


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that both have."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=int, default=2)
    made.add_argument("--mib", type=int, default=256, help="of weights and AdamW's state")
    made.add_argument("--layers", type=int, default=24)
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument(
        "--elsewhere", type=float, default=0.0, help="seconds of a step on an accelerator (a sleep)"
    )
    made.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    return made


def start(
    run: Callable[[int, argparse.Namespace, Path], None], options: argparse.Namespace
) -> None:
    """Has each rank run a function of its number, the options and a folder of all."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        context = multiprocessing.get_context("spawn")
        ranks = [
            context.Process(target=_run, args=(run, rank, port, options, Path(folder)))
            for rank in range(options.ranks)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()


def _run(
    run: Callable[..., None], rank: int, port: int, options: argparse.Namespace, folder: Path
) -> None:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(options.ranks), LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(options.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    run(rank, options, folder)
    dist.barrier()
    dist.destroy_process_group()


def in_turns(
    rounds: int,
    folder: Path,
    contenders: Mapping[str, Sequence[Any]],
    turn: Callable[..., list[float]],
) -> Times:
    """The seconds of each contender's turns; round 0 warms up.

    Arguments:
        rounds: that count.
        folder: for what is saved.
        contenders: by name the arguments of a turn.
        turn: called with these, the path, and whether to check what was saved.
    """
    times: Times = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name in random.Random(number).sample(sorted(contenders), len(contenders)):
            seconds = turn(*contenders[name], folder / f"{number}", not number)
            if number:
                times[name].append(seconds)
    return times


def synchronize(device: str) -> None:
    """Waits for the work of the loop on a device, as one that logs its loss; not for copies on
    other streams."""
    import torch

    if device == "cuda":
        torch.cuda.current_stream().synchronize()


def of_slowest(seconds: Sequence[float], path: Path) -> list[float]:
    """The largest of all ranks' seconds; removes what was saved."""
    import torch
    import torch.distributed as dist

    slowest = torch.tensor(seconds, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    time.sleep(0.2)
    return [float(n) for n in slowest]


def report(facts: str, options: argparse.Namespace, columns: Sequence[str], times: Times) -> None:
    """Prints the table, under what was measured with what."""
    import torch

    print(
        f"{options.ranks} ranks, {options.mib} MiB in {options.layers} layers, "
        f"{options.elsewhere} s of a step elsewhere, on {options.device}, {options.rounds} rounds, "
        f"{facts}, torch "
        f"{torch.__version__}, {os.cpu_count()} cores; seconds, medians",
        flush=True,
    )
    width = max(map(len, times)) + 2
    print(" " * width + "".join(f"{column:>10}" for column in columns))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):10.3f}" for c in zip(*rows, strict=True))
        print(f"{name:{width}}{cells}", flush=True)
