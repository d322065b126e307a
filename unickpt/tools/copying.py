"""copy(): the same checkpoint in another place, file by file, and checked there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import tensorstore as ts
import xxhash

from unickpt.commit import borrowers, version
from unickpt.commit.messages import replaced_in
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
from unickpt.format import chunk_grid, index_json, ocdbt_reader
from unickpt.format.chunk_values import Value
from unickpt.format.held_files import HeldFiles
from unickpt.format.index import BORROWED_KEY, INDEX_KEY, BaseEntry, Index
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.reader_protocol import ChunkId
from unickpt.format.refusals import refuse_unknown
from unickpt.frameworks.host_memory import check_flags
from unickpt.progress import Progress, reporting
from unickpt.reading import checkpoint
from unickpt.reading.verification import verify_opened
from unickpt.storage import errors, paths
from unickpt.storage.database import Database
from unickpt.storage.disk_space import room_text
from unickpt.storage.errors import Failed
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.tensorstore_calls import KvStore, commit
from unickpt.threads import Window, in_batches

_log = logging.getLogger("unickpt")
_BORROWED = "borrowed"
"""In the folder of an attempt: a database of the chunks that a base had."""
_CHUNKS_AT_ONCE = 256
_AT_ONCE = 4
# Messages between the processes of a save, and marks of borrowers, next to an attempt's databases.
_MESSAGES = (b"records/", b"notes/", b"borrowers/")


@dataclass(frozen=True)
class CopyReport:
    """The report of `copy`.

    Arguments:
        url: the location of the copy.
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
    source: paths.PathLike,
    destination: paths.PathLike,
    *,
    overwrite: bool = False,
    budget_bytes: int = 1 << 30,
    timeout_s: float = 600.0,
    progress: Progress = None,
) -> CopyReport:
    """Copies a checkpoint, completely or not at all.

    The files are copied unchanged, then read back and checked against the digests; only then the
    copy appears. If a copy was interrupted, the next one resumes it. Chunks that the source shares
    with sibling checkpoints (docs/reuse.md) are in the copy itself.

    Arguments:
        source: a local path or a URL of a checkpoint of unickpt's own format.
        destination: a path or URL where no checkpoint exists yet.
        overwrite: replace a checkpoint there.
        budget_bytes: host memory to use; at least the size of the largest file.
        timeout_s: how long to wait for another process that writes there.
        progress: True for a bar, or a function of the bytes copied so far and, about, in total.

    Raises:
        CheckpointNotFound: there is no checkpoint at the source.
        UnsupportedFormat: it is another system's; see `convert`. Or it, or the checkpoint to
            replace, needs features that this unickpt does not know.
        CheckpointCorrupt: the source is damaged; nothing was copied.
        CheckpointExists: the destination holds a checkpoint or other files.
        SaveConflict: another job saved there.
        StorageError: a storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/original", {"w": np.arange(3)})
        >>> unickpt.copy("memory://run/original", "memory://run/copy").arrays
        1
    """
    started = time.monotonic()
    check_flags(overwrite=overwrite)
    origin, target = paths.resolve(source, or_file=True), paths.resolve(destination)
    where = f"copying {origin} to {target}"
    reader = checkpoint.opened(source).reader
    if not isinstance(reader, OcdbtReader):
        raise UnsupportedFormat(
            f"{where}: the source is of the format {reader.format!r}; use unickpt.convert"
        )
    index = reader.index
    nbytes = sum(entry.nbytes for entry in index.arrays.values())
    try:
        source_version = version.version_at(origin)
        if source_version is None or source_version.digest != reader.manifest_digest:
            raise SaveConflict(f"{where}: the source was removed or replaced during the copy")
        if not source_version.attempt:
            raise CheckpointCorrupt("its manifest does not say which attempt made it")
        copied = VersionCopy(origin, source_version, reader, target, budget_bytes)
        with reporting(progress, "copying") as report:
            _commit(copied, overwrite, timeout_s, lambda done: report(min(done, nbytes), nbytes))
    except CheckpointCorrupt as error:
        raise CheckpointCorrupt(f"{where}: {error}") from error
    except Failed as error:
        room = room_text(target, error, nbytes, target.path)
        raise errors.writing_failed(error, where, room) from error
    took = time.monotonic() - started
    return CopyReport(target.url, len(index.arrays), nbytes, index.borrowed, took)


def _commit(
    copied: VersionCopy, overwrite: bool, timeout_s: float, progress: Callable[[int], None]
) -> None:
    """Makes a copy and commits it; refuses to replace a checkpoint unless that is allowed."""
    context = paths.context()
    origin, version_found, destination = copied.origin, copied.version, copied.destination
    root, foreign = Root(Database(destination, context)), destination.foreign_files()
    if foreign or origin.url == destination.url:
        raise CheckpointExists(
            f"{destination} holds other files; choose a new or empty directory"
            if foreign
            else f"{destination} is the source itself"
        )
    before = root.read()
    if before.digest and before.digest != version_found.digest:
        if not overwrite:
            raise CheckpointExists(
                f"{destination} already holds a checkpoint; pass overwrite=True (--overwrite on "
                "the command line) to replace it"
            )
        refuse_unknown(destination, context)
        if needed := borrowers.list_borrowers(destination, context):
            raise CheckpointExists(f"{destination} has chunks of {', '.join(needed[:3])}")
    destination.make(durable=True)
    manifest, _ = copied.run(resume=True, progress=progress)
    if version.version_at(origin) != version_found:
        raise SaveConflict(f"{origin}: another save replaced it during the copy")
    if not root.replace(before, manifest, timeout_s):
        raise SaveConflict(f"{destination}: another job committed here during the copy")
    destination.sync(destination)
    for attempt in destination.child("processes").folders(context):
        if attempt != version_found.attempt:
            destination.child(f"processes/{attempt}").remove(context)


@dataclass(frozen=True)
class VersionCopy:
    """A copy of one version of a checkpoint; its manifest, without which it is none, comes last.

    Arguments:
        origin: the location of the checkpoint.
        version: its version.
        reader: of it; None if it cannot be opened: its files are copied, and the check reports it.
        destination: the location of the copy.
        budget_bytes: host memory to use; at least the size of the largest file.
    """

    origin: Location
    version: Version
    reader: OcdbtReader | None
    destination: Location
    budget_bytes: int

    def run(
        self,
        held_files: HeldFiles | None = None,
        *,
        check_held: bool = False,
        resume: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> tuple[bytes, tuple[BaseEntry, ...]]:
        """Copies the files and checks them.

        Arguments:
            held_files: files of a checkpoint next to the destination: they are linked, or, where
                links are impossible, the copy borrows their chunks.
            check_held: read these chunks, too, and send them if they are damaged; else their
                existence is enough.
            resume: leave files that are there already: each was written at once.
            progress: called with the bytes copied so far.

        Returns:
            The manifest to put in place, and the sibling checkpoints that the copy needs.

        Raises:
            CheckpointCorrupt: the checkpoint is damaged.
            StorageError: a storage failed.
        """
        spared = self._link(held_files)
        lent = (
            held_files
            if held_files is not None and not spared and held_files.is_worthwhile
            else None
        )
        if lent is not None:
            spared = set(lent.paths)
        arguments = self.origin, self.destination, self.version.attempt, self.budget_bytes
        copy_files(*arguments, without=spared, resume=resume, progress=progress)
        manifest = self._manifest(lent)
        try:
            self._check(manifest, () if check_held else spared)
            return manifest, () if lent is None else (lent.entry,)
        except StorageError as error:
            if not spared and not resume:
                raise
            # Existing files may be damaged, or belong to another checkpoint.
            _log.info("%s: all files are sent: %s", self.destination, error)
        copy_files(*arguments)
        manifest = self._manifest(None)
        self._check(manifest, ())
        return manifest, ()

    def _link(self, held_files: HeldFiles | None) -> set[str]:
        """Links the files that a sibling of the copy has; returns the linked files."""
        files = None if held_files is None else held_files.base.location.regular_files()
        linked = set[str]()
        if held_files is None or files is None:
            return linked
        for path, base_path in held_files.paths.items():
            folder, _, name = path.rpartition("/")
            target = self.destination.child(folder)
            target.make()
            with suppress(FileNotFoundError, Failed):  # of a copy that was interrupted
                target.remove_file(name, paths.context())
            if files.link(base_path, f"{target.path}{name}", fsync=True):
                linked.add(path)
        return linked

    def _manifest(self, lent: HeldFiles | None) -> bytes:
        """Writes a B-tree if the copy's chunks are in other places; returns the copy's manifest."""
        if self.reader is None or (lent is None and not self.reader.index.bases):
            return self.version.manifest
        context = paths.context()
        index = replace(self.reader.index, bases=(), borrowed=0, borrowed_xxh3="", reused=0)
        added, changed = list[Database](), dict[str, bytes | None]()
        if lent is None:
            added.append(self._write_borrowed(self.reader, context))
            changed[BORROWED_KEY] = None
        else:
            index, changed = _borrowing(index, lent)
        return self.rewritten(index, changed, context, added)

    def rewritten(
        self,
        index: Index,
        changed: Mapping[str, bytes | None],
        context: ts.Context,
        added: Sequence[Database] = (),
    ) -> bytes:
        """Writes a B-tree of the copy that differs from the original's; returns its manifest.

        Arguments:
            index: of the copy.
            changed: other values by key; None for a key that the copy lacks.
            context: for its databases, and those of `added`.
            added: databases with more values.

        Raises:
            Failed: the storage failed.
        """
        assert self.reader is not None
        folder = version.copied_folder(self.version.attempt, self.version.name)
        stored = self.reader.chunks.read_key(INDEX_KEY)
        changed = {**changed, INDEX_KEY: index_json.with_references(stored, index)}
        database = Database(self.destination, context)
        draft, manifest_store = database.draft(folder)
        transaction = ts.Transaction(atomic=True)
        root = draft.with_transaction(transaction)
        for part in (replace(database, manifest=self.version.manifest), *added):
            part.store().experimental_copy_range_to(root, ts.KvStore.KeyRange()).result()
        for written in [root.write(key, value) for key, value in changed.items()]:
            written.result()
        commit(transaction).result()
        self.destination.child(folder).sync(self.destination)
        manifest: bytes = manifest_store.read(MANIFEST).result().value
        return manifest

    def _write_borrowed(self, reader: OcdbtReader, context: ts.Context) -> Database:
        """Writes the chunks that the checkpoint's bases have."""
        folder = self.destination.child(f"processes/{self.version.attempt}/{_BORROWED}")
        folder.remove(context)  # of an interrupted copy
        database = Database(folder, context)
        store = database.store()
        values, most = _borrowed_values(reader), 256 << 20
        for batch in in_batches(values, _CHUNKS_AT_ONCE, most, lambda value: len(value[1])):
            transaction = ts.Transaction(atomic=True)
            adding = store.with_transaction(transaction)
            for written in [adding.write(key, value) for key, value in batch]:
                written.result()
            commit(transaction).result()
        return database

    def _check(self, manifest: bytes, spared: Collection[str]) -> None:
        """Checks the copy, except chunks in files that were not sent."""
        reader = self.reader if spared else None

        def skips(chunk: ChunkId) -> bool:
            reference = None if reader is None else reader.chunk_values.where(*chunk)
            return reference is not None and reference.path in spared

        check_copy(self.origin, self.version.manifest, self.destination, manifest, skips)


def _borrowing(index: Index, lent: HeldFiles) -> tuple[Index, dict[str, bytes | None]]:
    """The index of a copy that borrows chunks, and other changed values of its database, by key."""
    table = lent.table.tobytes()
    changed: dict[str, bytes | None] = {
        chunk_grid.chunk_key(chunk.part, chunk.number): None
        for chunks in lent.chunks.values()
        for chunk in chunks
    }
    index = replace(
        index,
        bases=(lent.entry,),
        borrowed=len(changed),
        borrowed_xxh3=f"{xxhash.xxh3_64_intdigest(table):016x}",
        reused=lent.nbytes,
    )
    return index, {**changed, BORROWED_KEY: table}


def _borrowed_values(reader: OcdbtReader) -> Iterator[tuple[str, bytes]]:
    """The keys and the stored bytes of all values of a checkpoint that its siblings have.

    Raises:
        CheckpointCorrupt: one is missing.
        StorageError: the storage failed.
    """
    values, lent = reader.chunk_values, reader.borrowed
    for entry in reader.index.arrays.values() if reader.index.bases else ():
        for part in chunk_grid.parts(entry):
            for number in range(part.count):
                for link, base in lent.links(entry, part, number).items():
                    value, key_part = Value(lent.bases[base], part), part
                    if link != chunk_grid.WHOLE_LINK:
                        value = values.chain(entry, part, number)[link - chunk_grid.FULL_LINK]
                        key_part = part.linked(link)
                    data = values.read_value(entry, value, number)
                    yield chunk_grid.chunk_key(key_part, number), data


def copy_files(
    origin: Location,
    destination: Location,
    attempt: str,
    budget_bytes: int,
    *,
    without: Collection[str] = (),
    resume: bool = False,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copies the databases of an attempt.

    Arguments:
        origin, destination: of the checkpoints.
        attempt: the name of the attempt.
        budget_bytes: host memory to use; at least the size of the largest file.
        without: files that are not copied, by their paths below the checkpoint's folder.
        resume: skip files that already exist: each was written at once.
        progress: called with the bytes copied so far.

    Raises:
        CheckpointCorrupt: a file is gone.
        Failed: a storage failed.
    """
    context = paths.context()
    folder = f"processes/{attempt}"
    source, copied = origin.child(folder), destination.child(folder)
    reader, writer = source.store(context), copied.store(context)
    # What such a process wrote, it may remove at any moment.
    unneeded = tuple(f"{process:05d}/".encode() for process in replaced_in(reader))
    listed = [key for key in reader.list().result() if not key.startswith(_MESSAGES + unneeded)]
    every = sorted(key.decode() for key in listed)
    existing_keys = {key.decode() for key in writer.list().result()} if resume else set[str]()
    keys = [key for key in every if key not in existing_keys and f"{folder}/{key}" not in without]
    _copy_values(keys, reader, writer, budget_bytes, progress)
    for below in sorted({key.rpartition("/")[0] for key in every}):
        copied.child(below).sync(destination)


def _copy_values(
    keys: list[str],
    reader: KvStore,
    writer: KvStore,
    budget_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> None:
    window, done = Window(budget_bytes, _AT_ONCE), 0
    try:
        for key in keys:
            read = reader.read(key).result()
            if read.state != "value":
                raise CheckpointCorrupt(f"its file {key!r} is missing")
            window.make_room(len(read.value))
            window.add(len(read.value), writer.write(key, read.value).result)
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


def check_copy(
    origin: Location,
    original: bytes,
    destination: Location,
    manifest: bytes,
    skips: Callable[[ChunkId], bool],
) -> None:
    """Reads a copy before its manifest is written, and checks it against its digests.

    Arguments:
        origin, destination: of the checkpoints.
        original, manifest: theirs.
        skips: whether a chunk need not be read.

    Raises:
        CheckpointCorrupt: the original is damaged.
        StorageError: the copy is damaged, or the storage failed.
    """
    if damage := _damage(destination, manifest, skips):
        if at_origin := _damage(origin, original, lambda chunk: False):
            raise CheckpointCorrupt(f"it is damaged: {at_origin}")
        raise StorageError(f"{destination}: reading back gives something else: {damage}")


def _damage(location: Location, manifest: bytes, skips: Callable[[ChunkId], bool]) -> str:
    """The damage of the data at a location that a manifest references; empty if none."""
    draft = Database(location, paths.context(), manifest)
    try:
        opened = partial(ocdbt_reader.open_pinned, draft)
        report = verify_opened(location.url, opened, background=True, skips=skips)
    except CheckpointNotFound as error:
        return str(error)
    return "; ".join(map(str, report.damage[:3]))
