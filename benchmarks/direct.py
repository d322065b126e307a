"""What O_DIRECT does for durable saves: 1 GiB written and flushed, in turns.

Not faster on this disk, so only saves in the background use it: it needs less processor time.

    python benchmarks/direct.py                     # 1 GiB, 7 rounds
    python benchmarks/direct.py --mib 4096 --dir /some/disk

Two threads write a file each, in pieces; each is flushed with fdatasync.
buffered: pwrite of the state's own memory, through the page cache.
direct: O_DIRECT from the state's own memory, which is aligned here, as copies of a state are.
direct, copied: two aligned buffers for each thread; one is filled while the other is written.
"""

from __future__ import annotations

import argparse
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
from peers import add_run_arguments, fresh_directory, machine_facts, print_facts
from rich.console import Console

PIECE = 8 << 20
Memory = memoryview
Write = Callable[[int, Memory], None]


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=7)
    add_run_arguments(parser)
    arguments = parser.parse_args()
    nbytes = arguments.mib << 19  # of each thread
    state = [memoryview(mmap.mmap(-1, nbytes)) for _ in range(2)]
    for memory in state:
        memory[:] = np.random.default_rng(0).bytes(nbytes)
    ways: dict[str, tuple[int, Write]] = {
        "buffered": (0, in_pieces),
        "direct": (os.O_DIRECT, in_pieces),
        "direct, copied": (os.O_DIRECT, through_buffers),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    cpu: dict[str, list[float]] = {name: [] for name in ways}
    with fresh_directory(arguments.dir) as directory, ThreadPoolExecutor(2) as pool:
        print_facts(Console(width=120), machine_facts(directory))
        for number in range(arguments.rounds + 1):
            for name in random.sample(list(ways), len(ways)):
                flags, write = ways[name]
                os.sync()
                started, before = time.perf_counter(), time.process_time()
                work = [
                    pool.submit(write_file, directory / str(n), flags, write, memory)
                    for n, memory in enumerate(state)
                ]
                for done in work:
                    done.result()
                if number:  # the first one warms up
                    took[name].append(time.perf_counter() - started)
                    cpu[name].append(time.process_time() - before)
                for n in range(2):
                    (directory / str(n)).unlink()
    for name, found in took.items():
        ratio = statistics.median(a / b for a, b in zip(took["buffered"], found, strict=True))
        print(
            f"{name:15} {statistics.median(found):.3f} s ({min(found):.3f} to {max(found):.3f}), "
            f"{ratio:.2f} times as fast as buffered; {statistics.median(cpu[name]):.3f} s of CPU"
        )


def write_file(path: Path, flags: int, write: Write, memory: Memory) -> None:
    """Writes a file, and flushes it."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        write(handle, memory)
        os.fdatasync(handle)
    finally:
        os.close(handle)


def in_pieces(handle: int, memory: Memory) -> None:
    """Writes memory as it is."""
    for at in range(0, len(memory), PIECE):
        put(handle, memory[at : at + PIECE], at)


def through_buffers(handle: int, memory: Memory) -> None:
    """Writes copies of memory, one while the next is made."""
    buffers = [memoryview(mmap.mmap(-1, PIECE)) for _ in range(2)]
    written: list[Future[None]] = []
    with ThreadPoolExecutor(1) as writer:
        for number, at in enumerate(range(0, len(memory), PIECE)):
            if number >= 2:
                written[number - 2].result()
            piece = memory[at : at + PIECE]
            copy = np.frombuffer(buffers[number % 2], np.uint8)[: len(piece)]
            np.copyto(copy, np.frombuffer(piece, np.uint8))  # without the interpreter's lock
            written.append(writer.submit(put, handle, memoryview(copy), at))
        for done in written:
            done.result()


def put(handle: int, piece: Memory, at: int) -> None:
    """Writes all of a piece."""
    while piece:
        count = os.pwrite(handle, piece, at)
        piece, at = piece[count:], at + count


if __name__ == "__main__":
    main()
