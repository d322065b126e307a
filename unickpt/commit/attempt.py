"""Commit: the processes' databases -> one atomic root, coordinated through the storage alone.

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
from dataclasses import dataclass, replace
from typing import Any

import tensorstore as ts
import xxhash

from unickpt import quoting
from unickpt._version import LIBRARY
from unickpt.commit import merge, root, version
from unickpt.commit.notes import MORE, OK, REQUEST, Announcement, Board
from unickpt.commit.record import Record
from unickpt.commit.replicas import Difference, Replicas
from unickpt.commit.root import Root
from unickpt.errors import CheckpointExists, ProcessFailed, SaveConflict, SaveTimeout, StorageError
from unickpt.format import digest_table, index_json, zarr_metadata
from unickpt.format.index import DIGESTS_KEY, INDEX_KEY, Index
from unickpt.frameworks.process_group import Group
from unickpt.saving.describe import Description
from unickpt.storage import errors
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location

# After a process gives up, how long the coordinator may take to finish a commit that was in
# progress when it last checked for such a process.
_GRACE_S = 1.0
_MOST_REPLACED = 16


@dataclass(frozen=True)
class Totals:
    """Number of arrays of a checkpoint, and their logical bytes."""

    arrays: int
    nbytes: int

    @classmethod
    def of(cls, index: Index) -> Totals:
        return cls(len(index.arrays), sum(entry.nbytes for entry in index.arrays.values()))


Serve = Callable[[Mapping[str, list[int]]], Record]


class Attempt:
    """One attempt of a group of processes to save one checkpoint.

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
        self._root = Root(location, context)
        self._board = Board(self._folder, group, context, timeout_s)
        self._missing = location.count_missing()
        self._found: root.State | None = None
        self._hopeless = True
        self._totals: Totals | None = None
        self.writers: tuple[Mapping[str, float], ...] = ()
        """The statistics in each process's record, once the coordinator has committed."""
        self.differences: Sequence[Difference] = ()
        """The arrays that were assumed to be replicas but differ; likewise."""

    def check_destination(self, overwrite: bool) -> None:
        """Refuses a destination that is in use.

        Raises:
            CheckpointExists: it holds a checkpoint (without `overwrite`) or foreign files.
            StorageError: the storage cannot be read.
        """
        foreign = self.location.foreign_files()
        if foreign:
            raise CheckpointExists(
                f"{self.location} holds other files ({', '.join(foreign[:3])}, ...); choose a "
                "new or empty directory"
            )
        with self._asking():
            found = self._root.read()
            # For a bucket that does not exist, S3 only reports that the object is missing; if OCDBT
            # then writes there, TensorStore ends the process. Listing reports the missing bucket.
            self._board.check_reachable()
        if found.digest and not overwrite:
            raise CheckpointExists(
                f"{self.location} already holds a checkpoint; pass overwrite=True "
                "(--overwrite on the command line) to replace it, "
                "or save to another path"
            )
        self._found = found

    def make_folder(self) -> None:
        """Creates this attempt's folder, if the storage has folders.

        Raises:
            StorageError: names the directory that cannot be created.
        """
        self._folder.make()

    def check_new(self) -> None:
        """Refuses an attempt name that was used before: its old records would be taken for new.

        Raises:
            SaveConflict: names the session.
        """
        if self.group.count == 1:
            return
        with self._asking():
            used = self._board.was_used()
        if used:
            raise SaveConflict(
                f"{self.location}: attempt {self.name!r} was used before; the session of a "
                "ProcessGroup must be new for every run of the job"
            )

    def database(self, process: int) -> Location:
        """Where a process writes its chunks."""
        return self._folder.child(f"{process:05d}")

    def explained(self, error: Exception) -> Exception:
        """The error to raise: the storage's errors as ours, or `SaveConflict` if another job
        committed here meanwhile, which removes the files of attempts that lost."""
        if not isinstance(error, StorageError) or self._found is None:
            return error
        try:
            if self._is_hopeless or self.group.index > 0:
                self._is_committed()
        except SaveConflict as conflict:
            return conflict
        except Exception:
            pass  # reading the storage fails too; its first error is more useful
        if not isinstance(error, Failed):
            return error
        return errors.writing_failed(error, f"saving to {self.location}")

    def publish(self, record: Record, kind: str = OK) -> None:
        """Publishes this process's record, which ends its part."""
        self._sync(self.database(self.group.index).child("d"))
        self._hopeless = self.group.index == 0  # the coordinator has not committed yet
        self._board.publish(replace(record, replaces=self._digest_found), kind)

    def publish_error(self, error: BaseException, *, refused: bool = False) -> None:
        """Reports to the others why this process gives up; does nothing in a job of one.

        Arguments:
            error: what happened.
            refused: whether this process did not start, because an earlier save failed on it.
        """
        with suppress(Exception):  # the storage itself may be what failed
            if self.group.count > 1 and not self.location.foreign_files():
                self._board.publish_error(error, settles=self._is_hopeless, refused=refused)

    def check_others(self) -> None:
        """Raises `ProcessFailed` with the message of a process that gave up."""
        self._board.look_now_and_then()

    def wait_committed(self, serve: Serve) -> Totals:
        """Waits, in all processes but the coordinator, until the checkpoint exists.

        Arguments:
            serve: writes more chunks, if the coordinator requests them.

        Raises:
            ProcessFailed: another process gave up.
            SaveTimeout: the coordinator neither committed nor gave up in time.
            SaveConflict: another job committed at this path meanwhile.
        """
        with self._explaining():
            try:
                self._wait(serve)
            except (ProcessFailed, SaveTimeout) as error:
                if self._is_hopeless or not self._was_committed_after_all(error):
                    raise
            assert self._totals is not None
            return self._totals

    def commit(
        self,
        description: Description,
        serve: Serve,
        check: Callable[[], None] = lambda: None,
    ) -> Totals:
        """Merges and commits what all processes wrote; only for the coordinator.

        Arguments:
            description: the coordinator's own.
            serve: writes more of the coordinator's own chunks.
            check: called right before the commit; an error prevents it.

        Raises:
            ProcessFailed, SaveTimeout: another process gave up, or is late.
            CoverageError: an array is not covered exactly once.
            SaveConflict: another job committed at this path meanwhile.
        """
        self._hopeless = True  # only this process commits
        with self._explaining():
            return self._commit(description, serve, check)

    def discard(self) -> None:
        """Ends a failed save: removes what was written, if no checkpoint can need it any more.

        Every process removes its own data, and that of processes that left before it. The last one
        to leave removes the rest, because until then the others read notes. If a process died, the
        rest stays until the next save at this path, or the next `Checkpointer`.
        """
        with suppress(Exception):
            if self._is_hopeless:
                self._remove_data({self.group.index})
        self._board.say_again()  # a full disk may have room for a note now
        with suppress(Exception):
            left, made = {self.group.index}, self._missing
            if self.group.count > 1:
                if self.location.foreign_files():
                    return  # as in `publish_error`: nothing was written
                left, made = self._board.leave(self._missing)
            if not self._is_hopeless:
                return
            if len(left) < self.group.count:
                self._remove_data(left)
                return
            self._folder.remove(self.context)
            self.location.remove_made(made)

    def _remove_data(self, processes: Iterable[int]) -> None:
        for process in processes:
            self.database(process).remove(self.context)
            if process == 0:
                self._folder.child("root").remove(self.context)

    @property
    def _is_hopeless(self) -> bool:
        """Whether it is certain that no process commits what this process wrote."""
        return self._hopeless or self._board.settled

    def _sync(self, folder: Location) -> None:
        if self.context["file_io_sync"].to_json():
            folder.sync(self.location)

    @contextmanager
    def _asking(self) -> Iterator[None]:
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
            raise explained from error

    # --- waiting -------------------------------------------------------------------------------

    @property
    def _digest_found(self) -> str:
        assert self._found is not None, "the destination is checked before anything is written"
        return self._found.digest

    def _collect(self, processes: Sequence[int], kind: str) -> list[tuple[int, Record]]:
        def all_there(notes: set[str]) -> bool:
            late = self._board.late(processes, kind)
            if not late:
                return True
            if self.group.index in late:
                raise self._gone()
            if self._root.read().digest != self._digest_found:
                raise self._conflict("during this save")
            return False

        self._until(all_there, processes, kind)
        return self._board.records(processes, kind)

    def _wait(self, serve: Serve) -> None:
        everyone = range(self.group.count)
        notes = self._until(lambda notes: REQUEST in notes or self._is_committed(), everyone, OK)
        if REQUEST in notes:
            mine = self._board.requested()
            if mine:
                self.publish(serve(mine), MORE)
            self._until(lambda notes: self._is_committed(), everyone, OK)

    def _until(
        self, ready: Callable[[set[str]], bool], processes: Sequence[int], kind: str
    ) -> set[str]:
        """Waits until `ready`; on timeout, names the processes whose records are missing."""
        try:
            return self._board.wait(ready)
        except TimeoutError:
            late = self._board.late(processes, kind)
        what = "process 0 did not commit"
        if late:
            what = f"process{'es' * (len(late) > 1)} {quoting.some(late)} did not finish"
        raise SaveTimeout(
            f"{self.location}: {what} within {self.timeout_s:g} s (SaveOptions.timeout_s) after "
            f"process {self.group.index} of {self.group.count} was done; it may have died. No "
            "checkpoint was written."
        )

    def _commit(self, description: Description, serve: Serve, check: Callable[[], None]) -> Totals:
        records = self._collect(range(self.group.count), OK)
        for process, record in records:
            if record.replaces != self._digest_found:
                raise self._conflict(f"between the start of process 0 and of process {process}")
        index, table, without = self._merge(description, records, serve)
        manifest = self._build_root(index, table, without)
        totals = Totals.of(index)
        older = self.location.child("processes").folders(self.context)
        replaced = self._replaced()
        if self.group.count > 1 or replaced:
            told = Announcement(root.digest(manifest), vars(totals), replaced)
            self._board.announce(told)
        if self.group.count > 1:
            self._board.look()
        check()
        self._write_root(manifest)
        self._remove_debris(older)
        self.writers = tuple(record.statistics for _, record in records)
        return totals

    # --- merging -------------------------------------------------------------------------------

    def _merge(
        self, ours: Description, records: list[tuple[int, Record]], serve: Serve
    ) -> tuple[Index, digest_table.Table, Mapping[int, Sequence[str]]]:
        """The merged index and digests, and the arrays of each process whose chunks are dropped."""
        described = self._descriptions(ours, records)
        arrays = {id(index): list(index.arrays) for index in described}
        names = [arrays[id(index)] for index in described]
        index = merge.with_boxes(merge.unite(described), records, names)
        replicas = Replicas(records, names)
        assumed, winners = replicas.names, dict[str, int]()
        table, contested = merge.merged_digests(index, records, names, assumed)
        self.differences = replicas.differences(contested)
        if self.differences:
            winners = {found.name: found.stored for found in self.differences}
            table, _ = merge.merged_digests(index, records, names, assumed, winners)
        requests = merge.requests(index, table, names, winners)
        if requests:
            more = records + self._request(requests, serve)
            table, _ = merge.merged_digests(index, more, names, assumed, winners)
            merge.requests(index, table, [])
        index = replace(
            index,
            per_process=merge.per_process(index, records),
            attempt=self.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            library=LIBRARY,
            chunks=len(table),
            digests_xxh3=f"{xxhash.xxh3_64_intdigest(table.tobytes()):016x}",
        )
        return index, table, merge.losers(records, names, winners)

    def _request(self, requests: merge.Requests, serve: Serve) -> list[tuple[int, Record]]:
        """Requests chunks that their planned writers do not hold from other processes."""
        self._board.request(requests)
        ours = self.group.index
        own = [(ours, serve(requests[ours]))] if ours in requests else []
        return own + self._collect([p for p in requests if p != ours], MORE)

    def _descriptions(
        self, ours: Description, records: Sequence[tuple[int, Record]]
    ) -> list[Index]:
        """Each process's description; equal ones are read once and share one object."""
        first: dict[int, int] = {}
        for process, record in records:
            if record.description != ours.digest:
                first.setdefault(record.description, process)
        reads = {
            digest: self.database(process).database(self.context).read(INDEX_KEY)
            for digest, process in first.items()
        }
        known = {ours.digest: ours.index}
        for digest, read in reads.items():
            data, where = read.result().value, str(self.database(first[digest]))
            if xxhash.xxh3_64_intdigest(data) != digest:
                raise StorageError(
                    f"{where}: the description of process {first[digest]} is damaged"
                )
            known[digest] = index_json.decode(data, where, partial=True)
        return [known[record.description] for _, record in records]

    # --- the root ------------------------------------------------------------------------------

    def _build_root(
        self, index: Index, table: digest_table.Table, without: Mapping[int, Sequence[str]]
    ) -> bytes:
        """Writes the root's B-tree, which refers to the processes' data; returns its manifest."""
        extra = {
            **zarr_metadata.zarr_keys(index),
            DIGESTS_KEY: table.tobytes(),
            INDEX_KEY: index_json.encode(index),
        }
        databases = [self.database(process) for process in range(self.group.count)]
        blobs = sum(len(entry.blobs) for entry in index.per_process.values())
        folder = f"processes/{self.name}/root/"
        manifest = self._root.build(folder, databases, extra, len(table) + blobs, without)
        self._sync(self._folder.child("root"))
        return manifest

    def _replaced(self) -> dict[str, Any]:
        """The totals of the last commits here, by attempt, for processes that have not seen theirs.

        Only of those that were announced; in the others no process waits.
        """
        if not self._digest_found:
            return {}
        with suppress(Exception):  # without it, such a process reports a conflict
            found = version.version_at(self.location)
            if found is not None and found.name == self._digest_found and found.attempt:
                note = self._board_of(found.attempt).announced()
                if note is not None:
                    known = {**note.replaced, found.attempt: note.totals}
                    return dict(list(known.items())[-_MOST_REPLACED:])
        return {}

    def _board_of(self, attempt: str) -> Board:
        folder = self.location.child(f"processes/{attempt}")
        return Board(folder, self.group, self.context, self.timeout_s)

    def _write_root(self, manifest: bytes) -> None:
        """The commit: one write, which the storage refuses if the root has changed."""
        assert self._found is not None

        def begun() -> None:
            self._hopeless = False

        if not self._root.replace(self._found, manifest, self.timeout_s, begun):
            self._hopeless = True
            raise self._conflict("during this save")
        if not all(self.database(process).exists() for process in range(self.group.count)):
            self._root.retract(manifest, self.timeout_s)
            self._hopeless = True
            raise self._gone()

    def _is_committed(self) -> bool:
        """Whether the root is what the coordinator announced before it wrote it."""
        found = self._root.read().digest
        if found == self._digest_found:
            return False
        note = self._board.announced()
        if note is not None and note.root == found:
            self._totals = Totals(**note.totals)
            return True
        # A network file system may not show the note yet. The root itself is conclusive.
        data = self.location.values(self.context).read(INDEX_KEY)
        index = index_json.decode(data or b"", str(self.location))
        if index.attempt == self.name:
            self._totals = Totals.of(index)
            return True
        note = self._board_of(index.attempt).announced()
        if note is not None and self.name in note.replaced:  # another job has replaced it since
            self._totals = Totals(**note.replaced[self.name])
            return True
        self._hopeless = True
        raise self._conflict("during this save")

    def _was_committed_after_all(self, error: Exception) -> bool:
        """Reports that this process gives up, then checks whether the coordinator was faster."""
        self.publish_error(error)
        time.sleep(_GRACE_S)
        return self._is_committed()

    def _conflict(self, when: str) -> SaveConflict:
        return SaveConflict(f"{self.location}: another job committed here {when}")

    def _gone(self) -> StorageError:
        return StorageError(
            f"{self.location}: the files written for this checkpoint are gone; the folder was "
            "removed during the save"
        )

    def _remove_debris(self, older: Sequence[str]) -> None:
        """Removes what no committed checkpoint needs; errors here are ignored.

        Arguments:
            older: the attempts that started before this one committed. None of them can commit
                any more, because their processes found another root.
        """
        with suppress(Exception):
            for attempt in older:
                if attempt != self.name:
                    self.location.child(f"processes/{attempt}").remove(self.context)
            self._board.clear_records()
