"""The interface for features of saves: the items of `SaveOptions.features`, and their hooks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from unickpt.save_report import SaveReport

if TYPE_CHECKING:
    from unickpt.arrays.box import Box
    from unickpt.format.reader_protocol import Reader
    from unickpt.storage.data_files import FileView
    from unickpt.storage.locations import Location
    from unickpt.write_filter import Selection, WriteFilter


class PhaseObserver(Protocol):
    """Records the phases of one save in this process, such as a tracer."""

    def phase(self, name: str, began: float, ended: float) -> None:
        """Records a phase that has ended, on the thread that ran it. An error is logged.

        Arguments:
            name: one of the keys of `SaveReport.phases`.
            began, ended: seconds, as of `time.perf_counter`.
        """


class FileObserver(Protocol):
    """Sees the files that one save writes in one folder, before the commit; it may add others in
    `data_files.ADDED_FOLDER` below it. An error fails the save."""

    multiple: int
    """Data files come in a multiple of this number, of about equal size, as far as chunks allow."""
    buffers: int
    """How many times the bytes of a data file it keeps in memory, at most."""

    def begin(self) -> FileView:
        """Called for each new data file, which may turn out to have no bytes."""

    def end(self, paths: Sequence[str]) -> None:
        """Called when all files are complete, and again if more are written afterwards.

        Arguments:
            paths: of all files, also of those that were linked, or not seen.
        """


class SaveFeature:
    """An addition to saves beyond the core; a base class whose methods do nothing.

    A feature that also fulfils `Codec` chooses how arrays are stored.
    """

    name: str
    """The name of the feature; a save has at most one feature of each name."""
    filters_copies = False
    """Whether `copy_filter` and `recovered` may return selections."""

    def check(self, arrays: Iterable[str]) -> None:
        """Checks the names of all arrays; called on the coordinator before the commit.

        Raises:
            UnsupportedLeaf: the feature does not fit them; the save fails.
        """

    def write_filter(self, attempt: str) -> WriteFilter | None:
        """The units that a save leaves out; None for none. Called on each process, in the saving
        call.

        Arguments:
            attempt: the name that the save will have in the index.

        Raises:
            UnsupportedLeaf: they cannot be determined; the save fails.
        """
        return None

    def copy_filter(self, stored: Reader, base: Reader) -> Selection | None:
        """The units that the copy of a step to the root leaves out, because an earlier copy has
        them; None for none. Called on process 0, if `Run.leaves_out` is false.

        Arguments:
            stored: the step.
            base: the copy of an earlier step of the same job.
        """
        return None

    def recovered(
        self, stored: Reader, copy: Reader, lost: Iterable[tuple[str, Box]]
    ) -> Selection | None:
        """The units of a step that are taken from its copy, because chunks of them are lost; None
        if this is not possible. Called on process 0, if `Run.leaves_out` is false.

        Arguments:
            stored: the step.
            copy: of it, which leaves out units.
            lost: the names of arrays, each with the box of a chunk that neither has.
        """
        return None

    def observer(self) -> PhaseObserver | None:
        """Records the phases of the save that begins now; None for no observer. Called on each
        process, in the saving call."""
        return None

    def file_observer(self, folder: Location, *, fsync: bool) -> FileObserver | None:
        """Sees the files of a save in one folder; None for no observer. Called on each process for
        its own folder, and on the coordinator for that of the B-tree.

        Arguments:
            folder: in which the save writes.
            fsync: whether the save flushes files to disk.
        """
        return None

    def note(self) -> Any:
        """What this process says to the coordinator of the save; None for nothing. Called on each
        process when it has written its part."""
        return None

    def merge_notes(self, notes: Mapping[int, Any]) -> Any:
        """What the index says of the feature, from the notes of all processes, by process; None for
        nothing. Called on the coordinator before the commit; an error fails the save."""
        return None

    def committed(self, report: SaveReport) -> None:
        """Called on each process after the commit, at the same time as `SaveOptions.metrics`; on
        the coordinator, the report has what all processes wrote. An error is logged.

        Arguments:
            report: of the save.
        """

    def in_run(self, run: Run) -> RunFeature | None:
        """The hooks of a `Checkpointer` before each save and after each load; None for none."""
        return None


@dataclass(frozen=True)
class Run:
    """The facts about a run that a feature gets.

    Arguments:
        is_local: whether steps are saved on a local disk.
        path: the path of a step, by its number.
        wait_ended: waits until all saves that have begun are committed, or have failed.
        leaves_out: whether a save may leave units out; else only its copy in the root does, by
            `SaveFeature.copy_filter`.
    """

    is_local: bool
    path: Callable[[int], str]
    wait_ended: Callable[[], None]
    leaves_out: bool = True


@dataclass
class SaveCall:
    """A call of `Checkpointer.save`; features read their own arguments from it.

    Arguments:
        step: that is saved.
        metrics: as given; on process 0 only.
        keywords: the keywords for features, as given.
        is_coordinator: whether this is process 0, whose metrics are stored.
    """

    step: int
    metrics: Mapping[str, float] | None = None
    keywords: dict[str, Any] = field(default_factory=dict)
    is_coordinator: bool = True


class RunFeature:
    """The part of a feature that lives as long as a run; a base class whose methods do nothing."""

    needs_steps_before = False
    """Whether steps reference earlier steps. These are then retired instead of kept, if no rule
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
            path: from which it was loaded; not necessarily where the run saves.
            stored: its checkpoint; None if another system wrote it.
        """

    def after_removal(self, steps: Collection[int]) -> None:
        """Records that steps were removed, to return to an earlier one."""
