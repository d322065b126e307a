"""Chunks that several devices of a process share: saves and loads of JAX arrays over 8 CPU devices.

    python benchmarks/devices.py --dir /tmp/devices-bench
    python benchmarks/devices.py --dir /tmp/devices-bench --processes 2
    python benchmarks/devices.py --dir /dev/shm --call 2000 --before /tmp/before

Arrays of one size each are split over all devices along their rows, in one process or, with
jax.distributed, in two. Small chunks are joined with those of the process's other devices, up to a
size: the ways are these sizes, 0 for chunks that end with every device, 64 KiB for what unickpt
does; they take turns. "same" is loaded onto the same devices, "whole" into NumPy arrays. Medians;
files in the page cache.

--call measures something else: how long `save_async` takes for so many small arrays, on the host
and on simulated devices (host memory that the adapters take for a device's). The call is the wall
time until it returns, the CPU that of its thread until then, both from the third save on. With
--before, also in another checkout; the checkouts take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console
from rich.table import Table

DEVICES = 8
WIDTH = 128
PORT = "5793"
Told = dict[str, list[float]]
"""By the size of an array in KiB, and by the way: chunks, and seconds to save and to load."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, help="An existing folder on the disk to measure.")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--kib", type=int, nargs="+", default=[64, 128, 256, 512, 1024])
    parser.add_argument("--joined", type=int, nargs="+", default=[0, 64, 1024], help="KiB.")
    parser.add_argument("--mib", type=int, default=64, help="Of all arrays of a size.")
    parser.add_argument("--most", type=int, default=200, help="Arrays of a size.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--call", type=int, help="So many small arrays: time the call only.")
    parser.add_argument("--elements", type=int, default=256, help="Of each of them.")
    parser.add_argument("--before", type=Path, help="Another checkout, for --call.")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if arguments.call:
        show_calls(arguments, console)
        return
    table = Table(title=f"{DEVICES} devices, {arguments.processes} processes", title_justify="left")
    for column in (
        "arrays, KiB",
        "joined up to, KiB",
        "chunks",
        "save, ms",
        "same, ms",
        "whole, ms",
    ):
        table.add_column(column, justify="right")
    with fresh_directory(arguments.dir) as folder:
        print_facts(console, machine_facts(folder))
        told = measured(folder, arguments)
    for way, (chunks, *seconds) in told.items():
        table.add_row(*way.split(), str(int(chunks)), *(f"{1000 * s:.0f}" for s in seconds))
    console.print(table)


def measured(folder: Path, arguments: argparse.Namespace) -> Told:
    """What process 0 tells."""
    count = arguments.processes
    given = json.dumps({**vars(arguments), "dir": str(folder)})
    flags = f"--xla_force_host_platform_device_count={DEVICES // count}"
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, "--worker", str(index), given],
            env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]
    outputs = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        sys.exit(1)
    found: Told = json.loads(outputs[0].splitlines()[-1])
    return found


def work(index: int, given: dict[str, Any]) -> None:
    """What each process does."""
    import jax
    from jax.experimental.multihost_utils import sync_global_devices
    from jax.sharding import Mesh, NamedSharding
    from jax.sharding import PartitionSpec as P

    if given["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{PORT}", given["processes"], index)

    import unickpt
    from unickpt.format import chunk_grid

    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
    options = unickpt.SaveOptions(fsync=False)

    def timed(do: Callable[[], Any]) -> tuple[float, Any]:
        if given["processes"] > 1:
            sync_global_devices("timed")
        begun = time.perf_counter()
        found = do()
        return time.perf_counter() - begun, found

    told: dict[str, list[tuple[float, ...]]] = {}
    for kib in given["kib"]:
        shape = (kib * 1024 // 4 // WIDTH, WIDTH)
        whole = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        count = min(given["most"], max(1, given["mib"] * 1024 // kib))
        tree = {
            f"w{n}": jax.make_array_from_callback(shape, sharding, lambda at, of=whole + n: of[at])
            for n in range(count)
        }
        for _ in range(given["rounds"] + 1):  # the first one warms up
            for joined in given["joined"]:
                chunk_grid._JOINED_BYTES = joined * 1024
                chunk_grid.chunk_grid.cache_clear()
                path = Path(given["dir"], f"{kib}_{joined}")
                save, _ = timed(partial(unickpt.save, path, tree, options=options))
                same, found = timed(partial(unickpt.load, path, tree))
                alone, _ = timed(partial(unickpt.load, path))
                assert all(
                    np.array_equal(a.data, b.data)
                    for name in ("w0", f"w{count - 1}")
                    for a, b in zip(
                        found[name].addressable_shards, tree[name].addressable_shards, strict=True
                    )
                )
                chunks = unickpt.open(path).index.chunks
                times = told.setdefault(f"{kib} {joined}", [])
                times.append((chunks, save, same, alone))
                timed(partial(shutil.rmtree, path) if index == 0 else bool)
    if index == 0:
        medians = {
            way: [statistics.median(of) for of in zip(*times[1:], strict=True)]
            for way, times in told.items()
        }
        print(json.dumps(medians))


def show_calls(arguments: argparse.Namespace, console: Console) -> None:
    """Shows how long the call takes in each checkout."""
    here = Path(__file__).resolve().parent.parent
    checkouts = [here] if arguments.before is None else [arguments.before.resolve(), here]
    told: dict[tuple[str, Path], list[list[tuple[float, float]]]] = {}
    with fresh_directory(arguments.dir) as folder:
        print_facts(console, machine_facts(folder))
        for number in range(arguments.rounds):
            for kind in CALLS:
                for checkout in checkouts if number % 2 else reversed(checkouts):
                    path = Path(folder, f"{kind}{number}{checkouts.index(checkout)}")
                    wanted = str(path), kind, str(arguments.call), str(arguments.elements)
                    found = subprocess.run(
                        [sys.executable, __file__, "--calls", *wanted],
                        env={**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"},
                        cwd=checkout,
                        stdout=subprocess.PIPE,
                        check=True,
                    )
                    told.setdefault((kind, checkout), []).append(json.loads(found.stdout))
                    shutil.rmtree(path)
    title = f"the call for {arguments.call} arrays of {arguments.elements} float32, ms"
    table = Table(title=title, title_justify="left")
    for column in ("", "checkout", "call: median", "least", "CPU: median", "least"):
        table.add_column(column, justify="right")
    for (kind, checkout), rounds in told.items():
        values = [
            f"{1000 * of([save[which] for saves in rounds for save in saves]):.1f}"
            for which in (0, 1)
            for of in (statistics.median, min)
        ]
        table.add_row(CALLS[kind], "this" if checkout == here else "before", *values)
    console.print(table)


CALLS = {
    "jax-host": "JAX, host",
    "jax": "JAX, simulated device",
    "torch-host": "torch, host",
    "torch": "torch, simulated GPU",
}


def time_calls(folder: str, kind: str, count: int, elements: int) -> None:
    """Prints how long the calls from the third save on took, and their CPU time."""
    import jax
    import torch

    import unickpt
    from unickpt.adapters import jax as jax_adapter

    if kind == "jax":
        jax_adapter._on_cpu = lambda sharding: False  # type: ignore[assignment]
    if kind == "torch":
        simulate_gpu()
    make = jax.numpy.full if kind.startswith("jax") else torch.full
    options, told = unickpt.SaveOptions(fsync=False), list[tuple[float, float]]()
    for step in range(10):
        tree = {f"w{n}": make((elements,), float(n + step)) for n in range(count)}
        if kind.startswith("jax"):
            jax.block_until_ready(tree)
        begun, cpu = time.perf_counter(), time.thread_time()
        pending = unickpt.save_async(f"{folder}/{step}", tree, options=options)
        told.append((time.perf_counter() - begun, time.thread_time() - cpu))
        pending.result()
        found = unickpt.load(f"{folder}/{step}")
        assert all((found[f"w{n}"] == n + step).all() for n in range(count))
    print(json.dumps(told[2:]))


def simulate_gpu() -> None:
    """Tensors on the host are on a GPU, whose copies wait for nothing."""
    import types

    import torch

    from unickpt.adapters import torch as adapter
    from unickpt.adapters import torch_cuda

    class Event:
        def __init__(self, **_: Any) -> None: ...

        def record(self, stream: Any) -> None: ...

        def synchronize(self) -> None: ...

    def pinned(nbytes: int) -> Any:
        return np.empty(nbytes, np.uint8)

    stream = types.SimpleNamespace(device=torch.device("cpu"), wait_event=lambda event: None)
    given = {"is_cpu": property(lambda tensor: False), "is_cuda": property(lambda tensor: True)}
    for name, value in (given | {"record_stream": lambda tensor, stream: None}).items():
        setattr(torch.Tensor, name, value)
    torch.cuda.Event = Event  # type: ignore[assignment,misc]
    torch.cuda.current_stream = lambda device=None: stream  # type: ignore[assignment]
    torch_cuda.pinned = adapter.pinned = pinned  # type: ignore[attr-defined]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--calls"]:
        time_calls(*sys.argv[2:4], *map(int, sys.argv[4:6]))
    elif sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), json.loads(sys.argv[3]))
    else:
        main()
