"""Older programs, which give the manager checkpointers, and items instead of arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unickpt.integrations.orbax import handlers
from unickpt.integrations.orbax.args import Composite
from unickpt.integrations.orbax.checkpointers import AsyncCheckpointer, Checkpointer


def handlers_of(checkpointers: Any) -> Any:
    """The handler of a checkpointer, or those of several by the names of their items.

    Raises:
        TypeError: something is no checkpointer of this module.
    """
    if isinstance(checkpointers, Mapping):
        return {name: handlers_of(each) for name, each in checkpointers.items()}
    if not isinstance(checkpointers, Checkpointer):
        raise TypeError(
            f"checkpointers= has a {type(checkpointers).__module__}."
            f"{type(checkpointers).__name__}; pass a Checkpointer of unickpt.integrations.orbax, "
            "or none, and args= to save and restore"
        )
    return checkpointers.handler


def saves_in_background(checkpointers: Any) -> bool:
    """Whether a checkpointer, or one of several by the names of their items, does not wait."""
    if isinstance(checkpointers, Mapping):
        return any(saves_in_background(each) for each in checkpointers.values())
    return isinstance(checkpointers, AsyncCheckpointer)


def args_of_old(of_items: Any, for_save: bool, items: Any, more: Any, args: Any) -> Any:
    """The arguments of a save or a restore.

    Arguments:
        of_items: what `handlers_of` returned; None without `checkpointers`.
        for_save: whether it is a save.
        items, more: of the old way: what to save or to restore, and further arguments of its
            checkpointer; both by item, if there are several.
        args: of the new way.

    Raises:
        ValueError: the old way, without `checkpointers`; or both ways.
    """
    if args is not None or (items is None and more is None):
        if items is not None or more is not None:
            raise ValueError("pass items, or args=, not both")
        return args
    if of_items is None:
        wanted = "args.StandardSave(tree)" if for_save else "args.StandardRestore(tree)"
        raise ValueError(
            f"items= is for a manager with checkpointers=; pass args=, such as {wanted}"
        )
    if not isinstance(of_items, Mapping):
        return _args(of_items, for_save, items, more)
    items, more = dict(items or {}), dict(more or {})
    unknown = [name for name in (*items, *more) if name not in of_items]
    if unknown:
        raise ValueError(
            f"there is no checkpointer for the item {unknown[0]!r}; checkpointers= has "
            f"{', '.join(of_items)}"
        )
    return Composite(
        **{
            name: _args(of_items[name], for_save, items.get(name), more.get(name))
            for name in (items if for_save else {**items, **more})
        }
    )


def _args(handler: Any, for_save: bool, item: Any, more: Any) -> Any:
    return handlers.arguments(handler, for_save, item, **(more or {}))[1]
