"""The verb save_async: save, while the caller goes on."""

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
    `PendingSave.wait_staged` tells when it is. Saves are written in the order in which they were
    asked for, at most two are in flight, and a further one waits. A program that ends waits for
    them. What goes wrong in the background is raised by `PendingSave.result`, else by the next
    call of this function, else it makes the program exit with status 1.

    Arguments:
        path, tree, overwrite, metadata: as for `save`.
        options: see `SaveOptions`, above all its `staging` and `budget_bytes`.

    Returns:
        The save, to wait for.

    Raises:
        UnsupportedLeaf: something in the tree cannot be stored; nothing was begun.
        CheckpointExists: the path is taken. Where that costs a request over a network, it is found
            in the background.
        InvalidPath: the path names no storage.
        SaveTimeout: process 0 does not call this too.
        UnickptError: what made an earlier call fail, if nobody has asked for that yet; this save
            was not begun.

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
        options=options or SaveOptions(),
    )


@cache
def _queue(process: int) -> SaveQueue:
    """The queue of this process; one that forked has its own."""
    return SaveQueue()
