"""Commit: the processes' records -> one atomic root, coordinated through the storage alone.

Every process ends its part with a record in the attempt's folder, or with an error note. The
coordinator (`coordinator`) reads the records, checks that each chunk was written exactly once,
builds the root database next to them, and then writes its manifest, if the root is still what all
processes found when they started; the others (`participant`) wait for it. The processes do not
communicate in any other way. A process that saves alone keeps its record.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from enum import Enum, auto
from functools import cached_property
from typing import TYPE_CHECKING

import tensorstore as ts

from unickpt.commit import root
from unickpt.commit.messages import OK, Notes, Record, Totals, replaced_in
from unickpt.errors import SaveConflict, StorageError, out_of_memory
from unickpt.format import index_json
from unickpt.format.index import INDEX_KEY
from unickpt.frameworks.process_group import Group, saved_apart
from unickpt.storage import data_files, errors, local_folders, paths
from unickpt.storage.database import Database
from unickpt.storage.locations import Location

if TYPE_CHECKING:
    from unickpt.format.timing import Arrivals


class AttemptState(Enum):
    """The progress of one process in an attempt: determines what it may remove and conclude.

    Process 0, the coordinator: OPEN, WRITING, MERGING, COMMITTING, COMMITTED. The others: OPEN,
    WRITING, PUBLISHED, COMMITTED. Each may end in FAILED instead.
    """

    OPEN = auto()
    """The destination has not been checked yet, and nothing was written."""
    WRITING = auto()
    """This process writes its part. Without its record the coordinator cannot commit, unless others
    write the part (`is_unneeded`). It may remove the part, and notify the others that this attempt
    can no longer succeed, which they believe unless they write the part."""
    PUBLISHED = auto()
    """This process has published its record, or tried to. The coordinator may commit at any moment,
    so nothing may be removed, and only the root shows whether the checkpoint exists."""
    MERGING = auto()
    """The coordinator has published its record. Only the coordinator commits, and it has not begun
    to, so it may remove everything; no other process may."""
    COMMITTING = auto()
    """The coordinator has begun to write the root. Until the storage answers, the checkpoint may or
    may not exist: nothing may be removed, and nothing may be concluded from an error."""
    COMMITTED = auto()
    """The checkpoint exists. Nothing of this attempt may be removed."""
    FAILED = auto()
    """The root is that of another job, or the files are gone: no process will commit this attempt.
    Its files may be removed."""


_MOST_REPLACED = 16
_S = AttemptState
# WRITING again: the destination is checked twice, in the call and when it is the save's turn; and
# for chunks that the coordinator requests.
# COMMITTING again: a write of the root that was refused, or had no answer, may be repeated.
# FAILED again: several errors of one save are explained by the same conflict.
NEXT: Mapping[AttemptState, set[AttemptState]] = {
    _S.OPEN: {_S.WRITING},
    _S.WRITING: {_S.WRITING, _S.PUBLISHED, _S.MERGING, _S.FAILED},
    _S.PUBLISHED: {_S.WRITING, _S.COMMITTED, _S.FAILED},
    _S.MERGING: {_S.COMMITTING, _S.FAILED},
    _S.COMMITTING: {_S.COMMITTING, _S.COMMITTED, _S.FAILED},
    _S.COMMITTED: set(),
    _S.FAILED: {_S.FAILED},
}
"""The states that may follow each."""
REMOVABLE = {_S.OPEN, _S.WRITING, _S.MERGING, _S.FAILED}
"""In these states, a process that gives up may remove its files: they will certainly not be
committed. In the others it may only if another process has reported that (`Notes.settled`)."""


class Attempt:
    """One attempt of a group of processes to save one checkpoint; see `AttemptState`.

    Arguments:
        location: the checkpoint's folder.
        group: the processes.
        name: the attempt's name, the same on all processes.
        context: the TensorStore context of this save.
        timeout_s: how long to wait for other processes.
        timed: whether the checkpoint stores how long each process took; by default, if there are
            several.
    """

    def __init__(
        self,
        location: Location,
        group: Group,
        name: str,
        context: ts.Context,
        timeout_s: float,
        timed: bool | None = None,
    ) -> None:
        self.location, self.group, self.name = location, group, name
        self.context, self.timeout_s = context, timeout_s
        self.is_alone = group.count == 1
        self.is_durable = paths.is_durable(context)
        self.folder = location.child(f"processes/{name}")
        self.own = self.folder_of(group.index)
        """The folder in which this process writes."""
        self.root = root.Root(Database(location, context))
        self.awaits_records = not self.is_alone
        """Whether some records were missing when the coordinator last looked; in the others,
        always."""
        self.arrivals: Arrivals | None = None
        """The records that the coordinator has seen, and when; None if that is not stored."""
        if not self.is_alone if timed is None else timed:
            from unickpt.format.timing import Arrivals

            self.arrivals = Arrivals(group.count)
        self.record: Record | None = None
        """The record of a process that saves alone: no other process needs to read it."""
        self.has_reports = False
        self._missing = local_folders.count_missing(location.path) if location.is_local else 0
        self.state = AttemptState.OPEN
        self.found: root.State | None = None
        """The root as it was before this attempt wrote anything."""
        self.job_digest = ""
        """The digest of the `JobBytes` that the coordinator announced; empty for none."""
        self.planned_bytes = 0
        """The part of this process, for messages."""
        self._began = time.monotonic()
        self.description = 0
        """xxh3-64 of the description of this process; 0 if it saves alone."""

    @cached_property
    def notes(self) -> Notes:  # a process alone rarely needs them
        return self.notes_of(self.name)

    def notes_of(self, attempt: str) -> Notes:
        """The notes of an attempt at this location."""
        folder = self.location.child(f"processes/{attempt}")
        return Notes(folder, self.group, self.context, self.timeout_s)

    def check_destination(self, overwrite: bool) -> None:
        """Refuses a destination that is in use.

        Raises:
            CheckpointExists: it holds a checkpoint (without `overwrite`) or foreign files.
            UnsupportedFormat: it holds one that needs features this unickpt does not know.
            StorageError: the storage cannot be read.
        """
        root.refuse_other_files(self.location)
        try:
            current_root = self.root.read()
            # For a bucket that does not exist, S3 only reports that the object is missing; if OCDBT
            # then writes there, TensorStore ends the process. Listing reports the missing bucket.
            if self.location.is_remote:
                self.notes.check_reachable()
        except errors.Failed as error:
            raise errors.writing_failed(error, str(self.location)) from error
        if current_root.digest:
            root.refuse_checkpoint(self.location, self.context, overwrite=overwrite)
        self.found = current_root
        self.become(AttemptState.WRITING)

    def check_new(self) -> None:
        """Refuses an attempt name that was already used: its old records would pass for new ones.

        Raises:
            SaveConflict: names the session.
        """
        if self.is_alone:
            return
        with errors.writing(self.location):
            used = self.notes.was_used()
        if used:
            raise SaveConflict(
                f"{self.location}: attempt {self.name!r} was used before; the session of a "
                "ProcessGroup must be new for every run of the job"
            )

    def folder_of(self, process: int) -> Location:
        """The folder in which a process writes."""
        return self.folder.child(f"{process:05d}")

    def explained(self, error: Exception) -> Exception:
        """The error to raise: storage errors and a lack of memory as ours, or `SaveConflict` if
        another job committed here, which removes the files of attempts that lost."""
        if isinstance(error, MemoryError):
            return out_of_memory(f"saving to {self.location}", error)
        if not isinstance(error, StorageError) or self.state is AttemptState.OPEN:
            return error
        try:
            if self.may_remove or self.group.index > 0:
                self.committed()
        except SaveConflict as conflict:
            return conflict
        except Exception:
            pass  # reading the storage fails too; its first error is more useful
        if not isinstance(error, errors.Failed):
            return error
        from unickpt.storage.disk_space import room_text

        folder = os.path.dirname(self.own.path.rstrip("/"))
        room = room_text(self.own, error, self.planned_bytes, folder)
        return errors.writing_failed(error, f"saving to {self.location}", room)

    def publish(self, record: Record, kind: str = OK) -> None:
        """Publishes this process's record, which ends its part."""
        if self.is_durable:
            self.sync(self.own.child(data_files.FOLDER))
            if any(path.startswith(f"{data_files.LINKED_FOLDER}/") for path in record.files):
                self.sync(self.own.child(data_files.LINKED_FOLDER))
        is_coordinator = self.group.index == 0
        self.become(AttemptState.MERGING if is_coordinator else AttemptState.PUBLISHED)
        record = replace(record, replaces=self.digest_found)
        if self.is_alone:
            self.record = record
        else:
            try:
                self.notes.publish(record, kind)
            except errors.Failed:  # after a commit without it, the records are removed
                if not is_unneeded(self):
                    raise
        if self.arrivals is not None:
            self.arrivals.published()

    def publish_error(self, error: BaseException, *, refused: bool = False) -> None:
        """Reports to the others why this process gives up; does nothing in a job of one.

        Arguments:
            error: what happened.
            refused: whether this process did not start, because an earlier save failed on it.
        """
        with suppress(Exception):  # the storage itself may be what failed
            if not self.is_alone and not self.location.foreign_files():
                self.notes.publish_error(error, settles=self.may_remove, refused=refused)

    def check_others(self) -> None:
        """Raises `ProcessFailed` with the message of a process that gave up."""
        if not self.is_alone:
            self.notes.poll_now_and_then()

    def discard(self) -> None:
        """Ends a failed save: removes the written files, if no checkpoint can need them.

        Every process removes its own data, and that of processes that left before it. The last one
        to leave removes the rest, because the others read notes until then. If a process died, the
        rest stays until the next save at this path, or the next `Checkpointer`. A process whose
        part others write removes only its own: they may commit.
        """
        is_replaced = False
        with suppress(Exception):
            is_replaced = is_unneeded(self)
            if is_replaced:
                remove_unneeded(self)
            elif self.may_remove:
                self._remove_data({self.group.index})
        if not self.is_alone:
            self.notes.retry_error()  # a full disk may have room for a note now
        with suppress(Exception):
            left, made = {self.group.index}, self._missing
            if not self.is_alone:
                if self.location.foreign_files():
                    return  # as in `publish_error`: nothing was written
                left, made = self.notes.leave(self._missing)
            if not self.may_remove or (is_replaced and not self.notes.settled):
                return
            if len(left) < self.group.count:
                self._remove_data(left)
                return
            self.folder.remove(self.context)
            if self.location.is_local:
                local_folders.remove_made(self.location.path, made)

    def _remove_data(self, processes: Iterable[int]) -> None:
        for process in processes:
            self.folder_of(process).remove(self.context)
            if process == 0:
                self.folder.child("root").remove(self.context)

    def become(self, state: AttemptState) -> None:
        """Enters a state; the only place where it changes."""
        assert state in NEXT[self.state], f"{self.state} -> {state}"
        self.state = state

    @property
    def may_remove(self) -> bool:
        """Whether it is certain that no process commits the output of this process."""
        return self.state in REMOVABLE or (not self.is_alone and self.notes.settled)

    def sync(self, folder: Location) -> None:
        """Makes the entries of a folder durable, and of those above it."""
        folder.sync(self.location, max(1, self._missing))

    @property
    def seconds(self) -> float:
        """How long this attempt has taken so far."""
        return time.monotonic() - self._began

    @property
    def digest_found(self) -> str:
        assert self.found is not None, "the destination is checked before anything is written"
        return self.found.digest

    def committed(self) -> Totals | None:
        """The outcome of the coordinator's commit; None if the root has not changed.

        Raises:
            SaveConflict: it is that of another job.
        """
        digest = self.root.read().digest
        if digest == self.digest_found:
            return None
        note = self.notes.announced()
        if note is not None and note.root == digest:
            self.job_digest = note.job
            return note.totals
        # A network file system may not show the note yet. The root itself is conclusive.
        data = Database(self.location, self.context).reader().read(INDEX_KEY)
        index = index_json.decode(data or b"", str(self.location))
        if index.attempt == self.name:
            return Totals.from_index(index)
        note = self.notes_of(index.attempt).announced()
        if note is not None and self.name in note.replaced:  # another job has replaced it since
            return note.replaced[self.name]
        self.become(AttemptState.FAILED)
        raise self.conflict()

    def replaced(self) -> dict[str, Totals]:
        """The totals of the last commits here, by attempt, for processes that have not seen theirs.

        Only announced commits: no process waits in the others.
        """
        from unickpt.commit import version

        with suppress(Exception):  # without it, such a process reports a conflict
            old = version.version_at(self.location)
            if old is not None and old.digest == self.digest_found and old.attempt:
                note = self.notes_of(old.attempt).announced()
                if note is not None:
                    totals_by_attempt = {**note.replaced, old.attempt: note.totals}
                    return dict(list(totals_by_attempt.items())[-_MOST_REPLACED:])
        return {}

    def conflict(self, when: str = "during this save") -> SaveConflict:
        """The error that another job has committed at the same path."""
        return SaveConflict(f"{self.location}: another job committed here {when}{saved_apart()}")


def is_unneeded(attempt: Attempt) -> bool:
    """Whether others write the part of this process."""
    if attempt.is_alone:
        return False
    return attempt.group.index in replaced_in(attempt.folder.store(attempt.context))


def remove_unneeded(attempt: Attempt) -> None:
    """Removes the part of this process, which others have written."""
    attempt.own.remove(attempt.context)
