"""Checkpoints that DeepSpeed wrote, and the model of most of them."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

import unickpt
from support import TESTS
from unickpt.arrays import dtypes

FOLDER = Path(TESTS) / "fixtures" / "foreign"
PACKED = FOLDER / "deepspeed.tar.xz"
EXPERTS = FOLDER / "deepspeed-experts.tar.xz"


def unpack(folder: Path, *archives: Path) -> Path:
    """Unpacks cases, by default all: `<case>/{ckpt,expected.json,expected.npz}`."""
    for archive in archives or (PACKED, EXPERTS):
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
    return folder


def expected(case: Path) -> Any:
    return json.loads((case / "expected.json").read_text())


def arrays(case: Path) -> dict[str, np.ndarray]:
    """What DeepSpeed says that the arrays hold, in their dtypes."""
    with np.load(case / "expected.npz") as found:
        told = expected(case)["arrays"]
        return {name: found[name].view(dtypes.from_name(told[name]["dtype"])) for name in told}


def differences(case: Path, found: unickpt.Checkpoint) -> list[str]:
    """The arrays that are not, bit for bit, what DeepSpeed says; and missing ones."""
    bad = []
    with np.load(case / "expected.npz") as arrays:
        for name, facts in expected(case)["arrays"].items():
            if name not in found:
                bad.append(f"{name} is missing")
                continue
            stored = found[name]
            same = (str(stored.dtype), list(stored.shape)) == (facts["dtype"], facts["shape"])
            if not same or np.asarray(stored[...]).tobytes() != arrays[name].tobytes():
                bad.append(name)
    return bad


def net(seed: int = 9) -> Any:
    """The model of the cases `z*` and `uc-z*`, with other weights."""
    import torch
    from torch import nn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(13, 6)
            self.up = nn.Linear(6, 11)
            self.norm = nn.LayerNorm(11)
            self.down = nn.Linear(11, 6, bias=False)
            self.head = nn.Linear(6, 13, bias=False)
            self.head.weight = self.embed.weight
            self.temp = nn.Parameter(torch.ones(1))
            self.frozen = nn.Parameter(torch.randn(5, 3), requires_grad=False)
            self.register_buffer("scale", torch.zeros(7))
            self.register_buffer("gone", torch.ones(3), persistent=False)

        def forward(self, tokens: Any) -> Any:
            x = self.down(nn.functional.gelu(self.norm(self.up(self.embed(tokens)))))
            logits = (self.head(x) * self.temp).flatten(0, 1).float()
            return nn.functional.cross_entropy(logits, tokens.flatten())

    torch.manual_seed(seed)
    return Net()


def optimizer(model: Any) -> Any:
    """The optimizer of these cases."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def batches() -> list[Any]:
    """What the case `z3-losses` is trained on: 7 steps, each of 2 texts on each of 4 ranks."""
    import torch

    generator = torch.Generator().manual_seed(7)
    return [torch.randint(13, (8, 5), generator=generator) for _ in range(7)]
