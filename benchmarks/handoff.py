"""Hand a JAX checkpoint over to a Hugging Face model in torch: by rules, and as it is done today.

    python benchmarks/handoff.py                                # 1 GiB, on 1 and on 4 ranks
    python benchmarks/handoff.py --mib 64 --rounds 1 --ranks 1
    python benchmarks/handoff.py --contenders rules today --json results.json --dir /some/disk

A Llama of float32, its layers scanned as in Flax, is made once and saved by unickpt and by Orbax.
From there, on one rank or onto four that shard it with FSDP2:

rules: a model on the meta device; unickpt fills it from the JAX checkpoint by the rules below.
plain: the same of a checkpoint that has the model's own names and axes already.
today: Orbax restores to NumPy, each array is transposed and copied, written with safetensors, and
read by `from_pretrained`; of four ranks the first converts, then each reads all and shards it.
today, uncompressed: the same of a checkpoint that Orbax did not compress.

Each turn runs in processes of its own, in an order shuffled anew in every round. The clock runs
from before the first read, with everything imported, until each page of the model is in memory. All
that is read is in the page cache. Round 0 warms up, is not counted, and checks every bit of the
parameters and the logits.

Memory is that of all ranks together, at one time, sampled from outside every 10 ms; of the
`largest` rank it is what the kernel recorded as its peak. `above start` is what came on top of the
imports and an empty start; `private` is that without mapped files, such as the one that
`from_pretrained` reads. Ratios are taken within each round; tables give medians over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import select
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, perf_counter
from typing import Any

import numpy as np
from handoffs import (
    HANDOFFS,
    MIB,
    ByRules,
    Handoff,
    Job,
    config_of,
    digest_of,
    make,
    touch,
    write_logits,
)
from memory import memory
from peers import (
    add_run_arguments,
    fresh_directory,
    machine_facts,
    print_facts,
    versions,
    wait_for_quiet,
)
from rich.console import Console
from rich.table import Table

EVERY_S, PATIENCE_S = 0.01, 600
SPEED = "speed"


@dataclass(frozen=True)
class Turn:
    """What one handoff took; memory in bytes."""

    contender: str
    ranks: int
    round: int
    seconds: float
    above_start: int
    total: int
    """`above_start`, with the imports and an empty start."""
    private: int
    """`above_start`, without mapped files."""
    largest: int
    """`above_start`, of the largest rank."""


@dataclass(frozen=True)
class Target:
    """A promise about `rules`: a ratio to a peer, at least or at most so large."""

    quantity: str
    peer: str
    at_least: float | None = None
    at_most: float | None = None

    def reached(self, ratio: float) -> bool:
        """Whether a measured ratio keeps it."""
        return ratio >= self.at_least if self.at_least is not None else ratio <= self.at_most


TARGETS = (
    Target(SPEED, "today", at_least=4),
    Target("above_start", "today", at_most=1 / 3),
    Target("total", "today", at_most=1 / 3),
    Target("private", "today", at_most=1 / 3),
    Target("largest", "today", at_most=1 / 3),
    Target(SPEED, "plain", at_least=0.5),
)
TUNED = {"today": ("today, uncompressed",)}


def main() -> None:
    """Measure what the command line asks for, or be a process that is measured."""
    options = parse_arguments()
    if options.child:
        child(options)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    kinds = [HANDOFFS[name] for name in HANDOFFS if name in options.contenders]
    turns: list[Turn] = []
    with fresh_directory(options.dir) as directory:
        facts = machine_facts(directory) | versions(kinds)
        print_facts(console, facts)
        with Ranks(options, directory, "", 1) as setup:
            made = setup.answers("go")[0]
        console.print(
            f"\n{made['layers']} layers, {made['bytes'] / MIB:.0f} MiB\n", highlight=False
        )
        for ranks in options.ranks:
            turns += run(options, directory, kinds, ranks, made["digest"])
            print_turns(console, ranks, kinds, turns, made["bytes"])
    print_targets(console, turns)
    if options.json:
        results = {"facts": facts, "model": made, "turns": [asdict(turn) for turn in turns]}
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, default=1024, help="about the size of the model (default: 1024)"
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--contenders", nargs="+", choices=tuple(HANDOFFS), default=tuple(HANDOFFS), metavar="NAME"
    )
    add_run_arguments(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the turns to FILE")
    parser.add_argument("--child", metavar="RANK/RANKS", help=argparse.SUPPRESS)
    parser.add_argument("--name", help=argparse.SUPPRESS)
    return parser.parse_args()


# --- the processes that measure -------------------------------------------------------------------


class Ranks:
    """The processes of one turn, all of which say that they are ready.

    Arguments:
        options: of the command line.
        directory: for everything on the disk.
        name: of the contender; empty to make the checkpoints.
        count: of processes.
    """

    def __init__(self, options: argparse.Namespace, directory: Path, name: str, count: int) -> None:
        self._options, self._directory, self._name = options, directory, name
        self._count, self._processes = count, list[Any]()

    def __enter__(self) -> Ranks:
        (self._directory / "store").unlink(missing_ok=True)
        with ExitStack() as stack:
            for rank in range(self._count):
                errors = stack.enter_context((self._directory / f"errors_{rank}").open("wb"))
                process = stack.enter_context(self._start(rank, errors))
                stack.callback(process.kill)
                self._processes.append(process)
            self.answers(None)
            self._stack = stack.pop_all()
        return self

    def _start(self, rank: int, errors: Any) -> Any:
        # torchrun gives each of several ranks one thread.
        threads = {"OMP_NUM_THREADS": "1"} if self._count > 1 else {}
        quiet = {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, "-W", "ignore", __file__, "--dir", str(self._directory)]
        command += ["--mib", str(self._options.mib), "--name", self._name]
        command += ["--child", f"{rank}/{self._count}"]
        return subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=os.environ | quiet | threads,
        )

    def __exit__(self, kind: Any, *_: object) -> None:
        with self._stack:
            if kind is None:
                for process in self._processes:
                    process.stdin.close()
                codes = [process.wait(PATIENCE_S) for process in self._processes]
                if any(codes):
                    self._fail()

    @property
    def statuses(self) -> list[Path]:
        """What the kernel tells of each."""
        return [Path(f"/proc/{process.pid}/status") for process in self._processes]

    def answers(
        self, message: str | None, watch: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Tell all something, and call `watch` again and again until all have answered."""
        for process in self._processes if message is not None else ():
            process.stdin.write(f"{message}\n".encode())
        found: dict[int, dict[str, Any]] = {}
        open_ = {process.stdout: rank for rank, process in enumerate(self._processes)}
        deadline = monotonic() + PATIENCE_S
        while open_:
            for pipe in select.select([*open_], [], [], EVERY_S)[0]:
                line = pipe.readline()
                if not line:
                    self._fail()
                found[open_.pop(pipe)] = json.loads(line)
            watch()
            if monotonic() > deadline:
                self._fail()
        return [found[rank] for rank in range(self._count)]

    def _fail(self) -> None:
        errors = [
            (self._directory / f"errors_{rank}").read_text(errors="replace")[-2000:]
            for rank in range(self._count)
        ]
        raise SystemExit("\n".join([f"{self._name or 'the setup'} failed", *errors]))


class Memory:
    """The memory of some processes, beside what they had when this was made."""

    def __init__(self, statuses: Sequence[Path]) -> None:
        self._statuses = statuses
        for status in statuses:
            (status.parent / "clear_refs").write_text("5")  # VmHWM begins anew
        self._first = [self._of(status, "VmRSS") for status in statuses]
        self._resident = sum(self._first)
        self._private = self._private_first = self._sum("RssAnon", "RssShmem")

    def look(self) -> None:
        """Take note of what there is now."""
        self._resident = max(self._resident, self._sum("VmRSS"))
        self._private = max(self._private, self._sum("RssAnon", "RssShmem"))

    def peaks(self) -> dict[str, int]:
        """The fields of a `Turn`."""
        largest = max(
            self._of(status, "VmHWM") - first
            for status, first in zip(self._statuses, self._first, strict=True)
        )
        # The kernel misses nothing, and of a single rank it tells all.
        above = max(self._resident - sum(self._first), largest)
        return {
            "above_start": above,
            "total": above + sum(self._first),
            "private": self._private - self._private_first,
            "largest": largest,
        }

    def _of(self, status: Path, *names: str) -> int:
        return memory(status, names)

    def _sum(self, *names: str) -> int:
        return sum(self._of(status, *names) for status in self._statuses)


def run(
    options: argparse.Namespace,
    directory: Path,
    kinds: Sequence[type[Handoff]],
    ranks: int,
    digest: str,
) -> list[Turn]:
    """Every contender's turn in every round, and one round before to check and warm up."""
    order, shuffle, turns = list(kinds), random.Random(0).shuffle, []
    for number in range(options.rounds + 1):
        shuffle(order)
        for kind in order:
            if sys.stderr.isatty():
                text = f"{ranks} ranks, {number}/{options.rounds}: {kind.name}"
                print(f"\x1b[K{text}", end="\r", file=sys.stderr)
            with Ranks(options, directory, kind.name, ranks) as processes:
                into_cache(directory / kind.stored)
                os.sync()
                wait_for_quiet(options.patience)
                taken = Memory(processes.statuses)
                answers = processes.answers("go", taken.look)
                seconds = max(answer["seconds"] for answer in answers)
                turn = Turn(kind.name, ranks, number, seconds, **taken.peaks())
                if number == 0:
                    check(kind.name, processes.answers("check")[0], digest, directory)
            shutil.rmtree(directory / "converted", ignore_errors=True)
            turns += [turn] if number > 0 else []
    return turns


def into_cache(path: Path) -> None:
    """Read all files below a directory."""
    buffer = bytearray(8 * MIB)
    for file in (file for file in path.rglob("*") if file.is_file()):
        with file.open("rb", buffering=0) as opened:
            while opened.readinto(buffer):
                pass


def check(name: str, answer: Mapping[str, str], digest: str, directory: Path) -> None:
    """Compare all bits of the parameters, and the logits, which depend on the rest as well."""
    if answer["digest"] != digest:
        raise SystemExit(f"{name} loaded other parameters than were saved")
    expected, logits = (np.load(directory / f"{n}.npy") for n in ("expected", "logits"))
    # The order of sums in a product of matrices depends on where they lie in memory.
    if not np.allclose(expected, logits, rtol=1e-3, atol=1e-4 * np.abs(expected).max()):
        raise SystemExit(f"{name}: the model gives other logits than it should")


# --- the processes that are measured --------------------------------------------------------------


def child(options: argparse.Namespace) -> None:
    """Make the checkpoints or take a turn, between the signs of the parent."""
    # Libraries print as they like.
    signs = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def tell(**answer: Any) -> str:
        print(json.dumps(answer), file=signs, flush=True)
        return sys.stdin.readline().strip()

    rank, ranks = map(int, options.child.split("/"))
    folder = Path(options.dir)
    if not options.name:
        tell()
        tell(**make(options.mib, folder))
        return
    handoff = HANDOFFS[options.name]()
    job = Job(folder, config_of(options.mib), rank, ranks)
    start(handoff, job)
    tell()
    began = perf_counter()
    model = handoff.load(job)
    touch(model)
    if tell(seconds=perf_counter() - began) == "check":
        tell(digest=digest_of(model), **write_logits(model, folder / "logits.npy"))
    if ranks > 1:
        import torch.distributed as dist

        del model
        gc.collect()  # frees it first: see "terminate called" in docs/troubleshooting.md
        dist.destroy_process_group()


def start(handoff: Handoff, job: Job) -> None:
    """All that a job does before it loads."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401

    handoff.start(job)
    if job.ranks > 1:
        store = f"file://{job.folder / 'store'}"
        dist.init_process_group("gloo", store, rank=job.rank, world_size=job.ranks)
        init_device_mesh("cpu", (job.ranks,))


# --- tables ---------------------------------------------------------------------------------------


def print_turns(
    console: Console,
    ranks: int,
    kinds: Sequence[type[Handoff]],
    turns: Sequence[Turn],
    nbytes: int,
) -> None:
    """Show times and memory."""
    title = f"{ranks} {'rank' if ranks == 1 else 'ranks'}. Medians (least to most); memory in MiB"
    table = Table(title=title, title_justify="left")
    table.add_column("contender")
    kept = ("above_start", "total", "private", "largest")
    for column in ("seconds", "GB/s", *(name.replace("_", " ") for name in kept)):
        table.add_column(column, justify="right")
    for kind in kinds:
        seconds = by_round(turns, ranks, kind.name, "seconds").values()
        table.add_row(
            kind.name,
            spread(seconds, "{:.2f}"),
            f"{nbytes / statistics.median(seconds) / 1e9:.2f}",
            *(
                spread([n / MIB for n in by_round(turns, ranks, kind.name, c).values()], "{:.0f}")
                for c in kept
            ),
        )
    console.print(table)


def by_round(turns: Iterable[Turn], ranks: int, name: str, quantity: str) -> dict[int, float]:
    """A quantity of each round."""
    return {
        turn.round: getattr(turn, quantity)
        for turn in turns
        if (turn.ranks, turn.contender) == (ranks, name)
    }


def spread(values: Iterable[float], form: str) -> str:
    """Median, least and most."""
    found = sorted(values)
    middle, least, most = map(form.format, (statistics.median(found), found[0], found[-1]))
    return f"{middle}\n({least} to {most})"


def ratio(turns: Sequence[Turn], ranks: int, quantity: str, peer: str) -> float | None:
    """Of `rules` to a peer: the median of the ratios within each round."""
    kept, power = ("seconds", -1) if quantity == SPEED else (quantity, 1)
    ours, theirs = (by_round(turns, ranks, name, kept) for name in (ByRules.name, peer))
    ratios = [(ours[number] / theirs[number]) ** power for number in ours.keys() & theirs.keys()]
    return statistics.median(ratios) if ratios else None


def print_targets(console: Console, turns: Sequence[Turn]) -> None:
    """Show every target whose contenders took part."""
    table = Table(title="rules, beside its peers", title_justify="left")
    for name in ("ranks", "quantity", "peer"):
        table.add_column(name)
    for name in ("wanted", "measured"):
        table.add_column(name, justify="right")
    table.add_column("reached")
    table.add_column("with other settings")
    for ranks in sorted({turn.ranks for turn in turns}):
        for target in TARGETS:
            measured = ratio(turns, ranks, target.quantity, target.peer)
            if measured is None or (target.quantity == "largest" and ranks == 1):
                continue
            least = target.at_least is not None
            bound = target.at_least if least else target.at_most
            others = {
                n: ratio(turns, ranks, target.quantity, n) for n in TUNED.get(target.peer, ())
            }
            table.add_row(
                str(ranks),
                target.quantity.replace("_", " "),
                target.peer,
                f"{'at least' if least else 'at most'} {bound:.2f}",
                f"{measured:.2f}",
                "[green]yes" if target.reached(measured) else "[red]no",
                "\n".join(f"{n} {value:.2f}" for n, value in others.items() if value is not None),
            )
    if table.row_count:
        console.print(table)


if __name__ == "__main__":
    main()
