"""A DeepSpeed engine that a trainer makes and drives: one checkpoint has the engine's state and the
trainer's own. Nothing of DeepSpeed's integration is imported before there is an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt import Checkpoint
from unickpt.errors import LoadMismatch
from unickpt.extend import SavedOnly

ENGINE = "deepspeed"
"""The entry in the metadata of a checkpoint with an engine's state."""


@dataclass(frozen=True, eq=False)
class EngineTree(SavedOnly):
    """The state that a trainer saves: that of its engine, under the names of `use_unickpt`, and its
    own. Made within the save, so that it fails on all ranks if it fails on one.

    Arguments:
        engine: the engine.
        extra_state: returns the trainer's own state; its names must not be those of an engine's
            state.
        exclude_frozen_parameters: whether to leave out parameters that are not trained.
    """

    engine: Any
    extra_state: Callable[[], Mapping[str, Any]]
    exclude_frozen_parameters: bool = False

    def state_dict(self) -> dict[str, Any]:
        from unickpt.integrations.deepspeed import checkpoints_of

        excludes = self.exclude_frozen_parameters
        state = checkpoints_of(self.engine).tree(exclude_frozen_parameters=excludes)
        return {**state, **self.extra_state()}


def metadata_of(engine: Any, excludes_frozen: bool) -> dict[str, Any]:
    """The metadata of a checkpoint with an engine's state."""
    from unickpt.integrations.deepspeed import checkpoints_of

    return checkpoints_of(engine).metadata(excludes_frozen)


def load_into(
    engine: Any,
    stored: Checkpoint,
    *,
    strict: bool = True,
    optimizer: bool = True,
    scheduler: bool = True,
    values: bool = True,
) -> dict[str, Any]:
    """Loads into an engine, in place; all ranks call this. The rest of the arguments are those of
    `Wanted`.

    Arguments:
        engine: the engine.
        stored: opened by the caller, who reads the trainer's own state from it: the checkpoint at
            its path may be replaced meanwhile.
    """
    from unickpt.integrations.deepspeed import checkpoints_of
    from unickpt.integrations.deepspeed.loading import Wanted

    request = Wanted(strict, optimizer, scheduler, values)
    return checkpoints_of(engine).load(stored.url, request, stored)


def check_same_kind(path: object, metadata: Mapping[str, Any], has_engine: bool) -> None:
    """Checks that both the saving and the loading trainer have an engine, or neither: their states
    have different names.

    Raises:
        LoadMismatch: it is not so.
    """
    if (ENGINE in metadata) == has_engine:
        return
    if has_engine:
        raise LoadMismatch(
            f"{path} was saved without DeepSpeed, and this job trains with it: resume without it, "
            "or load the weights into the model before the training begins, with unickpt.load"
        )
    raise LoadMismatch(
        f"{path} was saved with DeepSpeed, and this job trains without it: resume with it, or load "
        'the weights into the model before the training begins: unickpt.load(path, {"model": '
        'model}, rules=unickpt.Rules.preset("deepspeed"), unexpected="skip")'
    )
