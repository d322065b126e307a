"""Lightning's DeepSpeedStrategy: its engine saves and loads as with `use_unickpt`. The rest of
Lightning's checkpoint lies next to its state, below one name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import unickpt
from unickpt import LoadOptions
from unickpt.integrations.engines import EngineTree, check_same_kind, load_into, metadata_of
from unickpt.integrations.lightning.values import read, stored_form

LATEST = "latest"
"""A file in the folder of a checkpoint that DeepSpeed itself wrote."""
_REST = "lightning"
_OF_ENGINE = ("state_dict", "optimizer_states")


def engine_of(strategy: Any) -> Any:
    """The engine of a strategy; None of one without DeepSpeed."""
    return getattr(strategy, "deepspeed_engine", None)


def with_engine(strategy: Any, checkpoint: Mapping[str, Any]) -> tuple[EngineTree, dict[str, Any]]:
    """The tree to save, and its metadata.

    Arguments:
        strategy: whose engine is saved.
        checkpoint: as Lightning's trainer makes it; of ranks other than 0 nothing is saved of it.
    """
    excludes = bool(strategy.exclude_frozen_parameters)
    other_values = {key: x for key, x in checkpoint.items() if key not in _OF_ENGINE}

    def form() -> dict[str, Any]:
        return stored_form({_REST: other_values}) if strategy.is_global_zero else {}

    engine = engine_of(strategy)
    tree = EngineTree(engine, form, exclude_frozen_parameters=excludes)
    return tree, metadata_of(engine, excludes)


def load(strategy: Any, path: str, fits: bool, options: LoadOptions | None) -> dict[str, Any]:
    """Loads into the engine, and returns the rest of the checkpoint.

    Arguments:
        strategy: whose engine is loaded into.
        path: of a checkpoint of ours.
        fits: whether training resumes, which needs more than the weights.
        options: how to load.
    """

    stored = unickpt.open(path)  # once: the checkpoint may be replaced meanwhile
    check_same_kind(path, stored.metadata, has_engine=True)
    other_values: dict[str, Any] = read(stored, only={_REST}, options=options)
    strict = strategy.lightning_module.strict_loading
    engine = engine_of(strategy)
    # Lightning has the schedule itself.
    load_into(engine, stored, strict=strict, optimizer=fits, scheduler=False, values=fits)
    return dict(other_values.get(_REST, {}))
