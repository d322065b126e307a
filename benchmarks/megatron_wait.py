"""How long a job of Megatron-Core waits for its checkpoints: its own strategy beside unickpt's.

    python benchmarks/megatron_wait.py                 # 2 ranks, 256 MiB of training state
    python benchmarks/megatron_wait.py --mib 1024 --ranks 4

One job, with real ranks (gloo), each of which has some columns of each layer. In each round every
contender takes a turn, in an order shuffled anew: `dist_checkpointing.save` after a step, with
nothing in flight, then a step. Round 0 warms up, is not counted, and checks what each contender
loads. Medians of seconds of the slowest rank.

waits: the call, and handing it to Megatron's queue. step: the step after it, less one without a
save; it waits for copies where these are lazy, and copies the pages that a forked process shares.
--elsewhere makes a step as long as one whose forward and backward pass run on an accelerator, which
leaves the cores alone; without it, work in the background takes them away from the step.
stall: both. all: until the checkpoint is complete. Megatron caches its plans after the first save;
it does not flush its files, so "no flush" does not either.
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
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

COLUMNS = ("waits", "step", "stall", "all")


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--mib", type=int, default=256, help="of weights and AdamW's state")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--samples", type=int, default=64, help="of a step")
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
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    warnings.simplefilter("ignore")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: "cpu"  # Megatron asks for no other
    torch.cuda.synchronize = lambda *_: None
    dist.init_process_group("gloo")
    job = Job(options)
    contenders = make_contenders(job)
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(sorted(contenders), len(contenders)):
            path = folder / f"{number}"
            seconds = turn(job, *contenders[name], path, check=not number)
            if number:
                times[name].append(seconds)
    if rank == 0:
        report(options, times)
    dist.barrier()
    dist.destroy_process_group()


class Job:
    """Layers of which each rank has some columns, with AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

        self.queue, self.ranks, self.elsewhere = AsyncCallsQueue(), options.ranks, 0.0
        side = int((options.mib * (1 << 20) / 12 / options.layers) ** 0.5)
        self.side = side - side % options.ranks
        self.layers = [
            torch.nn.Parameter(torch.randn(self.side, self.side // options.ranks))
            for _ in range(options.layers)
        ]
        self.data = torch.ones(options.samples, self.side)
        self.optimizer = torch.optim.AdamW(self.layers, lr=1e-4)
        for _ in range(2):
            self.step()
        self.elsewhere = options.elsewhere

    def step(self) -> float:
        """Makes a step; returns its seconds."""
        import torch

        start = perf_counter()
        time.sleep(self.elsewhere)
        losses = [(self.data @ layer).square().mean() for layer in self.layers]
        torch.stack(losses).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return perf_counter() - start

    def state(self) -> dict[str, Any]:
        """As Megatron hands it over."""
        import torch.distributed as dist
        from megatron.core.dist_checkpointing import ShardedTensor

        at, made = (1, dist.get_rank(), self.ranks), {}
        for number, layer in enumerate(self.layers):
            name, state = f"layers.{number}.weight", self.optimizer.state[layer]
            moments = {f"optimizer.state.{slot}.{name}": state[slot] for slot in SLOTS}
            for key, tensor in {name: layer.data, **moments}.items():
                made[key] = ShardedTensor.from_rank_offsets(key, tensor, at)
        return {**made, "iteration": int(self.optimizer.state[self.layers[0]]["step"])}


SLOTS = ("exp_avg", "exp_avg_sq")


def make_contenders(job: Job) -> dict[str, tuple[Callable[[str], None], Any]]:
    """For each contender what saves, and the strategy that loads."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.strategies import torch as theirs

    import unickpt
    from unickpt.integrations.megatron import LoadStrategy, SaveStrategy

    asks = hasattr(theirs, "get_async_strategy")
    more = {"async_strategy": "mcore"} if asks else {}

    def saves(strategy: Any, background: bool) -> Callable[[str], None]:
        def save(path: str) -> None:
            request = dist_checkpointing.save(
                job.state(), path, strategy, async_sharded_save=background,
                validate_access_integrity=False, **more,
            )  # fmt: skip
            if background:
                job.queue.schedule_async_request(request)

        return save

    def megatron(background: bool) -> Any:
        strategy = theirs.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        return saves(strategy, background), theirs.TorchDistLoadShardedStrategy()

    def ours(background: bool = True, **options: Any) -> Any:
        strategy = SaveStrategy(job.optimizer, options=unickpt.SaveOptions(**options))
        return saves(strategy, background), LoadStrategy(job.optimizer)

    return {
        "Megatron": megatron(False),
        "Megatron, async": megatron(True),
        "unickpt, no flush": ours(False, fsync=False),
        "unickpt, async": ours(),
        "unickpt, async, no flush": ours(fsync=False),
        "unickpt, async, no flush, lazy": ours(fsync=False, staging="lazy"),
    }


def turn(job: Job, save: Any, load: Any, path: Path, check: bool) -> list[float]:
    """The times of one contender, in the order of the columns, of the slowest rank."""
    import torch
    import torch.distributed as dist

    plain = job.step()
    if dist.get_rank() == 0:
        path.mkdir()
    os.sync()
    before = [tensor.clone() for tensor in job.layers] if check else []
    dist.barrier()
    start = perf_counter()
    save(str(path))
    waits = perf_counter() - start
    held = max(0.0, job.step() - plain)
    job.queue.maybe_finalize_async_calls(blocking=True)
    everything = perf_counter() - start
    if check:
        check_loads(job, load, path, before)
    slowest = torch.tensor([waits, held, waits + held, everything])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    dist.barrier()
    time.sleep(0.2)
    return [float(n) for n in slowest]


def check_loads(job: Job, load: Any, path: Path, before: list[Any]) -> None:
    """That what was saved is of before the step."""
    import torch
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(job.state(), str(path), load)
    for number, expected in enumerate(before):
        assert torch.equal(found[f"layers.{number}.weight"], expected), (path, number)


def report(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    """Prints the table."""
    from importlib.metadata import version

    import torch

    print(
        f"{options.ranks} ranks, {options.mib} MiB in {options.layers} layers, "
        f"{options.elsewhere} s of a step elsewhere, {options.rounds} rounds, "
        f"megatron-core {version('megatron-core')}, torch {torch.__version__}, "
        f"{os.cpu_count()} cores; seconds, medians",
        flush=True,
    )
    print(f"{'':32}" + "".join(f"{column:>10}" for column in COLUMNS))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):10.3f}" for c in zip(*rows, strict=True))
        print(f"{name:32}{cells}", flush=True)


if __name__ == "__main__":
    main()
