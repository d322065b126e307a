"""The extra memory that a save or a load takes at its peak: unickpt, beside DCP and Orbax.

    python benchmarks/memory.py                       # states of 2 and 4 GiB
    python benchmarks/memory.py --gib 8 --contenders "unickpt torch" --dir /some/disk
    python benchmarks/memory.py --transposed          # what must be copied to be written
    python benchmarks/memory.py --rules               # through rules that transpose every array

Each operation runs in a process of its own, which first builds what it saves or fills, then waits
for a sign. From there on its /proc/PID/status is sampled every 5 ms, from outside, so that no lock
of the interpreter hides a peak. Extra is the peak less what was there at the sign, in anonymous and
shared memory: mapped files are pages of the cache, which the kernel takes back at will. The peak
that the kernel itself recorded (VmHWM), which counts them, stands beside it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import platform
import re
import select
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
from contenders import CONTENDERS, DTYPE, Arrays, Contender
from peers import fresh_directory, machine_facts, make_contenders, print_facts, versions
from rich.console import Console
from rich.table import Table

import unickpt

BUDGET = 1 << 30
"""The most that unickpt reads and writes with, by default."""
SHAPE = (2048, 2048)
DEFAULT = ("unickpt numpy", "unickpt torch", "unickpt jax", "dcp", "orbax")


@dataclass(frozen=True)
class Peak:
    """What one operation took."""

    extra: int
    """In bytes, without the destination, where the load allocates it."""
    extra_with_files: int
    seconds: float


def main() -> None:
    """Measure what the command line asks for, or be the process that is measured."""
    options = parse_arguments()
    if options.child:
        child(CONTENDERS[options.contenders[0]](), options)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    if options.rules:
        print_facts(console, machine_facts(Path(options.dir)) | versions([]))
        console.print(rules_table(options))
        return
    contenders = make_contenders(options.contenders or DEFAULT, console)
    print_facts(console, machine_facts(Path(options.dir)) | versions(contenders))
    table = Table(title="Peak extra memory, GiB, beyond the destination", title_justify="left")
    table.add_column("contender")
    table.add_column("state", justify="right")
    for operation in ("save", "load"):
        for column in (operation, "with files", "seconds"):
            table.add_column(column, justify="right")
    table.add_column("within 1 GiB")
    for contender in contenders:
        for gib in options.gib:
            peaks = measure(contender, gib, options.transposed, options.dir)
            table.add_row(contender.name, f"{gib:g}", *cells(peaks), verdict(peaks))
    console.print(table)


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=float, nargs="+", default=(2, 4), help="sizes of the state")
    parser.add_argument("--contenders", nargs="+", choices=tuple(CONTENDERS), metavar="NAME")
    parser.add_argument(
        "--dir", default=".", help="a fresh directory is made in here, and removed (default: .)"
    )
    parser.add_argument("--transposed", action="store_true", help="save transposed arrays")
    parser.add_argument("--rules", action="store_true", help="load and convert through rules")
    children = ("save", "load", "load_ruled", "convert")
    parser.add_argument("--child", choices=children, help=argparse.SUPPRESS)
    return parser.parse_args()


def rules_table(options: argparse.Namespace) -> Table:
    """unickpt alone: a load through rules, and a conversion within an eighth of the state."""
    table = Table(title="Peak extra memory through rules, GiB", title_justify="left")
    for column in ("operation", "state", "budget", "extra", "with files", "seconds"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    table.add_column("within the budget")
    for gib in options.gib:
        with fresh_directory(options.dir) as directory:
            for operation in ("save", "load_ruled", "convert"):
                command = [sys.executable, __file__, "--child", operation, "--dir", str(directory)]
                command += ["--gib", str(gib), "--contenders", "unickpt numpy"]
                budget = budget_of(operation, gib)
                peak = run(command, count(gib) * nbytes() if operation == "load_ruled" else 0)
                if operation == "save":
                    continue
                within = "[green]yes" if peak.extra <= budget else "[red]no"
                sizes = (f"{gib:g}", f"{budget / (1 << 30):.2f}", *cells([peak]))
                table.add_row(operation.replace("_ruled", ""), *sizes, within)
    return table


def budget_of(operation: str, gib: float) -> int:
    """A conversion has an eighth of the state."""
    return int(gib * (1 << 30) / 8) if operation == "convert" else BUDGET


def measure(contender: Contender, gib: float, transposed: bool, parent: str) -> list[Peak]:
    """Save in one process and load in another."""
    with fresh_directory(parent) as directory:
        peaks = []
        for operation in ("save", "load"):
            command = [sys.executable, __file__, "--child", operation, "--dir", str(directory)]
            command += ["--gib", str(gib), "--contenders", contender.name]
            command += ["--transposed"] if transposed else []
            allocated = operation == "load" and not contender.in_place
            peaks.append(run(command, count(gib) * nbytes() if allocated else 0))
        return peaks


def run(command: list[str], destination: int) -> Peak:
    """Start a process, give it the sign and watch its memory until it is done."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            raise SystemExit(f"{' '.join(command)} failed")
        status = Path(f"/proc/{process.pid}/status")
        Path(f"/proc/{process.pid}/clear_refs").write_text("5")
        anonymous = own = memory(status, ("RssAnon", "RssShmem"))
        resident = memory(status, ("VmRSS",))
        start = perf_counter()
        process.stdin.write(b"go\n")
        process.stdin.flush()
        while not select.select([process.stdout], [], [], 0.005)[0]:
            own = max(own, memory(status, ("RssAnon", "RssShmem")))
        seconds = perf_counter() - start
        highest = memory(status, ("VmHWM",))
        if process.stdout.readline() != b"done\n":
            raise SystemExit(f"{' '.join(command)} failed")
        process.stdin.write(b"exit\n")
        process.stdin.flush()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    return Peak(own - anonymous - destination, highest - resident - destination, seconds)


def memory(status: Path, names: Iterable[str]) -> int:
    """Some of the sizes in /proc/PID/status, together, in bytes."""
    text = status.read_text()
    return sum(int(n) << 10 for name in names for n in re.findall(rf"{name}:\s+(\d+) kB", text))


def child(contender: Contender, options: argparse.Namespace) -> None:
    """Save or load, between two signs."""
    path, gib = Path(options.dir) / "checkpoint", options.gib[0]
    if options.child == "save":
        state = contender.prepare(arrays(gib, options.transposed))
        gc.collect()
        trim()
        wait("ready")
        contender.save(path, state, durable=True)
        wait("done")
        return
    if options.child in ("load_ruled", "convert"):
        through_rules(options.child, path, gib)
        return
    target = contender.target(dict.fromkeys(names(gib), SHAPE))
    wait("ready")
    loaded = contender.load(path, target, verify=True)
    wait("done")
    numbers = base(options.transposed)
    for i, name in enumerate(names(gib)):
        if not np.array_equal(np.asarray(loaded[name]), numbers + np.float32(i)):
            raise SystemExit(f"{contender.name} loaded {name!r} with other values")


def through_rules(operation: str, path: Path, gib: float) -> None:
    """Transpose every array, into memory or into another checkpoint."""
    rules = unickpt.Rules.parse("{name} [i o] <-> turned/{name} [o i]")
    other = path.with_name("converted")
    wait("ready")
    if operation == "convert":
        options = unickpt.SaveOptions(budget_bytes=budget_of(operation, gib))
        unickpt.convert(path, other, rules=rules, options=options)
        wait("done")
        loaded = unickpt.open(other)
    else:
        loaded = unickpt.load(path, rules=rules)["turned"]
        wait("done")
    numbers = base(False)
    for i, name in enumerate(names(gib)):
        found = loaded[name if operation == "load_ruled" else f"turned/{name}"]
        if not np.array_equal(np.asarray(found), (numbers + np.float32(i)).T):
            raise SystemExit(f"{operation}: {name!r} has other values")


def trim() -> None:
    """Give freed memory back to the kernel, so that what follows cannot hide in it."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def wait(message: str) -> None:
    """Say where this process is, and wait until its parent has taken note."""
    print(message, flush=True)
    sys.stdin.readline()


def count(gib: float) -> int:
    """How many arrays make up so many GiB."""
    return round(gib * (1 << 30) / nbytes())


def nbytes() -> int:
    """The size of an array."""
    return int(np.prod(SHAPE)) * DTYPE.itemsize


def names(gib: float) -> list[str]:
    """The names of the arrays."""
    return [f"layer_{i:05d}" for i in range(count(gib))]


def base(transposed: bool) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Random numbers that all arrays are made of, each with its index added."""
    numbers = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    return numbers.T if transposed else numbers


def arrays(gib: float, transposed: bool) -> Arrays:
    """The state; a sum has the memory order of what is added."""
    numbers = base(transposed)
    return {name: numbers + np.float32(i) for i, name in enumerate(names(gib))}


def cells(peaks: Iterable[Peak]) -> list[str]:
    """A row of the table."""
    return [
        text
        for peak in peaks
        for text in (
            f"{peak.extra / (1 << 30):.2f}",
            f"{peak.extra_with_files / (1 << 30):.2f}",
            f"{peak.seconds:.1f}",
        )
    ]


def verdict(peaks: Iterable[Peak]) -> str:
    """Whether neither operation took more than the budget."""
    return "[green]yes" if all(peak.extra <= BUDGET for peak in peaks) else "[red]no"


if __name__ == "__main__":
    main()
