"""Names of `orbax.checkpoint.v1` that are Orbax's own here, and those that are refused.

What only describes, such as `Context`, `options` and types, is Orbax's own, where it is installed.
What writes and reads is ours. All else is an AttributeError that says what to use.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.integrations.orbax import names

OWN = frozenset(
    (
        "AbstractCheckpointable",
        "AsyncResponse",
        "Checkpointable",
        "CheckpointableHandler",
        "Context",
        "PyTreeMetadata",
        "StatefulCheckpointable",
        "arrays",
        "handlers",
        "multihost",
        "options",
        "path",
        "tree",
    )
)
"""Those of `orbax.checkpoint.v1` that are Orbax's own."""

REFUSED: Mapping[str, Mapping[str, str]] = {
    "": {
        "partial": (
            "a checkpoint is committed as a whole; save the tree with one save, and what did not "
            "change costs nothing with unickpt={'reuse': True} of training.Checkpointer"
        ),
    },
    "training": {
        "pathways": (
            "its snapshots stay in the memory of Pathways; unickpt={'local': '/dev/shm/run'} of "
            "training.Checkpointer keeps steps in the memory of each host"
        ),
    },
}
"""Those that are refused, with what to use, by the module that would have them."""


def resolve(module: str, name: str, ours: Collection[str]) -> Any:
    """A name of `orbax.checkpoint.v1` that a module of ours lacks.

    Arguments:
        module: its path below `v1`; empty for `v1` itself.
        ours: the names that the module has.

    Raises:
        AttributeError: it is refused, or it needs Orbax; says what to use.
    """
    asked = ".".join(filter(None, ("unickpt.integrations.orbax.v1", module, name)))
    why = REFUSED.get(module, {}).get(name)
    if why is not None:
        raise AttributeError(f"{asked} is not supported: {why}", name=name)
    own = OWN if not module else frozenset()
    if name in own:
        return names.of_orbax("v1", name)
    theirs = ".".join(filter(None, ("orbax.checkpoint.v1", module)))
    raise AttributeError(
        f"there is no {asked}; there are {', '.join(sorted({*ours, *own}))}. What writes and "
        f"reads Orbax's own files is in {theirs}",
        name=name,
    )
