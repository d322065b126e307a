"""repair(): rewrites damaged and missing files from parity."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import unickpt
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, UnickptError
from unickpt.extend import (
    Location,
    OcdbtReader,
    PathLike,
    first_few,
    numbered_parts,
    quoted,
    reading,
    resolve_path,
    storage_context,
    version_at,
    writing_failed,
)
from unickpt.plugins.parity.files import checked
from unickpt.plugins.parity.groups import GroupState, ParityGroup, folders_of, needed_files
from unickpt.plugins.parity.tables import encode

_STEP_BYTES = 16 << 20
"""Bytes of each file that are in memory at once."""


@dataclass(frozen=True)
class RepairReport:
    """The report of `repair`.

    Arguments:
        url: the checkpoint.
        files: how many files were checked, parity files included.
        repaired: the paths of the files that were rewritten, below the checkpoint's folder.
        unprotected: the paths of damaged parity files whose group is unknown.
        seconds: how long it took.
    """

    url: str
    files: int
    repaired: tuple[str, ...]
    unprotected: tuple[str, ...]
    seconds: float


def repair(path: PathLike) -> RepairReport:
    """Checks all files of a checkpoint that have parity, and rewrites damaged and missing ones.

    Each file is restored bit for bit, checked against its digest, and then replaced at once: an
    interrupted repair can be repeated. See docs/parity.md.

    Arguments:
        path: a local path or a URL.

    Raises:
        CheckpointNotFound: no checkpoint exists there.
        CheckpointCorrupt: more files are lost than parity restores; names these files, and the
            arrays in them. All others were restored.
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> options = unickpt.SaveOptions(parity=(8, 1))
        >>> _ = unickpt.save("memory://run/repair", {"w": np.zeros(1000)}, options=options)
        >>> unickpt.repair("memory://run/repair").repaired
        ()
    """
    started, location, context = time.monotonic(), resolve_path(path), storage_context()
    with reading(location):
        version = version_at(location)
    if version is None:
        raise CheckpointNotFound(f"no checkpoint at {location}")
    if not version.attempt:
        raise CheckpointCorrupt(f"{location}: its manifest is damaged, which has no parity")
    repaired, lost = list[str](), list[ParityGroup]()
    with reading(location, writing_failed):
        folders = folders_of(location, context, version.attempt)
        needed = needed_files(location, context)
        for folder in folders:
            for group in folder.groups:
                if not group.is_needed(group.state, needed):
                    continue
                if group.state.is_covered:
                    repaired += _repair_group(group, group.state)
                else:
                    lost.append(group)
            if folder.list_damage and not folder.unreadable:
                tables = encode(group.table for group in folder.groups)
                folder.files.replace(folder.list_path, [tables])
                repaired.append(f"{folder.prefix}{folder.list_path}")
    if lost:
        raise CheckpointCorrupt(f"{location}: {_gone(location, lost)}")
    groups = [group for folder in folders for group in folder.groups]
    count = sum(len(group.table.files) + len(group.table.parity) for group in groups)
    unprotected = [path for folder in folders for path in folder.unreadable]
    took = time.monotonic() - started
    files = count + len(folders)
    return RepairReport(location.url, files, tuple(repaired), tuple(unprotected), took)


def _repair_group(group: ParityGroup, state: GroupState) -> Iterator[str]:
    """Rewrites the damaged files of a group; returns their paths."""
    for number in state.files:
        path, size, digest = group.table.files[number]
        group.files.replace(path, checked(path, _restored(group, state, number, size), digest))
        yield group.name(path)
    for number in state.parity:
        path, digest = group.table.parity[number]
        sums = checked(path, _parity(group, number), digest)
        group.files.replace(path, chain(sums, [encode([group.table])]))
        yield group.name(path)


def _restored(group: ParityGroup, state: GroupState, number: int, size: int) -> Iterator[bytes]:
    for offset in range(0, size, _STEP_BYTES):
        length = min(_STEP_BYTES, size - offset)
        yield group.restore(state.files, offset, length)[number]


def _parity(group: ParityGroup, number: int) -> Iterator[bytes]:
    """The bytes of a sum, when all files are sound."""
    for offset in range(0, group.table.nbytes, _STEP_BYTES):
        length = min(_STEP_BYTES, group.table.nbytes - offset)
        yield group.sums(offset, length)[number].tobytes()


def _gone(location: Location, lost: list[ParityGroup]) -> str:
    """What cannot be restored: files, and the arrays in them."""
    paths = {g.name(g.table.files[n][0]) for g in lost for n in g.state.files}
    try:
        reader = unickpt.open(str(location)).reader
        names = _arrays_in(reader, paths) if isinstance(reader, OcdbtReader) else []
        arrays = (
            f"the arrays {first_few([quoted(name) for name in names], 10)}" if names else "no array"
        )
    except UnickptError:  # the B-tree is gone, too
        arrays = "arrays that cannot be named"
    reasons = "; ".join(group.uncovered() for group in lost)
    return f"{reasons}. In these files are {arrays}"


def _arrays_in(reader: OcdbtReader, paths: set[str]) -> list[str]:
    names = list[str]()
    for name, entry in reader.index.arrays.items():
        places = (
            reader.chunk_values.where(entry, part, number)
            for _, part in numbered_parts(entry)
            for number in range(part.count)
        )
        if any(place is not None and place.path in paths for place in places):
            names.append(name)
    return names
