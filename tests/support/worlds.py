"""Worlds for test_worlds.py: each saves all dtypes it has, then loads what every world saved.

The worlds are processes that know nothing of each other: a checkpoint that appears is the only
news they have. NumPy arrays stand for what every element should be.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from unickpt.arrays import dtypes

SOURCES = ("host", "alone", "jax2", "torch4", "chain", "relay")
DTYPES = (*dtypes.supported(), "datetime64[ns]", "timedelta64[25s]")
NAMES = (*DTYPES, "uneven")
WITHOUT_TORCH = {
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float4_e2m1fn", "int4", "int2"),
    *("datetime64[ns]", "timedelta64[25s]"),
}
_NAN_AND_ZERO = {  # -0.0, a quiet and a signalling NaN with payloads
    4: np.array([0x80000000, 0x7FC12345, 0xFF800001], np.uint32),
    8: np.array([1 << 63, 0x7FF8123456789ABC, 0xFFF0000000000001], np.uint64),
}


def array(name: str) -> np.ndarray:
    """Bits of a dtype, the same in every process."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    if name == "uneven":
        return rng.random((7, 5), np.float32)
    dtype = dtypes.from_name(name)
    if name in ("int4", "int2", "float4_e2m1fn"):
        return rng.integers(*((-2, 2) if name == "int2" else (-4, 4)), (8, 16)).astype(dtype)
    bits = rng.integers(0, 2 if name == "bool" else 256, (8, 16 * dtype.itemsize), np.uint8)
    out = bits.view(dtype)
    if dtype.kind in "fc" and dtype.itemsize >= 4:
        special = _NAN_AND_ZERO[4 if name in ("float32", "complex64") else 8]
        out[0].view(special.dtype)[: len(special)] = special
    return out


def raw(found: np.ndarray) -> bytes:
    return np.ascontiguousarray(found).tobytes()


class Numpy:
    def names(self) -> set[str]:
        return set(NAMES)

    def put(self, name: str) -> Any:
        return array(name)

    def like(self, name: str) -> Any:
        return np.ones_like(array(name))

    def right(self, found: Any, name: str) -> bool:
        return found.dtype == array(name).dtype and raw(found) == raw(array(name))


class Torch:
    """Plain tensors, the same on every rank."""

    def names(self) -> set[str]:
        return set(NAMES) - WITHOUT_TORCH

    def put(self, name: str) -> Any:
        import torch

        dtype = torch.float32 if name == "uneven" else getattr(torch, name)
        return torch.from_numpy(array(name).view(np.uint8)).view(dtype)

    def like(self, name: str) -> Any:
        import torch

        return torch.ones_like(self.put(name))

    def right(self, found: Any, name: str) -> bool:
        want = self.put(name)
        return found.dtype == want.dtype and self.bits(found) == self.bits(want)

    def bits(self, tensor: Any) -> bytes:
        import torch

        return raw(tensor.contiguous().view(torch.uint8).numpy())


class DTensor(Torch):
    """Tensors on a mesh; each name has the next of a list of placements."""

    def __init__(self, *mesh: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard

        rows, columns, replica = Shard(0), Shard(1), Replicate()
        self.mesh = init_device_mesh("cpu", mesh, mesh_dim_names=("p", "q")[: len(mesh)])
        self.choices: list[tuple[Any, ...]] = [(rows,), (columns,), (replica,)]
        if len(mesh) == 2:
            self.choices = [(rows, columns), (columns, rows), (rows, rows), (replica, columns),
                            (rows, replica), (replica, replica)]  # fmt: skip

    def placements(self, name: str) -> tuple[Any, ...]:
        return self.choices[NAMES.index(name) % len(self.choices)]

    def piece(self, whole: Any, name: str) -> Any:
        for size, at, placement in zip(
            self.mesh.mesh.shape, self.mesh.get_coordinate(), self.placements(name), strict=True
        ):
            if placement.is_shard():
                extent = whole.shape[placement.dim]
                start, stop = (min(i * -(-extent // size), extent) for i in (at, at + 1))
                whole = whole.narrow(placement.dim, start, stop - start)
        return whole.contiguous()

    def spread(self, whole: Any, name: str) -> Any:
        from torch.distributed.tensor import DTensor as Distributed

        return Distributed.from_local(
            self.piece(whole, name).clone(),
            self.mesh,
            self.placements(name),
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )

    def put(self, name: str) -> Any:
        return self.spread(super().put(name), name)

    def like(self, name: str) -> Any:
        import torch

        return self.spread(torch.ones_like(super().put(name)), name)

    def right(self, found: Any, name: str) -> bool:
        want = self.piece(super().put(name), name)
        same = found.placements == self.placements(name) and found.dtype == want.dtype
        return same and self.bits(found.to_local()) == self.bits(want)


class Jax:
    """Arrays on a mesh; each name has the next of a list of specs.

    Arguments:
        grid: shape of the mesh.
        order: the order of its devices.
    """

    def __init__(self, grid: tuple[int, ...], order: Callable[[Any], Any] = lambda d: d) -> None:
        import jax
        from jax.sharding import Mesh
        from jax.sharding import PartitionSpec as P

        devices = np.array(jax.devices())
        assert math.prod(grid) == devices.size
        axes = ("a", "b", "c")[: len(grid)]
        self.mesh = Mesh(order(devices).reshape(grid), axes)
        self.choices = [P("a", None), P(None, "a"), P(None, axes), P(axes[::-1]), P()]
        if len(axes) > 1:
            self.choices += [P("a", "b"), P("b", "a"), P(axes[1:], "a"), P(None, "b")]

    def names(self) -> set[str]:
        return {n for n in NAMES if "time" not in n}

    def sharding(self, name: str) -> Any:
        from jax.sharding import NamedSharding
        from jax.sharding import PartitionSpec as P

        spec = self.choices[NAMES.index(name) % len(self.choices)]
        return NamedSharding(self.mesh, P() if name == "uneven" else spec)

    def put(self, name: str) -> Any:
        import jax

        whole = array(name)
        return jax.make_array_from_callback(whole.shape, self.sharding(name), lambda i: whole[i])

    def like(self, name: str) -> Any:
        import jax

        whole = array(name)
        return jax.ShapeDtypeStruct(whole.shape, whole.dtype, sharding=self.sharding(name))

    def right(self, found: Any, name: str) -> bool:
        whole = array(name)
        return (found.dtype, found.sharding) == (whole.dtype, self.sharding(name)) and all(
            raw(np.asarray(shard.data)) == raw(whole[shard.index])
            for shard in found.addressable_shards
        )


Kinds = Mapping[str, Any]


def wait_for(path: Path, seconds: float = 100) -> unickpt.Checkpoint:
    """Opens a checkpoint as soon as it is there, unless some world fails meanwhile."""
    deadline, failure = time.monotonic() + seconds, path.parent / "failure"
    while True:
        with suppress(unickpt.CheckpointNotFound):
            return unickpt.open(path)
        assert not failure.exists(), failure.read_text()
        assert time.monotonic() < deadline, f"{path.name} did not appear"
        time.sleep(0.05)


def save(root: Path, world: str, tree: Any) -> None:
    # Few bytes to a chunk, so that every reader has to put its pieces together from many.
    unickpt.save(root / world, tree, options=unickpt.SaveOptions(fsync=False, chunk_bytes=96))


def load(root: Path, source: str, kind: Any) -> tuple[dict[str, Any], dict[str, bool]]:
    """Loads every kind of array that a world saved as one kind, and says which are right."""
    stored: dict[str, set[str]] = {}
    for name in wait_for(root / source):
        stored.setdefault(name.partition("/")[0], set()).add(name.partition("/")[2])
    like = {
        origin: {name: kind.like(name) for name in sorted(names & kind.names())}
        for origin, names in stored.items()
    }
    found = unickpt.load(root / source, like, strict=False)
    verdict = {
        origin: len(arrays) >= 16 and all(kind.right(x, name) for name, x in arrays.items())
        for origin, arrays in found.items()
    }
    return found, verdict


def meet(world: str, root: Path, kinds: Kinds, saves: Kinds) -> dict[str, bool]:
    """A world's whole life.

    Arguments:
        world: its name.
        root: the folder of all checkpoints.
        kinds: what it loads as.
        saves: what it saves.

    Returns:
        For "source kind -> world kind" whether every bit was right.
    """
    save(root, world, {k: {n: v.put(n) for n in sorted(v.names())} for k, v in saves.items()})
    pairs: dict[str, bool] = {}
    for source in SOURCES:
        for name, kind in kinds.items():
            found, verdict = load(root, source, kind)
            pairs |= {f"{source} {o} -> {world} {name}": ok for o, ok in verdict.items()}
            if (world, source, name) == ("torch4", "jax2", "dtensor"):
                save(root, "chain", {"dtensor": found["jax"]})
            if (world, source) == ("alone", "chain"):
                save(root, "relay", {"numpy": found["dtensor"]})
    return pairs


class Refuse:
    """Makes the import of a framework fail."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("jax", "jaxlib", "torch"):
            raise ImportError(f"{name} is not installed here")


def main(world: str, root: str) -> None:
    """Runs in each process of a world of its own."""
    try:
        print(json.dumps(_worlds[world](Path(root))))
    except BaseException:
        mine = Path(root) / f"failure_{world}_{os.getpid()}"
        mine.write_text(f"{world}: {traceback.format_exc()}")
        with suppress(FileExistsError):
            (Path(root) / "failure").hardlink_to(mine)  # the first one is the cause
        raise


def _alone(root: Path) -> dict[str, bool]:
    sys.meta_path.insert(0, Refuse())
    pairs = meet("alone", root, {"numpy": Numpy()}, {"numpy": Numpy()})
    assert not {"jax", "jaxlib", "torch"} & sys.modules.keys()
    return pairs


def _jax2(root: Path) -> dict[str, bool]:
    import jax

    jax.config.update("jax_enable_x64", True)
    # Transposed: neighbours in the mesh belong to different processes.
    crossed = Jax((4, 2), lambda devices: devices.reshape(2, 4).T)
    saves, kinds = {"jax": crossed, "numpy": Numpy()}, {"jax": Jax((8,)), "numpy": Numpy()}
    return meet("jax2", root, kinds, saves)


def _torch4(root: Path) -> dict[str, bool]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    plain = {"torch": Torch(), "numpy": Numpy()}
    kinds, saves = plain | {"dtensor": DTensor(4)}, plain | {"dtensor": DTensor(2, 2)}
    pairs = meet("torch4", root, kinds, saves)
    dist.destroy_process_group()
    return pairs


_worlds = {"alone": _alone, "jax2": _jax2, "torch4": _torch4}
