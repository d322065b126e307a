"""copy(): the same checkpoint in another place, file by file, and checked there."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import tensorstore as ts

from unickpt.commit import borrowers, version
from unickpt.commit.root import Root
from unickpt.commit.version import Version
from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    SaveConflict,
    StorageError,
    UnsupportedFormat,
)
from unickpt.format import index_json, ocdbt_reader
from unickpt.format.index import BORROWED_KEY, INDEX_KEY
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.reading import checkpoint
from unickpt.storage import contexts, errors, paths
from unickpt.storage.database import Database
from unickpt.storage.errors import Failed
from unickpt.storage.kvstore import Future, KvStore, commit
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.threads import Window, in_batches
from unickpt.tools.verification import verify_opened

_BORROWED = "borrowed"
"""In the folder of an attempt: a database of the chunks that a base had."""
_CHUNKS_AT_ONCE = 256
_AT_ONCE = 4
# Messages between the processes of a save, and who borrows, next to the databases of an attempt.
_MESSAGES = (b"records/", b"notes/", b"borrowers/")


@dataclass(frozen=True)
class CopyReport:
    """What `copy` did.

    Arguments:
        url: where the copy is.
        arrays, bytes: of the checkpoint.
        borrowed: number of chunks that other checkpoints had, and that are now in the copy itself.
        seconds: how long it took.
    """

    url: str
    arrays: int
    bytes: int
    borrowed: int
    seconds: float


def copy(
    source: paths.Path,
    destination: paths.Path,
    *,
    overwrite: bool = False,
    budget_bytes: int = 1 << 30,
    timeout_s: float = 600.0,
    progress: Callable[[int, int], None] | None = None,
) -> CopyReport:
    """Copies a checkpoint, completely or not at all.

    The files are copied as they are, then read back and checked against the digests; only then the
    copy appears. If a copy was interrupted, the next one goes on with what is there. Chunks that
    the source shares with checkpoints beside it (docs/reuse.md) are in the copy itself.

    Arguments:
        source: a local path or a URL of a checkpoint of unickpt's own format.
        destination: a path or URL where no checkpoint exists yet.
        overwrite: replace a checkpoint there.
        budget_bytes: host memory to use; at least the size of the largest file.
        timeout_s: how long to wait for another process that writes there.
        progress: called with the bytes copied so far and, about, in total.

    Raises:
        CheckpointNotFound: there is no checkpoint at the source.
        UnsupportedFormat: it is another system's; see `convert`.
        CheckpointCorrupt: the source is damaged; nothing was copied.
        CheckpointExists: the destination holds a checkpoint or other files.
        SaveConflict: another job saved there meanwhile.
        StorageError: a storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/original", {"w": np.arange(3)})
        >>> unickpt.copy("memory://run/original", "memory://run/copy").arrays
        1
    """
    started = time.monotonic()
    origin, there = paths.resolve(source, or_file=True), paths.resolve(destination)
    where = f"copying {origin} to {there}"
    reader = checkpoint.opened(source).reader
    if not isinstance(reader, OcdbtReader):
        raise UnsupportedFormat(
            f"{where}: the source is of the format {reader.format!r}; use unickpt.convert"
        )
    try:
        found = version.version_at(origin)
        if found is None or found.name != reader.manifest_digest:
            raise SaveConflict(f"{where}: the source was removed or replaced during the copy")
        if not found.attempt:
            raise CheckpointCorrupt("its manifest does not say which attempt made it")
        _copy(reader, found, there, overwrite, budget_bytes, timeout_s, progress)
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{where}: {error}") from error
    except Failed as error:
        raise errors.writing_failed(error, where) from error
    index = reader.index
    nbytes = sum(entry.nbytes for entry in index.arrays.values())
    took = time.monotonic() - started
    return CopyReport(there.url, len(index.arrays), nbytes, index.borrowed, took)


def _copy(
    reader: OcdbtReader,
    found: Version,
    destination: Location,
    overwrite: bool,
    budget_bytes: int,
    timeout_s: float,
    progress: Callable[[int, int], None] | None,
) -> None:
    context = contexts.context()
    origin, root = reader.location, Root(Database(destination, context))
    foreign = destination.foreign_files()
    if foreign or origin.url == destination.url:
        raise CheckpointExists(
            f"{destination} holds other files; choose a new or empty directory"
            if foreign
            else f"{destination} is the source itself"
        )
    before = root.read()
    if before.digest and before.digest != found.name:
        if not overwrite:
            raise CheckpointExists(
                f"{destination} already holds a checkpoint; pass overwrite=True (--overwrite on "
                "the command line) to replace it"
            )
        if needed := borrowers.of(destination, context):
            raise CheckpointExists(f"{destination} has chunks of {', '.join(needed[:3])}")
    destination.make()
    total = sum(entry.nbytes for entry in reader.index.arrays.values())
    copy_files(
        origin,
        destination,
        found.attempt,
        budget_bytes,
        resume=True,
        progress=None if progress is None else lambda done: progress(min(done, total), total),
    )
    manifest = found.manifest
    if reader.index.bases:
        manifest = _whole(reader, found, destination, context)
    try:
        check_copy(origin, destination, manifest)
    except StorageError:  # what was there already may be damaged, or be of another checkpoint
        copy_files(origin, destination, found.attempt, budget_bytes)
        check_copy(origin, destination, manifest)
    if version.version_at(origin) != found:
        raise SaveConflict(f"{origin}: another save replaced it during the copy")
    if not root.replace(before, manifest, timeout_s):
        raise SaveConflict(f"{destination}: another job committed here during the copy")
    destination.sync(destination)
    for attempt in destination.child("processes").folders(context):
        if attempt != found.attempt:
            destination.child(f"processes/{attempt}").remove(context)


def _whole(
    reader: OcdbtReader, found: Version, destination: Location, context: ts.Context
) -> bytes:
    """Writes the chunks that bases have, and a B-tree of all chunks; returns its manifest."""
    folder = f"processes/{found.attempt}"
    destination.child(f"{folder}/{_BORROWED}").remove(context)  # of an interrupted copy
    there = Database(destination.child(f"{folder}/{_BORROWED}"), context)
    store = there.store()
    for some in in_batches(reader.borrowed_values(), _CHUNKS_AT_ONCE, 256 << 20, _nbytes):
        transaction = ts.Transaction(atomic=True)
        adding = store.with_transaction(transaction)
        for written in [adding.write(key, value) for key, value in some]:
            written.result()
        commit(transaction).result()
    index = replace(reader.index, bases=(), borrowed=0, borrowed_xxh3="", reused=0)
    own = Database(destination, context)
    draft, held = own.draft(f"{folder}/root/")
    transaction = ts.Transaction(atomic=True)
    root = draft.with_transaction(transaction)
    for part in (own.with_manifest(found.manifest), there):
        part.store().experimental_copy_range_to(root, ts.KvStore.KeyRange()).result()
    root.write(INDEX_KEY, index_json.encode(index)).result()
    root.write(BORROWED_KEY, None).result()
    commit(transaction).result()
    destination.child(f"{folder}/root").sync(destination)
    manifest: bytes = held.read(MANIFEST).result().value
    return manifest


def _nbytes(value: tuple[str, bytes]) -> int:
    return len(value[1])


def copy_files(
    origin: Location,
    destination: Location,
    attempt: str,
    budget_bytes: int,
    *,
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copies the databases of an attempt.

    Arguments:
        origin, destination: of the checkpoints.
        attempt: the name of the attempt.
        budget_bytes: host memory to use; at least the size of the largest file.
        resume: leave files that are there already: each was written at once.
        progress: called with the bytes copied so far.

    Raises:
        CheckpointCorrupt: a file is gone.
        Failed: a storage failed.
    """
    context = contexts.context()
    source, copied = (location.child(f"processes/{attempt}") for location in (origin, destination))
    reader, writer = source.store(context), copied.store(context)
    every = sorted(key.decode() for key in reader.list().result() if not key.startswith(_MESSAGES))
    there = {key.decode() for key in writer.list().result()} if resume else set[str]()
    keys = [key for key in every if key not in there]
    _copy_values(keys, reader, writer, budget_bytes, progress)
    for folder in sorted({key.rpartition("/")[0] for key in every}):
        copied.child(folder).sync(destination)


def _copy_values(
    keys: list[str],
    reader: KvStore,
    writer: KvStore,
    budget_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    window = Window(budget_bytes, _AT_ONCE)
    done = 0
    try:
        for key in keys:
            read = reader.read(key).result()
            if read.state != "value":
                raise CheckpointCorrupt(f"its file {key!r} is missing")
            window.make_room(len(read.value))
            window.add(len(read.value), partial(_wait, writer.write(key, read.value)))
            done += len(read.value)
            if progress is not None:
                progress(done)
        window.drain()
    finally:
        _settle(window)


def _settle(window: Window) -> None:
    """Waits for pending writes after an error, which could otherwise overwrite later ones."""
    while True:
        with suppress(Failed):
            if not window.wait_oldest():
                return


def _wait(written: Future[Any]) -> None:
    written.result()


def check_copy(origin: Location, destination: Location, manifest: bytes) -> None:
    """Reads a copy, whose manifest is not written yet, and checks it against its digests."""
    damage = _damage(destination, manifest)
    if damage:
        at_origin = _damage(origin, manifest)
        if at_origin:
            raise CheckpointCorrupt(f"it is damaged: {at_origin}")
        raise StorageError(f"{destination}: what was written reads differently: {damage}")


def _damage(location: Location, manifest: bytes) -> str:
    """The damage of the data at a location to which a manifest refers; empty if none."""
    draft = Database(location, contexts.context()).with_manifest(manifest)
    try:
        opened = partial(ocdbt_reader.open_pinned, draft)
        report = verify_opened(location.url, opened, behind=True)
    except CheckpointNotFound as error:
        return str(error)
    return "; ".join(map(str, report.damage[:3]))
