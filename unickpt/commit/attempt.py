"""Commit: the processes' records -> one atomic root, coordinated through the storage alone.

Every process ends its part with a record in the attempt's folder, or with an error note. The
coordinator reads the records, checks that each chunk was written exactly once, builds the root
database next to them, and then writes its manifest, if the root is still what all processes found
when they started. The processes do not communicate in any other way.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cached_property, partial

import tensorstore as ts

from unickpt._version import LIBRARY
from unickpt.commit import attempt_state, borrowers, outcome, progress_reports, root
from unickpt.commit.attempt_state import AttemptState
from unickpt.commit.merge import Merged, MergePolicies, merge_all
from unickpt.commit.merge_chunks import Requests
from unickpt.commit.messages import (
    MORE,
    OK,
    REQUEST,
    Announcement,
    Notes,
    Record,
    Records,
    Totals,
    WriteMore,
    statistics_of,
)
from unickpt.commit.progress_reports import Report
from unickpt.commit.root import Root
from unickpt.commit.waits import Waits
from unickpt.errors import (
    ProcessFailed,
    SaveConflict,
    SaveTimeout,
    StorageError,
    out_of_memory,
)
from unickpt.format import codec, index_json, timing, written_index
from unickpt.format.borrowed import LINKED_FOLDER
from unickpt.format.index import BORROWED_KEY, DIGESTS_KEY, INDEX_KEY, Index
from unickpt.format.timing import Arrivals
from unickpt.frameworks.process_group import Group, saved_apart
from unickpt.storage import data_files, errors, local_folders, locations
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

# After a process gives up, how long the coordinator may take to finish a commit that was in
# progress when it last checked for such a process.
_GRACE_S = 1.0


class Attempt:
    """One attempt of a group of processes to save one checkpoint; see `AttemptState`.

    Arguments:
        location: the checkpoint's folder.
        group: the processes.
        name: the attempt's name, the same on all processes.
        context: the TensorStore context of this save.
        timeout_s: how long to wait for other processes.
    """

    def __init__(
        self, location: Location, group: Group, name: str, context: ts.Context, timeout_s: float
    ) -> None:
        self.location, self.group, self.name = location, group, name
        self.context, self.timeout_s = context, timeout_s
        self._folder = location.child(f"processes/{name}")
        self._root = Root(Database(location, context))
        self._notes = Notes(self._folder, group, context, timeout_s)
        self._arrivals, self._timing = Arrivals(group.count), b""
        self._missing = local_folders.count_missing(location.path) if location.is_local else 0
        self._has_records = group.count > 1  # a process alone keeps its record
        self._state = AttemptState.OPEN
        self._found: root.State | None = None
        self._totals: Totals | None = None
        self._more: Records = ()  # of processes that wrote chunks of others, too
        self.writers: tuple[Mapping[str, float], ...] = ()
        """The statistics in each process's record, once the coordinator has committed."""
        self.merged: Merged | None = None  # likewise: what all processes saved
        self.planned_bytes = 0
        """What this process has to write, for messages."""

    @cached_property
    def _waits(self) -> Waits:
        return Waits(self.location, self._folder, self.context, self.group)

    def check_destination(self, overwrite: bool) -> None:
        """Refuses a destination that is in use.

        Raises:
            CheckpointExists: it holds a checkpoint (without `overwrite`) or foreign files.
            UnsupportedFormat: it holds one that needs what this unickpt does not know.
            StorageError: the storage cannot be read.
        """
        root.refuse_other_files(self.location)
        with self._translating():
            found = self._root.read()
            # For a bucket that does not exist, S3 only reports that the object is missing; if OCDBT
            # then writes there, TensorStore ends the process. Listing reports the missing bucket.
            if self.location.is_remote:
                self._notes.check_reachable()
        if found.digest:
            root.refuse_checkpoint(self.location, self.context, overwrite=overwrite)
        self._found = found
        self._become(AttemptState.WRITING)

    def make_folder(self) -> None:
        """Creates this process's folder, if the storage has folders.

        Raises:
            StorageError: names the directory that cannot be created.
        """
        self.folder_of(self.group.index).child(data_files.FOLDER).make()

    def check_new(self) -> None:
        """Refuses an attempt name that was used before: its old records would be taken for new.

        Raises:
            SaveConflict: names the session.
        """
        if self.group.count == 1:
            return
        with self._translating():
            used = self._notes.was_used()
        if used:
            raise SaveConflict(
                f"{self.location}: attempt {self.name!r} was used before; the session of a "
                "ProcessGroup must be new for every run of the job"
            )

    def folder_of(self, process: int) -> Location:
        """The folder in which a process writes."""
        return self._folder.child(f"{process:05d}")

    def report(self, report: Report) -> None:
        """Says, while a save takes long, how far this process is."""
        self._has_records = True
        records = self._folder.child("records").store(self.context)
        progress_reports.write(records, self.group.index, report)

    @property
    def phase(self) -> str:
        """What this process does: one of `reports.WORDS`."""
        if self._state in (AttemptState.OPEN, AttemptState.WRITING):
            return progress_reports.WRITE
        return progress_reports.WAIT if self._arrivals.waiting else progress_reports.COMMIT

    def explained(self, error: Exception) -> Exception:
        """The error to raise: the storage's and a lack of memory as ours, or `SaveConflict` if
        another job committed here meanwhile, which removes the files of attempts that lost."""
        if isinstance(error, MemoryError):
            return out_of_memory(f"saving to {self.location}", error)
        if not isinstance(error, StorageError) or self._state is AttemptState.OPEN:
            return error
        try:
            if self._may_remove or self.group.index > 0:
                self._is_committed()
        except SaveConflict as conflict:
            return conflict
        except Exception:
            pass  # reading the storage fails too; its first error is more useful
        if not isinstance(error, Failed):
            return error
        room = locations.room_text(self.location, error, self.planned_bytes, self._folder.path)
        return errors.writing_failed(error, f"saving to {self.location}", room)

    def publish(self, record: Record, kind: str = OK) -> None:
        """Publishes this process's record, which ends its part."""
        own = self.folder_of(self.group.index)
        self._sync(own.child(data_files.FOLDER))
        if any(path.startswith(f"{LINKED_FOLDER}/") for path in record.files):
            self._sync(own.child(LINKED_FOLDER))
        is_coordinator = self.group.index == 0
        self._become(AttemptState.MERGING if is_coordinator else AttemptState.PUBLISHED)
        self._notes.publish(replace(record, replaces=self._digest_found), kind)
        self._arrivals.published()

    def publish_error(self, error: BaseException, *, refused: bool = False) -> None:
        """Reports to the others why this process gives up; does nothing in a job of one.

        Arguments:
            error: what happened.
            refused: whether this process did not start, because an earlier save failed on it.
        """
        with suppress(Exception):  # the storage itself may be what failed
            if self.group.count > 1 and not self.location.foreign_files():
                self._notes.publish_error(error, settles=self._may_remove, refused=refused)

    def check_others(self) -> None:
        """Raises `ProcessFailed` with the message of a process that gave up."""
        self._notes.poll_now_and_then()

    def wait_committed(self, write_more: WriteMore) -> Totals:
        """Waits, in all processes but the coordinator, until the checkpoint exists.

        Arguments:
            write_more: writes more chunks, if the coordinator requests them.

        Raises:
            ProcessFailed: another process gave up.
            SaveTimeout: the coordinator neither committed nor gave up in time.
            SaveConflict: another job committed at this path meanwhile.
        """
        with self._explaining():
            try:
                self._wait(write_more)
            except (ProcessFailed, SaveTimeout) as error:
                if self._may_remove or not self._was_committed_after_all(error):
                    raise
            self._become(AttemptState.COMMITTED)
            assert self._totals is not None
            return self._totals

    def commit(
        self,
        index: Index,
        digest: int,
        write_more: WriteMore,
        check: Callable[[Index], None] = lambda merged: None,
        policies: MergePolicies | None = None,
    ) -> Totals:
        """Merges and commits what all processes wrote; only for the coordinator.

        Arguments:
            index: what the coordinator itself has to save.
            digest: of that index, as in the coordinator's record.
            write_more: writes more of the coordinator's own chunks.
            check: called right before the commit, with what all processes saved; an error
                prevents it.
            policies: what is asked how notes are merged, and how arrays are stored.

        Raises:
            ProcessFailed, SaveTimeout: another process gave up, or is late.
            CoverageError: an array is not covered exactly once.
            SaveConflict: another job committed at this path meanwhile.
        """
        with self._explaining():
            return self._commit({digest: index}, write_more, check, policies or MergePolicies())

    def discard(self) -> None:
        """Ends a failed save: removes what was written, if no checkpoint can need it any more.

        Every process removes its own data, and that of processes that left before it. The last one
        to leave removes the rest, because until then the others read notes. If a process died, the
        rest stays until the next save at this path, or the next `Checkpointer`.
        """
        with suppress(Exception):
            if self._may_remove:
                self._remove_data({self.group.index})
        self._notes.retry_error()  # a full disk may have room for a note now
        with suppress(Exception):
            left, made = {self.group.index}, self._missing
            if self.group.count > 1:
                if self.location.foreign_files():
                    return  # as in `publish_error`: nothing was written
                left, made = self._notes.leave(self._missing)
            if not self._may_remove:
                return
            if len(left) < self.group.count:
                self._remove_data(left)
                return
            self._folder.remove(self.context)
            if self.location.is_local:
                local_folders.remove_made(self.location.path, made)

    def _remove_data(self, processes: Iterable[int]) -> None:
        for process in processes:
            self.folder_of(process).remove(self.context)
            if process == 0:
                self._folder.child("root").remove(self.context)

    def _become(self, state: AttemptState) -> None:
        """Enters a state; the only place where it changes."""
        assert state in attempt_state.NEXT[self._state], f"{self._state} -> {state}"
        self._state = state

    @property
    def _may_remove(self) -> bool:
        """Whether it is certain that no process commits what this process wrote."""
        return self._state in attempt_state.REMOVABLE or self._notes.settled

    def _sync(self, folder: Location) -> None:
        if self.context["file_io_sync"].to_json():
            folder.sync(self.location, max(1, self._missing))

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except Failed as error:
            raise errors.writing_failed(error, str(self.location)) from error

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            explained = self.explained(error)
            if explained is error:
                raise
            # After a conflict, the storage's error says only that the other job removed files.
            raise explained from (None if isinstance(explained, SaveConflict) else error)

    # --- waiting -------------------------------------------------------------------------------

    @property
    def _digest_found(self) -> str:
        assert self._found is not None, "the destination is checked before anything is written"
        return self._found.digest

    def _collect(self, processes: Sequence[int], kind: str) -> Records:
        late = list(processes)

        def all_there(notes: set[str]) -> bool:
            late[:] = self._notes.late(processes, kind)
            self._arrivals.looked(late)
            if not late:
                return True
            if self.group.index in late:
                raise self._gone()
            if self._root.read().digest != self._digest_found:
                raise self._conflict("during this save")
            return False

        self._until(all_there, processes, kind, late)
        return self._notes.records(processes, kind)

    def _wait(self, write_more: WriteMore) -> None:
        everyone = range(self.group.count)
        notes = self._until(lambda notes: REQUEST in notes or self._is_committed(), everyone, OK)
        if REQUEST in notes:
            mine = self._notes.requested()
            if mine:
                self.publish(write_more(mine), MORE)
            self._until(lambda notes: self._is_committed(), everyone, OK)

    def _until(
        self,
        ready: Callable[[set[str]], bool],
        processes: Sequence[int],
        kind: str,
        late: Sequence[int] = (),
    ) -> set[str]:
        """Waits until `ready`, and says now and then for whom.

        Arguments:
            ready: whether the wait is over.
            processes, kind: whose records of which kind are awaited.
            late: for the coordinator, which of them `ready` has found missing.

        Raises:
            SaveTimeout: it took too long; names the processes whose records are missing.
        """
        if self.group.count > 1:
            ready = self._waits.patiently(ready, late)
        try:
            return self._notes.wait(ready)
        except TimeoutError:
            missing = self._notes.late(processes, kind)
        raise self._waits.timeout(missing, self.timeout_s)

    def _is_committed(self) -> bool:
        """Whether the root is what the coordinator announced before it wrote it.

        Raises:
            SaveConflict: it is that of another job.
        """
        found = self._root.read().digest
        if found == self._digest_found:
            return False
        self._totals = outcome.committed(
            self.location, self.context, found, self.name, self._notes_of
        )
        if self._totals is None:
            self._become(AttemptState.FAILED)
            raise self._conflict("during this save")
        return True

    def _was_committed_after_all(self, error: Exception) -> bool:
        """Reports that this process gives up, then checks whether the coordinator was faster."""
        self.publish_error(error)
        time.sleep(_GRACE_S)
        return self._is_committed()

    # --- the commit, in the coordinator --------------------------------------------------------

    def _commit(
        self,
        own: Mapping[int, Index],
        write_more: WriteMore,
        check: Callable[[Index], None],
        policies: MergePolicies,
    ) -> Totals:
        records = self._collect(range(self.group.count), OK)
        for process, record in records:
            if record.replaces != self._digest_found:
                raise self._conflict(f"between the start of process 0 and of process {process}")
        merged = self._merge(own, records, write_more, policies)
        self._timing = timing.encode(
            self._arrivals.timing([record.statistics for _, record in records])
        )
        if merged.index.bases:
            borrowers.mark(self.location, merged.index.bases, self.context)
        manifest = self._build_root(merged)
        totals = Totals.of(merged.index)
        older = self.location.child("processes").folders(self.context)
        self._announce(manifest, totals)
        check(merged.index)
        self._write_root(manifest)
        self._become(AttemptState.COMMITTED)
        self._remove_older_attempts(older)
        self.writers = statistics_of(records, self._more)
        self.merged = merged
        return totals

    def _merge(
        self,
        own: Mapping[int, Index],
        records: Records,
        write_more: WriteMore,
        policies: MergePolicies,
    ) -> Merged:
        described = own
        if any(record.description not in own for _, record in records):
            from unickpt.commit.descriptions import read  # only if some processes have others

            described = {**own, **read(records, own, self.folder_of, self.context)}
        request = partial(self._request, write_more=write_more)
        merged = merge_all(records, described, request, policies)
        index = replace(
            merged.index,
            attempt=self.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            library=LIBRARY,
            extra={**merged.index.extra, timing.FEATURE: {}},
        )
        return replace(merged, index=index)

    def _request(self, requests: Requests, write_more: WriteMore) -> Records:
        """Requests chunks that their planned writers do not hold from other processes."""
        self._notes.request(requests)
        ours = self.group.index
        own = [(ours, write_more(requests[ours]))] if ours in requests else []
        self._more = [*own, *self._collect([p for p in requests if p != ours], MORE)]
        return self._more

    def _build_root(self, merged: Merged) -> bytes:
        """Writes the root's B-tree, which refers to the processes' data; returns its manifest."""
        index, chunks = merged.index, merged.chunks
        encoded = index_json.encode(index)
        written_index.check_readable(encoded, str(self.location))
        extra = {
            **codec.zarr_keys(index),
            DIGESTS_KEY: chunks.table.tobytes(),
            timing.TIMING_KEY: self._timing,
            INDEX_KEY: encoded,
        }
        if index.bases:
            extra[BORROWED_KEY] = chunks.borrowed.tobytes()
        manifest = self._root.build(f"processes/{self.name}/root/", index, chunks, extra)
        self._sync(self._folder.child("root"))
        return manifest

    def _announce(self, manifest: bytes, totals: Totals) -> None:
        """Announces what is about to be committed, unless a process has given up meanwhile."""
        replaced = {}
        if self._digest_found:
            replaced = outcome.replaced(self.location, self._digest_found, self._notes_of)
        if self.group.count > 1 or replaced:
            self._notes.announce(Announcement(digest_of(manifest), totals, replaced))
        if self.group.count > 1:
            self._notes.poll()

    def _notes_of(self, attempt: str) -> Notes:
        folder = self.location.child(f"processes/{attempt}")
        return Notes(folder, self.group, self.context, self.timeout_s)

    def _write_root(self, manifest: bytes) -> None:
        """The commit: one write, which the storage refuses if the root has changed."""
        assert self._found is not None

        def begun() -> None:
            self._become(AttemptState.COMMITTING)

        if not self._root.replace(self._found, manifest, self.timeout_s, begun):
            self._become(AttemptState.FAILED)
            raise self._conflict("during this save")
        if not all(self.folder_of(process).exists() for process in range(self.group.count)):
            self._root.retract(manifest, self.timeout_s)
            self._become(AttemptState.FAILED)
            raise self._gone()

    def _conflict(self, when: str) -> SaveConflict:
        return SaveConflict(f"{self.location}: another job committed here {when}{saved_apart()}")

    def _gone(self) -> StorageError:
        return StorageError(
            f"{self.location}: the files written for this checkpoint are gone; the folder was "
            f"removed during the save{saved_apart()}"
        )

    def _remove_older_attempts(self, older: Sequence[str]) -> None:
        """Removes what no committed checkpoint needs; errors here are ignored.

        Arguments:
            older: the attempts that started before this one committed. None of them can commit
                any more, because their processes found another root.
        """
        with suppress(Exception):
            for attempt in older:
                if attempt != self.name:
                    self.location.child(f"processes/{attempt}").remove(self.context)
            if self._has_records:
                self._notes.clear_records()
