"""What trainers use of `orbax.checkpoint.checkpoint_utils`."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from unickpt.integrations.orbax import names
from unickpt.integrations.orbax.args import ArrayRestoreArgs, RestoreArgs
from unickpt.integrations.orbax.described import described
from unickpt.integrations.orbax.steps import steps_below
from unickpt.storage import paths


def construct_restore_args(target: Any, sharding_tree: Any = None) -> Any:
    """A tree of restore arguments for a tree of arrays, concrete or abstract.

    Arguments:
        target: the tree.
        sharding_tree: shardings, in a tree like it; by default those of its arrays.

    Example:
        >>> import numpy as np
        >>> construct_restore_args({"w": np.zeros(2)})["w"].restore_type
        <class 'numpy.ndarray'>
    """
    if sharding_tree is None:
        return jax.tree.map(lambda leaf: _restore_args(leaf, None), target)
    return jax.tree.map(_restore_args, target, sharding_tree)


def _restore_args(leaf: Any, sharding: Any) -> RestoreArgs:
    leaf = described(leaf)
    if isinstance(leaf, np.ndarray):
        return RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
    if not hasattr(leaf, "shape"):
        return RestoreArgs(restore_type=type(leaf))
    return ArrayRestoreArgs(
        restore_type=jax.Array,
        dtype=leaf.dtype,
        sharding=getattr(leaf, "sharding", None) if sharding is None else sharding,
        global_shape=tuple(leaf.shape),
        shape=tuple(leaf.shape),
    )


@contextmanager
def wait_for_new_checkpoint(
    checkpoint_dir: paths.PathLike,
    *,
    until_step: int | None = None,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **_: Any,
) -> Iterator[int]:
    """Waits for a step that is committed, saved here or by Orbax; -1 after a timeout.

    Arguments:
        checkpoint_dir: of the run.
        until_step: wait for this step or a later one.
        seconds_to_sleep: between looking.
        timeout: how many seconds to wait; None for ever.
        timeout_fn: called after the timeout; waits on, unless it returns True.
        _: of Orbax's names of folders and snapshots; of no effect.
    """
    least = 0 if until_step is None else until_step
    begun = time.monotonic()
    while (newest := max(steps_below(checkpoint_dir), default=-1)) < least:
        if timeout is not None and time.monotonic() - begun > timeout:
            if timeout_fn is None or timeout_fn():
                newest = -1
                break
            begun = time.monotonic()
        time.sleep(seconds_to_sleep)
    yield newest


def checkpoints_iterator(
    checkpoint_dir: paths.PathLike,
    *,
    min_interval_secs: float = 0,
    seconds_to_sleep: float = 1,
    timeout: float | None = None,
    timeout_fn: Callable[[], bool] | None = None,
    **more: Any,
) -> Iterator[int]:
    """The newest step, as soon as it is committed, then the newest after that, and so on.

    Steps may be skipped if they come faster than they are asked for. What a training run no longer
    keeps may be gone when it is read: let it keep some.

    Arguments:
        min_interval_secs: the least time between two steps that are returned.
        checkpoint_dir, seconds_to_sleep, timeout, timeout_fn, more: as for
            `wait_for_new_checkpoint`; it ends after a timeout.

    Example:
        >>> import unickpt.integrations.orbax as ocp
        >>> with ocp.CheckpointManager("memory://orbax/watched") as manager:
        ...     _ = manager.save(7, args=ocp.args.StandardSave({"n": 1}))
        >>> list(checkpoints_iterator("memory://orbax/watched", timeout=0, seconds_to_sleep=0.01))
        [7]
    """
    step = None
    while True:
        with wait_for_new_checkpoint(
            checkpoint_dir,
            until_step=None if step is None else step + 1,
            seconds_to_sleep=seconds_to_sleep,
            timeout=timeout,
            timeout_fn=timeout_fn,
            **more,
        ) as newest:
            if newest == -1:
                return
            begun, step = time.monotonic(), newest
            yield step
        time.sleep(max(0, begun + min_interval_secs - time.monotonic()))


def __getattr__(name: str) -> Any:
    return names.of_orbax("checkpoint_utils", name)
