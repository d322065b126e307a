"""The function save_async: save in the background."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

from unickpt import backends
from unickpt.options import SaveOptions
from unickpt.pending import PendingSave, SaveQueue


def save_async(
    path: backends.Path,
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
    exits. An error in the background is raised by `PendingSave.result`, else by the next call of
    this function, else it makes the program exit with status 1.

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
        UnickptError: the error of an earlier save, if it was not raised before; this save was not
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
    return _queue(os.getpid()).save(
        path,
        tree,
        overwrite=overwrite,
        metadata=lambda: metadata,
        options=SaveOptions.or_default(options),
    )


@cache
def _queue(process: int) -> SaveQueue:
    """The queue of this process; a forked process has its own."""
    return SaveQueue()
