"""The arguments of saves and restores, with the names and fields of `orbax.checkpoint.args`.

Orbax's own objects are taken as well: they are recognised by their names and fields, without
importing Orbax.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from typing import Any, TypeVar

from unickpt.integrations.orbax import names

__all__ = [
    "ArrayRestore",
    "ArrayRestoreArgs",
    "ArraySave",
    "CheckpointArgs",
    "Composite",
    "JaxRandomKeyRestore",
    "JaxRandomKeySave",
    "JsonRestore",
    "JsonSave",
    "NumpyRandomKeyRestore",
    "NumpyRandomKeySave",
    "PyTreeRestore",
    "PyTreeSave",
    "RestoreArgs",
    "SaveArgs",
    "StandardRestore",
    "StandardSave",
    "register_with_handler",
]

C = TypeVar("C", bound=type)
registered: dict[tuple[type, bool], type] = {}
"""The classes of arguments of users' handlers: for a handler, and whether to save."""


class CheckpointArgs:
    """The base of all arguments, also of those for handlers of your own."""


@dataclass(frozen=True)
class StandardSave(CheckpointArgs):
    """A tree of arrays and plain values to save.

    Arguments:
        item: the tree.
        save_args: None, or a tree of `SaveArgs`, which only tune Orbax's files.
        custom_metadata: JSON that is stored with the item.
    """

    item: Any
    save_args: Any = None
    custom_metadata: Any = None


@dataclass(frozen=True)
class PyTreeSave(CheckpointArgs):
    """As `StandardSave`; `ocdbt_target_data_file_size` tunes Orbax's files."""

    item: Any
    save_args: Any = None
    ocdbt_target_data_file_size: int | None = None
    custom_metadata: Any = None


@dataclass(frozen=True)
class ArraySave(CheckpointArgs):
    """One array or number to save."""

    item: Any
    save_args: Any = None


@dataclass(frozen=True)
class JsonSave(CheckpointArgs):
    """A nested dict of JSON to save."""

    item: Mapping[str, Any]


@dataclass(frozen=True)
class JaxRandomKeySave(CheckpointArgs):
    """A JAX random key to save."""

    item: Any
    save_args: Any = None


@dataclass(frozen=True)
class NumpyRandomKeySave(CheckpointArgs):
    """What `numpy.random.get_state` returned."""

    item: Any


@dataclass(frozen=True)
class StandardRestore(CheckpointArgs):
    """A tree to restore.

    Arguments:
        item: arrays, `jax.ShapeDtypeStruct` with shardings, plain values, or what `item_metadata`
            returned; None restores NumPy arrays in dicts and lists.
        strict: True; arrays are not padded or cut.
        support_layout: False; layouts on the devices are JAX's.
        fallback_sharding: None; give shardings in `item`.
    """

    item: Any = None
    strict: bool = True
    support_layout: bool = False
    fallback_sharding: Any = None


@dataclass(frozen=True)
class PyTreeRestore(CheckpointArgs):
    """A tree to restore.

    Arguments:
        item: as for `StandardRestore`.
        restore_args: a tree of `ArrayRestoreArgs` like `item`, or like what is stored.
        transforms: None, or {}, which is `partial_restore=True`.
        transforms_default_to_original: True.
        legacy_transform_fn: None.
        partial_restore: leave out what is stored and not in `item`.
    """

    item: Any = None
    restore_args: Any = None
    transforms: Any = None
    transforms_default_to_original: bool = True
    legacy_transform_fn: Any = None
    partial_restore: bool = False


@dataclass(frozen=True)
class ArrayRestore(CheckpointArgs):
    """One array or number to restore."""

    item: Any = None
    restore_args: Any = None


@dataclass(frozen=True)
class JsonRestore(CheckpointArgs):
    """JSON to restore; `item` is not used."""

    item: Any = None


@dataclass(frozen=True)
class JaxRandomKeyRestore(CheckpointArgs):
    """A JAX random key to restore."""

    restore_args: Any = None


@dataclass(frozen=True)
class NumpyRandomKeyRestore(CheckpointArgs):
    """The state of NumPy's generator to restore."""


@dataclass(frozen=True)
class SaveArgs:
    """How Orbax writes an array; of no effect here, except that a `dtype` is refused."""

    aggregate: bool = False
    dtype: Any = None
    chunk_byte_size: int | None = None
    shard_axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class RestoreArgs:
    """How to restore a leaf: as which type, and in which dtype."""

    restore_type: Any = None
    dtype: Any = None


@dataclass(frozen=True)
class ArrayRestoreArgs(RestoreArgs):
    """How to restore an array; `mesh` and `mesh_axes` together are a `sharding`."""

    mesh: Any = None
    mesh_axes: Any = None
    sharding: Any = None
    global_shape: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    strict: bool = True


class Composite(CheckpointArgs, Mapping[str, Any]):
    """Several items by name, as arguments and as what was restored; immutable.

    Example:
        >>> found = Composite(state={"w": 1}, extra=None)
        >>> found.state, found["state"], sorted(found)
        ({'w': 1}, {'w': 1}, ['extra', 'state'])
    """

    def __init__(self, **items: Any) -> None:
        for name in items:
            if name.startswith("__"):
                raise ValueError(f"Composite: the name {name!r} must not begin with '__'")
        self.__dict__["_items"] = items

    def __getitem__(self, name: str) -> Any:
        if name not in self._items:
            raise KeyError(f"no item {name!r}; there are {', '.join(self._items) or 'none'}")
        return self._items[name]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(error.args[0]) from None

    def __setattr__(self, name: str, value: object) -> None:
        raise ValueError("a Composite does not change; make a new one")

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __repr__(self) -> str:
        return f"Composite({self._items!r})"

    def keys(self) -> KeysView[str]:
        return KeysView(self)

    def values(self) -> ValuesView[Any]:
        return ValuesView(self)

    def items(self) -> ItemsView[str, Any]:
        return ItemsView(self)


def register_with_handler(
    handler: type, for_save: bool = False, for_restore: bool = False
) -> Callable[[C], C]:
    """Says which handler saves or restores what a class of arguments describes.

    Arguments:
        handler: a class with `save(directory, args=)` and `restore(directory, args=)`.
        for_save, for_restore: what the arguments are for.
    """
    if not (for_save or for_restore):
        raise ValueError("register_with_handler: pass for_save=True or for_restore=True")

    def register(arguments: C) -> C:
        arguments.unickpt_handler = handler  # type: ignore[attr-defined]
        registered.update({(handler, True): arguments} if for_save else {})
        registered.update({(handler, False): arguments} if for_restore else {})
        return arguments

    return register


def __getattr__(name: str) -> Any:
    return names.of_orbax("args", name, {"ProtoSave": "JsonSave", "ProtoRestore": "JsonRestore"})
