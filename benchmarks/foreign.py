"""Load what other libraries saved, with unickpt and with the library itself, in turns.

    python benchmarks/foreign.py                       # 1 GiB of each format, 5 rounds
    python benchmarks/foreign.py --formats dcp orbax --mib 256 --rounds 9

One process, the same arrays for all, everything in the page cache. Both fill the same tensors in
place where the library can; for Orbax, both make new JAX arrays. In every round the two take turns
in an order shuffled anew; the ratio is taken within each round. `a quarter` loads the first quarter
of the rows of every array with unickpt, and tells how many bytes of the files it read.
Round 0 warms up, is not counted, and checks what both load, bit for bit.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, Contender, Jax
from peers import (
    ArraySet,
    Conditions,
    check_equal,
    fresh_directory,
    keep_memory,
    machine_facts,
    print_facts,
    timed,
    versions,
)
from rich.console import Console
from rich.table import Table

import unickpt
from unickpt.format.file_ranges import RangeReader
from unickpt.format.files import Files

FORMATS = ("safetensors", "safetensors clone", "dcp", "dcp hf", "torch.save", "orbax")
ROWS = 2048


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--mib", type=int, default=1024, help="size of a checkpoint")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    parser.add_argument("--patience", type=float, default=0.0,
                        help="before each timing, wait at most so many seconds until nothing "
                        "else runs")  # fmt: skip
    parser.add_argument("--memory", choices=("kept", "fresh"), default="kept",
                        help="whether freed memory stays with the process, or goes back to the "
                        "system, as when a job restores once, in a new process")  # fmt: skip
    arguments = parser.parse_args()
    if arguments.memory == "kept":
        keep_memory()
    console = Console()
    contenders = [CONTENDERS[name]() for name in arguments.formats]
    array_set = ArraySet("large", arguments.mib // (ROWS * ROWS * 4 >> 20), (ROWS, ROWS))
    table = Table("format", "its library", "unickpt", "times as fast", "a quarter", "bytes read",
                  title=f"load {array_set}, {arguments.memory} memory")  # fmt: skip
    with fresh_directory(arguments.dir) as directory:
        print_facts(console, {**machine_facts(directory), "unickpt": unickpt.__version__,
                              **versions(contenders)})  # fmt: skip
        conditions = Conditions(arguments.patience, arguments.memory == "fresh")
        for contender in contenders:
            path = directory / contender.name.replace(" ", "-")
            table.add_row(*measured(contender, path, array_set, arguments.rounds, conditions))
    console.print(table)


def measured(
    contender: Contender, path: Path, array_set: ArraySet, rounds: int, conditions: Conditions
) -> list[str]:
    """A row of the table."""
    arrays = array_set.arrays()
    contender.save(path, contender.prepare(arrays), durable=False)
    shapes = {name: array.shape for name, array in arrays.items()}
    loads = {
        "peer": lambda target: contender.load(path, target, verify=False),
        "unickpt": lambda target: ours(contender, path, target),
    }
    seconds: dict[str, list[float]] = {name: [] for name in (*loads, "quarter")}
    for number in range(rounds + 1):
        for name in random.sample(list(loads), len(loads)):
            target = contender.target(shapes)
            took, loaded = timed(partial(loads[name], target), conditions)
            if number == 0:
                check_equal(contender, arrays, loaded)
            else:
                seconds[name].append(took)
            del target, loaded
        took, read = timed(partial(quarter, path, shapes), conditions)
        seconds["quarter"] += [took] * bool(number)
    counts = isinstance(unickpt.open(path).reader, RangeReader)  # others read through TensorStore
    ratios = [a / b for a, b in zip(seconds["peer"], seconds["unickpt"], strict=True)]
    return [
        contender.name,
        *(f"{statistics.median(seconds[name]):.3f} s" for name in ("peer", "unickpt")),
        f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        f"{statistics.median(seconds['quarter']):.3f} s",
        f"{read / array_set.nbytes:.2f} of all" if counts else "not counted",
    ]


def ours(contender: Contender, path: Path, target: Any) -> Mapping[str, Any]:
    """What unickpt loads, into the memory that the library would fill."""
    if target is None:  # the library makes tensors
        import torch

        stored = unickpt.open(path)
        target = {name: torch.empty(stored[name].shape) for name in stored}
    found = unickpt.load(path, target)
    if isinstance(contender, Jax):
        contender.jax.block_until_ready(found)
    return found  # type: ignore[no-any-return]


def quarter(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Loads a quarter of each array; the bytes that were read of files by ranges."""
    count, read_into = 0, Files.read_into

    def counted(self: Files, file: str, offset: int, out: memoryview) -> None:
        nonlocal count
        count += out.nbytes
        read_into(self, file, offset, out)

    Files.read_into = counted  # type: ignore[method-assign]
    try:
        stored = unickpt.open(path)
        for name, shape in shapes.items():
            np.asarray(stored[name][: shape[0] // 4])
    finally:
        Files.read_into = read_into  # type: ignore[method-assign]
    return count


if __name__ == "__main__":
    main()
