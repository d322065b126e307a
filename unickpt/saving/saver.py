"""save() and save_async()."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from typing import Any

from unickpt.options import SaveOptions
from unickpt.save_report import SaveReport
from unickpt.saving.background import PendingSave, SaveQueue, SaveRequest
from unickpt.saving.plan_cache import DescribedTree, PlanCache
from unickpt.saving.task import SaveTask, call_metrics, send_failure
from unickpt.saving.write_plan import DirectSource
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.threads import collection_paused


def save_async(
    path: paths.PathLike,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> PendingSave:
    """Saves a tree of arrays and values in the background.

    Returns when the state is safe to change, or earlier if `SaveOptions.staging` says so; then
    call `PendingSave.wait_staged` before changing it. Saves are written in the order of the
    calls. At most two are in flight; a further call waits. The program waits for them before it
    exits. A background error is raised by `PendingSave.result`, else by the next call of this
    function; else the program exits with status 1.

    Arguments:
        path, tree, overwrite, metadata: as for `save`.
        options: see `SaveOptions`, especially `staging` and `budget_bytes`.

    Returns:
        The pending save, to wait for.

    Raises:
        UnsupportedLeaf: something in the tree cannot be stored; nothing was written.
        CheckpointExists: the path holds a checkpoint or other files. On remote storage this is
            checked in the background.
        InvalidPath: the path is not a storage location.
        SaveTimeout: process 0 did not call this in time.
        UnickptError: the error of an earlier save, if it was not raised yet; this save was not
            started.

    Example:
        >>> import numpy as np, unickpt
        >>> w = np.ones(3)
        >>> pending = unickpt.save_async("memory://run/async", {"w": w})
        >>> w += 1  # it was copied
        >>> _ = pending.result()
        >>> unickpt.load("memory://run/async")["w"]
        array([1., 1., 1.])
    """
    options = SaveOptions.or_default(options)
    request = SaveRequest(path, tree, options, overwrite, metadata=lambda: metadata)
    return begin(request)


def begin(request: SaveRequest) -> PendingSave:
    """As `unickpt.save_async`, for trainers: takes callbacks and the other fields of `SaveRequest`.

    Raises:
        UnickptError: as `unickpt.save_async`; also any error of `SaveCallbacks.begin`.
    """
    return _queue(os.getpid()).save(request)


@cache
def _queue(process: int) -> SaveQueue:
    """The queue of this process; a forked process has its own."""
    return SaveQueue()


def save(
    path: paths.PathLike | Location,
    tree: Any,
    *,
    overwrite: bool = False,
    metadata: Mapping[str, Any] | None = None,
    options: SaveOptions | None = None,
) -> SaveReport:
    """Saves a tree of arrays and values as one checkpoint.

    In a job of several processes (`torch.distributed`, `jax.distributed`), all of them call this
    with the same arguments. Each writes its own part. The checkpoint appears atomically when the
    last one is done, or not at all.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) at which no checkpoint exists yet.
        tree: any nesting of containers of JAX arrays, torch tensors and DTensors, NumPy arrays,
            plain values, `PerProcess`, `LocalFragments` and objects with `state_dict`.
        overwrite: replace a checkpoint at `path`; it stays readable until the new one is committed.
        metadata: any JSON value; `unickpt.open(path).metadata` returns it.
        options: see `SaveOptions`.

    Returns:
        What was written, and how long it took.

    Raises:
        UnsupportedLeaf: something in the tree cannot be stored; nothing was written.
        CheckpointExists: the path holds a checkpoint or other files; nothing was written.
        InvalidPath: the path is not a storage location.
        CoverageError: the processes' fragments do not cover an array exactly once.
        ProcessFailed: another process failed; the message includes its message.
        SaveTimeout: another process did not start, or did not finish, in time.
        StorageError: a storage operation failed.

    Example:
        >>> import numpy as np, unickpt
        >>> report = unickpt.save("memory://run/step_1", {"w": np.ones((2, 3)), "step": 1})
        >>> report.arrays
        1
    """
    return run(SaveTask(path, overwrite, SaveOptions.or_default(options)), tree, metadata)


def run(task: SaveTask, tree: Any, metadata: Mapping[str, Any] | None = None) -> SaveReport:
    """As `save`."""
    try:
        with collection_paused():
            report = _save(task, tree, metadata)
    except BaseException as error:
        send_failure(task.options, task.location.url, task.group, error)
        raise
    call_metrics(task.options, report)
    return report


def _save(job: SaveTask, root: Any, metadata: Mapping[str, Any] | None) -> SaveReport:
    """Saves; its memory is freed when it returns, before Python resumes its search for cycles."""
    with job.failing():
        described_tree = _plans(os.getpid()).describe(job, root, metadata)
    with _skipping(job, described_tree) if job.options.changed is not None else nullcontext():
        with job.failing():
            described_tree.refer()
            plan = described_tree.plan()
        report = job.run(plan, DirectSource(job.working_bytes))
    described_tree.give_back()  # a failed save drops it, with all that it references
    if job.learned is not None:
        job.learned.remember()
    return report


@contextmanager
def _skipping(job: SaveTask, described: DescribedTree) -> Iterator[None]:
    """Has a save skip what did not change since its base; remembers the save for the next one."""
    from unickpt.saving import skipping  # only where it is requested

    last, base = _known(os.getpid()), job.options.base
    base_url = None if base is None else paths.resolve(base).url
    before = None if base_url is None else last.get(base_url)
    try:
        with job.failing():
            skip_state = skipping.skip(job, described, before)
        yield
    except BaseException:
        if base_url is not None:  # it may be another one by now
            last.pop(base_url, None)
        raise
    last.pop(job.location.url, None)  # the newest comes last
    last[job.location.url] = skip_state
    while len(last) > _MOST_KNOWN:
        last.pop(next(iter(last)))


_MOST_KNOWN = 4  # checkpoints for which `save` knows what may have changed since


@cache
def _known(process: int) -> dict[str, Any]:
    """The facts that `save` keeps about checkpoints, by URL; the newest comes last."""
    return {}


@cache
def _plans(process: int) -> PlanCache:
    """The plans of `save` in this process, about 1 KB for each array. Fewer plans of `save_async`
    are kept, because those also hold copies."""
    return PlanCache(most=4)
