"""Names that are Orbax's own here, where it is installed: what neither saves nor restores."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any


def of_orbax(module: str, name: str, instead: Mapping[str, str] | None = None) -> Any:
    """What a module of Orbax has under a name.

    Arguments:
        module: its name below `orbax.checkpoint`; empty for that.
        name: as it was asked for.
        instead: names that would save or restore Orbax's files, each with what to use.

    Raises:
        AttributeError: there is no such name, Orbax is not installed, or the name is one of
            `instead`.
    """
    ours = ".".join(filter(None, ("unickpt.integrations.orbax", module)))
    theirs = ".".join(filter(None, ("orbax.checkpoint", module)))
    if name in (instead or {}):
        raise AttributeError(
            f"{ours} has no {name}; use {(instead or {})[name]}, or {theirs}.{name} for Orbax's "
            "own files"
        )
    if name.startswith("_"):
        raise AttributeError(f"module {ours!r} has no attribute {name!r}")
    try:
        return getattr(_module(theirs), name)
    except ImportError:
        raise AttributeError(
            f"module {ours!r} has no attribute {name!r}; if it is one of Orbax's own, install "
            "orbax-checkpoint"
        ) from None
    except AttributeError:
        raise AttributeError(f"neither {ours} nor {theirs} has {name!r}") from None


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        above, _, last = name.rpartition(".")
        found = getattr(importlib.import_module(above), last, None)
        if found is None:
            raise
        return found  # `orbax.checkpoint.v1`, which lies elsewhere
