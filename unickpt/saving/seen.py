"""Saves of a state of which it is known what did not change since the save before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unickpt.frameworks.leaves import adapter_of, adapters, expand, leaf_test
from unickpt.reuse.partial_save import PartialSave
from unickpt.reuse.unchanged import SeenState, unchanged
from unickpt.saving.task import SaveTask
from unickpt.storage import paths
from unickpt.trees import tree


def describe(
    task: SaveTask,
    root: Any,
    metadata: Mapping[str, Any] | None,
    partial: PartialSave | None,
    base: SeenState | None,
) -> Mapping[str, object]:
    """Describes what a save has to save, as `SaveTask.describe`, and what need not be looked at.

    Arguments:
        task: the save.
        root, metadata, partial: as for `SaveTask.describe`.
        base: what is known of its base; None if nothing is as it was there.

    Returns:
        The tokens of its arrays, see `SeenState`.

    Raises:
        ValueError: `SaveOptions.changed` does not fit the state.
    """
    among, changed = adapters(), task.options.changed
    assert changed is not None, "else nothing is known"
    with task.failing():
        node = tree.flatten(root, leaf_test(among), lambda obj, name: expand(obj, name, among))
    task.describe(node, metadata, partial)
    with task.failing():
        arrays, tokens = task.description.index.arrays, dict[str, object]()
        for leaf in tree.leaves(node):
            if leaf.name in arrays and (adapter := adapter_of(leaf.value, among)) is not None:
                tokens[leaf.name] = adapter.token(leaf.value)
        # Of an expert, the step before has the state of its last turn, not of the last call.
        apart = set(task.description.experts)
        found = unchanged(changed, arrays, tokens, base, apart)
        if base is not None:
            task.description = replace(task.description, unchanged=found)
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
