"""How long a training loop waits for Orbax's CheckpointManager, with Orbax's handler and with ours.

    python benchmarks/orbax_wait.py                        # 256 MiB in 200 arrays, one process
    python benchmarks/orbax_wait.py --processes 2 --arrays 2000 --mib 64 --rounds 9

The processes are a job of jax.distributed with 4 CPU devices together. In each round both take a
turn in the same processes, in an order shuffled anew, with a new folder; a turn ends with its
checkpoints committed and removed. A figure is that of the slowest process; the table gives medians.
Round 0 warms up, is not counted, and checks what each restores.

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
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

DEVICES = 4
COLUMNS = ("save, waits", "save, all", "four saves", "sync", "restore")


def main() -> None:
    """Runs both, alternating; with several processes, starts them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--arrays", type=int, default=200)
    parser.add_argument("--mib", type=int, default=256, help="of all processes (default: 256)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    parser.add_argument("--index", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.index is not None:
        run(options, options.dir)
        return
    with tempfile.TemporaryDirectory(dir=options.dir) as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        more = ["--dir", folder, "--port", str(free.getsockname()[1])]
        free.close()
        job = [
            subprocess.Popen([sys.executable, *sys.argv, *more, "--index", str(index)])
            for index in range(options.processes)
        ]
        sys.exit(max(process.wait() for process in job))


def run(options: argparse.Namespace, folder: Path) -> None:
    """What each process does."""
    devices = DEVICES // options.processes
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    warnings.simplefilter("ignore")
    import jax

    if options.processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{options.port}", options.processes, options.index)
    from unickpt.integrations.orbax import registry

    logging.getLogger("absl").setLevel(logging.ERROR)
    contenders: dict[str, Callable[[], dict[str, Any]]] = {
        "orbax": dict,
        "unickpt": lambda: {"handler_registry": registry()},
    }
    times: dict[str, list[list[float]]] = {name: [] for name in contenders}
    state = make_state(options)
    for number in range(options.rounds + 1):
        for name in random.Random(number).sample(sorted(contenders), len(contenders)):
            place = folder / f"{name}_{number}"
            seconds = turn(contenders[name], state, place, check=number == 0)
            if number:
                times[name].append(seconds)
            if options.index == 0:
                shutil.rmtree(place)
                os.sync()
    if options.index == 0:
        report(options, times)


def report(options: argparse.Namespace, times: dict[str, list[list[float]]]) -> None:
    """Prints the table."""
    print(
        f"{options.processes} processes, {options.arrays} arrays, {options.mib} MiB, "
        f"{options.rounds} rounds; seconds, medians"
    )
    print(f"{'':8}" + "".join(f"{column:>14}" for column in COLUMNS))
    for name, rows in times.items():
        cells = "".join(f"{statistics.median(c):14.3f}" for c in zip(*rows, strict=True))
        print(f"{name:8}{cells}")


def slowest(work: Callable[[], object], began: float | None = None) -> float:
    """Runs work on all processes at once; the seconds of the slowest."""
    import jax
    import numpy as np
    from jax.experimental import multihost_utils

    if jax.process_count() == 1:
        start = perf_counter() if began is None else began
        work()
        return perf_counter() - start
    multihost_utils.sync_global_devices("turn")
    start = perf_counter() if began is None else began
    work()
    seconds = np.float32(perf_counter() - start)
    return float(np.max(multihost_utils.process_allgather(seconds)))


def make_state(options: argparse.Namespace) -> dict[str, Any]:
    """So many arrays, split over the devices."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("a",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, PartitionSpec("a"))
    columns = max(1, (options.mib << 20) // 4 // 64 // options.arrays)
    make = jax.jit(lambda x: jnp.full((64, columns), x, jnp.float32), out_shardings=split)
    state = {f"w{number}": make(float(number)) for number in range(options.arrays)}
    jax.block_until_ready(state)
    return {"params": state}


def turn(
    chosen: Callable[[], dict[str, Any]], state: Any, place: Path, *, check: bool
) -> list[float]:
    """The times of one contender, in the order of the columns.

    Arguments:
        chosen: makes the arguments of the manager that choose its handler.
        state: what to save.
        place: a new folder.
        check: whether to compare what is restored.
    """
    import jax
    import orbax.checkpoint as ocp

    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    args, options = ocp.args.StandardSave(state), ocp.CheckpointManagerOptions
    restored = []
    with ocp.CheckpointManager(place / "a", options=options(max_to_keep=1), **chosen()) as manager:
        began = perf_counter()
        waits = slowest(lambda: manager.save(1, args=args))
        whole = slowest(manager.wait_until_finished, began)

        def restore() -> None:
            found = manager.restore(1, args=ocp.args.StandardRestore(abstract))
            restored.append(jax.block_until_ready(found))

        def four() -> None:
            for step in range(2, 6):
                manager.save(step, args=args)
            manager.wait_until_finished()

        loading = slowest(restore)
        saving = slowest(four)
    if check:
        same = jax.tree.map(lambda a, b: bool((a == b).all()), restored[0], state)
        assert all(jax.tree.leaves(same))
    at_once = options(enable_async_checkpointing=False)
    with ocp.CheckpointManager(place / "b", options=at_once, **chosen()) as manager:
        sync = slowest(lambda: manager.save(1, args=args))
    return [waits, whole, saving, sync, loading]


if __name__ == "__main__":
    main()
