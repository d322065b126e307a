"""The seam for features of saves: what `SaveOptions.features` holds, and what a run asks of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from unickpt.save_report import SaveReport

if TYPE_CHECKING:
    from unickpt.format.reader import Reader
    from unickpt.write_filter import WriteFilter


class PhaseObserver(Protocol):
    """Records the phases of one save in this process, such as a tracer."""

    def phase(self, name: str, began: float, ended: float) -> None:
        """Records a phase that has ended, on the thread that it was on. An error is logged.

        Arguments:
            name: one of the keys of `SaveReport.phases`.
            began, ended: seconds, as of `time.perf_counter`.
        """


class SaveFeature:
    """Something that a save does beyond the core; a base class whose methods do nothing.

    A feature that also fulfils `Codec` chooses how arrays are stored.
    """

    name: str
    """Of the feature; a save has at most one of each name."""

    def check(self, arrays: Iterable[str]) -> None:
        """Called before the commit, on the coordinator, with the names of all arrays.

        Raises:
            UnsupportedLeaf: the feature does not fit them; the save fails.
        """

    def write_filter(self, attempt: str) -> WriteFilter | None:
        """What a save leaves out; None for nothing. Called on each process, in the call that saves.

        Arguments:
            attempt: the name that the save will have in the index.

        Raises:
            UnsupportedLeaf: that cannot be told; the save fails.
        """
        return None

    def observer(self) -> PhaseObserver | None:
        """Records the phases of the save that begins now; None for no observer. Called on each
        process, in the call that saves."""
        return None

    def committed(self, report: SaveReport) -> None:
        """Called on each process after the commit, at the same time as `SaveOptions.metrics`; on
        the coordinator, the report has what all processes wrote. An error is logged.

        Arguments:
            report: of the save.
        """

    def in_run(self, run: Run) -> RunFeature | None:
        """What a `Checkpointer` asks before each save and after each load; None for nothing."""
        return None


@dataclass(frozen=True)
class Run:
    """What a feature knows of a run.

    Arguments:
        is_local: whether steps are saved on a local disk.
        path: where a step is saved, by its number.
        wait_ended: waits until all saves that have begun are committed, or have failed.
    """

    is_local: bool
    path: Callable[[int], str]
    wait_ended: Callable[[], None]


@dataclass
class SaveCall:
    """A call of `Checkpointer.save`; features take their own arguments out of it.

    Arguments:
        step: that is saved.
        metrics: as given; on process 0 only.
        keywords: those that are for features, as given.
        is_coordinator: whether this is process 0, whose metrics are stored.
    """

    step: int
    metrics: Mapping[str, float] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    is_coordinator: bool = True


class RunFeature:
    """The part of a feature that lives as long as a run; a base class whose methods do nothing."""

    needs_steps_before = False
    """Whether steps refer to steps before them: these are then retired instead of kept, if no rule
    keeps them."""

    def before_save(self, call: SaveCall) -> tuple[SaveFeature | None, Mapping[str, Any]]:
        """The feature with which a step is saved, None for that of the run; and what the step's
        metadata say below `["unickpt"]`. Called on each process, in the call that saves.

        Arguments:
            call: to save it.
        """
        return None, {}

    def after_save(self, feature: SaveFeature | None, error: BaseException | None) -> None:
        """Records that a save has ended. What this raises is logged; it does not fail the save.

        Arguments:
            feature: with which it was saved; None if the call itself raised.
            error: why it failed; None if it is committed.
        """

    def after_load(self, step: int, path: str, stored: Reader | None) -> None:
        """Records that the run resumes from a step. Called on each process.

        Arguments:
            step: its number.
            path: from which it was loaded, which need not be where the run saves.
            stored: its checkpoint; None if that is not of unickpt.
        """

    def after_removal(self, steps: Collection[int]) -> None:
        """Records that steps were removed, to go back to an earlier one."""
