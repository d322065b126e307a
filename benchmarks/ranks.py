"""Loading by 1, 4 and 8 ranks of one machine: the time of the call, of the slowest rank.

    python benchmarks/ranks.py --dir /tmp/ranks-bench --rounds 7
    python benchmarks/ranks.py --dir /tmp/ranks-bench --against /path/of/another/checkout

A checkpoint of 64 matrices is loaded into new DTensors, sharded by rows: plain, or through rules
that transpose every matrix, so that the shard of a rank lies across all chunks. The ranks start
together, at a barrier; everything is imported, and in the page cache. The numbers of ranks, and
both checkouts, take turns within a round; medians, with quartiles. The ratio to one rank is taken
within each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt

RULES = "{l}/kernel [i o] <-> {l}/weight [o i]"
WAYS = ("plain", "rules")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="An existing folder on the disk to measure.")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--chunk-mib", type=int, default=8, help="SaveOptions.chunk_bytes")
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 4, 8))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--against", type=Path, help="Another checkout, which takes turns.")
    arguments = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    versions = {"this": here} | ({"other": arguments.against} if arguments.against else {})
    console = Console(width=None if sys.stdout.isatty() else 120)
    with fresh_directory(arguments.dir) as folder:
        print_facts(console, machine_facts(folder))
        save(folder, arguments.mib, unickpt.SaveOptions(chunk_bytes=arguments.chunk_mib << 20))
        groups = {
            (version, count): Ranks(folder, path, version, count)
            for version, path in versions.items()
            for count in arguments.ranks
        }
        try:
            seconds: dict[tuple[str, str, int], list[float]] = {}
            for number in range(arguments.rounds + 1):  # the first one warms up
                for way in WAYS:
                    for (version, count), ranks in groups.items():
                        took = ranks.load(way)
                        if number:
                            seconds.setdefault((way, version, count), []).append(took)
        finally:
            for ranks in groups.values():
                ranks.end()
    console.print(table_of(seconds, min(arguments.ranks)))


def save(folder: Path, mib: int, options: unickpt.SaveOptions) -> None:
    rows = mib * 1024 // 64 // 8  # of 8 KiB
    rng = np.random.default_rng(0)
    tree = {str(i): {"kernel": rng.random((rows, 2048), np.float32)} for i in range(64)}
    unickpt.save(folder / "rules", tree, options=options)
    named = {str(i): {"weight": tree[str(i)]["kernel"]} for i in range(64)}
    unickpt.save(folder / "plain", named, options=options)


def table_of(seconds: dict[tuple[str, str, int], list[float]], least: int) -> Table:
    table = Table(title="Seconds of the slowest rank: median (quartiles)", title_justify="left")
    for column in ("way", "checkout", "ranks", "seconds", f"to {least} rank"):
        table.add_column(column, justify="left" if len(table.columns) < 2 else "right")
    for (way, version, count), times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds[way, version, least], strict=True)]
        shown = (spread(times), spread(ratios))
        table.add_row(way, version, str(count), *shown)
    return table


def spread(values: Sequence[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}"
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


class Ranks:
    """Processes that load together whenever they are told to."""

    def __init__(self, folder: Path, path: Path, version: str, count: int) -> None:
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115
        self._processes: list[Any] = []
        for rank in range(count):
            environment = {
                **os.environ,
                "PYTHONPATH": str(path),
                "OMP_NUM_THREADS": "1",
                "RANK": str(rank),
                "WORLD_SIZE": str(count),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(count),
            }
            command = [sys.executable, "-u", "-W", "ignore", __file__, "--rank", str(folder)]
            self._processes.append(
                subprocess.Popen(
                    [*command, str(folder / f"store-{version}-{count}")],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._errors,
                    text=True,
                )
            )
        for process in self._processes:
            self._answer(process)

    def load(self, way: str) -> float:
        """The seconds of the slowest."""
        for process in self._processes:
            process.stdin.write(f"{way}\n")
            process.stdin.flush()
        return max(self._answer(process) for process in self._processes)

    def _answer(self, process: Any) -> float:
        line = process.stdout.readline()
        if not line:
            self._errors.seek(0)
            sys.exit(self._errors.read().decode(errors="replace")[-3000:])
        return float(json.loads(line))

    def end(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(60)
        self._errors.close()


def rank(folder: str, store: str) -> None:
    """What each rank does."""
    from time import perf_counter

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, empty

    signs = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{store}", rank=index, world_size=count)
    mesh = init_device_mesh("cpu", (count,))
    shapes = {way: unickpt.open(f"{folder}/{way}") for way in WAYS}
    rules = unickpt.Rules.parse(RULES)
    print(0, file=signs, flush=True)
    for line in sys.stdin:
        way = line.strip()
        with torch.device("meta"):
            like = {
                str(i): {"weight": empty(*(x.shape if way == "plain" else x.shape[::-1]),
                    device_mesh=mesh, placements=[Shard(0)])}
                for i, x in enumerate(shapes[way].values())
            }  # fmt: skip
        dist.barrier()
        began = perf_counter()
        made = unickpt.load(f"{folder}/{way}", like, rules=rules if way == "rules" else None)
        took = perf_counter() - began
        del made, like
        print(took, file=signs, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(*sys.argv[2:])
    else:
        main()
