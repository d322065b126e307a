"""Which jobs take small arrays just as they are stored, so that many are read together."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import DType
from unickpt.format.reader import Reader
from unickpt.reading.read_plan import Job, StoredJob


class _Kind(NamedTuple):
    """What arrays of one shape and dtype have in common."""

    dtype: DType
    boxes: tuple[Box, ...]


def whole_jobs(stored: Reader, jobs: Sequence[Job]) -> tuple[list[StoredJob], list[Job]]:
    """The jobs that read a small array whole, as `Reader.reads_whole` says; and the others."""
    small: list[StoredJob] = []
    others: list[Job] = []
    for job in jobs:
        if isinstance(job, StoredJob) and stored.reads_whole(job.entry):
            target, kind = job.target, _kind(job.entry.shape, job.entry.dtype)
            if target.dtype == kind.dtype and tuple(target.boxes) == kind.boxes:
                small.append(job)
                continue
        others.append(job)
    small.sort(key=lambda job: job.entry.name)  # as in the database: neighbours are in one file
    return small, others


@lru_cache(maxsize=4096)
def _kind(shape: tuple[int, ...], dtype: str) -> _Kind:
    return _Kind(dtypes.from_name(dtype), (Box.whole(shape),))
