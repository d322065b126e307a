"""How long a job of Megatron-Core waits for its checkpoints: its own strategy beside unickpt's.

    python benchmarks/megatron_wait.py                 # 2 ranks, 256 MiB of training state
    python benchmarks/megatron_wait.py --mib 1024 --ranks 4
    python benchmarks/megatron_wait.py --device cuda --ranks 1 --mib 4096 --samples 8192

One job, with real ranks (gloo; NCCL on an accelerator), each of which has some columns of each
layer. In each round every
contender takes a turn, in an order shuffled anew: `dist_checkpointing.save` after a step, with
nothing in flight, then a step. Round 0 warms up, is not counted, and checks what each contender
loads. Medians of seconds of the slowest rank.

waits: the call, and handing it to the queue; Megatron's for its own strategy and where it is said,
else unickpt's. step: the step after it, less one without a save; it waits for copies where these
are lazy, and copies the pages that a process shares that Megatron's queue forks.
--elsewhere makes a step as long as one whose forward and backward pass run on an accelerator, which
leaves the cores alone; without it, work in the background takes them away from the step.
stall: both. all: until the checkpoint is complete. Megatron caches its plans after the first save;
it does not flush its files, so "no flush" does not either.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

import waits

COLUMNS = ("waits", "step", "stall", "all")


def main() -> None:
    """Starts the ranks."""
    parser = waits.parser(__doc__)
    parser.add_argument("--samples", type=int, default=64, help="of a step")
    waits.start(run, parser.parse_args())


def run(rank: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank."""
    from importlib.metadata import version

    import torch
    import torch.distributed as dist

    if options.device == "cpu":
        torch.cuda.current_device = lambda: "cpu"  # Megatron asks for no other
        torch.cuda.synchronize = lambda *_: None
    dist.init_process_group({"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}[options.device])
    job = Job(options)

    def one(save: Any, load: Any, path: Path, check: bool) -> list[float]:
        return turn(job, save, load, path, check)

    times = waits.in_turns(options.rounds, folder, make_contenders(job), one)
    if rank == 0:
        waits.report(f"megatron-core {version('megatron-core')}", options, COLUMNS, times)


class Job:
    """Layers of which each rank has some columns, with AdamW."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        from megatron.core.dist_checkpointing.strategies import async_utils

        from unickpt.integrations.megatron import AsyncCallsQueue

        self.theirs, self.queue = async_utils.AsyncCallsQueue(), AsyncCallsQueue()
        self.ranks, self.elsewhere, self.device = options.ranks, 0.0, options.device
        side = int((options.mib * (1 << 20) / 12 / options.layers) ** 0.5)
        self.side = side - side % options.ranks
        self.layers = [
            torch.nn.Parameter(
                torch.randn(self.side, self.side // options.ranks, device=options.device)
            )
            for _ in range(options.layers)
        ]
        self.data = torch.ones(options.samples, self.side, device=options.device)
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
        waits.synchronize(self.device)
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

    def saves(strategy: Any, background: bool, queue: Any = job.theirs) -> Callable[[str], None]:
        def save(path: str) -> None:
            request = dist_checkpointing.save(
                job.state(), path, strategy, async_sharded_save=background,
                validate_access_integrity=False, **more,
            )  # fmt: skip
            if background:
                queue.schedule_async_request(request)

        return save

    def megatron(background: bool) -> Any:
        strategy = theirs.TorchDistSaveShardedStrategy("torch_dist", 1, cached_metadata=True)
        return saves(strategy, background), theirs.TorchDistLoadShardedStrategy()

    def ours(background: bool = True, queue: Any = job.queue, **options: Any) -> Any:
        strategy = SaveStrategy(job.optimizer, options=unickpt.SaveOptions(**options))
        return saves(strategy, background, queue), LoadStrategy(job.optimizer)

    return {
        "Megatron": megatron(False),
        "Megatron, async": megatron(True),
        "unickpt, no flush": ours(False, fsync=False),
        "unickpt, async": ours(),
        "unickpt, async, no flush": ours(fsync=False),
        "unickpt, async, no flush, lazy": ours(fsync=False, staging="lazy"),
        "the same, Megatron's queue": ours(queue=job.theirs, fsync=False, staging="lazy"),
    }


def turn(job: Job, save: Any, load: Any, path: Path, check: bool) -> list[float]:
    """The times of one contender, in the order of the columns, of the slowest rank."""
    import torch.distributed as dist

    plain = job.step()
    if dist.get_rank() == 0:
        path.mkdir()
    os.sync()
    before = [tensor.clone() for tensor in job.layers] if check else []
    dist.barrier()
    start = perf_counter()
    save(str(path))
    called = perf_counter() - start
    held = max(0.0, job.step() - plain)
    for queue in (job.theirs, job.queue):
        queue.maybe_finalize_async_calls(blocking=True)
    everything = perf_counter() - start
    if check:
        check_loads(job, load, path, before)
    return waits.of_slowest([called, held, called + held, everything], path)


def check_loads(job: Job, load: Any, path: Path, before: list[Any]) -> None:
    """That what was saved is of before the step."""
    import torch
    from megatron.core import dist_checkpointing

    found = dist_checkpointing.load(job.state(), str(path), load)
    for number, expected in enumerate(before):
        assert torch.equal(found[f"layers.{number}.weight"], expected), (path, number)


if __name__ == "__main__":
    main()
