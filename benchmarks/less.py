"""How much a run writes and keeps when it refers to what did not change (docs/reuse.md).

    python benchmarks/less.py lora               # 1 GiB of frozen weights, 1 % trained; 9 rounds
    python benchmarks/less.py known --rounds 30  # of that, only saves with `changed=`, many of them
    python benchmarks/less.py many               # the call of a save of 5000 small arrays
    python benchmarks/less.py policies           # 200 steps of six kinds of training
    python benchmarks/less.py policies --only 'patches, `int4`' --kinds embedding  # a part of it

`lora`: saves of everything, of the same with `base=`, and what `base=` costs if all changed, with
fsync and without, in turns; ratios are taken within each round. `known`: saves of which `changed=`
says what is frozen, without fsync, one after the other: the least, the median, and the CPU time.
`many`: how long `Checkpointer.save` keeps its caller, of 5000 arrays of 2 KiB, half of them frozen,
if nothing is said and if that is said, in turns; nobody waits for anything else meanwhile.

`policies`: prints a table, in sizes of the state: bytes written over the run, and the most that the
checkpoints took. Rows in `REAL` are real runs of a small state, in chunks of 64 KiB, so that it has
as many as a large one in chunks of 8 MiB, with `keep_last=1`; a further way to save is a further
line there. Rows in `COMPUTED` are Check-N-Run's policies (arXiv 2010.08679), from the same changes
of rows: a differential holds the rows that changed since the last full checkpoint (one-shot), or
since the checkpoint before (consecutive, which needs all of them to load); intermittent takes a
full checkpoint when that is expected to write less.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
from peers import fresh_directory, keep_memory, machine_facts, print_facts
from rich.console import Console

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions

ROWS, ROW_BYTES = 4096, 1024
"""Of the state of `policies`: 4 MiB in 64 chunks."""
CHUNK = 64 << 10
KEPT_COST = 1.75
"""Of quantised patches: `keep_last=1` keeps little beside the checkpoint, so that counts, too."""
EXPERTS, DENSE = 16, ROWS // 8
"""Of a mixture of experts: their number, and the rows of what is no expert."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("lora", "known", "many", "policies"))
    parser.add_argument("--mib", type=int, default=1024, help="frozen weights of `lora`")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", nargs="*", help="of `policies`: rows with one of these texts")
    parser.add_argument("--kinds", nargs="*", help="of `policies`: columns, likewise")
    parser.add_argument("--kept-cost", type=float, help="of quantised patches, instead of ours")
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    arguments = parser.parse_args()
    keep_memory()
    console = Console()
    with fresh_directory(arguments.dir) as directory:
        print_facts(console, {**machine_facts(directory), "unickpt": unickpt.__version__})
        if arguments.what == "lora":
            lora(directory, arguments.mib, arguments.rounds)
        elif arguments.what == "known":
            known(directory, arguments.mib, arguments.rounds)
        elif arguments.what == "many":
            many(directory, arguments.rounds)
        else:
            policies(directory, arguments)


# --- a LoRA job -----------------------------------------------------------------------------------


def lora(directory: Path, mib: int, rounds: int) -> None:
    """Print what the saves of a LoRA job write, and how long they take."""
    rng = np.random.default_rng(0)
    frozen = {f"base/{n}": rng.random((2048, 2048), np.float32) for n in range(mib // 16)}
    trained = {f"lora/{n}": rng.random((16 * mib // 100, 1024), np.float32) for n in range(16)}
    for fsync in (True, False):
        kinds = ("full", "reused", "known", "without", "with")
        seconds: dict[str, list[float]] = {name: [] for name in kinds}
        for number in range(rounds + 1):
            taken, written = one_round(directory, frozen, trained, fsync)
            for name, took in taken.items():
                seconds[name] += [took] * bool(number)  # the first one warms up
        medians = {name: statistics.median(found) for name, found in seconds.items()}
        cost = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
        gain = [a / b for a, b in zip(seconds["full"], seconds["reused"], strict=True)]
        more = [a / b for a, b in zip(seconds["full"], seconds["known"], strict=True)]
        print(
            f"{mib} MiB frozen, 1 % trained, fsync={fsync}, {rounds} rounds\n"
            f"  all {medians['full']:.3f} s, with base {medians['reused']:.3f} s, "
            f"{written:.2%} written: {ratios(gain)} times as fast\n"
            f"  with base, and what changed said {medians['known']:.3f} s: {ratios(more)} times as "
            "fast\n"
            f"  all changed: without base {medians['without']:.3f} s, with base "
            f"{medians['with']:.3f} s: {ratios(cost)} times as long"
        )


def one_round(
    directory: Path, frozen: dict[str, Any], trained: dict[str, Any], fsync: bool
) -> tuple[dict[str, float], float]:
    """Seconds of each kind of save; and the share that the third one of a job wrote."""
    taken: dict[str, float] = {}
    change(trained)
    without, of_full = (SaveOptions(fsync=fsync, base=b) for b in (None, directory / "full"))
    shutil.rmtree(directory / "full", ignore_errors=True)
    taken["full"], _ = timed(directory / "full", frozen | trained, without)
    change(trained)
    seen = replace(of_full, changed={"base*": False})  # so that the next save can skip anything
    timed(directory / "second", frozen | trained, seen)
    change(trained)
    of_second = SaveOptions(fsync=fsync, base=directory / "second")
    known = replace(of_second, changed={"base*": False})
    saves = {"reused": of_second, "known": known}
    for name in random.sample(list(saves), 2):
        taken[name], report = timed(directory / "new", frozen | trained, saves[name])
        shutil.rmtree(directory / "new")
    shutil.rmtree(directory / "second")
    change(frozen)
    change(trained)
    options = {"without": without, "with": of_full}
    for name in random.sample(list(options), 2):
        taken[name], _ = timed(directory / "new", frozen | trained, options[name])
        shutil.rmtree(directory / "new")
    return taken, report.written_bytes / report.bytes


def known(directory: Path, mib: int, rounds: int) -> None:
    """Print how long saves take of which it is said what did not change."""
    rng = np.random.default_rng(0)
    frozen = {f"base/{n}": rng.random((2048, 2048), np.float32) for n in range(mib // 16)}
    trained = {f"lora/{n}": rng.random((16 * mib // 100, 1024), np.float32) for n in range(16)}
    timed(directory / "full", frozen | trained, SaveOptions(fsync=False))
    change(trained)
    base = SaveOptions(fsync=False, base=directory / "full", changed={"base*": False})
    timed(directory / "second", frozen | trained, base)
    options = replace(base, base=directory / "second")
    seconds, of_cpu = list[float](), list[float]()
    for number in range(rounds + 3):
        change(trained)
        began = time.process_time()
        took, report = timed(directory / "new", frozen | trained, options)
        if number >= 3:  # the first ones warm up
            seconds.append(took)
            of_cpu.append(time.process_time() - began)
        shutil.rmtree(directory / "new")
    least, middle, cpu = min(seconds), statistics.median(seconds), statistics.median(of_cpu)
    print(
        f"{mib} MiB frozen, 1 % trained, what changed said, {rounds} saves: "
        f"least {least * 1e3:.1f} ms, median {middle * 1e3:.1f} ms, CPU {cpu * 1e3:.1f} ms; "
        f"{report.written_bytes / report.bytes:.2%} written"
    )


def many(directory: Path, rounds: int) -> None:
    """Print how long the call of a save takes."""
    rng = np.random.default_rng(0)
    state = {
        kind: {str(n): rng.random((64, 8), np.float32) for n in range(2500)}
        for kind in ("frozen", "trained")
    }
    told: dict[str, dict[str, Any]] = {"nothing": {}, "what": {"changed": {"frozen/*": False}}}
    calls: dict[str, list[float]] = {name: [] for name in told}
    options = SaveOptions(fsync=False)
    with Checkpointer(directory / "run", keep_last=1, reuse=True, options=options) as run:
        for step in range(4 + 2 * rounds):
            change(state["trained"])
            name = list(told)[step % 2]
            started = time.perf_counter()
            pending = run.save(step, state, **told[name] if step else {})
            calls[name] += [time.perf_counter() - started] * (step >= 4)  # the first ones warm up
            pending.result()
    shown = {
        name: f"{statistics.median(found) * 1e3:.1f} ms ({min(found) * 1e3:.1f} to "
        f"{max(found) * 1e3:.1f})"
        for name, found in calls.items()
    }
    print(
        f"call of a save of 5000 arrays, half of them frozen, {rounds} rounds: {shown['nothing']} "
        f"if nothing is said, {shown['what']} if that is said"
    )


def ratios(found: list[float]) -> str:
    """The median, and the quartiles around it."""
    low, middle, high = statistics.quantiles(found, n=4)
    return f"{middle:.2f} (quartiles {low:.2f} to {high:.2f})"


def change(arrays: dict[str, Any]) -> None:
    """Change every element."""
    for array in arrays.values():
        array += 1


def timed(path: Path, tree: Any, options: SaveOptions) -> tuple[float, unickpt.types.SaveReport]:
    """The seconds of a save."""
    os.sync()
    started = time.perf_counter()
    report = unickpt.save(path, tree, options=options)
    return time.perf_counter() - started, report


# --- kinds of training ----------------------------------------------------------------------------

Places = Any
"""The numbers of the elements that change in a step, or a slice of them; rows are whole."""


@dataclass(frozen=True)
class Kind:
    """A kind of training.

    Arguments:
        title: what changes.
        rows: makes the rows that change in each step.
        elements: instead of them, how many elements change, anywhere.
        dtype: of the state.
        has_experts: whether the state is a mixture of experts.
    """

    title: str
    rows: Callable[[np.random.Generator], Iterator[Any]] | None = None
    elements: float = 0.0
    dtype: Any = np.float32
    has_experts: bool = False

    @property
    def width(self) -> int:
        """Elements of a row."""
        return ROW_BYTES // np.dtype(self.dtype).itemsize

    def changes(self, steps: int) -> Iterator[tuple[Any, Any]]:
        """For each step the rows that change, and which of all elements, as numbers."""
        rng = np.random.default_rng(1)
        rows = None if self.rows is None else self.rows(rng)
        every = np.arange(ROWS * self.width).reshape(ROWS, self.width)
        for _ in range(steps):
            if rows is None:
                found = np.unique(rng.integers(0, every.size, round(self.elements * every.size)))
                yield np.unique(found // self.width), found
            else:
                changed = next(rows)
                yield changed, every[changed].reshape(-1)

    def tree(self, state: Any) -> dict[str, Any]:
        """The state, as it is saved."""
        if not self.has_experts:
            return {"w": state}
        stacked = state[DENSE:].reshape(EXPERTS, -1, self.width)
        return {"dense": state[:DENSE], "experts": stacked}


def dense(rng: np.random.Generator) -> Iterator[Any]:
    """All rows."""
    while True:
        yield np.arange(ROWS)


def adapter(rng: np.random.Generator) -> Iterator[Any]:
    """The last 1 % of the rows."""
    while True:
        yield np.arange(ROWS - ROWS // 100, ROWS)


def embedding(rng: np.random.Generator) -> Iterator[Any]:
    """Of a step, 400 rows by Zipf's law, the frequent ones first."""
    while True:
        found = rng.zipf(1.2, 400) - 1
        yield np.unique(found[found < ROWS])


def scattered(rng: np.random.Generator) -> Iterator[Any]:
    """1 % of all rows, anywhere."""
    while True:
        yield np.unique(rng.integers(0, ROWS, ROWS // 100))


def experts(rng: np.random.Generator) -> Iterator[Any]:
    """The dense rows, and those of 4 experts."""
    size = (ROWS - DENSE) // EXPERTS
    while True:
        chosen = rng.permutation(EXPERTS)[:4]
        yield np.concatenate(
            [np.arange(DENSE), *(DENSE + e * size + np.arange(size) for e in chosen)]
        )


KINDS = (
    Kind("everything (float32)", dense),
    Kind("LoRA: the same 1 % of the rows", adapter),
    Kind("embedding: rows by Zipf's law", embedding),
    Kind("1 % of the rows, anywhere", scattered),
    Kind("RL: 1 % of the elements, anywhere (bfloat16)", None, 0.01, ml_dtypes.bfloat16),
    Kind("4 of 16 experts, and 1/8 dense", experts, has_experts=True),
)

# --- policies -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Real:
    """A way to save, which is run.

    Arguments:
        options: of the saves.
        run: arguments of the Checkpointer.
        links: whether the file system has hard links.
        for_experts: whether only a mixture of experts is saved so.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    run: Mapping[str, Any] = field(default_factory=lambda: {"reuse": True})
    links: bool = True
    for_experts: bool = False


REAL = {
    "full": Real(run={}),
    "full, `uint8`": Real({"quantize": {"**": "uint8"}}, {}),
    "full, `int4`": Real({"quantize": {"**": "int4"}}, {}),
    "reuse": Real(),
    "reuse, no links": Real(links=False),
    "reuse, chunks of 4 KiB": Real({"chunk_bytes": 4096}),
    "reuse, patches": Real(run={"reuse": "patch"}),
    "reuse, `uint8`": Real({"quantize": {"**": "uint8"}}),
    "reuse, `int4`": Real({"quantize": {"**": "int4"}}),
    "reuse, patches, `uint8`": Real(
        {"quantize": {"**": "uint8"}, "kept_cost": KEPT_COST}, {"reuse": "patch"}
    ),
    "reuse, patches, `int4`": Real(
        {"quantize": {"**": "int4"}, "kept_cost": KEPT_COST}, {"reuse": "patch"}
    ),
    "4 experts in turn": Real(run={"experts": Experts({"experts": (0, 4)})}, for_experts=True),
    "1 expert in turn": Real(run={"experts": Experts({"experts": (0, 1)})}, for_experts=True),
    "1 expert in turn, reuse": Real(
        run={"experts": Experts({"experts": (0, 1)}), "reuse": True}, for_experts=True
    ),
}


def policies(directory: Path, arguments: argparse.Namespace) -> None:
    """Print a table of the policies and kinds of training that are asked for."""

    def asked(text: str, of: Sequence[str] | None) -> bool:
        return of is None or any(part in text for part in of)

    steps, cost = arguments.steps, arguments.kept_cost
    kinds = [kind for kind in KINDS if asked(kind.title, arguments.kinds)]
    print(f"Written in {steps} steps / kept at most, in states:\n")
    print_row("", *(kind.title for kind in kinds))
    print_row(*["---"] * (1 + len(kinds)))
    for name, way in REAL.items():
        if not asked(name, arguments.only):
            continue
        if cost is not None and "kept_cost" in way.options:
            way = replace(way, options={**way.options, "kept_cost": cost})
        cells = [
            real(directory / "run", kind, way, steps)
            if kind.has_experts or not way.for_experts
            else None
            for kind in kinds
        ]
        print_row(name, *map(shown, cells))
    for name, (policy, bits) in COMPUTED.items():
        if asked(name, arguments.only):
            print_row(name, *(shown(policy(kind, steps, bits)) for kind in kinds))


def print_row(*cells: str) -> None:
    """Print a row of a table in Markdown."""
    print(f"| {' | '.join(cells)} |", flush=True)


def shown(cell: Sequence[float] | None) -> str:
    """The text of a cell."""
    if cell is None:
        return ""
    written, kept, *plt = cell
    return f"{written:.3g} / {kept:.3g}" + "".join(f" (PLT {lost:.1%})" for lost in plt)


def refuse(*_: Any, **__: Any) -> None:
    """As a file system without hard links."""
    raise PermissionError("no links")


def real(directory: Path, kind: Kind, way: Real, steps: int) -> tuple[float, ...]:
    """What a run writes, and the most that it keeps; of experts also the tokens that a restart from
    the last step would lose."""
    rng = np.random.default_rng(0)
    state = rng.standard_normal((ROWS, kind.width)).astype(kind.dtype)
    written = kept = 0
    tokens = np.zeros(EXPERTS)
    options = SaveOptions(**{"chunk_bytes": CHUNK, "fsync": False, **way.options})
    links: AbstractContextManager[Any] = nullcontext()
    if not way.links:
        links = mock.patch.object(os, "link", refuse)
    with links, Checkpointer(directory, keep_last=1, options=options, **way.run) as run:
        for step, (rows, changed) in enumerate(kind.changes(steps)):
            state.reshape(-1)[changed] = rng.standard_normal(len(changed)).astype(kind.dtype)
            tokens[np.unique((rows[rows >= DENSE] - DENSE) * EXPERTS // (ROWS - DENSE))] += 1
            counts = {"experts": tokens} if way.for_experts else None
            report = run.save(step, kind.tree(state), tokens=counts, wait=True).result()
            written += report.stored_bytes
            run.wait()
            kept = max(kept, disk_bytes(directory))
    lost = []
    if way.for_experts:
        metadata = unickpt.open(directory / f"step_{steps - 1}").metadata
        lost = [metadata["unickpt"]["experts"]["plt"]]
    shutil.rmtree(directory)
    return written / state.nbytes, kept / state.nbytes, *lost


def disk_bytes(directory: Path) -> int:
    """What files take, each once however many names it has."""
    found = (path.lstat() for path in directory.rglob("*") if path.is_file())
    return sum({facts.st_ino: facts.st_size for facts in found}.values())


# --- Check-N-Run's --------------------------------------------------------------------------------


def stored(kind: Kind, bits: int | None) -> float:
    """The size of a row in the paper's quantisation, which adds two float32 to each, in rows."""
    return 1.0 if bits is None else (kind.width * bits + 64) / (8 * ROW_BYTES)


def one_shot(kind: Kind, steps: int, bits: int | None) -> tuple[float, float]:
    """Differentials against the first checkpoint."""
    since, sizes = np.zeros(ROWS, bool), list[float]()
    changes = kind.changes(steps)
    next(changes)
    for rows, _ in changes:
        since[rows] = True
        sizes.append(float(since.mean()))
    scale = stored(kind, bits)
    return scale * (1 + sum(sizes)), scale * (1 + max(sizes))


def consecutive(kind: Kind, steps: int, bits: int | None) -> tuple[float, float]:
    """Differentials against the checkpoint before; all are kept."""
    changes = kind.changes(steps)
    next(changes)
    written = stored(kind, bits) * (1 + sum(len(rows) / ROWS for rows, _ in changes))
    return written, written


def intermittent(kind: Kind, steps: int, bits: int | None) -> tuple[float, float]:
    """One-shot, and a full checkpoint where the paper's rule expects it to write less.

    With differentials of sizes s1 to si since the last full one, and a full one of 1, it takes a
    full one if `1 + s1 + ... + si <= (i + 1) * si`: if those to come, at least as large as the
    last, will write more than beginning again would.
    """
    changes = kind.changes(steps)
    next(changes)
    since, sizes, written, most = np.zeros(ROWS, bool), list[float](), 1.0, 1.0
    for rows, _ in changes:
        since[rows] = True
        if sizes and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]:
            since[:], sizes = False, []
            written += 1
            continue
        sizes.append(float(since.mean()))
        written, most = written + sizes[-1], max(most, 1 + sizes[-1])
    return stored(kind, bits) * written, stored(kind, bits) * most


Policy = Callable[[Kind, int, int | None], tuple[float, float]]
COMPUTED: dict[str, tuple[Policy, int | None]] = {
    "one-shot": (one_shot, None),
    "consecutive": (consecutive, None),
    "intermittent": (intermittent, None),
    "intermittent, 8 bits": (intermittent, 8),
    "intermittent, 4 bits": (intermittent, 4),
}


if __name__ == "__main__":
    main()
