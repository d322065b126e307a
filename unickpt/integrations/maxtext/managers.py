"""The managers of unickpt.integrations.orbax as MaxText uses them."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from unickpt.frameworks.leaves import adapters, expand, is_leaf
from unickpt.integrations.maxtext import contexts
from unickpt.integrations.orbax import checkpointers, handlers, items
from unickpt.integrations.orbax.items import PLACEHOLDER, StoredItem
from unickpt.integrations.orbax.manager import CheckpointManager
from unickpt.integrations.orbax.run import Info, Run
from unickpt.integrations.orbax.stored import item_of, items_of
from unickpt.integrations.orbax.v1_checkpointer import OrbaxCheckpointer
from unickpt.reading.checkpoint import Checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.trees import tree

ITEMS = "items"
"""The item with the state, as MaxText calls it."""

_MAY_LACK = frozenset(("nnx_aux", "rngs", "rng"))
_LORA = ("lora_a", "lora_b")


class Manager(CheckpointManager):
    """For MaxText up to 0.2.4, which uses Orbax's version 0."""

    more: Mapping[str, Any] = {}
    """Further arguments of `unickpt.Checkpointer`."""

    def __init__(self, directory: Any, *args: Any, unickpt: Any = None, **options: Any) -> None:
        super().__init__(directory, *args, unickpt={**self.more, **(unickpt or {})}, **options)

    @property
    def directory(self) -> Any:
        """As given; also answers whether a step has an item."""
        return Folder(super().directory, self._run)

    def _restored(self, info: Info, found: Checkpoint, name: str, args: Any) -> Any:
        if name != ITEMS or items.kind_of(args) != "PyTreeRestore":
            return super()._restored(info, found, name, args)
        load = partial(self._run.load, info)
        if _is_broadcast(args.restore_args) and "load_options" not in self._more:
            load = partial(load, options=LoadOptions(exchange=True))
        item = item_of(info, found, name, None, load)
        like = without_absent(item, args.item)
        return completed(items.restore(item, replace(args, item=like)), args.item)


class Checkpointer(OrbaxCheckpointer):
    """For MaxText from 0.2.5 on, which uses Orbax's version 1."""

    more: Mapping[str, Any] = {}
    """Further arguments of `unickpt.Checkpointer`."""

    def __init__(
        self, directory: Any, *, context: Any = None, unickpt: Any = None, **options: Any
    ) -> None:
        given = {**self.more, **(unickpt or {})}
        super().__init__(directory, context=contexts.relevant(context), unickpt=given, **options)

    @property
    def directory(self) -> Any:
        """As given; also answers whether a step has an item."""
        return Folder(super().directory, self._run)

    def load_checkpointables(
        self, step: Any = None, abstract_checkpointables: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """As in Orbax: what older versions of MaxText did not save is left abstract."""
        wanted = abstract_checkpointables
        if not (isinstance(wanted, Mapping) and ITEMS in wanted):
            return super().load_checkpointables(step, wanted)
        info, found = self._run.opened(getattr(step, "step", step))
        item = item_of(info, found, ITEMS, None)
        like = {**wanted, ITEMS: without_absent(item, wanted[ITEMS])}
        loaded = super().load_checkpointables(info.step, like)
        return {**loaded, ITEMS: completed(loaded[ITEMS], wanted[ITEMS])}


class _OfPaths:
    """A mixin of checkpointers of version 0: what older versions of MaxText did not save is left
    abstract."""

    def restore(self, directory: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Checkpointer.restore`."""
        this: Any = self
        _, given = handlers.arguments(this.handler, False, *args, **kwargs)
        wanted = getattr(given, "item", None)
        above: Any = super()
        if items.kind_of(given) != "PyTreeRestore" or wanted is None:
            return above.restore(directory, *args, **kwargs)
        like = without_absent(this.stored_item(directory), wanted)
        return completed(above.restore(directory, args=replace(given, item=like)), wanted)


class PathCheckpointer(_OfPaths, checkpointers.Checkpointer):
    """`Checkpointer` of version 0."""


class TreeCheckpointer(_OfPaths, checkpointers.PyTreeCheckpointer):
    """`PyTreeCheckpointer` of version 0."""


def _is_broadcast(restore_args: Any) -> bool:
    """Whether one replica is to read, and send the others their parts."""
    kinds = {type(each).__name__ for each in jax.tree.leaves(restore_args)}
    return "SingleReplicaArrayRestoreArgs" in kinds


# --- what a checkpoint may lack ------------------------------------------------------------------


def without_absent(item: StoredItem, like: Any) -> Any:
    """A tree to load into, with a placeholder for each leaf that MaxText lets a checkpoint lack, if
    it does: random states and variables that are no weights, and LoRA's weights.

    Everything else that is missing is an error of the load.
    """
    among = adapters()
    node = tree.flatten(
        like, lambda obj: is_leaf(obj, among), lambda obj, name: expand(obj, name, among)
    )
    stored = {leaf.name for leaf in tree.leaves(item.node)}
    leaves = {leaf.name: leaf.value for leaf in tree.leaves(node)}
    absent = {n for n in leaves if _may_lack(n) and tree.join(item.prefix, n) not in stored}
    if not absent:
        return like
    return tree.rebuild(node, lambda name: PLACEHOLDER if name in absent else leaves[name])


def _may_lack(name: str) -> bool:
    parts = name.split("/")
    return not _MAY_LACK.isdisjoint(parts) or any(each in name for each in _LORA)


def completed(loaded: Any, like: Any) -> Any:
    """What was loaded, with the leaves of `like` where there are placeholders: they stay abstract,
    and MaxText initialises them."""
    return jax.tree.map(lambda new, old: old if new is PLACEHOLDER else new, loaded, like)


# --- the folder, as MaxText looks into it --------------------------------------------------------


class Folder:
    """A run's folder, in which `folder / "30" / "iter"` exists if step 30 has this item, whoever
    saved it. Apart from that, the path that it is made of.

    Arguments:
        path: the folder.
        run: its steps.
    """

    def __init__(self, path: Any, run: Run) -> None:
        self._path, self._run = path, run

    def __truediv__(self, name: Any) -> Any:
        text = str(name)
        infos = self._run.infos if text.isdecimal() else []
        for info in infos:
            if info.step == int(text) and not info.foreign:
                return StoredStep(info)
        return self._path / name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._path, name)

    def __fspath__(self) -> str:
        return str(self._path)

    def __str__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return repr(self._path)

    def __eq__(self, other: object) -> bool:
        return bool(self._path == getattr(other, "_path", other))

    def __hash__(self) -> int:
        return hash(self._path)


class StoredStep:
    """A step that unickpt saved, as a folder of items.

    Arguments:
        info: the step.
    """

    def __init__(self, info: Info) -> None:
        self._info = info

    def __str__(self) -> str:
        return self._info.path

    def __truediv__(self, name: str) -> StoredFiles:
        found = self._info.open()
        there = name in items_of(self._info, found, None)
        node = item_of(self._info, found, name, None).node if there else None
        files = [str(key) for key in node.keys] if isinstance(node, tree.Node) else []
        return StoredFiles(f"{self._info.path}/{name}", files if there else None)


class StoredFiles:
    """An item that a handler wrote, as a folder of its files.

    Arguments:
        path: for messages.
        files: their names; None if there is no such item.
    """

    def __init__(self, path: str, files: list[str] | None) -> None:
        self._path, self._files = path, files

    def __str__(self) -> str:
        return self._path

    def exists(self) -> bool:
        """Whether the step has the item."""
        return self._files is not None

    def glob(self, pattern: str) -> list[str]:
        """The names of its files that a pattern matches."""
        return fnmatch.filter(self._files or (), pattern)
