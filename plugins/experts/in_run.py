"""The saves of a run that write only some experts: the step that they refer to, and its gaps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from unickpt.errors import UnickptError
from unickpt.extend import (
    MOST_BASES,
    Reader,
    Run,
    RunFeature,
    SaveCall,
    SaveFeature,
    open_own,
    resolve_path,
)
from unickpt.plugins.experts import token_counts
from unickpt.plugins.experts.expert_choice import Choose, ExpertRecord
from unickpt.plugins.experts.expert_choice import stored as stored_record
from unickpt.plugins.experts.keys import ExpertKeys
from unickpt.plugins.experts.partial_save import Chosen, ExpertsOfSave, PartialBase, PartialSave

_log = logging.getLogger("unickpt")


class PartialSaves(RunFeature):
    """The facts that a run keeps of the experts in its newest step, alike on all processes.

    A save does not wait for the one before: the outcome of that is known, if it refers to a step
    that all processes know. If it fails after all, the next one, which has begun, takes the experts
    that it does not write from the step before, and the one after that writes all.

    Arguments:
        keys: name the experts.
        choose: chooses those to write, if they do not take turns.
        plt_budget: as of `Experts`.
        run: that is saved.
    """

    needs_steps_before = True

    def __init__(
        self, keys: ExpertKeys, choose: Choose | None, plt_budget: float | None, run: Run
    ) -> None:
        self._keys, self._choose, self._plt_budget, self._run = keys, choose, plt_budget, run
        self._lock = threading.Lock()
        self._known = _KnownSave()
        self._forgotten = 0
        """How often it was forgotten: a save that began before is no base."""
        self._is_predicted = True
        """Whether `_known` is the outcome of the last save; else it has to end first."""
        self._most = None if run.is_local else MOST_BASES - 1

    def before_save(self, call: SaveCall) -> tuple[SaveFeature, Mapping[str, Any]]:
        """The part of a save that handles experts.

        Arguments:
            call: to save it; token counts are taken out of it.

        Raises:
            UnsupportedLeaf: the token counts are not valid.
        """
        tokens = token_counts.taken_from(call, self._keys)
        save = _ExpertSave(call.step, self._run.path(call.step))
        return ExpertsOfSave(self._keys, partial(self._begin, save, *tokens), save), {}

    def _begin(
        self,
        save: _ExpertSave,
        seen: dict[str, dict[int, float]],
        layers: dict[str, str],
        attempt: str,
    ) -> PartialSave:
        """See `SaveFeature.write_filter`."""
        save.attempt = attempt
        if not self._is_predicted:
            self._run.wait_ended()
        with self._lock:
            newest, save.forgotten = self._known, self._forgotten
        return PartialSave(
            *(self._keys, save.step, newest.record, newest.base, self._choose, seen, layers),
            earlier=newest.earlier,
            most_bases=self._most,
            selected=lambda chosen: self._selected(save, newest, chosen),
        )

    def after_save(self, feature: SaveFeature | None, error: BaseException | None) -> None:
        """Records the experts of the newest step, or that they are not known."""
        if error is not None:
            self._forget()
        elif isinstance(feature, ExpertsOfSave):
            self._committed(feature.save)

    def _selected(self, save: _ExpertSave, newest: _KnownSave, chosen: Chosen) -> None:
        """Records the experts that a step will have once its save has ended."""
        index, base, written = chosen.index, chosen.base, chosen.written
        after = None
        if base is not None and written is not None:
            # Only process 0 knows the tokens; and the writers, for a job of other processes.
            if index.processes == 1 or (self._choose is None and base.processes == index.processes):
                after = base.followed_by(save.path, save.attempt, written)
        elif index.processes == 1:
            after = PartialBase.of(save.path, save.attempt, index, chosen.steps, self._keys)
        with self._lock:
            if save.forgotten != self._forgotten:
                return
            self._is_predicted = after is not None
            if after is not None:
                record = replace(chosen.record, steps=after.steps)
                save.outcome = self._known = _KnownSave(save.step, record, after, newest.record)

    def _committed(self, save: _ExpertSave) -> None:
        with self._lock:
            if save.forgotten != self._forgotten:
                return
            if save.outcome is not None:
                if self._known is save.outcome and save.outcome.base is not None:
                    base = save.outcome.base.without_before()
                    self._known = replace(save.outcome, base=base)
                return
        location = resolve_path(save.path)
        self._remember(save.step, save.path, lambda: open_own(location), restarted=False)

    def after_load(self, step: int, path: str, stored: Reader | None) -> None:
        """Records that the run resumes from a step; if it was loaded from another place than the
        run's, the next save writes all experts."""
        self._forget()
        self._remember(step, path, lambda: stored, restarted=True)

    def after_removal(self, steps: Collection[int]) -> None:
        """No later save refers to a step that was removed."""
        if self._known.step in steps:
            self._forget()

    def _forget(self) -> None:
        """The next save writes all experts: the newest step is not known, or differs by process."""
        with self._lock:
            self._forgotten += 1
            self._is_predicted = True
            self._known = replace(self._known, base=None, step=None)

    def _remember(
        self, step: int, path: str, opened: Callable[[], Reader | None], *, restarted: bool
    ) -> None:
        base, is_known = None, False
        record = ExpertRecord({})
        try:
            reader = opened()
            previous = None if reader is None else stored_record(reader.index.metadata, path)
            if reader is not None and previous is not None:
                record = previous.restarted(self._plt_budget) if restarted else previous
                is_known = True
                if path == self._run.path(step):
                    base = PartialBase.read(path, reader, previous.steps, self._keys)
        except (UnickptError, ValueError) as error:
            _log.warning("%s: the next save writes all experts: %s", path, error)
            record = record if is_known else self._known.record
        with self._lock:
            self._known = _KnownSave(None if base is None else step, record, base)
            self._is_predicted = True


@dataclass(frozen=True)
class _KnownSave:
    """The step that the next save follows.

    Arguments:
        step: its number; None if the next save writes all.
        record: of its experts.
        base: its experts.
        earlier: the record of the step before it.
    """

    step: int | None = None
    record: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))
    base: PartialBase | None = None
    earlier: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))


@dataclass
class _ExpertSave:
    """A save that has begun.

    Arguments:
        step, path: of the checkpoint.
        attempt: that makes it.
        forgotten: see `PartialSaves`.
        outcome: the experts that it will have; None if they are read once it has ended.
    """

    step: int
    path: str
    attempt: str = ""
    forgotten: int = -1
    outcome: _KnownSave | None = None
