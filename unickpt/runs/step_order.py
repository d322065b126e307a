"""Refuses to save a step below later ones, or again after a save of it failed."""

from __future__ import annotations

from collections.abc import Sequence

from unickpt.errors import CheckpointExists, LaterStepsExist
from unickpt.quoting import some
from unickpt.steps.branch import Branch
from unickpt.steps.tier import Tier
from unickpt.steps.tiers import Tiers


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
