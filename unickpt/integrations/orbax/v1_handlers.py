"""Handlers of checkpointables that a program registered with Orbax's version 1.

Orbax's own stand for trees and JSON, which are saved as such. All others write files, which are
stored as `unickpt.integrations.orbax.handlers` does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

JSON = ("JsonHandler", "MetricsHandler")
TREE = "PyTreeHandler"
_OWN = (*JSON, TREE, "StatefulCheckpointableHandler")


def for_saving(registry: Any, name: str, value: Any) -> type | None:
    """The class of the handler that saves a checkpointable, as Orbax chooses it.

    Arguments:
        registry: Orbax's, or None.
        name: of the checkpointable.

    Returns:
        None, if there is none but those that Orbax has for trees and objects.
    """
    named = _named(registry, name)
    if named is not None:
        return named
    return next((each for each in _unnamed(registry) if each().is_handleable(value)), None)


def for_loading(registry: Any, name: str, abstract: Any, saved_with: str | None) -> type | None:
    """The class of the handler that loads a checkpointable, as Orbax chooses it.

    Arguments:
        registry, name: as for `for_saving`.
        abstract: what to load into, or None.
        saved_with: what `name_of` says of the class that saved it; None if that is not known.

    Returns:
        None, as `for_saving`.
    """
    named = _named(registry, name)
    if named is not None:
        return named
    # A handler says None if it cannot tell; then what is stored decides.
    able = {
        each: True if abstract is None else each().is_abstract_handleable(abstract)
        for each in _unnamed(registry)
    }
    for each, is_able in able.items():
        if is_able is not False and saved_with in _names(registry, each):
            return each
    if abstract is None:
        return None
    return next((each for each, is_able in able.items() if is_able), None)


def _names(registry: Any, handler: type) -> tuple[str, ...]:
    """The names by which a handler is known."""
    more = getattr(registry, "get_secondary_typestrs", lambda _: ())(handler)
    return (name_of(handler), *more)


def name_of(handler: type) -> str:
    """What is stored of a handler."""
    return f"{handler.__module__}.{handler.__qualname__}"


def kind_of(handler: type | None) -> str | None:
    """The name of a handler, if it is one that Orbax has itself."""
    is_own = handler is not None and handler.__module__.startswith("orbax.")
    return handler.__name__ if handler is not None and is_own and handler.__name__ in _OWN else None


def _named(registry: Any, name: str) -> type | None:
    """The handler that is registered for a name, unless it is only Orbax's own for trees."""
    if registry is None or not registry.has(name):
        return None
    found: type = registry.get(name)
    return None if kind_of(found) == TREE else found


def _unnamed(registry: Any) -> Iterator[type]:
    """Those that are not Orbax's own, the last that was registered first."""
    entries = [] if registry is None else list(registry.get_all_entries())
    for handler, name in reversed(entries):
        if name is None and kind_of(handler) is None:
            yield handler


@dataclass(frozen=True)
class Chosen:
    """A handler and what it is to save, or to load into."""

    handler: Any
    value: Any

    async def save(self, directory: Any) -> Any:
        return await self.handler.save(directory, self.value)

    async def load(self, directory: Any) -> Any:
        return await self.handler.load(directory, self.value)
