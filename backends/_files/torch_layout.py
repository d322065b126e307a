"""The plan of a torch.save file: the pickles of tensors and of trees, and the zip file of both.

Sources: torch/serialization.py, torch/_tensor.py and torch/_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from unickpt.backends._files.pickle_writer import PickledCall, dumps
from unickpt.backends._files.pickles import Global, PersistentId
from unickpt.backends._files.torch_tensors import STORAGES
from unickpt.backends._files.zip_layout import ALIGN, Content, ZipLayout
from unickpt.extend import ArrayEntry, Box, Index, Leaf, Node, PlannedFile, row_major

_CLASSES = {dtype: f"torch.{name}Storage" for name, dtype in STORAGES.items()}
# Dtypes that have no class of storages of their own.
_UNTYPED = {
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
ORDERED = Global("collections.OrderedDict")
Storages = Mapping[str, tuple[str, Box, int] | bytes]
"""By their keys: the array, its elements, and how many bytes they are; or the bytes."""


def missing_dtypes(index: Index) -> list[ArrayEntry]:
    """The arrays whose dtype torch lacks."""
    return [e for e in index.arrays.values() if e.dtype not in {*_CLASSES, *_UNTYPED}]


def tensor(entry: ArrayEntry, shape: Sequence[int], key: str) -> PickledCall:
    """A contiguous tensor.

    Arguments:
        entry: gives its dtype.
        shape: its extents.
        key: of its storage.
    """
    box = Box.whole(tuple(shape))
    strides = row_major(tuple(max(1, n) for n in shape))
    if entry.dtype in _CLASSES:
        storage_class, count = Global(_CLASSES[entry.dtype]), box.size
    else:
        storage_class, count = Global("torch.storage.UntypedStorage"), box.size * entry.itemsize
    storage = PersistentId(("storage", storage_class, key, "cpu", count))
    facts = (storage, 0, tuple(shape), strides, False, PickledCall(ORDERED))
    if entry.dtype in _CLASSES:
        return PickledCall(Global("torch._utils._rebuild_tensor_v2"), facts)
    dtype = Global(f"torch.{entry.dtype}")
    return PickledCall(Global("torch._utils._rebuild_tensor_v3"), (*facts, dtype))


def saved(value: Any, storages: Storages, begin: int = 0) -> ZipLayout:
    """A file of torch.save.

    Arguments:
        value: its content, for `pickle_writer.dumps`.
        storages: by their keys, the array, its elements, and how many bytes they are; or the bytes.
        begin: where it begins in the file that contains it.
    """
    contents = [
        Content("archive/data.pkl", dumps(value)),
        Content("archive/.format_version", b"1"),
        Content("archive/.storage_alignment", str(ALIGN).encode()),
        Content("archive/byteorder", b"little"),
    ]
    for key, elements in storages.items():
        parts = (elements,) if isinstance(elements, bytes) else (b"", *elements)
        contents.append(Content(f"archive/data/{key}", *parts))
    contents.append(Content("archive/version", b"3\n"))
    return ZipLayout(contents, begin)


def leaves_of(index: Index, left_out: Set[str] = frozenset()) -> tuple[dict[str, Any], Storages]:
    """The value that a pickle has in place of each leaf, and the storages that it refers to.

    Arguments:
        index: of the checkpoint.
        left_out: the names of arrays that it does not have as tensors.
    """
    leaves: dict[str, Any] = dict(index.values)
    storages: dict[str, tuple[str, Box, int]] = {}
    for number, (name, entry) in enumerate(index.arrays.items()):
        if name not in left_out:
            leaves[name] = tensor(entry, entry.shape, str(number))
            storages[str(number)] = (name, Box.whole(entry.shape), entry.nbytes)
    leaves |= {alias: leaves[target] for alias, target in index.aliases.items() if target in leaves}
    return leaves, storages


def planned_file(name: str, value: Any, storages: Storages, last: bool = True) -> PlannedFile:
    """A file of torch.save, by default one that is a whole checkpoint; arguments as of `saved`."""
    zipped = saved(value, storages)
    data = tuple(zipped.data)
    return PlannedFile(name, zipped.size, zipped.texts, data, zipped.ending, last=last)


def object_of(node: Node | Leaf, value: Callable[[str], Any]) -> Any:
    """A tree as it is pickled: with Python's own containers.

    Named tuples and objects become dicts, because torch makes no others when it reads a file.

    Arguments:
        node: the tree.
        value: the value to write for each leaf.
    """
    if isinstance(node, Leaf):
        return value(node.name)
    return container(node, [object_of(child, value) for child in node.children])


def container(node: Node, children: Sequence[Any]) -> Any:
    """A container of a tree as it is pickled, from the pickled values of its children."""
    if node.kind == "wrapper":
        return children[0]
    if node.kind == "list":
        return list(children)
    if node.kind == "tuple":
        return tuple(children)
    if node.kind == "ordereddict":
        return PickledCall(ORDERED, items=list(zip(node.keys, children, strict=True)))
    return dict(zip(node.keys, children, strict=True))
