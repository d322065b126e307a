"""A job of DeepSpeed: writes `tests/fixtures/foreign/ds-losses`, and resumes from an export.

    cd tests/support; PY=...          # a Python that has DeepSpeed
    OMP_NUM_THREADS=1 $PY -m torch.distributed.run --standalone --nproc-per-node 4 \\
        deepspeed_job.py train ../fixtures/foreign/ds-losses 0

`train FOLDER SEED` trains 7 steps with ZeRO 3. After the third it saves and makes the universal
checkpoint of that: `ckpt/{global_step3,global_step3_universal}`; `losses.json` has all losses.
`resume FOLDER` loads the universal checkpoint `FOLDER/global_step3_universal` on any number of
ranks, and trains the last 4 steps; the first rank prints `losses [...]`.
Imports nothing of unickpt, which need not be installed.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

VOCABULARY, WIDTH, HIDDEN = 16, 8, 24
TAG = "global_step3"


def net(seed: int) -> Any:
    """A model whose extents a mesh of 2x4 devices divides."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(VOCABULARY, WIDTH)
            self.up = nn.Linear(WIDTH, HIDDEN)
            self.norm = nn.LayerNorm(HIDDEN)
            self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Any) -> Any:
            x = self.down(nn.functional.gelu(self.norm(self.up(self.embed(tokens)))))
            return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())

    torch.manual_seed(seed)
    return Net()


def optimizer(model: Any) -> Any:
    """AdamW with one group: of several, DeepSpeed's universal load uses the settings of one."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def batches() -> list[Any]:
    """7 steps of 8 texts each, which the ranks share."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [torch.randint(VOCABULARY, (8, 5), generator=generator) for _ in range(7)]


def engine_of(seed: int, **more: Any) -> Any:
    import deepspeed

    model = net(seed)
    config = {
        "train_batch_size": 8,
        "zero_optimization": {"stage": 3, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        "steps_per_print": 10**9,
        **more,
    }
    return deepspeed.initialize(model=model, optimizer=optimizer(model), config=config)[0]


def train(engine: Any, every: list[Any]) -> list[float]:
    """Trains; the mean losses of the ranks."""
    import torch.distributed as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    losses = []
    for batch in every:
        loss = engine(batch.chunk(world)[rank])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(float(mean / world))
    return losses


def write(folder: Path, seed: int) -> None:
    import torch.distributed as dist
    from deepspeed.checkpoint.ds_to_universal import main

    engine = engine_of(seed)
    losses = train(engine, batches()[:3])
    engine.save_checkpoint(str(folder / "ckpt"), tag=TAG)
    dist.barrier()
    losses += train(engine, batches()[3:])
    if dist.get_rank() == 0:
        (folder / "losses.json").write_text(json.dumps(losses))
        main(
            SimpleNamespace(
                input_folder=str(folder / "ckpt" / TAG),
                output_folder=str(folder / "ckpt" / f"{TAG}_universal"),
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    dist.barrier()


def resume(folder: Path) -> None:
    import torch.distributed as dist

    engine = engine_of(99, checkpoint={"load_universal": True})
    engine.load_checkpoint(str(folder), tag=f"{TAG}_universal")
    losses = train(engine, batches()[3:])
    if dist.get_rank() == 0:
        print("losses", json.dumps(losses), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for fact in ("RANK", "WORLD_SIZE"):  # without those of the node, DeepSpeed asks MPI, or waits
        os.environ.setdefault(f"LOCAL_{fact}", os.environ[fact])
    import torch

    torch.set_num_threads(1)
    role, where, *rest = sys.argv[1:]
    if role == "train":
        write(Path(where), int(rest[0]))
    else:
        resume(Path(where))
    torch.distributed.barrier()
    os._exit(0)  # threads of gloo may abort a process that ends in the usual way
