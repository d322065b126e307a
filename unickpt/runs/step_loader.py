"""Loads a step from the tier that has it, or an older one; the same on all processes."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    ProcessFailed,
    StorageError,
)
from unickpt.frameworks.process_group import Group
from unickpt.loading.loader import load
from unickpt.quoting import first_few, shortened
from unickpt.runs.current_steps import Steps
from unickpt.runs.requested_removal import agreed
from unickpt.runs.run_events import RunEvents
from unickpt.runs.step_folder import ReadsElsewhere, StepFolder
from unickpt.storage import paths
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

_log = logging.getLogger("unickpt")
_FINE, _DAMAGED, _GONE, _AGAIN, _UNREAD, _FAILED = range(6)
_TRIES = 50  # to load the newest step while other jobs commit and remove steps


class StepLoader:
    """One call of `Checkpointer.load`.

    Arguments:
        steps: of the run.
        group: the processes.
        arguments: of `unickpt.load`.
        events: of the run, if anything hears them.
    """

    def __init__(
        self,
        steps: Steps,
        group: Group,
        arguments: Mapping[str, Any],
        events: RunEvents | None = None,
    ) -> None:
        self._steps, self._group, self._arguments = steps, group, arguments
        self._events = events
        self.path: str | None = None
        """The path from which a step was loaded."""

    def load(self, step: int | None, fallback: bool) -> tuple[int, Any]:
        """Loads a step; returns its number and the result of `unickpt.load`.

        Arguments:
            step: its number; None for the newest.
            fallback: whether to load an older one if it is damaged.

        Raises:
            CheckpointNotFound: the step does not exist, or no step does.
            CheckpointCorrupt: it is damaged; the message names the next older one.
        """
        damaged, tries = set[int](), 0
        while True:
            listed = step is None or step in damaged
            target_step = self._newest(step, damaged) if listed or step is None else step
            result, error = self._try(target_step)
            outcome = _outcome(error, listed)
            if fallback or step is None:
                outcome = self._agreed(outcome, error)
            if outcome == _FINE:
                return target_step, result
            tries += outcome == _GONE
            if outcome == _DAMAGED and fallback:
                _log.warning(
                    "step %d is damaged, falling back to an older one: %s", target_step, error
                )
                self._fell_back(target_step, error or "another process cannot load it")
                damaged.add(target_step)
            elif outcome != _GONE or tries > _TRIES:
                raise error or ProcessFailed(
                    f"{self._steps.path(target_step)}: another process cannot load it"
                )

    def _fell_back(self, step: int, error: object) -> None:
        if self._events is not None:
            self._events.fell_back(step, str(error))

    def _newest(self, below: int | None, damaged: Collection[int]) -> int:
        """The newest step that is not known to be damaged, as seen by the coordinator.

        Arguments:
            below: the step must be below this one; None for any step.
            damaged: the steps that were already tried.
        """
        steps = [
            s for s in self._steps.counting() if s not in damaged and (below is None or s < below)
        ]
        newest = max(steps, default=-1)
        newest = agreed(self._group, newest + 1 if self._group.index == 0 else 0) - 1
        if newest < 0 and damaged:
            raise CheckpointNotFound(
                f"{self._steps.path(min(damaged))} is damaged, and there is no older step to fall "
                "back to"
            )
        if newest < 0:
            try:
                self._steps.root.check_no_checkpoint()
            except CheckpointExists as error:
                raise CheckpointNotFound(str(error)) from None
            raise CheckpointNotFound(
                _no_step(self._steps.root.location, self._steps.in_use.saved())
            )
        return newest

    def _try(self, step: int) -> tuple[Any, Exception | None]:
        """Loads a step from the fastest tier that has it undamaged and can be read, or returns the
        error. If copies differ, all processes load from the same tier."""
        damage, unread = list[str](), list[Exception]()
        gone: CheckpointNotFound | None = None
        for _ in range(2):  # it may have moved to the other tier
            for tier in self._steps.all:
                result, error, outcome = self._try_tier(tier, step)
                if outcome == _AGAIN:
                    _log.warning("%s: reading it once more: %s", tier.path(step), error)
                    result, error, outcome = self._try_tier(tier, step)
                path = tier.path(step)
                if outcome == _FINE:
                    self.path = path
                    if damage or unread:
                        self._fell_back(step, "; ".join([*damage, *map(str, unread)]))
                    return result, None
                if outcome == _GONE:
                    gone = error if isinstance(error, CheckpointNotFound) else gone
                    continue
                error = error or ProcessFailed(f"{path}: another process cannot load it")
                if outcome == _FAILED:
                    return None, error
                if outcome == _DAMAGED:
                    _log.warning("%s is damaged: %s", path, error)
                    damage.append(str(error))
                else:
                    _log.warning("%s cannot be read: %s", path, error)
                    unread.append(error)
            if damage or unread:
                break
        if unread:
            return None, unread[0]
        return None, self._failure(step, damage, gone)

    def _try_tier(self, tier: StepFolder, step: int) -> tuple[Any, Exception | None, int]:
        """Loads a step from a tier; returns the result or the error, and the outcome."""
        result, outcome = None, _GONE
        error: Exception | None = None
        try:
            if tier in self._steps.holders(step):
                result, outcome = load(tier.path(step), **self._arguments), _FINE
        except StorageError as failure:
            error, outcome = failure, _UNREAD
            if isinstance(tier, ReadsElsewhere):
                error = tier.reading_failed(step, failure)
                outcome = _AGAIN if error is failure else _UNREAD
        except Exception as failure:
            error, outcome = failure, _outcome(failure, listed=True)
        if self._steps.first.copies_differ and self._group.count > 1:
            if isinstance(error, ProcessFailed):  # that one has another error
                outcome = _AGAIN
            outcome = self._agreed(outcome, error)
        return result, error, outcome

    def _agreed(self, outcome: int, error: Exception | None) -> int:
        """The outcome of all processes; where they cannot be reached, raises the error of this one
        first."""
        try:
            return agreed(self._group, outcome)
        except Exception as failure:
            if error is None:
                raise
            raise error from failure

    def _failure(
        self, step: int, damage: Sequence[str], gone: CheckpointNotFound | None
    ) -> Exception:
        """The error that no tier has a step undamaged.

        Arguments:
            step: its number.
            damage: of the tiers that have it.
            gone: the error of a tier that did not.
        """
        steps = self._steps.counting()
        if not damage:  # if it exists, it was replaced while it was read
            return (gone if step in steps else None) or self._steps.not_found(step, steps)
        older = max((s for s in steps if s < step), default=None)
        hint = "there is no older step"
        if older is not None:
            hint = f"the next older step is {older}: load(step={older}), or load(fallback=True)"
        return CheckpointCorrupt(f"{'; '.join(damage)}; {hint}")


def _outcome(error: Exception | None, listed: bool) -> int:
    """The outcome of loading a step as a number; the maximum over all processes is used.

    Arguments:
        error: the error that was raised, if any.
        listed: whether the step was just listed; if it is missing anyway, it was removed since.
    """
    if error is None:
        return _FINE
    if isinstance(error, CheckpointCorrupt):
        return _DAMAGED
    return _GONE if listed and isinstance(error, CheckpointNotFound) else _FAILED


def _no_step(location: Location, saved: Sequence[int]) -> str:
    """Text for a run without steps, with the folders that it has instead, such as another
    system's, and the steps that are being saved."""
    if saved:
        shown = first_few(sorted(saved))
        return f"no step is committed in {location} yet; being saved: {shown}. Call wait() first"
    foreign_folders: list[str] = []
    with suppress(Failed):  # the folder does not exist
        folders = location.folders(paths.context())
        foreign_folders = [n for n in folders if not n.startswith((".", "step_"))]
    more = (
        f"it has {shortened(first_few(foreign_folders), 200)}, which are no steps of unickpt: if "
        "another system saved them, load one by unickpt.load(path)"
    )
    new = "check the path; in a new run, latest() is None, and there is nothing to load yet"
    return f"no step is committed in {location}; {more if foreign_folders else new}"
