"""Finds and removes the remains of failed, killed and removed saves in a folder of checkpoints.

They are called orphans, and consist only of output of saves: a folder with anything else in it, the
target of a symbolic link, and files that a save may still be writing are none.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorstore as ts

from unickpt.arrays.names import natural
from unickpt.commit import borrowers, version
from unickpt.commit.lease import Lease, holder
from unickpt.errors import UnsupportedFormat
from unickpt.format import borrowed
from unickpt.format.refusals import refuse_unknown
from unickpt.runs import attempt_folders
from unickpt.storage import data_files, errors, export_leftovers, local_folders, locations, paths
from unickpt.storage.local_folders import LOCK_SUFFIX, StoredFile
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST, RETIRED

_log = logging.getLogger("unickpt")
# Longer than the default timeout, during which processes may wait without writing.
RECENT_S = 900.0
"""For this long after its last write, a save may still be in progress."""

# The contents of `processes/<attempt>/` from saves and copies: files of processes, also linked
# ones, nodes of the root, files that features add to both, chunks of bases, notes.
_OURS = (
    r"(\d{5,9}/(d|p|reused)/[^/]+|root/((p|[0-9a-f]{16})/)?[^/]+"
    r"|borrowed/(manifest\.ocdbt[^/]*|d/[^/]+)|(records|notes|borrowers)/[^/]+)"
)
_BELOW = f"{attempt_folders.FOLDER}/"

UNFINISHED = "unfinished"
UNUSED = "unused"
LOCK = "lock"
EXPORT, REPLACED, RETIRED_STEP = "export", "replaced", "retired"


@dataclass(frozen=True)
class Orphan:
    """The remains of a save.

    Arguments:
        name: of the folder or file, below the folder that was searched.
        kind: "unfinished": a folder without a committed checkpoint; "unused": an attempt to save a
            checkpoint that another attempt committed; "lock": a lock file; "export": the output of
            a killed export; "replaced": the checkpoint that a killed export was about to replace,
            which is missing from its place and is restored; "retired": a step that was removed
            except for borrowed chunks, and whose borrowers are gone.
        files: number of files.
        nbytes: bytes of all files, if known.
        age_s: seconds since the last write; None if the storage does not say.
        attempts: the folders to remove with it, below the folder that was searched.
    """

    name: str
    kind: str
    files: int
    nbytes: int
    age_s: float | None
    attempts: tuple[str, ...] = ()

    @property
    def is_recent(self) -> bool:
        """Whether a save may still be writing it."""
        return self.age_s is not None and self.age_s < RECENT_S


def search(location: Location, context: ts.Context) -> Iterator[Orphan]:
    """The orphans in a folder of checkpoints, or in one checkpoint's own folder.

    Raises:
        Failed: the storage failed.
    """
    if location.link is not None:
        return
    if location.is_local:
        yield from _of_exports(location.path)
    for name, files in _files_by_folder(location, context).items():
        folder = location.child(name) if name else location
        yield from _SearchedFolder(name, folder, files, context).orphans()


def _files_by_folder(location: Location, context: ts.Context) -> dict[str, list[StoredFile]]:
    """See `locations.files_by_folder`; those of a checkpoint's own folder are all that it has."""
    files = locations.files_by_folder(location, attempt_folders.FOLDER, context)
    if not location.is_local and any(file.name.startswith(_BELOW) for file in files[""]):
        nested_files = [(name, file) for name in files if name for file in files[name]]
        files[""] += [file._replace(name=f"{name}/{file.name}") for name, file in nested_files]
    return files


def _of_exports(folder: str) -> Iterator[Orphan]:
    """The remains of killed exports in a local folder."""
    for name, export_name, is_missing in export_leftovers.left_in(folder):
        files = list(local_folders.walk_all(os.path.join(folder, name)))
        count = sum(not f.name.endswith("/") for f in files)
        kind = REPLACED if is_missing else EXPORT
        yield Orphan(name, kind, count, *_size_and_age(files), (export_name,))


class _SearchedFolder:
    """The folder of one checkpoint, committed or not.

    Arguments:
        name: of the folder, below the one that is searched; empty for that one itself.
        location: its location.
        files: in it.
        context: for the storage.
    """

    def __init__(
        self, name: str, location: Location, files: Sequence[StoredFile], context: ts.Context
    ) -> None:
        self._prefix = f"{name}/" if name else ""
        self._location, self._files, self._context = location, files, context
        self._own = [f for f in files if not f.name.startswith(".") and not _is_lock(f.name)]
        self._below = [f for f in self._own if f.name.startswith(_BELOW)]
        self._attempts = _attempts(self._below)
        self._is_committed = any(f.name == MANIFEST for f in self._own)

    def orphans(self) -> list[Orphan]:
        """The orphans in it; none if it needs features that this program does not know."""
        try:
            orphans = list(self._search())
            if self._is_committed and orphans:
                refuse_unknown(self._location, self._context)
            return orphans
        except UnsupportedFormat as error:
            _log.warning("no orphans are removed: %s", error)
            return []

    def _search(self) -> Iterator[Orphan]:
        location, attempts, context = self._location, self._attempts, self._context
        if any(f.name.startswith(RETIRED) for f in self._own):
            yield from self._unneeded_retired()
        if self._is_committed:
            for attempt in self._unused():
                yield self._orphan(UNUSED, {attempt: attempts[attempt]})
            for file in self._files:
                if _is_lock(file.name) and file.name.startswith(MANIFEST):
                    yield _lock(self._prefix, file)
            for lock in locks_of_marks(location, attempts, context):
                yield replace(lock, name=self._prefix + lock.name)
        elif (
            attempts
            and len(self._below) == len(self._own)
            and all(map(_all_ours, attempts.values()))
        ):
            yield self._orphan(UNFINISHED, attempts)

    def _unused(self) -> list[str]:
        """The attempts to save a checkpoint that another attempt committed."""
        if len(self._attempts) < 2:
            return []  # a single one must be the one that made the checkpoint
        refuse_unknown(self._location, self._context)
        used = attempt_folders.attempts_in_use(self._location, self._context)
        return [n for n, files in self._attempts.items() if n not in used and _all_ours(files)]

    def _unneeded_retired(self) -> Iterator[Orphan]:
        """The retired steps in a folder from which no step borrows."""
        location, context, committed = self._location, self._context, list[str]()
        if location.has_file(MANIFEST, context):
            committed = attempt_folders.attempts_of_checkpoint(location, context)
        for digest in location.child(RETIRED).folders(context):
            manifest = borrowed.retired_manifest(location, digest, context)
            attempt = "" if manifest is None else version.version_of(manifest).attempt
            files = self._attempts.get(attempt, ())
            if manifest is None or attempt in committed or not files or not _all_ours(files):
                continue
            try:
                refuse_unknown(location, context, manifest)
            except UnsupportedFormat as error:
                _log.warning("a retired checkpoint is not cleaned: %s", error)
                continue
            if not borrowers.need_retired(location, digest, context):
                orphan = self._orphan(RETIRED_STEP, {attempt: files})
                yield replace(orphan, name=f"{self._prefix}{RETIRED}/{digest}")

    def _orphan(self, kind: str, attempts: Mapping[str, Sequence[StoredFile]]) -> Orphan:
        paths = tuple(f"{self._prefix}{_BELOW}{attempt}" for attempt in sorted(attempts))
        name = paths[0] if kind == UNUSED else self._prefix.rstrip("/") or "."
        parts = [f for files in attempts.values() for f in files]
        files = [f for f in parts if f.name and f.name[-1] != "/"]
        is_unsized = any(f.nbytes is None for f in files)
        size_and_age = _size_by_names(parts) if is_unsized else _size_and_age(parts)
        return Orphan(name, kind, len(files), *size_and_age, paths)


def locks_of_marks(
    location: Location, attempts: Iterable[str], context: ts.Context
) -> Iterator[Orphan]:
    """The lock files of killed processes, next to the marks of borrowers.

    Arguments:
        location: of a checkpoint.
        attempts: in its folder.
        context: for the storage.
    """
    marks = (f"{_BELOW}{attempt}/{borrowed.MARKS}" for attempt in attempts)
    for folder in marks if location.is_local else ():
        for file in locations.files_by_folder(location.child(folder), "", context)[""]:
            if _is_lock(file.name):
                yield _lock(f"{folder}/", file)


def _lock(prefix: str, file: StoredFile) -> Orphan:
    return Orphan(prefix + file.name, LOCK, 1, file.nbytes or 0, file.age_s)


def _is_lock(name: str) -> bool:
    return name.endswith(LOCK_SUFFIX) and "/" not in name


def _attempts(files: Iterable[StoredFile]) -> dict[str, list[StoredFile]]:
    attempts: dict[str, list[StoredFile]] = {}
    for file in files:
        attempt, _, path = file.name.removeprefix(_BELOW).partition("/")
        if attempt:
            if attempt.endswith("?"):  # for example a link in place of an attempt's folder
                path = attempt
            attempts.setdefault(attempt, []).append(file._replace(name=path))
    return attempts


def _all_ours(files: Iterable[StoredFile]) -> bool:
    return all(map(_is_ours, files))


def _is_ours(file: StoredFile) -> bool:
    """Whether a save puts such a file, or folder, into the folder of its attempt."""
    if not file.name or file.name.endswith("/"):
        return True
    if file.name.endswith("?"):  # no file
        return False
    return re.fullmatch(_OURS, file.name.removesuffix(LOCK_SUFFIX)) is not None


def _size_and_age(files: Sequence[StoredFile]) -> tuple[int, float | None]:
    """The bytes of files, and seconds since the last was written."""
    age_s = min((f.age_s for f in files if f.age_s is not None), default=None)
    return sum(f.nbytes or 0 for f in files), age_s


def _size_by_names(files: Iterable[StoredFile]) -> tuple[int, float | None]:
    """The bytes of attempts and their age, from the names of their objects, if the storage does not
    report them. The age is unknown if a process has no object yet."""
    times, nbytes, processes, dated_processes = [], 0, set[str](), set[str]()
    for file in files:
        process, _, path = file.name.partition("/")
        if process.isdigit():
            processes.add(process)
            if (time_and_bytes := data_files.written_in(path.rpartition("/")[2])) is not None:
                dated_processes.add(process)
                times.append(time_and_bytes[0])
                nbytes += time_and_bytes[1]
    is_dated = times and dated_processes == processes
    return nbytes, max(0.0, time.time() - max(times)) if is_dated else None


_LOCK_S = 60.0


@dataclass(frozen=True)
class OrphanSearch:
    """The contents of a folder besides committed checkpoints.

    Arguments:
        orphans: may be removed.
        under_way: may be in use by a save: everything written less than `RECENT_S` ago, or
            everything while a job holds the lease.
        unknown: orphans whose time of writing is unknown.
        holder: a description of the job that holds the lease on the folder, if any.
    """

    orphans: tuple[Orphan, ...]
    under_way: tuple[Orphan, ...]
    unknown: tuple[Orphan, ...]
    holder: str | None


def find(root: paths.PathLike) -> OrphanSearch:
    """Searches a folder of checkpoints, or one checkpoint's own folder; changes nothing.

    Arguments:
        root: a local path or a URL, or a whole bucket.

    Raises:
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://orphans/step_1", {"w": np.zeros(3)})
        >>> find("memory://orphans").orphans
        ()
    """
    location = paths.resolve(root, whole=True)
    context = paths.context()
    with errors.reading(location):
        orphans = sorted(search(location, context), key=lambda orphan: natural(orphan.name))
        owner = holder(_lease_location(location))
    still = [r for r in orphans if owner is None and not r.is_recent]
    return OrphanSearch(
        orphans=tuple(r for r in still if r.age_s is not None),
        under_way=tuple(r for r in orphans if owner is not None or r.is_recent),
        unknown=tuple(r for r in still if r.age_s is None),
        holder=owner,
    )


def clean(root: paths.PathLike, orphans: Sequence[Orphan]) -> list[Orphan]:
    """Removes orphans that `find` found, if they have not changed since.

    Raises:
        SaveConflict: a job saves into this folder.
        StorageError: the storage failed.

    Returns:
        What was removed.
    """
    location = paths.resolve(root, whole=True)
    lease = Lease(_lease_location(location))
    lease.take()
    removed = []
    try:
        lease.check()
        context = paths.context()
        with errors.writing(location):
            now = {orphan.name: orphan for orphan in search(location, context)}
            for orphan in orphans:
                current = now.get(orphan.name)
                if current is None or current.is_recent:
                    continue
                is_same = replace(current, age_s=orphan.age_s) == orphan
                if is_same and _remove(location, orphan, context):
                    removed.append(orphan)
    finally:
        lease.give_back()
    return removed


def remove_crashed(step: Location, whole: Collection[str] | None, session: str = "") -> None:
    """Removes the remains of crashed saves from the folder of a step; only with the lease.

    Arguments:
        step: the location of the step; nothing happens if it is a symbolic link.
        whole: the attempts there, if the step is known to have no more than those it needs.
        session: prefix of the names of this job's attempts, which stay.
    """
    if step.link is not None:
        return
    context = paths.context()
    if whole is None:
        files = _files_by_folder(step, context)[""]
        orphans = _SearchedFolder("", step, files, context).orphans()
        if all(file.name.endswith("/") or _is_lock(file.name) for file in files) and not orphans:
            attempt_folders.remove_empty(step)
    else:
        orphans = list(locks_of_marks(step, whole, context))
    for orphan in orphans:
        attempts = [path.rpartition("/")[2] for path in orphan.attempts]
        is_ours = any(session and name.rpartition("-")[0] == session for name in attempts)
        if is_ours or orphan.kind == RETIRED_STEP or (orphan.kind == LOCK and orphan.is_recent):
            continue
        _log.info("removing %s of %s, the remains of a crashed save", orphan.name, step)
        _remove(step, orphan, context)


def _lease_location(location: Location) -> Location:
    """The folder whose lease covers this one: for a step, the run's folder."""
    parent = location.parent
    is_step = attempt_folders.holds_checkpoint_parts
    if parent is not None and Lease.was_taken(parent) and is_step(location, paths.context()):
        return parent
    return location


def _remove(location: Location, orphan: Orphan, context: ts.Context) -> bool:
    """Removes an orphan; False if it has since become a checkpoint."""
    if orphan.kind == LOCK:
        location.remove_file(orphan.name, context)
        return True
    if orphan.kind in (EXPORT, REPLACED):
        _remove_of_export(location.path, orphan)
        return True
    folder = orphan.attempts[0].partition(_BELOW)[0]
    names = [path.rpartition("/")[2] for path in orphan.attempts]
    checkpoint_location = location.child(folder) if folder else location
    if orphan.kind == RETIRED_STEP:
        digest = orphan.name.rpartition("/")[2]
        return attempt_folders.remove_retired(checkpoint_location, digest, context)
    # The lock under which saves commit, after checking their files.
    with locations.manifest_locked(checkpoint_location, _LOCK_S):
        if checkpoint_location.has_file(MANIFEST, context) and not set(names).isdisjoint(
            attempt_folders.attempts_in_use(checkpoint_location, context)
        ):
            return False
        for name in names:
            checkpoint_location.child(f"{_BELOW}{name}").remove(context)
    attempt_folders.remove_empty(checkpoint_location)
    return True


def _remove_of_export(folder: str, orphan: Orphan) -> None:
    """Removes the output of a killed export, or restores the checkpoint it was replacing."""
    (export_name,) = orphan.attempts
    with local_folders.locked(folder, f".{export_name}", _LOCK_S):  # under which exports commit
        if orphan.kind == EXPORT:
            local_folders.remove(os.path.join(folder, orphan.name))
        else:
            export_leftovers.restore(folder, export_name)
