"""Sharded state dicts of values of all kinds, made by hand, as scenarios of `megatron_job`."""

from __future__ import annotations

import io
import os
from argparse import Namespace
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
)

import unickpt
from unickpt.integrations.megatron import LoadStrategy, SaveStrategy

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int8", "uint8", "bool")
FLAT = hasattr(ShardedTensor, "from_rank_offsets_flat")
"""Whether this Megatron has tensors of which a rank holds a range of flattened elements."""


class Own:
    """A class that unickpt does not know."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and other.number == self.number

    __hash__ = None  # type: ignore[assignment]


def whole(shape: tuple[int, ...], dtype: str) -> torch.Tensor:
    numbers = torch.arange(int(np.prod(shape))).reshape(shape)
    return (numbers % 2 == 1) if dtype == "bool" else numbers.to(getattr(torch, dtype))


def tensors(filled: bool) -> dict[str, Any]:
    """Tensors in a grid, stacked, replicated, by factories; flattened, where there are such."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def given(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if filled else torch.zeros_like(tensor)

    def columns(dtype: str) -> Any:
        part = whole((6, 4), dtype).chunk(ranks, 1)[rank]
        at = (1, rank, ranks)
        return ShardedTensor.from_rank_offsets(f"grid.{dtype}", given(part), at)

    made: dict[str, Any] = {f"grid {dtype}": columns(dtype) for dtype in DTYPES}
    layers = whole((4, 5, 3), "float32").chunk(ranks)[rank]
    made["layers"] = [
        ShardedTensor.from_rank_offsets(
            "stacked", given(layer), (0, rank * len(layers) + n, 4), prepend_axis_num=1
        )
        for n, layer in enumerate(layers)
    ]
    made["replica"] = ShardedTensor.from_rank_offsets(
        "replica", given(whole((7,), "bfloat16")), replica_id=rank
    )
    gates = whole((8, 3), "float32").chunk(2)  # of which each rank has rows of both
    own = torch.cat([gate.chunk(ranks)[rank] for gate in gates])
    made["factory"] = ShardedTensorFactory("gates", given(own), _halves, torch.cat)
    if FLAT:
        made["flat"] = _flattened(whole((5, 7), "float32"), filled)
    return made


def _halves(key: str, tensor: torch.Tensor, replica_id: Any, flattened: slice | None) -> list[Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    return [
        ShardedTensor.from_rank_offsets(
            key, half, (0, n * ranks + rank, 2 * ranks), replica_id=replica_id
        )
        for n, half in enumerate(tensor.chunk(2))
    ]


def _flattened(tensor: torch.Tensor, filled: bool) -> Any:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    every = tensor.numel() // ranks
    stop = tensor.numel() if rank == ranks - 1 else (rank + 1) * every
    part = tensor.flatten()[rank * every : stop]
    return ShardedTensor.from_rank_offsets_flat(
        "flat",
        part.clone() if filled else torch.zeros_like(part),
        tuple(tensor.shape),
        flattened_range=slice(rank * every, stop),
    )


def values(rank: int) -> list[Any]:
    """What an object of Megatron may hold; all can be compared by ==."""
    return [
        {"none": None, "int": 2**70, "float": float("inf"), "text": "ä", "bytes": b"\0x", 3: True},
        (1, (2, [rank]), {}),
        OrderedDict(b=1, a=2),
        {1, "a"},
        1 + 2j,
        np.float32(rank + 0.1),
        np.int64(2**60),
        torch.Size([2, 3]),
        torch.bfloat16,
        torch.device("cpu"),
        Namespace(lr=0.1, names=["x", None], inner=Namespace(y=(1,))),
    ]


def state(filled: bool, objects: bool, opaque: bool) -> dict[str, Any]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    made: dict[str, Any] = {"tensors": tensors(filled)}
    if objects:
        held = {
            "values": values(rank),
            "tensor": torch.arange(4, dtype=torch.bfloat16) + rank,
            "number": torch.tensor(rank + 0.5, dtype=torch.float64),
            "numpy": np.arange(6.0).reshape(2, 3) + rank,
            "file": io.BytesIO(b"abc"),
        }
        of_all = {"same": [1, {"on": "all"}]}
        given = held if filled else None
        made["own"] = ShardedObject("own", given, (ranks,), (rank,))
        made["all"] = ShardedObject("all", of_all if filled else None, (1,), (0,), replica_id=rank)
    if opaque:
        value = Own(3) if filled else None
        made["opaque"] = ShardedObject("opaque", value, (1,), (0,), replica_id=rank)
    made["local"] = LocalNonpersistentObject(f"of rank {rank}")
    made["common"] = {"iteration": 7, "tensor": torch.arange(3), "args": Namespace(a=[1])}
    return made


def write(folder: str, opaque: bool = False) -> None:
    """Saves them."""
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    strategy = SaveStrategy(options=unickpt.SaveOptions(timeout_s=60, fsync=False))
    dist_checkpointing.save(state(True, True, opaque), folder, strategy)


def read(folder: str, objects: bool = True, opaque: bool = False, unpickle: bool = False) -> None:
    """Loads them, and asserts that they are as they were."""
    given = state(False, objects, opaque)
    found = dist_checkpointing.load(given, folder, LoadStrategy(unpickle=unpickle))
    expected = {name: _data(value) for name, value in tensors(True).items()}
    assert found["tensors"].keys() == expected.keys()
    for name, value in expected.items():
        assert _equal(found["tensors"][name], value), (name, found["tensors"][name], value)
    assert found["local"] == f"of rank {dist.get_rank()}"
    assert found["common"]["iteration"] == 7
    assert torch.equal(found["common"]["tensor"], torch.arange(3))
    assert found["common"]["args"] == Namespace(a=[1])
    if objects:
        rank, own = dist.get_rank(), found["own"]
        assert own["values"] == values(rank), own["values"]
        assert [*map(type, own["values"])] == [*map(type, values(rank))]
        assert _equal(own["tensor"], torch.arange(4, dtype=torch.bfloat16) + rank)
        assert _equal(own["number"], torch.tensor(rank + 0.5, dtype=torch.float64))
        assert np.array_equal(own["numpy"], np.arange(6.0).reshape(2, 3) + rank)
        assert own["file"].getvalue() == b"abc"
        assert found["all"] == {"same": [1, {"on": "all"}]}
    if opaque:
        assert found["opaque"] == Own(3)


def _data(value: Any) -> Any:
    return [one.data for one in value] if isinstance(value, list) else value.data


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return all(_equal(a, b) for a, b in zip(found, expected, strict=True))
    return bool(found.dtype == expected.dtype and torch.equal(found, expected))
