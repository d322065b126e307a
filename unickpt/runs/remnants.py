"""Remnants: what failed, killed and removed saves leave in a folder of checkpoints.

Something is a remnant only if all of it looks like the output of a save. A folder with anything
else in it, the target of a symbolic link, and what a save may still be writing are not remnants.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import tensorstore as ts

from unickpt.errors import UnickptError
from unickpt.reading import checkpoint
from unickpt.reading.listing import natural
from unickpt.runs.lease import Lease, holder
from unickpt.storage import contexts, errors, locations
from unickpt.storage.kvstore import Damaged, Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

# Longer than the default timeout, during which processes may wait without writing.
RECENT_S = 900.0
"""For this long after its last write, a save may still be in progress."""

_LOCK = ".__lock"
# What a save puts below `processes/<attempt>/`: databases of processes, nodes of the root, notes.
_OURS = r"(\d{5,9}/(manifest\.ocdbt[^/]*|d/[^/]+)|root/[^/]+|(records|notes)/[^/]+)"
_DATABASE = r"\d{5,9}/manifest\.ocdbt"

UNFINISHED, UNUSED, LOCK = "unfinished", "unused", "lock"


@dataclass(frozen=True)
class Remnant:
    """The remains of a save.

    Arguments:
        name: of the folder or file, below the folder that was searched.
        kind: "unfinished": a folder without a committed checkpoint; "unused": an attempt to save a
            checkpoint that another attempt committed; "lock": a lock file.
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


@dataclass(frozen=True)
class Found:
    """What a folder contains besides committed checkpoints.

    Arguments:
        remnants: what may be removed.
        under_way: what a save may be writing now: everything written less than `RECENT_S` ago, or
            everything while a job holds the lease.
        unknown: remnants whose time of writing is unknown.
        holder: a description of the job that holds the lease on the folder, if any.
    """

    remnants: tuple[Remnant, ...]
    under_way: tuple[Remnant, ...]
    unknown: tuple[Remnant, ...]
    holder: str | None


def find(root: locations.Path) -> Found:
    """Searches a folder of checkpoints, or one checkpoint's own folder; changes nothing.

    Arguments:
        root: a local path or a URL, or a whole bucket.

    Raises:
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://remnants/step_1", {"w": np.zeros(3)})
        >>> find("memory://remnants").remnants
        ()
    """
    location = locations.resolve(root, whole=True)
    context = contexts.context()
    try:
        found = sorted(_search(location, context), key=lambda remnant: natural(remnant.name))
        owner = holder(lease_location(location))
    except Failed as error:
        raise errors.translate(error, str(location)) from error
    still = [r for r in found if owner is None and not r.is_recent]
    return Found(
        remnants=tuple(r for r in still if r.age_s is not None),
        under_way=tuple(r for r in found if owner is not None or r.is_recent),
        unknown=tuple(r for r in still if r.age_s is None),
        holder=owner,
    )


def clean(root: locations.Path, remnants: Sequence[Remnant]) -> list[Remnant]:
    """Removes remnants that `find` found, if they have not changed since.

    Raises:
        SaveConflict: a job saves into this folder.
        StorageError: the storage failed.

    Returns:
        What was removed.
    """
    location = locations.resolve(root, whole=True)
    lease = Lease(lease_location(location))
    lease.take()
    removed = []
    try:
        lease.check()
        context = contexts.context()
        now = {remnant.name: remnant for remnant in _search(location, context)}
        for remnant in remnants:
            there = now.get(remnant.name)
            if there is None or there.is_recent or not _is_same(there, remnant):
                continue
            _remove(location, remnant, context)
            removed.append(remnant)
    except Failed as error:
        raise errors.translate(error, str(location), reading=False) from error
    finally:
        lease.give_back()
    return removed


def _is_same(a: Remnant, b: Remnant) -> bool:
    return (a.kind, a.files, a.nbytes, a.attempts) == (b.kind, b.files, b.nbytes, b.attempts)


def lease_location(location: Location) -> Location:
    """The folder whose lease covers this one: for a step, the run's folder."""
    parent = location.parent
    if parent is not None and Lease.was_taken(parent) and holds_checkpoint_parts(location):
        return parent
    return location


def holds_checkpoint_parts(location: Location) -> bool:
    """Whether a folder belongs to a single checkpoint, committed or not."""
    context = contexts.context()
    if location.is_local:
        names = _names(location.spec["path"])
        return MANIFEST in names or "processes" in names
    keys = location.store(context).list().result()
    return any(key == MANIFEST.encode() or key.startswith(b"processes/") for key in keys)


# --- what is there --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _File:
    """A file or object: its name within the folder; size and age if known."""

    name: str
    nbytes: int = 0
    age_s: float | None = None


def _search(location: Location, context: ts.Context) -> Iterator[Remnant]:
    if location.is_local and os.path.islink(location.spec["path"].rstrip("/")):
        return
    folders = {"": location}
    if location.is_local:
        folders |= {name: location.child(name) for name in location.folders(context)}
        files = {name: list(_local_files(place)) for name, place in folders.items()}
    else:
        files = _stored_files(location, context)
        folders |= {name: location.child(name) for name in files if name}
    for name, place in folders.items():
        yield from _in_folder(name, place, files.get(name, []), context)


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _local_files(place: Location) -> Iterator[_File]:
    """The files of a checkpoint's folder: those in it, and all that lie below `processes`.

    Names end in `/` for an empty folder, and in `?` for anything that a save does not write: a
    link, a folder of another name, an unreadable entry. If a checkpoint has a single attempt, which
    must be its own, the attempt's folder represents its contents.
    """
    top, now = place.spec["path"], time.time()
    attempts = _names(os.path.join(top, "processes"))
    single = len(attempts) == 1 and os.path.isfile(os.path.join(top, MANIFEST))
    stack = [""]
    while stack:
        folder = stack.pop()
        try:
            entries = sorted(os.scandir(top + folder), key=lambda entry: entry.name)
            changed = os.stat(top + folder, follow_symlinks=False).st_mtime
        except OSError:
            yield _File(folder + "?")
            continue
        if folder and not entries:
            yield _File(folder, 0, max(0.0, now - changed))
        for entry in entries:
            name = folder + entry.name
            if entry.is_dir(follow_symlinks=False) and (folder or entry.name == "processes"):
                if single and folder:
                    yield _File(name + "/")
                else:
                    stack.append(name + "/")
            elif not entry.is_file(follow_symlinks=False):
                yield _File(name + "?")
            else:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    yield _File(name, facts.st_size, max(0.0, now - facts.st_mtime))


def _stored_files(location: Location, context: ts.Context) -> dict[str, list[_File]]:
    """The objects below a prefix, grouped by the folders directly below it and the prefix
    itself."""
    files: dict[str, list[_File]] = {"": []}
    for key in location.store(context).list().result():
        name = key.decode(errors="replace")
        folder, _, rest = name.partition("/")
        if folder == "processes" or not rest:
            files[""].append(_File(name))
        else:
            files.setdefault(folder, []).append(_File(rest))
    return files


# --- what of it is a remnant ----------------------------------------------------------------------


def _in_folder(
    name: str, place: Location, files: Sequence[_File], context: ts.Context
) -> Iterator[Remnant]:
    """The remnants in the folder of one checkpoint, committed or not."""
    prefix = f"{name}/" if name else ""
    own = [f for f in files if not f.name.startswith(".") and not _is_lock(f.name)]
    committed = any(f.name == MANIFEST for f in own)
    attempts = _attempts([f for f in own if f.name.startswith("processes/")])
    pure = all(f.name.startswith("processes/") for f in own)
    if committed:
        # A single attempt must be the one that made the checkpoint.
        used = set(attempts_of_checkpoint(place, context)) if len(attempts) > 1 else {*attempts}
        for attempt, parts in attempts.items():
            if attempt not in used and _all_ours(parts):
                yield _remnant(prefix, UNUSED, place, {attempt: parts}, context)
        for file in files:
            if _is_lock(file.name) and file.name.startswith(MANIFEST):
                yield Remnant(prefix + file.name, LOCK, 1, file.nbytes, file.age_s)
    elif attempts and pure and all(map(_all_ours, attempts.values())):
        yield _remnant(prefix, UNFINISHED, place, attempts, context)


def _is_lock(name: str) -> bool:
    return name.endswith(_LOCK) and "/" not in name


def _attempts(files: Iterable[_File]) -> dict[str, list[_File]]:
    found: dict[str, list[_File]] = {}
    for file in files:
        attempt, _, rest = file.name.removeprefix("processes/").partition("/")
        if attempt:
            found.setdefault(attempt, []).append(_File(rest, file.nbytes, file.age_s))
    return found


def _all_ours(files: Iterable[_File]) -> bool:
    return all(
        not f.name or f.name.endswith("/") or re.fullmatch(_OURS, f.name.removesuffix(_LOCK))
        for f in files
    )


def _remnant(
    prefix: str,
    kind: str,
    place: Location,
    attempts: dict[str, list[_File]],
    context: ts.Context,
) -> Remnant:
    paths = tuple(f"{prefix}processes/{attempt}" for attempt in sorted(attempts))
    name = paths[0] if kind == UNUSED else prefix.rstrip("/") or "."
    files = [f for parts in attempts.values() for f in parts if f.name and f.name[-1] != "/"]
    ages = [f.age_s for parts in attempts.values() for f in parts if f.age_s is not None]
    nbytes = sum(f.nbytes for f in files)
    if not place.is_local:
        times, sizes = [], []
        for attempt, parts in attempts.items():
            for part in parts:
                if re.fullmatch(_DATABASE, part.name):
                    database = place.child(f"processes/{attempt}/{part.name.partition('/')[0]}")
                    with suppress(Damaged):  # or removed meanwhile: then the age is unknown
                        facts = database.database_facts(context)
                        times.append(facts.committed)
                        sizes.append(facts.nbytes)
        # A process without a manifest may have just started.
        processes = {(a, f.name.partition("/")[0]) for a, p in attempts.items() for f in p}
        known = len(times) == sum(part.isdigit() for _, part in processes) and times
        ages = [max(0.0, time.time() - max(times))] if known else []
        nbytes = sum(sizes)
    return Remnant(name, kind, len(files), nbytes, min(ages, default=None), paths)


def attempts_of_checkpoint(place: Location, context: ts.Context) -> list[str]:
    """The attempt that made a checkpoint; all attempts if it is too damaged to tell."""
    try:
        return [checkpoint.open(str(place)).index.attempt]
    except UnickptError:
        return place.child("processes").folders(context)


def is_unfinished(place: Location, context: ts.Context) -> bool:
    """Whether a folder without a checkpoint contains only what a save puts there."""
    if place.is_local:
        return not place.foreign_files()
    keys = (key.decode(errors="replace") for key in place.store(context).list().result())
    return all(key.startswith("processes/") for key in keys)


# --- removing -------------------------------------------------------------------------------------


def remove_attempts(place: Location, attempts: Iterable[str], context: ts.Context) -> None:
    """Removes attempts, and the folder if nothing else is in it.

    Does not touch another attempt, which may begin at the same time.
    """
    for attempt in attempts:
        place.child(f"processes/{attempt}").remove(context)
    place.remove_empty()


def _remove(location: Location, remnant: Remnant, context: ts.Context) -> None:
    if remnant.kind == LOCK:
        location.remove_file(remnant.name, context)
        return
    folder = remnant.attempts[0].partition("processes/")[0]
    names = [path.rpartition("/")[2] for path in remnant.attempts]
    remove_attempts(location.child(folder) if folder else location, names, context)
