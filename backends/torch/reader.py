"""Files of torch.save, and Hugging Face folders of them, read in place.

Sources: torch/serialization.py, and transformers' `pytorch_model.bin.index.json`. Nothing that a
file names is imported or called.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from unickpt.backends._files import loose_files
from unickpt.backends._files.hugging_face import weight_map
from unickpt.backends._files.loose_files import FoundFiles, open_kind
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.torch_trees import PlainTree, expand
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import (
    ArrayTable,
    Failed,
    FileBox,
    Files,
    Leaf,
    RangeReader,
    Reader,
    entry_of_box,
    quoted,
    reading_failed,
    table_of_tree,
)

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens files of torch.save; None if there are none.

    Raises:
        CheckpointCorrupt: a file is damaged, or missing.
        UnsupportedFormat: it is an old kind of file, or there are several and no index.
        StorageError: the storage failed.
    """

    def make(found: FoundFiles) -> Reader:
        if found.index is None:
            return _open_single(files, found.names[0])
        where = weight_map(files, found.index, loose_files.TORCH.suffixes)
        return _open_sharded(files, where, found.index)

    return open_kind(files, loose_files.TORCH, make)


class TorchFilesReader(RangeReader):
    """Tensors and plain values of one or several files.

    Arguments:
        files: the folder.
        root: containers, plain values and tensors of `by_file`.
        by_file: the file of each tensor, by its identity as an object.
    """

    format = "torch"

    def __init__(self, files: Files, root: Any, by_file: Mapping[int, TorchFile]) -> None:
        def put(table: ArrayTable, leaf: Leaf) -> None:
            where = _box(files, by_file[id(leaf.value)], leaf)
            table.put(entry_of_box(leaf.name, leaf.value.shape, leaf.value.dtype, where), (where,))

        def identity(tensor: Tensor) -> tuple[int, str]:
            return id(by_file[id(tensor)]), tensor.identity

        table = table_of_tree(files, root, Tensor, put, expand, identity)
        super().__init__(files, table.index(), table.boxes)


def _box(files: Files, file: TorchFile, leaf: Leaf) -> FileBox:
    try:
        return file.box(leaf.value)
    except Failed as error:
        raise reading_failed(error, f"{files.location}: array {leaf.name!r}") from error
    except CheckpointCorrupt as error:
        raise files.damaged(f"array {leaf.name!r}: {error}") from error


# --- which files ----------------------------------------------------------------------------


def _open_single(files: Files, name: str) -> Reader:
    file = TorchFile(files, name)
    plain = PlainTree(file, f"{files.location}: {name}")
    root = plain.tree(file.value, 0, 0)
    return TorchFilesReader(files, root, dict.fromkeys(plain.tensors, file))


def _open_sharded(files: Files, where: Mapping[str, str], index: str) -> Reader:
    opened = {name: TorchFile(files, name) for name in sorted({*where.values()})}
    root: dict[str, Any] = {}
    by_file: dict[int, TorchFile] = {}
    missing = []
    others = {
        name: of
        for of, file in opened.items()
        for name, value in (file.value.items() if isinstance(file.value, dict) else ())
        if isinstance(name, str) and name not in where and isinstance(value, Tensor)
    }
    for name, of in {**where, **others}.items():  # what an index lacks is not hidden
        state = opened[of].value
        found = state.get(name) if isinstance(state, dict) else None
        if isinstance(found, Tensor):
            root[name] = found
            by_file[id(found)] = opened[of]
        else:
            missing.append(name)
    if missing:
        raise files.damaged(
            f"{index} says that {quoted(missing[0])} is in {where[missing[0]]}, which does not "
            f"contain it; {len(missing)} missing in all"
        )
    return TorchFilesReader(files, root, by_file)
