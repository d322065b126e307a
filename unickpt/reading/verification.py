"""verify(): reads every byte of a checkpoint and checks it against the digests and the format."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from unickpt.errors import CheckpointCorrupt, StorageError, naming_memory
from unickpt.format import chunk_grid
from unickpt.format.reader_protocol import ChunkId, Reader, Request
from unickpt.progress import Progress, ProgressFunction, nothing, reporting
from unickpt.quoting import first_few, quoted
from unickpt.reading import checkpoint
from unickpt.reading.chunk_reader import ChunkReader, Task
from unickpt.reading.read_plan import ChunkRead
from unickpt.storage import paths


@dataclass(frozen=True)
class Damage:
    """One problem that `verify` found.

    Arguments:
        array: name of the array; empty if the damage is not in an array.
        box: the bad chunk's box in the global array, as text; empty if it is not in a chunk.
        process: index of the process that wrote it; None if it is not in a chunk, or if the format
            does not say.
        reason: what is wrong.
    """

    array: str
    box: str
    process: int | None
    reason: str

    def __str__(self) -> str:
        if not self.box:
            return self.reason
        writer = "" if self.process is None else f" written by process {self.process}"
        return f"{self.array!r} {self.box}{writer}: {self.reason}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`; `ok` is True if it found no damage.

    Arguments:
        url: the checkpoint.
        arrays, chunks, bytes: how many were read.
        seconds: how long it took.
        damage: the problems that were found.
        unverified: why bytes that changed would not be noticed, and of which arrays; empty if all
            have digests, or checksums of the format's own.
    """

    url: str
    arrays: int
    chunks: int
    bytes: int
    seconds: float
    damage: tuple[Damage, ...] = ()
    unverified: str = ""

    @property
    def ok(self) -> bool:
        return not self.damage

    @property
    def gb_per_s(self) -> float:
        """Logical gigabytes (1e9 bytes) checked per second."""
        return self.bytes / 1e9 / max(self.seconds, 1e-9)


T = TypeVar("T")
U = TypeVar("U")

_TASKS_AHEAD = 64
_MOST_NAMES = 10


def verify(path: checkpoint.Source, *, progress: Progress = None) -> VerifyReport:
    """Reads a whole checkpoint and checks it.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs), or what `unickpt.open` returned.
        progress: True for a bar, or a function of the bytes checked so far and in total.

    If a save replaces the checkpoint during the call, it starts again with the new one.

    Returns:
        A report whose `damage` names the array, box and writing process of each bad chunk, and
        everything else that is missing, damaged or does not belong to the checkpoint.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be read.
        UnsupportedFormat: it needs what this unickpt does not know.
        StorageError: the storage failed, or this process may not read it, or has too many files
            open; the data may be sound.
        MemoryError: there is too little memory; likewise.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/verify", {"w": np.arange(3)})
        >>> unickpt.verify("memory://run/verify").ok
        True
    """
    url = (
        path.url
        if isinstance(path, checkpoint.Checkpoint)
        else paths.resolve(path, or_file=True).url
    )
    with naming_memory(f"verifying {url}"), reporting(progress, "verifying") as report_progress:
        return checkpoint.again(
            lambda: verify_opened(
                url, lambda: checkpoint.opened(path, once=True).reader, report_progress
            ),
            path,
        )


def verify_opened(
    url: str,
    opened: Callable[[], Reader],
    report_progress: ProgressFunction = nothing,
    *,
    background: bool = False,
    skips: Callable[[ChunkId], bool] = lambda chunk: False,
) -> VerifyReport:
    """As `verify`, for a checkpoint that may not be committed at its path yet.

    Arguments:
        url: its name in the report.
        opened: opens it.
        report_progress: called with the bytes checked so far and in total.
        background: whether it runs in the background of a training loop; see `threads.step_back`.
        skips: whether a chunk is not read.
    """
    started = time.perf_counter()
    damage: list[Damage] = []
    counted = [0, 0]
    arrays, unverified = 0, ""
    try:
        stored = opened().checking()
        arrays = len(stored.index.arrays)
        stored.check_total(stored.index.arrays.values())
        total = sum(entry.nbytes for entry in stored.index.arrays.values())
        checker = _Checker(stored, "unickpt-verify", background=background)
        try:
            for name, reason in stored.check_structure(checker.map):
                damage.append(Damage(name, "", None, reason))
            for nbytes, chunk_damage in _chunks(_reads(stored, skips), checker):
                counted[0] += 1
                counted[1] += nbytes
                damage += chunk_damage
                report_progress(counted[1], total)
            damage += [Damage(name, "", None, reason) for name, reason in stored.check_rest()]
            damage += [Damage("", "", None, reason) for reason in stored.file_damage()]
        finally:
            checker.close()
        unverified = _unverified(stored)
        if damage:  # checked last: a replaced checkpoint is not damaged
            stored.check_unchanged()
    except CheckpointCorrupt as error:
        damage.append(Damage("", "", None, str(error)))
    return VerifyReport(
        url=url,
        arrays=arrays,
        chunks=counted[0],
        bytes=counted[1],
        seconds=time.perf_counter() - started,
        damage=tuple(damage),
        unverified=unverified,
    )


def _unverified(stored: Reader) -> str:
    """See `VerifyReport`."""
    names, count = stored.unchecked(), len(stored.index.arrays)
    if not names:
        return ""
    if len(names) == count:
        which, read = f"the format {stored.format!r} stores no digests", "everything"
    else:
        shown = first_few([quoted(name) for name in names], _MOST_NAMES)
        which, read = f"{len(names)} of {count} arrays have no checksum ({shown})", "they"
    return (
        f"{which}: {read} could be read, but bytes that changed since it was written would not be "
        "noticed"
    )


Checked = tuple[int, list[Damage]]
"""The bytes of a chunk, and its damage if any."""


class _Checker(ChunkReader):
    """Reads chunks as loading does, and returns the damage of each."""

    def map(self, function: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
        """Calls a function with each item, on the threads."""
        return self._pool.map(function, items)

    def _run(self, reads: list[ChunkRead]) -> list[Checked]:
        # A format that compares checksums of its own does so once, when all of one is read.
        if all(read.row is not None for read in reads):
            with suppress(CheckpointCorrupt, StorageError):  # then each is read by itself
                differ = set(self._stored.read(self._requests(reads)))
                return [
                    (read.nbytes, [_damage(read, _DIFFERS)] if index in differ else [])
                    for index, read in enumerate(reads)
                ]
        return [self._check(read) for read in reads]

    def _requests(self, reads: Sequence[ChunkRead]) -> list[Request]:
        return [
            read.request(buffer) for read, buffer in zip(reads, self._memory(reads), strict=True)
        ]

    def _check(self, read: ChunkRead) -> Checked:
        """Checks one chunk by itself, where a batch cannot be read as a whole."""
        try:
            reason = _DIFFERS if self._stored.read(self._requests([read])) else ""
        except (CheckpointCorrupt, StorageError) as error:
            remote = self._stored.location.is_remote
            if isinstance(error, StorageError) and (remote or _is_lack(error)):
                raise  # the data may be sound
            reason = str(error)
        return read.nbytes, [_damage(read, reason)] if reason else []


_DIFFERS = "the stored bytes do not match their digest"


def _damage(read: ChunkRead, reason: str) -> Damage:
    process = None if read.row is None else int(read.row["process"])
    return Damage(read.entry.name, str(read.box), process, reason)


def _is_lack(error: BaseException | None) -> bool:
    """Whether this process lacks descriptors or memory, or may not read: no fault of the data."""
    while error is not None:
        if getattr(error, "errno", None) in _LACKS or "RESOURCE_EXHAUSTED" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False


_LACKS = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE}


def _chunks(reads: Iterator[ChunkRead], checker: _Checker) -> Iterator[Checked]:
    """Checks each chunk, in order; some tasks run ahead."""
    running: deque[Task] = deque()
    for read in reads:
        (task,) = checker.submit(read)
        if not running or running[-1] is not task:
            running.append(task)
        if len(running) > _TASKS_AHEAD:
            yield from checker.wait(running.popleft())
    for task in running:
        yield from checker.wait(task)


def _reads(stored: Reader, skips: Callable[[ChunkId], bool]) -> Iterator[ChunkRead]:
    """All chunks of a checkpoint, but those that are skipped."""
    for entry in stored.index.arrays.values():
        table = stored.digests_of(entry.name)
        for first, part in chunk_grid.numbered_parts(entry):
            for number in range(part.count):
                if skips((entry, part, number)):
                    continue
                box = part.chunk_box(number)
                row = None if table is None else table[first + number]
                yield ChunkRead(entry, part, number, box, row, ())
