"""The demo's PyTorch job: loads a checkpoint into DTensors, fingerprints them, saves them.

It never imports JAX: the checkpoint itself tells which arrays there are.
"""

import argparse
import gc
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from job import fingerprint, report
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor

import unickpt


def placements(shape: tuple[int, ...]) -> tuple[Placement, Placement]:
    """Splits rows over "fsdp" and columns over "tp"; vectors and scalars are replicated."""
    return (Shard(0), Shard(1)) if len(shape) > 1 else (Replicate(), Replicate())


def empty_like_stored(array: unickpt.types.StoredArray, mesh: DeviceMesh) -> DTensor:
    """A DTensor to load a stored array into."""
    dtype = getattr(torch, array.dtype.name)
    split = placements(array.shape)
    return empty_dtensor(array.shape, dtype=dtype, device_mesh=mesh, placements=split)


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Names with slashes as the nested dicts that they stand for."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = leaf
    return tree


def fingerprint_of(tensor: DTensor) -> str:
    """The fingerprint of a global array; gathers it in every rank."""
    full = tensor.full_tensor().contiguous()
    data = full.reshape(-1).view(torch.uint8).numpy().data
    return fingerprint(str(full.dtype).removeprefix("torch."), tuple(full.shape), data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", required=True, help="the checkpoint to load")
    parser.add_argument("--save", required=True, help="where to save it again")
    arguments = parser.parse_args()
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("fsdp", "tp"))
    report("start", mesh=dict(zip(mesh.mesh_dim_names or (), mesh.mesh.shape, strict=True)))

    checkpoint = unickpt.open(arguments.load)
    tensors = {name: empty_like_stored(array, mesh) for name, array in checkpoint.items()}
    like = nest({**tensors, **checkpoint.values})
    dist.barrier()
    started = time.perf_counter()
    tree = unickpt.load(arguments.load, like)  # fills `tensors`
    dist.barrier()
    seconds = time.perf_counter() - started
    report("loaded", step=tree["step"], bytes=checkpoint.nbytes, seconds=seconds)
    report("fingerprints", of={name: fingerprint_of(tensor) for name, tensor in tensors.items()})

    saved = unickpt.save(arguments.save, tree)
    report("saved", arrays=saved.arrays, bytes=saved.bytes, seconds=saved.seconds)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    main()
    gc.collect()  # frees the tensors first: see "terminate called" in docs/troubleshooting.md
    dist.destroy_process_group()
