"""Branches of a run: which of its steps a job sees that goes on after an earlier one.

A run that goes back to step 150 has the steps after it twice: those that it leaves behind, and
those that it saves from then on. The latter tell in their metadata after which step they go on.
"""

from __future__ import annotations

import logging

from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, UnsupportedFormat
from unickpt.steps import Steps

_log = logging.getLogger("unickpt")


class Branch:
    """The steps that a job sees: all; or those up to `after`, and later ones that are its own.

    Arguments:
        after: the step that the job goes on after; None if that is the newest.
    """

    def __init__(self, after: int | None) -> None:
        self.after = after
        self.recorded = after
        """What the metadata of its steps tells: `after`, or what the step tells that was loaded."""
        self._own: set[tuple[Steps, int]] = set()

    def steps(self, tier: Steps, *, steady: bool = False) -> list[int]:
        """The committed steps in a folder that this job sees, ascending.

        Arguments:
            tier: the folder.
            steady: see `Steps.steady`; for a job that does not have the lease.

        Raises:
            StorageError: the storage failed.
        """
        found = tier.steady() if steady else tier.committed()
        return [step for step in found if self.has(tier, step)]

    def abandoned(self, tier: Steps) -> list[int]:
        """The committed steps that it does not see, ascending. Raises as `steps`."""
        return [step for step in tier.committed() if not self.has(tier, step)]

    def has(self, tier: Steps, step: int) -> bool:
        """Whether this job sees a step, if it is there."""
        if self.after is None or step <= self.after or (tier, step) in self._own:
            return True
        try:
            own = tier.after(step) == self.after
        except CheckpointNotFound:
            return False  # another job has removed it
        except (CheckpointCorrupt, UnsupportedFormat) as error:
            # Better an error when it is loaded than a step of its own that is gone silently.
            _log.warning("%s: cannot tell which job saved this step: %s", tier.path(step), error)
            return True
        if own:
            self._own.add((tier, step))
        return own

    def goes_on_from(self, tier: Steps, step: int) -> None:
        """Says that a step was loaded. Without `after`, what is saved now belongs to its branch."""
        if self.after is None:
            try:
                self.recorded = tier.after(step)
            except (CheckpointNotFound, CheckpointCorrupt, UnsupportedFormat):
                self.recorded = None

    def forget(self, step: int) -> None:
        """Says that a step was removed."""
        self._own = {(tier, own) for tier, own in self._own if own != step}
