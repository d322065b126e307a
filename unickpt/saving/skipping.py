"""Asks what a save need not stage, once it is described (`references.ReferencePolicy.skipped`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unickpt.references.policy import DescribedSave
from unickpt.saving.plan_cache import DescribedTree
from unickpt.saving.task import SaveTask


def skip(task: SaveTask, described: DescribedTree, before: Any) -> Any:
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
    skipped, skip_state = task.options.references.skipped(
        DescribedSave(
            task.location.url,
            task.attempt,
            description.index.arrays,
            description.sources,
            description.units.keys(),
            described.arrays,
            described.current,
        ),
        before,
    )
    task.description = replace(description, skipped=skipped)
    return skip_state
