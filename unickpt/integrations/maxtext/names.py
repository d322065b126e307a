"""What MaxText finds in place of `orbax.checkpoint` and `orbax.checkpoint.v1`."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import unickpt.integrations.orbax as version0
from unickpt.integrations.maxtext import contexts, managers
from unickpt.integrations.maxtext.managers import ITEMS, completed, without_absent
from unickpt.integrations.orbax import training, v1_context
from unickpt.integrations.orbax import v1 as version1
from unickpt.integrations.orbax.v1_responses import only_name


class Names:
    """A module, with some names of its own.

    Arguments:
        module: has all others.
        replaces: the `id` of the module in whose place this is.
        own: the names.
    """

    def __init__(self, module: Any, replaces: int = 0, **own: Any) -> None:
        self._module, self.replaces = module, replaces
        self.__dict__.update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def version_0(more: Mapping[str, Any]) -> Names:
    """In place of `orbax.checkpoint`.

    Arguments:
        more: further arguments of `unickpt.Checkpointer`.
    """
    return Names(
        version0,
        id(importlib.import_module("orbax.checkpoint")),
        CheckpointManager=type("Manager", (managers.Manager,), {"more": more}),
        Checkpointer=managers.PathCheckpointer,
        PyTreeCheckpointer=managers.TreeCheckpointer,
    )


def version_1(more: Mapping[str, Any]) -> Names:
    """In place of `orbax.checkpoint.v1`; the argument as for `version_0`."""
    checkpointer = type("Checkpointer", (managers.Checkpointer,), {"more": more})
    return Names(
        version1,
        id(importlib.import_module("orbax.checkpoint").v1),
        training=Names(training, Checkpointer=checkpointer),
        load=_load,
        metadata=_metadata,
    )


def _load(path: Any, abstract_state: Any = None, *, checkpointable_name: str | None = None) -> Any:
    """As `load` of version 1. Without a name, of several items the state is loaded; what older
    versions of MaxText did not save is left abstract."""
    with _context():
        there = version1.stored_items(path)
        name = checkpointable_name or _only(there, path)
        if abstract_state is None or name not in there:
            return version1.load(path, abstract_state, checkpointable_name=name)
        like = without_absent(there[name], abstract_state)
        loaded = version1.load(path, like, checkpointable_name=name)
        return completed(loaded, abstract_state)


def _metadata(path: Any, checkpointable_name: str | None = None) -> Any:
    """As `metadata` of version 1; the name as for `load`."""
    with _context():
        name = checkpointable_name or _only(version1.stored_items(path), path)
        return version1.metadata(path, checkpointable_name=name)


def _only(there: Mapping[str, Any], path: Any) -> str:
    return ITEMS if ITEMS in there else only_name(there, path)


@contextlib.contextmanager
def _context() -> Iterator[None]:
    """Within it, only what is relevant of Orbax's Context counts."""
    context = contexts.relevant(v1_context.active())
    with contextlib.nullcontext() if context is None else context:
        yield
