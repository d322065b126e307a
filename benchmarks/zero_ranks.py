"""The processes of `foreign_zero.py`: `zero_ranks.py ROLE ...`, which prints what it took as JSON.

Imports nothing of unickpt before the role that needs it: the others run where only DeepSpeed is.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

WIDTH = 1024
SLOTS = ("fp32", "exp_avg", "exp_avg_sq")
TAG = "global_step1"


def blocks_of(mib: int) -> int:
    """How many blocks have so many MiB of weights and moments."""
    return max(1, round((mib << 20) / (12 * 8 * WIDTH * WIDTH)))


def network(blocks: int, seed: int) -> Any:
    """Blocks as a transformer's feed-forward layers."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH)
            self.up = nn.Linear(WIDTH, 4 * WIDTH)
            self.down = nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: Any) -> Any:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    torch.manual_seed(seed)
    return nn.Sequential(*(Block() for _ in range(blocks)))


def engine_of(blocks: int, seed: int, **config: Any) -> Any:
    """A model and AdamW in DeepSpeed, ZeRO 3."""
    import deepspeed
    import torch

    model = network(blocks, seed)
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        **config,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]


def write(folder: str, blocks: int) -> None:
    """Trains a step and saves."""
    import torch

    engine = engine_of(blocks, seed=0)
    engine.backward(engine(torch.randn(1, WIDTH)).square().mean())
    engine.step()
    engine.save_checkpoint(folder, tag=TAG)


def convert(source: str, destination: str) -> None:
    """ds_to_universal, with the numbers of workers that it has by default."""
    from deepspeed.checkpoint.ds_to_universal import main

    options = SimpleNamespace(
        input_folder=source,
        output_folder=destination,
        num_extract_workers=4,
        num_merge_workers=2,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    report(measured(lambda: main(options)))


def resume(folder: str, blocks: int, digests: bool) -> None:
    """DeepSpeed loads the universal folder into an engine that it made."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    engine = engine_of(blocks, seed=1, checkpoint={"load_universal": True})
    found = measured(lambda: engine.load_checkpoint(folder, tag=f"{TAG}_universal"))

    def arrays() -> Iterator[tuple[str, Any]]:
        for name, parameter in engine.module.named_parameters():
            for slot in SLOTS:
                if slot == "fp32":
                    full = safe_get_full_fp32_param(parameter)
                else:
                    full = safe_get_full_optimizer_state(parameter, slot)
                yield f"{slot}/{name}", full

    report(found, digests_of(arrays()) if digests else {})


def load(folder: str, blocks: int, digests: bool) -> None:
    """unickpt loads the folder of ZeRO 3 onto FSDP2 shards and torch's AdamW."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import unickpt
    from unickpt.adapters.torch import NamedOptimizer

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = network(blocks, seed=1)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tree = {"model": model, "optim": NamedOptimizer(optimizer, model)}
    rules = unickpt.Rules.preset("deepspeed")
    found = measured(lambda: unickpt.load(folder, tree, rules=rules))

    def arrays() -> Iterator[tuple[str, Any]]:
        for name, parameter in model.named_parameters():
            yield f"fp32/{name}", parameter.full_tensor()
            for slot in SLOTS[1:]:
                yield f"{slot}/{name}", optimizer.state[parameter][slot].full_tensor()

    report(found, digests_of(arrays()) if digests else {})


def measured(work: Callable[[], Any]) -> dict[str, float]:
    """What `work` takes until the last rank is done: seconds, and bytes of all ranks' calls.

    The bytes are those of read and write calls, as the kernel counts them for each process and its
    children that ended; also where the page cache has them.
    """
    import torch.distributed as dist

    together = dist.is_initialized()
    if together:
        dist.barrier()
    before, start = traffic(), time.perf_counter()
    work()
    after = traffic()
    if together:
        dist.barrier()
    seconds = time.perf_counter() - start
    mine = [b - a for a, b in zip(before, after, strict=True)]
    every: list[Any] = [mine]
    if together:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, mine)
    read, written = (sum(of_rank) for of_rank in zip(*every, strict=True))
    return {"seconds": seconds, "read": read, "written": written}


def traffic() -> list[int]:
    """The bytes that this process has read and written."""
    lines = Path("/proc/self/io").read_text().splitlines()
    counts = dict(line.split(": ") for line in lines)
    return [int(counts["rchar"]), int(counts["wchar"])]


def digests_of(arrays: Iterator[tuple[str, Any]]) -> dict[str, str]:
    """Of all bits of each array."""
    return {
        name: hashlib.sha256(full.detach().reshape(-1).contiguous().numpy().data).hexdigest()
        for name, full in arrays
    }


def report(found: dict[str, float], digests: dict[str, str] | None = None) -> None:
    """The first rank prints, in one line."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized() or dist.get_rank() == 0:
        versions = {"torch": torch.__version__}
        if "deepspeed" in sys.modules:
            versions["deepspeed"] = sys.modules["deepspeed"].__version__
        print(json.dumps({**found, "digests": digests or {}, "versions": versions}), flush=True)


def main(role: str, folder: str, more: str, digests: str = "") -> None:
    """Do what a role does, in one of its processes."""
    if role == "convert":
        convert(folder, more)
        return
    if role == "write":
        write(folder, int(more))
    else:
        {"resume": resume, "load": load}[role](folder, int(more), bool(digests))
    import torch.distributed as dist

    dist.barrier()
    os._exit(0)  # threads of gloo may abort a process that ends in the usual way


if __name__ == "__main__":
    main(*sys.argv[1:])
