"""The coordinator, process 0: the records of all processes -> one root, or none."""

from __future__ import annotations

import datetime
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter

import xxhash

from unickpt._version import LIBRARY
from unickpt.commit.attempt import Attempt, AttemptState
from unickpt.commit.merge import Merged, MergePolicies, StillNeeded, merge_all
from unickpt.commit.merge_chunks import Requests
from unickpt.commit.messages import (
    DESCRIPTION,
    JOB_BYTES,
    MORE,
    OK,
    Announcement,
    Record,
    Records,
    Totals,
    WriteMore,
    statistics_of,
)
from unickpt.errors import CheckpointCorrupt, StorageError, UnsupportedLeaf
from unickpt.format import chunk_encoding, index_json
from unickpt.format.index import BORROWED_KEY, DIGESTS_KEY, INDEX_KEY, Index, tree_of
from unickpt.frameworks.job_bytes import JobBytes
from unickpt.frameworks.process_group import saved_apart
from unickpt.storage.database import digest_of
from unickpt.storage.locations import Location
from unickpt.trees import tree_json


@dataclass(frozen=True)
class Committed:
    """The committed checkpoint, as the coordinator knows it.

    Arguments:
        totals: of the checkpoint.
        merged: the merged output of all processes.
        writers: the statistics of each process.
        job: the bytes of the groups of replicas, if later saves need them.
    """

    totals: Totals
    merged: Merged
    writers: tuple[Mapping[str, float], ...]
    job: JobBytes | None


class Coordinator:
    """Merges and commits the output of all processes of an attempt.

    Arguments:
        attempt: the attempt in which this process, the first, has published its record.
        write_more: writes more of the coordinator's own chunks.
        policies: decide how notes are merged, and how arrays are stored.
    """

    def __init__(self, attempt: Attempt, write_more: WriteMore, policies: MergePolicies) -> None:
        self.attempt, self._write_more, self._policies = attempt, write_more, policies
        self._location, self._processes = attempt.location, range(attempt.group.count)
        self._more: Records = ()  # of processes that wrote chunks of others, too
        self._replaced: Mapping[int, Record] = {}  # of processes whose part others write: empty

    def commit(
        self,
        index: Index,
        digest: int,
        check: Callable[[Index], None],
        committed: Callable[[], None] = lambda: None,
    ) -> Committed:
        """Merges and commits the output of all processes.

        Arguments:
            index: the coordinator's own description.
            digest: of that index, as in the coordinator's record.
            check: called right before the commit, with the merged output of all processes; an error
                prevents it.
            committed: called right after the commit, before files are removed.

        Raises:
            ProcessFailed, SaveTimeout: another process gave up, or is late.
            CoverageError: an array is not covered exactly once.
            SaveConflict: another job committed at this path.
        """
        attempt = self.attempt
        try:
            records = self._records(may_replace=True)
            merged = self._merge({digest: index}, records)
        except StillNeeded:
            self._replaced = {}
            records = self._records()
            merged = self._merge({digest: index}, records)
        took = dict[str, bytes]()
        if attempt.arrivals is not None:
            attempt.arrivals.looked(())  # nobody is awaited any more
            took = attempt.arrivals.encode([record.statistics for _, record in records])
        if merged.index.bases:
            from unickpt.commit import borrowers

            borrowers.mark(self._location, merged.index.bases, attempt.context)
        manifest = self._build_root(merged, took)
        totals = Totals.from_index(merged.index)
        older = self._location.child("processes").folders(attempt.context)
        job = self._announce(manifest, totals, records)
        check(merged.index)
        self._write_root(manifest)
        attempt.become(AttemptState.COMMITTED)
        if self._replaced:
            from unickpt.commit import stand_ins

            stand_ins.warn(self._location, [*self._replaced])
        committed()
        self._remove_older_attempts(older)
        return Committed(totals, merged, statistics_of(records, self._more), job)

    def _records(self, may_replace: bool = False) -> Records:
        """The records of all processes; that of a single process was never stored.

        Arguments:
            may_replace: whether others may write the part of a process that makes no progress.

        Raises:
            SaveConflict: a process found another checkpoint here.
            StillNeeded: a process makes no progress, and others cannot write its part.
        """
        attempt = self.attempt
        if not attempt.is_alone:
            records = self._collect(self._processes, OK, may_replace)
            for process, record in records:
                if record.replaces != attempt.digest_found:
                    when = f"between the start of process 0 and of process {process}"
                    raise attempt.conflict(when)
            return records
        assert attempt.record is not None, "it is published before the commit"
        if attempt.arrivals is not None:
            attempt.arrivals.looked(())
        return [(0, attempt.record)]

    def _collect(self, processes: Sequence[int], kind: str, may_replace: bool = False) -> Records:
        """The records of some processes, when all are there; empty ones of those that are replaced.

        Arguments:
            processes, kind: of the records.
            may_replace: as for `_records`.
        """
        from unickpt.commit.awaited_processes import Waits  # only where there are others

        attempt, late, waits = self.attempt, list(processes), Waits(self.attempt)
        own_s = attempt.seconds

        def all_there(notes: set[str]) -> bool:
            late[:] = attempt.notes.late(processes, kind)
            is_over = not late
            if may_replace and late and waits.reports:
                from unickpt.commit import stand_ins

                is_over = stand_ins.are_replaceable(late, waits, own_s, attempt.own)
            if attempt.arrivals is not None:
                attempt.arrivals.looked(late)
            attempt.awaits_records = not is_over
            if is_over:
                return True
            if attempt.group.index in late:
                raise _files_gone(self._location)
            if attempt.root.read().digest != attempt.digest_found:
                raise attempt.conflict()
            return False

        waits.until(all_there, processes, kind, late)
        records = attempt.notes.records([p for p in processes if p not in late], kind)
        if not late:
            return records
        from unickpt.commit import stand_ins

        reports = {process: waits.reports[process] for process in late}
        self._replaced = stand_ins.records_of(reports, records, attempt.digest_found)
        return sorted([*records, *self._replaced.items()], key=itemgetter(0))

    def _merge(self, indexes: Mapping[int, Index], records: Records) -> Merged:
        attempt, described = self.attempt, indexes
        if not attempt.is_alone and any(record.description not in indexes for _, record in records):
            described = {**indexes, **_read_descriptions(records, indexes, attempt)}
        merged = merge_all(records, described, self._request, self._policies, self._replaced)
        timed = {} if attempt.arrivals is None else attempt.arrivals.extra
        index = replace(
            merged.index,
            attempt=attempt.name,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            library=LIBRARY,
            extra={**merged.index.extra, **timed},
        )
        return replace(merged, index=index)

    def _request(self, requests: Requests) -> Records:
        """Requests chunks that their planned writers do not hold from other processes."""
        ours = self.attempt.group.index
        other_processes = [process for process in requests if process != ours]
        if is_sent := bool(other_processes or self._replaced):
            self.attempt.notes.request({**requests, **{process: {} for process in self._replaced}})
        own_records = [(ours, self._write_more(requests[ours]))] if ours in requests else []
        self._more = own_records
        if is_sent:
            self._more = [*own_records, *self._collect(other_processes, MORE)]
        return self._more

    def _build_root(self, merged: Merged, took: Mapping[str, bytes]) -> bytes:
        """Writes the root's B-tree, which refers to the processes' data; returns its manifest."""
        attempt, index, chunks = self.attempt, merged.index, merged.chunks
        encoded = index_json.encode(index)
        check_readable(encoded, str(self._location))
        extra = {
            **chunk_encoding.zarr_keys(index),
            DIGESTS_KEY: chunks.table.tobytes(),
            INDEX_KEY: encoded,
        }
        extra |= took
        if index.bases:
            extra[BORROWED_KEY] = chunks.borrowed.tobytes()
        manifest = attempt.root.build(f"processes/{attempt.name}/root/", index, chunks, extra)
        if attempt.is_durable:
            attempt.sync(attempt.folder.child("root"))
        return manifest

    def _announce(self, manifest: bytes, totals: Totals, records: Records) -> JobBytes | None:
        """Announces the commit that is about to happen, unless a process has given up; returns the
        bytes of the groups of replicas, if later saves need them."""
        attempt, replaced = self.attempt, dict[str, Totals]()
        if attempt.digest_found:
            replaced = attempt.replaced()
        job = None if attempt.is_alone or self._replaced else self._job_bytes(records)
        if not attempt.is_alone or replaced:
            digest = "" if job is None else job.digest
            attempt.notes.announce(Announcement(digest_of(manifest), totals, replaced, digest))
        if not attempt.is_alone:
            attempt.notes.poll()
        return job

    def _job_bytes(self, records: Records) -> JobBytes | None:
        """The bytes of the groups of replicas, if later saves need them; published as a note, if a
        process does not know them yet."""
        if not any(
            group for _, record in records for group, _ in record.group_bytes if len(group) != 1
        ):
            return None
        job = JobBytes.from_records(
            ((process, record.group_bytes) for process, record in records), len(records)
        )
        if not job.is_uneven:
            return None
        if any(record.job != job.digest for _, record in records):
            self.attempt.notes.put(JOB_BYTES.format(job.digest), job.encoded)
        return job

    def _write_root(self, manifest: bytes) -> None:
        """The commit: one write, which the storage refuses if the root has changed."""
        attempt = self.attempt
        assert attempt.found is not None, "the destination is checked before anything is written"

        def begun() -> None:
            attempt.become(AttemptState.COMMITTING)

        if not attempt.root.replace(attempt.found, manifest, attempt.timeout_s, begun):
            attempt.become(AttemptState.FAILED)
            raise attempt.conflict()
        if not (attempt.own.exists() if attempt.is_alone else self._folders_exist()):
            attempt.root.retract(manifest, attempt.timeout_s)
            attempt.become(AttemptState.FAILED)
            raise _files_gone(self._location)

    def _folders_exist(self) -> bool:
        """Whether all folders in which processes have written are still there."""
        attempt = self.attempt
        needed = [process for process in self._processes if process not in self._replaced]
        if attempt.folder.is_local and attempt.folder.shares_data:  # one listing for all
            names = attempt.folder.names(attempt.context)
            return names.issuperset(f"{process:05d}" for process in needed)
        return all(attempt.folder_of(process).exists() for process in needed)

    def _remove_older_attempts(self, older: Sequence[str]) -> None:
        """Removes files that no committed checkpoint needs; errors here are ignored.

        Arguments:
            older: the attempts that started before this one committed. None of them can commit,
                because their processes found another root.
        """
        attempt = self.attempt
        with suppress(Exception):
            for name in older:
                if name != attempt.name:
                    self._location.child(f"processes/{name}").remove(attempt.context)
            if attempt.has_reports or not attempt.is_alone:
                attempt.notes.clear_records()


def _read_descriptions(
    records: Records, known_digests: Collection[int], attempt: Attempt
) -> dict[int, Index]:
    """The descriptions that records name, by their digests; equal ones are read once.

    Arguments:
        records: of all processes.
        known_digests: the digests of those that need not be read.
        attempt: in which they were published.

    Raises:
        StorageError: one is damaged.
    """
    reads: dict[int, tuple[int, Callable[[], bytes]]] = {}
    for process, record in records:
        if record.description not in known_digests and record.description not in reads:
            read = _reading(record, attempt, process)
            reads[record.description] = process, read
    described = {}
    for digest, (process, result) in reads.items():
        data, where = result(), str(attempt.folder_of(process))
        if xxhash.xxh3_64_intdigest(data) != digest:
            raise StorageError(f"{where}: the description of process {process} is damaged")
        described[digest] = index_json.decode(data, where, partial=True)
    return described


def _reading(record: Record, attempt: Attempt, process: int) -> Callable[[], bytes]:
    """Starts to read the description of a process; returns what waits for it."""
    if record.described is None:
        return partial(attempt.notes.get, DESCRIPTION.format(record.description))
    number, offset, length = record.described
    within = slice(offset, offset + length)
    if number < 0:
        return partial(bytes, record.inline[within])
    files = attempt.folder_of(process).store(attempt.context)
    future = files.read(record.files[number], byte_range=within)
    return lambda: bytes(future.result().value)


def _files_gone(location: Location) -> StorageError:
    """The error that the files of an attempt are gone."""
    return StorageError(
        f"{location}: the files written for this checkpoint are gone; the folder was removed "
        f"during the save{saved_apart()}"
    )


# --- an index that a reader refuses is not committed ----------------------------------------------

_MOST_CHECKED = 64
_lock = threading.Lock()


class CheckedStructures(dict[bytes, None]):
    """The digests of the structures that were last read back.

    A structure is the common part of saves of one tree. For 5,000 arrays, reading it back takes as
    long as encoding it, and the tree five times as long.
    """

    def add(self, digest: bytes) -> None:
        """Adds a structure; drops the least recently used one."""
        with _lock:
            self.pop(digest, None)
            self[digest] = None
            if len(self) > _MOST_CHECKED:
                del self[next(iter(self))]


_checked = CheckedStructures()


def check_readable(data: bytes, where: str, checked: CheckedStructures = _checked) -> None:
    """Checks that the reader's own code takes an index.

    Arguments:
        data: the index, encoded.
        where: the checkpoint's path, for messages.
        checked: structures that need not be read again; values and metadata are read in any case.

    Raises:
        UnsupportedLeaf: names the leaf that the reader refuses.
    """
    try:
        parts = index_json.IndexParts.split(data)
        structure = _digest(parts.tree, parts.arrays)
        if structure in checked:
            parts.check_others()
            checked.add(structure)
            return
        index = index_json.decode(data, where)
        # Arrays with patches are described differently in each save, and have the same names.
        tree = _digest(parts.tree, tree_json.ENCODER.encode(list(index.names)))
        if tree not in checked:
            tree_of(index)
    except (CheckpointCorrupt, ValueError) as error:
        reason = str(error).removeprefix(f"{where}: ")
        raise UnsupportedLeaf(
            f"{where}: this checkpoint could not be read again, so it is not committed: {reason}"
        ) from error
    checked.add(tree)
    checked.add(structure)


def _digest(*parts: bytes) -> bytes:
    return b"".join(map(xxhash.xxh3_128_digest, parts))
