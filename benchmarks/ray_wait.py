"""How long a loop in Ray Train waits for its checkpoints: torch's and Ray's functions, and unickpt.

    python benchmarks/ray_wait.py                        # 2 workers, 64 MiB each in 100 DTensors
    python benchmarks/ray_wait.py --mib 256 --rounds 9

Needs ray. The workers hold DTensors. DCP: `torch.distributed.checkpoint.save` into a local folder,
which `ray.train.report` copies to the run's storage (a folder on the same disk), in the call (SYNC)
or behind it (ASYNC). In each round all contenders take a turn, in an order shuffled anew; a turn
begins when all before is reported. Round 0 warms up, and is not counted. A figure is that of the
slowest worker; the table gives medians of seconds.

waits: the calls that save and report. all: until Ray has the checkpoint in its list.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

CONTENDERS = ("DCP, SYNC", "DCP, ASYNC", "unickpt")


def main() -> None:
    """Starts the workers."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--mib", type=int, default=64, help="of each worker (default: 64)")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    from ray.train import CheckpointConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    with tempfile.TemporaryDirectory() as folder:
        run = RunConfig("run", folder, checkpoint_config=CheckpointConfig(num_to_keep=1))
        config = {**vars(options), "folder": folder}
        scaling = ScalingConfig(num_workers=options.workers)
        TorchTrainer(train, train_loop_config=config, run_config=run, scaling_config=scaling).fit()
        report_table(options, json.loads(Path(folder, "times").read_text()))


def train(config: dict[str, Any]) -> None:
    """What each worker does."""
    import ray.train
    import torch
    from torch.distributed.tensor import DTensor, Shard

    torch.set_num_threads(1)
    mesh = torch.distributed.init_device_mesh("cpu", (config["workers"],))
    columns = (config["mib"] << 20) // 4 // 16 // config["tensors"]
    state: dict[str, Any] = {}
    for number in range(config["tensors"]):
        local = torch.full((16, columns), float(number))
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    times: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    for number in range(config["rounds"] + 1):
        for name in random.Random(number).sample(CONTENDERS, len(CONTENDERS)):
            if ray.train.get_context().get_world_rank() == 0:
                os.sync()
            slowest(0.0)
            begun = perf_counter()
            folder = Path(config["folder"], f"local_{name}_{number}")
            save_and_report(name, {"model": state, "step": number}, folder)
            waits = slowest(perf_counter() - begun)
            ray.train.get_all_reported_checkpoints()
            everything = slowest(perf_counter() - begun)
            shutil.rmtree(folder, ignore_errors=True)
            if number:
                times[name].append([waits, everything])
    Path(config["folder"], "times").write_text(json.dumps(times))


def save_and_report(name: str, state: dict[str, Any], folder: Path) -> None:
    """Saves and reports as a contender does."""
    import ray.train
    import torch
    import torch.distributed.checkpoint as dcp
    from ray.train import Checkpoint, CheckpointUploadMode

    from unickpt.integrations.ray import report

    metrics = {"step": state["step"]}
    if name == "unickpt":
        report(metrics, state, f"unickpt_{state['step']}")
        return
    dcp.save(state, checkpoint_id=folder)
    torch.distributed.barrier()
    is_first = ray.train.get_context().get_world_rank() == 0
    ray.train.report(
        metrics,
        checkpoint=Checkpoint.from_directory(folder) if is_first else None,
        checkpoint_upload_mode=CheckpointUploadMode[name.removeprefix("DCP, ")],
    )


def slowest(seconds: float) -> float:
    """The seconds of the slowest worker, when all have come."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def report_table(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    """Prints the table."""
    import ray

    print(
        f"{options.workers} workers, {options.tensors} DTensors, {options.mib} MiB for each, "
        f"{options.rounds} rounds, ray {ray.__version__}, {os.cpu_count()} cores; seconds, medians"
    )
    print(f"{'':12}{'waits':>10}{'all':>10}")
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):10.3f}" for c in zip(*rows, strict=True))
        print(f"{name:12}{cells}")


if __name__ == "__main__":
    main()
