"""Between a GPU and a disk: unickpt beside torch.save, safetensors, DCP and Orbax, in turns.

    python benchmarks/gpu.py                                # 4 GiB in 64 arrays, torch
    python benchmarks/gpu.py --framework jax --mib 8192 --dir /dev/shm
    python benchmarks/gpu.py --mib 512 --arrays 8000        # small arrays, copied together
    python benchmarks/gpu.py --mib 8192 --arrays 2          # large ones, read in parts

Each turn saves a state that is on the GPU, then loads it into arrays that are there, from the page
cache. Nothing is flushed. Round 0 warms up, is not counted, and checks the bits of what was loaded.
Medians of GB/s; "call" is how long the call of a save in the background blocks, in milliseconds.
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
from time import perf_counter
from typing import Any

Save = Callable[[Path, Any], Callable[[], None]]
"""Begins to save, and returns what waits for the end."""
Load = Callable[[Path, Any], Any]


def main() -> None:
    """Runs the turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--mib", type=int, default=4096)
    parser.add_argument("--arrays", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", metavar="NAME", help="default: all")
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    warnings.simplefilter("ignore")
    made = {"torch": TorchGpu, "jax": JaxGpu}[options.framework](options.mib << 20, options.arrays)
    names = options.contenders or made.contenders
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(sorted(times), len(times)):
                seconds = turn(made, name, Path(folder) / "checkpoint", check=not number)
                if number:
                    times[name].append(seconds)
    print(f"{made.facts}, {options.mib} MiB in {options.arrays} arrays, {options.rounds} rounds")
    print(f"{'':24}{'call, ms':>10}{'save, GB/s':>12}{'load, GB/s':>12}")
    for name, rows in times.items():
        call, save, load = map(statistics.median, zip(*rows, strict=True))
        speeds = (options.mib << 20) / 1e9 / save, (options.mib << 20) / 1e9 / load
        print(f"{name:24}{1000 * call:10.1f}{speeds[0]:12.2f}{speeds[1]:12.2f}", flush=True)


def turn(made: Any, name: str, path: Path, *, check: bool) -> tuple[float, float, float]:
    """Seconds of a contender's call, of the whole save, and of the load."""
    save, load = made.contenders[name]
    start = perf_counter()
    wait = save(path, made.state)
    called = perf_counter() - start
    wait()
    saved = perf_counter() - start
    target = made.target()
    start = perf_counter()
    found = load(path, target)
    made.synchronize(found)
    loaded = perf_counter() - start
    if check:
        made.check(found)
    del found, target
    shutil.rmtree(path)
    return called, saved, loaded


def in_background(staging: str) -> Save:
    """How unickpt saves."""
    import unickpt
    from unickpt.saving import saver
    from unickpt.saving.background import SaveRequest

    options = unickpt.SaveOptions(staging=staging, fsync=False, budget_bytes=64 << 30)  # type: ignore[arg-type]

    def save(path: Path, state: Any) -> Callable[[], None]:
        owners = None
        if staging == "lazy":  # as if an optimizer owned all tensors
            owners = {tensor.untyped_storage()._cdata for tensor in state.values()}
        pending = saver.begin(SaveRequest(path, state, options, owners=owners))
        return lambda: pending.result() and None

    return save


class TorchGpu:
    """Tensors on a GPU."""

    def __init__(self, nbytes: int, count: int) -> None:
        import torch

        import unickpt

        self.torch = torch
        width = max(1, nbytes // count // 4 // 128)
        self.state = {f"w{i}": torch.randn(128, width, device="cuda") for i in range(count)}
        self.facts = f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
        lazily, clones = in_background("lazy"), in_background("device")

        def unverified(path: Path, target: Any) -> Any:
            return unickpt.load(path, target, options=unickpt.LoadOptions(verify=False))

        def bounded(path: Path, target: Any) -> Any:
            options = unickpt.LoadOptions(budget_bytes=128 << 20)
            return unickpt.load(path, target, options=options)

        self.contenders: dict[str, tuple[Save, Load]] = {
            "torch.save": (self.save_torch, self.load_torch),
            "safetensors": (self.save_safetensors, self.load_safetensors),
            "DCP": (self.save_dcp, self.load_dcp),
            "unickpt, copy": (in_background("copy"), unickpt.load),
            "unickpt, lazy": (lazily, unickpt.load),
            "unickpt, clones": (clones, unickpt.load),
            "unickpt, not verified": (lazily, unverified),
            "unickpt, 128 MiB of host": (lazily, bounded),
        }

    def target(self) -> Any:
        return {name: self.torch.zeros_like(tensor) for name, tensor in self.state.items()}

    def synchronize(self, found: Any) -> None:
        self.torch.cuda.synchronize()

    def check(self, found: Any) -> None:
        for name, tensor in self.state.items():
            assert found[name].is_cuda, name
            assert self.torch.equal(found[name], tensor), name

    def save_torch(self, path: Path, state: Any) -> Callable[[], None]:
        path.mkdir()
        self.torch.save(state, path / "state.pt")
        return lambda: None

    def load_torch(self, path: Path, target: Any) -> Any:
        return self.torch.load(path / "state.pt", map_location="cuda", weights_only=True)

    def save_safetensors(self, path: Path, state: Any) -> Callable[[], None]:
        from safetensors.torch import save_file

        path.mkdir()
        save_file(state, path / "state.safetensors")
        return lambda: None

    def load_safetensors(self, path: Path, target: Any) -> Any:
        from safetensors.torch import load_file

        return load_file(path / "state.safetensors", device="cuda")

    def save_dcp(self, path: Path, state: Any) -> Callable[[], None]:
        import torch.distributed.checkpoint as dcp

        writer = dcp.FileSystemWriter(path, sync_files=False, thread_count=8)
        dcp.save(state, storage_writer=writer, no_dist=True)
        return lambda: None

    def load_dcp(self, path: Path, target: Any) -> Any:
        import torch.distributed.checkpoint as dcp

        dcp.load(target, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        return target


class JaxGpu:
    """JAX arrays on a GPU."""

    def __init__(self, nbytes: int, count: int) -> None:
        import jax
        import orbax.checkpoint as ocp

        import unickpt

        self.jax, self.ocp = jax, ocp
        width = max(1, nbytes // count // 4 // 1024)
        keys = jax.random.split(jax.random.key(0), count)
        self.state = {f"w{i}": jax.random.normal(k, (1024, width)) for i, k in enumerate(keys)}
        jax.block_until_ready(self.state)
        self.facts = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
        self.facts += f", orbax {ocp.__version__}"
        self.orbax = ocp.StandardCheckpointer()
        self.contenders: dict[str, tuple[Save, Load]] = {
            "Orbax": (self.save_orbax, self.load_orbax),
            "unickpt, copy": (in_background("copy"), unickpt.load),
            "unickpt, by reference": (in_background("reference"), unickpt.load),
            "unickpt, clones": (in_background("device"), unickpt.load),
        }

    def target(self) -> Any:
        return self.jax.tree.map(
            lambda x: self.jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state
        )

    def synchronize(self, found: Any) -> None:
        self.jax.block_until_ready(found)

    def check(self, found: Any) -> None:
        for name, array in self.state.items():
            assert found[name].sharding == array.sharding, name
            assert bool((found[name] == array).all()), name

    def save_orbax(self, path: Path, state: Any) -> Callable[[], None]:
        self.orbax.save(path, state)
        return lambda: self.orbax.wait_until_finished()

    def load_orbax(self, path: Path, target: Any) -> Any:
        return self.orbax.restore(path, target)


if __name__ == "__main__":
    main()
