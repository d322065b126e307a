"""Checkpoints of Equinox models, and of all pytrees with arrays and other leaves.

    from unickpt.integrations import equinox as checkpoint

    checkpoint.save("runs/a/model", model)
    model = checkpoint.load("runs/a/model", eqx.filter_eval_shape(make_model, key))

The checkpoint holds the arrays, under the names of the fields, and `unickpt.load` reads it, too.
Settings are noted in its metadata, and compared by `load`: models with another number of heads can
have the same shapes. Functions stay those of the program.
"""

from __future__ import annotations

import ast
import dataclasses
import enum
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np

import unickpt
from unickpt import Checkpoint, LoadOptions, SaveOptions
from unickpt.errors import LoadMismatch
from unickpt.extend import Key, PathLike, Source, first_few, name_component, reading_checkpoint
from unickpt.types import PendingSave, SaveReport

__all__ = ["arrays", "load", "metadata", "save", "save_async"]

_KEY = "equinox"
_PLAIN = (bool, int, float, complex, str)


def save(
    path: PathLike, model: Any, *, overwrite: bool = False, options: SaveOptions | None = None
) -> SaveReport:
    """Saves the arrays of a model, and notes its settings.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).
        model: an `eqx.Module`, or any pytree.
        overwrite: replace a checkpoint that exists, atomically.
        options: see `SaveOptions`.

    Raises:
        UnickptError: as `unickpt.save`.

    Example:
        >>> import equinox as eqx, jax
        >>> from unickpt.integrations import equinox as checkpoint
        >>> model = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
        >>> _ = checkpoint.save("memory://equinox/docs", model)
        >>> bool(eqx.tree_equal(checkpoint.load("memory://equinox/docs", model), model))
        True
    """
    return unickpt.save(
        path, arrays(model), overwrite=overwrite, metadata=metadata(model), options=options
    )


def save_async(
    path: PathLike, model: Any, *, overwrite: bool = False, options: SaveOptions | None = None
) -> PendingSave:
    """As `save`, in the background; see `unickpt.save_async`."""
    return unickpt.save_async(
        path, arrays(model), overwrite=overwrite, metadata=metadata(model), options=options
    )


def load(
    path: Source,
    model: Any,
    *,
    shardings: Any = None,
    static: Literal["error", "keep", "stored"] = "error",
    cast: bool = False,
    options: LoadOptions | None = None,
) -> Any:
    """Loads a model; the given one stays unchanged.

    Arguments:
        path: a checkpoint, or the result of `unickpt.open`.
        model: a model, or the result of `eqx.filter_eval_shape`. Arrays get the shardings that
            they have there.
        shardings: instead: a sharding for all arrays, or a pytree that has one for each array, such
            as `jax.tree.map(choose, eqx.filter(model, eqx.is_array))`; None leaves one unchanged.
        static: the action if a setting (a static field, or a number, text or flag in the tree) is
            not the noted one: "error"; or "keep" that of the given model; or "stored", which gives
            numbers, texts and flags in the tree their noted values, as
            `eqx.tree_deserialise_leaves` does, and still compares static fields. Functions and
            objects of unknown classes are always those of the given model.
        cast: as for `unickpt.load`.
        options: see `LoadOptions`.

    Returns:
        A model with the arrays of the checkpoint and, but for `static="stored"`, everything else of
        the given model.

    Raises:
        LoadMismatch: arrays or settings differ; lists all.
        UnickptError: as `unickpt.load`.
    """
    if static not in ("error", "keep", "stored"):
        raise ValueError(f"static={static!r} must be 'error', 'keep' or 'stored'")
    targets, other_leaves = eqx.partition(model, _is_saved)
    targets = jax.tree.map(_new, targets)
    if shardings is not None:
        targets = _sharded(targets, shardings)

    def read(stored: Checkpoint) -> Any:
        leaves = _with_noted(stored, other_leaves) if static == "stored" else other_leaves
        if static != "keep":
            _compare(stored, eqx.combine(targets, leaves))
        return eqx.combine(unickpt.load(stored, targets, cast=cast, options=options), leaves)

    return read(path) if isinstance(path, Checkpoint) else reading_checkpoint(path, read)


def arrays(model: Any) -> Any:
    """The arrays of a model, as `save` stores them: for `Checkpointer.save`."""
    return eqx.filter(model, _is_saved)


def metadata(model: Any) -> dict[str, Any]:
    """The settings of a model, as `save` notes them: for `Checkpointer.save(metadata=)`.

    Example:
        >>> import equinox as eqx, jax
        >>> found = metadata(eqx.nn.Linear(2, 3, key=jax.random.key(0)))
        >>> found["equinox"]["use_bias"]
        'True'
    """
    return {_KEY: dict(_settings(model, ()))}


def _is_saved(leaf: Any) -> bool:
    return eqx.is_array(leaf) or isinstance(leaf, np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _new(leaf: Any) -> Any:
    """The target to load into, so that the given leaf is not changed."""
    return np.empty_like(leaf) if isinstance(leaf, np.ndarray) else leaf


def _sharded(targets: Any, shardings: Any) -> Any:
    if isinstance(shardings, jax.sharding.Sharding):
        common_sharding = shardings
        shardings = jax.tree.map(lambda _: common_sharding, targets)

    def abstract(sharding: Any, leaf: Any) -> Any:
        if sharding is None or leaf is None:
            return leaf
        return jax.ShapeDtypeStruct(  # type: ignore[no-untyped-call]
            leaf.shape, leaf.dtype, sharding=sharding
        )

    def is_end(leaf: Any) -> bool:
        return leaf is None or isinstance(leaf, jax.sharding.Sharding)

    return jax.tree.map(abstract, shardings, targets, is_leaf=is_end)


def _settings(part: Any, path: tuple[Key, ...]) -> Iterator[tuple[str, str]]:
    """Names and texts of all settings of a part of a model."""
    if isinstance(part, eqx.Module):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name, None)
            if field.metadata.get("static", False):
                yield from _noted(value, (*path, field.name))
            else:
                yield from _settings(value, (*path, field.name))
    elif isinstance(part, dict):
        for key, value in part.items():
            yield from _settings(value, (*path, key if isinstance(key, int) else str(key)))
    elif isinstance(part, list | tuple):
        for number, value in enumerate(part):
            yield from _settings(value, (*path, number))
    elif part is not None and not _is_saved(part):
        yield from _noted(part, path)


def _noted(value: Any, path: tuple[Key, ...]) -> Iterator[tuple[str, str]]:
    text = _text(value)
    if text is not None:
        yield "/".join(map(name_component, path)), text


def _text(value: Any) -> str | None:
    """A text that is equal for equal settings; None for functions and unknown objects."""
    dtype = value if isinstance(value, np.dtype) else getattr(value, "dtype", None)
    if value is None or type(value) in _PLAIN or isinstance(value, np.generic):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type) and issubclass(value, np.generic):
        dtype = np.dtype(value)
    if isinstance(dtype, np.dtype) and isinstance(value, np.dtype | type):  # such as jnp.bfloat16
        return str(dtype)
    return _text_of_parts(value)


def _text_of_parts(value: Any) -> str | None:
    """The text of a container of settings, or of a dataclass of them."""
    if type(value) in (list, tuple):
        return repr(type(value)(map(_Shown, value)))
    if isinstance(value, dict):
        return f"{{{', '.join(sorted(f'{_Shown(k)!r}: {_Shown(v)!r}' for k, v in value.items()))}}}"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(repr(_Shown(member)) for member in value))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        texts = [f"{name}={_Shown(getattr(value, name, None))!r}" for name in names]
        return f"{type(value).__name__}({', '.join(texts)})"
    return None


class _Shown:
    """A value as a part of a text; one without a text is not compared."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __repr__(self) -> str:
        return _text(self._value) or "..."


def _compare(stored: Checkpoint, model: Any) -> None:
    noted, requested = stored.metadata.get(_KEY), metadata(model)[_KEY]
    if not isinstance(noted, dict):
        return  # was not saved by this module
    differences = [
        f"{name}: stored {noted.get(name, 'nothing')}, requested {requested.get(name, 'nothing')}"
        for name in sorted(noted.keys() | requested.keys())
        if noted.get(name) != requested.get(name)
    ]
    if differences:
        raise LoadMismatch(
            f"{stored.url}: settings of the model differ: {first_few(differences)}. Build the "
            "model as it was saved; or pass static='stored' to take the numbers, texts and flags "
            "of its tree from the checkpoint, or static='keep' to load the arrays into this one"
        )


def _with_noted(stored: Checkpoint, other_leaves: Any) -> Any:
    """The leaves that are not arrays, with the noted values of numbers, texts and flags in the
    tree, if they are of the same type."""
    noted = stored.metadata.get(_KEY)
    if not isinstance(noted, dict):
        return other_leaves  # was not saved by this module

    def value(path: tuple[Any, ...], leaf: Any) -> Any:
        text = noted.get("/".join(name_component(_key(entry)) for entry in path))
        if type(leaf) not in _PLAIN or not isinstance(text, str):
            return leaf
        noted_value = _value(text)
        return noted_value if type(noted_value) is type(leaf) else leaf

    return jax.tree_util.tree_map_with_path(value, other_leaves)


def _key(entry: Any) -> Key:
    """The key of an entry of one of JAX's paths."""
    key = getattr(entry, "name", getattr(entry, "idx", getattr(entry, "key", None)))
    return key if isinstance(key, int) else str(key)


def _value(text: str) -> Any:
    """The value that `_text` wrote; None if it is of another kind."""
    for read in (ast.literal_eval, float, complex):  # the others know inf and nan
        with suppress(ValueError, SyntaxError):
            return read(text)
    return None
