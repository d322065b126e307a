"""Small saves and loads before and after a change: Python calls, not bytes, take the time.

    git worktree add --detach /tmp/before COMMIT
    python benchmarks/small.py --before /tmp/before            # and this checkout
    python benchmarks/small.py --before /tmp/before --rounds 10

Each round starts a process for each checkout, in turns, and measures in it: the import of unickpt
beyond that of its dependencies, the first save, and warm saves and loads of a tree of one and of 64
tensors of 16 KiB, on tmpfs, without fsync. Printed are medians over rounds of medians, in ms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from peers import machine_facts, print_facts
from rich.console import Console
from rich.table import Table

MEASURED = """
import json, shutil, statistics, tempfile, time
import msgspec, numpy, tensorstore, torch
started = time.perf_counter()
import unickpt
times = {"import unickpt": (time.perf_counter() - started) * 1e3}
folder = tempfile.mkdtemp(dir="/dev/shm")
options = unickpt.SaveOptions(fsync=False)

def timed(work, number):
    started = time.perf_counter()
    work(number)
    return (time.perf_counter() - started) * 1e3

def median(work, count):
    return statistics.median([timed(work, number) for number in range(count)][count // 5 :])

for count in (1, 64):
    tree = {f"w{n}": torch.ones(64, 64) for n in range(count)} | {"step": 3}
    save = lambda n: unickpt.save(f"{folder}/{count}-{n}", tree, options=options)
    times.setdefault("first save", timed(save, "first"))
    times[f"save, {count}"] = median(save, 100)
    times[f"load, {count}"] = median(lambda n: unickpt.load(f"{folder}/{count}-{n}", tree), 100)
with unickpt.Checkpointer(f"{folder}/run", keep_last=2, options=options) as run:
    def step(number):
        pending = run.save(number, tree)
        calls.append((time.perf_counter() - began[0]) * 1e3)
        pending.result()
        run.wait()
        began[0] = time.perf_counter()
    calls, began = [], [time.perf_counter()]
    times["Checkpointer.save and wait, 64"] = median(step, 60)
    times["Checkpointer.save, the call, 64"] = statistics.median(calls[12:])
shutil.rmtree(folder)
print(json.dumps(times))
"""


def measured(checkout: Path) -> dict[str, float]:
    """The times of one process that uses the unickpt of a checkout."""
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # else each import compiles
    command = [sys.executable, "-c", MEASURED]
    process = subprocess.run(
        command, env=environment, cwd=checkout, capture_output=True, text=True, check=True
    )
    times: dict[str, float] = json.loads(process.stdout)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--before", type=Path, required=True, help="another checkout of unickpt")
    parser.add_argument("--rounds", type=int, default=6)
    arguments = parser.parse_args()
    checkouts = [arguments.before.resolve(), Path(__file__).resolve().parent.parent]
    rounds: dict[Path, list[dict[str, float]]] = {checkout: [] for checkout in checkouts}
    for number in range(arguments.rounds):
        for checkout in checkouts if number % 2 else reversed(checkouts):
            rounds[checkout].append(measured(checkout))
    console = Console()
    print_facts(console, machine_facts(Path("/dev/shm")))
    table = Table("milliseconds", "before", "after", "ratio")
    for name in rounds[checkouts[0]][0]:
        before, after = (
            statistics.median(times[name] for times in rounds[checkout]) for checkout in checkouts
        )
        table.add_row(name, f"{before:.3f}", f"{after:.3f}", f"{after / before:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
