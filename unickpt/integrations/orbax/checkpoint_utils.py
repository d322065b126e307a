"""What trainers use of `orbax.checkpoint.checkpoint_utils`."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from unickpt.integrations.orbax.args import ArrayRestoreArgs, RestoreArgs
from unickpt.integrations.orbax.described import described


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
