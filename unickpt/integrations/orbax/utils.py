"""`orbax.checkpoint.utils`: what looks for steps finds ours as well; the rest is Orbax's own."""

from __future__ import annotations

from typing import Any

from unickpt.errors import CheckpointNotFound
from unickpt.integrations.orbax import names
from unickpt.integrations.orbax.steps import steps_below
from unickpt.integrations.orbax.stored import as_path
from unickpt.reading.checkpoint import open
from unickpt.storage import paths

_INSTEAD = {"tmp_checkpoints": "unickpt.Checkpointer, which removes what killed jobs left"}


def checkpoint_steps(checkpoint_dir: paths.PathLike, *_: Any, **__: Any) -> list[int]:
    """The committed steps of a run, saved here or by Orbax, ascending.

    Example:
        >>> import unickpt.integrations.orbax as ocp
        >>> with ocp.CheckpointManager("memory://orbax/listed") as manager:
        ...     for step in (1, 2):
        ...         _ = manager.save(step, args=ocp.args.StandardSave({"n": step}))
        >>> ocp.utils.checkpoint_steps("memory://orbax/listed")
        [1, 2]
    """
    return sorted(steps_below(checkpoint_dir))


def checkpoint_steps_paths(checkpoint_dir: paths.PathLike) -> list[Any]:
    """The folders of the committed steps of a run, in ascending order of the steps."""
    found = steps_below(checkpoint_dir)
    return [as_path(found[step]) for step in sorted(found)]


def any_checkpoint_step(checkpoint_dir: paths.PathLike) -> int | None:
    """A committed step of a run; None if there is none."""
    return next(iter(checkpoint_steps(checkpoint_dir)), None)


def is_checkpoint_finalized(path: paths.PathLike) -> bool:
    """Whether a checkpoint is committed, saved here or by Orbax.

    Raises:
        ValueError: there is nothing at the path.
    """
    if not paths.resolve(path).exists():
        raise ValueError(f"there is nothing at {path}")
    try:
        open(path)
    except CheckpointNotFound:
        return False
    return True


def is_tmp_checkpoint(path: paths.PathLike) -> bool:
    """Whether a checkpoint is not committed."""
    return not is_checkpoint_finalized(path)


def __getattr__(name: str) -> Any:
    return names.of_orbax("utils", name, _INSTEAD)
