"""A checkpoint as a load sees it through rules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, cut
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.errors import LoadMismatch, RuleError
from unickpt.format.index import RESERVED, ArrayEntry, Index, PerProcessEntry
from unickpt.format.reader_protocol import Reader
from unickpt.frameworks.adapter_protocol import Adapter, StoredTree
from unickpt.frameworks.leaves import PerProcess
from unickpt.frameworks.sections import StoredValue
from unickpt.loading.request import NUMBERS, LoadRequest, Policy, check_rules
from unickpt.loading.views import StoredView, View, number_entry, number_recipe, same_digests
from unickpt.reading.array_reader import read_box, read_made
from unickpt.reading.load_options import LoadOptions
from unickpt.reading.recipes import Recipe, Unchanged
from unickpt.rules.compiling import CompiledRules
from unickpt.rules.functions import Function
from unickpt.rules.plan import Constant, Fact, LeafKind, Made, RulePlan, Same, StoredLeaves
from unickpt.rules.planner import make_plan, offers
from unickpt.rules.provenance import Provenance
from unickpt.trees import tree, tree_json
from unickpt.trees.optimizer_settings import may_lack
from unickpt.trees.renamed import renamed


class RuledView(View):
    """A checkpoint through rules.

    Arguments:
        checkpoint: the stored checkpoint.
        rules: the rules.
        plan: for applying them to it.
        requested: the requested leaves, if known.
    """

    def __init__(
        self,
        checkpoint: Reader,
        rules: CompiledRules,
        plan: RulePlan,
        requested: Mapping[str, Fact] | None = None,
    ) -> None:
        self.checkpoint, self.rules, self.plan = checkpoint, rules, plan
        self.requested = requested or {}
        self._recipes: dict[str, Recipe] = {}
        self.numbers = numbers = dict[str, tree_json.Plain]()
        arrays: dict[str, ArrayEntry] = {}
        plain: dict[str, tree_json.Plain] = {}
        self._sources: dict[str, str] = {}
        blobs: dict[str, PerProcessEntry] = {}
        stored = checkpoint.index
        for name, made in plan.made.items():
            source = made.carried
            if source is None:
                arrays[name] = _entry(made, stored)
                self._recipes[name] = Recipe(made.sources, made.fills, self._function(made))
            elif source in stored.per_process:
                blobs[name] = stored.per_process[source]
                self._sources[name] = source
            else:
                value = stored.values[source]
                entry = _number_entry(name, value, made, self.requested.get(name))
                if entry is None:
                    plain[name] = value
                else:
                    arrays[name], numbers[name] = entry, value
                    self._recipes[name] = number_recipe(value)
        self.index = replace(
            stored, tree=None, arrays=arrays, aliases=plan.aliases, values=plain, per_process=blobs
        )
        self.kept_names, self.misfits = frozenset(plan.kept_names), plan.misfits
        self.sources, self.unused = stored.names, plan.unused
        self.dropped = plan.dropped

    @cached_property
    def provenance(self) -> Provenance:
        """The provenance to record for the result.

        Raises:
            RuleError: the rules would apply arithmetic to an array a second time.
        """
        where = str(self.checkpoint.location)
        recorded = Provenance.from_metadata(self.checkpoint.index.metadata, where)
        return recorded.after(self.rules, self.plan, where)

    def node(self) -> tree.Node | tree.Leaf:
        return _structure(self.checkpoint, self.plan.made, self.index.names)

    def is_dispensable(self, name: str) -> bool:
        # Rules rename the groups: only the stored names show that a leaf is a flag.
        values = self.checkpoint.index.values
        return may_lack(name, values.get(name, 0), values)

    def keep(self, plain: Mapping[str, tree_json.Plain]) -> None:
        """Adds values that no rule makes."""
        self.index = replace(self.index, values={**self.index.values, **plain})

    def recipe(self, name: str) -> Recipe:
        return self._recipes[name]

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        return self.checkpoint.per_process(self._sources[name], processes)

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
            first, other = (index.entry(n) for n in (check.first, check.other))
            recipe = Recipe((Unchanged(first),))
            if check.made is not None:
                recipe = Recipe(check.made.sources)
                same = False
            else:
                is_same_array = first.name == other.name
                same = is_same_array or same_digests(self.checkpoint, first, self.checkpoint, other)
            both = recipe, Recipe((Unchanged(other),))
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
            entry = index.entry(check.name)
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

    def _function(self, made: Made) -> _FunctionCall | None:
        if made.function is None:
            return None
        return _FunctionCall(self.checkpoint, made, made.function)


@dataclass(frozen=True)
class _FunctionCall:
    """A function that makes an array of a view from stored arrays."""

    checkpoint: Reader
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
            regions = function.region(box, *(source.fact.shape for source in made.inputs))
        stored, options = self.checkpoint, LoadOptions(verify=verify)
        inputs = [
            read_made(stored, _entry(source, stored.index), Recipe(source.sources), region, options)
            for source, region in zip(made.inputs, regions, strict=True)
        ]
        output = np.asarray(function.apply(box, *inputs))
        if output.shape != box.shape:
            raise LoadMismatch(
                f"array {made.name!r}: the function made {list(output.shape)} for the box {box} of "
                f"shape {list(box.shape)}\n  {made.rule}"
            )
        dtype = dtypes.from_name(made.fact.dtype)
        with np.errstate(all="ignore"):
            cast = output.astype(dtype, copy=False)
            same = (cast == output) | ((cast != cast) & (output != output))
        if not same.all():
            raise LoadMismatch(
                f"array {made.name!r}: the function made {output.dtype}, which {dtype} does not "
                f"hold; convert it in the function, or write `as {output.dtype}` after the axes\n  "
                f"{made.rule}"
            )
        return cast


def through(
    checkpoint: Reader,
    rules: CompiledRules,
    requested: Mapping[str, Fact] | None = None,
    *,
    strict: bool = True,
    keep_misfits: bool = False,
) -> RuledView:
    """A checkpoint through rules.

    Arguments:
        checkpoint: the stored checkpoint.
        rules: the rules.
        requested: the requested leaves; None if the rules alone decide.
        strict, keep_misfits: see `make_plan`.

    Raises:
        RuleError: the rules do not fit the stored or the requested leaves.
        TypeError: they are not `Rules`.
    """
    check_rules(rules)
    where, metadata = str(checkpoint.location), checkpoint.index.metadata
    stored = stored_facts(checkpoint)
    if RESERVED in metadata:
        recorded = Provenance.from_metadata(metadata, where)
        recorded.check(rules, where)
        stored = replace(stored, sizes=recorded.sizes)
    try:
        plan = make_plan(
            rules, stored, requested, strict=strict, keep_misfits=keep_misfits, where=where
        )
    except RuleError as error:
        if not checkpoint.lacks:
            raise
        raise RuleError(f"{error}\nwhat may explain it: {checkpoint.lacks}") from error
    view = RuledView(checkpoint, rules, plan, requested)
    if RESERVED in metadata:
        _ = view.provenance  # raises its errors now
    return view


class Offered(Mapping[str, Any]):
    """All leaves that rules could make from a checkpoint, by name; computed on first access.

    Arguments:
        checkpoint: the stored checkpoint.
        rules: the rules.
        requested: returns the other requested leaves.
    """

    def __init__(
        self, checkpoint: Reader, rules: CompiledRules, requested: Callable[[], Mapping[str, Fact]]
    ) -> None:
        self._checkpoint, self._rules, self._asked = checkpoint, rules, requested

    @cached_property
    def _made(self) -> Mapping[str, Made]:
        return offers(self._rules, stored_facts(self._checkpoint), self._asked())

    def node(self) -> tree.Node | tree.Leaf | None:
        """The structure of it; None if not all of it can be in one tree."""
        try:
            return _structure(self._checkpoint, self._made, self._made)
        except ValueError:
            return None

    @cached_property
    def _found(self) -> dict[str, Any]:
        index = self._checkpoint.index
        made = self._made
        # A plain number for which a rule gives a dtype becomes an array.
        return {
            name: _entry(m, index)
            if m.fact.is_array or (m.fact.kind is LeafKind.VALUE and m.fact.dtype)
            else index.values.get(m.carried or "")
            for name, m in made.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._found[name]

    def __iter__(self) -> Any:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _requested_facts(request: LoadRequest) -> dict[str, Fact]:
    """The requested leaves, as rules see them."""
    return {name: _requested_fact(name, value, request) for name, value in request.leaves.items()}


def _requested_fact(name: str, value: Any, request: LoadRequest) -> Fact:
    target = request.targets.get(name)
    if target is not None:
        return Fact(tuple(target.shape), dtypes.name_of(target.dtype))
    if isinstance(value, PerProcess):
        return Fact(kind=LeafKind.PROCESS)
    dispensable = may_lack(name, value, request.leaves)
    return Fact((), NUMBERS.get(type(value), ""), LeafKind.VALUE, dispensable)


def load_view(
    rules: CompiledRules, stored: Reader, like: Any, among: Sequence[Adapter], policy: Policy
) -> tuple[RuledView, LoadRequest | None]:
    """As `LoadRules` of `unickpt.loading.request`: the request of `like` through rules.

    Optimizers without state request what the rules could make.
    """
    if like is None:
        return through(stored, rules, strict=policy.is_strict), None
    nothing = StoredTree({}, lambda: None)
    offered = Offered(
        stored, rules, lambda: _requested_facts(LoadRequest.from_tree(like, among, lambda: nothing))
    )
    request = LoadRequest.from_tree(
        like, among, lambda: StoredTree(offered, offered.node), policy.selection
    )
    facts, keep = _requested_facts(request), policy.keep_mismatched
    return through(stored, rules, facts, strict=policy.is_strict, keep_misfits=keep), request


def stored_facts(checkpoint: Reader) -> StoredLeaves:
    """The stored leaves, as rules see them."""
    index = checkpoint.index
    entries = index.entries
    facts = {name: Fact(e.shape, e.dtype) for name, e in entries.items()}
    facts |= {
        name: Fact(kind=LeafKind.VALUE, dispensable=may_lack(name, value, index.values))
        for name, value in index.values.items()
    }
    facts |= {name: Fact(kind=LeafKind.PROCESS) for name in index.per_process}
    return StoredLeaves(facts, entries)


def _structure(
    checkpoint: Reader, made: Mapping[str, Made], names: Collection[str]
) -> tree.Node | tree.Leaf:
    """The containers of the leaves that rules make."""
    source_by_name = {name: _source(array) for name, array in made.items()}
    sources = {name: source for name, source in source_by_name.items() if source is not None}
    return renamed(StoredView(checkpoint).node(), sources, names)


def _source(made: Made) -> str | None:
    """The stored leaf from which another one is made, if it is a single one."""
    if made.carried is not None or made.function is not None:
        return made.carried
    names = {source.entry.name for source in made.sources}
    return names.pop() if len(names) == 1 else None


def _entry(made: Made, stored: Index) -> ArrayEntry:
    shape = made.fact.shape
    # Nothing is written with this entry, so its layout and chunk are those of an unsplit array.
    chunk = tuple(max(1, n) for n in shape)
    prng = None
    if len(made.sources) == 1 and made.sources[0].is_identity:
        prng = made.sources[0].entry.prng
    layout = Layout.replicated(len(shape), 1)
    return ArrayEntry(made.name, shape, made.fact.dtype, chunk, layout, prng=prng)


def _number_entry(
    name: str, value: tree_json.Plain, made: Made, requested: Fact | None
) -> ArrayEntry | None:
    """The entry of a number that becomes an array, because its rule or `like` says so."""
    rule_dtype = made.fact.dtype
    target = requested.dtype if requested is not None and requested.is_array else ""
    if not (rule_dtype or target) or (requested is not None and requested.shape):
        return None
    dtype = dtypes.from_name(rule_dtype or target)
    if rule_dtype and isinstance(value, int) and np.asarray(value).astype(dtype).item() != value:
        raise LoadMismatch(
            f"value {made.carried!r}: {rule_dtype} does not hold {value} exactly\n  {made.rule}"
        )
    return number_entry(name, value, dtype, is_held=bool(rule_dtype))


def _pieces(entry: ArrayEntry, options: LoadOptions) -> Iterator[Box]:
    itemsize = dtypes.from_name(entry.dtype).itemsize
    return cut(Box.whole(entry.shape), max(1, options.working_bytes // 4 // itemsize))


def _same_bits(a: Array, b: Array) -> bool:
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()
