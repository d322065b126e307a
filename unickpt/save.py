"""The function save: describe, plan, stage, write, commit, one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt import backends
from unickpt.options import SaveOptions, SaveReport
from unickpt.saving import Saving, tell
from unickpt.supply import Direct


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
    with the same arguments. Each writes its own part, and the checkpoint appears atomically when
    the last one is done, or not at all.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) at which no checkpoint exists yet.
        tree: any nesting of containers of JAX arrays, torch tensors and DTensors, NumPy arrays,
            plain values, `PerProcess`, `LocalFragments` and objects with `state_dict`.
        overwrite: replace a checkpoint at `path`; it stays readable until the new one is committed.
        metadata: anything that JSON can hold; `unickpt.open(path).metadata` returns it.
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
    options = SaveOptions.or_default(options)
    saving = Saving(path, overwrite, options)
    saving.describe(tree, metadata)
    saving.plan()
    report = saving.run(Direct(options.budget_bytes))
    tell(options, report)
    return report
