"""Items of other people's handlers, such as those of data loaders: the files that they write.

The files of all processes are stored, each as a value of bytes. A handler reads them in a temporary
folder, as if it had written them there.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from unickpt.errors import LoadMismatch, UnsupportedLeaf

_OWN = ("Standard", "PyTree", "Array", "Json", "JaxRandomKey", "NumpyRandomKey")
_KNOWN = tuple(f"{name}CheckpointHandler" for name in _OWN)


class _Handler:
    """Takes the place of one of Orbax's handlers; its options, which only tune Orbax's files, are
    of no effect."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass


class StandardCheckpointHandler(_Handler):
    """For `StandardSave` and `StandardRestore`."""


class PyTreeCheckpointHandler(_Handler):
    """For `PyTreeSave` and `PyTreeRestore`."""


class ArrayCheckpointHandler(_Handler):
    """For `ArraySave` and `ArrayRestore`."""


class JsonCheckpointHandler(_Handler):
    """For `JsonSave` and `JsonRestore`."""


def of_user(handler: Any) -> Any:
    """A handler, if it is not one of Orbax or ours that the arguments say anyway.

    Raises:
        TypeError: it is not a handler.
    """
    if handler is None or type(handler).__name__ in _KNOWN:
        return None
    if not (callable(getattr(handler, "save", None)) and callable(handler.restore)):
        raise TypeError(
            f"item_handlers: {type(handler).__name__} has no functions save and restore"
        )
    return handler


def handler_of(name: str, args: Any, given: Any) -> Any:
    """The handler for some arguments.

    Arguments:
        name: of the item, for messages.
        given: the one that the user gave for this item, if any.

    Raises:
        TypeError: there is none.
    """
    if given is not None:
        return given
    cls = getattr(type(args), "unickpt_handler", None)
    registry = sys.modules.get("orbax.checkpoint.checkpoint_args")
    if cls is None and registry is not None:
        with suppress(TypeError, ValueError):  # it is not registered
            cls = registry.get_registered_handler_cls(args)
    if cls is None or cls.__name__ in ("ProtoCheckpointHandler", *_KNOWN):
        raise TypeError(
            f"item {name!r}: {type(args).__name__} is not supported; pass StandardSave, "
            "PyTreeSave, JsonSave, ArraySave or a random key (to restore: StandardRestore, ...), "
            f"or give a handler for the item: item_handlers={{{name!r}: ...}}"
        )
    return cls()


def files_of(handler: Any, args: Any) -> dict[str, bytes]:
    """What a handler writes on this process, by the paths of the files."""
    with tempfile.TemporaryDirectory() as folder:
        handler.save(_path(folder), args=args)
        found = sorted(path for path in Path(folder).rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def restore_files(handler: Any, args: Any, files: Any) -> Any:
    """What a handler restores from files that handlers wrote, on this and all other processes.

    Raises:
        LoadMismatch: the item does not consist of files.
        UnsupportedLeaf: a file's name leads elsewhere.
    """
    if not (isinstance(files, Mapping) and all(isinstance(v, bytes) for v in files.values())):
        raise LoadMismatch(
            f"a {type(handler).__name__} cannot restore what was saved as a tree; restore it with "
            "StandardRestore or PyTreeRestore"
        )
    with tempfile.TemporaryDirectory() as folder:
        for name, data in files.items():
            parts = PurePosixPath(name)
            if parts.is_absolute() or ".." in parts.parts:
                raise UnsupportedLeaf(f"the file {name!r} would lie outside of its folder")
            path = Path(folder, parts)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        return handler.restore(_path(folder), args=args)


def _path(folder: str) -> Any:
    """As Orbax gives it to handlers."""
    epath = sys.modules.get("etils.epath")
    return Path(folder) if epath is None else epath.Path(folder)
