"""What torch.save writes, planned: the pickles of tensors and of trees, and the zip file of both.

Sources: torch/serialization.py, torch/_tensor.py and torch/_utils.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from unickpt.arrays.box import Box
from unickpt.foreign.file_ranges import row_major
from unickpt.foreign.pickle_objects import Global, PersistentId
from unickpt.foreign.pickle_writer import PickledCall, dumps
from unickpt.foreign.torch_pickles import STORAGES
from unickpt.foreign.zip_layout import ALIGN, Content, ZipLayout
from unickpt.format.index import ArrayEntry, Index
from unickpt.trees import tree

_CLASSES = {dtype: f"torch.{name}Storage" for name, dtype in STORAGES.items()}
# Dtypes that have no class of storages of their own.
_UNTYPED = {
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
    "float8_e5m2fnuz", "float8_e8m0fnu",
}  # fmt: skip
ORDERED = Global("collections.OrderedDict")


def missing_dtypes(index: Index) -> list[ArrayEntry]:
    """The arrays whose dtype torch lacks."""
    return [
        entry
        for entry in index.arrays.values()
        if entry.dtype not in _CLASSES and entry.dtype not in _UNTYPED
    ]


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
        of, count = Global(_CLASSES[entry.dtype]), box.size
    else:
        of, count = Global("torch.storage.UntypedStorage"), box.size * entry.itemsize
    storage = PersistentId(("storage", of, key, "cpu", count))
    facts = (storage, 0, tuple(shape), strides, False, PickledCall(ORDERED))
    if entry.dtype in _CLASSES:
        return PickledCall(Global("torch._utils._rebuild_tensor_v2"), facts)
    dtype = Global(f"torch.{entry.dtype}")
    return PickledCall(Global("torch._utils._rebuild_tensor_v3"), (*facts, dtype))


def saved(
    value: Any, storages: Mapping[str, tuple[str, Box, int] | bytes], begin: int = 0
) -> ZipLayout:
    """A file of torch.save.

    Arguments:
        value: what it holds, for `pickle_writer.dumps`.
        storages: by their keys, the array, its elements, and how many bytes they are; or the bytes.
        begin: where it begins in the file that contains it.
    """
    contents = [
        Content("archive/data.pkl", dumps(value)),
        Content("archive/.format_version", b"1"),
        Content("archive/.storage_alignment", str(ALIGN).encode()),
        Content("archive/byteorder", b"little"),
    ]
    for key, of in storages.items():
        name = f"archive/data/{key}"
        contents.append(Content(name, of) if isinstance(of, bytes) else Content(name, b"", *of))
    contents.append(Content("archive/version", b"3\n"))
    return ZipLayout(contents, begin)


def object_of(node: tree.Node | tree.Leaf, value: Callable[[str], Any]) -> Any:
    """A tree as it is pickled: with Python's own containers.

    Named tuples and objects become dicts, because torch makes no others when it reads a file.

    Arguments:
        node: the tree.
        value: what to write for each leaf.
    """
    if isinstance(node, tree.Leaf):
        return value(node.name)
    children = [object_of(child, value) for child in node.children]
    if node.kind == "wrapper":
        return children[0]
    if node.kind == "list":
        return children
    if node.kind == "tuple":
        return tuple(children)
    if node.kind == "ordereddict":
        return PickledCall(ORDERED, items=list(zip(node.keys, children, strict=True)))
    return dict(zip(node.keys, children, strict=True))
