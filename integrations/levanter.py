"""levanter's checkpoints over unickpt: one call before its trainer.

    from unickpt.integrations import levanter
    levanter.install()

Its `Checkpointer`, policies, folders and `metadata.json` stay unchanged; the arrays of a step are
one checkpoint of unickpt, `<step>/unickpt`. docs/integrations/levanter.md lists the differences.
"""

from __future__ import annotations

import functools
import importlib
import logging
import operator
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

import jax

import unickpt
from unickpt import Checkpoint, SaveOptions, errors
from unickpt.extend import (
    PathLike,
    first_few,
    join_names,
    name_component,
    put_nested,
    quoted,
    resolve_path,
    settle_future,
    storage_context,
)

__all__ = [
    "AsyncManager",
    "export",
    "install",
    "tree_deserialize_leaves_tensorstore",
    "tree_serialize_leaves_tensorstore",
]

_log = logging.getLogger("unickpt")
FOLDER = "unickpt"
"""In the folder of a step: the checkpoint."""
_ShapeDtypeStruct: Any = jax.ShapeDtypeStruct
_ABOUT = "metadata.json"
"""levanter writes it last, into the folder of a step."""


def install(*, options: SaveOptions | None = None, cast: bool = False) -> None:
    """From here on, levanter saves into and loads from checkpoints of unickpt.

    Steps that levanter saved itself are loaded as before. Call it before the trainer is made; a
    second call replaces the arguments.

    Arguments:
        options: for all saves.
        cast: whether arrays that are stored in another dtype than the model has are cast; otherwise
            they are an error. levanter itself leaves them in the stored dtype.

    Raises:
        MissingPackage: levanter is not installed, or is older than 1.2.

    Example:
        from unickpt.integrations import levanter
        levanter.install()
        from levanter.main import train_lm
        train_lm.main(config)
    """
    checkpoint, series = _levanter("checkpoint"), _levanter("tensorstore_serialization")
    if not hasattr(checkpoint, "GlobalAsyncCheckpointManager"):
        raise errors.MissingPackage("levanter 1.2 or later must be installed; this one is older")
    original = _originals(series)

    def manager(*_: Any, **__: Any) -> AsyncManager:
        return AsyncManager(options)

    def deserialize(*args: Any, **kwargs: Any) -> Any:
        return tree_deserialize_leaves_tensorstore(*args, **{"cast": cast, **kwargs})

    def serialize(*args: Any, **kwargs: Any) -> None:
        tree_serialize_leaves_tensorstore(*args, **{"options": options, **kwargs})

    for function in (deserialize, serialize):
        function.__dict__["of_levanter"] = original
    for module in (checkpoint, series):
        vars(module).update(
            tree_deserialize_leaves_tensorstore=deserialize,
            tree_serialize_leaves_tensorstore=serialize,
        )
    vars(checkpoint)["GlobalAsyncCheckpointManager"] = manager


class AsyncManager:
    """Saves in the background, as JAX's `GlobalAsyncCheckpointManager` does for levanter.

    Arguments:
        options: for all saves.
    """

    def __init__(self, options: SaveOptions | None = None) -> None:
        self._options = options
        self._pending: Future[None] | None = None

    def save(self, path: str, arrays: Any, committed: Callable[[], None] | None) -> None:
        """Begins a save, after the one before has ended.

        Arguments:
            path: of the step; a checkpoint of unickpt that is in it is replaced.
            arrays: nested dicts.
            committed: called on each process after the commit.

        Raises:
            CheckpointExists: levanter itself saved a checkpoint there.
            UnickptError: as `unickpt.save_async`, also of the save before.
        """
        self.wait_until_finished()
        if _is_step(path) and _at_path(path) is None:
            raise errors.CheckpointExists(
                f"{path} was saved by levanter itself; remove the folder first"
            )
        save = unickpt.save_async(f"{path}/{FOLDER}", arrays, overwrite=True, options=self._options)
        self._pending = ended = Future[None]()

        def finish() -> None:
            save.result()
            if committed is not None:
                committed()

        save.add_done_callback(lambda: settle_future(ended, finish))

    def wait_until_finished(self) -> None:
        """Waits for the save in the background, and for the callback after it.

        Raises:
            UnickptError: it failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def check_for_errors(self) -> None:
        """Raises the error of a save that has failed by now."""
        if self._pending is not None and self._pending.done():
            self.wait_until_finished()


# --- saving --------------------------------------------------------------------------------------


def tree_serialize_leaves_tensorstore(
    checkpoint_dir: Any,
    pytree: Any,
    manager: AsyncManager | None = None,
    *,
    commit_callback: Callable[[], None] | None = None,
    options: SaveOptions | None = None,
) -> None:
    """Saves the arrays of a tree, with levanter's names, in the place of levanter's function.

    Arguments:
        checkpoint_dir: a local path or a URL; the checkpoint is `unickpt` in it, and replaced.
        pytree: of arrays, NamedArrays and numbers; numbers become arrays, all else is left out.
        manager: saves in the background; None waits for the commit.
        commit_callback: called after the commit.
        options: for a save without `manager`.

    Raises:
        UnickptError: as `unickpt.save_async`.
    """
    named = _named_leaves(pytree)
    arrays = {name: _as_array(leaf) for name, leaf in named.items()}
    present = {name: value for name, value in arrays.items() if hasattr(value, "dtype")}
    used = AsyncManager(options) if manager is None else manager
    if not isinstance(used, AsyncManager):
        raise TypeError(
            f"manager= is a {type(used).__name__}; call levanter.install() before the Checkpointer "
            "is created, or pass an AsyncManager"
        )
    used.save(str(checkpoint_dir), nested(present), commit_callback)
    if manager is None:
        used.wait_until_finished()


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts of values by names with dots.

    Raises:
        UnsupportedLeaf: two have the same name.

    Example:
        >>> nested({"model.w": 1, "model.layers.0": 2, "step": 3})
        {'model': {'w': 1, 'layers': {'0': 2}}, 'step': 3}
    """
    root: dict[str, Any] = {}
    for name, value in flat.items():
        if not put_nested(root, name.split("."), value):
            raise errors.UnsupportedLeaf(f"two leaves of the tree have the name {quoted(name)}")
    return root


def _named_leaves(pytree: Any) -> dict[str, Any]:
    """The leaves of a tree by levanter's names; those of NamedArrays are their arrays."""
    is_named = importlib.import_module("haliax.util").is_named_array
    names = _levanter("utils.jax_utils").leaf_key_paths(pytree, is_leaf=is_named)
    trees = (jax.tree.leaves(tree, is_leaf=is_named) for tree in (names, pytree))
    return {n: leaf.array if is_named(leaf) else leaf for n, leaf in zip(*trees, strict=True)}


def _as_array(leaf: Any) -> Any:
    return jax.numpy.array(leaf) if isinstance(leaf, bool | int | float | complex) else leaf


# --- loading -------------------------------------------------------------------------------------


def tree_deserialize_leaves_tensorstore(
    checkpoint_dir: Any,
    pytree: Any,
    axis_mapping: Any = None,
    mesh: Any = None,
    manager: Any = None,
    *,
    allow_missing: bool = False,
    cast: bool = False,
) -> Any:
    """Loads the arrays of a tree, in place of levanter's function, which still loads levanter's own
    checkpoints.

    Arguments:
        checkpoint_dir: as it was saved; or `<checkpoint_dir>/model` for a part.
        pytree: arrays, NamedArrays or `ShapeDtypeStruct`.
        axis_mapping, mesh: how NamedArrays are sharded.
        manager: of no effect.
        allow_missing: leave leaves that the checkpoint lacks unchanged, with a warning.
        cast: cast arrays that are stored in another dtype.

    Raises:
        LoadMismatch: the stored arrays do not fit; as `unickpt.load`.
    """
    series = _levanter("tensorstore_serialization")
    opened = _opened(str(checkpoint_dir))
    if opened is None:
        return _originals(series)[0](
            checkpoint_dir, pytree, axis_mapping, mesh, allow_missing=allow_missing
        )
    stored, prefix = opened
    haliax = importlib.import_module("haliax.util")
    is_none_or_named = series._is_named_or_none
    leaves, structure = jax.tree.flatten(pytree, is_leaf=is_none_or_named)
    names = _names(pytree, is_none_or_named)
    targets = dict[str, Any]()
    for name, leaf in zip(names, leaves, strict=True):
        sharding = None if leaf is None else series._sharding_from_leaf(leaf, axis_mapping, mesh)
        if sharding is not None:
            array = _as_array(leaf.array if haliax.is_named_array(leaf) else leaf)
            targets[name] = _ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    missing = _missing(stored, prefix, targets)
    if missing and allow_missing:
        _log.warning("%s lacks %s; these stay as they are", stored.location, first_few(missing))
        targets = {name: target for name, target in targets.items() if name not in missing}
    under = f"{prefix}/" if prefix else ""
    like: Any = nested(targets)
    loaded: Any = {}
    if targets:
        loaded = unickpt.load(stored, like, cast=cast, unexpected="skip", under=under)

    def filled(name: str, leaf: Any) -> Any:
        if name not in targets:
            return leaf
        array = functools.reduce(operator.getitem, name.split("."), loaded)
        return type(leaf)(array, leaf.axes) if haliax.is_named_array(leaf) else array

    pairs = zip(names, leaves, strict=True)
    return jax.tree.unflatten(structure, [filled(name, leaf) for name, leaf in pairs])


def _names(pytree: Any, is_leaf: Callable[[Any], bool]) -> list[str]:
    names = _levanter("utils.jax_utils").leaf_key_paths(pytree, is_leaf=is_leaf)
    return [str(name) for name in jax.tree.leaves(names, is_leaf=lambda x: x is None)]


def _missing(stored: Checkpoint, prefix: str, targets: Mapping[str, Any]) -> list[str]:
    """The names that a checkpoint lacks."""
    parts = {name: "/".join(map(name_component, name.split("."))) for name in targets}
    return [name for name, part in parts.items() if join_names(prefix, part) not in stored]


def _opened(path: str) -> tuple[Checkpoint, str] | None:
    """The checkpoint of unickpt in a folder or one above it, and the name of the part in it; None
    if levanter saved it."""
    above, parts = path.rstrip("/"), list[str]()
    while above and not above.endswith((":", "/")):
        checkpoint = _at_path(above)
        if checkpoint is not None:
            return checkpoint, "/".join(name_component(part) for part in parts)
        if _is_step(above):
            return None
        above, _, last = above.rpartition("/")
        parts.insert(0, last)
    return None


def _at_path(path: str) -> Checkpoint | None:
    """The checkpoint of unickpt in the folder of a step, if there is one."""
    try:
        return unickpt.open(f"{path}/{FOLDER}")
    except errors.CheckpointNotFound:
        return None


def _is_step(path: str) -> bool:
    """Whether a folder is a step, of levanter or of unickpt."""
    return resolve_path(path).has_file(_ABOUT, storage_context())


# --- the way back --------------------------------------------------------------------------------


def export(path: PathLike, destination: PathLike) -> None:
    """Writes a step as levanter itself saves it, with its `metadata.json`: levanter resumes from it
    without unickpt.

    Arguments:
        path: of a step that was saved here.
        destination: of the new one, such as `<run>/step-300`.

    Raises:
        CheckpointNotFound: there is no checkpoint of unickpt.
        CheckpointExists: there is a checkpoint at the destination.
        ValueError: several processes call it.
    """
    if jax.process_count() > 1:
        raise ValueError("levanter.export runs in one process, which holds all arrays")
    stored = _at_path(str(path))
    if stored is None:
        raise errors.CheckpointNotFound(f"there is no checkpoint of unickpt at {path}")
    if _is_step(str(destination)) or _at_path(str(destination)) is not None:
        raise errors.CheckpointExists(f"there is a checkpoint at {destination}")
    series = _levanter("tensorstore_serialization")
    arrays = jax.tree.map(_same, unickpt.load(stored))
    _originals(series)[1](str(destination), arrays)
    checkpoint = _levanter("checkpoint")
    about = checkpoint._load_metadata(str(path))
    files, _ = checkpoint._get_fs_and_plain_path(str(destination))
    checkpoint._save_metadata(str(destination), files, about["step"], about["is_temporary"])


def _same(value: Any) -> Any:
    """A NumPy array as one of JAX, in the same dtype."""
    array = jax.numpy.asarray(value)
    if array.dtype != value.dtype:
        raise ValueError(f"JAX makes {array.dtype} of {value.dtype}; set jax_enable_x64")
    return array


def _originals(series: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """levanter's own functions that load and save."""
    now = series.tree_deserialize_leaves_tensorstore
    functions: tuple[Callable[..., Any], Callable[..., Any]] = getattr(
        now, "of_levanter", (now, series.tree_serialize_leaves_tensorstore)
    )
    return functions


def _levanter(name: str) -> Any:
    try:
        return importlib.import_module(f"levanter.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or not f"levanter.{name}".startswith(error.name):
            raise
        raise errors.MissingPackage(f"there is no levanter.{name}: install levanter 1.2") from error
