"""How long it takes to observe a converter of many arrays, and to draft rules for two checkpoints.

python benchmarks/observe.py [--arrays 700 20000] [--draft 700]
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers import machine_facts, print_facts
from rich.console import Console

from unickpt import Rules

State = dict[str, Any]
HIDDEN, INNER, EXPERTS = 24, 40, 6


def shapes_of(arrays: int) -> dict[str, tuple[int, ...]]:
    """Arrays of a model with experts, one by one, in as many layers as needed."""
    found: dict[str, tuple[int, ...]] = {}
    layer = 0
    while len(found) < arrays:
        at = f"layers_{layer}."
        for name in ("query", "key", "value", "out"):
            found[f"{at}attention.{name}.kernel"] = (HIDDEN, HIDDEN)
        found[f"{at}norm.scale"] = (HIDDEN,)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                found[f"{at}experts_{expert}.{name}.kernel"] = (HIDDEN, INNER)
        layer += 1
    return found


def convert(state: State) -> State:
    """Another name and order for each array, `+ 1` for the norms."""
    found = {}
    for name, x in state.items():
        parts = name.replace("layers_", "layers.").replace("experts_", "experts.")
        to = f"model.{parts}".replace(".kernel", ".weight").replace(".scale", ".weight")
        found[to] = x.T if x.ndim == 2 else x + 1
    return found


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arrays", type=int, nargs="*", default=[700, 20_000])
    parser.add_argument("--draft", type=int, nargs="*", default=[700])
    arguments = parser.parse_args()
    print_facts(Console(), machine_facts(Path.cwd()))
    for count in arguments.arrays:
        shapes = shapes_of(count)
        size = sum(4 * int(np.prod(shape)) for shape in shapes.values())
        rules = timed(
            f"observe {len(shapes):,} arrays", size, lambda s=shapes: Rules.observe(convert, s)
        )  # type: ignore[misc]
        assert rules.report is not None
        print(f"  {rules.report}")
    for count in arguments.draft:
        random = np.random.default_rng(0)
        left = {n: random.standard_normal(s, np.float32) for n, s in shapes_of(count).items()}
        right = {name: np.ascontiguousarray(x) for name, x in convert(left).items()}
        size = sum(x.nbytes for x in left.values())
        rules = timed(
            f"draft {len(left):,} arrays", size, lambda a=left, b=right: Rules.draft(a, b)
        )  # type: ignore[misc]
        print(f"  {rules.report}")


def timed(what: str, nbytes: int, work: Callable[[], Rules]) -> Rules:
    """Runs it, and prints seconds and memory."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = time.perf_counter()
    found = work()
    seconds = time.perf_counter() - begin
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{what}: {seconds:.1f} s; example {nbytes / 2**20:.0f} MiB, memory + {more:.0f} MiB")
    return found


if __name__ == "__main__":
    main()
