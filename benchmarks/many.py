"""Many small arrays: what saving and loading them costs, beside torch.save and safetensors.

    python benchmarks/many.py                                  # 4,000 and 20,000 arrays of 4 KiB
    python benchmarks/many.py --counts 64 10000 100000 --rounds 3
    python benchmarks/many.py --framework jax

One process, files on the disk of --dir, no fsync, in turns; medians. *call* is how long
`save_async` keeps its caller in the second and later saves of the same tree, *one* a load of one
array. torch.save and safetensors save and load tensors of torch, whatever the framework; what
safetensors loads is cloned, since it only maps the file. Ratios are medians of those within each
round. Below, the phases of the last save, in microseconds for each array.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers import add_run_arguments, fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import unickpt
from unickpt import SaveOptions

OPTIONS = SaveOptions(fsync=False)


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=(4000, 20000))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--framework", choices=("numpy", "torch", "jax"), default="torch")
    add_run_arguments(parser)
    arguments = parser.parse_args()
    console = Console(width=120)
    with fresh_directory(arguments.dir) as directory:
        print_facts(console, {**machine_facts(directory), "torch": torch.__version__})
        for count in arguments.counts:
            measure(console, directory, count, arguments.rounds, arguments.framework)


def measure(console: Console, directory: Path, count: int, rounds: int, framework: str) -> None:
    """Print what one number of arrays takes."""
    tree = arrays(count, framework)
    tensors = arrays(count, "torch")
    path, file, other = (directory / name for name in ("checkpoint", "torch.pt", "safetensors"))
    took: dict[str, list[float]] = {}

    def timed(what: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        found = work()
        took.setdefault(what, []).append(time.perf_counter() - started)
        return found

    for _ in range(rounds + 1):
        pending = timed("call", lambda: unickpt.save_async(path, tree, options=OPTIONS))
        pending.result()
        shutil.rmtree(path)
        phases = timed("save", lambda: unickpt.save(path, tree, options=OPTIONS)).phases
        timed("torch.save", lambda: torch.save(tensors, file))
        timed("safetensors save", lambda: save_file(tensors, other))
        timed("load", lambda: unickpt.load(path, tree))
        timed("torch.load", lambda: torch.load(file))
        timed("safetensors load", lambda: [t.clone() for t in load_file(other).values()])
        timed("open", lambda: unickpt.open(path))
        timed("one", lambda: unickpt.open(path)["layer.0.w0"][:])
        shutil.rmtree(path)
        file.unlink()
        other.unlink()
    table = Table(title=f"{count:,} arrays of 4 KiB ({framework}), seconds", title_justify="left")
    for what in took:
        table.add_column(what, justify="right")
    # The first round warms up.
    table.add_row(*(f"{statistics.median(found[1:]):.4f}" for found in took.values()))
    console.print(table)
    for what, theirs in (("save", "safetensors save"), ("load", "safetensors load")):
        ratios = [b / a for a, b in zip(took[what][1:], took[theirs][1:], strict=True)]
        console.print(f"{what}: {statistics.median(ratios):.2f} of the speed of safetensors")
    each = (f"{name} {1e6 * seconds / count:.1f}" for name, seconds in phases.items())
    console.print(f"us for each array: {', '.join(each)}")


def arrays(count: int, framework: str) -> dict[str, Any]:
    """The state: float32 arrays of 32 x 32."""
    made: dict[str, Any] = {
        f"layer.{n // 10}.w{n % 10}": np.full((32, 32), n, np.float32) for n in range(count)
    }
    if framework == "torch":
        return {name: torch.from_numpy(array) for name, array in made.items()}
    if framework == "jax":
        import jax

        return {name: jax.device_put(array) for name, array in made.items()}
    return made


if __name__ == "__main__":
    main()
