"""Checkpoints of Keras 3 models, by a callback or by functions; backends JAX and torch.

    from unickpt.integrations.keras import UnickptCheckpoint

    model.fit(x, y, epochs=9, callbacks=[UnickptCheckpoint("runs/a", resume=True)])

Sharded variables are written by the devices that hold them, and loaded onto any
`keras.distribution`. docs/integrations/keras.md lists the differences from `OrbaxCheckpoint`.
"""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Literal

from keras.src.callbacks.monitor_callback import MonitorCallback

import unickpt
from unickpt import Checkpoint, Checkpointer, LoadOptions, PerProcess, Rules, SaveOptions
from unickpt.errors import CheckpointNotFound, LoadMismatch
from unickpt.extend import (
    PathLike,
    Source,
    absolute_path,
    job_group,
    reading_checkpoint,
    resolve_path,
)
from unickpt.integrations.keras import models, orbax_steps
from unickpt.integrations.keras.resuming import FitPosition, ResumedFit, nothing, shared
from unickpt.integrations.keras.state import KerasState, random_state
from unickpt.types import LoadReport, SaveReport

__all__ = ["UnickptCheckpoint", "load", "load_model", "save"]

_log = logging.getLogger("unickpt")


def save(
    path: PathLike,
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
    noted = models.variables(model) | ({} if weights_only else models.config(model))
    return unickpt.save(path, tree, overwrite=overwrite, metadata=noted, options=options)


def load_model(
    path: Source,
    custom_objects: Mapping[str, Any] | None = None,
    *,
    safe_mode: bool = True,
    options: LoadOptions | None = None,
) -> Any:
    """A model with its variables and, if it was compiled, its optimizer, from a checkpoint alone,
    as `keras.saving.load_model`.

    Arguments:
        path: as for `load`; or a directory of steps, whose newest is loaded.
        custom_objects: classes by their registered names.
        safe_mode: refuse objects that would run code from the checkpoint, such as `Lambda` layers.
        options: see `LoadOptions`.

    Raises:
        LoadMismatch: the checkpoint has no configuration of a model.
        ValueError, TypeError: as Keras raises them, for classes that it does not know.
        UnickptError: as `unickpt.load`.
    """
    stored = models.newest(path)
    model = models.made(stored, custom_objects, safe_mode)
    only_weights = not any(name.startswith("optimizer/") for name in stored)
    only_weights |= getattr(model, "optimizer", None) is None
    load(stored, model, weights_only=only_weights, options=options)
    return model


def load(
    path: Source,
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
        path: a checkpoint, such as "runs/a/step_7", or the result of `unickpt.open`.
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

    def read(stored: Checkpoint) -> LoadReport:
        patterns = ["model/**"]
        if not weights_only:
            patterns += ["optimizer/**", *sorted(state.names("metrics") & set(stored))]
        with _explained():
            tree, report = unickpt.load(
                stored,
                state.like(),
                rules=rules,
                only=patterns,
                return_report=True,
                options=options,
            )
        state.assign(tree)
        return report

    return read(path) if isinstance(path, Checkpoint) else reading_checkpoint(path, read)


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


class UnickptCheckpoint(MonitorCallback):
    """Saves during `fit`, with the arguments of `keras.callbacks.OrbaxCheckpoint`; resumes after a
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
        initial_value_threshold: the first value must be better than this.
        max_to_keep: how many steps to keep, the newest; None keeps all.
        save_on_background: write while training continues. An error is raised by the next save or
            at the end of `fit`.
        save_weights_only: leave out the optimizer and the metrics.
        resume: when `fit` begins, load the newest step of the directory, if there is one, and
            resume after it: with the next epoch, or within an epoch. Finished batches of that epoch
            are drawn and not trained on. If there are only steps of `OrbaxCheckpoint`, the newest
            of them, with the same `save_freq`.
        options: see `SaveOptions`.

    Raises:
        ValueError: an argument is invalid.

    Example:
        >>> UnickptCheckpoint("runs/a", save_freq=100, max_to_keep=3, resume=True).max_to_keep
        3
    """

    best: Any

    def __init__(
        self,
        directory: PathLike,
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
        self.directory, self.verbose = absolute_path(directory), verbose
        self.save_best_only, self.save_weights_only = save_best_only, save_weights_only
        self.save_freq, self.max_to_keep = save_freq, max_to_keep
        self.save_on_background, self.resume, self.options = save_on_background, resume, options
        # Lets Keras call all callbacks of a batch on a thread, if none needs the batch's state.
        self.async_safe = save_freq == "epoch"
        self._checkpointer: Checkpointer | None = None
        self._resumed: ResumedFit | None = None
        self._random_at_begin: dict[str, Any] | None = None
        self._config: dict[str, Any] = {}
        self._end_skipping: Callable[[], None] = nothing
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
        location = resolve_path(self.directory)
        if location.is_local:  # exists from the start, also if nothing is good enough to be saved
            with suppress(OSError):  # the first save raises the error
                os.makedirs(str(location), exist_ok=True)
        self._checkpointer = Checkpointer(
            self.directory, keep_last=self.max_to_keep, options=self.options
        )
        self._resumed, self._end_skipping = None, nothing
        self._config = {} if self.save_weights_only else models.config(self.model)
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
        wait = not self.save_on_background
        noted = self._config | models.variables(self.model)
        self._checkpointer.save(step, tree, metadata=noted, wait=wait)
        if self.verbose and job_group().index == 0:
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
        fit = {**asdict(FitPosition(0, 0, 0, math.nan)), "random": PerProcess(redistribute=shared)}
        try:
            with _explained():
                tree = checkpointer.load({**state.like(), "fit": fit})
        except CheckpointNotFound:
            if checkpointer.latest() is not None:
                raise
            self._load_from_orbax(state)
            return
        stored = dict(tree["fit"])
        randoms = stored.pop("random").value
        position = FitPosition(**stored)
        if min(position.epoch, position.batch) < 0:
            raise LoadMismatch(f"{self.directory}: a position that cannot be: {position}")
        metrics = tree.pop("metrics")
        state.assign(tree)
        if not math.isnan(position.best):
            self.best = position.best
        self._resumed = ResumedFit(position, randoms, state, metrics)
        model._initial_epoch = position.epoch

    def _load_from_orbax(self, state: KerasState) -> None:
        """Resumes from the newest step of `OrbaxCheckpoint` in the directory, if there is one."""
        step = orbax_steps.newest(self.directory)
        if step is None:
            return
        load(step.path, self.model, rules=step.rules)
        batches = self._batches_per_epoch()
        epoch, batch = step.position(self.save_freq, batches)
        _log.warning(
            "%s: going on from a step of OrbaxCheckpoint, with epoch %d after %d batches; it has "
            "no states of random generators, so that data are shuffled in another order",
            step.path, epoch, batch,
        )  # fmt: skip
        position = FitPosition(epoch, batch, batches, math.nan)
        self._resumed = ResumedFit(position, None, state, state.tree()["metrics"])
        self.model._initial_epoch = epoch
