"""How long a Keras fit waits for its callback: OrbaxCheckpoint, ModelCheckpoint, and unickpt's.

    python benchmarks/keras_wait.py                    # JAX, 64 MiB of weights, with Adam 192 MiB
    python benchmarks/keras_wait.py --mib 16 --rounds 7
    KERAS_BACKEND=torch python benchmarks/keras_wait.py

In each round all contenders take a turn, in an order shuffled anew: a fit of the same model, with a
save every few batches. Round 0 warms up and is not counted. The table gives medians. `unickpt` does
not flush to disk here, because ModelCheckpoint does not either; `unickpt, flushed` does, as always.

waits: seconds that the loop spends in the callback, for each save. The time between two saves is
long enough for one to be written. all: the whole fit, until the last checkpoint is committed,
without these pauses, in which whoever saves in the background writes.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")


def main() -> None:
    """Measures, and prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="of weights (default: 64)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=3, help="in each fit")
    parser.add_argument("--pause", type=float, default=1.0, help="seconds between two saves")
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    made = contenders()
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in made}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        model = make_model(options.mib)
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(sorted(made), len(made)):
                place = Path(folder) / f"{number}_{len(times[name])}_{name.split(',')[0]}"
                place.mkdir()
                found = turn(made[name](place), model, options)
                shutil.rmtree(place)
                if number:
                    times[name].append(found)
    import keras

    print(f"{keras.backend.backend()}, {options.mib} MiB of weights, {options.rounds} rounds")
    print(f"{'':20}{'waits':>8}{'all':>8}")
    for name, rows in times.items():
        waits, whole = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:20}{waits:8.3f}{whole:8.2f}")


def contenders() -> dict[str, Callable[[Path], Any]]:
    """Callbacks that save every batch, by the folder they save into."""
    import keras

    from unickpt import SaveOptions
    from unickpt.integrations.keras import UnickptCheckpoint

    return {
        "OrbaxCheckpoint": lambda at: keras.callbacks.OrbaxCheckpoint(
            str(at), save_freq=1, max_to_keep=1
        ),
        "ModelCheckpoint": lambda at: keras.callbacks.ModelCheckpoint(
            str(at / "model.keras"), save_freq=1
        ),
        "unickpt": lambda at: UnickptCheckpoint(at, save_freq=1, options=SaveOptions(fsync=False)),
        "unickpt, flushed": lambda at: UnickptCheckpoint(at, save_freq=1),
    }


def make_model(mib: int) -> Any:
    """Layers of 4 MiB."""
    import keras

    layers = [keras.layers.Dense(1024, use_bias=False) for _ in range(mib // 4)]
    model = keras.Sequential([keras.Input((1024,)), *layers])
    model.compile("adam", "mse")
    return model


def turn(callback: Any, model: Any, options: argparse.Namespace) -> tuple[float, float]:
    """One fit; how long the callback took for a save, and the fit without the pauses."""
    import numpy as np

    spent: list[float] = []
    inner = callback.on_train_batch_end

    def timed(batch: int, logs: Any = None) -> None:
        float(logs["loss"])  # with JAX, the step itself may still be running
        start = perf_counter()
        inner(batch, logs)
        spent.append(perf_counter() - start)
        sleep(options.pause)

    callback.on_train_batch_end = timed
    x = np.random.default_rng(0).normal(size=(options.saves, 1024)).astype(np.float32)
    start = perf_counter()
    model.optimizer.iterations.assign(0)
    model.fit(x, x, batch_size=1, verbose=0, callbacks=[callback])
    whole = perf_counter() - start - options.pause * options.saves
    return statistics.median(spent), whole


if __name__ == "__main__":
    main()
