"""Save and load with unickpt, its peers and raw system calls, in one process, in turns.

    python benchmarks/peers.py                              # everything, 5 rounds
    python benchmarks/peers.py --set small --rounds 9 --contenders "unickpt torch" dcp
    python benchmarks/peers.py --json results.json --dir /some/disk

In every round each contender takes one turn, in an order shuffled anew: a durable save, a save
without fsync, a load and, where digests are verified, a load without that. Old checkpoints are
removed and everything is on the disk before a clock starts; what is loaded is in the page cache.
Round 0 warms up, is not counted, and checks what every load gives, bit for bit.
Ratios are taken within each round; the table gives the median over the rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import random
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, DTYPE, Arrays, Contender
from rich.console import Console
from rich.table import Table

DURABLE = "save, durable"
SAVE = "save"
LOAD = "load"
UNVERIFIED = "load, unverified"
OPERATIONS = (DURABLE, SAVE, LOAD, UNVERIFIED)


@dataclass(frozen=True)
class ArraySet:
    """A state to save: so many float32 arrays of one shape."""

    name: str
    count: int
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of the state."""
        return self.count * int(np.prod(self.shape)) * DTYPE.itemsize

    def arrays(self) -> Arrays:
        """Random numbers, not zero: nothing is sparse, little compresses."""
        rng = np.random.default_rng(0)
        return {
            f"layer_{i:05d}": rng.standard_normal(self.shape, dtype=np.float32)
            for i in range(self.count)
        }

    def __str__(self) -> str:
        size = self.nbytes // self.count
        unit, name = (1 << 20, "MiB") if size >= 1 << 20 else (1 << 10, "KiB")
        return f"{self.name}: {self.count:,} arrays of {size / unit:g} {name}"


SETS = (ArraySet("large", 64, (2048, 2048)), ArraySet("small", 4000, (32, 32)))


@dataclass(frozen=True)
class Conditions:
    """What is seen to before each timing.

    Arguments:
        patience: seconds to wait, at most, until nothing else runs.
        fresh_memory: whether freed memory goes back to the system.
    """

    patience: float
    fresh_memory: bool


@dataclass(frozen=True)
class Sample:
    """One timing."""

    set: str
    contender: str
    round: int
    operation: str
    seconds: float


@dataclass(frozen=True)
class Target:
    """A promise: `contender` does `operation` at least so many times as fast as `peer`."""

    set: str
    operation: str
    contender: str
    peer: str
    at_least: float

    @property
    def peer_operation(self) -> str:
        """What the peer is timed at: it has one kind of load, which verifies nothing."""
        return LOAD if self.operation == UNVERIFIED else self.operation


TARGETS = (
    Target("large", DURABLE, "unickpt torch", "raw", 0.85),
    Target("large", DURABLE, "unickpt torch", "dcp", 2.0),
    Target("large", DURABLE, "unickpt jax", "orbax", 3.0),
    Target("large", LOAD, "unickpt torch", "dcp", 1.7),
    Target("large", LOAD, "unickpt jax", "orbax", 6.0),
    Target("large", UNVERIFIED, "unickpt torch", "dcp", 2.5),
    *(
        Target("large", operation, f"unickpt {framework}", limit, 0.9)
        for operation, limit in (
            (DURABLE, "pieces"),
            (SAVE, "pieces"),
            (LOAD, "pieces"),
            (UNVERIFIED, "raw"),
        )
        for framework in ("numpy", "torch", "jax")
    ),
    Target("small", DURABLE, "unickpt torch", "dcp", 1.0),
    Target("small", SAVE, "unickpt torch", "safetensors", 0.5),
    Target("small", LOAD, "unickpt torch", "safetensors", 0.5),
)
TUNED = {"dcp": ("dcp 2 threads", "dcp hf"), "orbax": ("orbax uncompressed",)}
"""Targets hold for a peer as it comes; the same peer with other settings is shown beside them."""


def main() -> None:
    """Run what the command line asks for."""
    options = parse_arguments()
    console = Console(width=None if sys.stdout.isatty() else 120)
    contenders = make_contenders(options.contenders, console)
    conditions = Conditions(options.patience, options.memory == "fresh")
    if not conditions.fresh_memory:
        keep_memory()
    samples: list[Sample] = []
    with fresh_directory(options.dir) as directory:
        facts = machine_facts(directory) | versions(contenders)
        print_facts(console, facts)
        for array_set in SETS:
            if options.set in (array_set.name, "both"):
                samples += run_set(array_set, contenders, options.rounds, conditions, directory)
                print_timings(console, array_set, samples)
    print_targets(console, samples)
    if options.json:
        write_json(options.json, facts, samples)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Where to run, and when: what all benchmarks that time something ask for."""
    parser.add_argument(
        "--dir", default=".", help="a fresh directory is made in here, and removed (default: .)"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=0,
        metavar="SECONDS",
        help="before each timing, wait at most so long until nothing else runs (default: 0)",
    )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--set", choices=("large", "small", "both"), default="both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), metavar="NAME")
    add_run_arguments(parser)
    parser.add_argument(
        "--memory",
        choices=("kept", "fresh"),
        default="kept",
        help="whether freed memory stays with the process or goes back to the system, as when a "
        "job restores once, in a new process (default: kept)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples to FILE")
    return parser.parse_args()


def make_contenders(names: Sequence[str] | None, console: Console) -> list[Contender]:
    """The contenders asked for, or all of those that are installed."""
    contenders = []
    for name, kind in CONTENDERS.items():
        if names is None or name in names:
            try:
                contenders.append(kind())
            except ImportError as error:
                if names is not None:
                    raise
                console.print(f"[yellow]{name} is left out: {error}")
    return contenders


@contextmanager
def fresh_directory(parent: str) -> Iterator[Path]:
    """A directory of our own on the disk of `parent`, removed in the end, however that comes."""
    if not Path(parent).is_dir():
        sys.exit(f"--dir {parent}: there is no such folder")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="unickpt-benchmark-", dir=parent) as directory:
        yield Path(directory).resolve()


def run_set(
    array_set: ArraySet,
    contenders: Sequence[Contender],
    rounds: int,
    conditions: Conditions,
    directory: Path,
) -> list[Sample]:
    """Every contender's turn in every round, and one round before to check and warm up."""
    arrays = array_set.arrays()
    order = list(contenders)
    shuffle = random.Random(0).shuffle
    samples = []
    for number in range(rounds + 1):
        shuffle(order)
        for contender in order:
            if sys.stderr.isatty():
                print(
                    f"\x1b[K{array_set.name}, {number}/{rounds}: {contender.name}",
                    end="\r",
                    file=sys.stderr,
                )
            path = directory / "checkpoint"
            timings = turn(contender, arrays, path, conditions, check=number == 0)
            samples += [
                Sample(array_set.name, contender.name, number, operation, seconds)
                for operation, seconds in timings.items()
                if number > 0
            ]
    return samples


def turn(
    contender: Contender, arrays: Arrays, path: Path, conditions: Conditions, check: bool
) -> dict[str, float]:
    """Time each operation of one contender once."""
    state = contender.prepare(arrays)
    shapes = {name: array.shape for name, array in arrays.items()}
    seconds = {}
    for operation, durable in ((DURABLE, True), (SAVE, False)):
        shutil.rmtree(path, ignore_errors=True)
        seconds[operation], _ = timed(partial(contender.save, path, state, durable), conditions)
    del state
    for operation, verify in ((LOAD, True), (UNVERIFIED, False)):
        if operation == LOAD or contender.verifies:
            target = contender.target(shapes)
            seconds[operation], loaded = timed(
                partial(contender.load, path, target, verify), conditions
            )
            if check:
                check_equal(contender, arrays, loaded)
            del target, loaded
    shutil.rmtree(path)
    return seconds


def timed(work: Callable[[], Any], conditions: Conditions) -> tuple[float, Any]:
    """The seconds that `work` takes, and its result, with nothing left to do for those before."""
    gc.collect()
    if conditions.fresh_memory and platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    os.sync()
    wait_for_quiet(conditions.patience)
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def wait_for_quiet(patience: float) -> None:
    """Wait, for so many seconds at most, until other processes leave the processor alone."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        before = processor_times()
        time.sleep(0.2)
        idle, total = (b - a for a, b in zip(before, processor_times(), strict=True))
        if idle >= 0.95 * total:
            return


def processor_times() -> tuple[int, int]:
    """Ticks in which nothing ran, or which waited for a disk, and all ticks."""
    ticks = [int(n) for n in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)


def keep_memory() -> None:
    """Have the C library keep freed memory for the next one, in one heap, instead of unmapping it.

    Otherwise contenders that allocate what they load would be timed at how the kernel, and above
    all a hypervisor, hands out fresh pages: up to seconds for a GiB where the hypervisor takes back
    what is free.
    """
    if platform.libc_ver()[0] == "glibc":
        mmap_threshold, trim_threshold, arena_max = -3, -1, -8
        libc = ctypes.CDLL(None)
        libc.mallopt(mmap_threshold, 32 << 20)
        libc.mallopt(trim_threshold, (1 << 31) - 1)
        libc.mallopt(arena_max, 1)


def check_equal(contender: Contender, arrays: Arrays, loaded: Mapping[str, Any]) -> None:
    """Compare all bits."""
    for name, array in arrays.items():
        got = np.asarray(loaded[name])
        if got.shape != array.shape or not np.array_equal(
            got.view(np.uint32), array.view(np.uint32)
        ):
            raise SystemExit(f"{contender.name} loaded {name!r} with other bits than it saved")


def machine_facts(directory: Path) -> dict[str, str]:
    """What the numbers depend on."""
    filesystem, device = mounted(directory)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return {
        "cpu": cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{memory:.1f} GiB",
        "filesystem": f"{filesystem} on {device}",
        "kernel": platform.release(),
        "load before": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "python": platform.python_version(),
    }


def cpu_model() -> str:
    """The model's name, as Linux gives it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def mounted(directory: Path) -> tuple[str, str]:
    """The kind of file system that `directory` is on, and its device."""
    found = ("", "unknown", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        device, point, kind = line.split()[:3]
        if directory.resolve().is_relative_to(point) and len(point) >= len(found[0]):
            found = (point, kind, device)
    return found[1], found[2]


def versions(contenders: Iterable[Contender]) -> dict[str, str]:
    """The version of every package that takes part."""
    packages = dict.fromkeys(p for c in contenders for p in ("numpy", *c.packages))
    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):  # unickpt may be imported where it lies
            found[package] = metadata.version(package)
    return found


def print_facts(console: Console, facts: Mapping[str, str]) -> None:
    """Show the machine and the versions."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)
    if facts["filesystem"].startswith("tmpfs"):
        console.print("[yellow]This is tmpfs: nothing reaches a disk. Choose another --dir.")


def by_round(
    samples: Iterable[Sample], set_name: str, contender: str, operation: str
) -> dict[int, float]:
    """The seconds of each round."""
    return {
        s.round: s.seconds
        for s in samples
        if (s.set, s.contender, s.operation) == (set_name, contender, operation)
    }


def print_timings(console: Console, array_set: ArraySet, samples: Sequence[Sample]) -> None:
    """Show median seconds, their range, and the rate."""
    table = Table(title=f"{array_set}. Medians (least to most)", title_justify="left")
    table.add_column("contender")
    for operation in OPERATIONS:
        table.add_column(operation, justify="right")
    took_part = {s.contender for s in samples}
    for name in (name for name in CONTENDERS if name in took_part):
        cells = []
        for operation in OPERATIONS:
            seconds = by_round(samples, array_set.name, name, operation).values()
            cells.append(cell(seconds, array_set.nbytes))
        table.add_row(name, *cells)
    console.print(table)


def cell(seconds: Iterable[float], nbytes: int) -> str:
    """One cell of the table of timings."""
    values = sorted(seconds)
    if not values:
        return ""
    median = statistics.median(values)
    rate = nbytes / median / 1e9
    return f"{median:.3f} s, {rate:.3g} GB/s\n({values[0]:.3f} to {values[-1]:.3f})"


def ratio(samples: Sequence[Sample], target: Target, peer: str) -> float | None:
    """How many times as fast as `peer`: the median of the ratios within each round."""
    ours = by_round(samples, target.set, target.contender, target.operation)
    theirs = by_round(samples, target.set, peer, target.peer_operation)
    ratios = [theirs[number] / ours[number] for number in ours.keys() & theirs.keys()]
    return statistics.median(ratios) if ratios else None


def ratio_of_best(samples: Sequence[Sample], target: Target) -> float:
    """The same of the least times, which a busy machine changes less."""
    ours = by_round(samples, target.set, target.contender, target.operation)
    theirs = by_round(samples, target.set, target.peer, target.peer_operation)
    return min(theirs.values()) / min(ours.values())


def print_targets(console: Console, samples: Sequence[Sample]) -> None:
    """Show every target whose contenders took part."""
    table = Table(title="Targets: times as fast as the peer", title_justify="left")
    for name in ("set", "operation", "contender", "peer"):
        table.add_column(name)
    for name in ("at least", "measured", "of best"):
        table.add_column(name, justify="right")
    table.add_column("reached")
    table.add_column("with other settings")
    for target in TARGETS:
        measured = ratio(samples, target, target.peer)
        if measured is None:
            continue
        tuned = {name: ratio(samples, target, name) for name in TUNED.get(target.peer, ())}
        table.add_row(
            target.set,
            target.operation,
            target.contender,
            target.peer,
            f"{target.at_least:.2f}",
            f"{measured:.2f}",
            f"{ratio_of_best(samples, target):.2f}",
            "[green]yes" if measured >= target.at_least else "[red]no",
            "\n".join(f"{name} {value:.2f}" for name, value in tuned.items() if value is not None),
        )
    if table.row_count:
        console.print(table)


def write_json(file: Path, facts: Mapping[str, str], samples: Sequence[Sample]) -> None:
    """Keep everything that was measured."""
    targets = [
        asdict(target) | {"measured": ratio(samples, target, target.peer)} for target in TARGETS
    ]
    results = {"facts": facts, "samples": [asdict(s) for s in samples], "targets": targets}
    file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
