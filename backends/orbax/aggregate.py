"""Values in one msgpack file next to the arrays, as Orbax before 0.5 and T5X wrote them.

The file `checkpoint` holds the whole tree. An array that was saved on its own has a text in its
place (Orbax), or a spec of TensorStore (T5X); both name a Zarr array below the folder. Sources:
orbax/checkpoint/utils.py, _src/handlers/pytree_checkpoint_handler.py, and t5x/checkpoints.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from unickpt.backends._files.msgpack_files import Elsewhere, scan
from unickpt.backends.orbax.metadata import ItemMetadata, NamedTuple, Stored, lost_leaf
from unickpt.extend import ArrayTable, Files, Index, RangeReader, TensorSource, quoted

FILE = "checkpoint"
_PREFIXES = ("PLACEHOLDER://", "AGGREGATED://")


class _AggregateReader(RangeReader):
    format = "orbax"


@dataclass(frozen=True, eq=False)
class Inline:
    """An array in the file.

    Arguments:
        files: of the item.
        source: where it is.
    """

    files: Files
    source: TensorSource

    def reader(self, name: str) -> RangeReader:
        """Reads it as an array of a name."""
        table = ArrayTable()
        table.add(name, self.source)
        return _AggregateReader(self.files, Index({}, table.entries), table.boxes)


def added(files: Files, item: ItemMetadata | None) -> ItemMetadata:
    """The parts of an item, with the values in the file.

    Arguments:
        files: of the item; one is the file.
        item: the content of `_METADATA`; None if it is missing, as before Orbax 0.2.

    Raises:
        CheckpointCorrupt: the file is damaged, or not of the same save as `_METADATA`.
        UnsupportedFormat: it refers to arrays in a way that is not known.
        Failed: the storage failed.
    """
    tree = _tree(files, scan(files, FILE), ())
    if item is None:
        return ItemMetadata(tree, _stored(files, tree), None, 2, True, {})
    flat = dict(_flat(tree, ()))
    tree = _merged(item.tree, flat, ())
    if flat:
        raise files.damaged(
            f"the file {FILE!r} has {_shown(next(iter(flat)))}, which _METADATA has not; are both "
            "of one save?"
        )
    return replace(item, tree=tree, stored=_stored(files, tree))


def _shown(path: tuple[str, ...]) -> str:
    return quoted("/".join(path))


def _tree(files: Files, node: Any, path: tuple[str, ...]) -> Any:
    """The content of the file, with `Stored` and `Inline` as leaves."""
    if isinstance(node, dict):
        return {key: _tree(files, child, (*path, str(key))) for key, child in node.items()}
    if isinstance(node, (list, tuple)):
        every = enumerate(node)
        return type(node)(_tree(files, child, (*path, str(n))) for n, child in every)
    if isinstance(node, TensorSource):
        return Inline(files, node)
    if not isinstance(node, Elsewhere):
        return node
    try:
        leaf = _by_text(node.found) if isinstance(node.found, str) else _by_spec(node.found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise files.damaged(f"{FILE}: the spec of {_shown(path)} is damaged: {error!r}") from error
    if leaf is None:
        raise files.unsupported(
            f"{FILE}: {_shown(path)} is elsewhere, in a way that is not read: {quoted(node.found)}"
        )
    return leaf


def _by_text(text: str) -> Stored | None:
    prefix = next((prefix for prefix in _PREFIXES if text.startswith(prefix)), None)
    return None if prefix is None else Stored(text.removeprefix(prefix), "array")


def _by_spec(spec: Mapping[Any, Any]) -> Stored | None:
    """The array of a spec, which is relative to the folder, whatever storage it was written to."""
    # Old versions of T5X stored bfloat16 as uint16; later ones refuse it, too.
    if spec["driver"] != "zarr" or spec["dtype"] == "uint16":
        return None
    path = spec["kvstore"].get("path", spec.get("path"))
    dtype, shape = spec["dtype"], spec["metadata"]["shape"]
    if type(path) is not str or type(dtype) is not str or any(type(n) is not int for n in shape):
        raise ValueError(quoted(spec))
    return Stored(path.rstrip("/"), "array", (dtype, tuple(shape)))


def _flat(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of a tree by their keys; there are none for empty containers."""
    if isinstance(tree, NamedTuple):
        tree = tree.fields
    if isinstance(tree, (Mapping, list, tuple)):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, child in pairs:
            yield from _flat(child, (*path, str(key)))
    else:
        yield path, tree


def _merged(tree: Any, values: dict[tuple[str, ...], Any], path: tuple[str, ...]) -> Any:
    """A tree with values from the file, as Orbax merges them.

    Arguments:
        tree: of `_METADATA`, whose containers have their types.
        values: leaves of the file by their keys; those that the tree has are taken out.
        path: of the tree.
    """
    if isinstance(tree, NamedTuple):
        return NamedTuple(tree.type_name, _merged(tree.fields, values, path))
    if isinstance(tree, Mapping) and tree:
        return {key: _merged(child, values, (*path, key)) for key, child in tree.items()}
    if isinstance(tree, (list, tuple)) and tree:
        every = enumerate(tree)
        return type(tree)(_merged(child, values, (*path, str(n))) for n, child in every)
    value = values.pop(path, tree)
    return tree if isinstance(value, Stored) else value


def _stored(files: Files, tree: Any) -> tuple[Stored, ...]:
    """The leaves of a tree that are stored on their own.

    Raises:
        CheckpointCorrupt: two of them are in the same place.
    """
    if (lost := lost_leaf(_flat(tree, ()))) is not None:
        raise files.damaged(
            f"{FILE}: {_shown(lost[0])} and {_shown(lost[1])} are both in {quoted(lost[2])}, so "
            "that the data of one of them is lost"
        )
    return tuple(leaf for _, leaf in _flat(tree, ()) if isinstance(leaf, Stored))
