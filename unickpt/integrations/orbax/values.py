"""Checkpointables of Orbax's version 1: trees, and objects that write files of their own."""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax

from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.integrations.orbax import args, handlers, items, v1_handlers
from unickpt.integrations.orbax.described import ArrayMetadata, described
from unickpt.integrations.orbax.items import FILES, StoredItem
from unickpt.integrations.orbax.placement import described_placement
from unickpt.integrations.orbax.stored import item_metadata
from unickpt.integrations.orbax.v1_context import Settings
from unickpt.integrations.orbax.v1_handlers import Chosen

STATE = "state"
"""The name of what is saved without one."""
_JSON = (".JsonHandler", ".JsonCheckpointHandler")  # of Orbax's versions 1 and 0


def described_values(
    checkpointables: Mapping[str, Any], settings: Settings
) -> tuple[Any, dict[str, Any]]:
    """The tree to save of checkpointables by name, and how it is to be restored.

    Raises:
        UnsupportedLeaf: there are none.
    """
    if not (isinstance(checkpointables, Mapping) and checkpointables):
        raise UnsupportedLeaf(
            f"checkpointables={checkpointables!r}: there are none to save; give them by name"
        )
    kinds, trees, used = dict[str, str](), dict[str, Any](), dict[str, str]()
    for name, value in checkpointables.items():
        handler = v1_handlers.for_saving(settings.registry, name, value)
        kind = v1_handlers.kind_of(handler)
        if handler is not None and kind is None:
            given: tuple[Any, ...] = (Chosen(handler(), value), _Stateful())
            used[name] = v1_handlers.name_of(handler)
        elif kind in v1_handlers.JSON:
            given = (args.JsonSave(value),)
        elif _writes_files(value):
            given = (value, _Stateful())
        else:
            given = (args.StandardSave(settings.cast(value)),)
        kinds[name], trees[name] = items.to_save(name, *given)
    single = STATE if list(kinds) == [STATE] else None
    tree = trees[STATE] if single else trees
    return tree, {"items": kinds, "single": single, "handlers": used, **described_placement(tree)}


def restored_value(
    item: StoredItem, abstract: Any, settings: Settings, saved_with: str | None = None
) -> Any:
    """A checkpointable.

    Arguments:
        abstract: a tree to load into, an object that reads its files, or None for what is stored.
        saved_with: the handler that saved it, if that is known.

    Raises:
        LoadMismatch: what is stored does not fit.
    """
    handler = v1_handlers.for_loading(settings.registry, item.name, abstract, saved_with)
    if handler is not None and v1_handlers.kind_of(handler) is None:
        return items.restore(item, Chosen(handler(), abstract), _Stateful())
    if _writes_files(abstract):
        return items.restore(item, abstract, _Stateful())
    if item.kind == FILES:
        if abstract is not None:
            raise LoadMismatch(
                f"{item.found.location}: {item.name!r} consists of files, which an object or a "
                "handler wrote; pass such an object, or register the handler, not a tree"
            )
        return item.load_as(None)
    if item.kind == "JsonSave":
        return items.restore(item, args.JsonRestore())
    if settings.partial_load:
        return items.restore(item, args.PyTreeRestore(abstract, partial_restore=True))
    return items.restore(item, args.StandardRestore(abstract))


def value_metadata(item: StoredItem, settings: Settings, saved_with: str | None) -> Any:
    """What a checkpointable's handler says of it; else the tree of what is stored."""
    if item.kind == "JsonSave" or (saved_with or "").endswith(_JSON):
        return None  # as in Orbax: it is loaded as it is
    handler = v1_handlers.for_loading(settings.registry, item.name, None, saved_with)
    if handler is None or v1_handlers.kind_of(handler) is not None:
        return jax.tree.map(_abstract, item_metadata(item))
    return handlers.restore_files(_Described(), handler(), item.load_as(None))


def _abstract(leaf: Any) -> Any:
    """Version 1's metadata of a leaf: of a number or a text, one of the same type."""
    return leaf if isinstance(leaf, ArrayMetadata) else described(leaf)


def without_metadata(abstract: Any) -> Any:
    """A tree to load into, or trees by name: also those in a `CheckpointMetadata`."""
    is_metadata = type(abstract).__name__.endswith("CheckpointMetadata")
    return abstract.metadata if is_metadata else abstract


def _writes_files(value: Any) -> bool:
    """Whether an object has the functions of Orbax's `StatefulCheckpointable`."""
    return all(
        inspect.iscoroutinefunction(getattr(type(value), name, None)) for name in ("save", "load")
    )


@dataclass(frozen=True)
class _Folder:
    """A folder that an object may write into; Orbax would still be creating it."""

    path: Any

    async def await_creation(self) -> Any:
        return self.path

    def __truediv__(self, other: str) -> _Folder:
        return _Folder(self.path / other)


class _Stateful:
    """Lets objects write and read their files, as a handler of version 0."""

    def save(self, directory: Any, args: Any) -> None:
        _finish(lambda: args.save(_Folder(directory)))

    def restore(self, directory: Any, args: Any) -> Any:
        found = _finish(lambda: args.load(directory))
        return found if isinstance(args, Chosen) else args


class _Described:
    """Asks a handler what its files hold."""

    def restore(self, directory: Any, args: Any) -> Any:
        return _finish(lambda: args.metadata(directory))


def _finish(begin: Callable[[], Awaitable[Any]]) -> Any:
    """What both phases of a function return; on a thread, for this one may have a loop."""

    async def both() -> Any:
        later = await begin()
        return await later if inspect.isawaitable(later) else later

    context = contextvars.copy_context()  # handlers ask for Orbax's Context
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, asyncio.run, both()).result()
