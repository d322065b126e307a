"""Writes files of torch.save."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unickpt.backends._files import torch_layout
from unickpt.backends._files.flat_names import refuse
from unickpt.extend import Index, Plan, tree_from_json


@dataclass(frozen=True)
class TorchWriter:
    """One file that `torch.load(..., weights_only=True)` reads."""

    suffixes: ClassVar[Sequence[str]] = (".pt", ".pth", ".bin", ".ckpt", ".pth.tar")

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        refuse("torch", torch_layout.missing_dtypes(index), {})
        leaves, storages = torch_layout.leaves_of(index)
        value = torch_layout.object_of(tree_from_json(index.tree), leaves.__getitem__)
        planned = torch_layout.planned_file(file or "checkpoint.pt", value, storages)
        return Plan((planned,), {n: n for n in index.entries}, {n: n for n in index.values})
