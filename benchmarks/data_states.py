"""States of data loaders with token buffers: how long the save's call takes, what a load reads.

    .venv/bin/python benchmarks/data_states.py                     # 16 MiB each rank, 9 rounds
    .venv/bin/python benchmarks/data_states.py --mib 64 --rounds 5 --ranks 8 12
    .venv/bin/python benchmarks/data_states.py --only encode

encode: to make the bytes of a dict of many small NumPy arrays, part of the call below; the CPU time
of the thread, too, which says on a busy machine what an idle one takes.
call: for how long `save_async` keeps its caller, of one rank's state of tokens: as one NumPy array,
as one for each sample, and as lists of ints. In turns, in an order shuffled anew in each round: as
arrays are stored now; as before (base64 in JSON); collected by `prefetch` while the step computed;
and pickled to memory by `torch.save`, as DCP takes an object that is no tensor.
read: what all ranks of another number read and how long they take, one after the other, in a
process: with `Buffer`, and as before, when each read the values of all. Bytes are those of the
system's read calls (`rchar`), without those of a load of a checkpoint without states; files are in
the page cache.

Round 0 warms up and is not counted. Medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import io
import os
import random
import statistics
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from peers import add_run_arguments, fresh_directory, keep_memory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

import unickpt
from unickpt import LoadOptions, PerProcess, ProcessGroup, SaveOptions
from unickpt.data import Buffer, Ranks
from unickpt.frameworks import per_process
from unickpt.frameworks.leaves import adapters
from unickpt.threads import collection_paused

TOKENS = 4096  # of a sample


def samples(nbytes: int, seed: int) -> list[np.ndarray[Any, Any]]:
    """Of a buffer of so many bytes."""
    rng = np.random.default_rng(seed)
    return list(rng.integers(0, 128_000, (nbytes // (4 * TOKENS), TOKENS), np.int32))


class Before:
    """While it is entered, values per process are stored as before there were binary ones."""

    def __enter__(self) -> None:
        self._least, per_process._BINARY_LEAST = per_process._BINARY_LEAST, 1 << 62

    def __exit__(self, *_: object) -> None:
        per_process._BINARY_LEAST = self._least


def call_s(path: Path, leaf: Callable[[], Any]) -> float:
    """For how long the call that saves keeps its caller, `leaf` included."""
    start = perf_counter()
    pending = unickpt.save_async(path, {"data": leaf()})
    took = perf_counter() - start
    pending.result()
    return took


def before_s(path: Path, state: Any) -> float:
    with Before():
        return call_s(path, lambda: PerProcess(state))


def ahead_s(path: Path, state: Sequence[Any]) -> float:
    buffer = Buffer(state, Ranks())
    buffer.prefetch(1)
    buffer._ahead.wait()  # type: ignore[union-attr]  # the step computes for longer
    return call_s(path, lambda: buffer)


def pickled_s(path: Path, state: Any) -> float:
    start = perf_counter()
    torch.save(state, io.BytesIO())
    return perf_counter() - start


WAYS: dict[str, Callable[[Path, Any], float]] = {
    "PerProcess, before (base64)": before_s,
    "PerProcess": lambda path, state: call_s(path, lambda: PerProcess(state)),
    "Buffer": lambda path, state: call_s(path, lambda: Buffer(state, Ranks())),
    "Buffer, prefetch": ahead_s,
    "torch.save to memory": pickled_s,
}


MANY = ((1_000, 64 << 10), (10_000, 4 << 10), (20_000, 512))
"""How many arrays of how many bytes `encode` takes."""


def encodes(console: Console, rounds: int) -> None:
    table = Table(title="encode: a dict of many NumPy arrays", title_justify="left")
    for column in ("", "ms", "ms of CPU", "GB/s", "GB/s of CPU", "us of CPU an array"):
        table.add_column(column, justify="right" if column else "left")
    for count, nbytes in MANY:
        state = {str(n): np.full(nbytes // 4, n, np.int32) for n in range(count)}
        walls, busy = list[float](), list[float]()
        for number in range(rounds + 1):
            start, cpu = perf_counter(), thread_time()
            with collection_paused():  # as a save does
                per_process.encode(state, adapters())
            took = perf_counter() - start, thread_time() - cpu
            walls += [took[0]] * bool(number)
            busy += [took[1]] * bool(number)
        wall, cpu = statistics.median(walls), statistics.median(busy)
        speeds = (f"{count * nbytes / each / 1e9:.2f}" for each in (wall, cpu))
        title = f"{count:,} of {nbytes} bytes"
        shown = f"{wall * 1e3:.1f} ({min(walls) * 1e3:.1f} to {max(walls) * 1e3:.1f})"
        table.add_row(title, shown, f"{cpu * 1e3:.1f}", *speeds, f"{cpu / count * 1e6:.1f}")
    console.print(table)


def calls(console: Console, folder: Path, mib: int, rounds: int) -> None:
    arrays = samples(mib << 20, 1)
    kinds: dict[str, tuple[Any, int]] = {
        f"one NumPy array, {mib} MiB": ([np.concatenate(arrays)], mib << 20),
        f"NumPy arrays of {4 * TOKENS >> 10} KiB, {mib} MiB": (arrays, mib << 20),
        f"lists of ints, {mib // 8} MiB as int32": (
            [each.tolist() for each in arrays[: len(arrays) // 8]],
            mib << 17,
        ),
    }
    for title, (state, nbytes) in kinds.items():
        found: dict[str, list[float]] = {name: [] for name in WAYS}
        for number in range(rounds + 1):
            for name in random.sample(sorted(WAYS), len(WAYS)):
                os.sync()
                took = WAYS[name](folder / f"{number}-{name[:12]}-{random.random()}", state)
                found[name] += [took] if number else []
        table = Table(title=f"call: {title}", title_justify="left")
        for column in ("", "ms", "GB/s"):
            table.add_column(column, justify="right" if column else "left")
        for name, times in found.items():
            middle = statistics.median(times)
            shown = f"{middle * 1e3:.1f} ({min(times) * 1e3:.1f} to {max(times) * 1e3:.1f})"
            table.add_row(name, shown, f"{nbytes / middle / 1e9:.2f}")
        console.print(table)


def read_bytes() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def loads(path: Path, count: int, like: Callable[[Ranks], Any]) -> tuple[int, float]:
    """The bytes that all ranks of a job read, one after the other, and the mean time of a rank."""
    before, start = read_bytes(), perf_counter()
    for rank in range(count):
        options = LoadOptions(group=ProcessGroup(rank, count, session="read"))
        unickpt.load(path, {"data": like(Ranks(rank, count))}, options=options)
    return read_bytes() - before, (perf_counter() - start) / count


def reads(console: Console, folder: Path, mib: int, ranks: Sequence[int], rounds: int) -> None:
    saved, loaded = ranks
    each = mib
    buffers = [Buffer(samples(each << 20, r), Ranks(r, saved)) for r in range(saved)]
    save_all(folder / "now", buffers)
    with Before():
        save_all(folder / "before", [PerProcess(list(buffer)) for buffer in buffers])
    save_all(folder / "none", [1] * saved)

    def deal(values: Sequence[Any], index: int, count: int) -> Any:
        return [sample for value in values for sample in value][index::count]

    ways: dict[str, Callable[[], tuple[int, float]]] = {
        "before": lambda: loads(folder / "before", loaded, lambda r: PerProcess(redistribute=deal)),
        "Buffer": lambda: loads(folder / "now", loaded, lambda r: Buffer(ranks=r)),
    }
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.sample(sorted(ways), len(ways)):
            result = ways[name]()
            found[name] += [result] if number else []
    rest, _ = loads(folder / "none", loaded, lambda r: 1)
    table = Table(
        title=f"read: {saved} ranks with {each} MiB each saved, {loaded} load", title_justify="left"
    )
    for column in ("", "read in sum / stored", "ms a rank"):
        table.add_column(column, justify="right" if column else "left")
    for name, path in ("before", "before"), ("Buffer", "now"):
        index = unickpt.open(folder / path).index
        stored = sum(size for size, _ in index.per_process["data"].blobs)
        nbytes = statistics.median(n for n, _ in found[name]) - rest
        times = [s for _, s in found[name]]
        shown = f"{statistics.median(times) * 1e3:.0f} ({min(times) * 1e3:.0f} to "
        shown += f"{max(times) * 1e3:.0f})"
        table.add_row(name, f"{nbytes / stored:.3f}", shown)
    console.print(table)


def save_all(path: Path, states: Sequence[Any]) -> None:
    """All ranks save, each in a thread."""

    def save(index: int) -> None:
        group = ProcessGroup(index, len(states), session=f"save-{path.name}")
        unickpt.save(path, {"data": states[index]}, options=SaveOptions(group=group, fsync=False))

    with ThreadPoolExecutor(len(states)) as pool:
        list(pool.map(save, range(len(states))))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mib", type=int, default=16, help="of one rank's tokens (default: 16)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ranks", type=int, nargs=2, default=(8, 6), metavar=("SAVED", "LOADED"))
    parser.add_argument("--only", choices=("encode", "call", "read"))
    add_run_arguments(parser)
    asked = parser.parse_args()
    console = Console()
    keep_memory()
    with fresh_directory(asked.dir) as folder:
        packages = {name: version(name) for name in ("unickpt", "numpy", "tensorstore", "torch")}
        print_facts(console, machine_facts(folder) | packages)
        if asked.only in (None, "encode"):
            encodes(console, asked.rounds)
        if asked.only in (None, "call"):
            calls(console, folder, asked.mib, asked.rounds)
        if asked.only in (None, "read"):
            reads(console, folder, asked.mib, asked.ranks, asked.rounds)


if __name__ == "__main__":
    main()
