"""How long asynchronous saving stops a program: unickpt, beside DCP and Orbax, in turns.

    python benchmarks/stall.py                              # everything: 1 GiB, 5 rounds
    python benchmarks/stall.py --part blocking --rounds 9 --dir /some/disk --json results.json
    python benchmarks/stall.py --part loop --every 10 --contenders "unickpt torch lazy" dcp
    python benchmarks/stall.py --part memory --saves 1000

blocking: how long the call keeps its caller, how long until the state may change, and until the
checkpoint is committed; in the same rounds, a copy of the state into memory touched before.
loop: how much longer a training loop takes that saves every so many steps.
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
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar

import contenders
import numpy as np
from contenders import Arrays, Contender
from memory import memory
from peers import (
    ArraySet,
    Conditions,
    Sample,
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

BLOCKED, STAGED, COMMITTED, LOOP, LOST = "blocked", "staged", "committed", "loop", "lost by a save"
NO_SAVING = "no saving"
DCP, COPYTO, COPY = "dcp", "numpy copyto", "torch copy_"
ARRAY_BYTES = 16 << 20
DEPTH = 16
"""Layers of the model that is trained; their width follows from the size of the state."""
EACH = 10
"""Saves from one look at the memory to the next."""

# --- contenders of `blocking` ---------------------------------------------------------------------


class Staller(Contender):
    """What may stop a program: a save in the background, one at a time."""

    copies: ClassVar[bool] = True
    """Whether the whole state is copied until it may change."""
    note: ClassVar[str] = ""

    def save(self, path: Path, state: Any, durable: bool) -> None:
        self.begin(path, state)
        self.wait_committed()

    @abstractmethod
    def begin(self, path: Path, state: Any) -> None:
        """The call that is timed."""

    def wait_staged(self) -> None:
        """Waits until the state may change; by default, it may when the call returns."""

    @abstractmethod
    def wait_committed(self) -> None:
        """Waits for the end of the save, if there is one."""

    def close(self) -> None:
        """Ends what is under way."""
        with suppress(Exception):
            self.wait_committed()


class Unickpt(Staller):
    """unickpt.save_async, with a budget that holds two states."""

    staging: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.pending: Any = None

    def begin(self, path: Path, state: Any) -> None:
        import unickpt

        options = save_options(sum(leaf.nbytes for leaf in state.values()), self.staging)
        self.pending = unickpt.save_async(path, state, options=options)

    def wait_staged(self) -> None:
        self.pending.wait_staged()

    def wait_committed(self) -> None:
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()


def save_options(nbytes: int, staging: str) -> Any:
    """unickpt's options: two states fit, so that nothing waits for memory."""
    import unickpt

    return unickpt.SaveOptions(staging=staging, budget_bytes=2 * nbytes + (64 << 20))


class UnickptTorchCopy(Unickpt, contenders.UnickptTorch):
    name = "unickpt torch copy"
    staging = "copy"
    note = "fsyncs files and directories"


class UnickptTorchLazy(Unickpt, contenders.UnickptTorch):
    name = "unickpt torch lazy"
    staging = "lazy"
    note = "fsyncs files and directories"


class UnickptJaxReference(Unickpt, contenders.UnickptJax):
    name = "unickpt jax reference"
    staging = "auto"
    copies = False
    note = 'fsyncs files and directories; staging="auto", by reference on the CPU'


class UnickptJaxCopy(Unickpt, contenders.UnickptJax):
    name = "unickpt jax copy"
    staging = "copy"
    note = "fsyncs files and directories"


class DcpAsync(Staller, contenders.Dcp):
    """dcp.async_save as it comes: each save allocates its copy, and writes with one thread."""

    name = DCP
    note = "fsyncs files, no directories; as it comes"
    staging: ClassVar[bool | None] = None
    """Whether a stager that is kept copies in the background; None: no stager is kept."""

    def __init__(self) -> None:
        super().__init__()
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.stager: Any = None
        if self.staging is not None:
            # Without an accelerator there is no pinned memory, and no copy that does not block.
            self.stager = DefaultStager(StagingOptions(False, False, self.staging, False))
        self.staged: Future[None] | None = None
        self.committed: Future[Any] | None = None

    def begin(self, path: Path, state: Any) -> None:
        response = self.dcp.async_save(
            state, storage_writer=self._writer(path, durable=True), async_stager=self.stager
        )
        self.staged = getattr(response, "staging_completion", None)
        self.committed = getattr(response, "upload_completion", response)

    def wait_staged(self) -> None:
        if self.staged is not None:
            self.staged.result()
            self.staged = None

    def wait_committed(self) -> None:
        if self.committed is not None:
            self.committed.result()
            self.committed = None

    def close(self) -> None:
        super().close()
        if self.stager is not None:
            self.stager.close()


class DcpKeptStaging(DcpAsync):
    """DCP at its best without an accelerator: memory is used again, two threads write."""

    name = "dcp kept staging"
    note = "fsyncs files, no directories; DefaultStager kept, 2 writing threads"
    threads = 2
    staging = False


class DcpAsyncStaging(DcpAsync):
    """The same, copied in the background."""

    name = "dcp async staging"
    note = "fsyncs files, no directories; DefaultStager kept, asynchronous, 2 writing threads"
    threads = 2
    staging = True


class OrbaxAsync(Staller, contenders.Orbax):
    """Orbax's StandardCheckpointer, which is asynchronous."""

    name = "orbax"
    copies = False  # on the CPU
    note = (
        "TensorStore fsyncs data files and directories, nobody Orbax's own files and the rename; "
        "by reference on the CPU"
    )

    def begin(self, path: Path, state: Any) -> None:
        self.checkpointer.save(path, state)

    def wait_committed(self) -> None:
        self.checkpointer.wait_until_finished()

    def close(self) -> None:
        super().close()
        self.checkpointer.close()


class Memcpy(Staller):
    """A copy into memory touched before: what staging is held against."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Any] = {}

    def load(self, path: Path, target: Any, verify: bool) -> Mapping[str, Any]:
        return self.kept

    def wait_committed(self) -> None:
        pass


class NumpyCopyto(Memcpy):
    name = COPYTO
    note = "one thread"

    def begin(self, path: Path, state: Any) -> None:
        for name, array in state.items():
            np.copyto(self.kept.setdefault(name, np.empty_like(array)), array)


class TorchCopy(Memcpy, contenders.Torch):
    name = COPY
    note = "torch's own number of threads"

    def begin(self, path: Path, state: Any) -> None:
        for name, tensor in state.items():
            if name not in self.kept:
                self.kept[name] = self.torch.empty_like(tensor)
            self.kept[name].copy_(tensor)


BLOCKING: Mapping[str, type[Staller]] = {
    kind.name: kind
    for kind in (
        UnickptTorchCopy,
        UnickptTorchLazy,
        DcpAsync,
        DcpKeptStaging,
        DcpAsyncStaging,
        UnickptJaxReference,
        UnickptJaxCopy,
        OrbaxAsync,
        NumpyCopyto,
        TorchCopy,
    )
}

# --- contenders of `loop` -------------------------------------------------------------------------


class Training(ABC):
    """A model and its optimizer, whose state together has about a size that was asked for."""

    nbytes: int
    """What it is."""

    @abstractmethod
    def step(self, before_update: Callable[[], None]) -> None:
        """Forward, backward, update."""


def width(nbytes: int) -> int:
    """Of a layer: a weight and two moments of it are three arrays of float32."""
    return max(64, round((nbytes / (3 * 4 * DEPTH)) ** 0.5 / 64) * 64)


class TorchTraining(Training):
    """Residual linear layers with AdamW."""

    def __init__(self, nbytes: int, batch: int) -> None:
        import torch

        torch.manual_seed(0)
        n = width(nbytes)
        self.model = torch.nn.ModuleList(torch.nn.Linear(n, n, bias=False) for _ in range(DEPTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.x, self.y = torch.randn(batch, n), torch.randn(batch, n)
        self.step(lambda: None)  # the optimizer makes its state
        slots = [v for state in self.optimizer.state.values() for v in state.values()]
        self.nbytes = sum(t.nbytes for t in [*self.model.parameters(), *slots])

    def step(self, before_update: Callable[[], None]) -> None:
        x = self.x
        for layer in self.model:
            x = x + layer(x).relu()
        self.optimizer.zero_grad()
        ((x - self.y) ** 2).mean().backward()
        before_update()
        self.optimizer.step()


class JaxTraining(Training):
    """The same in JAX with optax; the state is donated."""

    def __init__(self, nbytes: int, batch: int) -> None:
        import jax
        import optax

        n, rng = width(nbytes), np.random.default_rng(0)
        optimizer = optax.adamw(1e-4)

        def normal(*shape: int, scale: float = 1) -> Any:
            return jax.numpy.array(rng.standard_normal(shape, np.float32) * np.float32(scale))

        def loss(params: Any, x: Any, y: Any) -> Any:
            for weight in params.values():
                x = x + jax.nn.relu(x @ weight)
            return ((x - y) ** 2).mean()

        def train(state: Any, x: Any, y: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], x, y)
            updates, opt = optimizer.update(gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, value

        params = {f"layer_{i:02d}": normal(n, n, scale=(3 * n) ** -0.5) for i in range(DEPTH)}
        self.state = {"params": params, "opt": optimizer.init(params)}
        self.x, self.y = normal(batch, n), normal(batch, n)
        self.train = jax.jit(train, donate_argnums=0)
        self.nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state))

    def step(self, before_update: Callable[[], None]) -> None:
        before_update()
        self.state, loss = self.train(self.state, self.x, self.y)
        loss.block_until_ready()  # as a loop that logs it


class LoopSaver:
    """How a training loop saves; this one does not."""

    def save(self, step: int) -> None:
        """Begins to save the state of this step."""

    def before_update(self) -> None:
        """Called before the state changes."""

    def wait(self) -> None:
        """Waits until all saves are committed."""

    def tidy(self) -> None:
        """After a turn, outside of the timing."""

    def close(self) -> None:
        """Ends what is under way."""


class UnickptLoop(LoopSaver):
    """A Checkpointer that keeps one step."""

    def __init__(
        self, root: Path, training: Any, tree: Callable[[], Any], staging: str, guarded: bool
    ) -> None:
        import unickpt

        self.tree = tree
        self.checkpointer = unickpt.Checkpointer(
            root,
            keep_last=1,
            optimizers=[training.optimizer] if guarded else [],
            options=save_options(training.nbytes, staging),
        )

    def save(self, step: int) -> None:
        self.checkpointer.save(step, self.tree())

    def wait(self) -> None:
        self.checkpointer.wait()

    def close(self) -> None:
        self.checkpointer.close()


class DcpLoop(LoopSaver):
    """async_save after the save before has ended; nothing is removed before the loop's end."""

    def __init__(self, root: Path, training: Any, tree: Callable[[], Any], saver: DcpAsync) -> None:
        self.root, self.tree, self.saver = root, tree, saver
        self.before_update, self.wait = saver.wait_staged, saver.wait_committed
        self.close = saver.close

    def save(self, step: int) -> None:
        self.saver.wait_committed()
        self.saver.begin(self.root / f"step_{step}", self.tree())

    def tidy(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)


class OrbaxLoop(LoopSaver):
    """A CheckpointManager that keeps one step; it saves asynchronously by default."""

    def __init__(self, root: Path, training: Any, tree: Callable[[], Any]) -> None:
        import orbax.checkpoint as ocp

        self.tree, self.pack = tree, ocp.args.StandardSave
        options = ocp.CheckpointManagerOptions(max_to_keep=1)
        self.manager = ocp.CheckpointManager(root, options=options)
        self.wait, self.close = self.manager.wait_until_finished, self.manager.close

    def save(self, step: int) -> None:
        self.manager.save(step, args=self.pack(self.tree()))


def torch_savers(names: Iterable[str], training: Any, root: Path) -> dict[str, LoopSaver]:
    """The contenders of the loop in torch."""
    model, optimizer = training.model, training.optimizer

    def objects() -> Any:
        return {"model": model, "optim": optimizer}

    def states() -> Any:
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    made: dict[str, Callable[[Path], LoopSaver]] = {
        UnickptTorchCopy.name: lambda at: UnickptLoop(at, training, objects, "copy", False),
        UnickptTorchLazy.name: lambda at: UnickptLoop(at, training, objects, "auto", True),
        DcpAsync.name: lambda at: DcpLoop(at, training, states, DcpAsync()),
        DcpKeptStaging.name: lambda at: DcpLoop(at, training, states, DcpKeptStaging()),
        DcpAsyncStaging.name: lambda at: DcpLoop(at, training, states, DcpAsyncStaging()),
    }
    return {name: make(root / name) for name, make in made.items() if name in names}


def jax_savers(names: Iterable[str], training: Any, root: Path) -> dict[str, LoopSaver]:
    """The contenders of the loop in JAX."""

    def state() -> Any:
        return training.state

    made: dict[str, Callable[[Path], LoopSaver]] = {
        UnickptJaxReference.name: lambda at: UnickptLoop(at, training, state, "auto", False),
        UnickptJaxCopy.name: lambda at: UnickptLoop(at, training, state, "copy", False),
        OrbaxAsync.name: lambda at: OrbaxLoop(at, training, state),
    }
    return {name: make(root / name) for name, make in made.items() if name in names}


# --- the three parts ------------------------------------------------------------------------------


def main() -> None:
    """Run what the command line asks for."""
    options = parse_arguments()
    # XLA asks for the number of threads once, when it starts.
    os.environ["NPROC"] = str(options.threads)
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
    parser.add_argument("--contenders", nargs="+", choices=tuple(BLOCKING), metavar="NAME")
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
    return options


def make_stallers(names: Sequence[str] | None, console: Console) -> list[Staller]:
    """The contenders asked for, or all of those that are installed."""
    made = []
    for name, kind in BLOCKING.items():
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
    training = make(options.mib << 20, options.batch)
    with ExitStack() as stack:
        savers = {NO_SAVING: LoopSaver()} | savers_of(names, training, directory)
        for saver in savers.values():
            stack.callback(saver.close)
        order, shuffle = list(savers), random.Random(0).shuffle
        for number in range(options.rounds + 1):
            shuffle(order)
            for name in order:
                progress(f"{part}, {number}/{options.rounds}: {name}")
                work = partial(train, training, savers[name], step, options)
                _, seconds = timed(work, conditions(options))
                step += options.steps
                savers[name].tidy()
                samples += [
                    Sample(part, name, number, operation, value)
                    for operation, value in seconds.items()
                    if number > 0
                ]
    print_loop(console, part, list(savers), samples, options, training.nbytes)
    return samples


def train(
    training: Training, saver: LoopSaver, done: int, options: argparse.Namespace
) -> dict[str, float]:
    """So many steps, with saves between them, timed; `done` steps were done before."""
    blocked, start = 0.0, perf_counter()
    ends = [start]
    for step in range(1, options.steps + 1):
        training.step(saver.before_update)
        ends.append(perf_counter())
        if step % options.every == 0 and step < options.steps:
            called = perf_counter()
            saver.save(done + step)
            blocked += perf_counter() - called
    looped = perf_counter() - start
    saver.wait()
    lost = lost_by_save(np.diff(ends), options.every)
    return {LOOP: looped, COMMITTED: perf_counter() - start, BLOCKED: blocked, LOST: lost}


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
        "Median seconds, least to most; ratios within rounds"
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
            percent(ratios(samples, part, (name, operation), (NO_SAVING, LOOP)))
            for operation in (LOOP, COMMITTED)
        ]
        called, lost = (spread(by_round(samples, part, name, o).values()) for o in (BLOCKED, LOST))
        if name == NO_SAVING:
            table.add_row(name, cells[0], "", "", lost)
        else:
            table.add_row(name, cells[0], slower[0], called, lost, cells[1], slower[1])
    console.print(table)
    console.print(
        "slower by: until the last step is done; longer by: until all is committed.\n"
        "lost by a save: by the steps after it, beside the last ones before the next.\n"
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
