"""One save of a step: its metadata, and the work before and after it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from unickpt.errors import CheckpointExists, UnsupportedLeaf
from unickpt.features import SaveCall
from unickpt.format.index import RESERVED
from unickpt.options import SaveOptions
from unickpt.quoting import first_few
from unickpt.runs import lineage_notes
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps
from unickpt.runs.run_features import Listener, save_ended
from unickpt.runs.tier_copies import IN_ROOT, Copying
from unickpt.saving.background import SaveCallbacks
from unickpt.saving.describe import check_mapping
from unickpt.trees.tree import plain_key


class StepSave:
    """A save of a step, on one process.

    Arguments:
        steps, cleaning, copying: of the run; only process 0 cleans and copies.
        call: the arguments of the save.
        overwrite: whether it may replace a step.
        listeners: features that are notified of its end.
    """

    def __init__(
        self,
        steps: Steps,
        cleaning: Cleaning,
        copying: Copying | None,
        call: SaveCall,
        overwrite: bool,
        listeners: Sequence[Listener],
    ) -> None:
        self._steps, self._cleaning, self._copying = steps, cleaning, copying
        self._call, self._step, self._is_coordinator = call, call.step, call.is_coordinator
        # Their names exactly str; none if they are no dict, which `metadata` refuses.
        metric_items = call.metrics.items() if isinstance(call.metrics, Mapping) else ()
        self._metrics = {str(plain_key(name)): value for name, value in metric_items}
        self._overwrite, self._listeners = overwrite, listeners
        self._attempt = ""  # its name, once it is its turn
        self._lineage: lineage_notes.Lineage | None = None  # if it is to be copied

    def callbacks(self) -> SaveCallbacks:
        """The callbacks of the save."""
        ended = partial(self._steps.in_use.end, self)
        callbacks = self._begin, self._prepare, self._check, self._committed, self._failed, ended
        survives = IN_ROOT if self._copying is None else self._copying.survives_at_commit
        return SaveCallbacks(*callbacks, survives)

    def metadata(
        self, user_metadata: Mapping[str, Any] | None, features: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The metadata of the step.

        Arguments:
            user_metadata: as for `Checkpointer.save`.
            features: the features' entries.

        Raises:
            UnsupportedLeaf: it cannot be stored.
        """
        check_mapping("metadata", user_metadata)
        check_mapping("metrics", self._call.metrics)
        if RESERVED in (user_metadata or {}):
            raise UnsupportedLeaf(
                f"metadata: the key {RESERVED!r} is reserved for the Checkpointer; rename yours"
            )
        numbers = {name: _metric(name, value) for name, value in self._metrics.items()}
        if len(numbers) < len(self._call.metrics or ()):
            names = [(str(plain_key(name)), name) for name in self._call.metrics or ()]
            same = [repr(name) for text, name in names if [t for t, _ in names].count(text) > 1]
            raise UnsupportedLeaf(f"metrics: two names are stored as one: {first_few(same)}")
        shown = {n: v if math.isfinite(v) else str(v) for n, v in numbers.items()}  # JSON lacks nan
        library_metadata: dict[str, Any] = {**features, "step": self._step, "metrics": shown}
        if self._steps.recorded is not None:
            library_metadata["after"] = self._steps.recorded
        return {**(user_metadata or {}), RESERVED: library_metadata}

    def _begin(self) -> None:
        """Runs within the call; makes no request over a network."""
        if self._is_coordinator:
            self._steps.check_rated(self._metrics)
        self._steps.check_begin(self._step)
        if not self._steps.first.location.is_remote:
            self._check_failed()
        self._steps.in_use.begin(self, self._step)

    def _prepare(self, attempt: str) -> None:
        """Runs before anything of a step is written."""
        self._attempt = attempt
        self._steps.attempts_in_progress.add(attempt)
        if self._copying is not None and (self._is_coordinator or self._copying.by_all):
            self._copying.wait_for_turn()
        if not self._is_coordinator:
            return
        self._cleaning.wait(1)  # else steps pile up where removing one takes longer than saving one
        steps, first = self._steps, self._steps.first
        first.check_no_checkpoint()
        # Until now, another job may have saved here.
        is_new = first.open(steps.in_use.saved, attempt.rpartition("-")[0])
        if is_new or not first.location.is_remote:
            steps.newest.pop(first, None)
        if is_new:
            steps.known_metrics.clear()
        steps.in_use.wait_for_removal(self._step)
        steps.check_newest(self._step, first)
        self._check_failed()
        if self._copying is not None:
            self._lineage = self._copying.follow(self._step, attempt, overwrite=self._overwrite)

    def _check_failed(self) -> None:
        """Reports the error of the last save of this step, if it failed after its commit, instead
        of only the existing step.

        Raises:
            CheckpointExists: a save failed after it had committed the step.
        """
        error, first = self._steps.failed.get(self._step), self._steps.first
        if error is not None and not self._overwrite and self._step in first.committed():
            raise CheckpointExists(
                f"step {self._step} was saved before, and that failed: {error}. It had already "
                f"been committed to {first.path(self._step)} then; pass overwrite=True to save it "
                "again"
            ) from error

    def _check(self) -> None:
        """Runs right before its commit, on the coordinator."""
        first = self._steps.first
        if self._lineage is not None and self._copying is not None:
            place = first.location_of(self._step), self._attempt
            fsync = self._copying.options.fsync
            lineage_notes.record(*place, self._lineage, fsync=fsync)
        first.lease.check()

    def _committed(self) -> None:
        """Runs after its commit."""
        self._steps.committed_now(self._step, self._metrics)
        if self._is_coordinator and self._copying is None:
            self._cleaning.start()
        elif self._copying is not None and (self._is_coordinator or self._copying.by_all):
            self._steps.own_attempts.add(self._attempt)
            self._copying.start()
        self._steps.attempts_in_progress.discard(self._attempt)
        if self._listeners:
            save_ended(self._listeners, None)

    def _failed(self, error: BaseException) -> None:
        self._steps.failed[self._step] = error
        self._steps.attempts_in_progress.discard(self._attempt)
        save_ended(self._listeners, error)


def find_base(steps: Steps, is_needed: bool) -> str | None:
    """The checkpoint that the next save references, if any."""
    if not is_needed or steps.recent is None:
        return None
    if steps.local is not None and not steps.local.location.is_local:
        return None  # a step that is copied to the root must not need another one
    return steps.first.path(steps.recent)


def _metric(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UnsupportedLeaf(f"metrics must be numbers: {name!r}: {error}") from error


def check_changed(changed: object, reuses: bool) -> None:
    """Checks `SaveOptions.changed`, or the argument of a save.

    Raises:
        ValueError: it is given to a Checkpointer without `reuse`.
    """
    if changed is not None and not reuses:
        raise ValueError(
            "changed= needs the step before, whose other chunks it reuses; create the "
            "Checkpointer with reuse=True"
        )


def knowing(
    options: SaveOptions, changed: Mapping[str, Any] | Literal["tracked"] | None, reuses: bool
) -> SaveOptions:
    """The options of a save with its own `changed`, which overrides that of the options.

    Raises:
        TypeError, ValueError: see `SaveOptions.changed` and `check_changed`.
    """
    if changed is None:
        return options
    check_changed(changed, reuses)
    replace(options, changed=changed)  # checks it
    said, of_all = (
        {"**": patterns} if isinstance(patterns, str) else dict(patterns or {})
        for patterns in (changed, options.changed)
    )
    first = {} if isinstance(changed, str) else said  # it names no arrays
    return replace(options, changed={**first, **of_all, **said})
