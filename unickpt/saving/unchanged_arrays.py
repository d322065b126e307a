"""What a save skips because it did not change, and what the next save has to know for that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from unickpt.frameworks.leaves import adapter_of, adapters
from unickpt.frameworks.protocol import Adapter, ArraySource
from unickpt.reuse import unchanged
from unickpt.reuse.unchanged import SeenState
from unickpt.saving.plan_cache import SameTree
from unickpt.saving.task import SaveTask
from unickpt.trees import tree


def skip_unchanged(
    task: SaveTask, described: SameTree | tree.Node | tree.Leaf, before: SeenState | None
) -> SeenState:
    """Has a save skip what did not change; after it was described.

    Arguments:
        task: the save.
        described: its tree, from `PlanCache.describe`.
        before: the save to which `SaveOptions.changed` refers; None if nothing is known of it, so
            that this save skips nothing.

    Returns:
        What the next save has to know of this one.

    Raises:
        ValueError: `SaveOptions.changed` does not fit the state.
        StateChanged: it is wrong.
    """
    changed, description = task.options.changed, task.description
    assert changed is not None, "else there is nothing to skip"
    entries = description.index.arrays
    with task.failing():
        # Of a unit, the step before has the state of its last turn, not of the last call.
        words = unchanged.words_of(changed, entries, set(description.units))
        large = [
            name
            for name in words
            if description.sources[name].held_bytes >= max(1, unchanged.LEAST_BYTES)
        ]
        tracked = [name for name in large if isinstance(words[name], str)]
        tokens = _tokens(described, tracked)
        sources = _sources(task, described, large)
        arrays = {name: (entries[name], sources[name]) for name in large}
        skipped, samples = unchanged.find_unchanged(words, arrays, tokens, before)
    task.description = replace(description, unchanged=skipped)
    state = SeenState(task.location.url, task.attempt, tokens, samples)
    return state if before is None else replace(state, turns=before.turns)


def _tokens(described: SameTree | tree.Node | tree.Leaf, names: list[str]) -> Mapping[str, object]:
    """The tokens of arrays, by name."""
    if not names:
        return {}
    values = (
        described.arrays()
        if isinstance(described, SameTree)
        else {leaf.name: leaf.value for leaf in tree.leaves(described)}
    )
    among, by_adapter = adapters(), dict[int, tuple[Adapter, list[str]]]()
    for name in names:
        adapter = adapter_of(values[name], among)
        assert adapter is not None, "it has described the array"
        by_adapter.setdefault(id(adapter), (adapter, []))[1].append(name)
    tokens = dict[str, object]()
    for adapter, together in by_adapter.values():
        of_them = adapter.tokens([values[name] for name in together])
        tokens |= zip(together, of_them, strict=True)
    return tokens


def _sources(
    task: SaveTask, described: SameTree | tree.Node | tree.Leaf, names: list[str]
) -> Mapping[str, ArraySource]:
    """The arrays as they are now."""
    if isinstance(described, SameTree):
        return described.sources(names)
    return {name: task.description.sources[name] for name in names}
