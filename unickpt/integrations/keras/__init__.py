"""Checkpoints of Keras 3 models, by a callback or by functions; backends JAX and torch.

    from unickpt.integrations.keras import UnickptCheckpoint

    model.fit(x, y, epochs=9, callbacks=[UnickptCheckpoint("runs/a", resume=True)])

Sharded variables are written by the devices that hold them, and loaded onto any
`keras.distribution`. docs/integrations/keras.md says what differs from `OrbaxCheckpoint`.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from keras.src.callbacks.monitor_callback import MonitorCallback

from unickpt.errors import CheckpointNotFound, LoadMismatch
from unickpt.frameworks.leaves import PerProcess, adapters
from unickpt.frameworks.process_group import current_group
from unickpt.integrations.keras import orbax_steps
from unickpt.integrations.keras.state import KerasState, random_state, set_random_state
from unickpt.loading import loader
from unickpt.loading.report import LoadReport
from unickpt.reading import checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.rules.rule_set import Rules
from unickpt.runs.checkpointer import Checkpointer
from unickpt.saving import saver
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.storage import paths

__all__ = ["UnickptCheckpoint", "load", "save"]

_log = logging.getLogger("unickpt")


def save(
    path: paths.PathLike,
    model: Any,
    *,
    weights_only: bool = False,
    overwrite: bool = False,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves a model: its variables (also those of seed generators), optimizer and metrics.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        model: a built Keras model.
        weights_only: leave out the optimizer and the metrics.
        overwrite: replace a checkpoint that exists, atomically.
        options: see `SaveOptions`.

    Raises:
        ValueError: the model is not built, or the backend is not supported.
        UnickptError: as `unickpt.save`.
    """
    tree = KerasState(model, weights_only).tree()
    return saver.save(path, tree, overwrite=overwrite, options=options)


def load(
    path: checkpoint.Source,
    model: Any,
    *,
    weights_only: bool = False,
    rules: Rules | None = None,
    options: LoadOptions | None = None,
) -> LoadReport:
    """Loads a model that any backend saved, by `save` or by the callback.

    All its variables must be stored, under their paths and in their shapes and dtypes, and all
    stored ones must be in the model. Only metrics may be missing on either side: Keras makes them
    with the first batch, and resets them at every epoch.

    Arguments:
        path: a checkpoint, such as "runs/a/step_7", or what `unickpt.open` returned.
        model: a built Keras model; compiled, unless `weights_only`. If loading fails, its variables
            are as before with JAX, and may be changed with torch.
        weights_only: leave the optimizer and the metrics as they are.
        rules: if names or axes differ.
        options: see `LoadOptions`.

    Raises:
        ValueError: the model is not built or not compiled, or the backend is not supported.
        UnickptError: as `unickpt.load`.
    """
    optimizer = getattr(model, "optimizer", None)
    if not weights_only:
        if optimizer is None:
            raise ValueError(
                f"the model {model.name!r} has no optimizer: compile it first, or pass "
                "weights_only=True"
            )
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
    state = KerasState(model, weights_only)

    def read(stored: checkpoint.Checkpoint) -> LoadReport:
        wanted = ["model/**"]
        if not weights_only:
            wanted += ["optimizer/**", *sorted(state.names("metrics") & set(stored))]
        with _explained():
            found, report = loader.load(
                stored, state.like(), rules=rules, only=wanted, return_report=True, options=options
            )
        state.assign(found)
        return report

    return read(path) if isinstance(path, checkpoint.Checkpoint) else checkpoint.reading(path, read)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except LoadMismatch as error:
        error.add_note(
            "Keras counts the names of layers and optimizers within a process (dense, dense_1): "
            "call keras.utils.clear_session() before the model is built, or give them names"
        )
        raise


@dataclass(frozen=True)
class FitPosition:
    """How far a `fit` has come.

    Arguments:
        epoch: the epoch to go on with, from 0.
        batch: how many of its batches are done.
        batches: how many it has; -1 if unknown.
        best: the best value of what is monitored; NaN if there is none.
    """

    epoch: int
    batch: int
    batches: int
    best: float


class UnickptCheckpoint(MonitorCallback):
    """Saves during `fit`, with the arguments of `keras.callbacks.OrbaxCheckpoint`; goes on after a
    stop.

    Steps are numbered as there: by the epoch, from 0, or with an integer `save_freq` by all batches
    since the optimizer began. They are those of a `Checkpointer`: `step_<n>` below the directory.

    Arguments:
        directory: a local path or a URL (file, memory, s3, gs).
        monitor: the name of a metric, with "val_" for that of the validation.
        verbose: 1 prints a line for each save.
        save_best_only: save only if `monitor` is better than ever before, also in earlier runs that
            this one resumes.
        mode: "min", "max" or "auto": whether small or large values are good.
        save_freq: "epoch", or a number of batches.
        initial_value_threshold: what the first value must be better than.
        max_to_keep: how many steps to keep, the newest; None keeps all.
        save_on_background: write while the training goes on. An error is raised by the next save or
            at the end of `fit`.
        save_weights_only: leave out the optimizer and the metrics.
        resume: when `fit` begins, load the newest step of the directory, if there is one, and go on
            after it: with the next epoch, or within an epoch, of which the batches that are done
            are drawn and not trained on. If there are only steps of `OrbaxCheckpoint`, the newest
            of them, with the same `save_freq`.
        options: see `SaveOptions`.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> import os
        >>> UnickptCheckpoint("runs/a", save_freq=100, max_to_keep=3, resume=True).directory
        'runs/a'
    """

    best: Any

    def __init__(
        self,
        directory: paths.PathLike,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_best_only: bool = False,
        mode: Literal["auto", "min", "max"] = "auto",
        save_freq: Literal["epoch"] | int = "epoch",
        initial_value_threshold: float | None = None,
        max_to_keep: int | None = 1,
        save_on_background: bool = True,
        save_weights_only: bool = False,
        *,
        resume: bool = False,
        options: SaveOptions | None = None,
    ) -> None:
        super().__init__(monitor, mode, initial_value_threshold)
        if save_freq != "epoch" and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f"save_freq={save_freq!r} must be 'epoch' or a number of batches")
        if max_to_keep is not None and not (isinstance(max_to_keep, int) and max_to_keep > 0):
            raise ValueError(f"max_to_keep={max_to_keep!r} must be None or a number of steps")
        if resume and save_weights_only:
            raise ValueError(
                "resume=True needs the optimizer, and save_weights_only=True leaves it out; use "
                "unickpt.integrations.keras.load(path, model, weights_only=True)"
            )
        self.directory, self.verbose = directory, verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.save_freq, self.max_to_keep = save_freq, max_to_keep
        self.save_on_background, self.resume, self.options = save_on_background, resume, options
        # Lets Keras call all callbacks of a batch on a thread, if none needs the batch's state.
        self.async_safe = save_freq == "epoch"
        self._checkpointer: Checkpointer | None = None
        self._resumed: _ResumedFit | None = None
        self._random_at_begin: dict[str, Any] | None = None
        self._end_skipping: Callable[[], None] = _nothing
        self._epoch = self._unsaved = self._seen = self._batches_seen = 0

    def wait_until_finished(self) -> None:
        """Waits until all saves are committed; raises their errors."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Waits as `wait_until_finished`, and lets others save into the directory.

        `fit` does this at its end. Call it after a `fit` that raised an error, before another
        callback of this process saves there.
        """
        if self._checkpointer is not None:
            closing, self._checkpointer = self._checkpointer, None
            closing.close()

    # --- called by Keras -------------------------------------------------------------------------

    def on_train_begin(self, logs: Mapping[str, Any] | None = None) -> None:
        self.close()  # the last `fit` may have failed
        self._checkpointer = Checkpointer(
            self.directory, keep_last=self.max_to_keep, options=self.options
        )
        self._resumed, self._end_skipping = None, _nothing
        if self.resume:
            self._load(self._checkpointer)
        self._unsaved = self._seen = 0
        optimizer = getattr(self.model, "optimizer", None)
        self._batches_seen = 0 if optimizer is None else int(optimizer.iterations)
        if self._checkpointer.loaded_step is not None:  # not all batches may be iterations
            self._batches_seen = max(self._batches_seen, self._checkpointer.loaded_step)

    def on_epoch_begin(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._epoch = epoch
        if self._resumed is not None:
            resumed, self._resumed = self._resumed, None
            self.model._initial_epoch = None  # for the next `fit`
            self._end_skipping = resumed.begin(self.model, epoch, self._batches_per_epoch())
            self._seen = resumed.position.batch
            self._random_at_begin = resumed.at_begin()
        else:
            self._seen = 0
            self._random_at_begin = random_state()

    def on_train_batch_end(self, batch: int, logs: Mapping[str, Any] | None = None) -> None:
        if self.save_freq == "epoch" or batch < self._seen:  # it was skipped
            return
        new = batch + 1 - self._seen
        self._seen += new
        self._unsaved += new
        self._batches_seen += new
        if self._unsaved >= self.save_freq:
            self._unsaved = 0
            if self._is_wanted(logs, f"batch {batch}"):
                self._save(self._batches_seen, self._position(self._epoch, self._seen))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        self._end_skipping()  # the last execution may have had fewer batches than the others
        if self.save_freq == "epoch" and self._is_wanted(logs, f"epoch {epoch}"):
            self._save(epoch, self._position(epoch + 1, 0))

    def on_train_end(self, logs: Mapping[str, Any] | None = None) -> None:
        if self._resumed is not None:  # all epochs were done
            self.model._initial_epoch = self._resumed = None
        self.close()

    # --- saving ----------------------------------------------------------------------------------

    def _is_wanted(self, logs: Mapping[str, Any] | None, when: str) -> bool:
        """Whether to save now: with `save_best_only`, if there is a new best value."""
        if self.monitor not in (logs or {}):
            if self.save_best_only:
                warnings.warn(
                    f"save_best_only=True, but {self.monitor!r} is not known at {when}, so nothing "
                    f"is saved; known are {sorted(logs or {})}",
                    stacklevel=2,
                )
            return not self.save_best_only
        if not self.save_best_only:
            return True
        if self.monitor_op is None:
            self._set_monitor_op()
        value = float((logs or {})[self.monitor])
        if math.isnan(value) or not self._is_improvement(value, self.best):
            return False
        self.best = value
        return True

    def _save(self, step: int, position: FitPosition) -> None:
        assert self._checkpointer is not None
        tree = KerasState(self.model, self.save_weights_only).tree()
        begin = self._random_at_begin if position.batch else None
        randoms = {"now": random_state(), "begin": begin}
        tree["fit"] = {**asdict(position), "random": PerProcess(randoms)}
        self._checkpointer.save(step, tree, wait=not self.save_on_background)
        if self.verbose and current_group(adapters()).index == 0:
            print(f"\nsaving step {step} to {self._checkpointer.path(step)}", flush=True)

    def _position(self, epoch: int, batch: int) -> FitPosition:
        best = math.nan if self.best is None else float(self.best)
        return FitPosition(epoch, batch, self._batches_per_epoch(), best)

    def _batches_per_epoch(self) -> int:
        steps = (self.params or {}).get("steps")
        return -1 if steps is None else int(steps)

    # --- resuming --------------------------------------------------------------------------------

    def _load(self, checkpointer: Checkpointer) -> None:
        model = self.model
        state = KerasState(model)
        fit = {**asdict(FitPosition(0, 0, 0, math.nan)), "random": PerProcess(redistribute=_shared)}
        try:
            with _explained():
                found = checkpointer.load({**state.like(), "fit": fit})
        except CheckpointNotFound:
            if checkpointer.latest() is not None:
                raise
            self._load_from_orbax(state)
            return
        stored = dict(found["fit"])
        randoms = stored.pop("random").value
        position = FitPosition(**stored)
        if min(position.epoch, position.batch) < 0:
            raise LoadMismatch(f"{self.directory}: a position that cannot be: {position}")
        metrics = found.pop("metrics")
        state.assign(found)
        if not math.isnan(position.best):
            self.best = position.best
        self._resumed = _ResumedFit(position, randoms, state, metrics)
        model._initial_epoch = position.epoch

    def _load_from_orbax(self, state: KerasState) -> None:
        """Goes on from the newest step of `OrbaxCheckpoint` in the directory, if there is one."""
        step = orbax_steps.newest(self.directory)
        if step is None:
            return
        load(step.path, self.model, rules=orbax_steps.rules())
        batches = self._batches_per_epoch()
        epoch, batch = step.position(self.save_freq, batches)
        _log.warning(
            "%s: going on from a step of OrbaxCheckpoint, with epoch %d after %d batches; it has "
            "no states of random generators, so that data are shuffled in another order",
            step.path, epoch, batch,
        )  # fmt: skip
        position = FitPosition(epoch, batch, batches, math.nan)
        self._resumed = _ResumedFit(position, None, state, state.tree()["metrics"])
        self.model._initial_epoch = epoch


@dataclass(frozen=True)
class _ResumedFit:
    """A `fit` that goes on: what is to do when its first epoch begins.

    Arguments:
        position: where it goes on.
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
        """Makes the epoch begin where the save was; returns what ends the skipping.

        Raises:
            ValueError: `fit` is called with other arguments, so that it cannot go on there.
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
            return _nothing
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


def _nothing() -> None:
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

    def skip(*given: Any) -> Any:
        nonlocal done
        if getattr(model, "history", None) is not fit:  # the one that resumed has failed
            model.train_function = train
            return train(*given)
        with_state = len(given) == 2
        done += _draw(given[1], model.steps_per_execution) if with_state else len(given[0])
        if done >= batches:
            end()
        return (logs, given[0]) if with_state else logs

    model.train_function = skip
    return end


def _draw(iterator: Any, most: int) -> int:
    """Draws batches, at least one."""
    next(iterator)
    nothing = object()
    return 1 + sum(next(iterator, nothing) is not nothing for _ in range(most - 1))


def _shared(saved: Sequence[Any], index: int, count: int) -> Any:
    """The random states of another number of processes: theirs if all had the same."""
    if all(_equal(one, saved[0]) for one in saved):
        return saved[0]
    warnings.warn(
        f"the random generators of the {len(saved)} processes that saved differ, so they are not "
        f"restored on {count}: shuffling and augmentation go on differently",
        stacklevel=2,
    )
    return None


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(np.array_equal(a, b)) if isinstance(a, np.ndarray) else bool(a == b)
