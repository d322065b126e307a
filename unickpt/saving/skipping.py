"""Determines what a described save need not stage (`references.ReferencePolicy.skipped`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from unickpt.references.policy import DescribedSave
from unickpt.saving.plan_cache import DescribedTree
from unickpt.saving.task import SaveTask


def skip(task: SaveTask, described: DescribedTree, before: Any) -> Any:
    """Has a save skip arrays that are known to equal those of its base.

    Arguments:
        task: the save.
        described: its tree, from `PlanCache.describe`.
        before: the result of this function for the base's save; None if there is none, so that
            this save skips nothing.

    Returns:
        The facts that the next save needs about this one.

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
