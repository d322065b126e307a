"""Load a Hugging Face folder on several ranks: unickpt onto FSDP2 shards, beside `from_pretrained`.

    python benchmarks/foreign_ranks.py                 # a Llama of 1 GiB, 4 ranks, 5 rounds
    python benchmarks/foreign_ranks.py --mib 256 --ranks 2

Real processes with gloo, on the CPU. With unickpt, the model is made on the meta device, sharded by
`fully_shard`, and each rank reads its own shards. `from_pretrained` maps the files on every rank,
and `fully_shard` copies the shards. A turn lasts until the last rank is done. Round 0 warms up, is
not counted, and compares all shards, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from peers import fresh_directory, machine_facts, print_facts
from rich.console import Console

import unickpt

WIDTH = 2048


def main() -> None:
    """Measure and print, or be one of the ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=1024, help="size of the model")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", default=".", help="a fresh directory is made in here, and removed")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        rank(Path(arguments.folder), arguments.rounds)
        return
    console = Console()
    with fresh_directory(arguments.dir) as directory:
        save_model(directory / "model", arguments.mib)
        run = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone",
             f"--nproc-per-node={arguments.ranks}", __file__, "--folder", str(directory / "model"),
             "--rounds", str(arguments.rounds)],
            check=True, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        found = json.loads(run.stdout.splitlines()[-1])
        print_facts(console, {**machine_facts(directory), "unickpt": unickpt.__version__,
                              **found["versions"]})  # fmt: skip
    ours, peer = found["unickpt"], found["from_pretrained"]
    ratios = [b / a for a, b in zip(ours, peer, strict=True)]
    console.print(
        f"{found['mib']} MiB on {arguments.ranks} ranks: from_pretrained "
        f"{statistics.median(peer):.2f} s, unickpt {statistics.median(ours):.2f} s; "
        f"{statistics.median(ratios):.1f} times as fast ({min(ratios):.1f} to {max(ratios):.1f})"
    )


def save_model(folder: Path, mib: int) -> None:
    """A Llama of random float32 weights, in files of 200 MB."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    layer = 4 * WIDTH * WIDTH + 3 * WIDTH * 4 * WIDTH
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=16, vocab_size=8192,
        num_hidden_layers=max(1, ((mib << 18) - 2 * 8192 * WIDTH) // layer),
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200MB")


def rank(folder: Path, rounds: int) -> None:
    """One of the processes; the first prints the seconds of all turns."""
    import torch
    import torch.distributed as dist
    import transformers

    dist.init_process_group("gloo")
    transformers.utils.logging.disable_progress_bar()
    seconds: dict[str, list[float]] = {"unickpt": [], "from_pretrained": []}
    loads = {"unickpt": load_shards, "from_pretrained": load_pretrained}
    order = random.Random(0)
    for number in range(rounds + 1):
        loaded = {}
        for name in order.sample(sorted(loads), len(loads)):
            gc.collect()  # FSDP's modules refer to themselves: else a later turn frees this one's
            dist.barrier()
            start = time.perf_counter()
            loaded[name] = loads[name](folder)
            dist.barrier()
            if number:
                seconds[name].append(time.perf_counter() - start)
                loaded.clear()
        if number == 0:
            check_equal(loaded["unickpt"], loaded["from_pretrained"])
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) >> 20
        found = {"torch": torch.__version__, "transformers": transformers.__version__}
        print(json.dumps({**seconds, "mib": size, "versions": found}))
    loaded.clear()
    gc.collect()  # frees the models first: see "terminate called" in docs/troubleshooting.md
    dist.destroy_process_group()


def load_pretrained(folder: Path) -> Any:
    """As its users load it, then sharded."""
    import torch
    from transformers import AutoModelForCausalLM

    return shard(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def load_shards(folder: Path) -> Any:
    """Each rank its shards; buffers are no part of the files, and are made by the model itself."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    shard(model).to_empty(device="cpu")
    unickpt.load(folder, dict(model.named_parameters()))
    return model


def shard(model: Any) -> Any:
    """Splits each parameter over all ranks."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def check_equal(ours: Any, theirs: Any) -> None:
    """Compare all bits of this rank's shards."""
    import torch

    for name, found in ours.named_parameters():
        if not torch.equal(found.to_local(), theirs.get_parameter(name).to_local()):
            raise SystemExit(f"{name} was loaded with other bits than from_pretrained gives")


if __name__ == "__main__":
    main()
