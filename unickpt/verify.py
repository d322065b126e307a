"""verify(): reads every byte of a checkpoint and holds it against the digests and the format."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from unickpt import backends, checkpoint, dtypes, plan, root, tree
from unickpt.box import Box
from unickpt.checkpoint import Checkpoint
from unickpt.errors import CheckpointCorrupt, StorageError
from unickpt.index import DIGESTS_KEY, INDEX_KEY, ArrayEntry
from unickpt.options import Damage, VerifyReport
from unickpt.plan import Part
from unickpt.read import TASK_BYTES, TASK_CHUNKS, threads_for
from unickpt.stage import Scratch

_TASKS_AHEAD = 64


def verify(
    path: backends.Path, *, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads a whole checkpoint and checks it.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        progress: called with bytes checked so far and bytes in all.

    Where a save replaces the checkpoint meanwhile, it starts again with the new one.

    Returns:
        A report whose `damage` names array, box and writing process of each bad chunk, and
        anything else that is missing, damaged or does not belong there.

    Raises:
        CheckpointNotFound: no committed checkpoint is there.
        CheckpointReplaced: saves replaced it again and again, faster than it could be read.
        UnsupportedFormat: it was written by a newer unickpt.
        StorageError: the network or the server failed, which says nothing of the data.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/verify", {"w": np.arange(3)})
        >>> unickpt.verify("memory://run/verify").ok
        True
    """
    return checkpoint.again(lambda: _verify(path, progress))


def _verify(path: backends.Path, progress: Callable[[int, int], None] | None) -> VerifyReport:
    started = time.perf_counter()
    report = progress or (lambda done, total: None)
    damage: list[Damage] = []
    counted = [0, 0]
    arrays = 0
    try:
        stored = checkpoint.open(path)
        arrays = len(stored.index.arrays)
        total = stored.nbytes
        stored.read_digests()  # the index alone may claim any number of chunks
        with threads_for(stored, "unickpt-verify") as pool:
            damage += _structure(stored, pool)
            for nbytes, found in _chunks(stored, pool):
                counted[0] += 1
                counted[1] += nbytes
                damage += found
                report(counted[1], total)
        if damage:  # looked at afterwards: what was replaced is not damaged
            stored.check_unchanged()
    except CheckpointCorrupt as error:
        damage.append(Damage("", "", None, str(error)))
    return VerifyReport(
        url=backends.resolve(path).url,
        arrays=arrays,
        chunks=counted[0],
        bytes=counted[1],
        seconds=time.perf_counter() - started,
        damage=tuple(damage),
    )


def _structure(stored: Checkpoint, pool: ThreadPoolExecutor) -> Iterator[Damage]:
    """All that is no chunk: the tree, the keys, the zarr metadata, the per-process values."""
    index = stored.index
    try:
        names = {leaf.name for leaf in tree.leaves(tree.from_json(index.tree))}
    except tree.BadTree as error:
        yield Damage("", "", None, f"the index holds a bad tree: {error}")
        return
    known = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    for name in sorted(names ^ known):
        yield Damage(name, "", None, "is in the tree or in the index, but not in both")
    expected = root.zarr_keys(index)
    equal = pool.map(lambda item: _is_stored(stored, *item), expected.items())
    for key, same in zip(expected, equal, strict=True):
        if not same:
            yield Damage("", "", None, f"{key!r} is not what the index says")
    for name in index.per_process:
        try:
            stored.per_process(name)
        except CheckpointCorrupt as error:
            yield Damage(name, "", None, str(error))
    blobs = sum(len(entry.blobs) for entry in index.per_process.values())
    told = len(expected) + index.chunks + blobs + len((INDEX_KEY, DIGESTS_KEY))
    found = stored.count_keys()
    if found != told:
        # Not listed: a few hostile nodes that lead to each other make any number of keys.
        reason = f"the database has {found} keys, and the index tells of {told}"
        yield Damage("", "", None, reason)


def _is_stored(stored: Checkpoint, key: str, value: bytes) -> bool:
    try:
        found = stored.read_key(key)
    except CheckpointCorrupt:
        return False
    try:
        return bool(json.loads(found) == json.loads(value))
    except (ValueError, RecursionError):  # it is no JSON
        return False


@dataclass(frozen=True)
class _Check:
    """One chunk to check: `row` of the digest table says what it holds and who wrote it."""

    entry: ArrayEntry
    part: Part
    number: int
    row: Any

    @property
    def box(self) -> Box:
        return self.part.chunk_box(self.number)

    @property
    def nbytes(self) -> int:
        return self.box.size * dtypes.from_name(self.entry.dtype).itemsize


def _chunks(stored: Checkpoint, pool: ThreadPoolExecutor) -> Iterator[tuple[int, list[Damage]]]:
    """Bytes and damage of each chunk, in order; some tasks ahead are under way."""
    running: deque[Future[list[tuple[int, list[Damage]]]]] = deque()
    scratch = Scratch()
    for task in _tasks(stored):
        running.append(pool.submit(_check, stored, task, scratch))
        if len(running) > _TASKS_AHEAD:
            yield from running.popleft().result()
    for future in running:
        yield from future.result()


def _tasks(stored: Checkpoint) -> Iterator[list[_Check]]:
    """All chunks, in tasks that are worth a thread's while."""
    task: list[_Check] = []
    size = 0
    for entry in stored.index.arrays.values():
        table = stored.digests_of(entry.name)
        for first, part in plan.numbered_parts(entry):
            for number in range(part.count):
                task.append(_Check(entry, part, number, table[first + number]))
                size += task[-1].nbytes
                if size >= TASK_BYTES or len(task) == TASK_CHUNKS:
                    yield task
                    task, size = [], 0
    if task:
        yield task


def _check(
    stored: Checkpoint, task: Sequence[_Check], scratch: Scratch
) -> list[tuple[int, list[Damage]]]:
    requested = [stored.request_chunk(c.entry, c.part, c.number) for c in task]
    return [
        (check.nbytes, _damage(stored, check, request, scratch))
        for check, request in zip(task, requested, strict=True)
    ]


def _damage(stored: Checkpoint, check: _Check, requested: Any, scratch: Scratch) -> list[Damage]:
    try:
        piece = scratch.array(check.box.shape, dtypes.from_name(check.entry.dtype))
        if stored.read_chunk(check.entry, check.part, check.number, check.row, piece, requested):
            return []
        reason = "the stored bytes do not match their digest"
    except (CheckpointCorrupt, StorageError, MemoryError) as error:
        if isinstance(error, StorageError) and stored.location.is_remote:
            raise  # the network's fault, not the data's
        reason = str(error)
    return [Damage(check.entry.name, str(check.box), int(check.row["process"]), reason)]
