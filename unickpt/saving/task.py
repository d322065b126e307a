"""One save, step by step: prepared on the calling thread, run there or on another."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, replace
from enum import Enum, auto
from functools import cached_property, partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from unickpt.commit.attempt import Attempt, is_unneeded
from unickpt.commit.coordinator import Committed, Coordinator
from unickpt.commit.messages import NO_CHUNKS, Record, Totals, WriteMore
from unickpt.errors import SaveConflict, SaveTimeout, StorageError
from unickpt.format.index import Index
from unickpt.frameworks.adapter_protocol import ArraySource
from unickpt.frameworks.host_memory import check_flags, share
from unickpt.frameworks.leaves import adapters, job_group
from unickpt.frameworks.process_group import (
    Group,
    members_of,
    processes_on_node,
    session_of,
)
from unickpt.options import SaveOptions
from unickpt.references.value_places import WriteItem
from unickpt.save_report import SaveReport
from unickpt.saving.describe import Description, describe
from unickpt.saving.save_features import SaveFeatures
from unickpt.saving.write_plan import (
    BorrowingSource,
    ChunkSource,
    LearnedBytes,
    Sharing,
    Staged,
    WritePlan,
    check_alone,
    plan_again,
    plan_writes,
)
from unickpt.saving.writer import ChunkWriter
from unickpt.storage import data_files, paths
from unickpt.storage.locations import Location
from unickpt.threads import Events, Ticker, calling_user

if TYPE_CHECKING:
    from unickpt.features import PhaseObserver
    from unickpt.progress import ProgressFunction
    from unickpt.references.policy import ReferenceSource

FIRST_AFTER_S, EVERY_S = 5.0, 10.0
"""When a process that saves alone first reports its progress, and its longest pause between two
reports. Of several processes, see `commit.liveness`."""


class Timings:
    """Seconds of one save, from its creation on; see `SaveReport.phases`.

    `lap` is for the thread of the caller, `phase` for the thread that saves. Both write a phase
    once, so they may be used at the same time.
    """

    observers: Sequence[PhaseObserver] = ()
    """Called for each phase."""

    def __init__(self) -> None:
        self._started, self._asked = time.perf_counter(), time.time()
        self._lap_ended = 0.0
        self.phases: dict[str, float] = {}
        self._began: dict[str, float] = {}
        self.blocked_s = 0.0
        """How long the call blocked the caller; 0 if it returns only after the save."""

    @property
    def elapsed(self) -> float:
        """Seconds since the save was requested."""
        return time.perf_counter() - self._started

    def lap(self, phase: str) -> None:
        """Ends a phase of the call, which began when the one before it ended."""
        self._began[phase] = began = self._lap_ended
        self._lap_ended = time.perf_counter() - self._started
        self._end(phase, began, self._lap_ended)

    @contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """A phase of the thread that saves; not recorded if it fails."""
        began = self._began[phase] = time.perf_counter() - self._started
        yield
        self._end(phase, began, time.perf_counter() - self._started)

    def _end(self, phase: str, began: float, ended: float) -> None:
        self.phases[phase] = ended - began
        for observer in self.observers:
            try:
                observer.phase(phase, self._started + began, self._started + ended)
            except Exception:
                _log.exception("an observer of the phase %r of a save failed", phase)

    @property
    def statistics(self) -> dict[str, float]:
        """All phases until now, for the record: when each began, and how long it took or has taken
        so far; and `began`, when the save was requested, by this host's clock."""
        now, statistics = self.elapsed, {"began": self._asked, "blocked_s": self.blocked_s}
        for phase, began in list(self._began.items()):  # the caller's thread may add one
            statistics[f"{phase}_at"] = began
            statistics[f"{phase}_s"] = self.phases.get(phase, now - began)
        return statistics

    def unblock(self) -> None:
        """Records that the call returns now, before the save has ended."""
        self.blocked_s = self.elapsed


_log = logging.getLogger("unickpt")


class SaveState(Enum):
    """How far a save is in this process. Each state may be followed by the next, or by FAILED.

    `commit.attempt.AttemptState` is the state of the attempt of all processes together. It
    determines what may be removed after a failure.
    """

    REQUESTED = auto()
    """The processes have agreed on the attempt's name; nothing is known of the tree."""
    DESCRIBED = auto()
    """Every leaf is described; nothing was written. Until WRITING, `keep` may replace the arrays,
    and any thread may `plan`."""
    WRITING = auto()
    """This process writes its chunks. From here on, one thread owns the save."""
    COMMITTING = auto()
    """This process has published its record; it commits, or waits for the commit."""
    COMMITTED = auto()
    FAILED = auto()
    """The other processes were notified, and this process's files are removed where possible."""


class SaveEvent(Enum):
    """Events of a save in the background, for which its threads wait."""

    WRITABLE = auto()
    """Writing would not slow the caller down, or the caller waits for it."""
    RETURNED = auto()
    """The call has staged what it must."""
    TRANSFERRING = auto()
    """Devices have started those background copies that they can make."""
    SAFE = auto()
    """The state may be changed."""
    STAGED = auto()
    """It needs no more memory for copies."""
    ENDED = auto()
    """The save is over, and the next one may start."""


class SaveTask:
    """A save: `describe` what to save, `plan` which process writes what, `run` it.

    Arguments:
        path, overwrite, options: as for `save`; or the location of a path.
        find_base: returns the base when chunks are about to be written, if `options` name none.
        group: the processes, if the caller has asked for them.

    Raises:
        InvalidPath, SaveTimeout: see `save`.
    """

    description: Description

    def __init__(
        self,
        path: paths.PathLike | Location,
        overwrite: bool,
        options: SaveOptions,
        find_base: Callable[[], paths.PathLike | None] = lambda: None,
        group: Group | None = None,
    ) -> None:
        check_flags(overwrite=overwrite)
        self.timings = Timings()
        self.state, self.events = SaveState.REQUESTED, Events[SaveEvent]()
        self._overwrite, self.options, self._find_base = overwrite, options, find_base
        self.location = paths.resolve(path)
        self.among = adapters()
        """The frameworks of the program."""
        self.group = group or job_group(options.group, options.timeout_s, saves=True)
        try:
            self.attempt = self.group.next_attempt()
        except SaveTimeout as error:
            timeout = SaveTimeout(f"{self.location}: {error}. Nothing was written.")
            send_failure(options, self.location.url, self.group, timeout)
            raise timeout from None
        self.learned: LearnedBytes | None = None
        """What the next saves need of this one; None for a process that saves alone."""
        if self.group.count > 1:
            self.learned = LearnedBytes(session_of(self.group))
        self.on_node = processes_on_node(self.group)
        """How many processes share the memory of this node."""
        self.working_bytes = share(options.budget_bytes, self.on_node)
        """Memory of this process to write with, in bytes."""
        self._has_begun = False  # to make folders
        self.features = SaveFeatures(options, self.attempt, self.group)
        self.timings.observers = self.features.observers()
        self.known: Any = None
        """The facts that the next save needs in order to skip unchanged arrays (`skipping`)."""
        self._samples: dict[int, Callable[[], int]] = {}

    def _become(self, state: SaveState) -> None:
        """Enters a state; the only place where it changes."""
        is_next = state.value == self.state.value + 1
        assert is_next or state is SaveState.FAILED, f"{self.state} -> {state}"
        self.state = state

    # --- preparing -----------------------------------------------------------------------------

    def describe(self, tree: Any, metadata: Mapping[str, Any] | None) -> None:
        """Describes every leaf; writes nothing.

        Arguments:
            tree, metadata: as for `save`.

        Raises:
            UnsupportedLeaf, CoverageError: see `save`; the save has failed.
        """
        with self.failing():
            self.features.choose()
            self.describe_leaves(tree, metadata)

    def describe_leaves(self, tree: Any, metadata: Mapping[str, Any] | None) -> None:
        """As `describe`, after `features.choose`; the caller fails the save on an error."""
        features = self.features
        description = describe(tree, metadata, self.group, self.options, self.among, features)
        if features.write_filter is not None:
            description = description.selected(features.write_filter)
        if self.group.count == 1:
            check_alone(description)
        elif not self.options.check_replicas:
            self._samples = {
                number: _keep_sample(source)
                for number, (name, source) in enumerate(description.sources.items())
                if source.assumed
                and source.fragments
                and not description.leaves_out(name, source.fragments[0].box)
            }
        self.description = description
        self._become(SaveState.DESCRIBED)
        self.timings.lap("describe")

    def describe_again(self, description: Description, assumed: Iterable[Assumed]) -> None:
        """As `describe`, for a tree whose description is cached.

        Arguments:
            description: of the tree.
            assumed: the arrays that are only assumed to be equal on all processes.
        """
        self.description = description
        if self.group.count > 1 and not self.options.check_replicas:
            self._samples = {
                number: partial(_sample, source) if is_kept else _keep_sample(source)
                for number, source, is_kept in assumed
            }
        self._become(SaveState.DESCRIBED)
        self.timings.lap("describe")

    def keep(self, sources: Mapping[str, ArraySource], working_bytes: int) -> None:
        """Saves these arrays instead of the described ones, which hold the same but may change.
        Limits the memory for writing, because the rest is for staging."""
        assert self.state is SaveState.DESCRIBED
        self.description = replace(self.description, sources=sources)
        self.working_bytes = working_bytes

    def plan(self, earlier_plan: WritePlan | None = None) -> WritePlan:
        """Determines which chunks this process holds, and which it writes.

        Arguments:
            earlier_plan: the plan of an earlier save of the same tree.
        """
        with self.timings.phase("plan"):
            jobs = () if self.learned is None else self.learned.jobs
            sharing = Sharing(self.group.index, jobs, self.options.writers)
            if earlier_plan is None:
                return plan_writes(self.description, sharing)
            return plan_again(earlier_plan, self.description, sharing)

    def check_destination(self) -> None:
        """Raises an error if the destination cannot be used; see `save`."""
        self._attempt.check_new()
        self._attempt.check_destination(self._overwrite)

    @cached_property
    def _attempt(self) -> Attempt:  # created on first use, rarely while the caller waits
        options, context = self.options, paths.context(fsync=self.options.fsync)
        more = context, options.timeout_s, options.timing
        return Attempt(self.location, self.group, self.attempt, *more)

    @contextmanager
    def failing(self, *, refused: bool = False) -> Iterator[None]:
        """Fails the save on an error: notifies the other processes and removes its files."""
        try:
            yield
        except BaseException as raised:
            self._become(SaveState.FAILED)
            error = raised
            if isinstance(raised, Exception):
                from unickpt.frameworks.members import explained

                error = explained(self._attempt.explained(raised), members_of(self.group))
            self._attempt.publish_error(error, refused=refused)
            if self._has_begun or self.group.count > 1:
                self._attempt.discard()
            if error is raised:
                raise
            raise error from (None if isinstance(error, SaveConflict) else raised)

    # --- running -------------------------------------------------------------------------------

    def run(
        self,
        plan: WritePlan,
        source: ChunkSource,
        before_publish: Callable[[], None] = lambda: None,
        before_commit: Callable[[], None] = lambda: None,
    ) -> SaveReport:
        """Writes this process's chunks, then commits or waits for the commit.

        Arguments:
            plan: from `plan`.
            source: provides the chunks.
            before_publish: called when this process has written its chunks; an error fails the
                save.
            before_commit: called by the coordinator right before the commit; likewise.
        """
        timings = self.timings
        with self.failing(), self._reporting() as progress, ExitStack() as reports:
            with timings.phase("write"):
                writer, record = self._write(plan, source, reports, progress)
                before_publish()
                self._publish(record, writer, source.staged)
            with timings.phase("commit"):
                write_more = partial(_write_more, writer, plan.held_items)
                totals, committed = self._commit(write_more, before_commit, reports.close)
        report = self._report(totals, committed, writer, source.staged)
        if _log.isEnabledFor(logging.INFO):
            _log_report(report)
        if committed is not None and committed.merged.differences:
            from unickpt.commit import differing_replicas

            differing_replicas.warn(committed.merged.differences)
        return report

    def _reporting(self) -> AbstractContextManager[ProgressFunction | None]:
        """The function that reports the bytes that are done, if there is one."""
        progress = self.options.progress
        if not progress:
            return nullcontext()
        from unickpt.progress import reporting

        return reporting(progress, "saving", self.group.index)

    def _write(
        self,
        plan: WritePlan,
        source: ChunkSource,
        reports: ExitStack,
        progress: ProgressFunction | None,
    ) -> tuple[ChunkWriter, Record]:
        self.check_destination()
        self._has_begun = True
        self._attempt.planned_bytes = sum(map(attrgetter("nbytes"), plan.own_items))
        self._attempt.description = self.description.digest
        base = self._open_base()
        self._attempt.own.child(data_files.FOLDER).make()
        self._become(SaveState.WRITING)
        if base is not None:
            source = BorrowingSource(source, base)
        writer = ChunkWriter(
            *(self._attempt, self.description, self.working_bytes, source, base, progress),
            encoder=self.features.encoder,
            observers=self.features.file_observers(self._attempt.own),
        )
        self._begin_reports(writer, reports)
        try:
            record = writer.write_all(plan.own_items)
        except StorageError as error:  # such as that the base was removed after the commit
            if not is_unneeded(self._attempt):
                raise
            _log.warning("%s: others write the part of this process: %s", self.location, error)
            record = Record(self.description.digest, NO_CHUNKS)
        for observer in writer.observers:
            observer.end(record.files)
        if self.description.selection is not None:
            record = replace(record, units=self.description.selection.steps)
        if notes := self.features.notes(base, self.description.index.arrays):
            record = replace(record, notes=notes)
        if self.group.count > 1:
            own_groups = [
                g for g in plan.group_bytes.items() if (g[0] or (0,))[0] == self.group.index
            ]
            job = "" if plan.job is None else plan.job.digest
            record = replace(record, group_bytes=tuple(own_groups), job=job)
        return writer, self._with_replicas(record, plan, source)

    def _begin_reports(self, writer: ChunkWriter, reports: ExitStack) -> None:
        """Reports the progress of this process until the stack is closed."""

        def progress() -> tuple[float, int, str]:
            return self.timings.elapsed, writer.done_bytes, _activity(writer, self.description)

        if self.group.count == 1:
            ticker = Ticker("unickpt report", FIRST_AFTER_S, EVERY_S)
            ticker.start(lambda number: self._report_progress(progress, number))
        else:
            from unickpt.commit.liveness import Liveness  # only where there are others

            liveness = Liveness(self._attempt, progress)
            reports.callback(liveness.close)
            ticker = Ticker("unickpt report", *liveness.pauses, calls_at_end=False)
            ticker.start(liveness.tick)
        reports.callback(ticker.close)

    def _report_progress(self, progress: Callable[[], tuple[float, int, str]], number: int) -> None:
        from unickpt.commit.progress_writer import Reporter  # a short save reports nothing

        Reporter(self._attempt, progress).report(number)

    def _open_base(self) -> ReferenceSource | None:
        """The chunks that the save references instead of writing. Raises as
        `ReferencePolicy.open`."""
        options, description = self.options, self.description
        base = self._find_base() if options.base is None else options.base
        if base is None and description.is_whole:
            return None
        from unickpt.references.policy import WritingSave

        source, selection = self.features.open_base(
            WritingSave(
                self.location,
                self._attempt.own,
                base,
                options.base is not None,
                options.compression,
                description.selection,
                description.skipped,
                self.working_bytes,
                options.fsync,
                self.features.encoder,
            )
        )
        if selection is not description.selection and selection is not None:
            self.description = description.with_selection(selection)
        return source

    def _publish(self, record: Record, writer: ChunkWriter, staged: Staged) -> None:
        statistics = {
            "chunks": writer.count,
            "reused_bytes": writer.reused_bytes,
            "stored_bytes": writer.stored_bytes,
            "kept_bytes": writer.kept_bytes,
            **asdict(staged),
            **self.timings.statistics,
        }
        self._attempt.publish(record.with_statistics(statistics))
        self._become(SaveState.COMMITTING)

    def _commit(
        self,
        write_more: WriteMore,
        before_commit: Callable[[], None],
        end_reports: Callable[[], None],
    ) -> tuple[Totals, Committed | None]:
        """Commits, or waits for the commit; only the coordinator has the second."""
        committed = None
        if self.group.index == 0:
            description = self.description

            def check(merged: Index) -> None:
                self.features.check(merged.arrays)
                if self.features.all:
                    root = self._attempt.folder.child("root")
                    for observer in self.features.file_observers(root):
                        observer.end(sorted(root.files(self._attempt.context)))
                before_commit()

            coordinator = Coordinator(self._attempt, write_more, self.features.policies)
            index, digest = description.index, description.digest
            committed = coordinator.commit(index, digest, check, end_reports)
            totals, job = committed.totals, committed.job
        else:
            from unickpt.commit import participant  # only where there are several

            totals = participant.wait_committed(self._attempt, write_more)
            jobs = () if self.learned is None else self.learned.jobs
            job = participant.job_bytes(self._attempt, jobs)
        if self.learned is not None:
            self.learned.job = job
        self._become(SaveState.COMMITTED)
        return totals, committed

    def _report(
        self, totals: Totals, committed: Committed | None, writer: ChunkWriter, staged: Staged
    ) -> SaveReport:
        timings, encoder = self.timings, self.features.encoder
        merged = None if committed is None else committed.merged
        return SaveReport(
            url=self.location.url,
            arrays=totals.arrays,
            bytes=totals.nbytes,
            written_bytes=writer.nbytes,
            chunks=writer.count,
            reused_bytes=writer.reused_bytes,
            patched_chunks=writer.extended,
            stored_bytes=writer.stored_bytes,
            saved_bytes=0 if encoder is None else encoder.saved_bytes,
            processes=self.group.count,
            seconds=timings.elapsed,
            phases=timings.phases,
            process=self.group.index,
            blocked_s=timings.blocked_s or timings.elapsed,
            **asdict(staged),
            writers=() if committed is None else committed.writers,
            extra={} if merged is None else merged.extra,
            bases=() if merged is None else merged.bases,
            replicas_differ=tuple(difference.name for difference in merged.differences)
            if merged
            else (),
            metadata=self.description.index.metadata,
        )

    def _with_replicas(self, record: Record, plan: WritePlan, source: ChunkSource) -> Record:
        """A record with fingerprints of this process's assumed replicas."""
        if not (self.options.check_replicas or self._samples):
            return record
        from unickpt.saving import fingerprints

        if self.options.check_replicas:
            rows = fingerprints.whole(plan.held_items, record, source.digest)
        else:
            rows = fingerprints.sampled(self._samples)
        return replace(record, replicas=rows, checked=self.options.check_replicas)


Assumed = tuple[int, ArraySource, bool]
"""An array that is assumed to be equal on all processes: its number, the array, and whether it
stays unchanged until the save has ended."""


def _sample(source: ArraySource) -> int:
    return _keep_sample(source)()


def _keep_sample(source: ArraySource) -> Callable[[], int]:
    from unickpt.saving import fingerprints

    return fingerprints.keep_sample(source)


def _log_report(report: SaveReport) -> None:
    _log.info(
        "saved %s: %.3g GB in %.2f s (%.2f GB/s), blocked the caller for %.3f s",
        *(report.url, report.bytes / 1e9, report.seconds, report.gb_per_s, report.blocked_s),
    )
    if report.processes > 1 and report.writers:
        _log.info(
            "%s: the busiest of %d processes wrote %.3g GB, and %.3g GB is the mean",
            *(report.url, report.processes, report.busiest_bytes / 1e9, report.mean_bytes / 1e9),
        )
    if report.bases:
        _log.info("%s cannot be read without %s", report.url, ", ".join(report.bases))


def call_metrics(options: SaveOptions, report: SaveReport) -> None:
    """Calls `SaveOptions.metrics` and `SaveFeature.committed` at the very end of a save: they may
    save, wait or load."""
    calls: list[tuple[str, Callable[[SaveReport], None]]]
    calls = [(feature.name, feature.committed) for feature in options.all_features]
    if options.metrics is not None:
        calls.append(("SaveOptions.metrics", options.metrics))
    for name, call in calls:
        try:
            with calling_user:
                call(report)
        except Exception:
            _log.exception("%s failed; the checkpoint %s is committed", name, report.url)


def send_failure(options: SaveOptions, url: str, group: Group, error: BaseException) -> None:
    """Sends `SaveOptions.metrics` the event that a save failed, at its very end."""
    from unickpt.quoting import error_text
    from unickpt.run_event import RunEvent, send_event

    place = group.index, group.count
    send_event(options.metrics, RunEvent("save failed", url, None, *place, error_text(error)))


def _activity(writer: ChunkWriter, description: Description) -> str:
    """What a writer does now."""
    from unickpt.commit.progress_reports import COPY, SEND  # a short save reports nothing

    if (item := writer.fetching) is not None:
        fragments = description.sources[item.entry.name].fragments
        return COPY if any(fragment.memory.on_device for fragment in fragments) else ""
    return SEND if writer.is_sending and not writer.is_local else ""


def _write_more(
    writer: ChunkWriter, held_items: Sequence[WriteItem], request: Mapping[str, list[int]]
) -> Record:
    """Writes chunks that the coordinator requests, because their planned writer lacks them."""
    requested = {(name, position) for name, positions in request.items() for position in positions}
    chunks = (chunk for item in held_items for chunk in item.chunks())
    chunks = (c for c in chunks if (c.entry.name, c.position) in requested)
    record = writer.write_more([*chunks])
    for observer in writer.observers:
        observer.end(record.files)
    return record
