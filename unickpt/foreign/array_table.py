"""What the headers of files say, as a table: the arrays, and where the elements of each are.

A format whose arrays are ranges of files parses its headers into one, which `RangeReader` reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.foreign.elements import Elements
from unickpt.foreign.file_ranges import FileBox, row_major, whole
from unickpt.foreign.files import Files
from unickpt.format.index import ArrayEntry, Index
from unickpt.trees import plain_values, tree


@dataclass(frozen=True)
class TensorSource:
    """A tensor in files: all of one, or a part of it that lies together.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: its extents.
        elements: a sequence that contains its elements.
        first: the number of its first element in the sequence.
        strides: in elements; None for row-major order without gaps.
    """

    dtype: str
    shape: tuple[int, ...]
    elements: Elements
    first: int = 0
    strides: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.count * dtypes.from_name(self.dtype).itemsize

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, also for row-major order."""
        return row_major(self.shape) if self.strides is None else self.strides

    @property
    def is_row_major(self) -> bool:
        """Whether its elements follow each other in row-major order."""
        expected = row_major(self.shape)
        return all(
            n == 1 or a == b for n, a, b in zip(self.shape, self.steps, expected, strict=True)
        )

    @property
    def box(self) -> FileBox:
        """All of it, as a box of an array of its shape."""
        return FileBox(Box.whole(self.shape), self.elements, self.first, self.strides)

    def reshaped(self, shape: Sequence[int]) -> TensorSource:
        """The elements in another shape; only if they are in row-major order."""
        assert self.is_row_major, "checked by the caller"
        return TensorSource(self.dtype, tuple(shape), self.elements, self.first)


class ArrayTable:
    """The arrays and plain values of a checkpoint.

    Arguments:
        node: its tree; by default nested dicts, as the names of the arrays say.
    """

    def __init__(self, node: tree.Node | tree.Leaf | None = None) -> None:
        self._node = node
        self.entries: dict[str, ArrayEntry] = {}
        self.boxes: dict[str, Sequence[FileBox]] = {}
        """By array, for `RangeReader`."""
        self.aliases: dict[str, str] = {}
        self.values: dict[str, plain_values.Plain] = {}

    def add(self, name: str, found: TensorSource) -> None:
        """Adds an array that is one tensor."""
        where = found.box
        self.put(whole(name, found.shape, found.dtype, where), (where,))

    def put(self, entry: ArrayEntry, boxes: Sequence[FileBox]) -> None:
        """Adds an array that consists of several boxes."""
        self.entries[entry.name], self.boxes[entry.name] = entry, boxes

    def index(self, metadata: Mapping[str, Any] | None = None, processes: int = 1) -> Index:
        """The index of all that was added.

        Raises:
            ValueError: without a tree, if a name is both an array and a container.
        """
        node = tree.from_names(self.entries) if self._node is None else self._node
        return Index(
            tree.to_json(node), self.entries, aliases=self.aliases, values=self.values,
            metadata=metadata or {}, processes=processes,
        )  # fmt: skip


def table_of(
    files: Files,
    root: Any,
    kinds: type | tuple[type, ...],
    put: Callable[[ArrayTable, tree.Leaf], None],
    expand: Callable[[Any, str], tree.Expansion | None] = lambda value, name: None,
    identity: Callable[[Any], Hashable] = id,
) -> ArrayTable:
    """The table of a tree of containers, plain values and arrays.

    Arguments:
        files: of the checkpoint.
        root: the tree.
        kinds: the classes of what stands for arrays in it.
        put: adds what stands for an array to the table.
        expand: as for `tree.flatten`.
        identity: equal for what stands for the same array, whose other names are aliases.

    Raises:
        UnsupportedFormat: the tree has names, or is nested, as no tree of unickpt.
        All that `put` raises.
    """

    def is_leaf(value: Any) -> bool:
        return isinstance(value, kinds) or plain_values.is_plain(value)

    try:
        node = tree.flatten(root, is_leaf, expand)
    except UnickptError as error:
        raise UnsupportedFormat(f"{files.location}: {error}") from error
    table, first = ArrayTable(node), dict[Hashable, str]()
    for leaf in tree.leaves(node):
        if not isinstance(leaf.value, kinds):
            table.values[leaf.name] = leaf.value
            continue
        known = first.setdefault(identity(leaf.value), leaf.name)
        if known == leaf.name:
            put(table, leaf)
        else:
            table.aliases[leaf.name] = known
    return table
