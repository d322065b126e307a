"""Handlers of MaxText's states, for Orbax's versions 0 and 1."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import v1
from orbax.checkpoint.checkpoint_args import get_registered_args_cls, register_with_handler

import unickpt
from unickpt import LoadOptions, SaveOptions
from unickpt.extend import flatten_state, leaves_of_tree, rebuild_tree
from unickpt.integrations.orbax.handler import Handler, registry
from unickpt.integrations.orbax.v1_handler import TREE_MARKER, TreeHandler

ITEMS = "items"
"""The item with the state, as MaxText calls it."""

_MAY_LACK = frozenset(("nnx_aux", "rngs", "rng"))
_LORA = ("lora_a", "lora_b")


class StateHandler(TreeHandler):
    """Stores states for Orbax's version 1."""

    async def load(self, directory: Any, abstract_checkpointable: Any = None) -> Awaitable[Any]:
        """Loads a state; leaves that older versions of MaxText did not save stay abstract."""
        like = without_absent(directory, abstract_checkpointable)
        loading = await super().load(directory, like)

        async def complete() -> Any:
            return completed(await loading, abstract_checkpointable)

        return complete()


class Version0Handler(Handler):
    """In place of `PyTreeCheckpointHandler`, whose arguments tune Orbax's files and do nothing."""

    default_save_options: ClassVar[SaveOptions | None] = None
    default_load_options: ClassVar[LoadOptions | None] = None

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__(
            save_options=self.default_save_options, load_options=self.default_load_options
        )

    def restore(self, directory: Any, item: Any = None, args: Any = None, **options: Any) -> Any:
        """Restores a state; leaves that older versions of MaxText did not save stay abstract."""
        if args is None:
            args = Restore(item, **options)
        if args.item is None:
            return super().restore(directory, args=args)
        like = without_absent(directory, args.item)
        return completed(super().restore(directory, args=replace(args, item=like)), args.item)

    def finalize(self, directory: Any) -> None:
        """Also writes the file that marks a tree for version 1: MaxText 0.2.5 requires it to
        load."""
        super().finalize(directory)
        if ocp.multihost.is_primary_host(0):
            (directory / TREE_MARKER).write_text("{}")


@register_with_handler(Version0Handler, for_save=True)
class Save(ocp.args.PyTreeSave):
    """The arguments with which a `Version0Handler` saves if Orbax chooses them."""


@register_with_handler(Version0Handler, for_restore=True)
class Restore(ocp.args.PyTreeRestore):
    """The arguments with which a `Version0Handler` restores if Orbax chooses them."""


def register(save_options: SaveOptions | None, load_options: LoadOptions | None) -> None:
    """Makes version 1 of Orbax store the item `items` by us, in the whole process.

    Arguments:
        save_options, load_options: of both versions.
    """
    StateHandler.save_options = SaveOptions.or_default(save_options)
    StateHandler.load_options = load_options
    Version0Handler.default_save_options = save_options
    Version0Handler.default_load_options = load_options
    if not v1.handlers.global_registry().has(ITEMS):
        version_0 = f"{Version0Handler.__module__}.{Version0Handler.__qualname__}"
        v1.handlers.register_handler(
            StateHandler, checkpointable_name=ITEMS, secondary_typestrs=[version_0]
        )


def replacements() -> Mapping[int, Any]:
    """Replacements for Orbax's own objects of version 0, by their `id`."""
    return {
        id(ocp): _VERSION_0,
        id(ocp.PyTreeCheckpointHandler): Version0Handler,
    }


class _Version0:
    """The module `orbax.checkpoint`, with our handler."""

    PyTreeCheckpointHandler = Version0Handler

    def __getattr__(self, name: str) -> Any:
        return getattr(ocp, name)

    @staticmethod
    def PyTreeCheckpointer(*_: Any, **__: Any) -> Any:
        """A `Checkpointer` with our handler."""
        return ocp.Checkpointer(Version0Handler())

    @staticmethod
    def CheckpointManager(
        directory: Any,
        *,
        item_names: Any = None,
        item_handlers: Mapping[str, Any],
        **options: Any,
    ) -> Any:
        """Orbax's manager, with a registry instead of the handlers of items."""
        handlers = registry(ITEMS, handler=Version0Handler())
        for name in {*item_handlers} - {ITEMS}:
            for kind in get_registered_args_cls(item_handlers[name]):
                handlers.add(name, kind, item_handlers[name])
        return ocp.CheckpointManager(directory, handler_registry=handlers, **options)


_VERSION_0 = _Version0()


# --- leaves that a checkpoint may lack -----------------------------------------------------------


def without_absent(directory: Any, like: Any) -> Any:
    """A tree to load into, with a placeholder for each leaf that MaxText lets a checkpoint lack, if
    it does: random states and variables that are no weights, and LoRA's weights.

    Everything else that is missing is an error of the load.
    """
    if like is None:
        return None
    node = flatten_state(like)
    leaves = {leaf.name: leaf.value for leaf in leaves_of_tree(node)}
    optional = {name for name in leaves if _may_lack(name)}
    if not optional:
        return like
    checkpoint = unickpt.open(os.fspath(directory))
    absent = {n for n in optional if n not in checkpoint and n not in checkpoint.values}
    return rebuild_tree(node, lambda name: ocp.PLACEHOLDER if name in absent else leaves[name])


def _may_lack(name: str) -> bool:
    parts = name.split("/")
    return not _MAY_LACK.isdisjoint(parts) or any(marker in name for marker in _LORA)


def completed(loaded: Any, like: Any) -> Any:
    """The loaded tree, with the leaves of `like` where there are placeholders: they stay abstract,
    and MaxText initialises them."""
    if like is None:
        return loaded
    return jax.tree.map(lambda new, old: old if new is ocp.PLACEHOLDER else new, loaded, like)
