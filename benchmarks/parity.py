"""Parity: extra bytes, and extra seconds of a save, with and without by turns.

    python benchmarks/parity.py [folder] [--gib 2] [--rounds 5]

Prints medians over the rounds, for durable saves and for saves without fsync. "9/8" is a save
without parity of an eighth more arrays: what only the bytes of (8, 1) cost. Before each save,
memory is filled and freed, since a virtual machine may have to get it from its host, which takes
as long as a save.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

import unickpt

OPTIONS = {"without": None, "9/8": None, "(8, 1)": (8, 1), "(16, 2)": (16, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", nargs="?", default=tempfile.gettempdir())
    parser.add_argument("--gib", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    size = int(arguments.gib * 2**30) // 64 // 4
    layers = {f"layer_{n}": rng.standard_normal(size, np.float32) for n in range(72)}
    cpus = os.cpu_count()
    print(f"unickpt {unickpt.__version__}, NumPy {np.__version__}, Python", end=" ")
    print(f"{platform.python_version()}, {cpus} CPUs, {arguments.gib} GiB in {arguments.folder}")
    top = Path(tempfile.mkdtemp(dir=arguments.folder, prefix="unickpt-parity-"))
    try:
        for fsync in (True, False):
            measure(top, layers, arguments.rounds, fsync=fsync)
    finally:
        shutil.rmtree(top)


def measure(top: Path, layers: dict[str, np.ndarray], rounds: int, *, fsync: bool) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in OPTIONS}
    nbytes = dict.fromkeys(OPTIONS, 0)
    for number in range(rounds + 1):
        for name, parity in OPTIONS.items():
            path = top / "step"
            state = dict(list(layers.items())[: 72 if name == "9/8" else 64])
            np.ones(int(3 * sum(array.nbytes for array in layers.values())), np.uint8)
            started = time.perf_counter()
            options = unickpt.SaveOptions(parity=parity, fsync=fsync)
            unickpt.save(path, state, options=options)
            if number:  # the first of each is to warm up
                seconds[name].append(time.perf_counter() - started)
            files = [file for file in path.rglob("*") if file.is_file()]
            nbytes[name] = sum(file.stat().st_size for file in files)
            shutil.rmtree(path)
            os.sync()
    print("durable" if fsync else "without fsync")
    plain = statistics.median(seconds["without"])
    for name, taken in seconds.items():
        median = statistics.median(taken)
        extra = nbytes[name] / nbytes["without"] - 1
        span = f"{min(taken):.2f} to {max(taken):.2f}"
        print(
            f"  {name:<8} {median:6.2f} s ({span})  {median / plain - 1:+7.1%}  bytes {extra:+.2%}"
        )


if __name__ == "__main__":
    main()
