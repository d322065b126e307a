"""`orbax.checkpoint.v1` over unickpt: change one import.

from unickpt.integrations.orbax import v1 as ocp  # instead of: from orbax.checkpoint import v1
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unickpt.errors import CheckpointNotFound
from unickpt.integrations.orbax import items, training, v1_deletion, v1_names
from unickpt.integrations.orbax import v1_errors as errors
from unickpt.integrations.orbax.checkpointable import UnickptCheckpointable
from unickpt.integrations.orbax.items import PLACEHOLDER, StoredItem
from unickpt.integrations.orbax.run import ORBAX, Info
from unickpt.integrations.orbax.run import custom_metadata as custom_metadata_of
from unickpt.integrations.orbax.stored import as_path, item_of, items_of, saved_with
from unickpt.integrations.orbax.v1_context import Settings
from unickpt.integrations.orbax.v1_responses import (
    CheckpointMetadata,
    Response,
    SaveResponse,
    nanoseconds,
    only_name,
)
from unickpt.integrations.orbax.values import (
    STATE,
    described_values,
    restored_value,
    value_metadata,
    without_metadata,
)
from unickpt.loading import loader
from unickpt.reading.checkpoint import Checkpoint, open
from unickpt.saving import saver
from unickpt.storage import paths

__all__ = [
    "PLACEHOLDER",
    "CheckpointMetadata",
    "UnickptCheckpointable",
    "checkpointables_metadata",
    "delete",
    "delete_async",
    "errors",
    "is_orbax_checkpoint",
    "load",
    "load_async",
    "load_checkpointables",
    "load_checkpointables_async",
    "load_pytree",
    "load_pytree_async",
    "metadata",
    "pytree_metadata",
    "save",
    "save_async",
    "save_checkpointables",
    "save_checkpointables_async",
    "save_pytree",
    "save_pytree_async",
    "training",
]
_AUTO = "AUTO"  # Orbax's way to say that no name was given


def __getattr__(name: str) -> Any:
    """Names that are Orbax's own, such as `Context` and `options`."""
    return v1_names.resolve("", name, __all__)


def __dir__() -> list[str]:
    return sorted({*__all__, *v1_names.OWN})


# --- saving --------------------------------------------------------------------------------------


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
    settings = Settings.current()
    options = settings.save_options()
    tree, how = described_values(checkpointables, settings)
    metadata = {
        "custom_metadata": items.plain_json("custom_metadata", custom_metadata or {}),
        ORBAX: how,
    }
    pending = saver.save_async(path, tree, overwrite=overwrite, metadata=metadata, options=options)
    return SaveResponse(pending, on_commit=settings.on_commit)


# --- loading -------------------------------------------------------------------------------------


def load(
    path: paths.PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = _AUTO
) -> Any:
    """Loads a tree that `save` saved, here or in Orbax.

    Arguments:
        path: of the checkpoint.
        abstract_state: a tree of `jax.ShapeDtypeStruct` with shardings, of arrays, or of metadata;
            None loads what was saved, onto devices as it was on.
        checkpointable_name: which of several; by default the only one, or "state".

    Raises:
        InvalidLayoutError: there is no checkpoint.
        UnickptError: as `unickpt.load`.
    """
    info, found = _opened(path)
    name = _named(info, found, checkpointable_name)
    return _load(info, found, {name: without_metadata(abstract_state)})[name]


def load_async(
    path: paths.PathLike, abstract_state: Any = None, *, checkpointable_name: str | None = _AUTO
) -> Response[Any]:
    """Loads a tree on a thread, as `load`."""
    which = {"checkpointable_name": checkpointable_name}
    return Response(functools.partial(load, path, abstract_state, **which))


def load_checkpointables(
    path: paths.PathLike, abstract_checkpointables: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Loads several things by name, as `load`; None loads all."""
    info, found = _opened(path)
    wanted = without_metadata(abstract_checkpointables)
    if wanted is None:
        wanted = dict.fromkeys(items_of(info, found, STATE))
    return _load(info, found, wanted)


def load_checkpointables_async(
    path: paths.PathLike, abstract_checkpointables: Mapping[str, Any] | None = None
) -> Response[dict[str, Any]]:
    """Loads several things by name on a thread, as `load_checkpointables`."""
    return Response(functools.partial(load_checkpointables, path, abstract_checkpointables))


def stored_items(path: paths.PathLike) -> dict[str, StoredItem]:
    """What a checkpoint has, by name; not loaded."""
    info, found = _opened(path)
    read = functools.partial(_read, info, Settings.current())
    return {name: item_of(info, found, name, STATE, read) for name in items_of(info, found, STATE)}


def _load(info: Info, found: Checkpoint, wanted: Mapping[str, Any]) -> dict[str, Any]:
    settings = Settings.current()
    read = functools.partial(_read, info, settings)

    def restored(name: str, abstract: Any) -> Any:
        item = item_of(info, found, name, STATE, read)
        return restored_value(item, abstract, settings, saved_with(info, found, name))

    return {name: restored(name, abstract) for name, abstract in wanted.items()}


def _read(info: Info, settings: Settings, like: Any, *, as_stored: bool, **arguments: Any) -> Any:
    """As `StoredItem.load`; there are no rules."""
    return loader.load(info.path, like, options=settings.load_options(), **arguments)


# --- what there is, and removing it --------------------------------------------------------------


def metadata(
    path: paths.PathLike, checkpointable_name: str | None = _AUTO
) -> CheckpointMetadata[Any]:
    """What is stored in a checkpoint, as a tree; arguments as for `load`."""
    info, found = _opened(path)
    name = _named(info, found, checkpointable_name)
    described = _described(info, found, [name])
    return replace(described, metadata=described.metadata[name])


def checkpointables_metadata(path: paths.PathLike) -> CheckpointMetadata[Any]:
    """What is stored in a checkpoint, as trees by name."""
    info, found = _opened(path)
    return _described(info, found, list(items_of(info, found, STATE)))


def is_orbax_checkpoint(path: paths.PathLike) -> bool:
    """Whether a checkpoint is at a path that `load` loads: one of unickpt, or of Orbax.

    Example:
        >>> from unickpt.integrations.orbax import v1 as ocp
        >>> ocp.is_orbax_checkpoint("memory://orbax/nothing")
        False
    """
    try:
        return open(path).reader.format in ("unickpt", ORBAX)
    except CheckpointNotFound:
        return False


def delete(
    path: paths.PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> bool:
    """Removes a checkpoint, of unickpt, or by Orbax one that it wrote.

    Arguments:
        path: of the checkpoint.
        checkpointable_name: only what has this name; only of checkpoints that Orbax wrote.
        missing_ok: return False if there is none.

    Raises:
        InvalidLayoutError: there is no checkpoint.
        CheckpointExists: others have chunks in it.
        ValueError: a part of a checkpoint of unickpt cannot be removed.
    """
    Settings.current().check_deletion()
    try:
        _, found = _opened(path)
    except errors.InvalidLayoutError:
        if not missing_ok or paths.resolve(path).exists():
            raise
        return False
    v1_deletion.remove(path, found, checkpointable_name)
    return True


def delete_async(
    path: paths.PathLike, *, checkpointable_name: str | None = None, missing_ok: bool = False
) -> Response[bool]:
    """Removes a checkpoint on a thread, as `delete`."""
    which = {"checkpointable_name": checkpointable_name, "missing_ok": missing_ok}
    return Response(functools.partial(delete, path, **which))  # type: ignore[arg-type]


def _opened(path: paths.PathLike) -> tuple[Info, Checkpoint]:
    try:
        found = open(path)
    except CheckpointNotFound as error:
        raise errors.InvalidLayoutError(str(error)) from error
    return Info(0, str(path), foreign=found.reader.format == ORBAX), found


def _named(info: Info, found: Checkpoint, name: str | None) -> str:
    """The name of the tree to load, if the caller gave none."""
    if name is not None and name != _AUTO:
        return name
    return only_name(items_of(info, found, STATE), info.path)


def _described(info: Info, found: Checkpoint, names: list[str]) -> CheckpointMetadata[Any]:
    settings = Settings.current()

    def described(name: str) -> Any:
        item = item_of(info, found, name, STATE, functools.partial(_read, info, settings))
        return value_metadata(item, settings, saved_with(info, found, name))

    is_ours = found.reader.format in ("unickpt", ORBAX)
    custom = custom_metadata_of(info, found) if is_ours else dict(found.metadata)
    when = nanoseconds(info.time) if found.index.created else None
    return CheckpointMetadata(
        as_path(info.path),
        metadata={name: described(name) for name in names},
        init_timestamp_nsecs=when,
        commit_timestamp_nsecs=when,
        custom_metadata=custom,
    )


# Orbax's names of before.
save_pytree = save
save_pytree_async = save_async
load_pytree = load
load_pytree_async = load_async
pytree_metadata = metadata
