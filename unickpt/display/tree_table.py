"""The outline of a checkpoint: its tree as rows for people, with equal layers folded."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import CheckpointCorrupt
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader_protocol import BlockType
from unickpt.trees import name_ranges, tree, tree_json

# Two equal items are easy to read as two rows.
_FOLD_FROM = 3
_VALUE_WIDTH = 48
# Lists with more plain values than this, such as states of random generators, are one row.
_LONG_LIST = 16
_NO_BLOCKS: Mapping[str, BlockType] = {}


@dataclass(frozen=True)
class TreeRowFacts:
    """The displayed facts of a leaf, or of several equal leaves in total.

    `kind` is "array", "value", "per process" or "tie"; `fragments` is per leaf, `nbytes` in total.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...] | None = None
    layout: str = ""
    fragments: int | None = None
    nbytes: int = 0
    values: tuple[tree_json.Plain, ...] = ()
    targets: tuple[str, ...] = ()

    @property
    def alike(self) -> tuple[Any, ...]:
        """Equal for leaves that may share a row."""
        targets = tuple(name_ranges.skeleton(t) for t in self.targets)
        nbytes = None if self.kind == "per process" else self.nbytes
        return (self.kind, self.shape, self.dtype, self.layout, self.fragments, nbytes, targets)


@dataclass(frozen=True)
class OutlineItem:
    """A leaf or container of the outline; `count` is how many items of the tree it represents."""

    label: str
    facts: TreeRowFacts | None
    children: tuple[OutlineItem, ...] = ()
    type_name: str = ""
    count: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays and per-process values in it."""
        return self.facts.nbytes if self.facts else sum(c.nbytes for c in self.children)


@dataclass(frozen=True)
class OutlineRow:
    """One row of the table; `count` is how many items it represents within the row above it."""

    depth: int
    label: str
    count: int
    facts: TreeRowFacts | None
    nbytes: int


def outline(
    index: Index,
    where: str,
    *,
    below: str = "",
    unfolded: bool = False,
    blocks: Mapping[str, BlockType] = _NO_BLOCKS,
) -> list[OutlineRow]:
    """The rows of a checkpoint's table.

    Arguments:
        index: the checkpoint's.
        where: its path, for messages.
        below: name of a container; shows only its contents.
        unfolded: one row for every leaf.
        blocks: the type and the shape of arrays that are stored as blocks; see `Reader.blocks`.

    Raises:
        CheckpointCorrupt: the tree in the index is invalid.
        KeyError: `below` is not a container of the tree.
    """
    try:
        node = tree_json.from_json(index.tree)
    except tree_json.BadTree as error:
        raise CheckpointCorrupt(f"{where}: the index is damaged: {error}") from None
    root = _item(node, "", "", _Labels(index, _mesh_labels(index), blocks))
    for part in below.split("/") if below else ():
        matches = [child for child in root.children if child.label == part]
        if not matches:
            raise KeyError(below)
        root = matches[0]
    if not unfolded:
        root = _fold(root)
    if below or not root.children:
        return list(_rows(_compact(replace(root, label=below or "(the root)")), 0))
    return [row for child in root.children for row in _rows(_compact(child), 0)]


def container_names(index: Index) -> set[str]:
    """Names of all non-empty containers."""
    return {name[:end] for name in index.names for end in range(len(name)) if name[end] == "/"}


def layout_text(layout: Layout | None) -> str:
    """A layout in PartitionSpec's notation, or a word if no mesh axis splits anything."""
    if layout is None:
        return "boxes"
    if len(layout.mesh.processes) == 1:
        return "-"
    if not any(layout.dims):
        return "replicated"
    dims = [
        "None" if not d else d[0] if len(d) == 1 else "(" + ", ".join(d) + ")" for d in layout.dims
    ]
    return "(" + ", ".join(dims) + ")"


def fragment_count(entry: ArrayEntry) -> int:
    """Number of distinct non-empty boxes, without listing them."""
    if entry.boxes is not None:
        return len(entry.boxes)
    assert entry.layout is not None
    layout, shape = entry.layout, entry.shape
    return math.prod(
        sum(a < b for a, b in layout.intervals(shape, dim)) for dim in range(len(shape))
    )


def meshes_of(index: Index) -> list[Mesh]:
    """The distinct meshes of more than one device, in order of appearance."""
    layouts = (entry.layout for entry in index.arrays.values() if entry.layout is not None)
    return list(dict.fromkeys(x.mesh for x in layouts if len(x.mesh.processes) > 1))


def value_text(value: tree_json.Plain, width: int = _VALUE_WIDTH) -> str:
    """A plain value as Python writes it, shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 1024:
        text = hex(value)  # the number of digits is not limited, unlike decimal
    else:
        text = repr(value)
    return shorten(text, width)


def shorten(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


# --- the tree as items ------------------------------------------------------------------------


def _mesh_labels(index: Index) -> Mapping[Mesh, str]:
    meshes = meshes_of(index)
    return {m: f" on mesh {k}" for k, m in enumerate(meshes)} if len(meshes) > 1 else {}


@dataclass(frozen=True)
class _Labels:
    """The source of the facts of leaves."""

    index: Index
    meshes: Mapping[Mesh, str]
    blocks: Mapping[str, BlockType]


def _item(node: tree.Node | tree.Leaf, label: str, name: str, labels: _Labels) -> OutlineItem:
    if isinstance(node, tree.Leaf):
        return OutlineItem(label, _facts(name, labels))
    if node.kind == "wrapper":
        inner = _item(node.children[0], label, name, labels)
        return replace(inner, type_name=node.type_name or inner.type_name)
    names = tree.child_names(node.kind, node.keys, name)
    prefix = len(name) + 1 if name else 0
    children = tuple(
        _item(child, child_name[prefix:], child_name, labels)
        for child, child_name in zip(node.children, names, strict=True)
    )
    return OutlineItem(label, None, children, node.type_name)


def array_rows(index: Index, blocks: Mapping[str, BlockType] = _NO_BLOCKS) -> list[OutlineRow]:
    """A row for each array, the largest first."""
    labels = _Labels(index, _mesh_labels(index), blocks)
    rows = [OutlineRow(0, n, 1, _facts(n, labels), e.nbytes) for n, e in index.arrays.items()]
    return sorted(rows, key=lambda row: -row.nbytes)


def _facts(name: str, labels: _Labels) -> TreeRowFacts:
    index = labels.index
    if name in labels.blocks:
        block, entry = labels.blocks[name], index.arrays[name]
        count = fragment_count(entry)
        return TreeRowFacts("array", block.name, block.shape, "-", count, entry.nbytes)
    if name in index.arrays:
        entry = index.arrays[name]
        layout, count = layout_text(entry.layout), fragment_count(entry)
        if entry.layout is not None:
            layout += labels.meshes.get(entry.layout.mesh, "")
        dtype = entry.stored_dtype + (" key" if entry.prng is not None else "")
        return TreeRowFacts("array", dtype, entry.shape, layout, count, entry.nbytes)
    if name in index.aliases:
        return TreeRowFacts("tie", "", targets=(index.aliases[name],))
    if name in index.values:
        value, nbytes = index.values[name], 0
        dtype = "None" if value is None else type(value).__name__
        if isinstance(value, tree.Opaque):
            dtype = f"opaque {shorten(value.class_name, _VALUE_WIDTH)}"
            nbytes = len(value.pickle)
        return TreeRowFacts("value", dtype, nbytes=nbytes, values=(value,))
    if name in index.per_process:
        sizes = [size for size, _ in index.per_process[name].blobs]
        return TreeRowFacts("per process", "per process", fragments=len(sizes), nbytes=sum(sizes))
    return TreeRowFacts("value", "missing")


# --- folding ------------------------------------------------------------------------------------


def _alike(item: OutlineItem) -> tuple[Any, ...]:
    if item.facts is not None:
        return (item.type_name, *item.facts.alike)
    return (item.type_name, *((c.label, _alike(c)) for c in item.children))


def _as_line(item: OutlineItem) -> OutlineItem | None:
    """A long list of plain values of several types as one value; None for anything else."""
    facts = [child.facts for child in item.children if child.label.isdigit()]
    values = [f.values[0] for f in facts if f is not None and f.kind == "value" and f.values]
    is_long = len(values) == len(item.children) > _LONG_LIST
    if not is_long or any(isinstance(value, tree.Opaque) for value in values):
        return None
    kinds = dict.fromkeys("None" if v is None else type(v).__name__ for v in values)
    dtype = f"{len(values):,} values: {', '.join(kinds)}"
    return replace(item, children=(), facts=TreeRowFacts("value", dtype, values=tuple(values)))


def _fold(item: OutlineItem) -> OutlineItem:
    """Merges children whose names differ only in numbers; then merges within them."""
    line = _as_line(item)
    if line is not None:
        return line
    groups: dict[Any, list[OutlineItem]] = {}
    for child in item.children:
        # Children without a number in their name stay separate, since siblings differ in name.
        groups.setdefault((name_ranges.skeleton(child.label), _alike(child)), []).append(child)
    children = [_fold(merged) for group in groups.values() for merged in _merge_group(group)]
    return replace(item, children=tuple(children))


def _merge_group(group: list[OutlineItem]) -> list[OutlineItem]:
    """One item for a group whose numbers form a full product of ranges, else one per subgroup."""
    if len(group) < _FOLD_FROM:
        return group
    split = [name_ranges.pieces(item.label) for item in group]
    columns = [list(dict.fromkeys(column)) for column in zip(*split, strict=True)]
    varying = [i for i, column in enumerate(columns) if len(column) > 1]
    if math.prod(len(columns[i]) for i in varying) == len(group):
        label = "".join(_range(c) if i in varying else c[0] for i, c in enumerate(columns))
        return [_merged(label, group)]
    by_first: dict[str, list[OutlineItem]] = {value: [] for value in columns[varying[0]]}
    for item, pieces in zip(group, split, strict=True):
        by_first[pieces[varying[0]]].append(item)
    return [merged for part in by_first.values() for merged in _merge_group(part)]


def _merged(label: str, group: Sequence[OutlineItem]) -> OutlineItem:
    first = group[0]
    count = sum(item.count for item in group)
    if first.facts is None:
        columns = zip(*(item.children for item in group), strict=True)
        children = tuple(_merged(column[0].label, column) for column in columns)
        return replace(first, label=label, children=children, count=count)
    all_facts = [item.facts for item in group if item.facts is not None]
    facts = replace(
        first.facts,
        nbytes=sum(f.nbytes for f in all_facts),
        values=tuple(itertools.chain.from_iterable(f.values for f in all_facts)),
        targets=tuple(dict.fromkeys(itertools.chain.from_iterable(f.targets for f in all_facts))),
    )
    return replace(first, label=label, facts=facts, count=count)


def _range(numbers: Sequence[str]) -> str:
    """Numbers as `{0..31}`, or `{0..3,5}` if some are missing."""
    texts = name_ranges.runs(sorted(numbers, key=int))
    return "{" + shorten(",".join(texts), _VALUE_WIDTH) + "}"


# --- rows ---------------------------------------------------------------------------------------


def _compact(item: OutlineItem) -> OutlineItem:
    """Writes nested containers with a single child in one row, as `a/b/c`."""
    while len(item.children) == 1 and not item.type_name:
        (child,) = item.children
        item = replace(child, label=f"{item.label}/{child.label}")
    return replace(item, children=tuple(map(_compact, item.children)))


def _rows(item: OutlineItem, depth: int, above: int = 1) -> Iterator[OutlineRow]:
    yield OutlineRow(depth, _label(item), item.count // above, item.facts, item.nbytes)
    for child in item.children:
        yield from _rows(child, depth + 1, item.count)


def _label(item: OutlineItem) -> str:
    label = item.label
    if item.facts is None:
        label += "/" if item.children else ": empty"
    elif item.facts.kind == "value" and item.facts.values:
        shown = dict.fromkeys(value_text(v) for v in item.facts.values[:_VALUE_WIDTH])
        label = f"{label} = {shorten(', '.join(shown), _VALUE_WIDTH)}"
    elif item.facts.kind == "tie":
        targets = item.facts.targets
        target = targets[0] if len(targets) == 1 else name_ranges.skeleton(targets[0], "{}")
        label = f"{label} = {target}"
    if item.type_name:
        label = f"{label} ({item.type_name})"
    return label
