"""verify(): reads every byte of a checkpoint and holds it against the digests and the format."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from unickpt import backends, checkpoint, chunks, commit, plan, tree
from unickpt.blob import blob_key
from unickpt.checkpoint import Checkpoint
from unickpt.errors import CheckpointCorrupt, StorageError, UnsupportedFormat
from unickpt.index import DIGESTS_KEY, INDEX_KEY, ArrayEntry
from unickpt.options import Damage, VerifyReport
from unickpt.plan import Part


def verify(
    path: backends.Path, *, progress: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Reads a whole checkpoint and checks it.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        progress: called with bytes checked so far and bytes in all.

    Returns:
        A report whose `damage` names array, box and writing process of each bad chunk, and
        anything else that is missing, damaged or does not belong there.

    Raises:
        CheckpointNotFound: no committed checkpoint is there.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/verify", {"w": np.arange(3)})
        >>> unickpt.verify("memory://run/verify").ok
        True
    """
    started = time.perf_counter()
    damage: list[Damage] = []
    counted = [0, 0]
    arrays = 0
    try:
        stored = checkpoint.open(path)
        arrays = len(stored.index.arrays)
        damage += _structure(stored)
        _chunks(stored, damage, counted, progress or (lambda done, total: None))
    except (CheckpointCorrupt, UnsupportedFormat) as error:
        damage.append(Damage("", "", None, str(error)))
    return VerifyReport(
        url=backends.resolve(path).url,
        arrays=arrays,
        chunks=counted[0],
        bytes=counted[1],
        seconds=time.perf_counter() - started,
        damage=tuple(damage),
    )


def _structure(stored: Checkpoint) -> Iterator[Damage]:
    """All that is no chunk: the tree, the keys, the zarr metadata, the per-process values."""
    index = stored.index
    try:
        names = {leaf.name for leaf in tree.leaves(tree.from_json(index.tree))}
    except ValueError as error:
        yield Damage("", "", None, f"the index holds a bad tree: {error}")
        return
    known = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    for name in sorted(names ^ known):
        yield Damage(name, "", None, "is in the tree or in the index, but not in both")
    expected = commit.root_keys(index, np.empty(0, np.uint8))
    for key, value in expected.items():
        if key in (DIGESTS_KEY, INDEX_KEY):
            continue  # read and checked by every reader
        try:
            same = json.loads(stored.read_key(key)) == json.loads(value)
        except (ValueError, RecursionError):
            same = False
        if not same:
            yield Damage("", "", None, f"{key!r} is not what the index says")
    allowed = set(expected)
    for name in index.per_process:
        try:
            stored.per_process(name)
        except CheckpointCorrupt as error:
            yield Damage(name, "", None, str(error))
        allowed |= {blob_key(name, p) for p in range(len(index.per_process[name].blobs))}
    present = stored.keys_stored()
    for entry in index.arrays.values():
        for part in plan.parts(entry):
            prefix = f"{part.key}/" if part.key else ""
            allowed |= {prefix + part.chunk_key(n) for n in range(part.count)}
    for key in sorted(present - allowed)[:20]:
        yield Damage("", "", None, f"key {key!r} does not belong to the checkpoint")


def _chunks(
    stored: Checkpoint,
    damage: list[Damage],
    counted: list[int],
    progress: Callable[[int, int], None],
) -> None:
    total = stored.nbytes

    def check(item: tuple[ArrayEntry, Part, int, Any]) -> tuple[int, Damage | None]:
        entry, part, number, row = item
        box = part.chunk_box(number)
        piece = np.empty(box.shape, stored[entry.name].dtype)
        try:
            stored.read_chunk(entry, part, number, None, piece)
        except (CheckpointCorrupt, StorageError) as error:
            return piece.nbytes, Damage(entry.name, str(box), int(row["process"]), str(error))
        if chunks.digest(piece) != row["digest"]:
            reason = "the stored bytes do not match their digest"
            return piece.nbytes, Damage(entry.name, str(box), int(row["process"]), reason)
        return piece.nbytes, None

    with ThreadPoolExecutor(max(4, 2 * (os.cpu_count() or 1))) as pool:
        for entry in stored.index.arrays.values():
            for nbytes, found in pool.map(check, _items(stored, entry)):
                counted[0] += 1
                counted[1] += nbytes
                if found is not None:
                    damage.append(found)
                progress(counted[1], total)


def _items(stored: Checkpoint, entry: ArrayEntry) -> Iterator[tuple[ArrayEntry, Part, int, Any]]:
    table, first = stored.digests_of(entry.name), 0
    for part in plan.parts(entry):
        for number in range(part.count):
            yield entry, part, number, table[first + number]
        first += part.count
