"""Writes Orbax checkpoints: the folder of a tree, or a step as Orbax's managers save it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from unickpt.backends.orbax import step_writer
from unickpt.errors import UnsupportedLeaf
from unickpt.format.index import Index
from unickpt.format.writer import Plan
from unickpt.trees import tree, tree_json

CHUNK_BYTES = 64 << 20
_LAYOUTS = ("", "tree", "step")


@dataclass(frozen=True)
class OrbaxWriter:
    """A folder that `StandardCheckpointer` restores, or a step of a `CheckpointManager`.

    Arguments:
        layout: "tree", the default, for the folder of a tree; "step" for that of a step, which has
            the tree as its item `default`.

    Raises:
        ValueError: the layout is none of these.
    """

    layout: str = ""
    suffixes: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if self.layout not in _LAYOUTS:
            raise ValueError(f"layout={self.layout!r} must be 'tree' or 'step'")

    def plan(self, index: Index, most_bytes: int, file: str | None) -> Plan:
        node = tree.unwrapped(tree_json.from_json(index.tree))
        if isinstance(node, tree.Leaf):
            raise UnsupportedLeaf(
                "Orbax stores trees, and this checkpoint is a single leaf; put it below a name by "
                "a rule"
            )
        chunk_bytes = min(CHUNK_BYTES, most_bytes)
        is_step = self.layout == "step"
        return step_writer.plan(index, node, is_step=is_step, chunk_bytes=chunk_bytes)
