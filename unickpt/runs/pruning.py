"""Pruning: removes the steps of an existing run that no rule keeps, as a Checkpointer with these
rules would, without a training job."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from unickpt.commit.lease import holder
from unickpt.errors import CheckpointNotFound, UnickptError, UnsupportedFormat
from unickpt.format import unit_steps
from unickpt.format.refusals import refuse_unknown
from unickpt.quoting import first_few
from unickpt.reading import checkpoint
from unickpt.runs.arguments import roles_of
from unickpt.runs.background_removal import Cleaning
from unickpt.runs.current_steps import Steps
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import errors, paths


@dataclass(frozen=True)
class PrunePlan:
    """The steps that pruning removes, and why the others stay.

    Arguments:
        removed: the steps to remove, ascending.
        borrowed: those of them whose files stay in part, with the steps that borrow from them.
        kept: the other steps, with the reasons.
    """

    removed: Sequence[int]
    borrowed: Mapping[int, Sequence[str]]
    kept: Mapping[int, Sequence[str]]


class PruneRun:
    """A run whose steps are pruned.

    Arguments:
        root, local, roles: as for `Checkpointer`.
        retention: which steps to keep.

    Raises:
        ValueError: no rule is given; or `roles` cannot be combined with `local`, or lacks `root`.
        InvalidPath: a path does not name a storage.
        StorageError: a storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> with unickpt.Checkpointer("memory://run/prune") as ckpt:
        ...     for step in range(5):
        ...         _ = ckpt.save(step, {"w": np.ones(3)})
        >>> run = PruneRun("memory://run/prune", Retention(keep_last=1, keep_every=2))
        >>> plan = run.plan()
        >>> plan.removed, plan.kept[2]
        ([1, 3], ['keep_every=2'])
        >>> run.remove(plan)
        [1, 3]
    """

    def __init__(
        self,
        root: paths.PathLike,
        retention: Retention,
        *,
        local: paths.PathLike | None = None,
        roles: Sequence[paths.PathLike] = (),
    ) -> None:
        if retention.keeps_all:
            raise ValueError(
                "say which steps to keep, such as keep_last=3 (--keep-last 3 on the command line); "
                "all others are removed"
            )
        folder = StepFolder(root)
        other_roles = roles_of(folder, roles, {"local": local})
        local_folder = None if local is None else StepFolder(local)
        self._steps = Steps(folder, retention, local_folder, other_roles)
        self._retention = retention

    @property
    def holder(self) -> str | None:
        """Describes the job that currently saves into the run; None if none is visible.

        Raises:
            StorageError: a storage failed.
        """
        for folder in self._steps.all:
            with errors.reading(folder.location):
                if (owner := holder(folder.location)) is not None:
                    return owner
        return None

    def plan(self) -> PrunePlan:
        """Plans what to remove; changes nothing.

        Raises:
            CheckpointNotFound: the run has no step.
            CheckpointExists: it is a single checkpoint.
            ValueError: no step has the metric by which the best are kept.
            StorageError: a storage failed.
        """
        self._steps.root.check_no_checkpoint()
        self._steps.known_metrics.clear()  # another job may have replaced steps since
        steps, root_steps = self._steps.committed(), self._steps.root.committed()
        if not steps:
            raise CheckpointNotFound(f"no step is committed in {self._steps.root.location}")
        metrics = self._steps.metrics(steps)
        self._check_metric(metrics)
        # A step that is not copied yet removes none from the root.
        expendable = set(self._steps.expendable(steps))
        expendable -= {*root_steps} - {*self._steps.expendable(root_steps)}
        unknown = self._unknown(expendable)
        expendable -= unknown.keys()
        removed, borrowed = self._unneeded(expendable, retires=self._leaves_out(steps[-1]))
        roles = self._steps.roles
        counting = steps if roles is None else roles.complete(steps)
        kept_by = self._retention.steps_by_rule({step: metrics[step] for step in counting})
        reasons: dict[int, Sequence[str]] = {}
        for step in steps:
            if step in removed:
                continue
            rules = [rule for rule, among in kept_by.items() if step in among]
            if step in borrowed:
                rules.append(f"{first_few(borrowed.pop(step))} borrow from it")
            if step in unknown:
                rules.append(unknown[step])
            newest = f"the newest in the {'root' if step in root_steps else 'local tier'}"
            reasons[step] = rules or [newest if roles is None else "another role may be saving it"]
        return PrunePlan(sorted(removed), borrowed, reasons)

    def remove(self, plan: PrunePlan) -> list[int]:
        """Removes the steps of a plan that may still be removed.

        A process that is killed meanwhile leaves each step whole or removed; `unickpt clean`
        removes remains.

        Returns:
            The steps that are gone.

        Raises:
            SaveConflict: a job saves into the run.
            StorageError: a storage failed.
        """
        try:
            for folder in self._steps.all:
                folder.lease.take()
            going = sorted({*plan.removed} & {*self.plan().removed})
            retires = self._leaves_out(max(self._steps.committed()))
            Cleaning(self._steps, retires=retires).remove(going)
            left = self._steps.committed()
            return [step for step in going if step not in left]
        finally:
            self._steps.close()

    def _check_metric(self, metrics: Mapping[int, Mapping[str, float]]) -> None:
        """Refuses to keep the best steps by a metric that no step has: all would be removed."""
        retention = self._retention
        if not any(map(retention.rates, metrics.values())):
            names = first_few(sorted(set[str]().union(*metrics.values())))
            raise ValueError(
                f"no step in {self._steps.root.location} has metric={retention.metric!r}, by which "
                f"keep_best={retention.keep_best} keeps steps; they have {names or 'no metrics'}"
            )

    def _leaves_out(self, newest: int) -> bool:
        """Whether saves of the run leave units out, so that each step borrows from earlier ones,
        which are retired instead of kept, as by the run's Checkpointer."""
        try:
            reader = checkpoint.open(self._steps.path(newest))
            return unit_steps.stored(reader.metadata, str(reader.location)) is not None
        except (UnickptError, TypeError):
            return False

    def _unknown(self, steps: Collection[int]) -> dict[int, str]:
        """The steps that need features that this program does not know, with those features."""
        reasons = dict[int, str]()
        for folder in self._steps.all:
            for step in {*steps} & {*folder.committed()}:
                try:
                    refuse_unknown(folder.location_of(step), paths.context())
                except UnsupportedFormat as error:
                    reasons[step] = str(error)
        return reasons

    def _unneeded(
        self, steps: Collection[int], *, retires: bool
    ) -> tuple[set[int], dict[int, Sequence[str]]]:
        """The steps that can be removed, and those from which remaining steps borrow."""
        removed, borrowed = set[int](), dict[int, Sequence[str]]()
        for step in sorted(steps, reverse=True):
            gone = {f"step_{other}" for other in removed}
            names = {name for folder in self._steps.all for name in folder.borrowers(step)} - gone
            if names:
                borrowed[step] = sorted(names)
            if retires or not names:
                removed.add(step)
        return removed, borrowed
