"""How long a training loop waits for Orbax's CheckpointManager, and for unickpt's in its place.

    python benchmarks/orbax_wait.py                        # 256 MiB in 200 arrays on 4 CPU devices
    python benchmarks/orbax_wait.py --arrays 2000 --mib 64 --rounds 9

In each round both take a turn in the same process, in an order shuffled anew, with a new folder; a
turn ends with its checkpoints committed and removed. The table gives medians. Round 0 warms up, is
not counted, and checks what each restores.

save, waits: the call of save, in the background. save, all: until wait_until_finished returns.
four saves: four calls, one after another, and the end of the last. sync: with
enable_async_checkpointing=False. restore: with an abstract tree, from the page cache.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import shutil
import statistics
import tempfile
import warnings
from pathlib import Path
from time import perf_counter
from typing import Any

COLUMNS = ("save, waits", "save, all", "four saves", "sync", "restore")


def main() -> None:
    """Runs both, alternating."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={options.devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    import orbax.checkpoint as theirs

    import unickpt.integrations.orbax as ours

    logging.getLogger("absl").setLevel(logging.ERROR)
    contenders: dict[str, Any] = {"orbax": theirs, "unickpt": ours}
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    state = make_state(options)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(sorted(contenders), len(contenders)):
                place = Path(folder) / f"{name}_{number}"
                seconds = turn(contenders[name], state, place, check=number == 0)
                shutil.rmtree(place)
                os.sync()
                if number:
                    times[name].append(seconds)
    print(
        f"{options.arrays} arrays, {options.mib} MiB, {options.devices} CPU devices, "
        f"{options.rounds} rounds; seconds, medians"
    )
    print(f"{'':8}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, rows in times.items():
        print(
            f"{name:8}" + "".join(f"{statistics.median(c):14.3f}" for c in zip(*rows, strict=True))
        )


def make_state(options: argparse.Namespace) -> dict[str, Any]:
    """So many arrays, split over the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((options.devices,), ("a",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("a"))
    columns = max(1, (options.mib << 20) // 4 // 64 // options.arrays)
    state = {
        f"w{number}": jax.device_put(jnp.full((64, columns), float(number)), split)
        for number in range(options.arrays)
    }
    jax.block_until_ready(state)
    return {"params": state}


def turn(ocp: Any, state: Any, place: Path, *, check: bool) -> list[float]:
    """The times of one contender, in the order of the columns."""
    import jax
    import numpy as np

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    args, options = ocp.args.StandardSave(state), ocp.CheckpointManagerOptions
    with ocp.CheckpointManager(place / "a", options=options(max_to_keep=1)) as manager:
        began = perf_counter()
        manager.save(1, args=args)
        waits = perf_counter() - began
        manager.wait_until_finished()
        whole = perf_counter() - began
        began = perf_counter()
        found = manager.restore(1, args=ocp.args.StandardRestore(abstract))
        jax.block_until_ready(found)
        restore = perf_counter() - began
        began = perf_counter()
        for step in range(2, 6):
            manager.save(step, args=args)
        manager.wait_until_finished()
        four = perf_counter() - began
    if check:
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(state), strict=True):
            assert np.array_equal(np.asarray(a), np.asarray(b))
            assert a.sharding == b.sharding
    at_once = options(enable_async_checkpointing=False)
    with ocp.CheckpointManager(place / "b", options=at_once) as manager:
        began = perf_counter()
        manager.save(1, args=args)
        sync = perf_counter() - began
    return [waits, whole, four, sync, restore]


if __name__ == "__main__":
    main()
