"""How long a training loop waits for a model of Equinox or Flax NNX to be saved.

    python benchmarks/equinox_wait.py                      # 256 MiB in 64 layers
    python benchmarks/equinox_wait.py --mib 64 --layers 200 --rounds 9

One process, files in --dir. In each round all take a turn, in an order shuffled anew, at new paths;
a turn ends with its checkpoint complete and removed. Round 0 warms up and is not counted. unickpt
flushes its files, which takes most of its time until they are complete.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import equinox as eqx
import jax
import orbax.checkpoint as ocp
from flax import nnx

import unickpt
from unickpt.integrations import equinox as checkpoints

Turn = Callable[[Path], Callable[[], object]]


def main() -> None:
    """Prints the seconds of the call, and until the checkpoint is complete; medians."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", type=Path)
    given = parser.parse_args()
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=given.dir) as folder:
        turns = contenders(given)
        for number in range(given.rounds + 1):
            for name in random.Random(number).sample(sorted(turns), len(turns)):
                place = Path(folder, f"{len(times)}_{number}_{name.replace(' ', '_')}")
                began = perf_counter()
                complete = turns[name](place)
                waited = perf_counter() - began
                complete()
                whole = perf_counter() - began
                if number:
                    times.setdefault(name, []).append((waited, whole))
                shutil.rmtree(place, ignore_errors=True)
                place.unlink(missing_ok=True)
    print(f"{given.mib} MiB in {given.layers} layers, {given.rounds} rounds; seconds, medians")
    print(f"{'':44}{'waits':>8}{'complete':>10}")
    for name in turns:
        waited, whole = (statistics.median(column) for column in zip(*times[name], strict=True))
        print(f"{name:44}{waited:8.3f}{whole:10.3f}")


def contenders(given: argparse.Namespace) -> dict[str, Turn]:
    """By name: begins to save at a path, and returns what waits for the end."""
    width = int((given.mib * 2**18 / given.layers) ** 0.5)
    keys = jax.random.split(jax.random.key(0), given.layers)
    # Orbax compresses: numbers that are all alike would cost it nothing.
    weights = [jax.random.normal(key, (width, width)) for key in keys]
    model = [eqx.nn.Linear(width, width, use_bias=False, key=key) for key in keys]
    network = nnx.List([nnx.Param(weight) for weight in weights])
    state = nnx.state(network)
    jax.block_until_ready((weights, eqx.filter(model, eqx.is_array)))
    theirs = ocp.StandardCheckpointer()

    def serialise(path: Path) -> Callable[[], object]:
        eqx.tree_serialise_leaves(path, model)
        return lambda: None

    def orbax(path: Path) -> Callable[[], object]:
        theirs.save(path.absolute(), state)
        return theirs.wait_until_finished

    return {
        "Equinox: eqx.tree_serialise_leaves": serialise,
        "Equinox: unickpt save_async": lambda path: checkpoints.save_async(path, model).result,
        "NNX: Orbax's StandardCheckpointer": orbax,
        "NNX: unickpt.save_async": lambda path: unickpt.save_async(path, state).result,
    }


if __name__ == "__main__":
    main()
