"""Which steps may be saved, copied and removed now: none is two of these at once, and none is saved
below later ones, or again after a save of it failed.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from unickpt.errors import CheckpointExists, LaterStepsExist
from unickpt.quoting import some
from unickpt.runs.step_folder import Branch
from unickpt.runs.tiers import Tier, Tiers


class StepOrder:
    """What a process knows of the newest steps.

    Arguments:
        tiers: the folders.
        branch: which existing steps belong to this run.
    """

    def __init__(self, tiers: Tiers, branch: Branch) -> None:
        self._tiers, self._branch = tiers, branch
        self._newest: dict[Tier, int] = {}  # as far as this process knows
        self.failed: dict[int, BaseException] = {}
        """Steps whose last save, or copy, failed."""
        self.loaded: int | None = None
        """The step that was loaded last."""

    def forget(self, tier: Tier) -> None:
        """Records that another job may have saved here."""
        self._newest.pop(tier, None)

    def forget_all(self) -> None:
        """Records that steps were removed."""
        self._newest.clear()

    def check_failed(self, step: int, overwrite: bool) -> None:
        """If the last save of this step failed after its commit, reports that error instead of only
        the existing step.

        Raises:
            CheckpointExists: a save failed after it had committed the step.
        """
        error = self.failed.get(step)
        if error is not None and not overwrite and step in self._tiers.first.committed():
            raise CheckpointExists(
                f"step {step} was saved before, and that failed: {error}. It had already been "
                f"committed to {self._tiers.first.path(step)} then; pass overwrite=True to save it "
                "again"
            ) from error

    def check_newest(self, step: int, tier: Tier) -> None:
        """Checks that a tier has no later steps.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if self._newest.get(tier, step + 1) > step:
            found = self._branch.steps(tier)
            self._newest[tier] = max(found, default=-1)
            self.check_order(step, [s for s in found if s > step])

    def check_order(self, step: int, later: Sequence[int]) -> None:
        """Refuses to save a step below later ones, because a restart would not load it.

        Raises:
            LaterStepsExist: says how to continue.
        """
        if not later:
            return
        there = {s for tier in self._tiers.all for s in self._branch.steps(tier)}
        below = {s for s in there if s < step}
        base = self.loaded if self.loaded in below else max(below, default=None)
        ways = "remove them with delete(step), or save into another folder"
        if base is not None:
            ways = (
                f"to go on from step {base}, use Checkpointer(..., after={base}), or call "
                f"drop_later_steps({base}) first; both remove the later steps"
            )
        raise LaterStepsExist(
            f"{self._tiers.root.location}: step {step} is below existing "
            f"{'step' if len(later) == 1 else 'steps'} {some(later)}. A restart would go on from "
            f"step {max(later)}, not from this one; {ways}"
        )

    def committed(self, step: int) -> None:
        """Records that a step was saved."""
        self.failed.pop(step, None)
        if self._tiers.first in self._newest:
            self._newest[self._tiers.first] = max(step, self._newest[self._tiers.first])


class StepsInUse:
    """Steps that are being saved or copied are not removed; those being removed are neither."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._saves: dict[object, int] = {}  # the step of each save
        self._copied = Counter[int]()  # or waiting to be copied, or needed for that
        self._removed: set[int] = set()

    @property
    def saved(self) -> list[int]:
        """The steps whose saves have begun and have not ended."""
        with self._changed:
            return list(self._saves.values())

    def begin(self, save: object, step: int) -> None:
        """Records that a save of a step begins."""
        with self._changed:
            self._saves[save] = step

    def end(self, save: object) -> None:
        """Records that a save ended."""
        with self._changed:
            self._saves.pop(save, None)

    def wait_for_removal(self, step: int) -> None:
        """Waits until a step is no longer being removed."""
        with self._changed:
            self._changed.wait_for(lambda: step not in self._removed)

    @contextmanager
    def copying(self, steps: Sequence[int]) -> Iterator[None]:
        """Prevents removal of steps, after waiting until none of them is being removed."""
        with self._changed:
            # Not skipped instead: a step also counts as being removed while it is decided whether.
            self._changed.wait_for(lambda: self._removed.isdisjoint(steps))
            self._copied.update(steps)
        try:
            yield
        finally:
            with self._changed:
                self._copied.subtract(steps)

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Blocks saves and copies of a step during its removal; yields False if one is in
        progress."""
        with self._changed:
            is_free = not self._copied[step] and step not in self._saves.values()
            if is_free:
                self._removed.add(step)
        try:
            yield is_free
        finally:
            with self._changed:
                if is_free:
                    self._removed.discard(step)
                    self._changed.notify_all()
