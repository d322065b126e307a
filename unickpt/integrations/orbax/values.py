"""Checkpointables of Orbax's version 1: trees, and objects that write files of their own."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.integrations.orbax import args, items
from unickpt.integrations.orbax.items import FILES, StoredItem

STATE = "state"
"""The name of what is saved without one."""


def described_values(checkpointables: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tree to save of checkpointables by name, and how it is to be restored.

    Raises:
        UnsupportedLeaf: there are none.
    """
    if not checkpointables:
        raise UnsupportedLeaf("checkpointables: there are none to save")
    kinds, trees = {}, {}
    for name, value in checkpointables.items():
        if _writes_files(value):
            kinds[name], trees[name] = items.to_save(name, value, _Stateful())
        else:
            kinds[name], trees[name] = items.to_save(name, args.StandardSave(value))
    single = STATE if list(kinds) == [STATE] else None
    how = {"items": kinds, "single": single}
    return (trees[STATE] if single else trees), how


def restored_value(item: StoredItem, abstract: Any) -> Any:
    """A checkpointable.

    Arguments:
        abstract: a tree to load into, an object that reads its files, or None for what is stored.

    Raises:
        LoadMismatch: what is stored does not fit.
    """
    if _writes_files(abstract):
        return items.restore(item, abstract, _Stateful())
    if item.kind == FILES:
        if abstract is not None:
            raise LoadMismatch(
                f"{item.found.location}: {item.name!r} consists of files, which an object wrote; "
                "pass such an object, not a tree"
            )
        return item.load_as(None)
    return items.restore(item, args.StandardRestore(abstract))


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
        _finish(lambda: args.load(directory))
        return args


def _finish(begin: Callable[[], Awaitable[Any]]) -> None:
    """Awaits both phases of an object's function; on a thread, for this one may have a loop."""

    async def both() -> None:
        later = await begin()
        if later is not None:
            await later

    with ThreadPoolExecutor(1) as pool:
        pool.submit(asyncio.run, both()).result()
