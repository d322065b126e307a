"""How much a run writes and keeps when it refers to what did not change (docs/reuse.md).

    python benchmarks/less.py lora               # 1 GiB of frozen weights, 1 % trained; 5 rounds
    python benchmarks/less.py policies           # 200 steps of five kinds of training

`lora`: durable saves of everything, of the same with `base=`, and what `base=` costs if all changed
(without fsync, in turns; the ratio is taken within each round).

`policies`: real runs of a small state, in chunks of 64 KiB, so that it has as many as a large one
in chunks of 8 MiB: all of it each time; `reuse=True` on a file system with links, and without.
Bytes written over the run, and the most that the folder took with `keep_last=1`, in sizes of the
state. Beside them, computed from the same changes of rows, Check-N-Run's policies (arXiv
2010.08679): a differential holds the rows that changed since the last full checkpoint (one-shot),
or since the checkpoint before (consecutive, which needs all of them to load); intermittent takes a
full checkpoint when that is expected to write less.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from peers import fresh_directory, keep_memory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt
from unickpt import Checkpointer, SaveOptions

ROWS, WIDTH = 4096, 1024
"""Of the state of `policies`, in bytes: 4 MiB in 64 chunks."""
CHUNK = 64 << 10


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lora", "policies"))
    parser.add_argument("--mib", type=int, default=1024, help="frozen weights of `lora`")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    arguments = parser.parse_args()
    keep_memory()
    console = Console()
    with fresh_directory(arguments.dir) as directory:
        print_facts(console, {**machine_facts(directory), "unickpt": unickpt.__version__})
        if arguments.what == "lora":
            lora(directory, arguments.mib, arguments.rounds)
        else:
            console.print(policies(directory, arguments.steps))


# --- a LoRA job -----------------------------------------------------------------------------------


def lora(directory: Path, mib: int, rounds: int) -> None:
    """Print what the saves of a LoRA job write, and how long they take."""
    rng = np.random.default_rng(0)
    frozen = {f"base/{n}": rng.random((2048, 2048), np.float32) for n in range(mib // 16)}
    trained = {f"lora/{n}": rng.random((16 * mib // 100, 1024), np.float32) for n in range(16)}
    seconds: dict[str, list[float]] = {"full": [], "reused": [], "without": [], "with": []}
    written = 0.0
    for number in range(rounds + 1):
        taken = {}
        change(trained)
        taken["full"], _ = timed(directory / "full", frozen | trained, overwrite=True)
        change(trained)
        options = SaveOptions(base=directory / "full")
        taken["reused"], report = timed(directory / "new", frozen | trained, options=options)
        written = report.written_bytes / report.bytes
        change(frozen)
        change(trained)
        shutil.rmtree(directory / "new")
        bases = {"without": None, "with": directory / "full"}
        for name in random.sample(list(bases), 2):
            options = SaveOptions(base=bases[name], fsync=False)
            taken[name], _ = timed(directory / "new", frozen | trained, options=options)
            shutil.rmtree(directory / "new")
        for name, took in taken.items():
            seconds[name] += [took] * bool(number)
    ratios = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    full, reused = (statistics.median(seconds[name]) for name in ("full", "reused"))
    print(
        f"{mib} MiB frozen, 1 % trained: durable save of all {full:.3f} s, with base "
        f"{reused:.3f} s ({full / reused:.1f} times as fast), {written:.2%} written\n"
        f"all changed: with base {statistics.median(ratios):.2f} times as long as without "
        f"({min(ratios):.2f} to {max(ratios):.2f})"
    )


def change(arrays: dict[str, Any]) -> None:
    """Change every element."""
    for array in arrays.values():
        array += 1


def timed(path: Path, tree: Any, **arguments: Any) -> tuple[float, unickpt.SaveReport]:
    """The seconds of a save."""
    os.sync()
    started = time.perf_counter()
    report = unickpt.save(path, tree, **arguments)
    return time.perf_counter() - started, report


# --- policies -------------------------------------------------------------------------------------

Rows = Any
"""The numbers of the rows that change in a step."""


def dense(rng: np.random.Generator) -> Iterator[Rows]:
    """Training of everything."""
    while True:
        yield np.arange(ROWS)


def adapter(rng: np.random.Generator) -> Iterator[Rows]:
    """LoRA: the last 1 % of the rows."""
    while True:
        yield np.arange(ROWS - ROWS // 100, ROWS)


def embedding(rng: np.random.Generator) -> Iterator[Rows]:
    """An embedding table; a step touches 400 rows, by Zipf's law, the frequent ones first."""
    while True:
        found = rng.zipf(1.2, 400) - 1
        yield np.unique(found[found < ROWS])


def scattered(rng: np.random.Generator) -> Iterator[Rows]:
    """As reinforcement learning at small rates: 1 % of all rows, anywhere."""
    while True:
        yield np.unique(rng.integers(0, ROWS, ROWS // 100))


def experts(rng: np.random.Generator) -> Iterator[Rows]:
    """A mixture of 16 experts of which a step trains 4, and dense rows, 1/8 of all."""
    size = ROWS * 7 // 8 // 16
    while True:
        chosen = rng.permutation(16)[:4]
        rows = [np.arange(ROWS // 8), *(ROWS // 8 + e * size + np.arange(size) for e in chosen)]
        yield np.concatenate(rows)


KINDS = (dense, adapter, embedding, scattered, experts)


def policies(directory: Path, steps: int) -> Table:
    """The table of all kinds of training."""
    names = ("full", "links", "kept", "no links", "kept", "one-shot", "consecutive", "intermittent")
    table = Table(
        "changes", *names, title=f"bytes of {steps} checkpoints, in states", show_lines=True
    )
    for kind in KINDS:
        linked = real(directory / "linked", kind, steps)
        with mock.patch.object(os, "link", refuse):
            beside = real(directory / "beside", kind, steps)
        computed = [policy(kind, steps) for policy in (one_shot, consecutive, intermittent)]
        cells = (float(steps), *linked, *beside, *computed)
        table.add_row(kind.__name__, *(f"{cell:.1f}" for cell in cells))
    return table


def refuse(*_: Any, **__: Any) -> None:
    """As a file system without hard links."""
    raise PermissionError("no links")


def real(directory: Path, kind: Callable[..., Iterator[Rows]], steps: int) -> tuple[float, float]:
    """What a run writes, and the most that it keeps."""
    state = np.zeros((ROWS, WIDTH), np.uint8)
    rows, written, kept = kind(np.random.default_rng(1)), 0, 0
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    with Checkpointer(directory, keep_last=1, reuse=True, options=options) as run:
        for step, changed in zip(range(steps), rows, strict=False):
            state[changed] += 1
            written += run.save(step, {"w": state}, wait=True).result().written_bytes
            run.wait()
            kept = max(kept, disk_bytes(directory))
    shutil.rmtree(directory)
    return written / state.nbytes, kept / state.nbytes


def disk_bytes(directory: Path) -> int:
    """What files take, each once however many names it has."""
    found = (path.lstat() for path in directory.rglob("*") if path.is_file())
    return sum({facts.st_ino: facts.st_size for facts in found}.values())


def one_shot(kind: Callable[..., Iterator[Rows]], steps: int) -> float:
    """Differentials against the first checkpoint."""
    since, written = np.zeros(ROWS, bool), 1.0
    rows = kind(np.random.default_rng(1))
    next(rows)
    for _, changed in zip(range(steps - 1), rows, strict=False):
        since[changed] = True
        written += float(since.mean())
    return written


def consecutive(kind: Callable[..., Iterator[Rows]], steps: int) -> float:
    """Differentials against the checkpoint before."""
    rows = kind(np.random.default_rng(1))
    next(rows)
    return 1.0 + sum(len(c) / ROWS for _, c in zip(range(steps - 1), rows, strict=False))


def intermittent(kind: Callable[..., Iterator[Rows]], steps: int) -> float:
    """One-shot, and a full checkpoint where the paper's rule expects it to write less.

    With differentials of sizes s1 to si since the last full one, and a full one of 1, it takes a
    full one if `1 + s1 + ... + si <= (i + 1) * si`: if those to come, at least as large as the
    last, will write more than beginning again would.
    """
    rows = kind(np.random.default_rng(1))
    next(rows)
    since, sizes, written = np.zeros(ROWS, bool), list[float](), 1.0
    for _, changed in zip(range(steps - 1), rows, strict=False):
        since[changed] = True
        if sizes and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]:
            since[:], sizes = False, []
            written += 1
            continue
        sizes.append(float(since.mean()))
        written += sizes[-1]
    return written


if __name__ == "__main__":
    main()
