"""Loads only what changed since an earlier checkpoint: `load(since=)`.

Chunks with equal digests in both checkpoints are hashed where `like` holds them, and not read. That
the caller says so is no proof: the program may have changed `like`, an optimizer without state gets
new memory, and a load that failed may have filled a part. So a chunk with another digest is read
after all, and so is one that cannot be hashed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from unickpt import LoadOptions
from unickpt.errors import StorageError, UnickptError
from unickpt.extend import (
    Array,
    ArrayEntry,
    ArraySource,
    ArrayTarget,
    Box,
    Column,
    Job,
    LoadCounts,
    Pool,
    ReadArrays,
    Reader,
    Source,
    UnreadPolicy,
    adapter_of,
    adapters,
    chunk_digest,
    current_group,
    dtype_from_name,
    in_batches,
    numbered_parts,
    opened_checkpoint,
)
from unickpt.types import LocalFragments

_BATCH_BYTES = 32 << 20
"""A thread hashes about so many bytes at once."""


class UnreadChunks(UnreadPolicy):
    """Has one call of `load` read only what changed.

    Arguments:
        since, under, options: of the call.

    Raises:
        StorageError: `since` cannot be read.
    """

    def __init__(self, since: Source, under: str, options: LoadOptions) -> None:
        self._group = options.group or current_group(adapters())
        try:
            self._earlier = opened_checkpoint(since, under).reader
        except UnickptError as error:
            raise _unreadable(since, error) from error

    def reading(
        self,
        read: ReadArrays,
        leaves: Mapping[str, Any],
        targets: Mapping[str, ArrayTarget],
        counts: LoadCounts,
    ) -> ReadArrays:
        """See `UnreadPolicy`."""

        def read_changed(stored: Reader, jobs: Sequence[Job]) -> dict[str, Any]:
            left, compared = list[Job](), list[_ComparedArray]()
            for job in jobs:
                array = self._compare(stored, job, leaves, targets)
                if array is None:
                    left.append(job)
                else:
                    compared.append(array)
            _hash(compared)
            done = dict[str, Any]()
            for array in compared:
                changed_job = array.changed_job()
                if changed_job is None:
                    done[array.name] = array.leaf
                else:
                    left.append(changed_job)
                read_bytes = 0 if changed_job is None else changed_job.nbytes
                counts.unchanged_bytes += array.job.nbytes - read_bytes
            return {**done, **(read(stored, left) if left else {})}

        return read_changed

    def _compare(
        self,
        stored: Reader,
        job: Job,
        leaves: Mapping[str, Any],
        targets: Mapping[str, ArrayTarget],
    ) -> _ComparedArray | None:
        """Compares the digests of an array in both checkpoints; None if it is read whole."""
        entry = _only_array(job)
        if entry is None:
            return None
        ((name, target),) = job.targets.items()
        # Targets that overlap are read into new memory, in place of their own.
        if target.abstract or targets.get(name) is not target:
            return None
        if entry.codec is not None or dtype_from_name(entry.dtype) != target.dtype:
            return None  # the digests are of other bytes
        equal = self._equal_chunks(stored, entry)
        source = None if equal is None else self._source(leaves[name])
        if equal is None or source is None:
            return None
        array = _ComparedArray(job, name, leaves[name], target, source)
        digests = stored.digests_of(entry.name)
        assert digests is not None, "they were compared"
        for first, part in numbered_parts(entry):
            for position, box in enumerate(target.boxes):
                for number in part.chunks_in(box):
                    chunk = part.chunk_box(number)
                    common = chunk.intersect(box)
                    if common == chunk and equal[first + number]:
                        digest = int(digests[first + number]["digest"])
                        array.unsure.append(HeldChunk(array, position, chunk, digest))
                    elif common is not None:  # the digest of a part of a chunk is unknown
                        array.changed.append((position, common))
        # If it is read whole, nothing of it need be hashed.
        return array if array.is_filled or not array.changed else None

    def _equal_chunks(self, stored: Reader, entry: ArrayEntry) -> Column | None:
        """Which chunks of an array are equal in both checkpoints; None if that is unknown."""
        earlier = self._earlier.index.arrays.get(entry.name)
        if earlier is None or _grid(earlier) != _grid(entry):
            return None
        try:
            before = self._earlier.digests_of(entry.name)
        except UnickptError as error:
            raise _unreadable(self._earlier.location, error) from error
        now = stored.digests_of(entry.name)
        if before is None or now is None:
            return None
        equal: Column = before["digest"] == now["digest"]
        return equal

    def _source(self, leaf: Any) -> ArraySource | None:
        """Reads the elements of a leaf; None if that is impossible."""
        try:
            if isinstance(leaf, LocalFragments):
                return leaf.source(self._group)
            adapter = adapter_of(leaf, adapters())
            return None if adapter is None else adapter.source(leaf, self._group)
        except (TypeError, ValueError):  # such as a DTensor of other ranks
            return None


class HeldChunk(NamedTuple):
    """A chunk that `like` probably holds.

    Arguments:
        array: its array.
        position: of the target's box that contains it.
        box: of the chunk.
        digest: of its stored elements.
    """

    array: _ComparedArray
    position: int
    box: Box
    digest: int

    @property
    def nbytes(self) -> int:
        return self.box.size * self.array.target.dtype.itemsize

    def is_held(self) -> bool:
        """Whether `like` holds its stored elements."""
        data = self.array.read(self.box)
        return data is not None and chunk_digest(data) == self.digest


@dataclass(eq=False)
class _ComparedArray:
    """An array of a load of which some chunks need not be read.

    Arguments:
        job: to read all of it.
        name, leaf, target: of `like`.
        source: the leaf, to be read.
    """

    job: Job
    name: str
    leaf: Any
    target: ArrayTarget
    source: ArraySource
    changed: list[tuple[int, Box]] = field(default_factory=list)
    """The boxes to read, with the positions of the target's boxes that contain them."""
    unsure: list[HeldChunk] = field(default_factory=list)

    @property
    def is_filled(self) -> bool:
        """Whether host memory is filled in place, so that a part of it can be."""
        on_device = any(fragment.memory.on_device for fragment in self.source.fragments)
        return self.target.span is not None and not on_device

    def read(self, box: Box) -> Array | None:
        """The elements of `like` in a box that one fragment contains; None if there is none."""
        for fragment in self.source.fragments:
            if fragment.box.contains(box):
                make_buffer = partial(np.empty, box.shape, self.source.dtype)
                return np.ascontiguousarray(fragment.read(box, make_buffer), self.target.dtype)
        return None

    def changed_job(self) -> Job | None:
        """Reads what changed, or all if only a whole array can be placed; None if nothing did."""
        if not self.changed:
            return None
        changed = sum(box.size for _, box in self.changed)
        if not self.is_filled or changed * self.target.dtype.itemsize == self.job.nbytes:
            return self.job
        target = ChangedBoxes(self.target, self.changed)
        return Job({self.name: target}, self.job.recipes) if target.is_in_place else self.job


class ChangedBoxes:
    """Some boxes of a target, as a target; the memory in between stays as it is.

    Arguments:
        target: the target.
        boxes: with the positions of the target's boxes that contain them.
    """

    abstract = False
    device_memory = None

    def __init__(self, target: ArrayTarget, boxes: Sequence[tuple[int, Box]]) -> None:
        self._target, self._places = target, boxes
        self.shape, self.dtype, self.prng = target.shape, target.dtype, target.prng
        self.processes, self.identity, self.layout = target.processes, target.identity, None
        self.span, self.regions = target.span, target.regions
        self.boxes: Sequence[Box] = [box for _, box in boxes]
        self._buffers = [target.buffer(position) for position in range(len(target.boxes))]

    @property
    def is_in_place(self) -> bool:
        """Whether its buffers are the memory of the leaf itself."""
        span = self.span
        return span is not None and all(
            span[0] <= buffer.__array_interface__["data"][0] < span[1]
            for buffer in self._buffers
            if buffer.size
        )

    def buffer(self, position: int) -> Array:
        whole, box = self._places[position]
        start = self._target.boxes[whole].start
        view: Array = self._buffers[whole][box.relative_to(start).slices]
        return view

    def finish(self, buffers: Sequence[Array]) -> Any:
        return self._target.finish(self._buffers)


def _hash(arrays: Sequence[_ComparedArray]) -> None:
    """Hashes the chunks that `like` probably holds; those that it does not hold have changed."""
    unsure = [chunk for array in arrays for chunk in array.unsure]
    threads = max(1, min(4, os.cpu_count() or 1))
    size: Callable[[HeldChunk], int] = lambda chunk: chunk.nbytes  # noqa: E731
    batches = list(in_batches(unsure, None, _BATCH_BYTES, size))
    with Pool(min(threads, len(batches)) - 1, "unickpt hash") as pool:
        pending = [pool.submit(_held_by, batch) for batch in batches[1:]]
        results = [_held_by(batch) for batch in batches[:1]]
        results += [ended.result() for ended in pending]
    for batch, verdicts in zip(batches, results, strict=True):
        for chunk, is_held in zip(batch, verdicts, strict=True):
            if not is_held:
                chunk.array.changed.append((chunk.position, chunk.box))


def _held_by(chunks: Sequence[HeldChunk]) -> list[bool]:
    return [chunk.is_held() for chunk in chunks]


def _only_array(job: Job) -> ArrayEntry | None:
    """The stored array that a job reads unchanged into its only target; None if there is none."""
    if len(job.targets) != 1:
        return None
    if job.entry is not None:
        return job.entry
    (recipe,) = job.recipes.values()
    if len(recipe.sources) != 1 or recipe.fills or recipe.function is not None:
        return None
    (source,) = recipe.sources
    return source.entry if source.is_identity else None


def _grid(entry: ArrayEntry) -> object:
    """The facts on which the meaning of an array's digests depends."""
    layout = entry.layout if entry.cut else None
    return entry.shape, entry.dtype, entry.codec, entry.chunk, entry.cut, layout, entry.boxes


def _unreadable(since: object, error: UnickptError) -> StorageError:
    return StorageError(
        f"since={str(since)!r} cannot be read, so that it is unknown what changed: {error}. "
        "Load without since="
    )
