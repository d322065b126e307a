"""Asks what a save need not stage, once it is described (`references.ReferencePolicy.skipped`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unickpt.frameworks.protocol import ArraySource
from unickpt.references.policy import DescribedSave
from unickpt.saving.plan_cache import SameTree
from unickpt.saving.task import SaveTask
from unickpt.trees import tree


def skip(task: SaveTask, described: SameTree | tree.Node | tree.Leaf, before: Any) -> Any:
    """Has a save skip what is known to be as in its base.

    Arguments:
        task: the save.
        described: its tree, from `PlanCache.describe`.
        before: what this function returned for the save that is the base; None if nothing is known
            of it, so that this save skips nothing.

    Returns:
        What the next save has to know of this one.

    Raises:
        ValueError, StateChanged: see `ReferencePolicy.skipped`.
    """
    description = task.description

    def arrays() -> Mapping[str, Any]:
        if isinstance(described, SameTree):
            return described.arrays()
        return {leaf.name: leaf.value for leaf in tree.leaves(described)}

    def current(names: Sequence[str]) -> Mapping[str, ArraySource]:
        if isinstance(described, SameTree):
            return described.sources(names)
        return {name: description.sources[name] for name in names}

    skipped, skip_state = task.options.references.skipped(
        DescribedSave(
            task.location.url,
            task.attempt,
            description.index.arrays,
            description.sources,
            description.units.keys(),
            arrays,
            current,
        ),
        before,
    )
    task.description = replace(description, skipped=skipped)
    return skip_state
