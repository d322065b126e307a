"""Branches of a run: which steps a job sees that continues after an earlier step.

A run that goes back to step 150 has two kinds of later steps: those that it abandons, and those
that it saves from then on. The metadata of the latter says after which step they continue.
"""

from __future__ import annotations

import logging

from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, UnsupportedFormat
from unickpt.steps.step_folder import StepFolder

_log = logging.getLogger("unickpt")


class Branch:
    """The steps that a job sees: all, or those up to `after` and its own later ones.

    Arguments:
        after: the step after which the job continues; None for the newest.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.recorded = after
        """The `after` in the metadata of its steps: `after`, or that of the loaded step."""
        self._own: set[tuple[StepFolder, int]] = set()

    def steps(self, tier: StepFolder, *, steady: bool = False) -> list[int]:
        """The committed steps in a folder that this job sees, ascending.

        Arguments:
            tier: the folder.
            steady: see `StepFolder.steady`; for a job that does not hold the lease.

        Raises:
            StorageError: the storage failed.
        """
        found = tier.steady() if steady else tier.committed()
        return [step for step in found if self.has(tier, step)]

    def abandoned(self, tier: StepFolder) -> list[int]:
        """The committed steps that the job does not see, ascending. Raises as `steps`."""
        return [step for step in tier.committed() if not self.has(tier, step)]

    def has(self, tier: StepFolder, step: int) -> bool:
        """Whether this job sees a step, if it exists."""
        if self.after is None or step <= self.after or (tier, step) in self._own:
            return True
        try:
            own = tier.after(step) == self.after
        except CheckpointNotFound:
            return False  # another job has removed it
        except (CheckpointCorrupt, UnsupportedFormat) as error:
            # Keep it: an error on loading is better than silently removing the job's own step.
            _log.warning("%s: cannot tell which job saved this step: %s", tier.path(step), error)
            return True
        if own:
            self._own.add((tier, step))
        return own

    def continue_from(self, tier: StepFolder, step: int) -> None:
        """Records that a step was loaded. Without `after`, later saves belong to its branch."""
        if self.after is None:
            try:
                self.recorded = tier.after(step)
            except (CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat):
                self.recorded = None

    def forget(self, step: int) -> None:
        """Records that a step was removed."""
        self._own = {(tier, own) for tier, own in self._own if own != step}
