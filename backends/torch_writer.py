"""Writes files of torch.save, with containers, plain values and ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from unickpt.arrays.box import Box
from unickpt.foreign import torch_layout
from unickpt.foreign.flat_names import refuse
from unickpt.format.index import Index
from unickpt.format.writer import Plan, PlannedFile
from unickpt.trees import tree_json


@dataclass(frozen=True)
class TorchWriter:
    """One file that `torch.load(..., weights_only=True)` reads."""

    suffixes: ClassVar[Sequence[str]] = (".pt", ".pth", ".bin")

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        refuse("torch", torch_layout.missing_dtypes(index), {})
        leaves: dict[str, Any] = dict(index.values)
        storages: dict[str, tuple[str, Box, int]] = {}
        for number, (name, entry) in enumerate(index.arrays.items()):
            leaves[name] = torch_layout.tensor(entry, entry.shape, str(number))
            storages[str(number)] = (name, Box.whole(entry.shape), entry.nbytes)
        leaves |= {alias: leaves[name] for alias, name in index.aliases.items()}
        value = torch_layout.object_of(tree_json.from_json(index.tree), leaves.__getitem__)
        zipped = torch_layout.saved(value, storages)
        planned = PlannedFile(
            file or "checkpoint.pt", zipped.size, zipped.texts, tuple(zipped.data), zipped.ending,
            last=True,
        )  # fmt: skip
        return Plan((planned,), {n: n for n in index.entries}, {n: n for n in index.values})
