"""The extra memory that a load of another system's format takes at its peak.

    python benchmarks/foreign_memory.py                        # 512 MiB, a budget of 64 MiB
    python benchmarks/foreign_memory.py --mib 2048 --budget 128 --dir /some/disk

Each load runs in a process of its own, which fills arrays that were there before. Extra is the peak
of its anonymous memory less what was there, sampled from outside: see memory.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from memory import run, wait
from peers import fresh_directory
from rich.console import Console
from rich.table import Table

import unickpt

SHAPE = (4096, 4096)
KINDS = ("safetensors", "hf", "torch", "dcp", "orbax")
"""Formats that `convert` writes. In Orbax's, each array is one chunk."""


def main() -> None:
    """Write a checkpoint of each format, and load it in another process."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=512, help="size of the state")
    parser.add_argument("--budget", type=int, default=64, help="of the load, in MiB")
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        load(Path(options.child), options.mib, options.budget)
        return
    table = Table(title="Peak extra memory, MiB, beyond the destination", title_justify="left")
    for column in ("format", "extra", "with files", "within the budget"):
        table.add_column(column)
    with fresh_directory(options.dir) as directory:
        unickpt.save(directory / "own", state(options.mib))
        for kind in KINDS:
            path = directory / ("x.pt" if kind == "torch" else f"x.{kind}")
            unickpt.convert(directory / "own", path, to=kind)
            command = [sys.executable, __file__, "--child", str(path)]
            command += ["--mib", str(options.mib), "--budget", str(options.budget)]
            peak = run(command, 0)
            within = "yes" if peak.extra <= options.budget << 20 else "no"
            sizes = (f"{n / (1 << 20):.0f}" for n in (peak.extra, peak.extra_with_files))
            table.add_row(kind, *sizes, within)
    Console().print(table)


def state(mib: int) -> dict[str, np.ndarray]:
    """Arrays that differ in every element."""
    count = max(1, (mib << 20) // (4 * int(np.prod(SHAPE))))
    numbers = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
    return {f"w{n}": numbers + np.float32(n) for n in range(count)}


def load(path: Path, mib: int, budget: int) -> None:
    """Load into memory that is there already, between two signs."""
    expected = state(mib)
    like = {name: np.full_like(array, -1) for name, array in expected.items()}
    wait("ready")
    unickpt.load(path, like, options=unickpt.LoadOptions(budget_bytes=budget << 20))
    wait("done")
    for name, array in expected.items():
        if not np.array_equal(like[name], array):
            raise SystemExit(f"{path}: {name!r} has other values")


if __name__ == "__main__":
    main()
