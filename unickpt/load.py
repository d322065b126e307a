"""The verb load: which chunks serve each local box, each read once, verified, placed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt import backends, blob, checkpoint, dtypes, mismatch, plan, tree, values
from unickpt.adapt import Adapter, Array, ArrayTarget, adapter_of, adapters, current_group
from unickpt.adapters.numpy import NumpyTarget
from unickpt.box import Box
from unickpt.checkpoint import Checkpoint
from unickpt.describe import expand, is_leaf
from unickpt.errors import CheckpointCorrupt, LoadMismatch, UnsupportedLeaf
from unickpt.index import ArrayEntry
from unickpt.marks import LocalFragments, PerProcess, PerProcessValues
from unickpt.mismatch import Difference
from unickpt.options import LoadOptions
from unickpt.plan import Part
from unickpt.stage import Window

_REMOTE_THREADS = 32
# A task reads chunks one after the other; small ones share a task, to save on scheduling.
_TASK_BYTES = 1 << 20
_TASK_CHUNKS = 256


def load(
    path: backends.Path,
    like: Any = None,
    *,
    strict: bool = True,
    cast: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a checkpoint onto any mesh, in any framework.

    Every process reads the chunks that its own part of `like` needs, and nothing else.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a committed checkpoint.
        like: a tree that says what is wanted: JAX arrays or `jax.ShapeDtypeStruct`s with
            shardings (new arrays are made), torch tensors, DTensors and NumPy arrays (filled in
            place; meta tensors are materialised), plain values, `PerProcess`, `LocalFragments`,
            objects with `load_state_dict`. Without `like`, the stored tree with NumPy arrays.
        strict: whether the names must be the same; if not, leaves that are not stored keep what
            `like` holds, and stored ones that `like` lacks are skipped.
        cast: whether a stored dtype may become another of the same kind: floats to floats,
            integers to integers that hold all values. Never from one kind to another.
        options: see `LoadOptions`.

    Returns:
        A tree of `like`'s containers, or of the stored ones.

    Raises:
        CheckpointNotFound: no committed checkpoint is there.
        LoadMismatch: `like` and the checkpoint differ; a table tells all differences at once.
        CheckpointCorrupt: stored bytes do not match their digest, or are no checkpoint.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/load", {"w": np.arange(3), "step": 7})
        >>> unickpt.load("memory://run/load")
        {'w': array([0, 1, 2]), 'step': 7}
    """
    options = options or LoadOptions()
    among = adapters()
    stored = checkpoint.open(path)
    if like is None:
        return _load_all(stored, options, among)
    index = stored.index
    facts = {**index.arrays, **{a: index.arrays[t] for a, t in index.aliases.items()}}
    known = {**facts, **index.values}
    node = tree.flatten(
        like, lambda x: is_leaf(x, among), lambda obj, name: expand(obj, name, among, known)
    )
    wanted = {leaf.name: leaf.value for leaf in tree.leaves(node)}
    targets = _targets(wanted, among)
    _compare(stored, wanted, targets, strict, cast)
    group = options.group or (current_group(among) if index.per_process else None)
    done: dict[str, Any] = {}
    for name, value in wanted.items():
        if isinstance(value, PerProcess) and name in index.per_process:
            done[name] = _own_value(stored, name, value, group, among)
        elif name in index.values:
            done[name] = index.values[name]
        elif name not in facts:
            done[name] = value  # not strict: keep it
    jobs = [Job(name, facts[name], targets[name]) for name in targets if name in facts]
    done |= read_arrays(stored, jobs, options)
    return tree.rebuild(node, done.__getitem__)


def _load_all(stored: Checkpoint, options: LoadOptions, among: Sequence[Adapter]) -> Any:
    index = stored.index
    try:
        node = tree.from_json(index.tree)
    except ValueError as error:
        raise CheckpointCorrupt(f"{stored.location}: {error}") from None
    jobs = [Job(name, entry, NewTarget(entry)) for name, entry in index.arrays.items()]
    done: dict[str, Any] = {
        name: PerProcessValues(tuple(_decode(stored, name, b, None, among)
                                     for b in stored.per_process(name)))
        for name in index.per_process
    }  # fmt: skip
    done |= {**read_arrays(stored, jobs, options), **index.values}
    done |= {alias: done[name] for alias, name in index.aliases.items()}
    missing = [leaf.name for leaf in tree.leaves(node) if leaf.name not in done]
    if missing:
        raise CheckpointCorrupt(
            f"{stored.location}: the index has the leaf {missing[0]!r} in its tree but not stored"
        )
    return tree.rebuild(node, done.__getitem__)


def _decode(stored: Checkpoint, name: str, data: bytes, like: Any, among: Sequence[Adapter]) -> Any:
    try:
        return blob.decode(data, like, among)
    except ValueError as error:
        raise LoadMismatch(f"{stored.location}: per-process leaf {name!r}: {error}") from None


def _own_value(
    stored: Checkpoint, name: str, like: PerProcess, group: Any, among: Sequence[Adapter]
) -> PerProcess:
    saved = len(stored.index.per_process[name].blobs)
    if saved != group.count:
        raise LoadMismatch(
            f"{stored.location}: per-process leaf {name!r} was saved by {saved} processes and is "
            f"loaded by {group.count}. Load it on its own without `like` (a PerProcessValues of "
            "all values) and decide who gets which."
        )
    data = stored.per_process(name)[group.index]
    return PerProcess(_decode(stored, name, data, like.value, among))


# --- what is asked against what is stored -------------------------------------------------------


def _targets(wanted: Mapping[str, Any], among: Sequence[Adapter]) -> dict[str, ArrayTarget]:
    targets: dict[str, ArrayTarget] = {}
    bad: list[str] = []
    for name, value in wanted.items():
        adapter = adapter_of(value, among)
        try:
            if isinstance(value, LocalFragments):
                targets[name] = value.target()
            elif adapter is not None:
                targets[name] = adapter.target(value)
        except (TypeError, ValueError) as error:
            bad.append(f"  {name!r}: {error}")
    if bad:
        raise UnsupportedLeaf("these leaves of `like` cannot be loaded into:\n" + "\n".join(bad))
    return targets


def _compare(
    stored: Checkpoint,
    wanted: Mapping[str, Any],
    targets: Mapping[str, ArrayTarget],
    strict: bool,
    cast: bool,
) -> None:
    index = stored.index
    have = {*index.arrays, *index.aliases, *index.values, *index.per_process}
    rows: list[Difference] = []
    for name, value in wanted.items():
        found = _stored_fact(stored, name)
        if name not in have:
            if strict or _abstract(value, targets.get(name)):
                rows.append(Difference(name, "missing", "-", _asked(value, targets.get(name))))
        elif name in targets and isinstance(found, ArrayEntry):
            rows += _compare_array(name, found, targets[name], cast)
        elif not _same_kind(value, found, name in index.per_process):
            rows.append(Difference(name, "kind", _shown(found), _asked(value, targets.get(name))))
    if strict:
        rows += [
            Difference(name, "unexpected", _shown(_stored_fact(stored, name)), "-")
            for name in have
            if name not in wanted
        ]
    rows += _shared_memory(stored, targets)
    if rows:
        raise LoadMismatch(mismatch.message(str(stored.location), rows))


def _stored_fact(stored: Checkpoint, name: str) -> Any:
    index = stored.index
    target = index.aliases.get(name, name)
    if target in index.arrays:
        return index.arrays[target]
    return PerProcess() if name in index.per_process else index.values.get(name)


def _abstract(value: Any, target: ArrayTarget | None) -> bool:
    """Whether a leaf of `like` holds no data that it could keep."""
    if isinstance(value, PerProcess):
        return value.value is None
    return getattr(target, "meta", False) or type(value).__name__ == "ShapeDtypeStruct"


def _same_kind(value: Any, found: Any, per_process: bool) -> bool:
    if per_process or isinstance(value, PerProcess):
        return per_process and isinstance(value, PerProcess)
    return type(value) is type(found) and values.is_plain(found)


def _compare_array(
    name: str, entry: ArrayEntry, target: ArrayTarget, cast: bool
) -> list[Difference]:
    rows = []
    have, want = dtypes.from_name(entry.dtype), target.dtype
    if tuple(entry.shape) != tuple(target.shape):
        rows.append(Difference(name, "shape", str(list(entry.shape)), str(list(target.shape))))
    if have != want and not (cast and dtypes.castable(have, want)):
        rows.append(Difference(name, "dtype", entry.dtype, dtypes.name_of(want)))
    if target.prng is not None and target.prng != entry.prng:
        rows.append(Difference(name, "PRNG key", str(entry.prng), target.prng))
    return rows


def _shared_memory(stored: Checkpoint, targets: Mapping[str, ArrayTarget]) -> list[Difference]:
    """Leaves of `like` that are one array, but were stored as different ones."""
    first: dict[Any, str] = {}
    rows = []
    for name, target in targets.items():
        other = first.setdefault(target.identity, name) if target.identity is not None else name
        entry, one = _stored_fact(stored, name), _stored_fact(stored, other)
        if other == name or not (isinstance(entry, ArrayEntry) and isinstance(one, ArrayEntry)):
            continue
        if entry.name != one.name and not _equal_data(stored, entry, one):
            rows.append(
                Difference(name, "tied", "an array of its own", f"the same memory as {other}")
            )
    return rows


def _equal_data(stored: Checkpoint, a: ArrayEntry, b: ArrayEntry) -> bool:
    same_grid = (a.shape, a.dtype, a.chunk, a.cut, a.boxes) == (
        b.shape, b.dtype, b.chunk, b.cut, b.boxes,
    )  # fmt: skip
    return same_grid and bool(
        np.array_equal(stored.digests_of(a.name)["digest"], stored.digests_of(b.name)["digest"])
    )


def _asked(value: Any, target: ArrayTarget | None) -> str:
    if target is not None:
        return f"{dtypes.name_of(target.dtype)}{list(target.shape)}"
    return "a PerProcess" if isinstance(value, PerProcess) else f"plain {type(value).__name__}"


def _shown(found: Any) -> str:
    if isinstance(found, ArrayEntry):
        return f"{found.dtype}{list(found.shape)}"
    return "a PerProcess" if isinstance(found, PerProcess) else f"plain {type(found).__name__}"


# --- reading ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """One array to read: the name it is asked by, what is stored, and where it goes."""

    name: str
    entry: ArrayEntry
    target: ArrayTarget


class NewTarget(NumpyTarget):
    """A new NumPy array of what is stored."""

    def __init__(self, entry: ArrayEntry) -> None:
        self.leaf, self.shape, self.dtype = None, entry.shape, dtypes.from_name(entry.dtype)
        self.boxes, self.in_place, self.identity = (Box.whole(entry.shape),), False, None


@dataclass(frozen=True)
class _Read:
    """One chunk to read, and the buffers that want a piece of it."""

    entry: ArrayEntry
    part: Part
    number: int
    box: Box
    row: Any
    wanted_by: tuple[tuple[Box, Array], ...]


def read_arrays(stored: Checkpoint, jobs: Sequence[Job], options: LoadOptions) -> dict[str, Any]:
    """Reads arrays; every chunk that any of a job's boxes needs is read exactly once."""
    done: dict[str, Any] = {}
    window = Window(options.budget_bytes)
    reader = _Reader(stored)
    try:
        for job in jobs:
            size = sum(box.size for box in job.target.boxes) * job.target.dtype.itemsize
            window.make_room(size)
            window.add(size, _start(stored, job, options.verify, reader, done))
        window.drain()
    finally:
        reader.close()
    return done


def _start(
    stored: Checkpoint, job: Job, verify: bool, reader: _Reader, done: dict[str, Any]
) -> Callable[[], None]:
    """Starts to read an array; the result waits for it and finishes the leaf."""
    try:
        buffers = [job.target.buffer(i) for i in range(len(job.target.boxes))]
    except (MemoryError, ValueError) as error:
        raise MemoryError(
            f"{stored.location}: no memory for array {job.name!r}, "
            f"{job.entry.dtype}{list(job.entry.shape)}: {error}"
        ) from None
    wanted = list(zip(job.target.boxes, buffers, strict=True))
    pending = {reader.submit(read) for read in _reads(stored, job.entry, wanted, verify)}

    def finish() -> None:
        for task in pending:
            reader.wait(task)
        done[job.name] = job.target.finish(buffers)
        buffers.clear()

    return finish


def _reads(
    stored: Checkpoint, entry: ArrayEntry, wanted: list[tuple[Box, Array]], verify: bool
) -> Iterator[_Read]:
    table = stored.digests_of(entry.name) if verify else None
    first = 0
    for part in plan.parts(entry):
        by_chunk: dict[int, list[tuple[Box, Array]]] = {}
        for box, buffer in wanted:
            for number in part.chunks_in(box):
                by_chunk.setdefault(number, []).append((box, buffer))
        for number, by in sorted(by_chunk.items()):
            row = None if table is None else table[first + number]
            yield _Read(entry, part, number, part.chunk_box(number), row, tuple(by))
        first += part.count


class _Task:
    """Chunks that one thread reads, one after the other."""

    def __init__(self) -> None:
        self.reads: list[_Read] = []
        self.nbytes = 0
        self.future: Future[None] | None = None


class _Reader:
    """Threads that read chunks; small chunks, of different arrays too, share a task."""

    def __init__(self, stored: Checkpoint) -> None:
        local = max(4, 2 * (os.cpu_count() or 1))
        threads = _REMOTE_THREADS if stored.location.is_remote else local
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="unickpt-load")
        self._stored, self._scratch, self._task = stored, _Scratch(), _Task()

    def submit(self, read: _Read) -> _Task:
        """Adds a chunk to a task, which starts once it is worth a thread's while."""
        task = self._task
        task.reads.append(read)
        task.nbytes += read.box.size * dtypes.from_name(read.entry.dtype).itemsize
        if task.nbytes >= _TASK_BYTES or len(task.reads) == _TASK_CHUNKS:
            self._flush()
        return task

    def wait(self, task: _Task) -> None:
        """Waits for a task, and raises what went wrong in it."""
        if task.future is None:
            self._flush()
        assert task.future is not None, "only the newest task has not started"
        task.future.result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _flush(self) -> None:
        task, self._task = self._task, _Task()
        task.future = self._pool.submit(self._run, task.reads)

    def _run(self, reads: list[_Read]) -> None:
        stored = self._stored
        requests = [stored.request_chunk(r.entry, r.part, r.number) for r in reads]
        for read, requested in zip(reads, requests, strict=True):
            there = _direct(read)
            if there is not None:
                stored.read_chunk(read.entry, read.part, read.number, read.row, there, requested)
                continue
            piece = self._scratch.array(read.box.shape, dtypes.from_name(read.entry.dtype))
            stored.read_chunk(read.entry, read.part, read.number, read.row, piece, requested)
            for box, buffer in read.wanted_by:
                common = read.box.intersect(box)
                assert common is not None, "a chunk is read only for boxes that meet it"
                source = piece[common.relative_to(read.box.start).slices]
                _place(source, buffer, common.relative_to(box.start), read.entry.name)


def _direct(read: _Read) -> Array | None:
    """The memory where a chunk can land as it is: contiguous, of its dtype, wanted only there."""
    box, buffer = read.wanted_by[0]
    if len(read.wanted_by) > 1 or buffer.dtype != dtypes.from_name(read.entry.dtype):
        return None
    if not box.contains(read.box):
        return None
    there = buffer[read.box.relative_to(box.start).slices]
    return there if there.flags.c_contiguous else None


def _place(source: Array, buffer: Array, at: Box, name: str) -> None:
    if source.dtype == buffer.dtype:
        buffer[at.slices] = source
        return
    cast = source.astype(buffer.dtype)
    if dtypes.kind(source.dtype) == "integer" and not np.array_equal(
        cast.astype(source.dtype), source
    ):
        raise LoadMismatch(
            f"array {name!r}: stored as {source.dtype}, asked for as {buffer.dtype}, which does "
            "not hold all its values; load it as it is stored"
        )
    buffer[at.slices] = cast


class _Scratch(threading.local):
    """Memory for one chunk per thread, used again and again: fresh pages cost twice as much."""

    def __init__(self) -> None:
        self._raw: Array = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: dtypes.DType) -> Array:
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if self._raw.nbytes < nbytes:
            self._raw = np.empty(nbytes, np.uint8)
        return self._raw[:nbytes].view(dtype).reshape(shape)


def read_box(stored: Checkpoint, entry: ArrayEntry, box: Box, *, verify: bool) -> Array:
    """A box of an array as a new NumPy array."""
    target = NewTarget(entry)
    target.shape, target.boxes = box.shape, (box,)
    options = LoadOptions(verify=verify)
    found: Array = read_arrays(stored, [Job(entry.name, entry, target)], options)[entry.name]
    return found
