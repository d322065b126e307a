"""The facts about a run from its storage: its steps, their sizes and durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from unickpt import Checkpoint
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, InvalidPath, UnickptError
from unickpt.extend import (
    RESERVED_METADATA,
    Index,
    Listed,
    OrphanSearch,
    PathLike,
    Timing,
    bytes_on_disk,
    checkpoints_below,
    find_orphans,
    reading_checkpoint,
    resolve_path,
    step_metrics,
)

_OPEN_AT_ONCE = 8
MOST_STEPS = 2000


@dataclass(frozen=True)
class Durations:
    """How long a save took, in seconds since the call of save on process 0.

    Arguments:
        done: until every process had written its part.
        median: until half of them had.
        merged: until process 0 had merged their records. Then it committed.
        blocked: the longest that a process's call blocked its caller; None if the calls returned
            only after the save.
        slowest: the process that all others waited for.
    """

    done: float
    median: float
    merged: float
    blocked: float | None
    slowest: int

    @classmethod
    def of(cls, timing: Timing) -> Durations:
        """The durations of a save."""
        done, blocked = timing.done, float(timing.blocked.max())
        return cls(
            float(done.max()),
            float(np.median(done)),
            timing.merged,
            blocked or None,
            int(timing.slowest[0]),
        )


@dataclass(frozen=True)
class StepFacts:
    """A committed checkpoint.

    Arguments:
        name: of its folder; "." for the folder itself.
        path: for `unickpt.open`.
        attempt: the save that committed it.
        created: when it was committed, as in its index.
        nbytes, new_bytes: of its arrays, and those that its save wrote.
        arrays, processes: number of them.
        bases: names of the checkpoints next to it that have chunks of it.
        after: the step that its job resumed from, if recorded.
        metrics: numbers that it was saved with; they may be NaN or infinite.
        durations: None if not recorded.
        error: why it, or its timing, cannot be read; else empty.
    """

    name: str
    path: str
    attempt: str = ""
    created: str = ""
    nbytes: int = 0
    new_bytes: int = 0
    arrays: int = 0
    processes: int = 0
    bases: tuple[str, ...] = ()
    after: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    durations: Durations | None = None
    error: str = ""


@dataclass(frozen=True)
class RunFacts:
    """The committed checkpoints of a folder, in natural order, and its other content.

    Arguments:
        url: of the folder, or of the one checkpoint.
        is_run: whether it is a folder of checkpoints.
        steps: the checkpoints; of more than `MOST_STEPS`, the last ones.
        others: names of those before, which are not opened.
        left: the remains of failed saves, and the saving jobs; None of one checkpoint.
        on_disk: bytes of all files in the folder; None of one checkpoint.
    """

    url: str
    is_run: bool
    steps: Sequence[StepFacts]
    others: frozenset[str] = frozenset()
    left: OrphanSearch | None = None
    on_disk: int | None = None


def look(path: PathLike) -> RunFacts:
    """Reads the facts of a run, or of one checkpoint.

    Arguments:
        path: of a checkpoint of any format, or of a folder of unickpt's checkpoints.

    Raises:
        CheckpointNotFound: nothing was committed there.
        CheckpointCorrupt, UnsupportedFormat: it is a checkpoint, and cannot be opened.
        StorageError: the storage failed.
    """
    listed = _listed(path)
    if listed is None:
        url, step = reading_checkpoint(path, lambda stored: (stored.url, facts_of(".", "", stored)))
        return RunFacts(url, False, [step])
    with ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
        facts = pool.map(_step, listed[-MOST_STEPS:])
        steps = [fact for fact in facts if fact is not None]
    url = resolve_path(path, whole=True).url
    older_names = frozenset(entry.name for entry in listed[:-MOST_STEPS])
    return RunFacts(url, True, steps, older_names, find_orphans(path), bytes_on_disk(path))


def facts_of(name: str, path: str, checkpoint: Checkpoint) -> StepFacts:
    """The facts of an opened checkpoint."""
    index = checkpoint.index
    try:
        timing, error = checkpoint.timing, ""
    except CheckpointCorrupt as damage:
        timing, error = None, str(damage)
    return StepFacts(
        name,
        path,
        index.attempt,
        index.created,
        checkpoint.nbytes,
        max(0, checkpoint.nbytes - index.reused),
        len(index.arrays),
        index.processes,
        tuple(base.name for base in index.bases),
        _after(index),
        step_metrics(index.metadata),
        None if timing is None else Durations.of(timing),
        error,
    )


def _listed(path: PathLike) -> list[Listed] | None:
    """The checkpoints in a folder; None if it is one itself, or may be another system's."""
    try:
        listed = checkpoints_below(path)
    except (CheckpointNotFound, InvalidPath):  # or a file, which may be another system's
        return None
    return None if not listed or any(entry.name == "." for entry in listed) else listed


def _step(listed: Listed) -> StepFacts | None:
    """The facts of a checkpoint; None if it was removed meanwhile."""
    try:
        return reading_checkpoint(listed.path, partial(facts_of, listed.name, listed.path))
    except CheckpointNotFound:
        return None
    except UnickptError as error:
        return StepFacts(listed.name, listed.path, error=str(error))


def _after(index: Index) -> int | None:
    """The step after which the job went on, as the `Checkpointer` put it into the metadata, which
    is untrusted."""
    reserved = index.metadata.get(RESERVED_METADATA)
    after = reserved.get("after") if isinstance(reserved, dict) else None
    return after if type(after) is int else None
