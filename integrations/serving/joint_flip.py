"""All ranks of an engine make a version live, or none does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from unickpt import UnickptError
from unickpt.errors import UnsupportedFormat
from unickpt.extend import first_few
from unickpt.integrations.serving.recorder import LoadRecorder, fragments_of
from unickpt.plugins.weights import Follower

copies_of_model: WeakKeyDictionary[Any, LoadRecorder] = WeakKeyDictionary()
"""What was copied into the parameters of each model that follows versions."""


def live_tree(model: torch.nn.Module, engine: str, start: str) -> dict[str, Any]:
    """The live parameters of a model, by the names in the checkpoint that was loaded.

    Arguments:
        model: of vLLM or SGLang.
        engine: its name, for errors.
        start: how to start it so that unickpt loads the model.

    Raises:
        UnsupportedFormat: the engine loaded them otherwise, computed some, or repacked them.
    """
    recorder = copies_of_model.get(model)
    if recorder is None:
        raise UnsupportedFormat(f"this {type(model).__name__} was not loaded by unickpt; {start}")
    arrays = [*model.parameters(), *model.buffers()]
    live = {array.untyped_storage().data_ptr() for array in arrays}
    changed = {c.name for c in recorder.copies if c.tensor.untyped_storage().data_ptr() not in live}
    if changed | recorder.computed:
        raise UnsupportedFormat(
            f"{engine} repacks or computes {first_few(sorted(changed | recorder.computed))}, as "
            "with quantization. Only weights that stay as they were loaded can be followed"
        )
    trees = fragments_of(recorder.copies)
    if len(trees) > 1:
        raise UnsupportedFormat(
            f"{engine} copies {first_few(sorted(trees[1]))} to several places; that is not "
            "supported"
        )
    return trees[0]


def make_live(follower: Follower, version: int, group: Any) -> Exception | None:
    """Makes a version live on all ranks, or on none; all call it.

    Arguments:
        follower: of this rank.
        version: that exists.
        group: of all ranks, by vLLM's or SGLang's GroupCoordinator.

    Returns:
        The error of this rank, or that another one had; the old version is live then.
    """
    before, answers = follower.version, list[list[str]]()

    @contextmanager
    def pause() -> Iterator[None]:
        answers.append(_errors_of_all(group, None))
        if answers[0]:
            raise UnickptError(f"{answers[0][0]}, on another rank; version {before} stays live")
        yield

    try:
        follower.rollback(version, pause=pause)
    except Exception as error:
        if not answers or not answers[0]:  # the others wait for this rank
            _errors_of_all(group, error)
        return error
    errors = _errors_of_all(group, None)
    if not errors:
        return None
    if before is None:
        return UnickptError(
            f"{errors[0]}, on another rank while weights were changed, and no version was live "
            "before: load the model again"
        )
    follower.rollback(before)
    return UnickptError(
        f"{errors[0]}, on another rank while weights were changed; version {before} is live again"
    )


def _errors_of_all(group: Any, error: Exception | None) -> list[str]:
    """The errors of all ranks of the engine; all call it."""
    errors: list[str | None] = [None] * group.world_size
    message = None if error is None else str(error)
    if group.world_size > 1:
        dist.all_gather_object(errors, message, group=group.cpu_group)
    return [text for text in errors if text is not None]
