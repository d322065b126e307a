"""Views: a checkpoint as a load sees it, either as stored or through rules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from unickpt import dtypes, tree, values
from unickpt.adapt import Adapter, Array, ArrayTarget
from unickpt.box import Box, cut
from unickpt.checkpoint import Checkpoint
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.feed import Fill, Itself, Recipe, whole_dims
from unickpt.index import ArrayEntry, Index, PerProcessEntry
from unickpt.layout import Layout
from unickpt.marks import PerProcess
from unickpt.options import LoadOptions
from unickpt.provenance import Provenance
from unickpt.read import Job, read_box, read_made
from unickpt.rules import Function, Rules
from unickpt.rules.matching import Fact
from unickpt.rules.plan import Constant, Made, Plan, Same, Stored
from unickpt.rules.planner import make_plan, offers
from unickpt.wanted import Wanted
from unickpt.wrapped import without_wrappers


class View(Protocol):
    """What a load needs to know about a checkpoint."""

    @property
    def checkpoint(self) -> Checkpoint: ...

    @property
    def index(self) -> Index:
        """The arrays and values, under the requested names."""

    @property
    def kept(self) -> frozenset[str]:
        """Names that may be requested and are missing on purpose."""

    @property
    def misfits(self) -> Mapping[str, str]:
        """Requested leaves that are missing because the stored leaf has a different shape: what is
        stored, by name."""

    @property
    def renamed(self) -> Mapping[str, str]:
        """The stored names of leaves that are requested under other names without a rule."""

    @property
    def unused(self) -> Sequence[str]:
        """The names of stored leaves that no requested leaf uses."""

    @property
    def numbers(self) -> Mapping[str, values.Plain]:
        """The arrays of the index that are stored as plain numbers."""

    def shown(self, name: str) -> str:
        """What is stored under a name, as text."""

    def node(self) -> tree.Node | tree.Leaf:
        """The structure that a load without `like` returns."""

    def recipe(self, name: str) -> Recipe:
        """The sources of an array of the index."""

    def per_process(self, name: str, of: Sequence[int] | None = None) -> tuple[bytes, ...]:
        """As `Checkpoint.per_process`."""

    def twin(self, name: str) -> ArrayEntry | None:
        """The stored array that equals an array of the index unchanged; None if there is none."""


class AsStored:
    """A checkpoint as it is stored, adapted to what is requested, if that is known.

    Numbers that are requested as arrays become arrays, and names lose the components of torch's
    wrappers (see `unickpt.wrapped`).

    Arguments:
        checkpoint: what is stored.
        asked: what is asked for, where that is known.
    """

    kept: frozenset[str] = frozenset()
    misfits: Mapping[str, str] = {}

    def __init__(self, checkpoint: Checkpoint, asked: Mapping[str, Fact] | None = None) -> None:
        self.checkpoint, self.index = checkpoint, checkpoint.index
        self.renamed: Mapping[str, str] = {}
        self._asked, self.numbers = asked or {}, dict[str, values.Plain]()
        if asked is not None:
            self._serve(asked)

    def _serve(self, asked: Mapping[str, Fact]) -> None:
        have = stored_names(self.index)
        self.renamed = without_wrappers(
            [name for name in asked if name not in have],
            [name for name in have if name not in asked],
        )
        index = _with_names(self.index, self.renamed)
        entries = {name: _as_array(name, v, asked.get(name)) for name, v in index.values.items()}
        numbers = {name: entry for name, entry in entries.items() if entry is not None}
        self.numbers = {name: index.values[name] for name in numbers}
        plain = {name: v for name, v in index.values.items() if name not in numbers}
        self.index = replace(index, arrays={**index.arrays, **numbers}, values=plain)

    @property
    def unused(self) -> Sequence[str]:
        served = {*self._asked, *self.renamed.values()}
        return [name for name in stored_names(self.checkpoint.index) if name not in served]

    def shown(self, name: str) -> str:
        return shown(stored_leaf(self.checkpoint.index, name))

    def node(self) -> tree.Node | tree.Leaf:
        index = self.index
        try:
            node = tree.from_json(index.tree)
        except tree.BadTree as error:
            raise CheckpointCorrupt(f"{self.checkpoint.location}: {error}") from None
        in_tree = {leaf.name for leaf in tree.leaves(node)}
        in_index = set(stored_names(index))
        if in_tree != in_index:
            name = min(in_tree ^ in_index)
            raise CheckpointCorrupt(
                f"{self.checkpoint.location}: leaf {name!r} is in the tree of the index or in its "
                "lists, but not in both"
            )
        return node

    def recipe(self, name: str) -> Recipe:
        if name in self.numbers:
            return _number_recipe(self.numbers[name])
        return Recipe((Itself(self.index.arrays[name]),))

    def per_process(self, name: str, of: Sequence[int] | None = None) -> tuple[bytes, ...]:
        return self.checkpoint.per_process(self.renamed.get(name, name), of)

    def twin(self, name: str) -> ArrayEntry | None:
        return None if name in self.numbers else self.index.arrays[name]


class Ruled:
    """A checkpoint through rules.

    Arguments:
        checkpoint: what is stored.
        plan: what rules make of it.
        provenance: what to record about the result.
        asked: what is asked for, where that is known.
    """

    renamed: Mapping[str, str] = {}

    def __init__(
        self,
        checkpoint: Checkpoint,
        plan: Plan,
        provenance: Provenance,
        asked: Mapping[str, Fact] | None = None,
    ) -> None:
        self.checkpoint, self.plan, self.provenance = checkpoint, plan, provenance
        self._recipes: dict[str, Recipe] = {}
        self.numbers: dict[str, values.Plain] = {}
        arrays: dict[str, ArrayEntry] = {}
        plain: dict[str, values.Plain] = {}
        self._sources: dict[str, str] = {}
        blobs: dict[str, PerProcessEntry] = {}
        stored = checkpoint.index
        for name, made in plan.made.items():
            if made.fact.kind == "array":
                arrays[name] = _entry(made, stored)
                self._recipes[name] = Recipe(made.feeds, made.fills, self._function(made))
            elif made.fact.kind == "process":
                assert made.source is not None, "only arrays are made of more than one thing"
                blobs[name] = stored.per_process[made.source]
                self._sources[name] = made.source
            else:
                assert made.source is not None, "likewise"
                value = stored.values[made.source]
                entry = _as_array(name, value, (asked or {}).get(name), made)
                if entry is None:
                    plain[name] = value
                else:
                    arrays[name], self.numbers[name] = entry, value
                    self._recipes[name] = _number_recipe(value)
        self.index = replace(
            stored, tree=None, arrays=arrays, aliases=plan.aliases, values=plain, per_process=blobs
        )
        self.kept, self.misfits = frozenset(plan.kept), plan.misfits
        self.unused: Sequence[str] = plan.unused

    def shown(self, name: str) -> str:
        return shown(stored_leaf(self.checkpoint.index, name))

    def node(self) -> tree.Node | tree.Leaf:
        return tree.from_names(stored_names(self.index))

    def keep(self, plain: Mapping[str, values.Plain]) -> None:
        """Adds values that no rule makes."""
        self.index = replace(self.index, values={**self.index.values, **plain})

    def recipe(self, name: str) -> Recipe:
        return self._recipes[name]

    def per_process(self, name: str, of: Sequence[int] | None = None) -> tuple[bytes, ...]:
        return self.checkpoint.per_process(self._sources[name], of)

    def twin(self, name: str) -> ArrayEntry | None:
        made = self.plan.made[name]
        if made.fact.kind != "array" or len(made.feeds) != 1 or made.fills:
            return None
        (feed,) = made.feeds
        return feed.entry if feed.is_identity and feed.entry.dtype == made.fact.dtype else None

    def check(self, options: LoadOptions) -> None:
        """Checks that no data is lost with the stored arrays that are not read.

        Raises:
            LoadMismatch: two arrays that become one differ, or an array that is dropped as a
                constant is not constant.
        """
        for check in self.plan.checks:
            if isinstance(check, Same):
                self._check_same(check, options)
            else:
                self._check_constant(check, options)

    def _check_same(self, check: Same, options: LoadOptions) -> None:
        index = self.checkpoint.index
        if check.first in index.values or check.other in index.values:
            same = index.values.get(check.first) == index.values.get(check.other)
        else:
            first, other = (_stored_entry(index, n) for n in (check.first, check.other))
            recipe = Recipe((Itself(first),))
            if check.made is not None:
                recipe = Recipe(check.made.feeds)
                same = False
            else:
                one = first.name == other.name
                same = one or same_digests(self.checkpoint, first, self.checkpoint, other)
            both = recipe, Recipe((Itself(other),))
            same = same or all(
                _same_bits(*(read_made(self.checkpoint, other, r, box, options) for r in both))
                for box in _pieces(other, options)
            )
        if not same:
            raise LoadMismatch(
                f"{self.checkpoint.location}: {check.first!r} and {check.other!r} are to become "
                f"one, but differ\n  {check.rule}"
            )

    def _check_constant(self, check: Constant, options: LoadOptions) -> None:
        index = self.checkpoint.index
        if check.name in index.values:
            same = index.values[check.name] == check.value
        else:
            entry = _stored_entry(index, check.name)
            value = dtypes.constant(check.value, dtypes.from_name(entry.dtype))
            same = all(
                (read_box(self.checkpoint, entry, box, verify=options.verify) == value).all()
                for box in _pieces(entry, options)
            )
        if not same:
            raise LoadMismatch(
                f"{self.checkpoint.location}: {check.name!r} is not {check.value:g} "
                f"everywhere, so leaving it out would lose it\n  {check.rule}"
            )

    def _function(self, made: Made) -> _Function | None:
        if made.function is None:
            return None
        return _Function(self.checkpoint, made, made.function)


@dataclass(frozen=True)
class _Function:
    """A function that makes an array of a view from stored arrays."""

    checkpoint: Checkpoint
    made: Made
    function: Function

    @property
    def name(self) -> str:
        return self.made.name

    def __call__(self, box: Box, verify: bool) -> Array:
        """The elements of a box.

        Raises:
            LoadMismatch: the function returns a wrong shape, or values that the dtype does not
                hold.
        """
        made, function = self.made, self.function
        regions: Sequence[Box] = [box] * len(made.inputs)
        if function.region is not None:
            regions = function.region(box, *(one.fact.shape for one in made.inputs))
        stored, options = self.checkpoint, LoadOptions(verify=verify)
        inputs = [
            read_made(stored, _entry(one, stored.index), Recipe(one.feeds), region, options)
            for one, region in zip(made.inputs, regions, strict=True)
        ]
        found = np.asarray(function.apply(box, *inputs))
        if found.shape != box.shape:
            raise LoadMismatch(
                f"array {made.name!r}: the function made {list(found.shape)} for the box {box} of "
                f"shape {list(box.shape)}\n  {made.rule}"
            )
        due = dtypes.from_name(made.fact.dtype)
        with np.errstate(all="ignore"):
            cast = found.astype(due, copy=False)
            same = (cast == found) | ((cast != cast) & (found != found))
        if not same.all():
            raise LoadMismatch(
                f"array {made.name!r}: the function made {found.dtype}, which {due} does not hold; "
                f"convert it in the function, or write `as {found.dtype}` after the axes\n  "
                f"{made.rule}"
            )
        return cast


def same_digests(a: Checkpoint, mine: ArrayEntry, b: Checkpoint, other: ArrayEntry) -> bool:
    """Whether digests alone prove that two stored arrays are equal; reads nothing else."""
    grids = [(x.shape, x.dtype, x.chunk, x.cut, x.boxes) for x in (mine, other)]
    if grids[0] != grids[1] or (mine.cut and mine.layout != other.layout):
        return False
    ours, theirs = a.digests_of(mine.name), b.digests_of(other.name)
    return bool(np.array_equal(ours["digest"], theirs["digest"]))


def through(
    checkpoint: Checkpoint,
    rules: Rules,
    asked: Mapping[str, Fact] | None = None,
    *,
    strict: bool = True,
    keep_misfits: bool = False,
) -> Ruled:
    """A checkpoint through rules.

    Arguments:
        checkpoint: what is stored.
        rules: the rules.
        asked: what is requested; None if the rules alone decide.
        strict, keep_misfits: see `make_plan`.

    Raises:
        RuleError: the rules do not fit what is stored or requested.
        TypeError: they are not `Rules`.
    """
    if not isinstance(rules, Rules):
        raise TypeError(
            f"rules is of type {type(rules).__name__}; make it with unickpt.Rules.load(file), "
            ".parse(text) or .preset(name)"
        )
    where = str(checkpoint.location)
    recorded = Provenance.of(checkpoint.metadata, where)
    recorded.check(rules, where)
    plan = make_plan(
        rules.rules,
        rules.shared,
        rules.functions,
        replace(stored_facts(checkpoint), sizes=recorded.sizes),
        asked,
        strict=strict,
        keep_misfits=keep_misfits,
        where=where,
    )
    return Ruled(checkpoint, plan, recorded.after(rules, plan, where), asked)


class Offered(Mapping[str, Any]):
    """Everything that rules could make of a checkpoint, by name; computed on first access.

    Arguments:
        checkpoint: what is stored.
        rules: the rules.
        asked: returns what else is requested.
    """

    def __init__(
        self, checkpoint: Checkpoint, rules: Rules, asked: Callable[[], Mapping[str, Fact]]
    ) -> None:
        self._checkpoint, self._rules, self._asked = checkpoint, rules, asked

    @cached_property
    def _found(self) -> dict[str, Any]:
        index = self._checkpoint.index
        made = offers(
            self._rules.rules,
            self._rules.shared,
            self._rules.functions,
            stored_facts(self._checkpoint),
            self._asked(),
        )
        return {
            name: _entry(m, index) if m.fact.kind == "array" else index.values.get(m.source or "")
            for name, m in made.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def wanted_through(
    like: Any, checkpoint: Checkpoint, rules: Rules, among: Sequence[Adapter]
) -> Wanted:
    """What a tree requests; optimizers without state request what the rules could make."""
    known = Offered(checkpoint, rules, lambda: Wanted.of(like, among, {}).facts)
    return Wanted.of(like, among, known)


def stored_facts(checkpoint: Checkpoint) -> Stored:
    """What is stored, as rules see it."""
    index = checkpoint.index
    entries = {**index.arrays, **{a: index.arrays[t] for a, t in index.aliases.items()}}
    facts = {name: Fact("array", e.shape, e.dtype) for name, e in entries.items()}
    facts |= {name: Fact("value") for name in index.values}
    facts |= {name: Fact("process") for name in index.per_process}
    return Stored(facts, entries)


def _entry(made: Made, stored: Index) -> ArrayEntry:
    shape = made.fact.shape
    # Nothing is written with this entry, so its layout and chunk are those of an unsplit array.
    chunk = tuple(max(1, n) for n in shape)
    prng = None
    if len(made.feeds) == 1 and made.feeds[0].is_identity:
        prng = made.feeds[0].entry.prng
    layout = Layout.replicated(len(shape), 1)
    return ArrayEntry(made.name, shape, made.fact.dtype, chunk, layout, prng=prng)


def _as_array(
    name: str, value: values.Plain, asked: Fact | None, made: Made | None = None
) -> ArrayEntry | None:
    """The entry of a plain number that is requested as an array.

    A float that the requested dtype does not hold exactly stays a float64, as in Python;
    `cast=True` may round it.
    """
    told = made.fact.dtype if made is not None else ""
    target = asked.dtype if asked is not None and asked.kind == "array" else ""
    if not (told or target) or not isinstance(value, bool | int | float):
        return None
    if target and asked is not None and asked.shape != ():
        return None
    dtype = dtypes.from_name(told or target)
    if made is not None and told:
        array = np.asarray(value).astype(dtype)
        if type(value) is not float and array.item() != value:
            raise LoadMismatch(
                f"value {made.source!r}: {dtypes.name_of(dtype)} does not hold {value} exactly\n"
                f"  {made.rule}"
            )
    elif values.as_array(value, dtype) is None:
        if not (isinstance(value, float) and values.is_kind(value, dtype)):
            return None
        dtype = np.dtype(np.float64)
    return ArrayEntry(name, (), dtypes.name_of(dtype), (), Layout.replicated(0, 1))


def _number_recipe(value: Any) -> Recipe:
    """The recipe of a 0-d array from a number; reads nothing."""
    return Recipe((), (Fill((), whole_dims(()), value),))


def stored_names(index: Index) -> dict[str, None]:
    """All names of an index, in its order."""
    return dict.fromkeys([*index.arrays, *index.aliases, *index.values, *index.per_process])


def stored_leaf(index: Index, name: str) -> Any:
    """The leaf of a name in an index: the entry of an array, a `PerProcess`, or a plain value."""
    target = index.aliases.get(name, name)
    if target in index.arrays:
        return index.arrays[target]
    return PerProcess() if name in index.per_process else index.values.get(name)


def shown(found: Any) -> str:
    """What is stored, as text."""
    if isinstance(found, ArrayEntry):
        return f"{found.dtype}{list(found.shape)}"
    if isinstance(found, PerProcess):
        return "a PerProcess"
    number = f" {found}" if isinstance(found, bool | int | float) else ""
    return f"plain {type(found).__name__}{number}"


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
    # An entry's name locates its chunks, so the entry stays as it is under the new name.
    aliases |= {name: old for name, old in renamed.items() if old in index.arrays}
    return replace(
        index,
        aliases=aliases,
        values={new.get(name, name): v for name, v in index.values.items()},
        per_process={new.get(name, name): p for name, p in index.per_process.items()},
    )


def _stored_entry(index: Index, name: str) -> ArrayEntry:
    return index.arrays[index.aliases.get(name, name)]


def _pieces(entry: ArrayEntry, options: LoadOptions) -> Iterator[Box]:
    itemsize = dtypes.from_name(entry.dtype).itemsize
    return cut(Box.whole(entry.shape), max(1, options.budget_bytes // 4 // itemsize))


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


def jobs_of(view: View, wanted: Mapping[str, Mapping[str, ArrayTarget]]) -> list[Job]:
    """What to read, in groups that need the same stored arrays.

    Arguments:
        wanted: for arrays of the view's index, their targets by name.
    """
    jobs: list[dict[str, Recipe]] = []
    at: dict[str, int] = {}  # which job reads a stored array
    for name, targets in wanted.items():
        recipe = view.recipe(name)
        used = {feed.entry.name for feed in recipe.feeds}
        joined = sorted({at[entry] for entry in used if entry in at})
        if not joined:
            joined = [len(jobs)]
            jobs.append({})
        home, *others = joined
        for other in others:
            jobs[home] |= jobs[other]
            jobs[other] = {}
            at.update({entry: home for entry, job in at.items() if job == other})
        at.update(dict.fromkeys(used, home))
        jobs[home] |= dict.fromkeys(targets, recipe)
    all_targets = {name: target for targets in wanted.values() for name, target in targets.items()}
    return [Job({n: all_targets[n] for n in recipes}, recipes) for recipes in jobs if recipes]
