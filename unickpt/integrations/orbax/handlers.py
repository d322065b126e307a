"""Items of other people's handlers, such as those of data loaders: the files that they write.

The files of all processes are stored, each as a value of bytes. A handler reads them in a temporary
folder, as if it had written them there.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.integrations.orbax import args as orbax_args
from unickpt.integrations.orbax import names

_OWN = ("Standard", "PyTree", "Array", "Json", "JaxRandomKey", "NumpyRandomKey")
_KNOWN = tuple(f"{name}CheckpointHandler" for name in _OWN)
_COMPOSITE = "CompositeCheckpointHandler"


class _Handler:
    """Takes the place of one of Orbax's handlers; its options, which only tune Orbax's files, are
    of no effect. It saves and restores a folder as `Checkpointer` does."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def save(self, directory: Any, *args: Any, **kwargs: Any) -> None:
        """Saves, as `Checkpointer.save`."""
        _checkpointer(self).save(directory, *args, **kwargs)

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """Restores, as `Checkpointer.restore`."""
        return _checkpointer(self).restore(directory, *args, **kwargs)

    def metadata(self, directory: Any) -> Any:
        """The metadata of what is stored: a `TreeMetadata`."""
        return _checkpointer(self).metadata(directory).item_metadata

    def finalize(self, directory: Any) -> None:
        """Does nothing: a save is committed when it returns."""

    def close(self) -> None:
        """Does nothing."""


class StandardCheckpointHandler(_Handler):
    """For `StandardSave` and `StandardRestore`."""


class PyTreeCheckpointHandler(_Handler):
    """For `PyTreeSave` and `PyTreeRestore`."""


class ArrayCheckpointHandler(_Handler):
    """For `ArraySave` and `ArrayRestore`."""


class JsonCheckpointHandler(_Handler):
    """For `JsonSave` and `JsonRestore`."""


class JaxRandomKeyCheckpointHandler(_Handler):
    """For `JaxRandomKeySave` and `JaxRandomKeyRestore`."""


class NumpyRandomKeyCheckpointHandler(_Handler):
    """For `NumpyRandomKeySave` and `NumpyRandomKeyRestore`."""


class CompositeCheckpointHandler(_Handler):
    """For `Composite`: several items by name.

    Arguments:
        item_names: of no effect: the arguments have the names.
        composite_options: of no effect; they tune Orbax's files.
        handler_registry: None; pass handlers by the names of the items.
        items_and_handlers: a handler for each item that has one of its own.
    """

    def __init__(
        self,
        *item_names: str,
        composite_options: Any = None,
        handler_registry: Any = None,
        **items_and_handlers: Any,
    ) -> None:
        if handler_registry is not None:
            raise ValueError(
                "handler_registry= is not supported: pass a handler by the name of its item"
            )
        self.of_items = {name: of_user(each) for name, each in items_and_handlers.items()}


def _checkpointer(handler: _Handler) -> Any:
    # By its name, because it needs this module.
    checkpointers = importlib.import_module("unickpt.integrations.orbax.checkpointers")

    return checkpointers.Checkpointer(handler)


def of_items(handler: Any) -> Mapping[str, Any]:
    """The user's own handlers of a `CompositeCheckpointHandler`, by the names of their items."""
    return getattr(handler, "of_items", {})


def of_registry(registry: Any) -> tuple[dict[str, Any], dict[type, Any]]:
    """The user's own handlers in one of Orbax's registries: by items, and by classes of arguments.

    Raises:
        TypeError: it is none.
    """
    if not callable(getattr(registry, "get_all_entries", None)):
        raise TypeError(f"handler_registry= is a {type(registry).__name__}, which has no entries")
    items, kinds = dict[str, Any](), dict[type, Any]()
    for (item, kind), handler in registry.get_all_entries().items():
        made = of_user(handler() if isinstance(handler, type) else handler)
        if made is not None and item is None:
            kinds[kind] = made
        elif made is not None:
            items[item] = made
    return items, kinds


def arguments(handler: Any, for_save: bool, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """The user's own handler, if it is one, and the arguments that it takes.

    Arguments:
        handler: of a `Checkpointer`.
        for_save: whether they are for saving.
        args, kwargs: as given: arguments of a class, or what such a class takes.

    Returns:
        None, if the arguments say all; and the arguments.

    Raises:
        TypeError: the class does not take them.
    """
    own = of_user(handler)
    for each in (*args, *kwargs.values()):
        if any(cls.__name__ == "CheckpointArgs" for cls in type(each).__mro__):
            return own, each
    if own is None:
        return None, _class_for(handler, for_save)(*args, **kwargs)
    cls = _registered(type(handler), for_save)
    if cls is not None:
        return own, cls(*args, **kwargs)
    # A handler of old: its functions take what they are given.
    return _Old(handler), _Given(args, kwargs)


def _class_for(handler: Any, for_save: bool) -> Any:
    """The class of arguments of a handler that is Orbax's or ours."""
    found = _known(type(handler))
    if found is not None and found.__name__ == _COMPOSITE:
        return orbax_args.Composite
    if found is not None:
        kind = found.__name__.removesuffix("CheckpointHandler")
        return getattr(orbax_args, kind + ("Save" if for_save else "Restore"))
    raise TypeError(f"a checkpointer needs a handler, not {handler!r}")


def _registered(handler: type, for_save: bool) -> Any:
    """The class of arguments that somebody registered for a handler, here or with Orbax."""
    found = orbax_args.registered.get((handler, for_save))
    registry = sys.modules.get("orbax.checkpoint.checkpoint_args")
    if found is None and registry is not None:
        with suppress(TypeError, ValueError):  # it is not registered
            found = registry.get_registered_args_cls(handler)[0 if for_save else 1]
    return found


@dataclass(frozen=True)
class _Given:
    """What was given for a handler without a class of arguments."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class _Old:
    """A handler without a class of arguments."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def save(self, directory: Any, args: _Given) -> None:
        self._handler.save(directory, *args.args, **args.kwargs)

    def restore(self, directory: Any, args: _Given) -> Any:
        return self._handler.restore(directory, *args.args, **args.kwargs)


_ACTING = ("save", "async_save", "restore")


def _known(kind: type) -> type | None:
    """Orbax's class of handlers or ours that a class is, perhaps under another name: it saves and
    restores as that."""
    known = (*_KNOWN, _COMPOSITE)
    found = next((cls for cls in kind.__mro__ if cls.__name__ in known), None)
    if found is None or found.__module__.split(".")[0] not in ("orbax", "unickpt"):
        return None
    same = all(getattr(kind, name, None) is getattr(found, name, None) for name in _ACTING)
    return found if same else None


def of_user(handler: Any) -> Any:
    """A handler, if it is not one of Orbax or ours that the arguments say anyway.

    Raises:
        TypeError: it is not a handler.
    """
    if handler is None or _known(type(handler)):
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
        finalize = getattr(handler, "finalize", None)
        if callable(finalize):
            finalize(_path(folder))
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


_INSTEAD = {
    "BasePyTreeCheckpointHandler": "PyTreeCheckpointHandler",
    "ProtoCheckpointHandler": "JsonCheckpointHandler, or a handler of your own",
}
"""Handlers that would write Orbax's files."""


def __getattr__(name: str) -> Any:
    return names.of_orbax("handlers", name, _INSTEAD)
