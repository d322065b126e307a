"""The verb save: describe, plan, stage, write, commit, one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt import backends, chunks, dtypes, plan
from unickpt.adapt import ArraySource, Fragment, adapters, current_group
from unickpt.box import Box
from unickpt.chunks import ChunkStore
from unickpt.commit import Attempt, check_boxes, describe_bytes
from unickpt.describe import Description, describe
from unickpt.index import INDEX_KEY, ArrayEntry, Index
from unickpt.options import SaveOptions, SaveReport
from unickpt.plan import Part
from unickpt.record import CHUNK_DTYPE, Record
from unickpt.stage import Window, stage

# Measured: smaller transactions cost an fsync each, larger ones leave too little overlap.
_TRANSACTION_BYTES = 256 << 20
_TRANSACTION_CHUNKS = 16384
_HASH_THREADS = 2
_HASH_HERE_BYTES = 256 << 10  # handing less to a thread costs more than hashing it
_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class ChunkJob:
    """One chunk that this process writes. `number` counts within the part, `position` within all
    parts of the array (see `unickpt.record`)."""

    array: int
    entry: ArrayEntry
    part: Part
    number: int
    position: int
    box: Box
    fragment: Fragment

    @property
    def nbytes(self) -> int:
        return self.box.size * dtypes.from_name(self.entry.dtype).itemsize


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
        jobs = plan_jobs(description, group.index, alone=group.count == 1)
        attempt.check_destination(overwrite)
        described = time.perf_counter()
        writer = _Writer(attempt, description, options)
        attempt.publish(writer.write(jobs))
        written = time.perf_counter()
        if group.index == 0:
            index = attempt.commit(description.index, overwrite)
        else:
            attempt.wait_committed()
            index = description.index
    except BaseException as error:
        attempt.publish_error(error)
        if writer is not None:
            attempt.discard()
        if isinstance(error, ValueError | OSError) and type(error) in (ValueError, OSError):
            raise chunks.translate(error, f"saving to {location}") from error
        raise
    done = time.perf_counter()
    phases = {
        "describe": described - started,
        "write": written - described,
        "commit": done - written,
    }
    return _report(str(location), index, writer, group.count, phases)


def _report(
    url: str, index: Index, writer: _Writer, processes: int, phases: dict[str, float]
) -> SaveReport:
    return SaveReport(
        url=url,
        arrays=len(index.arrays),
        bytes=sum(entry.nbytes for entry in index.arrays.values()),
        written_bytes=writer.nbytes,
        chunks=writer.count,
        processes=processes,
        seconds=sum(phases.values()),
        phases=phases,
    )


def plan_jobs(description: Description, process: int, *, alone: bool) -> list[ChunkJob]:
    """The chunks that a process writes, in the order of the description.

    Raises:
        CoverageError: a job of one process holds fragments that do not cover their array.
    """
    jobs: list[ChunkJob] = []
    for array, (name, entry) in enumerate(description.index.arrays.items()):
        source = description.sources[name]
        if entry.boxes == ():
            if alone:
                check_boxes(entry, [(f.box, (process,)) for f in source.fragments])
            jobs += _own_boxes(array, entry, source)
        else:
            jobs += _shared(array, entry, source, process)
    return jobs


def _own_boxes(array: int, entry: ArrayEntry, source: ArraySource) -> Iterator[ChunkJob]:
    position = 0
    for fragment in source.fragments:
        part = plan.box_part(entry, fragment.box)
        for number in range(part.count):
            box = part.chunk_box(number)
            yield ChunkJob(array, entry, part, number, position, box, fragment)
            position += 1


def _shared(array: int, entry: ArrayEntry, source: ArraySource, process: int) -> Iterator[ChunkJob]:
    first = 0
    for part in plan.parts(entry):
        for fragment in source.fragments:
            numbers = list(part.chunks_in(fragment.box))
            mine = plan.share(entry.name, fragment.box, process, fragment.replicas, len(numbers))
            for k in mine:
                number, box = numbers[k], part.chunk_box(numbers[k])
                assert fragment.box.contains(box), f"chunk {box} crosses {fragment.box}"
                yield ChunkJob(array, entry, part, number, first + number, box, fragment)
        first += part.count


class _Writer:
    """Stages, hashes and writes chunks in transactions, a bounded number of bytes at a time."""

    def __init__(self, attempt: Attempt, description: Description, options: SaveOptions) -> None:
        self._attempt, self._description, self._options = attempt, description, options
        location = attempt.database(attempt.group.index)
        self._store = ChunkStore(location, attempt.context, description.index.codecs)
        self.nbytes, self.count = 0, 0

    def write(self, jobs: list[ChunkJob]) -> Record:
        started = time.perf_counter()
        window = Window(self._options.budget_bytes)
        digests: list[Callable[[], int]] = []
        looked = time.monotonic()
        with ThreadPoolExecutor(_HASH_THREADS) as pool:
            for batch in self._batches(jobs):
                size = sum(job.nbytes for job in batch)
                window.make_room(size)
                window.add(size, self._write_batch(batch, pool, digests))
                if time.monotonic() - looked > _LOOK_EVERY_S:
                    self._attempt.check_others()
                    looked = time.monotonic()
            window.drain()
            blobs = self._write_rest()
            table = np.zeros(len(jobs), CHUNK_DTYPE)
            table["array"] = [job.array for job in jobs]
            table["chunk"] = [job.position for job in jobs]
            table["digest"] = [result() for result in digests]
        self.nbytes, self.count = sum(job.nbytes for job in jobs), len(jobs)
        arrays = self._description.index.arrays.items()
        return Record(
            description=xxhash.xxh3_64_intdigest(describe_bytes(self._description.index)),
            chunks=table,
            boxes={
                number: tuple(f.box for f in self._description.sources[name].fragments)
                for number, (name, entry) in enumerate(arrays)
                if entry.boxes == ()
            },
            blobs=blobs,
            statistics={"bytes": self.nbytes, "seconds": time.perf_counter() - started},
        )

    def _batches(self, jobs: list[ChunkJob]) -> Iterator[list[ChunkJob]]:
        limit = min(_TRANSACTION_BYTES, max(1, self._options.budget_bytes // 4))
        batch: list[ChunkJob] = []
        size = 0
        for job in jobs:
            nbytes = job.nbytes
            if batch and (size + nbytes > limit or len(batch) == _TRANSACTION_CHUNKS):
                yield batch
                batch, size = [], 0
            batch.append(job)
            size += nbytes
        if batch:
            yield batch

    def _write_batch(
        self, batch: list[ChunkJob], pool: ThreadPoolExecutor, digests: list[Callable[[], int]]
    ) -> Any:
        transaction = ts.Transaction(atomic=True)
        copies, staged = [], []
        for job in batch:
            host = stage(job.fragment, job.box)
            staged.append(host)
            if host.nbytes > _HASH_HERE_BYTES:
                digests.append(pool.submit(chunks.digest, host).result)
            else:
                digests.append(partial(int, chunks.digest(host)))
            copies.append(self._store.write(job.entry, job.part, job.number, host, transaction))
        for copy in copies:
            copy.result()
        committed = transaction.commit_async()

        def wait() -> None:
            committed.result()
            staged.clear()

        return wait

    def _write_rest(self) -> dict[str, tuple[int, int]]:
        """The per-process values and the description, in a transaction of their own."""
        blobs = self._description.blobs
        transaction = ts.Transaction(atomic=True)
        store = self._store.database.with_transaction(transaction)
        rest = {blob_key(name, self._attempt.group.index): data for name, data in blobs.items()}
        rest[INDEX_KEY] = describe_bytes(self._description.index)
        for write in [store.write(key, data) for key, data in rest.items()]:
            write.result()
        transaction.commit_async().result()
        return {name: (len(b), xxhash.xxh3_64_intdigest(b)) for name, b in blobs.items()}


def blob_key(name: str, process: int) -> str:
    """Where one process's value of a per-process leaf is stored."""
    return f"{name}/process_{process:05d}" if name else f"process_{process:05d}"
