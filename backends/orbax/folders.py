"""Folders of Orbax: which are checkpoints, which are their items, and which are not committed.

Source: orbax/checkpoint/checkpoint_manager.py, _src/path, experimental/v1/_src/layout. A checkpoint
is an item, or a folder of items; a run is a folder of checkpoints, one for each step.
"""

from __future__ import annotations

import datetime
import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tensorstore as ts

from unickpt.backends.orbax import items
from unickpt.backends.orbax.items import ITEM, Located
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound
from unickpt.extend import Files, quoted

_log = logging.getLogger("unickpt")
_CHECKPOINT = "_CHECKPOINT_METADATA"
_INDICATOR = "orbax.checkpoint"
_MARKS = (_CHECKPOINT, _INDICATOR)
_OF_ARRAYS = ("PyTreeCheckpointHandler", "StandardCheckpointHandler", "ArrayCheckpointHandler")
_TEMPORARY = ".orbax-checkpoint-tmp"
# Items without a name of their own: the checkpoint itself.
_UNNAMED = "default"
_UNNAMED_V1 = ("state", "pytree")
_JSON_V1 = "data.json"
_OWN = "UNICKPT.txt"  # in an item that unickpt.integrations.orbax saved
_MOST_ITEMS = 1000
_STEP = re.compile(r"(?:.*[_-])?[0-9]{1,18}")
_SHOWN = 8  # steps, in a message


@dataclass(frozen=True)
class CheckpointFolder:
    """A checkpoint.

    Arguments:
        tree: of all of its items.
        metadata: of users, and metrics.
        created: when it was committed, as text; empty if that is not recorded.
        lacks: the items that are missing; empty if all are there.
    """

    tree: Any
    metadata: Mapping[str, Any]
    created: str
    lacks: str = ""


def find(files: Files, context: ts.Context) -> CheckpointFolder | None:
    """The content of a folder."""
    _check_name(files)
    file_names = set(files.here)
    about = _about(files) if _CHECKPOINT in file_names else {}
    if items.is_item(files):
        item = items.read_item(files, context)
        return CheckpointFolder(item.tree, {**_custom(about), **item.custom}, _created(about))
    below = items.folders(files)
    if any(_TEMPORARY in name for name in below) and file_names & set(_MARKS):
        raise _not_committed(files)
    item_names = [name for name in below if _is_item(files, name)]
    if file_names & set(_MARKS):
        return _composite(files, about, below, context)
    if item_names and not any(_STEP.fullmatch(name) for name in item_names):
        item_names = [name for name in below if name in item_names or items.is_json(files, name)]
        return _composite(files, about, _unrecorded(files, item_names, below), context)
    steps = [name for name in below if _STEP.fullmatch(name)]
    steps = sorted(filter(lambda name: _is_step(files, name), steps), key=_step_number)
    if steps and not file_names:
        raise CheckpointNotFound(_several(files, steps))
    return None


def own_item(files: Files) -> str | None:
    """The item of a step that `unickpt.integrations.orbax` saved, if it is all of it; else None.

    Raises:
        CheckpointNotFound: the step has further items.
    """
    if not set(files.here) & set(_MARKS) or items.has(files, _OWN):
        return None
    names = [name for name in items.folders(files) if name != items.METRICS]
    own_items = [name for name in names if items.has(files, f"{name}/{_OWN}")]
    if not own_items:
        return None
    if names == own_items and own_items[0] in (_UNNAMED, *_UNNAMED_V1):
        return own_items[0]
    paths = " or ".join(repr(files.location.name_for_users(name)) for name in own_items)
    raise CheckpointNotFound(
        f"no checkpoint at {files.location}: it is a step of Orbax with several items; open those "
        f"that unickpt saved by their own paths: {paths}"
    )


def _unrecorded(files: Files, item_names: list[str], below: list[str]) -> list[str]:
    """The items of a checkpoint of an older Orbax, which recorded none: in a manager's step, each
    folder is an item, also those without arrays.

    Arguments:
        files: of the checkpoint.
        item_names: the items of arrays.
        below: all folders.
    """
    if _STEP.fullmatch(files.location.url.rstrip("/").rsplit("/", 1)[-1]) is None:
        return item_names
    if any(_TEMPORARY in name for name in below):
        raise _not_committed(files)
    return below


def _check_name(files: Files) -> None:
    names = files.location.url.rstrip("/").rsplit("/", 2)[-2:]
    if any(_TEMPORARY in name for name in names):
        raise _not_committed(files)


def _not_committed(files: Files) -> CheckpointNotFound:
    return CheckpointNotFound(
        f"no checkpoint at {files.location}: Orbax has not committed it: the save that wrote this "
        "folder failed, or is under way; open an earlier step"
    )


def _several(files: Files, steps: list[str]) -> str:
    shown = ", ".join(steps if len(steps) <= _SHOWN else [steps[0], "...", *steps[1 - _SHOWN :]])
    return (
        f"no checkpoint at {files.location}: it contains checkpoints of Orbax but is not one "
        f"itself ({shown}); give the path of one, such as "
        f"{files.location.name_for_users(steps[-1])!r}"
    )


def _step_number(name: str) -> int:
    return int(re.split(r"[_-]", name)[-1])


def _is_item(files: Files, name: str) -> bool:
    """Whether a folder is an item; one that is saved alone is a checkpoint of its own."""
    return items.is_item(files, f"{name}/") and not items.has(files, f"{name}/{_CHECKPOINT}")


def _is_step(files: Files, name: str) -> bool:
    if any(items.has(files, f"{name}/{file}") for file in _MARKS):
        return True
    if items.is_item(files, f"{name}/"):
        return True
    below = items.folders(files, f"{name}/")[:_MOST_ITEMS]
    return any(items.is_item(files, f"{name}/{item}/") for item in below)


def _about(files: Files) -> Mapping[str, Any]:
    """The content of `_CHECKPOINT_METADATA`.

    Raises:
        CheckpointNotFound: the checkpoint is not committed.
    """
    metadata = items.read_json(files, _CHECKPOINT)
    if not isinstance(metadata, dict):
        raise files.damaged(f"{_CHECKPOINT} is damaged: {quoted(metadata)}")
    # Without the key at all, as after an edit by hand, its name says that it was committed.
    is_begun = metadata.get("init_timestamp_nsecs") and "commit_timestamp_nsecs" in metadata
    if is_begun and not metadata["commit_timestamp_nsecs"]:
        raise _not_committed(files)
    return metadata


def _custom(about: Mapping[str, Any]) -> dict[str, Any]:
    custom, metrics = about.get("custom_metadata"), about.get("metrics")
    result = dict(custom) if isinstance(custom, dict) else {}
    return {**result, items.METRICS: metrics} if metrics else result


def _created(about: Mapping[str, Any]) -> str:
    stamp = about.get("commit_timestamp_nsecs")
    try:
        when = datetime.datetime.fromtimestamp(int(stamp or 0) // 10**9, datetime.UTC)
    except (ValueError, TypeError, OverflowError, OSError):
        return ""
    return when.isoformat(timespec="seconds") if stamp else ""


def _composite(
    files: Files, about: Mapping[str, Any], names: list[str], context: ts.Context
) -> CheckpointFolder:
    """A checkpoint that consists of items."""
    if len(names) > _MOST_ITEMS:
        raise files.unsupported(f"{len(names)} folders are too many items")
    handlers = about.get("item_handlers")
    if isinstance(handlers, str):
        return _lonely(files, about, handlers, context)
    if not isinstance(handlers, (dict, type(None))):
        raise files.damaged(f"{_CHECKPOINT} is damaged: {quoted(handlers)}")
    missing = sorted(set(handlers or ()) - set(names))
    lacks = ""
    if missing:  # Orbax itself can delete one of several items, and loads the others
        which = ", ".join(map(quoted, missing))
        are = f"item {which} is" if len(missing) == 1 else f"items {which} are"
        lacks = f"{files.location}: the {are} missing; was the folder copied as a whole?"
        if not names or {_UNNAMED, *_UNNAMED_V1} & set(missing):  # the main content of a step
            raise CheckpointCorrupt(f"{lacks} Each other item can be opened by its own path")
        _log.warning("%s", lacks)
    items_by_name = {}
    for name in names:
        below, is_json = Files(files.location.child(name)), _is_json_v1((handlers or {}).get(name))
        json_file = _JSON_V1 if is_json else ""
        items_by_name[name] = items.any_item(below, context, json_file=json_file)
    metadata = _custom(about)
    if items.METRICS in items_by_name and not isinstance(
        items_by_name[items.METRICS].tree, Located
    ):
        metadata[items.METRICS] = items_by_name.pop(items.METRICS).tree
    for name, item in items_by_name.items():
        if item.custom:
            metadata[name] = dict(item.custom)
    content: Any = {name: item.tree for name, item in items_by_name.items()}
    if not lacks and (list(content) == [_UNNAMED] or _is_unnamed_v1(files, about, content)):
        (content,) = content.values()
    return CheckpointFolder(content, metadata, _created(about), lacks)


def _is_json_v1(handler: Any) -> bool:
    """Whether an item is JSON of version 1; others may have a file of that name, too."""
    is_orbax = isinstance(handler, str) and handler.startswith("orbax.")
    return is_orbax and handler.rpartition(".")[2] == "JsonHandler"


def _is_unnamed_v1(files: Files, about: Mapping[str, Any], items: Mapping[str, Any]) -> bool:
    """Whether a checkpoint is that of one tree, as the functions for trees of version 1 save it."""
    if len(items) != 1 or not set(items) <= set(_UNNAMED_V1):
        return False
    handlers = about.get("item_handlers") or {}
    return _INDICATOR in files.here or ".v1." in str(handlers.get(next(iter(items))))


def _lonely(
    files: Files, about: Mapping[str, Any], handler: str, context: ts.Context
) -> CheckpointFolder:
    """A checkpoint that is one item, not of arrays."""
    if handler.endswith(_OF_ARRAYS):
        raise files.incomplete(f"{ITEM} is missing, which lists the arrays")
    content = items.any_item(files, context).tree
    if isinstance(content, dict):
        content = {key: value for key, value in content.items() if key not in _MARKS}
    return CheckpointFolder(content, _custom(about), _created(about))
