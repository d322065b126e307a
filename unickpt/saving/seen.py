"""Saves of a state of which it is known what did not change since the save before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unickpt.frameworks.leaves import adapter_of, adapters
from unickpt.reuse.unchanged import SeenState, unchanged
from unickpt.saving.plan_cache import SameTree
from unickpt.saving.task import SaveTask
from unickpt.storage import paths
from unickpt.trees import tree


def tell(
    task: SaveTask, described: SameTree | tree.Node | tree.Leaf, base: SeenState | None
) -> Mapping[str, object]:
    """Says of a save what need not be looked at; after it was described.

    Arguments:
        task: the save.
        described: its tree, from `PlanCache.describe`.
        base: what is known of its base; None if nothing is as it was there.

    Returns:
        The tokens of its arrays, see `SeenState`.

    Raises:
        ValueError: `SaveOptions.changed` does not fit the state.
    """
    changed, description, among = task.options.changed, task.description, adapters()
    assert changed is not None, "else nothing is known"
    values = (
        described.arrays()
        if isinstance(described, SameTree)
        else {leaf.name: leaf.value for leaf in tree.leaves(described)}
    )

    def token(name: str) -> object:
        adapter = adapter_of(values[name], among)
        return None if adapter is None else adapter.token(values[name])

    with task.failing():
        # Of an expert, the step before has the state of its last turn, not of the last call.
        apart = set(description.experts)
        found, tokens = unchanged(changed, description.index.arrays, token, base, apart)
    if base is not None:
        task.description = replace(description, unchanged=found)
    return tokens


def base_of(
    given: paths.PathLike | None,
    found: paths.PathLike | None,
    before: tuple[str, str, Mapping[str, object]] | None,
    *,
    in_flight: bool,
    failed: bool,
) -> SeenState | None:
    """What is known of the base of a save; None if it is another state than that since which the
    program knows what changed.

    Arguments:
        given: `SaveOptions.base`.
        found: the newest checkpoint, as far as the saves have ended.
        before: the save before, as of `SeenState`.
        in_flight: whether that has not ended.
        failed: whether it has failed, or a call after it.
    """
    last = None if before is None else SeenState(*before)
    if given is not None:
        url = paths.resolve(given).url
        known = last is not None and last.url == url and not failed
        return last if known else SeenState(url, "")
    if failed:
        return None
    if last is not None and in_flight:
        return last
    if found is None:
        return None
    there = paths.resolve(found)
    url = there.url
    if last is None:  # the program goes on from it, if it is not only in the other tier
        return None if not there.is_remote and not there.exists() else SeenState(url, "")
    return last if last.url == url else None
