"""The request of a load, and its comparison with the checkpoint: one error for all differences."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, NamedTuple, Protocol

from unickpt.arrays import dtypes
from unickpt.arrays.names import NamePatterns, natural
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.frameworks.adapter_protocol import Adapter, ArrayTarget, StoredTree
from unickpt.frameworks.leaves import (
    LocalFragments,
    PerProcess,
    adapter_of,
    by_type,
    expand,
    leaf_test,
)
from unickpt.loading.report import Difference, LoadReport
from unickpt.loading.views import View, leaf_text, same_digests, stored_leaf, unchanged_entry
from unickpt.quoting import first_few, quoted
from unickpt.trees import tree, tree_json

Patterns = str | Sequence[str]


@dataclass(frozen=True)
class LeafSelection:
    """The leaves that match one of the patterns of `only`, and none of those of `skip`.

    Arguments:
        only: patterns of names; None selects all.
        skip: patterns of names.
    """

    only: tuple[str, ...] | None = None
    skip: tuple[str, ...] = ()

    @classmethod
    def from_patterns(cls, only: Patterns | None, skip: Patterns) -> LeafSelection:
        """From the arguments of `load`.

        Raises:
            TypeError: they are neither a pattern nor several.
        """
        return cls(None if only is None else _patterns("only", only), _patterns("skip", skip))

    @cached_property
    def selects_all(self) -> bool:
        return self.only is None and not self.skip

    def has(self, name: str) -> bool:
        """Whether a leaf is selected."""
        if self.only is not None and not self._only.match(name):
            return False
        return not self._skip.match(name)

    @cached_property
    def _only(self) -> NamePatterns:
        return NamePatterns(self.only or ())

    @cached_property
    def _skip(self) -> NamePatterns:
        return NamePatterns(self.skip)

    def left_out(self, names: Iterable[str]) -> frozenset[str]:
        """Those of the given leaves that are not selected."""
        if self.selects_all:
            return frozenset()
        return frozenset(name for name in names if not self.has(name))

    def among(self, stored: StoredTree) -> StoredTree:
        """Those of the given leaves that are selected."""
        if self.selects_all:
            return stored
        return stored.among({name: value for name, value in stored.items() if self.has(name)})

    def check(
        self,
        where: str,
        requested: Collection[str],
        stored: Collection[str],
        before_rules: Iterable[str] = (),
    ) -> None:
        """Checks that every pattern matches a leaf, and that a leaf is selected.

        Arguments:
            where: the checkpoint, for messages.
            requested: names of the leaves of `like`, or without it of all stored leaves.
            stored: names of the stored leaves, or of the leaves that rules make of them.
            before_rules: stored names that rules use.

        Raises:
            LoadMismatch: names the patterns that match nothing, and some leaves.
        """
        if self.selects_all:
            return
        names = dict.fromkeys([*requested, *stored])
        for argument, patterns in (("only", self._only), ("skip", self._skip)):
            if idle := patterns.unused(names):
                made_of = list(filter(NamePatterns(idle).match, before_rules))
                if made_of:
                    raise LoadMismatch(_of_the_wrong_side(where, argument, idle, made_of, names))
                inner = [p for p in idle if any(name.startswith(f"{p}/") for name in names)]
                whole = f". All below {inner[0]!r} is {inner[0] + '/**'!r}" if inner else ""
                raise LoadMismatch(
                    f"{where}: {argument}={quoted(idle)} matches no leaf; there are "
                    f"{first_few([repr(name) for name in names]) or 'none'}{whole}. `*` is any "
                    "text within a component of a name, `**` any number of components"
                )
        if not any(map(self.has, requested)):
            raise LoadMismatch(f"{where}: only= and skip= together select no leaf")


def _of_the_wrong_side(
    where: str, argument: str, idle: Sequence[str], made_of: Sequence[str], names: Iterable[str]
) -> str:
    return (
        f"{where}: {argument}={quoted(idle)} matches stored names, such as {made_of[0]!r}, which "
        "are on the other side of the rules. With rules, only= and skip= match requested names, "
        f"which `like` has and the rules make: {first_few([repr(name) for name in names])}"
    )


ALL = LeafSelection()


def _patterns(argument: str, option: Patterns) -> tuple[str, ...]:
    patterns = (option,) if isinstance(option, str) else option
    if not isinstance(patterns, Sequence) or not all(isinstance(p, str) for p in patterns):
        raise TypeError(
            f'{argument} must be a pattern of names such as "params/**", or several in a list, not '
            f"{quoted(option)}"
        )
    return tuple(patterns)


NUMBERS = {bool: "bool", int: "int64", float: "float64"}
"""The dtypes of plain numbers."""


class LoadRequest(NamedTuple):
    """The request of a load.

    Arguments:
        node: the structure of `like`.
        leaves: the selected ones by name.
        targets: the arrays among them.
        left_out: the leaves that are not selected, by name.
    """

    node: tree.Node | tree.Leaf
    leaves: Mapping[str, Any]
    targets: Mapping[str, ArrayTarget]
    left_out: Mapping[str, Any]

    @classmethod
    def from_tree(
        cls,
        like: Any,
        among: Sequence[Adapter],
        stored_tree: Callable[[], StoredTree],
        selection: LeafSelection = ALL,
    ) -> LoadRequest:
        """The leaves of a tree.

        Arguments:
            like: the tree.
            among: the frameworks' adapters.
            stored_tree: returns the stored tree, or what rules make of it; for objects that grow
                to match it, such as optimizers without state.
            selection: which leaves are requested.
        """
        stored = cache(lambda: selection.among(stored_tree()))  # most trees do not need it
        node = tree.flatten(
            like,
            leaf_test(among),
            lambda obj, name: expand(obj, name, among, stored()),
            "`like` cannot be loaded into",
        )
        leaves = {leaf.name: leaf.value for leaf in tree.leaves(node)}
        left_out = {name: leaves.pop(name) for name in selection.left_out(list(leaves))}
        return cls(node, leaves, _targets_of(leaves, among), left_out)


def _targets_of(leaves: Mapping[str, Any], among: Sequence[Adapter]) -> dict[str, ArrayTarget]:
    """The arrays among the leaves of `like`, as targets.

    Raises:
        UnsupportedLeaf: names every leaf that cannot be loaded into, and why.
    """
    targets: dict[str, ArrayTarget] = {}
    bad: list[str] = []

    def maker_of(value: Any) -> Callable[[Any], ArrayTarget] | None:
        if isinstance(value, LocalFragments):
            return type(value).target
        adapter = None if type(value) in NUMBERS else adapter_of(value, among)
        return None if adapter is None else adapter.target

    find_maker = by_type(maker_of)
    for name, value in leaves.items():
        make = find_maker(value)
        try:
            if make is not None:
                targets[name] = make(value)
        except (TypeError, ValueError) as error:
            bad.append(f"  {name!r}: {error}")
    if bad:
        raise UnsupportedLeaf("these leaves of `like` cannot be loaded into:\n" + "\n".join(bad))
    return targets


Shape = tuple[int, ...]


class Policy(NamedTuple):
    """The handling of differences; see `load`.

    Arguments:
        keep_missing: leaves that are not stored keep what they hold.
        skip_unexpected: stored leaves that are not requested are skipped.
        keep_mismatched: leaves whose shape differs from the stored one keep what they hold.
        cast: dtypes are converted.
        selection: which leaves the load covers.
    """

    keep_missing: bool = False
    skip_unexpected: bool = False
    keep_mismatched: bool = False
    cast: bool = False
    selection: LeafSelection = ALL

    @property
    def is_strict(self) -> bool:
        """Whether the stored leaves and the requested ones must be the same."""
        return self.selection.selects_all and not (self.keep_missing or self.skip_unexpected)


class LoadRules(Protocol):
    """The type of `rules=`: shows a checkpoint with other names and axes, as `unickpt.Rules`."""

    def _load_view(
        self, stored: Reader, like: Any, among: Sequence[Adapter], policy: Policy, /
    ) -> tuple[View, LoadRequest | None]:
        """The checkpoint through the rules, and the request of `like`, if it is given.

        Raises:
            RuleError: the rules do not fit the stored or the requested arrays.
        """


def check_rules(rules: object) -> None:
    """Raises TypeError: these are no rules."""
    if not hasattr(type(rules), "_load_view"):
        raise TypeError(
            f"rules is of type {type(rules).__name__}; make it with unickpt.Rules.load(file), "
            ".parse(text) or .preset(name)"
        )


@dataclass
class _Comparison:
    """The input and the result of a comparison: the fields of `LoadReport`, and the rows that
    prevent loading. The arguments are those of `compare`, and all names of the checkpoint."""

    view: View
    request: LoadRequest
    policy: Policy
    have: Collection[str]
    rows: list[Difference] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    kept_names: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Compares one leaf of `like`."""
        view, index = self.view, self.view.index
        value, target = self.request.leaves[name], self.request.targets.get(name)
        leaf, keeps = stored_leaf(index, name), not _abstract(value, target)
        if name in view.misfits and keeps:
            source = stored_leaf(view.checkpoint.index, view.misfits[name])
            self.mismatched.append((name, _shape(source), _shape(target)))
        elif name not in self.have:
            from unickpt.trees.optimizer_settings import may_lack

            may = self.policy.keep_missing or name in view.kept_names
            if keeps and (may or may_lack(name, value, self.have)):
                self.kept_names.append(name)
            else:
                self.rows.append(self.missing(name))
        elif target is not None and isinstance(leaf, ArrayEntry):
            self._add_array(name, leaf, target, self.policy.keep_mismatched and keeps)
        else:
            self.loaded.append(name)
            problem = _problem(value, leaf, target, name in index.per_process)
            if problem is not None:
                requested = _asked(value, target)
                self.rows.append(Difference(name, problem, leaf_text(leaf), requested))

    def fits(self, name: str, entry: ArrayEntry, target: ArrayTarget) -> bool:
        """Whether a leaf of `like` is an array exactly as stored."""
        if entry.shape != target.shape or target.prng is not None or name in self.view.misfits:
            return False
        return target.dtype == dtypes.from_name(entry.dtype)

    def missing(self, name: str) -> Difference:
        """The row of a leaf of `like` that is not stored."""
        requested = _asked(self.request.leaves[name], self.request.targets.get(name))
        return Difference(name, "missing", "-", requested)

    def _add_array(self, name: str, entry: ArrayEntry, target: ArrayTarget, keep: bool) -> None:
        have, want = dtypes.from_name(entry.dtype), target.dtype
        shapes = _shape(entry), _shape(target)
        if shapes[0] != shapes[1] and keep:
            self.mismatched.append((name, *shapes))
            return
        self.loaded.append(name)
        if shapes[0] != shapes[1]:
            self.rows.append(Difference(name, "shape", *(str(list(s)) for s in shapes)))
        if have != want and self.policy.cast and dtypes.castable(have, want):
            self.cast.append((name, entry.dtype, dtypes.name_of(want)))
        elif have != want:
            numbers = self.view.numbers
            stored = leaf_text(numbers[name]) if name in numbers else entry.dtype
            self.rows.append(Difference(name, "dtype", stored, dtypes.name_of(want)))
        if target.prng is not None and target.prng != entry.prng:
            self.rows.append(Difference(name, "PRNG key", str(entry.prng), target.prng))

    def nothing_fits(self, skipped: Sequence[str]) -> bool:
        """Whether no leaf of `like` is loaded, or none of its arrays if it has any.

        A step counter has the same name everywhere, so finding one does not mean that `like` fits.
        """
        names = {*self.loaded, *(name for name, _, _ in self.mismatched)}
        lost = [name for name in self.kept_names if name not in self.view.kept_names]
        if not lost:
            return False
        if not names:
            return True
        index, targets = self.view.checkpoint.index, self.request.targets
        return (
            any(name in targets for name in lost)
            and any(isinstance(stored_leaf(index, name), ArrayEntry) for name in skipped)
            and not any(name in targets for name in names)
        )


def compare(view: View, request: LoadRequest, policy: Policy) -> LoadReport:
    """Compares all leaves of `like` with the checkpoint, before anything is read.

    Arguments:
        view: the checkpoint.
        request: the request of `like`.
        policy: the allowed differences.

    Returns:
        What will be loaded and what will not.

    Raises:
        LoadMismatch: lists all differences.
    """
    stored, selection = view.checkpoint, policy.selection
    where = stored.label if stored.under else str(stored.location)
    names = [*request.leaves, *request.left_out]
    have, entries = view.index.names, view.index.entries
    selection.check(where, names, have, view.sources)
    comparison = _Comparison(view, request, policy, have)
    for name in request.leaves:
        entry, target = entries.get(name), request.targets.get(name)
        if entry is not None and target is not None and comparison.fits(name, entry, target):
            comparison.loaded.append(name)  # nearly all of them
        else:
            comparison.add(name)
    comparison.rows.sort(key=lambda row: natural(row.name))
    # Orbax stores None for an empty namedtuple, such as a state of optax without arrays.
    nothing = {name for name in view.unused if view.index.values.get(name, 0) is None}
    if nothing:
        containers = tree.containers(request.node)
        nothing &= {name for name, container in containers if not container.children}
    skipped = sorted(set(view.unused) - nothing - request.left_out.keys(), key=natural)
    unexpected = [
        Difference(name, "unexpected", leaf_text(stored_leaf(stored.index, name)), "-")
        for name in skipped
        if selection.has(name) and not view.is_dispensable(name)
    ]
    refused = () if policy.skip_unexpected else unexpected
    rows = [*comparison.rows, *refused, *_shared_memory(view, request.targets)]
    if rows:
        from unickpt.loading import mismatch

        skipped_rows = unexpected if policy.skip_unexpected else ()
        ties = _stored_ties(comparison)
        raise LoadMismatch(mismatch.message(where, rows, stored.lacks, names, skipped_rows, ties))
    if comparison.kept_names and comparison.nothing_fits(skipped):
        from unickpt.loading import mismatch

        lost = [comparison.missing(name) for name in comparison.kept_names]
        raise LoadMismatch(mismatch.nothing_fits(where, [*lost, *unexpected]))
    untaken = [name for name in (*skipped, *view.dropped) if selection.has(name)]
    if untaken:
        from unickpt.loading import optimizers

        optimizers.check_moments(
            where, request.leaves, comparison.loaded, untaken, stored.index.entries
        )
    return LoadReport(
        where,
        tuple(comparison.loaded),
        tuple(sorted(comparison.kept_names, key=natural)),
        tuple(skipped),
        tuple(sorted(comparison.mismatched, key=lambda row: natural(row[0]))),
        tuple(sorted(comparison.cast, key=lambda row: natural(row[0]))),
        tuple((stored, name) for name, stored in sorted(view.renamed.items())),
        left_out=tuple(sorted(request.left_out, key=natural)),
        new_objects=tuple(_new_objects(request.node)),
    )


def _abstract(value: Any, target: ArrayTarget | None) -> bool:
    """Whether a leaf of `like` holds no data to keep."""
    if isinstance(value, PerProcess):
        return value.value is None
    return target is not None and target.abstract


def _problem(value: Any, leaf: Any, target: ArrayTarget | None, per_process: bool) -> str | None:
    """Why a leaf that is not stored or not requested as an array cannot be loaded."""
    if per_process or isinstance(value, PerProcess):
        return None if per_process and isinstance(value, PerProcess) else "kind"
    if isinstance(leaf, ArrayEntry):
        return None if is_number(value, leaf) else "kind"
    if target is not None:
        scalar = tuple(target.shape) == () and tree_json.is_kind(leaf, target.dtype)
        return "value" if scalar else "kind"
    try:
        tree_json.as_asked(leaf, value)
    except ValueError:
        return "member"
    return None


def is_number(value: Any, entry: ArrayEntry) -> bool:
    """Whether a stored 0-d array holds the same kind of number as a plain leaf of `like`.

    A step counter is an int in a fresh training state, and an array after the first step.
    """
    if entry.shape != () or entry.prng is not None:
        return False
    return tree_json.is_kind(value, dtypes.from_name(entry.dtype))


def _shared_memory(view: View, targets: Mapping[str, ArrayTarget]) -> list[Difference]:
    """Leaves of `like` that share one array, but are stored as different arrays."""
    first: dict[Any, str] = {}
    rows = []
    for name, target in targets.items():
        other = first.setdefault(target.identity, name) if target.identity is not None else name
        if other == name:
            continue
        entry, other_entry = (stored_leaf(view.index, n) for n in (name, other))
        if not (isinstance(entry, ArrayEntry) and isinstance(other_entry, ArrayEntry)):
            continue
        if entry.name != other_entry.name and not _is_same_data(view, entry, other_entry):
            rows.append(
                Difference(name, "tied", "an array of its own", f"the same memory as {other}")
            )
    return rows


def _stored_ties(comparison: _Comparison) -> list[tuple[str, str]]:
    """Missing leaves that are the memory of another one, whose array is stored: their names, and
    that of the other one."""
    entries, targets = comparison.view.index.entries, comparison.request.targets
    names = {t.identity: n for n, t in targets.items() if t.identity is not None and n in entries}
    missing = (row.name for row in comparison.rows if row.problem == "missing")
    return [
        (name, names[targets[name].identity])
        for name in missing
        if name in targets and targets[name].identity in names
    ]


def _is_same_data(view: View, a: ArrayEntry, b: ArrayEntry) -> bool:
    ours, theirs = unchanged_entry(view, a.name), unchanged_entry(view, b.name)
    stored = view.checkpoint
    if ours is None or theirs is None:
        return False
    # Two names of one stored array, or two arrays that were equal when stored.
    return ours.name == theirs.name or same_digests(stored, ours, stored, theirs)


def _shape(array: Any) -> Shape:
    """The shape of an entry or a target; a plain value has no dimensions."""
    return tuple(getattr(array, "shape", ()))


def _asked(value: Any, target: ArrayTarget | None) -> str:
    if target is not None:
        return dtypes.with_shape(dtypes.name_of(target.dtype), target.shape)
    if isinstance(value, str):  # the name of a parameter, in an optimizer
        return f"plain str {quoted(value)}"
    return "a PerProcess" if isinstance(value, PerProcess) else f"plain {type(value).__name__}"


def _new_objects(node: tree.Node | tree.Leaf, name: str = "") -> Iterator[tuple[str, str]]:
    """The outermost mutable objects of `like` that a load returns as new ones: name, class."""
    if isinstance(node, tree.Leaf):
        return
    if node.kind == "object" and _is_mutable(node.original):
        yield name, node.type_name
        return
    if tree.Node not in map(type, node.children):
        return  # most are
    for child_name, child in tree.named_children(node, name):
        yield from _new_objects(child, child_name)


def _is_mutable(container: Any) -> bool:
    """Whether a program may expect a container to be filled in place, as arrays are."""
    if not hasattr(container, "__dict__") or hasattr(container, "dtype"):
        return False
    parameters = getattr(type(container), "__dataclass_params__", None)
    return parameters is None or not parameters.frozen
