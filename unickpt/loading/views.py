"""Views: a checkpoint as a load sees it, either as stored or through rules."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import filterfalse
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.layout import Layout
from unickpt.errors import CheckpointCorrupt
from unickpt.format.index import ArrayEntry, Index, tree_of
from unickpt.format.reader_protocol import Reader
from unickpt.frameworks.adapter_protocol import ArrayTarget
from unickpt.frameworks.leaves import PerProcess
from unickpt.reading.array_reader import Job, read_arrays
from unickpt.reading.checkpoint import Checkpoint
from unickpt.reading.load_options import LoadOptions
from unickpt.reading.recipes import Fill, Recipe, Unchanged, whole_dims
from unickpt.trees import tree, tree_json

if TYPE_CHECKING:
    from unickpt.frameworks.sections import StoredValue

TargetsByArray = Mapping[str, Mapping[str, ArrayTarget]]


class View(Protocol):
    """A checkpoint as a load compares and reads it: as stored, or through rules.

    A load sees a checkpoint only as a view; rules build one from a reader and a request.
    """

    checkpoint: Reader
    """The reader of the stored checkpoint."""
    index: Index
    """The arrays and values, under the requested names."""
    kept_names: frozenset[str] = frozenset()
    """Names that may be requested but are intentionally missing."""
    misfits: Mapping[str, str] = MappingProxyType({})
    """Requested leaves that are missing because the stored leaf has a different shape: the
    names of the stored leaves, by requested name."""
    renamed: Mapping[str, str] = MappingProxyType({})
    """The stored names of leaves that are requested under other names without a rule."""
    unused: Sequence[str] = ()
    """The names of stored leaves that no requested leaf uses."""
    dropped: Collection[str] = ()
    """The names of stored leaves that rules drop."""
    sources: Collection[str] = ()
    """The stored names, if they mean something else than those of the index."""
    numbers: Mapping[str, tree_json.Plain] = MappingProxyType({})
    """The arrays of the index that are stored as plain numbers."""

    def node(self) -> tree.Node | tree.Leaf:
        """The structure that a load without `like` returns."""

    def is_dispensable(self, name: str) -> bool:
        """Whether a request may lack a stored leaf, such as a flag of an optimizer that only some
        versions of torch have."""

    def recipe(self, name: str) -> Recipe:
        """The sources of an array of the index."""

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        """As `Checkpoint.per_process`."""

    def check(self, options: LoadOptions) -> None:
        """Checks that no data is lost with the stored arrays that are not read: only rules make one
        array of two, or leave one out.

        Raises:
            LoadMismatch: some would be lost.
        """
        return

    def jobs(self, targets_by_array: TargetsByArray) -> list[Job]:
        """The jobs to read, each a group that needs the same stored arrays.

        Arguments:
            targets_by_array: for arrays of the index, their targets by name.
        """
        recipes = {name: self.recipe(name) for name in targets_by_array}
        above: dict[
            str, str
        ] = {}  # of stored arrays that are read together; itself, of one of them

        def top(entry: str) -> str:
            while (upper := above.setdefault(entry, entry)) != entry:
                above[entry] = entry = above[upper]
            return entry

        for recipe in recipes.values():
            for source in recipe.sources[1:]:
                above[top(source.entry.name)] = top(recipe.sources[0].entry.name)
        groups: dict[object, tuple[dict[str, ArrayTarget], dict[str, Recipe]]] = {}
        for name, recipe in recipes.items():
            group = top(recipe.sources[0].entry.name) if recipe.sources else (name,)
            targets, target_recipes = groups.setdefault(group, ({}, {}))
            targets |= targets_by_array[name]
            target_recipes |= dict.fromkeys(targets_by_array[name], recipe)
        return [Job(*group) for group in groups.values()]


class StoredView(View):
    """A checkpoint as it is stored; `serve` adapts it to a request.

    Arguments:
        checkpoint: the stored checkpoint.
    """

    def __init__(self, checkpoint: Reader) -> None:
        self.checkpoint, self.index = checkpoint, checkpoint.index
        self._leaves: Mapping[str, Any] = {}

    def serve(self, leaves: Mapping[str, Any], targets: Mapping[str, ArrayTarget]) -> None:
        """Adapts it to a request: numbers become arrays, and names lose the components of torch's
        wrappers (see `unickpt.trees.wrapper_names`).

        Arguments:
            leaves: of `like`, by name.
            targets: the arrays among them.
        """
        self._leaves, have = leaves, self.index.names
        self.unused = [name for name in have if name not in leaves]
        lacking = [name for name in leaves if name not in have]
        if lacking:
            from unickpt.trees.wrapper_names import without_wrappers

            self.renamed = without_wrappers(lacking, self.unused)
            self.index = _with_names(self.index, self.renamed)
            self.unused = [*filterfalse({*self.renamed.values()}.__contains__, self.unused)]
        index, numbers = self.index, dict[str, ArrayEntry]()
        for name in filter(targets.__contains__, index.values):
            entry = number_entry(name, index.values[name], targets[name].dtype)
            if entry is not None and not targets[name].shape:
                numbers[name] = entry
        if numbers:
            self.numbers = {name: index.values[name] for name in numbers}
            plain = {name: v for name, v in index.values.items() if name not in numbers}
            self.index = replace(index, arrays={**index.arrays, **numbers}, values=plain)

    def node(self) -> tree.Node | tree.Leaf:
        try:
            return tree_of(self.checkpoint.index)
        except tree_json.BadTree as error:
            raise CheckpointCorrupt(f"{self.checkpoint.location}: {error}") from None

    def is_dispensable(self, name: str) -> bool:
        from unickpt.trees.optimizer_settings import may_lack

        return may_lack(name, self.checkpoint.index.values.get(name, 0), self._leaves)

    def recipe(self, name: str) -> Recipe:
        if name in self.numbers:
            return number_recipe(self.numbers[name])
        return Recipe((Unchanged(self.index.arrays[name]),))

    def jobs(self, targets_by_array: TargetsByArray) -> list[Job]:
        arrays, numbers = self.index.arrays, self.numbers  # no two need the same stored array
        return [
            Job(targets, dict.fromkeys(targets, self.recipe(name)))
            if name in numbers
            else Job(targets, entry=arrays[name])
            for name, targets in targets_by_array.items()
        ]

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        return self.checkpoint.per_process(self.renamed.get(name, name), processes)


def number_entry(
    name: str, value: tree_json.Plain, dtype: dtypes.DType, *, is_held: bool = False
) -> ArrayEntry | None:
    """The entry of a plain number that becomes an array; None if it cannot be one.

    A float that the dtype does not hold exactly stays a float64, as in Python; `cast=True` may
    round it.

    Arguments:
        name, value: of the number.
        dtype: of the array.
        is_held: whether it becomes an array in any case.
    """
    if not isinstance(value, bool | int | float):
        return None
    if not is_held and tree_json.as_array(value, dtype) is None:
        if not (isinstance(value, float) and tree_json.is_kind(value, dtype)):
            return None
        dtype = np.dtype(np.float64)
    return ArrayEntry(name, (), dtypes.name_of(dtype), (), Layout.replicated(0, 1))


def number_recipe(value: Any) -> Recipe:
    """The recipe of a 0-d array from a number; reads nothing."""
    return Recipe((), (Fill((), whole_dims(()), value),))


def stored_leaf(index: Index, name: str) -> Any:
    """The leaf of a name in an index: the entry of an array, a `PerProcess`, or a plain value."""
    target = index.aliases.get(name, name)
    if target in index.arrays:
        return index.arrays[target]
    return PerProcess() if name in index.per_process else index.values.get(name)


def leaf_text(leaf: Any) -> str:
    """A stored leaf as text."""
    if isinstance(leaf, ArrayEntry):
        return leaf.dtype_and_shape
    if isinstance(leaf, PerProcess):
        return "a PerProcess"
    number = f" {leaf}" if isinstance(leaf, bool | int | float) else ""
    return f"plain {type(leaf).__name__}{number}"


def _with_names(index: Index, renamed: Mapping[str, str]) -> Index:
    """An index with renamed leaves.

    Arguments:
        index: as it is stored.
        renamed: the stored names by the new ones.
    """
    if not renamed:
        return index
    new = {old: name for name, old in renamed.items()}
    aliases = {new.get(alias, alias): target for alias, target in index.aliases.items()}
    # An entry's name locates its chunks, so the entry stays unchanged under the new name.
    aliases |= {name: old for name, old in renamed.items() if old in index.arrays}
    return replace(
        index,
        aliases=aliases,
        values={new.get(name, name): v for name, v in index.values.items()},
        per_process={new.get(name, name): p for name, p in index.per_process.items()},
    )


def structure_of(stored: Checkpoint) -> tree.Node | tree.Leaf:
    """The structure of a stored tree: its containers, and the names of their members. The values
    are in `stored.index.values`, and the entries of arrays in `stored.index.arrays`.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    return StoredView(stored.reader).node()


def read_into(stored: Checkpoint, targets: TargetsByArray, options: LoadOptions) -> None:
    """Reads boxes of stored arrays into memory; reads each chunk once, and checks it.

    Arguments:
        stored: the checkpoint.
        targets: for each array the destination of its boxes, by any names, such as
            `LocalFragments(shape, [(box, tensor)]).target()`.
        options: how to read; this process reads alone.

    Raises:
        CheckpointReplaced: a save has replaced the checkpoint.
        UnickptError: as `unickpt.load`.
    """
    read_arrays(stored.reader, StoredView(stored.reader).jobs(targets), options)


def unchanged_entry(view: View, name: str) -> ArrayEntry | None:
    """The stored array that equals an array of a view's index unchanged; None if there is none."""
    recipe = view.recipe(name)
    if len(recipe.sources) != 1 or recipe.fills or recipe.function is not None:
        return None
    (source,) = recipe.sources
    is_same = source.is_identity and source.entry.dtype == view.index.arrays[name].dtype
    return source.entry if is_same else None


def same_digests(a: Reader, mine: ArrayEntry, b: Reader, other: ArrayEntry) -> bool:
    """Whether digests alone prove that two stored arrays are equal; reads nothing else."""
    grids = [
        (x.shape, x.dtype, x.codec and x.encoding, x.chunk, x.cut, x.boxes) for x in (mine, other)
    ]
    if grids[0] != grids[1] or (mine.cut and mine.layout != other.layout):
        return False
    ours, theirs = a.digests_of(mine.name), b.digests_of(other.name)
    return (
        ours is not None
        and theirs is not None
        and bool(np.array_equal(ours["digest"], theirs["digest"]))
    )
