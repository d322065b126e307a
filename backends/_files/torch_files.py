"""A reader of the tensors and plain values of files that torch.save or pickle wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from unickpt.backends._files.headers import naming
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.torch_trees import PlainTree, expand
from unickpt.backends._files.tree_tables import table_of_tree
from unickpt.extend import ArrayTable, Files, Leaf, RangeReader, entry_of_box


class TorchFilesReader(RangeReader):
    """Tensors and plain values of one or several files.

    Arguments:
        files: the folder.
        root: containers, plain values and tensors of `by_file`.
        by_file: the file of each tensor, by its identity as an object.
    """

    format = "torch"

    @classmethod
    def of_files(
        cls,
        files: Files,
        opened: Mapping[str, TorchFile],
        format: str,
        values: Mapping[str, Any] | None = None,
    ) -> Self:
        """A reader of whole files: a node for each; of a single file without a name, its root.

        Arguments:
            files: the folder.
            opened: by the names of their nodes.
            format: as users see it.
            values: further nodes, of plain values.
        """
        root: dict[str, Any] = dict(values or {})
        by_file: dict[int, TorchFile] = {}
        for node, file in opened.items():
            plain = PlainTree(file, f"{files.location}: {file.name}")
            root[node] = plain.tree(file.value, 1 if node else 0, len(node))
            by_file |= dict.fromkeys(plain.tensors, file)
        reader = cls(files, root.get("", root), by_file)
        reader.format = format
        return reader

    def __init__(self, files: Files, root: Any, by_file: Mapping[int, TorchFile]) -> None:
        def put(table: ArrayTable, leaf: Leaf) -> None:
            with naming(files.location, f"array {leaf.name!r}"):
                where = by_file[id(leaf.value)].box(leaf.value)
            table.put(entry_of_box(leaf.name, leaf.value.shape, leaf.value.dtype, where), (where,))

        def identity(tensor: Tensor) -> tuple[int, str]:
            return id(by_file[id(tensor)]), tensor.identity

        table = table_of_tree(files, root, Tensor, put, expand, identity)
        super().__init__(files, table.index(), table.boxes)
