"""The verb save: describe, plan, stage, write, commit, one after the other."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from unickpt import backends, plan
from unickpt.adapt import adapters, current_group
from unickpt.commit import Attempt
from unickpt.describe import Description, describe
from unickpt.merge import check_boxes
from unickpt.options import SaveOptions, SaveReport
from unickpt.record import Record
from unickpt.write import ChunkJob, Writer


def save(
    path: backends.Path,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves a tree of arrays and values as one checkpoint.

    In a job of several processes (`torch.distributed`, `jax.distributed`), all of them call this
    with the same arguments; each writes its own part, and the checkpoint appears at once when the
    last one is done, or not at all.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) at which no checkpoint exists yet.
        tree: any nesting of containers of JAX arrays, torch tensors and DTensors, NumPy arrays,
            plain values, `PerProcess`, `LocalFragments` and objects with `state_dict`.
        overwrite: replace a checkpoint at `path`; it stays readable until the new one is there.
        metadata: anything that JSON holds; `unickpt.open(path).metadata` gives it back.
        options: see `SaveOptions`.

    Returns:
        What was written, and how long it took.

    Raises:
        UnsupportedLeaf: something in the tree cannot be stored; nothing was written.
        CheckpointExists: the path is taken; nothing was written.
        InvalidPath: the path names no storage.
        CoverageError: the processes' fragments do not cover an array exactly once.
        ProcessFailed: another process failed; its message is in this one.
        SaveTimeout: another process did not finish in time.
        StorageError: the storage failed.

    Example:
        >>> import numpy as np, unickpt
        >>> report = unickpt.save("memory://run/step_1", {"w": np.ones((2, 3)), "step": 1})
        >>> report.arrays
        1
    """
    started = time.perf_counter()
    options = options or SaveOptions()
    among = adapters()
    location = backends.resolve(path)
    group = options.group or current_group(among)
    context = backends.context(fsync=options.fsync)
    attempt = Attempt(location, group, group.next_attempt(), context, options.timeout_s)
    writer = None
    try:
        description = describe(tree, metadata, group, options, among)
        held = list(held_chunks(description))
        jobs = own_share(held, group.index)
        if group.count == 1:
            check_alone(description)
        attempt.check_new()
        attempt.check_destination(overwrite)
        described = time.perf_counter()
        writer = Writer(attempt, description, options)
        attempt.publish(writer.write_all(jobs))
        written = time.perf_counter()
        serve = partial(_serve, writer, held)
        if group.index == 0:
            totals = attempt.commit(description, serve)
        else:
            totals = attempt.wait_committed(serve)
    except BaseException as raised:
        error = attempt.explained(raised) if isinstance(raised, Exception) else raised
        attempt.publish_error(error)
        if writer is not None:
            attempt.discard()
        if error is raised:
            raise
        raise error from raised
    done = time.perf_counter()
    phases = {
        "describe": described - started,
        "write": written - described,
        "commit": done - written,
    }
    return SaveReport(
        url=location.url,
        arrays=totals.arrays,
        bytes=totals.nbytes,
        written_bytes=writer.nbytes,
        chunks=writer.count,
        processes=group.count,
        seconds=done - started,
        phases=phases,
    )


def held_chunks(description: Description) -> Iterator[ChunkJob]:
    """All chunks that this process could write, in the order of the description."""
    for array, (name, entry) in enumerate(description.index.arrays.items()):
        fragments = description.sources[name].fragments
        told = entry.boxes == ()
        parts = [plan.box_part(entry, f.box) for f in fragments] if told else plan.parts(entry)
        first = 0
        for part in parts:
            for fragment in fragments:
                for number in part.chunks_in(fragment.box):
                    box = part.chunk_box(number)
                    assert fragment.box.contains(box), f"chunk {box} crosses {fragment.box}"
                    yield ChunkJob(array, entry, part, number, first + number, box, fragment)
            first += part.count


def own_share(held: Sequence[ChunkJob], process: int) -> list[ChunkJob]:
    """The chunks that a process writes, where it shares fragments with others."""
    mine: list[ChunkJob] = []
    for _, run in itertools.groupby(held, lambda j: (j.array, j.part.key, j.fragment.box)):
        jobs = list(run)
        name, fragment = jobs[0].entry.name, jobs[0].fragment
        share = plan.share(name, fragment.box, process, fragment.replicas, len(jobs))
        mine += [jobs[k] for k in share]
    return mine


def check_alone(description: Description) -> None:
    """Proves, for a job of one process, that its `LocalFragments` cover their arrays.

    Raises:
        CoverageError: names the array and the hole.
    """
    for name, entry in description.index.arrays.items():
        if entry.boxes == ():
            fragments = description.sources[name].fragments
            check_boxes(entry, [(f.box, f.replicas) for f in fragments])


def _serve(writer: Writer, held: Sequence[ChunkJob], request: Mapping[str, list[int]]) -> Record:
    """Writes what the coordinator asks for: replicas that their first choice does not hold."""
    wanted = {(name, position) for name, positions in request.items() for position in positions}
    return writer.write_more([job for job in held if (job.entry.name, job.position) in wanted])
