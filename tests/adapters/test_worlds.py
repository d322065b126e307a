"""Every pair of worlds: JAX, torch and NumPy, in one process and in several, on other meshes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import pytest
import torch.distributed as dist
from support import TESTS, worlds
from support.processes import Processes

import unickpt

HERE = TESTS


@pytest.fixture
def wide_jax() -> Iterator[None]:
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("wide_jax", "one_rank")
def test_every_pair_of_worlds(processes: Processes, tmp_path: Path) -> None:
    """Each world saves, then loads what all others saved, in every form it knows.

    "chain" is what 4 torch ranks saved of what they loaded from 2 JAX processes; "relay" is what
    a process without jax and torch saved of that.
    """
    source = (
        f"import sys\nsys.path.insert(0, {HERE!r})\n"
        "from support import worlds\nworlds.main(*sys.argv[1:])"
    )
    others = [
        *processes.jax(2, 4, source, "jax2", tmp_path),
        *processes.torch(4, source, "torch4", tmp_path),
        processes.forked(source, "alone", tmp_path),
    ]
    kinds = {"numpy": worlds.Numpy(), "torch": worlds.Torch(), "dtensor": worlds.DTensor(1, 1)}
    first, second = worlds.Jax((2, 2, 2)), worlds.Jax((4, 2), lambda d: d[::-1])
    pairs = worlds.meet("host", tmp_path, kinds | {"jax": second}, kinds | {"jax": first})
    told = [pairs, *(json.loads(out.splitlines()[-1]) for out in processes.finish(others))]
    assert [pair for verdict in told for pair, right in verdict.items() if not right] == []

    stored = ["host numpy", "host torch", "host dtensor", "host jax", "alone numpy", "jax2 jax",
              "jax2 numpy", "torch4 dtensor", "torch4 torch", "torch4 numpy", "chain dtensor",
              "relay numpy"]  # fmt: skip
    processes_of = {"host": 1, "alone": 1, "jax2": 2, "torch4": 4}
    targets = [x for x in stored[:10] for _ in range(processes_of[x.split()[0]])]
    assert sorted(pair for verdict in told for pair in verdict) == sorted(
        f"{a} -> {b}" for a in stored for b in targets
    )
    chain, relay = unickpt.open(tmp_path / "chain"), unickpt.open(tmp_path / "relay")
    assert (chain.index.processes, relay.index.processes) == (4, 1)
    for found in (chain, relay):
        assert {name.partition("/")[2] for name in found} == worlds.Torch().names()
