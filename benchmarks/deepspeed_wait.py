"""How long a DeepSpeed job waits for its checkpoints: its own `save_checkpoint` beside unickpt's.

    python benchmarks/deepspeed_wait.py                # 2 ranks, ZeRO 1, 256 MiB of training state
    python benchmarks/deepspeed_wait.py --stage 3 --mib 1024 --ranks 4
    python benchmarks/deepspeed_wait.py --device cuda --ranks 1 --mib 4096 --samples 8192

One job, with real ranks (gloo; NCCL on an accelerator). In each round every contender takes a turn,
in an order shuffled anew: a save of an engine that has made steps, when nothing is in flight, then
a step. Round 0 warms up, is not counted, and checks what each contender loads. Medians of seconds
of the slowest rank.

waits: the call. step: the step after it, less one without a save; with staging="lazy" it waits
for copies. cpu: seconds of the CPUs that the save takes, in the call and beside the step: what a
loop that needs all cores cannot get back. all: until the checkpoint is complete. "no save" shows
how much of this is chance. DeepSpeed does not flush its files; so "no flush" does not either.
--elsewhere makes a step as long as one whose forward and backward pass run
on an accelerator, which leaves the cores alone; without it, work in the background takes them away
from the step.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import waits

COLUMNS = ("waits", "step", "cpu", "all")


def main() -> None:
    """Starts the ranks."""
    parser = waits.parser(__doc__)
    parser.add_argument("--stage", type=int, default=1)
    parser.add_argument("--samples", type=int, default=1, help="of a step")
    waits.start(run, parser.parse_args())


def run(rank: int, options: argparse.Namespace, folder: Path) -> None:
    """One rank."""
    os.environ["DS_ACCELERATOR"] = options.device
    engine = trained(options)
    contenders = make_contenders(engine)

    def one(save: Any, wait: Any, load: Any, path: Path, check: bool) -> list[float]:
        return turn(engine, options, save, wait, load, path, check)

    times = waits.in_turns(options.rounds, folder, contenders, one)
    if rank == 0:
        import deepspeed

        facts = f"ZeRO {options.stage}, DeepSpeed {deepspeed.__version__}"
        waits.report(facts, options, COLUMNS, times)


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
        "train_batch_size": options.ranks * options.samples,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"torch_adam": True}},
        "zero_optimization": {"stage": options.stage, "overlap_comm": False},
    }
    params = model.parameters()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=params, config=config)
    for _ in range(2):
        step(engine, options, 0)
    return engine


def step(engine: Any, options: argparse.Namespace, elsewhere: float) -> float:
    """Makes a step; returns its seconds."""
    import torch

    start = perf_counter()
    time.sleep(elsewhere)
    side = next(iter(engine.module.children())).in_features
    data = torch.ones(options.samples, side, device=options.device)
    engine.backward(engine(data).square().mean())
    engine.step()
    waits.synchronize(options.device)
    return perf_counter() - start


def make_contenders(engine: Any) -> dict[str, Any]:
    """For each contender what saves, what waits for it, and what loads."""
    import unickpt
    from unickpt.integrations.deepspeed import EngineCheckpoints

    def ours(background: bool = True, **options: Any) -> Any:
        made = EngineCheckpoints(
            engine, options=unickpt.SaveOptions(**options), background=background
        )
        return made.save_checkpoint, made.wait, made.load_checkpoint

    def nothing(path: str) -> None:
        Path(path).mkdir(parents=True, exist_ok=True)

    return {
        "no save": (nothing, lambda: None, nothing),
        "DeepSpeed": (engine.save_checkpoint, lambda: None, engine.load_checkpoint),
        "unickpt, blocking, no flush": ours(background=False, fsync=False),
        "unickpt": ours(),
        "unickpt, no flush": ours(fsync=False),
        "unickpt, no flush, lazy": ours(fsync=False, staging="lazy"),
    }


def turn(
    engine: Any,
    options: argparse.Namespace,
    save: Any,
    wait: Any,
    load: Any,
    path: Path,
    check: bool,
) -> list[float]:
    """The times of one contender, in the order of the columns, of the slowest rank."""
    import torch.distributed as dist

    before = process_time()
    plain, plain_cpu = step(engine, options, options.elsewhere), process_time() - before
    os.sync()
    dist.barrier()
    start, before = perf_counter(), process_time()
    save(str(path))
    called = perf_counter() - start
    held = max(0.0, step(engine, options, options.elsewhere) - plain)
    wait()
    everything, cpu = perf_counter() - start, process_time() - before - plain_cpu
    if check:  # what was saved is of before the step
        load(str(path))
        assert engine.global_steps >= 2
    return waits.of_slowest([called, held, cpu, everything], path)


if __name__ == "__main__":
    main()
