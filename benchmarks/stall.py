"""How long asynchronous saving stops a program: unickpt, beside DCP and Orbax, in turns.

    python benchmarks/stall.py                              # everything: 1 GiB, 5 rounds
    python benchmarks/stall.py --part blocking --rounds 9 --dir /some/disk --json results.json
    python benchmarks/stall.py --part loop --every 10 --contenders "unickpt torch lazy" dcp
    python benchmarks/stall.py --part memory --saves 1000
    python benchmarks/stall.py --part loop --device cuda --mib 2048 --batch 4096 --every 25

blocking: how long the call keeps its caller, how long until the state may change, and until the
checkpoint is committed; in the same rounds, a copy of the state into memory touched before.
loop: how much longer a training loop takes that saves every so many steps; with --device cuda, on
an accelerator. Half as many steps without saving precede each turn, for its ratio.
memory: whether a process that saves again and again grows; exit code 1 where it does.

All is done in one process (for DCP, a gloo group of one rank). In every round each contender takes
one turn, in an order shuffled anew; a turn ends with its save committed and removed, and everything
is on the disk before a clock starts. Round 0 warms up, is not counted, and checks what the calls of
`blocking` saved, bit for bit. Ratios are taken within each round; tables give medians.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from contenders import Arrays
from loops import (
    JaxTraining,
    LoopSaver,
    RawProcess,
    TorchTraining,
    Training,
    jax_savers,
    torch_savers,
)
from memory import memory
from peers import (
    ArraySet,
    Conditions,
    Sample,
    add_run_arguments,
    by_round,
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
from stallers import (
    COPY,
    COPYTO,
    DCP,
    STALLERS,
    DcpAsync,
    Memcpy,
    Staller,
    UnickptJaxCopy,
    UnickptTorchCopy,
    save_options,
)

BLOCKED, STAGED, COMMITTED, LOOP, LOST = "blocked", "staged", "committed", "loop", "lost by a save"
ALONE = "loop without saving"
NO_SAVING, RAW = "no saving", "raw process"
ARRAY_BYTES = 16 << 20
EACH = 10
"""Saves from one look at the memory to the next."""


def main() -> None:
    """Run what the command line asks for."""
    options = parse_arguments()
    # XLA asks for the number of threads once, when it starts.
    os.environ["NPROC"] = str(options.threads)
    # Both frameworks share an accelerator.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    console = Console(width=None if sys.stdout.isatty() else 120)
    stallers = make_stallers(options.contenders, console)
    samples: list[Sample] = []
    resident: list[int] = []
    with fresh_directory(options.dir) as directory, ExitStack() as stack:
        for staller in stallers:
            stack.callback(staller.close)
        join_group_of_one(stallers, stack)
        facts = machine_facts(directory) | versions(stallers) | threads(options, stallers)
        print_facts(console, facts)
        if options.part in ("memory", "all"):  # first, so that nothing else has grown the process
            resident = run_memory(options, directory, console)
        if options.memory == "kept":
            keep_memory()
        if options.part in ("blocking", "all"):
            samples += run_blocking(options, stallers, directory)
            print_blocking(console, stallers, samples, options.mib << 20)
        if options.part in ("loop", "all"):
            for framework in ("torch", "jax"):
                names = [s.name for s in stallers if framework in s.packages]
                samples += run_loops(options, framework, names, directory, console)
    if options.json:
        results = {"facts": facts, "samples": [asdict(s) for s in samples], "resident": resident}
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if resident and growth(resident) > options.growth:
        raise SystemExit(f"The process grew by {growth(resident):.1%}")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", choices=("blocking", "loop", "memory", "all"), default="all")
    parser.add_argument("--mib", type=int, default=1024, help="size of the state (default: 1024)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", choices=tuple(STALLERS), metavar="NAME")
    add_run_arguments(parser)
    parser.add_argument(
        "--memory",
        choices=("kept", "fresh"),
        default="kept",
        help="whether freed memory stays with the process, in favour of those that allocate a copy "
        "for each save, or goes back to the system before each timing (default: kept)",
    )
    loop = parser.add_argument_group("loop")
    loop.add_argument("--every", type=int, default=5, help="steps from save to save (default: 5)")
    loop.add_argument("--steps", type=int, help="default: enough for 4 saves, and as many after")
    loop.add_argument("--batch", type=int, default=64)
    loop.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    loop.add_argument(
        "--threads",
        type=int,
        default=max(1, len(os.sched_getaffinity(0)) - 1),
        help="of torch and of XLA (default: all cores but one, which is free to save, as it is "
        "beside an accelerator)",
    )
    again = parser.add_argument_group("memory")
    again.add_argument("--saves", type=int, default=100)
    again.add_argument("--memory-mib", type=int, default=256, help="size of the state")
    again.add_argument(
        "--growth",
        type=float,
        default=0.05,
        help=f"the most that resident memory may grow from save {EACH} to the last (default: 0.05)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the samples to FILE")
    options = parser.parse_args()
    options.steps = options.steps or 5 * options.every
    if options.device != "cpu" and options.part != "loop":
        parser.error("--device is for --part loop")
    return options


def make_stallers(names: Sequence[str] | None, console: Console) -> list[Staller]:
    """The contenders asked for, or all of those that are installed."""
    made = []
    for name, kind in STALLERS.items():
        if names is None or name in names:
            try:
                made.append(kind())
            except ImportError as error:
                if names is not None:
                    raise
                console.print(f"[yellow]{name} is left out: {error}")
    return made


def join_group_of_one(stallers: Iterable[Staller], stack: ExitStack) -> None:
    """A process group, without which DCP would not be as it is in a job."""
    if any(isinstance(staller, DcpAsync) for staller in stallers):
        import torch.distributed as dist

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        stack.callback(dist.destroy_process_group)


def threads(options: argparse.Namespace, stallers: Iterable[Staller]) -> dict[str, str]:
    """How many threads the frameworks compute with."""
    found = {}
    packages = {package for staller in stallers for package in staller.packages}
    if "torch" in packages:
        import torch

        found["threads of torch"] = f"{torch.get_num_threads()}; in the loop {options.threads}"
    if "jax" in packages:
        found["threads of XLA"] = str(options.threads)
    return found


def conditions(options: argparse.Namespace) -> Conditions:
    """What is seen to before each timing."""
    return Conditions(options.patience, options.memory == "fresh")


def progress(text: str) -> None:
    """Say what is going on, to those who watch."""
    if sys.stderr.isatty():
        print(f"\x1b[K{text}", end="\r", file=sys.stderr)


def run_blocking(
    options: argparse.Namespace, stallers: Sequence[Staller], directory: Path
) -> list[Sample]:
    """Every contender's turn in every round, and one round before to check and warm up."""
    arrays = state_of("large", options.mib)
    states = {staller.name: state for staller, state in prepared(stallers, arrays)}
    order, shuffle, samples = list(stallers), random.Random(0).shuffle, []
    for number in range(options.rounds + 1):
        shuffle(order)
        for staller in order:
            progress(f"blocking, {number}/{options.rounds}: {staller.name}")
            path = directory / "checkpoint"
            seconds = stalled(staller, path, states[staller.name], conditions(options))
            if number == 0:
                shapes = {name: array.shape for name, array in arrays.items()}
                check_equal(staller, arrays, staller.load(path, staller.target(shapes), True))
            shutil.rmtree(path, ignore_errors=True)
            samples += [
                Sample("blocking", staller.name, number, operation, value)
                for operation, value in seconds.items()
                if number > 0
            ]
    return samples


def state_of(name: str, mib: int) -> Arrays:
    """So many MiB in arrays of 16 MiB."""
    return ArraySet(name, max(1, (mib << 20) // ARRAY_BYTES), (2048, 2048)).arrays()


def prepared(stallers: Iterable[Staller], arrays: Arrays) -> Iterable[tuple[Staller, Any]]:
    """What each contender saves; those of one framework save the same memory."""
    states: dict[Any, Any] = {}
    for staller in stallers:
        kind = type(staller).prepare
        if kind not in states:
            states[kind] = staller.prepare(arrays)
        yield staller, states[kind]


def stalled(staller: Staller, path: Path, state: Any, before: Conditions) -> dict[str, float]:
    """Time one save: the call, the staging, the whole."""
    blocked, _ = timed(partial(staller.begin, path, state), before)
    start = perf_counter()
    staller.wait_staged()
    staged = blocked + perf_counter() - start
    if isinstance(staller, Memcpy):
        return {BLOCKED: blocked, STAGED: staged}
    staller.wait_committed()
    return {BLOCKED: blocked, STAGED: staged, COMMITTED: blocked + perf_counter() - start}


def run_loops(
    options: argparse.Namespace,
    framework: str,
    names: Sequence[str],
    directory: Path,
    console: Console,
) -> list[Sample]:
    """The loops of one framework, in turns."""
    make, savers_of = {
        "torch": (TorchTraining, torch_savers),
        "jax": (JaxTraining, jax_savers),
    }[framework]
    if not names:
        return []
    part, samples, step = f"loop, {framework}", list[Sample](), 0
    if framework == "torch":
        import torch

        torch.set_num_threads(options.threads)
    training = make(options.mib << 20, options.batch, options.device)
    with ExitStack() as stack:
        savers = {
            NO_SAVING: LoopSaver(),
            RAW: RawProcess(directory / f"{framework} {RAW}", training.nbytes),
        }
        savers |= savers_of(names, training, directory)
        for saver in savers.values():
            stack.callback(saver.close)
        order, shuffle = list(savers), random.Random(0).shuffle
        for number in range(options.rounds + 1):
            shuffle(order)
            for name in order:
                progress(f"{part}, {number}/{options.rounds}: {name}")
                steps, every = options.steps, options.every
                few = max(2, steps // 2)
                work = partial(train, training, LoopSaver(), step, few, every=1)
                _, before = timed(work, conditions(options))
                work = partial(train, training, savers[name], step, steps, every)
                _, seconds = timed(work, conditions(options))
                seconds[ALONE] = before[LOOP] / few * steps
                step += steps
                savers[name].tidy()
                samples += [
                    Sample(part, name, number, operation, value)
                    for operation, value in seconds.items()
                    if number > 0
                ]
    print_loop(console, part, list(savers), samples, options, training.nbytes)
    return samples


def train(
    training: Training, saver: LoopSaver, done: int, steps: int, every: int
) -> dict[str, float]:
    """So many steps, with saves between them, timed; `done` steps were done before."""
    blocked, start = 0.0, perf_counter()
    ends = [start]
    for step in range(1, steps + 1):
        training.step(saver.before_update)
        ends.append(perf_counter())
        if step % every == 0 and step < steps:
            called = perf_counter()
            saver.save(done + step)
            blocked += perf_counter() - called
    looped = perf_counter() - start
    saver.wait()
    seconds = {LOOP: looped, COMMITTED: perf_counter() - start, BLOCKED: blocked}
    if every > 1:  # else no step is without a save
        seconds[LOST] = lost_by_save(np.diff(ends), every)
    return seconds


def lost_by_save(seconds: np.ndarray[Any, Any], every: int) -> float:
    """What a save costs the steps after it, its call included: the median over the saves.

    That is held against the last steps before the next save of the same loop, so that it does not
    depend on how fast the machine was during another loop.

    Arguments:
        seconds: of each step, from the end of the step before.
        every: steps from save to save.
    """
    near = max(1, every - 2)
    rest = [s for i, s in enumerate(seconds) if i >= every and i % every >= near]
    usual = statistics.median(rest)
    saves = range(every, len(seconds) - near + 1, every)
    return statistics.median(float(seconds[i : i + near].sum() - near * usual) for i in saves)


def run_memory(options: argparse.Namespace, directory: Path, console: Console) -> list[int]:
    """Save again and again; the resident memory after each so many saves."""
    import torch

    import unickpt

    status, resident = Path("/proc/self/status"), []
    arrays = state_of("memory", options.memory_mib)
    state = {name: torch.from_numpy(array) for name, array in arrays.items()}
    save = save_options(options.memory_mib << 20, "copy")
    title = f"Saves of {options.memory_mib} MiB in a row, copied: resident memory, MiB"
    table = Table(title=title, title_justify="left")
    for column in ("saves", "resident", "highest"):
        table.add_column(column, justify="right")
    with unickpt.Checkpointer(directory / "again", keep_last=1, options=save) as checkpointer:
        for number in range(1, options.saves + 1):
            progress(f"memory: {number}/{options.saves}")
            checkpointer.save(number, state)
            if number % EACH == 0:
                checkpointer.wait()
                resident.append(memory(status, ("VmRSS",)))
                highest = memory(status, ("VmHWM",))
                table.add_row(
                    *(f"{n / (1 << 20):.0f}" for n in (number << 20, resident[-1], highest))
                )
    shutil.rmtree(directory / "again")
    console.print(table)
    if resident:
        console.print(f"Growth: {growth(resident):.1%}, at most {options.growth:.1%} is wanted.\n")
    return resident


def growth(resident: Sequence[int]) -> float:
    """From the first look to the last."""
    return resident[-1] / resident[0] - 1


# --- tables ---------------------------------------------------------------------------------------


def print_blocking(
    console: Console, stallers: Sequence[Staller], samples: Sequence[Sample], nbytes: int
) -> None:
    """Show how long calls block."""
    title = f"blocking, {nbytes >> 20} MiB. Median seconds, least to most; ratios within rounds"
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    for column in (
        "the call\nblocks",
        f"of {DCP}'s",
        "until\nstaged",
        "GB/s",
        "to numpy\ncopyto",
        "to torch\ncopy_",
        "until\ncommitted",
    ):
        table.add_column(column, justify="right", no_wrap=True)

    def relative(name: str, operation: str, other: str) -> list[float]:
        return ratios(samples, "blocking", (name, operation), (other, operation))

    for staller in stallers:
        name, copies = staller.name, staller.copies
        staged = list(by_round(samples, "blocking", name, STAGED).values())
        faster = [[1 / r for r in relative(name, STAGED, c)] for c in (COPYTO, COPY)]
        committed = by_round(samples, "blocking", name, COMMITTED).values()
        table.add_row(
            name,
            spread(by_round(samples, "blocking", name, BLOCKED).values()),
            middle(relative(name, BLOCKED, DCP)) if committed else "",
            f"{statistics.median(staged):.3f}",
            middle([nbytes / s / 1e9 for s in staged]) if copies else "",
            *(middle(f) if copies else "" for f in faster),
            spread(committed),
        )
    console.print(table)
    for staller in stallers:
        console.print(f"{staller.name}: {staller.note}", highlight=False)
    for name in (UnickptTorchCopy.name, UnickptJaxCopy.name):
        for other in (COPYTO, COPY):
            print_target(console, samples, name, other)
    console.print()


def print_target(console: Console, samples: Sequence[Sample], name: str, other: str) -> None:
    """Say how fast a copy is beside a warm one; the least times tell more on a busy machine."""
    ours, theirs = (by_round(samples, "blocking", n, STAGED) for n in (name, other))
    if ours and theirs:
        median = statistics.median(theirs[n] / ours[n] for n in ours)
        best = min(theirs.values()) / min(ours.values())
        console.print(
            f"{name}: {median:.2f} times the speed of {other}, {best:.2f} by the least times; "
            "wanted: 1",
            highlight=False,
        )


def print_loop(
    console: Console,
    part: str,
    names: Sequence[str],
    samples: Sequence[Sample],
    options: argparse.Namespace,
    nbytes: int,
) -> None:
    """Show how much longer loops take."""
    saves = (options.steps - 1) // options.every
    title = (
        f"{part}: {options.steps} steps, {saves} saves of {nbytes / (1 << 20):.0f} MiB. "
        "Median seconds, least to most; ratios to the steps before"
    )
    table = Table(title=title, title_justify="left")
    table.add_column("contender", no_wrap=True)
    columns = (
        "the loop",
        "slower by",
        "in calls",
        "lost by a save",
        "until committed",
        "longer by",
    )
    for column in columns:
        table.add_column(column, justify="right")

    for name in names:
        cells = [spread(by_round(samples, part, name, o).values()) for o in (LOOP, COMMITTED)]
        slower = [
            percent(ratios(samples, part, (name, operation), (name, ALONE)))
            for operation in (LOOP, COMMITTED)
        ]
        called, lost = (spread(by_round(samples, part, name, o).values()) for o in (BLOCKED, LOST))
        if name == NO_SAVING:
            table.add_row(name, cells[0], slower[0], "", lost)
        else:
            table.add_row(name, cells[0], slower[0], called, lost, cells[1], slower[1])
    console.print(table)
    console.print(
        "slower by: until the last step is done; longer by: until all is committed.\n"
        "lost by a save: by the steps after it, beside the last ones before the next.\n"
        "raw process: another process hashes and writes as many bytes; nothing is copied.\n"
        "unickpt and Orbax remove the step before, DCP removes none.\n"
    )


def ratios(
    samples: Sequence[Sample], part: str, one: tuple[str, str], other: tuple[str, str]
) -> list[float]:
    """A contender's seconds divided by another's, in each round."""
    ours, theirs = by_round(samples, part, *one), by_round(samples, part, *other)
    return [ours[number] / theirs[number] for number in sorted(ours.keys() & theirs.keys())]


def spread(seconds: Iterable[float]) -> str:
    """Median, least and most."""
    values = sorted(seconds)
    if not values:
        return ""
    return f"{statistics.median(values):.3f}\n{values[0]:.3f} to {values[-1]:.3f}"


def middle(values: Sequence[float]) -> str:
    """The median."""
    return f"{statistics.median(values):.3g}" if values else ""


def percent(values: Sequence[float]) -> str:
    """Median, least and most, of ratios, as what exceeds one."""
    if not values:
        return ""
    median, least, most = statistics.median(values) - 1, min(values) - 1, max(values) - 1
    return f"{median:.1%}\n{least:.1%} to {most:.1%}"


if __name__ == "__main__":
    main()
