"""Where the time of a load goes, from the page cache: bare loops that do more and more of it.

    python benchmarks/limits.py                     # 64 arrays of 16 MiB, 11 rounds
    python benchmarks/limits.py --rounds 21 --dir /some/disk

All fill the same NumPy arrays, in turns; bare loops have two threads, and a task for each array.
each piece: reads pieces of 512 KiB from one file, and hashes each for itself, as `pieces` of
peers.py.
each chunk: one xxh3 for the pieces of a chunk, as a checkpoint's digests need.
its files: the same from the files of the checkpoint, of which the places are known.
its files, 4 threads: as many threads as `load` has on two CPUs.
load: `unickpt.load`; open: of that, `unickpt.open` alone.
Of each with and without hashing; and `load` of what is not in the page cache.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from peers import (
    SETS,
    add_run_arguments,
    fresh_directory,
    keep_memory,
    machine_facts,
    print_facts,
    wait_for_quiet,
)
from rich.console import Console

import unickpt
from unickpt.format import chunk_grid
from unickpt.reading import chunk_reader

PIECE = 512 << 10


class Stored(NamedTuple):
    """Bytes in a file, and the memory that they belong to."""

    file: Path
    offset: int
    memory: memoryview


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--count", type=int, default=SETS[0].count, help="arrays (default: 64)")
    add_run_arguments(parser)
    arguments = parser.parse_args()
    keep_memory()
    with fresh_directory(arguments.dir) as directory:
        print_facts(Console(width=120), machine_facts(directory))
        run(directory, arguments.count, arguments.rounds, arguments.patience)


def run(directory: Path, count: int, rounds: int, patience: float) -> None:
    """Save a state, time all ways to load it, and print them."""
    made = SETS[0].arrays()
    state = {name: made[name] for name in list(made)[:count]}
    into = {name: np.zeros_like(array) for name, array in state.items()}
    path, flat = directory / "checkpoint", directory / "flat"
    unickpt.save(path, state)
    with flat.open("wb") as file:
        for array in state.values():
            file.write(array.data)
    own_files = list(in_its_files(path, into))
    one_file = list(in_one_file(flat, own_files))

    def load(verify: bool) -> None:
        unickpt.load(path, into, options=unickpt.LoadOptions(verify=verify))

    ways: dict[str, Callable[[], object]] = {}
    for name, hashed in (("", True), (", not hashed", False)):
        if hashed:
            ways["each piece"] = partial(bare, one_file, 2, each_piece=True)
        ways[f"each chunk{name}"] = partial(bare, one_file, 2, hashed=hashed)
        ways[f"its files{name}"] = partial(bare, own_files, 2, hashed=hashed)
        ways[f"its files, 4 threads{name}"] = partial(bare, own_files, 4, hashed=hashed)
        ways[f"load{name}"] = partial(load, hashed)
    ways["open"] = partial(unickpt.open, path)
    took = timed(ways, rounds, patience)
    for array, to in zip(state.values(), into.values(), strict=True):
        assert array.tobytes() == to.tobytes()
    threads = chunk_reader._local_threads
    for number in (2, 4, 8):
        chunk_reader._local_threads = lambda number=number: number
        cold = {f"load, cold, {number} threads": partial(load, True)}
        took |= timed(cold, max(3, rounds // 2), patience, before=partial(forget, directory))
    chunk_reader._local_threads = threads
    for name, found in took.items():
        middle, least, most = statistics.median(found), min(found), max(found)
        print(f"{name:34} {middle:.4f} s ({least:.4f} to {most:.4f})")


def timed(
    ways: dict[str, Callable[[], object]],
    rounds: int,
    patience: float,
    before: Callable[[], None] = lambda: None,
) -> dict[str, list[float]]:
    """The seconds of each way, in turns; the first round warms up."""
    took: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in random.sample(list(ways), len(ways)):
            before()
            wait_for_quiet(patience)
            started = time.perf_counter()
            ways[name]()
            if number:
                took[name].append(time.perf_counter() - started)
    return took


def in_one_file(file: Path, arrays: Sequence[Sequence[Stored]]) -> Iterator[list[Stored]]:
    """The same chunks, one behind the other."""
    at = 0
    for chunks in arrays:
        moved = []
        for _, _, memory in chunks:
            moved.append(Stored(file, at, memory))
            at += len(memory)
        yield moved


def in_its_files(path: Path, into: dict[str, Any]) -> Iterator[list[Stored]]:
    """Where a checkpoint has the chunks of the arrays."""
    reader = unickpt.open(path).reader
    for name, array in into.items():
        entry, memory = reader.index.arrays[name], memoryview(array).cast("B")
        (part,) = chunk_grid.parts(entry)
        step = len(memory) // part.count
        places = [reader.chunk_values.where(entry, part, number) for number in range(part.count)]
        yield [
            Stored(path / place.path, place.offset, memory[n * step : (n + 1) * step])
            for n, place in enumerate(places)
        ]


def bare(
    arrays: Sequence[Sequence[Stored]],
    threads: int,
    hashed: bool = True,
    each_piece: bool = False,
) -> None:
    """Read arrays, and hash them."""
    opened: dict[Path, int] = {}
    for chunks in arrays:
        for chunk in chunks:
            if chunk.file not in opened:
                opened[chunk.file] = os.open(chunk.file, os.O_RDONLY)

    def read(chunks: Sequence[Stored]) -> None:
        most = PIECE if hashed else 1 << 30
        for file, offset, memory in chunks:
            handle, look = opened[file], xxhash.xxh3_64().update
            for at in range(0, len(memory), most):
                piece = memory[at : at + most]
                if os.preadv(handle, [piece], offset + at) != len(piece):
                    raise OSError(f"short transfer from {file}")
                if each_piece:
                    xxhash.xxh3_64_intdigest(piece)
                elif hashed:
                    look(piece)

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, arrays))
    finally:
        for handle in opened.values():
            os.close(handle)


def forget(directory: Path) -> None:
    """Has the system drop the files from the page cache."""
    os.sync()
    for folder, _, names in os.walk(directory):
        for name in names:
            handle = os.open(os.path.join(folder, name), os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


if __name__ == "__main__":
    main()
