"""`orbax.checkpoint.v1` over unickpt: change one import.

from unickpt.integrations.orbax import v1 as ocp  # instead of: from orbax.checkpoint import v1
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from unickpt.integrations.orbax import items, training
from unickpt.integrations.orbax.checkpointable import UnickptCheckpointable
from unickpt.integrations.orbax.items import PLACEHOLDER
from unickpt.integrations.orbax.run import ORBAX, Info
from unickpt.integrations.orbax.stored import item_of, items_of
from unickpt.integrations.orbax.v1_checkpointer import CheckpointMetadata, SaveResponse
from unickpt.integrations.orbax.values import STATE, described_values, restored_value
from unickpt.loading import loader
from unickpt.reading.checkpoint import open
from unickpt.saving import saver
from unickpt.storage import paths

__all__ = [
    "PLACEHOLDER",
    "CheckpointMetadata",
    "UnickptCheckpointable",
    "load",
    "load_checkpointables",
    "load_pytree",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
]


def save(path: paths.PathLike, state: Any, **options: Any) -> None:
    """Saves a tree, as `orbax.checkpoint.v1.save`.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        state: the tree.
        checkpointable_name, overwrite, custom_metadata: as for `save_async`.

    Example:
        >>> import numpy as np
        >>> from unickpt.integrations.orbax import v1 as ocp
        >>> ocp.save("memory://orbax/one", {"w": np.ones(2), "step": 3})
        >>> ocp.load("memory://orbax/one")
        {'w': array([1., 1.]), 'step': 3}
    """
    save_async(path, state, **options).result()


def save_async(
    path: paths.PathLike,
    state: Any,
    *,
    checkpointable_name: str = STATE,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> SaveResponse:
    """Saves a tree in the background.

    Arguments:
        checkpointable_name: its name among others.
        overwrite: replace a checkpoint at the path, atomically.
        custom_metadata: JSON.

    Raises:
        UnickptError: as `unickpt.save_async`.
    """
    return save_checkpointables_async(
        path, {checkpointable_name: state}, overwrite=overwrite, custom_metadata=custom_metadata
    )


def save_checkpointables(
    path: paths.PathLike, checkpointables: Mapping[str, Any], **options: Any
) -> None:
    """Saves several things by name, as `save`."""
    save_checkpointables_async(path, checkpointables, **options).result()


def save_checkpointables_async(
    path: paths.PathLike,
    checkpointables: Mapping[str, Any],
    *,
    overwrite: bool = False,
    custom_metadata: Any = None,
) -> SaveResponse:
    """Saves several things by name in the background, as `save_async`."""
    tree, how = described_values(checkpointables)
    metadata = {
        "custom_metadata": items.plain_json("custom_metadata", custom_metadata or {}),
        ORBAX: how,
    }
    pending = saver.save_async(path, tree, overwrite=overwrite, metadata=metadata)
    return SaveResponse(pending)


def load(
    path: paths.PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = None
) -> Any:
    """Loads a tree that `save` saved, here or in Orbax.

    Arguments:
        path: of the checkpoint.
        abstract_state: a tree of `jax.ShapeDtypeStruct` with shardings, of arrays, or of metadata;
            None loads NumPy arrays.
        checkpointable_name: which of several; by default the only one, or "state".

    Raises:
        UnickptError: as `unickpt.load`.
    """
    if checkpointable_name is None:
        info = _info(path)
        names = list(items_of(info, open(path), STATE))
        checkpointable_name = names[0] if len(names) == 1 else STATE
    return load_checkpointables(path, {checkpointable_name: abstract_state})[checkpointable_name]


def load_checkpointables(
    path: paths.PathLike, abstract_checkpointables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Loads several things by name, as `load`; None loads all."""
    info, found = _info(path), open(path)
    wanted = abstract_checkpointables
    if wanted is None:
        wanted = dict.fromkeys(items_of(info, found, STATE))
    read = partial(loader.load, path)
    return {
        name: restored_value(item_of(info, found, name, STATE, read), abstract)
        for name, abstract in wanted.items()
    }


def _info(path: paths.PathLike) -> Info:
    return Info(0, str(path), foreign=open(path).reader.format == ORBAX)


save_pytree = save
save_pytree_async = save_async
load_pytree = load
