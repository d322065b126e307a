"""Upkeep of a run's steps: copies them between the tiers, and removes those that no rule keeps.

Only process 0 of a job does this work; the others let it.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial

from unickpt.chores import Chores
from unickpt.errors import CheckpointExists, StorageError
from unickpt.lease import Lease
from unickpt.options import SaveOptions
from unickpt.pending import Hooks
from unickpt.retention import Retention
from unickpt.tiers import Tier

_log = logging.getLogger("unickpt")
_COPIES = 2  # checkpoints that wait to be copied from the local tier; a further save waits


class Upkeep:
    """What happens to steps around their saves.

    Arguments:
        root: where steps are kept.
        local: where they are committed first, if not in `root`.
        retention: which of them are kept.
        options: of the saves.
        failed: gets what could not be copied, and why.
    """

    def __init__(
        self,
        root: Tier,
        local: Tier | None,
        retention: Retention,
        options: SaveOptions,
        failed: Callable[[str, Exception], object],
    ) -> None:
        self._root, self._local = root, local
        self._retention, self._options = retention, options
        self._first = local or root  # where saves go
        self._cleaning = Chores("unickpt clean", lambda e: _log.warning("cleaning up: %s", e))
        self._copying = Chores(
            "unickpt copy", partial(failed, f"copying a step to {root.location}")
        )
        self._metrics: dict[int, Mapping[str, float]] = {}
        self._session = ""
        self._in_flight: list[int] = []
        self._uncopied: dict[int, bool] = {}  # and whether a copy may replace another step
        self._compared = False
        for tier in {self._first, root}:
            weakref.finalize(self, Lease.give_back, tier.lease)

    def hooks(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> Hooks:
        """What belongs to the save of a step, which begins now.

        Arguments:
            metrics: as for `Checkpointer.save`.
            overwrite: whether it may replace a step.
        """
        self._in_flight.append(step)
        return Hooks(
            prepare=lambda attempt: self._prepare(step, overwrite, attempt),
            check=self._first.lease.check,
            committed=lambda: self._committed(step, metrics, overwrite),
            ended=lambda: self._in_flight.remove(step),
        )

    def wait(self) -> None:
        """Waits until all steps are copied, and cleaned up behind; raises nothing."""
        self._copying.wait()
        self._cleaning.wait()

    def close(self) -> None:
        """Lets another job have the folders."""
        for tier in {self._first, self._root}:
            tier.lease.give_back()

    def _prepare(self, step: int, overwrite: bool, attempt: str) -> None:
        """Before anything of a step is written."""
        self._session = attempt.rpartition("-")[0]
        self._first.open(self._in_flight, self._session)
        if self._local is None:
            return
        self._copying.wait(_COPIES - 1)
        with suppress(StorageError):  # it may be away; then copying finds out
            if not overwrite and step in self._root.committed():
                raise CheckpointExists(
                    f"{self._root.path(step)} already holds a checkpoint; pass overwrite=True"
                )

    def _committed(self, step: int, metrics: Mapping[str, float], overwrite: bool) -> None:
        """After its commit."""
        self._metrics[step] = metrics
        if self._local is None:
            self._cleaning.add(self._clean)
        else:
            self._uncopied[step] = overwrite
            self._copying.add(self._copy)

    def _copy(self) -> None:
        """Copies what the local tier has and the root lacks, unless it need not be kept."""
        assert self._local is not None
        self._root.open(self._in_flight, self._session)
        there, here = self._root.committed(), self._local.committed()
        if not self._compared:  # an earlier run may have replaced a step, but not its copy
            both = set(there).intersection(here)
            newer = {s for s in both if self._local.made(s) > self._root.made(s)}
            self._uncopied = {**dict.fromkeys(newer, True), **self._uncopied}
            self._compared = True
        expendable = self._expendable(there, here)
        for step in here:
            if step in there and step not in self._uncopied:
                continue
            if step not in expendable or step == here[-1]:
                self._copy_step(step, there, self._uncopied.get(step, False))
            self._uncopied.pop(step, None)
        self._cleaning.add(self._clean)

    def _copy_step(self, step: int, there: Sequence[int], overwrite: bool) -> None:
        assert self._local is not None
        if step in there:
            if self._root.made(step) == self._local.made(step):
                return  # by a try that was cut short when all was done
            if not overwrite:
                raise CheckpointExists(f"{self._root.path(step)} already holds another checkpoint")
        budget_bytes, timeout_s = self._options.budget_bytes, self._options.timeout_s
        self._root.copy_from(self._local, step, budget_bytes, timeout_s)

    def _clean(self) -> None:
        """Removes the steps that no rule keeps."""
        committed = self._root.committed()
        here = [] if self._local is None else self._local.committed()
        expendable = self._expendable(committed, here)
        for step in here[:-1]:
            copied = step in committed and step not in self._uncopied
            if (copied or step in expendable) and step not in self._in_flight:
                assert self._local is not None
                self._local.remove(step)
        for step in expendable:
            # The newest of the root stays even if the local tier has a newer one.
            if step in committed[:-1] and step not in self._in_flight:
                _log.info("removing %s", self._root.path(step))
                self._root.remove(step)
                self._metrics.pop(step, None)

    def _expendable(self, there: Sequence[int], here: Sequence[int]) -> list[int]:
        """The steps that no rule keeps, of those in the root and in the local tier."""
        tiers = {**dict.fromkeys(here, self._local), **dict.fromkeys(there, self._root)}
        if self._retention.keep_best is not None:
            for step, tier in tiers.items():
                if step not in self._metrics and tier is not None:
                    self._metrics[step] = tier.metrics(step)
        return self._retention.expendable({step: self._metrics.get(step, {}) for step in tiers})
