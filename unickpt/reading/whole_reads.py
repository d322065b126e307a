"""Which jobs take small arrays just as they are stored, so that many are read together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.frameworks.protocol import ArrayTarget
from unickpt.reading.read_plan import Job
from unickpt.reading.recipes import Unchanged


class Whole(NamedTuple):
    """An array that one target takes whole and unchanged.

    Arguments:
        name: of the target.
        target: the target.
        entry: the stored array.
        nbytes: of it.
        job: all this.
    """

    name: str
    target: ArrayTarget
    entry: ArrayEntry
    nbytes: int
    job: Job


def whole_jobs(stored: Reader, jobs: Sequence[Job]) -> tuple[list[Whole], list[Job]]:
    """The jobs that read a small array whole, as `Reader.reads_whole` says; and the others."""
    small: list[Whole] = []
    others: list[Job] = []
    for job in jobs:
        found = _whole(stored, job)
        if found is None:
            others.append(job)
        else:
            small.append(found)
    small.sort(key=lambda each: each.entry.name)  # as in the database: neighbours are in one file
    return small, others


def _whole(stored: Reader, job: Job) -> Whole | None:
    if len(job.targets) != 1:
        return None
    ((name, target),) = job.targets.items()
    recipe = job.recipes[name]
    if len(recipe.sources) != 1 or recipe.fills or recipe.function is not None:
        return None
    source, dtype = recipe.sources[0], target.dtype
    if not isinstance(source, Unchanged) or not stored.reads_whole(source.entry):
        return None
    entry = source.entry
    if dtype != dtypes.from_name(entry.dtype) or tuple(target.boxes) != (Box.whole(entry.shape),):
        return None
    return Whole(name, target, entry, entry.nbytes, job)
