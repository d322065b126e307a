"""Remnants: what failed, killed and removed saves leave in a folder of checkpoints.

Something is a remnant only if all of it looks like the output of a save. A folder with anything
else in it, the target of a symbolic link, and what a save may still be writing are not remnants.
`cleanup` finds and removes them for users.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import tensorstore as ts

from unickpt.format.borrowed import MARKS
from unickpt.steps.attempt_folders import FOLDER, attempts_of_checkpoint
from unickpt.storage import data_files, local_folders
from unickpt.storage.local_folders import LOCK_SUFFIX, StoredFile
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.tools import destinations

# Longer than the default timeout, during which processes may wait without writing.
RECENT_S = 900.0
"""For this long after its last write, a save may still be in progress."""

# What saves and copies put below `processes/<attempt>/`: files of processes, also linked ones
# (before format 2.2 with a database), nodes of the root, chunks of bases, notes.
_OURS = (
    r"(\d{5,9}/(manifest\.ocdbt[^/]*|(d|reused)/[^/]+)|root/([0-9a-f]{16}/)?[^/]+"
    r"|borrowed/(manifest\.ocdbt[^/]*|d/[^/]+)|(records|notes|borrowers)/[^/]+)"
)
_BELOW = f"{FOLDER}/"

UNFINISHED, UNUSED, LOCK = "unfinished", "unused", "lock"
EXPORT, REPLACED = "export", "replaced"


@dataclass(frozen=True)
class Remnant:
    """The remains of a save.

    Arguments:
        name: of the folder or file, below the folder that was searched.
        kind: "unfinished": a folder without a committed checkpoint; "unused": an attempt to save a
            checkpoint that another attempt committed; "lock": a lock file; "export": what a killed
            export wrote; "replaced": the checkpoint that a killed export was about to replace,
            which is missing in its place, and is put back.
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


def search(location: Location, context: ts.Context) -> Iterator[Remnant]:
    """The remnants in a folder of checkpoints, or in one checkpoint's own folder.

    Raises:
        Failed: the storage failed.
    """
    if location.link is not None:
        return
    if location.is_local:
        yield from _of_exports(str(location.spec["path"]))
    for name, files in location.files_by_folder(FOLDER, context).items():
        yield from _in_folder(name, location.child(name) if name else location, files, context)


def _of_exports(folder: str) -> Iterator[Remnant]:
    """What killed exports left in a local folder."""
    for name, of, is_missing in destinations.left_in(folder):
        files = list(local_folders.walk_all(os.path.join(folder, name)))
        age_s = min((f.age_s for f in files if f.age_s is not None), default=None)
        count = sum(not f.name.endswith("/") for f in files)
        nbytes = sum(f.nbytes or 0 for f in files)
        yield Remnant(name, REPLACED if is_missing else EXPORT, count, nbytes, age_s, (of,))


def _in_folder(
    name: str, location: Location, files: Sequence[StoredFile], context: ts.Context
) -> Iterator[Remnant]:
    """The remnants in the folder of one checkpoint, committed or not."""
    prefix = f"{name}/" if name else ""
    own = [f for f in files if not f.name.startswith(".") and not _is_lock(f.name)]
    below = [f for f in own if f.name.startswith(_BELOW)]
    attempts = _attempts(below)
    if any(f.name == MANIFEST for f in own):
        for attempt in _unused_attempts(location, attempts, context):
            yield _remnant(prefix, UNUSED, location, {attempt: attempts[attempt]}, context)
        for file in files:
            if _is_lock(file.name) and file.name.startswith(MANIFEST):
                yield _lock(prefix, file)
        for lock in locks_of_marks(location, attempts, context):
            yield replace(lock, name=prefix + lock.name)
    elif attempts and len(below) == len(own) and all(map(_all_ours, attempts.values())):
        yield _remnant(prefix, UNFINISHED, location, attempts, context)


def locks_of_marks(
    location: Location, attempts: Iterable[str], context: ts.Context
) -> Iterator[Remnant]:
    """The lock files that killed processes left where they marked whose chunks they borrow.

    Arguments:
        location: of a checkpoint.
        attempts: in its folder.
        context: for the storage.
    """
    for folder in (f"{_BELOW}{attempt}/{MARKS}" for attempt in attempts if location.is_local):
        for file in location.child(folder).files_by_folder("", context)[""]:
            if _is_lock(file.name):
                yield _lock(f"{folder}/", file)


def _lock(prefix: str, file: StoredFile) -> Remnant:
    return Remnant(prefix + file.name, LOCK, 1, file.nbytes or 0, file.age_s)


def _unused_attempts(
    location: Location, attempts: Mapping[str, Sequence[StoredFile]], context: ts.Context
) -> list[str]:
    """The attempts to save a checkpoint that another attempt committed."""
    if len(attempts) < 2:
        return []  # a single one must be the one that made the checkpoint
    used = set(attempts_of_checkpoint(location, context))
    return [name for name, files in attempts.items() if name not in used and _all_ours(files)]


def _is_lock(name: str) -> bool:
    return name.endswith(LOCK_SUFFIX) and "/" not in name


def _attempts(files: Iterable[StoredFile]) -> dict[str, list[StoredFile]]:
    found: dict[str, list[StoredFile]] = {}
    for file in files:
        attempt, _, rest = file.name.removeprefix(_BELOW).partition("/")
        if attempt:
            if attempt.endswith("?"):  # a link, for example, in the place of an attempt's folder
                rest = attempt
            found.setdefault(attempt, []).append(replace(file, name=rest))
    return found


def _all_ours(files: Iterable[StoredFile]) -> bool:
    return all(map(_is_ours, files))


def _is_ours(file: StoredFile) -> bool:
    """Whether a save puts such a file, or folder, into the folder of its attempt."""
    if not file.name or file.name.endswith("/"):
        return True
    if file.name.endswith("?"):  # no file
        return False
    return re.fullmatch(_OURS, file.name.removesuffix(LOCK_SUFFIX)) is not None


def _remnant(
    prefix: str,
    kind: str,
    location: Location,
    attempts: Mapping[str, Sequence[StoredFile]],
    context: ts.Context,
) -> Remnant:
    paths = tuple(f"{prefix}{_BELOW}{attempt}" for attempt in sorted(attempts))
    name = paths[0] if kind == UNUSED else prefix.rstrip("/") or "."
    parts = [f for files in attempts.values() for f in files]
    files = [f for f in parts if f.name and f.name[-1] != "/"]
    if any(f.nbytes is None for f in files):
        nbytes, age_s = _told_by_names(f for some in attempts.values() for f in some)
    else:
        nbytes = sum(f.nbytes or 0 for f in files)
        age_s = min((f.age_s for f in parts if f.age_s is not None), default=None)
    return Remnant(name, kind, len(files), nbytes, age_s, paths)


def _told_by_names(files: Iterable[StoredFile]) -> tuple[int, float | None]:
    """The bytes of attempts and their age, where the storage does not say: by the names of their
    objects. The age is unknown if a process has none yet."""
    times, nbytes, processes, known = [], 0, set[str](), set[str]()
    for file in files:
        process, _, rest = file.name.partition("/")
        if process.isdigit():
            processes.add(process)
            if (found := data_files.written_in(rest.rpartition("/")[2])) is not None:
                known.add(process)
                times.append(found[0])
                nbytes += found[1]
    return nbytes, max(0.0, time.time() - max(times)) if times and known == processes else None
