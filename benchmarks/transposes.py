"""Copies in which axes change places: unickpt's, beside NumPy's copyto and torch's copy_.

    python benchmarks/transposes.py

As while loading through rules: a chunk of about 8 MiB goes into a part of a larger array, one
thread, warm memory. GB/s, medians of rounds in which the three take turns.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from peers import machine_facts, print_facts
from rich.console import Console
from rich.table import Table

from unickpt.arrays import strided_copy

CASES = {
    "matrix": ((1448, 1448), (1, 0)),
    "matrix, powers of two": ((1024, 2048), (1, 0)),
    "a few long rows": ((64, 32000), (1, 0)),
    "many short rows": ((32768, 64), (1, 0)),
    "heads: e h d -> h d e": ((1024, 16, 128), (1, 2, 0)),
    "rotary: e h pair half -> h half pair e": ((1024, 16, 64, 2), (1, 3, 2, 0)),
    "heads: h d e -> e h d": ((16, 128, 1024), (2, 0, 1)),
    "convolution: x y i o -> o i x y": ((3, 3, 480, 480), (3, 2, 0, 1)),
}
DTYPES = {"float32": (np.float32, torch.float32), "bfloat16": (np.uint16, torch.int16)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    console = Console(width=None if sys.stdout.isatty() else 120)
    facts = {"numpy": np.__version__, "torch": torch.__version__}
    print_facts(console, machine_facts(Path()) | facts)
    table = Table(title="GB/s", title_justify="left")
    table.add_column("copy")
    for column in ("dtype", "unickpt", "numpy copyto", "torch copy_"):
        table.add_column(column, justify="right")
    for name, (shape, turn) in CASES.items():
        for dtype, kinds in DTYPES.items():
            speeds = measure(shape, turn, *kinds, rounds)
            table.add_row(name, dtype, *(f"{speed:.2f}" for speed in speeds))
    console.print(table)


def measure(
    shape: tuple[int, ...], turn: tuple[int, ...], kind: type, bits: torch.dtype, rounds: int
) -> list[float]:
    """GB/s of the three ways."""
    chunk = np.random.default_rng(0).integers(0, 60000, shape).astype(kind)
    source = chunk.transpose(turn)
    whole = np.zeros((*source.shape[:-1], 4 * source.shape[-1]), kind)
    out = whole[..., : source.shape[-1]]
    if bits == torch.int16:  # the bits of bfloat16, of which NumPy knows nothing
        source, out = source.view(np.int16), out.view(np.int16)
    from_torch, to_torch = torch.from_numpy(source), torch.from_numpy(out)
    ways: list[Callable[[], object]] = [
        lambda: strided_copy.copy(out, source),
        lambda: np.copyto(out, source),
        lambda: to_torch.copy_(from_torch),
    ]
    seconds: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds):
        for way, times in zip(ways, seconds, strict=True):
            out[...] = 0
            begin = perf_counter()
            way()
            times.append(perf_counter() - begin)
            assert np.array_equal(out, source)
    return [chunk.nbytes / 1e9 / statistics.median(times) for times in seconds]


if __name__ == "__main__":
    main()
