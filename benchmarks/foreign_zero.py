"""ZeRO 3 onto another number of ranks: unickpt in place, beside `ds_to_universal` and its load.

    PY=$(../shared/foreign/setup)                      # any Python that has DeepSpeed
    python benchmarks/foreign_zero.py --foreign-python $PY
    python benchmarks/foreign_zero.py --foreign-python $PY --mib 256 --rounds 3 --ranks 1

DeepSpeed trains a step on 4 ranks and saves; weights and moments have --mib. In every round both
take a turn, in an order shuffled anew, each in new processes, with gloo, on the CPU:

- DeepSpeed converts the folder, and an engine of --ranks processes loads what that made;
- unickpt loads the folder of ZeRO 3 onto FSDP2 shards of as many processes and torch's AdamW.

Only these calls are timed, not imports, nor making models and engines. All files are in the page
cache. Bytes are those of the calls that read and write, from /proc/self/io (rchar and wchar), of
all processes. Round 0 warms up, is not counted, and compares all that both loaded, bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from peers import (
    add_run_arguments,
    fresh_directory,
    machine_facts,
    print_facts,
    wait_for_quiet,
)
from rich.console import Console
from rich.table import Table
from zero_ranks import TAG, blocks_of

import unickpt

Turn = dict[str, dict[str, Any]]
MIB = 1 << 20
CALLS = ("read", "written")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--foreign-python", required=True, help="a Python that has DeepSpeed")
    parser.add_argument("--mib", type=int, default=1024, help="size of weights and moments")
    parser.add_argument("--ranks", type=int, default=2, help="how many processes load")
    parser.add_argument("--rounds", type=int, default=5)
    add_run_arguments(parser)
    arguments = parser.parse_args()
    console = Console()
    with fresh_directory(arguments.dir) as directory:
        facts = {**machine_facts(directory), "unickpt": unickpt.__version__}
        job = Job(directory, arguments.foreign_python, blocks_of(arguments.mib), arguments.ranks)
        job.run("write", directory, str(job.blocks), ranks=4)
        turns: dict[str, list[Turn]] = {"DeepSpeed": [], "unickpt": []}
        for number in range(arguments.rounds + 1):
            found = {}
            for name in random.sample(list(turns), len(turns)):
                os.sync()
                wait_for_quiet(arguments.patience)
                turn = job.deepspeed if name == "DeepSpeed" else job.unickpt
                found[name] = turn(digests=number == 0)
                if number:
                    turns[name].append(found[name])
            if number == 0:
                check_equal(found["DeepSpeed"]["load"], found["unickpt"]["load"])
                facts |= found["DeepSpeed"]["load"]["versions"]
        print_facts(console, facts)
        print_turns(console, turns, sizes(directory / TAG))


class Job:
    """Starts the processes of a turn.

    Arguments:
        directory: the folder in which the tags are.
        foreign_python: of the environment that has DeepSpeed.
        blocks: of the model.
        ranks: processes that load.
    """

    def __init__(self, directory: Path, foreign_python: str, blocks: int, ranks: int) -> None:
        self.directory, self.blocks, self.ranks = directory, blocks, ranks
        self._foreign_python = foreign_python

    def deepspeed(self, digests: bool) -> Turn:
        """What DeepSpeed itself offers."""
        universal = self.directory / f"{TAG}_universal"
        shutil.rmtree(universal, ignore_errors=True)
        converted = self.run("convert", self.directory / TAG, str(universal), ranks=1)
        os.sync()
        more = [str(self.blocks), *["digests"] * digests]
        return {
            "convert": converted,
            "load": self.run("resume", self.directory, *more, ranks=self.ranks),
        }

    def unickpt(self, digests: bool) -> Turn:
        """The same from the folder of ZeRO 3."""
        more = [str(self.blocks), *["digests"] * digests]
        return {"load": self.run("load", self.directory / TAG, *more, ranks=self.ranks)}

    def run(self, role: str, folder: Path, *more: str, ranks: int) -> dict[str, Any]:
        """Runs a role of `zero_ranks.py`; what it printed last."""
        python = sys.executable if role == "load" else self._foreign_python
        script = str(Path(__file__).with_name("zero_ranks.py"))
        start = (
            ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            if role != "convert"
            else []
        )
        done = subprocess.run(
            [python, "-W", "ignore", *start, script, role, str(folder), *more],
            capture_output=True, text=True, cwd=self.directory,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"{role} failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"seconds"')]
        return json.loads(lines[-1]) if lines else {}


def check_equal(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Compare the digests of all arrays."""
    one, other = theirs["digests"], ours["digests"]
    bad = [name for name in {**one, **other} if one.get(name) != other.get(name)]
    if bad or not one:
        raise SystemExit(f"DeepSpeed and unickpt loaded different bits: {bad[:5]}")


def sizes(folder: Path) -> int:
    """The bytes of all files."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def print_turns(console: Console, turns: dict[str, list[Turn]], size: int) -> None:
    """Show medians, and the ratios within each round."""
    table = Table("", "seconds", "least to most", "MiB read", "MiB written",
                  title=f"ZeRO 3, {size / MIB:.0f} MiB")  # fmt: skip
    totals: dict[str, list[tuple[float, float]]] = {}
    for name, of_rounds in turns.items():
        for step in of_rounds[0]:
            took = [turn[step]["seconds"] for turn in of_rounds]
            traffic = [statistics.median(turn[step][w] for turn in of_rounds) for w in CALLS]
            table.add_row(
                f"{name}: {step}",
                f"{statistics.median(took):.2f}",
                f"{min(took):.2f} to {max(took):.2f}",
                *(f"{count / MIB:.0f}" for count in traffic),
            )
        totals[name] = [
            (
                sum(step["seconds"] for step in turn.values()),
                sum(step[what] for step in turn.values() for what in CALLS),
            )
            for turn in of_rounds
        ]
    console.print(table)
    pairs = list(zip(totals["DeepSpeed"], totals["unickpt"], strict=True))
    speed, bytes_ = ([a[i] / b[i] for a, b in pairs] for i in (0, 1))
    best = [min(seconds for seconds, _ in totals[name]) for name in turns]
    console.print(
        f"unickpt is {statistics.median(speed):.1f} times as fast ({min(speed):.1f} to "
        f"{max(speed):.1f}; by the best rounds {best[0] / best[1]:.1f}), with "
        f"1/{statistics.median(bytes_):.1f} of the bytes"
    )


if __name__ == "__main__":
    main()
