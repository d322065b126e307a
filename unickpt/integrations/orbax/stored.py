"""The items of a stored step, saved by us or by Orbax."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import tensorstore as ts

from unickpt.errors import LoadMismatch
from unickpt.foreign.files import Files
from unickpt.foreign.orbax_arrays import SavedArrays
from unickpt.integrations.orbax.described import ArrayMetadata, ScalarMetadata, StringMetadata
from unickpt.integrations.orbax.items import StoredItem
from unickpt.integrations.orbax.run import Info, how_saved
from unickpt.loading.views import StoredView
from unickpt.reading.checkpoint import Checkpoint
from unickpt.storage import paths
from unickpt.storage.errors import Failed, reading_failed
from unickpt.storage.locations import Location
from unickpt.trees import tree

SINGLES = ("default", "state", "pytree")
"""Items that are opened without their name, if they are the only one."""
_OF_ITEM = frozenset(("_METADATA", "manifest.ocdbt", "checkpoint"))
_ABOUT, _MOST_ABOUT = "_CHECKPOINT_METADATA", 1 << 30


def items_of(info: Info, found: Checkpoint, single: str | None) -> dict[str, str]:
    """The items of a step, each with how it was saved ("" if that is not known).

    Arguments:
        single: the name of the only item, if the caller has but one.
    """
    if not info.foreign:
        kinds = how_saved(found).get("items")
        if kinds is not None:
            return {str(name): str(kind) for name, kind in kinds.items()}
    location = paths.resolve(info.path) if info.foreign else None
    if location is not None and not _is_item(location):
        below = [name for name in _listed(location.folders, location) if name != "metrics"]
        if len(below) > 1:  # of which some may be something else
            root = StoredView(found.reader).node()
            keys = root.keys if isinstance(root, tree.Node) else ()
            alone = [name for name in below if name in SINGLES]
            below = [name for name in below if name in keys] or alone[:1] or below[:1]
        if below:
            return dict.fromkeys(below, "")
    return {single or SINGLES[0]: ""}


def item_of(
    info: Info,
    found: Checkpoint,
    name: str,
    single: str | None,
    load: Callable[..., Any] | None = None,
) -> StoredItem:
    """An item of a step.

    Arguments:
        single: as for `items_of`.
        load: loads from the step.

    Raises:
        LoadMismatch: the step has no such item.
    """
    kinds = items_of(info, found, single)
    if name not in kinds:
        raise LoadMismatch(
            f"{found.location} has no item {name!r}; there are {', '.join(kinds) or 'none'}"
        )
    if info.foreign:
        alone = len(kinds) == 1 and name in SINGLES
    else:
        stored = how_saved(found)
        alone = stored.get("single") == name if "items" in stored else True
    prefix = "" if alone else name
    return StoredItem(name, prefix, found, kinds[name], load or _cannot, saved_of(info, found))


def saved_of(info: Info, found: Checkpoint) -> SavedArrays:
    """What is known of the arrays of a step."""
    if info.foreign:
        return getattr(found.reader, "saved", SavedArrays())
    return SavedArrays.of_json(how_saved(found))


def _cannot(*_: Any, **__: Any) -> Any:
    raise AssertionError("only described")


def item_metadata(item: StoredItem) -> Any:
    """The tree of an item, with metadata for its leaves; JSON as it is."""

    def leaf(name: str) -> Any:
        own = name[len(item.prefix) + 1 :] if item.prefix else name
        if name in item.found.values:
            value = item.found.values[name]
            if isinstance(value, str):
                return StringMetadata(own)
            return ScalarMetadata(own, type(value)) if isinstance(value, int | float) else value
        if name not in item.found:
            return None
        array = item.found[name]
        try:
            sharding = getattr(item.abstract_leaf(name), "sharding", None)
        except LoadMismatch:  # it was on devices that this job lacks
            sharding = None
        return ArrayMetadata(own, tuple(array.shape), array.dtype, sharding)

    return tree.rebuild(item.node, leaf)


def as_path(directory: paths.PathLike) -> Any:
    """A directory as Orbax's managers show it: an `epath.Path`, if that was imported."""
    epath = sys.modules.get("etils.epath")
    if epath is not None:
        with suppress(KeyError):  # a storage that it does not know
            return epath.Path(directory)
    return directory if "://" in str(directory) else Path(directory)


def saved_with(info: Info, found: Checkpoint, name: str) -> str | None:
    """The name of the handler that saved an item; None if that is not known."""
    if not info.foreign:
        handlers = how_saved(found).get("handlers")
    else:
        files = Files(paths.resolve(info.path))
        if _ABOUT not in files.here:
            return None
        about = json.loads(files.tail(_ABOUT, _MOST_ABOUT))  # which is open, and so is valid
        handlers = about.get("item_handlers")
    known = handlers.get(name) if isinstance(handlers, Mapping) else None
    return known if isinstance(known, str) else None


def _is_item(location: Location) -> bool:
    """Whether a folder of Orbax is an item itself, not a folder of items."""
    return not _OF_ITEM.isdisjoint(_listed(location.files, location))


def _listed(names: Callable[[ts.Context], list[str]], location: Location) -> list[str]:
    try:
        return sorted(name for name in names(paths.context()) if name != ".")
    except Failed as error:
        raise reading_failed(error, str(location)) from error
