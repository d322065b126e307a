"""verify(): reads every byte of a checkpoint and checks it against the digests and the format."""

from __future__ import annotations

import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from unickpt.arrays import dtypes
from unickpt.errors import CheckpointCorrupt, StorageError
from unickpt.format import chunk_grid, zarr_metadata
from unickpt.format.index import DIGESTS_KEY, INDEX_KEY
from unickpt.reading import checkpoint
from unickpt.reading.checkpoint import Checkpoint
from unickpt.reading.chunk_reader import TASK_CHUNKS, Reader, Task
from unickpt.reading.read_plan import ChunkRead
from unickpt.storage import locations
from unickpt.trees import tree


@dataclass(frozen=True)
class Damage:
    """One problem that `verify` found.

    Arguments:
        array: name of the array; empty if the damage is not in an array.
        box: the bad chunk's box in the global array, as text; empty if it is not in a chunk.
        process: index of the process that wrote it; None if it is not in a chunk.
        reason: what is wrong.
    """

    array: str
    box: str
    process: int | None
    reason: str

    def __str__(self) -> str:
        place = f"{self.array!r} {self.box} written by process {self.process}: "
        return (place if self.process is not None else "") + self.reason


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify`; `ok` is True if it found no damage."""

    url: str
    arrays: int
    chunks: int
    bytes: int
    seconds: float
    damage: tuple[Damage, ...] = ()

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
# Zarr metadata of one array has a few hundred bytes; many hostile keys may share one large value.
_MOST_METADATA = 1 << 20
_REFUSED = object()


def verify(
    path: locations.Path, *, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads a whole checkpoint and checks it.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        progress: called with the bytes checked so far and in total.

    If a save replaces the checkpoint during the call, it starts again with the new one.

    Returns:
        A report whose `damage` names the array, box and writing process of each bad chunk, and
        everything else that is missing, damaged or does not belong to the checkpoint.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be read.
        UnsupportedFormat: it was written by a newer unickpt.
        StorageError: the network or the server failed; the data may be sound.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/verify", {"w": np.arange(3)})
        >>> unickpt.verify("memory://run/verify").ok
        True
    """
    url = locations.resolve(path).url
    return checkpoint.again(lambda: verify_opened(url, lambda: checkpoint.open(path), progress))


def verify_opened(
    url: str,
    opened: Callable[[], Checkpoint],
    progress: Callable[[int, int], None] | None = None,
    *,
    behind: bool = False,
) -> VerifyReport:
    """As `verify`, for a checkpoint that may not be committed at its path yet.

    Arguments:
        url: its name in the report.
        opened: opens it.
        progress: as for `verify`.
        behind: whether it runs in the background of a training loop; see `workers.step_back`.
    """
    started = time.perf_counter()
    report = progress or (lambda done, total: None)
    damage: list[Damage] = []
    counted = [0, 0]
    arrays = 0
    try:
        stored = opened()
        arrays = len(stored.index.arrays)
        total = stored.nbytes
        stored.read_digests()  # on its own, the index may claim any number of chunks
        checker = _Checker(stored, "unickpt-verify", behind=behind)
        try:
            damage += _structure(stored, checker)
            for nbytes, found in _chunks(stored, checker):
                counted[0] += 1
                counted[1] += nbytes
                damage += found
                report(counted[1], total)
        finally:
            checker.close()
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
    )


def _structure(stored: Checkpoint, checker: _Checker) -> Iterator[Damage]:
    """Checks everything but chunks: the tree, keys, zarr metadata, per-process values."""
    index = stored.index
    try:
        names = {leaf.name for leaf in tree.leaves(tree.from_json(index.tree))}
    except tree.BadTree as error:
        yield Damage("", "", None, f"the tree in the index is invalid: {error}")
        return
    known = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    for name in sorted(names ^ known):
        yield Damage(name, "", None, "is in the tree or in the index, but not in both")
    expected = zarr_metadata.zarr_keys(index)
    for different in checker.map(partial(_different, stored), _batches(expected.items())):
        for key in different:
            yield Damage("", "", None, f"{key!r} differs from what the index describes")
    for name in index.per_process:
        try:
            stored.per_process(name)
        except CheckpointCorrupt as error:
            yield Damage(name, "", None, str(error))
    blobs = sum(len(entry.blobs) for entry in index.per_process.values())
    told = len(expected) + index.chunks + blobs + len((INDEX_KEY, DIGESTS_KEY))
    found = stored.count_keys()
    if found != told:
        # Counted, not listed: a few hostile nodes that share children can make any number of keys.
        reason = f"the database has {found} keys, but the index implies {told}"
        yield Damage("", "", None, reason)


def _batches(expected: Iterable[tuple[str, bytes]]) -> list[list[tuple[str, bytes]]]:
    """Keys in batches that are large enough for a thread each."""
    items = iter(expected)
    return list(iter(lambda: list(itertools.islice(items, TASK_CHUNKS)), []))


def _different(stored: Checkpoint, expected: Sequence[tuple[str, bytes]]) -> list[str]:
    """The keys whose stored value differs from the expected one."""
    requests = [_request_small(stored, key) for key, _ in expected]
    return [
        key
        for (key, value), requested in zip(expected, requests, strict=True)
        if requested is _REFUSED or not _is_stored(stored, key, value, requested)
    ]


def _request_small(stored: Checkpoint, key: str) -> Any:
    """Requests a key of zarr metadata, unless its value is too large to be that."""
    try:
        is_small = (stored.key_length(key) or 0) <= _MOST_METADATA
        return stored.request_key(key) if is_small else _REFUSED
    except CheckpointCorrupt:
        return _REFUSED


def _is_stored(stored: Checkpoint, key: str, value: bytes, requested: Any) -> bool:
    try:
        found = stored.read_key(key, requested=requested)
    except CheckpointCorrupt:
        return False
    try:
        return found == value or bool(json.loads(found) == json.loads(value))
    except (ValueError, RecursionError):  # not valid JSON
        return False


Checked = tuple[int, list[Damage]]
"""The bytes of a chunk, and its damage if any."""


class _Checker(Reader):
    """Reads chunks as loading does, and returns the damage of each."""

    def map(self, function: Callable[[T], U], items: Sequence[T]) -> Iterator[U]:
        """Calls a function with each item, on the threads."""
        return self._pool.map(function, items)

    def _run(self, reads: list[ChunkRead]) -> list[Checked]:
        requests = [self._stored.request_chunk(r.entry, r.part, r.number) for r in reads]
        return [self._check(*item) for item in zip(reads, requests, strict=True)]

    def _check(self, read: ChunkRead, requested: Any) -> Checked:
        stored, dtype = self._stored, dtypes.from_name(read.entry.dtype)
        nbytes = read.box.size * dtype.itemsize
        try:
            chunk = self._scratch.array(read.box.shape, dtype)
            if stored.read_chunk(read.entry, read.part, read.number, read.row, chunk, requested):
                return nbytes, []
            reason = "the stored bytes do not match their digest"
        except (CheckpointCorrupt, StorageError, MemoryError) as error:
            if isinstance(error, StorageError) and stored.location.is_remote:
                raise  # the network failed; the data may be sound
            reason = str(error)
        process = int(read.row["process"])
        return nbytes, [Damage(read.entry.name, str(read.box), process, reason)]


def _chunks(stored: Checkpoint, checker: _Checker) -> Iterator[Checked]:
    """Checks each chunk, in order; some tasks run ahead."""
    running: deque[Task] = deque()
    for read in _reads(stored):
        task = checker.submit(read)
        if not running or running[-1] is not task:
            running.append(task)
        if len(running) > _TASKS_AHEAD:
            yield from checker.wait(running.popleft())
    for task in running:
        yield from checker.wait(task)


def _reads(stored: Checkpoint) -> Iterator[ChunkRead]:
    """All chunks of a checkpoint."""
    for entry in stored.index.arrays.values():
        table = stored.digests_of(entry.name)
        for first, part in chunk_grid.numbered_parts(entry):
            for number in range(part.count):
                box = part.chunk_box(number)
                yield ChunkRead(entry, part, number, box, table[first + number], ())
