"""A `fit` that resumes at a checkpoint: its position, and the skipped batches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.integrations.keras.state import KerasState, random_state, set_random_state
from unickpt.types import PerProcessValues


@dataclass(frozen=True)
class FitPosition:
    """How far a `fit` has come.

    Arguments:
        epoch: the epoch to resume with, from 0.
        batch: how many of its batches are done.
        batches: how many it has; -1 if unknown.
        best: the best value of the monitored metric; NaN if there is none.
    """

    epoch: int
    batch: int
    batches: int
    best: float


@dataclass(frozen=True)
class ResumedFit:
    """A `fit` that resumes: the work to do when its first epoch begins.

    Arguments:
        position: where it resumes.
        randoms: the states of random generators at the save ("now") and, within an epoch, at the
            begin of that epoch ("begin"); None if they do not fit these processes.
        state: of the model.
        metrics: the values of its metrics at the save.
    """

    position: FitPosition
    randoms: dict[str, Any] | None
    state: KerasState
    metrics: dict[str, Any]

    def begin(self, model: Any, epoch: int, batches: int) -> Callable[[], None]:
        """Makes the epoch begin where the save was; returns a function that ends the skipping.

        Raises:
            ValueError: `fit` is called with other arguments, so that it cannot resume there.
        """
        done = self.position.batch
        if epoch != self.position.epoch:
            raise ValueError(
                f"fit begins with epoch {epoch}, and the checkpoint with epoch "
                f"{self.position.epoch}; leave out initial_epoch="
            )
        now = self.randoms["now"] if self.randoms else None
        if not done:
            if now:
                set_random_state(now)
            return nothing
        if -1 not in (batches, self.position.batches) and batches != self.position.batches:
            raise ValueError(
                f"the checkpoint is after batch {done} of {self.position.batches} of an epoch, "
                f"which has {batches} now; fit with the same batches, or load an older step of "
                "whole epochs"
            )
        if done % model.steps_per_execution and done != batches:
            raise ValueError(
                f"the checkpoint is after batch {done} of an epoch, within one of the executions "
                f"of steps_per_execution={model.steps_per_execution} batches"
            )
        if self.randoms:
            set_random_state(self.randoms["begin"])
        self.state.assign({"metrics": self.metrics})
        return _skip(model, done, now)

    def at_begin(self) -> dict[str, Any]:
        """The states of random generators when the epoch began; called after `begin`."""
        begin: dict[str, Any] | None = self.randoms and self.randoms["begin"]
        return begin or random_state()


def nothing() -> None:
    pass


def _skip(model: Any, batches: int, randoms: dict[str, Any] | None) -> Callable[[], None]:
    """Lets the epoch that begins draw some batches without training on them.

    `fit` calls `train_function` for each execution: with JAX it draws the batches itself, with
    torch they are given.

    Arguments:
        batches: how many.
        randoms: the states of random generators after them.

    Returns:
        A function that ends the skipping, if it has not ended.
    """
    train, logs = model.train_function, model.get_metrics_result()
    fit = getattr(model, "history", None)  # another one in each call of `fit`
    done = 0

    def end() -> None:
        if model.train_function is skip:
            model.train_function = train
            if randoms:
                set_random_state(randoms)

    def skip(*arguments: Any) -> Any:
        nonlocal done
        if getattr(model, "history", None) is not fit:  # the one that resumed has failed
            model.train_function = train
            return train(*arguments)
        with_state = len(arguments) == 2
        done += _draw(arguments[1], model.steps_per_execution) if with_state else len(arguments[0])
        if done >= batches:
            end()
        return (logs, arguments[0]) if with_state else logs

    model.train_function = skip
    return end


def _draw(iterator: Any, most: int) -> int:
    """Draws batches, at least one."""
    next(iterator)
    nothing = object()
    return 1 + sum(next(iterator, nothing) is not nothing for _ in range(most - 1))


def shared(saved: Sequence[Any], index: int, count: int) -> Any:
    """The random states of another number of processes: theirs if all had the same."""
    if PerProcessValues(tuple(saved)).all_equal:
        return saved[0]
    warnings.warn(
        f"the random generators of the {len(saved)} processes that saved differ, so they are not "
        f"restored on {count}: shuffling and augmentation continue differently",
        stacklevel=2,
    )
    return None
