"""How long a training loop waits for torch.distributed.checkpoint, and for unickpt in its place.

    python benchmarks/dcp_wait.py                          # 4 ranks, 64 MiB each in 400 DTensors
    python benchmarks/dcp_wait.py --ranks 2 --tensors 4000 --mib 16 --rounds 9

The ranks are processes with gloo. In each round all contenders take a turn, in an order shuffled
anew; a turn ends with its checkpoint committed and removed. A figure is that of the slowest rank;
the table gives medians. Both flush their files. Round 0 warms up, is not counted, and checks what
each contender loads.

save: the call. async, waits: the call of async_save. async, all: until its future has a result.
load: the call, from the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

COLUMNS = ("save", "async, waits", "async, all", "load")


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tensors", type=int, default=400)
    parser.add_argument("--mib", type=int, default=64, help="of each rank (default: 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    import torch.multiprocessing as multiprocessing

    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        store = str(Path(folder) / "store")
        arguments = (options, store, Path(folder))
        multiprocessing.spawn(run, arguments, options.ranks)  # type: ignore[no-untyped-call]


def run(rank: int, options: argparse.Namespace, store: str, folder: Path) -> None:
    """What each rank does."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as theirs

    import unickpt.integrations.dcp as ours

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks
    )
    # torch's background thread uses collectives, which must not meet those of the loop.
    group = dist.new_group()
    contenders: dict[str, Any] = {"torch": theirs, "unickpt": ours}
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    state = make_state(options)
    for number in range(options.rounds + 1):
        order = random.Random(number).sample(sorted(contenders), len(contenders))
        for name in order:
            seconds = turn(contenders[name], state, folder / f"{name}_{number}", group)
            if number:
                times[name].append(seconds)
    if rank == 0:
        report(options, times, torch.__version__)
    dist.destroy_process_group()


def make_state(options: argparse.Namespace) -> dict[str, Any]:
    """So many DTensors, of which each rank holds an equal part."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (options.ranks,))
    columns = max(1, (options.mib << 20) // 4 // 16 // options.tensors)
    state = {}
    for number in range(options.tensors):
        local = torch.full((16, columns), float(number + dist.get_rank()))
        state[f"layers.{number}.weight"] = DTensor.from_local(local, mesh, [Shard(0)])
    return {"model": state, "step": 3}


def turn(functions: Any, state: dict[str, Any], path: Path, group: Any) -> list[float]:
    """The times of one contender, in the order of the columns."""
    import torch

    saved, behind = path.with_suffix(".a"), path.with_suffix(".b")
    save = slowest(lambda: functions.save(state, checkpoint_id=saved))
    futures: list[Any] = []
    slowest(lambda: None)
    began = perf_counter()
    arguments = {"checkpoint_id": behind, "process_group": group}
    waits = slowest(lambda: futures.append(functions.async_save(state, **arguments)))
    futures[0].result()
    everything = slowest(lambda: None, began)
    empty = {name: torch.zeros_like(x) for name, x in state["model"].items()}
    loaded = {"model": empty, "step": 0}
    load = slowest(lambda: functions.load(loaded, checkpoint_id=behind))
    assert loaded["step"] == 3
    for name, tensor in state["model"].items():
        assert torch.equal(loaded["model"][name].to_local(), tensor.to_local()), name
    slowest(lambda: None)
    if torch.distributed.get_rank() == 0:
        for folder in (saved, behind):
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
    return [save, waits, everything, load]


def slowest(work: Callable[[], object], began: float | None = None) -> float:
    """Runs work on all ranks at once; the seconds of the slowest."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    start = perf_counter() if began is None else began
    work()
    seconds = torch.tensor(perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def report(options: argparse.Namespace, times: dict[str, list[list[float]]], torch: str) -> None:
    """Prints the table."""
    print(
        f"{options.ranks} ranks, {options.tensors} DTensors, {options.mib} MiB for each rank, "
        f"{options.rounds} rounds, torch {torch}, {os.cpu_count()} cores; seconds, medians"
    )
    print(f"{'':8}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):14.3f}" for c in zip(*rows, strict=True))
        print(f"{name:8}{cells}")


if __name__ == "__main__":
    main()
