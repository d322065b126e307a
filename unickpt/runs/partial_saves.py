"""The saves of a run that write only some experts: which step they refer to, and what it lacks."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from unickpt.errors import UnickptError
from unickpt.format import ocdbt_reader
from unickpt.quoting import given
from unickpt.reuse.expert_keys import ExpertKeys
from unickpt.reuse.experts import Choose, ExpertRecord, most_lost, stored
from unickpt.reuse.partial_save import ExpertSelection, PartialBase, PartialSave
from unickpt.reuse.siblings import MOST_BASES
from unickpt.runs import token_counts
from unickpt.runs.tiers import Tier
from unickpt.runs.token_counts import TokensSeen
from unickpt.saving.background import SaveCallbacks
from unickpt.storage import paths

_log = logging.getLogger("unickpt")


@dataclass(frozen=True)
class Experts:
    """The experts of a mixture of experts take turns: each save writes only some of them, and
    refers to the step before for the others, whose state is then older. See docs/experts.md.

    What matches no key is written every time. The first save, and the next after one that failed,
    write all.

    Arguments:
        each_save: how many experts a save writes, by key. For experts that have arrays of their
            own, a key is a pattern of names (`*` is one component, `**` any number of them, `{x}`
            the number of the expert). For experts that are stacked in arrays, a key is a pattern of
            names, and its value a pair: the dimension, or the mesh axis that splits it, and how
            many. With `{l}` in the place of a layer's number, the experts of each layer take turns
            by themselves, so that a save has others of each. Optimizer states whose names match
            belong to their expert.
        choose: chooses the experts to write: called for each key with a frozen dataclass (`key`,
            `experts`, `k`, `steps`, `lost`), returns numbers. All processes must choose the same.
            "most_lost" chooses those whose stored state lacks most tokens.
        plt_budget: with token counts (see `Checkpointer.save`), the greatest proportion of tokens
            whose updates the restarts of a run may lose. If another restart like the last one
            exceeded it, twice as many experts are saved. None: never.

    Raises:
        ValueError: they are not valid.

    Example:
        >>> Experts({"**/experts/{x}/**": 4}).plt_budget
        0.0375
    """

    each_save: Mapping[str, int | tuple[int | str, int]]
    choose: Choose | Literal["most_lost"] | None = None
    plt_budget: float | None = 0.0375

    __repr__ = given

    def __post_init__(self) -> None:
        ExpertKeys(self.each_save)
        if self.choose not in (None, "most_lost") and not callable(self.choose):
            raise ValueError(
                f'choose={self.choose!r} must be a function of facts, or "most_lost"; see Experts'
            )
        if self.plt_budget is not None and not 0 <= self.plt_budget <= 1:
            raise ValueError(
                f"plt_budget={self.plt_budget!r} must be a fraction from 0 to 1, or None"
            )


class PartialSaves:
    """What a run knows of the experts in its newest step, alike on all processes.

    A save does not wait for the one before: what that will have is known, if it refers to a step
    that all processes know. If it fails after all, the next one, which has begun, takes what it
    does not write from the step before, and the next after that writes all.

    Arguments:
        experts: as given.
        tier: in which steps are saved.
        wait_ended: waits until all saves have ended.
    """

    def __init__(self, experts: Experts, tier: Tier, wait_ended: Callable[[], None]) -> None:
        self._experts, self._tier, self._wait_ended = experts, tier, wait_ended
        self._keys = ExpertKeys(experts.each_save)
        self._choose = most_lost if experts.choose == "most_lost" else experts.choose
        self._lock = threading.Lock()
        self._known = _Known()
        self._forgotten = 0
        """How often it was forgotten: what begun before that is no base."""
        self._is_predicted = True
        """Whether `_known` is what the last save will have; else it has to end first."""
        self._most = None if tier.location.is_local else MOST_BASES - 1

    def following(
        self, step: int, tokens: TokensSeen | None, given: SaveCallbacks
    ) -> tuple[Callable[[str], PartialSave], SaveCallbacks]:
        """The save that follows: what it does with experts, and its callbacks.

        The former is called in the call of the save, with the name of its attempt. It raises
        UnsupportedLeaf if a token count has no known layer, or is no number.

        Arguments:
            step: its number.
            tokens: as for `Checkpointer.save`; on process 0 only.
            given: its callbacks so far.
        """
        save = _Save(step, self._tier.path(step))

        def begin(attempt: str) -> PartialSave:
            layers = {layer: token_counts.key_of(layer, self._keys) for layer in tokens or ()}
            seen = {
                layer: token_counts.counts_of(layer, counts)
                for layer, counts in (tokens or {}).items()
            }
            if not self._is_predicted:
                self._wait_ended()
            with self._lock:
                known, save.attempt, save.forgotten = self._known, attempt, self._forgotten
            return PartialSave(
                *(self._keys, step, known.record, known.base, self._choose, seen, layers),
                earlier=known.earlier,
                most_bases=self._most,
                selected=lambda selection: self._selected(save, known, selection),
            )

        def committed() -> None:
            given.committed()
            self._committed(save)

        def failed(error: BaseException) -> None:
            given.failed(error)
            self.forget()

        return begin, replace(given, committed=committed, failed=failed)

    def _selected(self, save: _Save, known: _Known, selection: ExpertSelection) -> None:
        """Records what a save will have once it has ended."""
        index, base, chosen = selection.index, selection.base, selection.chosen
        after = None
        if base is not None and chosen is not None:
            # Only process 0 knows the tokens; and who writes what, of a job of other processes.
            if index.processes == 1 or (self._choose is None and base.processes == index.processes):
                after = base.followed_by(save.path, save.attempt, chosen)
        elif index.processes == 1:
            steps = selection.steps
            after = PartialBase.of(save.path, save.attempt, index, steps, self._keys)
        with self._lock:
            if save.forgotten != self._forgotten:
                return
            self._is_predicted = after is not None
            if after is not None:
                record = replace(selection.record, steps=after.steps)
                save.known = self._known = _Known(save.step, record, after, known.record)

    def _committed(self, save: _Save) -> None:
        with self._lock:
            if save.forgotten != self._forgotten:
                return
            if save.known is not None:
                if self._known is save.known and save.known.base is not None:
                    base = save.known.base.without_before()
                    self._known = replace(save.known, base=base)
                return
        self._remember(save.step, save.path, restarted=False)

    def loaded(self, step: int, path: str) -> None:
        """Records that the run goes on from a step.

        Arguments:
            step: its number.
            path: from which it was loaded; if it is that of the other tier, the next save writes
                all experts.
        """
        self.forget()
        self._remember(step, path, restarted=True)

    def removed(self, steps: Collection[int]) -> None:
        """Records that steps were removed."""
        if self._known.step in steps:
            self.forget()

    def forget(self) -> None:
        """The next save writes all experts: the newest step is not known, or differs by process."""
        with self._lock:
            self._forgotten += 1
            self._is_predicted = True
            self._known = replace(self._known, base=None, step=None)

    def _remember(self, step: int, path: str, *, restarted: bool) -> None:
        base, is_known = None, False
        record = ExpertRecord({})
        try:
            reader = ocdbt_reader.open(paths.resolve(path))
            found = None if reader is None else stored(reader.index.metadata, path)
            if reader is not None and found is not None:
                record = found.restarted(self._experts.plt_budget) if restarted else found
                is_known = True
                if path == self._tier.path(step):
                    base = PartialBase.read(path, reader, found.steps, self._keys)
        except (UnickptError, ValueError) as error:
            _log.warning("%s: the next save writes all experts: %s", path, error)
            record = record if is_known else self._known.record
        with self._lock:
            self._known = _Known(None if base is None else step, record, base)
            self._is_predicted = True


@dataclass(frozen=True)
class _Known:
    """What the next save follows.

    Arguments:
        step: its number; None if the next save writes all.
        record: what it records of its experts.
        base: it.
        earlier: what the step before it records.
    """

    step: int | None = None
    record: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))
    base: PartialBase | None = None
    earlier: ExpertRecord = field(default_factory=lambda: ExpertRecord({}))


@dataclass
class _Save:
    """A save that has begun.

    Arguments:
        step, path: of the checkpoint.
        attempt: that makes it.
        forgotten: see `PartialSaves`.
        known: what it will have; None if that is read once it has ended.
    """

    step: int
    path: str
    attempt: str = ""
    forgotten: int = -1
    known: _Known | None = None
