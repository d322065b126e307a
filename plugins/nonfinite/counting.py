"""find_nonfinite(): counts NaN and infinity in a checkpoint, or finds the first step with any."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np

from unickpt import Checkpoint, CheckpointNotFound, LoadOptions
from unickpt.extend import (
    Array,
    ArrayEntry,
    Box,
    HostBuffers,
    Progress,
    Reader,
    Source,
    StoredView,
    checkpoints_below,
    cut_box,
    dtype_from_name,
    dtype_kind,
    in_batches,
    numbered_parts,
    opened_checkpoint,
    read_boxes,
    reading_again,
    reporting,
)

_BATCH_BYTES = 64 << 20  # of elements that are read together


class NonfiniteArray(NamedTuple):
    """An array with elements that are not finite.

    Arguments:
        name: of the array.
        nan, infinite: how many elements are NaN, and positive or negative infinity.
        elements: how many there are.
        first: the index of the first one of these in the order of reading.
    """

    name: str
    nan: int
    infinite: int
    elements: int
    first: tuple[int, ...]


@dataclass(frozen=True)
class NonfiniteReport:
    """The result of `find_nonfinite`; `ok` is True if all elements are finite.

    Arguments:
        url: the checkpoint; of several, the first with such elements, else the last one.
        arrays: the arrays with such elements.
        checked: how many arrays of floating-point or complex numbers were read.
        checkpoints: how many checkpoints were read.
    """

    url: str
    arrays: tuple[NonfiniteArray, ...]
    checked: int
    checkpoints: int = 1

    @property
    def ok(self) -> bool:
        return not self.arrays


def find_nonfinite(path: Source, *, progress: Progress = None) -> NonfiniteReport:
    """Counts NaN and infinity in all arrays of a checkpoint, or finds the first step with any.

    Each stored chunk is read once, and its digest is compared. Memory is bounded (about 128 MiB).

    Arguments:
        path: a checkpoint: a local path, a URL, or a result of `unickpt.open`. Or a folder of
            checkpoints, such as a run, which are read in the order of their steps until one has
            elements that are not finite.
        progress: True for a bar, or a function of the bytes read so far and in total.

    Returns:
        Which arrays have how many, and the index of the first.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointCorrupt: stored bytes do not match their digest.
        UnickptError: as `open` and `load`.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/nan", {"w": np.array([1.0, np.nan, np.inf])})
        >>> unickpt.find_nonfinite("memory://run/nan").arrays
        (NonfiniteArray(name='w', nan=1, infinite=1, elements=3, first=(1,)),)
    """
    with reporting(progress, "reading") as notify:
        try:
            return reading_again(lambda: _report(path, notify), path)
        except CheckpointNotFound:
            steps = [] if isinstance(path, Checkpoint) else checkpoints_below(path)
            if not steps:
                raise
        for count, step in enumerate(steps, 1):
            report = replace(reading_again(partial(_report, step.path, notify)), checkpoints=count)
            if not report.ok:
                break
        return report


def _report(path: Source, notify: Callable[[int, int], None]) -> NonfiniteReport:
    opened = opened_checkpoint(path)
    stored = opened.reader
    entries = [entry for entry in stored.index.arrays.values() if _has_nonfinite(entry)]
    total, done = sum(entry.nbytes for entry in entries), 0
    counts = {entry.name: np.zeros(2, np.int64) for entry in entries}
    first: dict[str, tuple[int, ...]] = {}
    for entry, box, data in _pieces(stored, entries):
        bad = ~np.isfinite(data)
        if bad.any():
            counts[entry.name] += int(np.isnan(data).sum()), int(np.isinf(data).sum())
            place = np.unravel_index(int(bad.argmax()), bad.shape)
            index = (int(a + b) for a, b in zip(box.start, place, strict=True))
            first.setdefault(entry.name, tuple(index))
        done += data.nbytes
        notify(done, total)
    arrays = []
    for entry in entries:
        if entry.name in first:
            nan, infinite = map(int, counts[entry.name])
            elements = math.prod(entry.shape)
            arrays.append(NonfiniteArray(entry.name, nan, infinite, elements, first[entry.name]))
    return NonfiniteReport(opened.url, tuple(arrays), len(entries))


def _has_nonfinite(entry: ArrayEntry) -> bool:
    """Whether the dtype of an array has NaN or infinity."""
    dtype = dtype_from_name(entry.dtype)
    return dtype.kind == "c" or dtype_kind(dtype) == "float"


def _pieces(stored: Reader, entries: list[ArrayEntry]) -> Iterator[tuple[ArrayEntry, Box, Array]]:
    """All elements of some arrays, in pieces of chunks; the memory of each is used again."""
    view, buffers = StoredView(stored), HostBuffers(_BATCH_BYTES)

    def nbytes(piece: tuple[ArrayEntry, Box]) -> int:
        return piece[1].size * piece[0].itemsize

    for batch in in_batches(_boxes(entries), None, _BATCH_BYTES, nbytes):
        read = read_boxes(view, batch, LoadOptions(verify=True), buffers)
        for (entry, box), (data, memory) in zip(batch, read, strict=True):
            yield entry, box, data
            buffers.give(memory)


def _boxes(entries: list[ArrayEntry]) -> Iterator[tuple[ArrayEntry, Box]]:
    for entry in entries:
        most = _BATCH_BYTES // entry.itemsize
        for _, part in numbered_parts(entry):
            for number in range(part.count):
                for box in cut_box(part.chunk_box(number), most):
                    yield entry, box
