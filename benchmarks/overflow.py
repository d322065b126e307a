"""How long save_async stops a training loop when the state does not fit into its memory.

    python benchmarks/overflow.py                                  # 1 GiB, a budget of a quarter
    python benchmarks/overflow.py --mib 4096 --part 8 --dir /some/disk

The state is torch parameters and momenta on the host, and the storage takes so many MB/s (the disk
under --dir, slowed down), as shared storage does. The loop changes everything right after the call
returns: by the optimizer's step, which waits where it must. In turns, in an order shuffled anew:

fits: a budget that holds the state. wait: no optimizer is named, so the call must wait.
drain: Checkpointer(optimizers=...).

Round 0 warms up and is not counted; what was saved is compared bit for bit in every round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt
from unickpt.storage import data_files

COLUMNS = ("call", "step", "committed", "waited", "staged", "drained")
WAYS = ("fits", "wait", "drain")
ARRAY = 4 << 20  # elements


def main() -> None:
    """Measure in turns, and print medians."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    training = Training(options.mib)
    found: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    with (
        fresh_directory(options.dir) as directory,
        slowed(options.rate),
    ):
        print_facts(console, machine_facts(directory))
        for round_ in range(options.rounds + 1):
            for way in random.sample(options.ways, len(options.ways)):
                numbers = measure(training, way, options, directory / f"{round_}-{way}")
                if round_:
                    found[way].append(numbers)
    budget = options.mib / options.part
    table = Table(
        title=f"{options.mib} MiB, budget {budget:g} MiB, storage {options.rate} MB/s",
        title_justify="left",
    )
    table.add_column("way")
    for column in COLUMNS:
        table.add_column(f"{column}, {'s' if column in COLUMNS[:4] else 'MiB'}", justify="right")
    for way, rows in found.items():
        medians = [statistics.median(row[column] for row in rows) for column in COLUMNS]
        shown = [f"{n:.3f}" for n in medians[:4]] + [f"{n / (1 << 20):.0f}" for n in medians[4:]]
        table.add_row(way, *shown)
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--part", type=int, default=4, help="of the state that the budget is")
    parser.add_argument("--rate", type=float, default=300, help="of the storage, MB/s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    return parser.parse_args()


class Training:
    """Parameters and momenta; the gradients are all ones."""

    def __init__(self, mib: int) -> None:
        count = max(1, (mib << 20) // (2 * 4 * ARRAY))
        self.parameters = [torch.nn.Parameter(torch.randn(ARRAY)) for _ in range(count)]
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        gradient = torch.ones(ARRAY)
        for parameter in self.parameters:
            parameter.grad = gradient
        self.optimizer.step()

    @property
    def tree(self) -> dict[str, Any]:
        """What is saved."""
        state = self.optimizer.state
        parameters = {f"p{i}": p.detach() for i, p in enumerate(self.parameters)}
        momenta = {f"m{i}": state[p]["momentum_buffer"] for i, p in enumerate(self.parameters)}
        return parameters | momenta


@contextmanager
def slowed(rate: float) -> Iterator[None]:
    """The storage takes so many MB/s."""
    real = data_files.DataFile.add

    def write(self: data_files.DataFile, value: Any, *arguments: Any) -> None:
        time.sleep(sum(map(len, value)) / (rate * 1e6))
        real(self, value, *arguments)

    data_files.DataFile.add = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        data_files.DataFile.add = real  # type: ignore[method-assign]


def measure(
    training: Training, way: str, options: argparse.Namespace, path: Path
) -> dict[str, float]:
    """One save, and one step of the optimizer right after it."""
    nbytes = options.mib << 20
    saving = unickpt.SaveOptions(
        budget_bytes=2 * nbytes + (64 << 20) if way == "fits" else nbytes // options.part,
        fsync=False,
    )
    optimizers = [training.optimizer] if way == "drain" else []
    expected = {name: tensor.clone() for name, tensor in training.tree.items()}
    with unickpt.Checkpointer(path, optimizers=optimizers, options=saving) as run:
        began = time.perf_counter()
        pending = run.save(1, training.tree)
        called = time.perf_counter()
        training.optimizer.step()
        stepped = time.perf_counter()
        report = pending.result()
        found = run.load(step=1)
        if any((found[name] != tensor.numpy()).any() for name, tensor in expected.items()):
            raise SystemExit(f"{way}: saved something else")
        run.delete(1)
    return {
        "call": called - began,
        "step": stepped - called,
        "committed": report.seconds,
        "waited": report.budget_wait_s,
        "staged": report.staged_bytes,
        "drained": report.drained_bytes,
    }


if __name__ == "__main__":
    main()
