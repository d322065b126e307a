"""Compares what `like` requests with what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unickpt.arrays import dtypes
from unickpt.errors import LoadMismatch
from unickpt.format.index import ArrayEntry
from unickpt.frameworks.leaves import PerProcess
from unickpt.frameworks.protocol import ArrayTarget
from unickpt.loading import mismatch
from unickpt.loading.mismatch import Difference
from unickpt.loading.report import LoadReport
from unickpt.loading.request import ALL, LoadRequest, Selection
from unickpt.loading.views import CheckpointView, leaf_text, same_digests, stored_leaf
from unickpt.trees import tree, tree_json
from unickpt.trees.name_ranges import natural

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Policy:
    """What to do about differences; see `load`.

    Arguments:
        keep_missing: leaves that are not stored keep what they hold.
        skip_unexpected: stored leaves that are not requested are skipped.
        keep_mismatched: leaves whose shape differs from the stored one keep what they hold.
        cast: dtypes are converted.
        selection: which leaves the load is about.
    """

    keep_missing: bool = False
    skip_unexpected: bool = False
    keep_mismatched: bool = False
    cast: bool = False
    selection: Selection = ALL

    @property
    def is_strict(self) -> bool:
        """Whether the stored leaves and the requested ones must be the same."""
        return self.selection.selects_all and not (self.keep_missing or self.skip_unexpected)


@dataclass
class _Comparison:
    """What a comparison knows, and what it finds: the fields of `LoadReport`, and the rows that
    prevent loading. The arguments are those of `compare`, and all names of the checkpoint."""

    view: CheckpointView
    asked: LoadRequest
    policy: Policy
    have: Collection[str]
    rows: list[Difference] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)

    def add(self, name: str) -> None:
        """Compares one leaf of `like`."""
        view, index = self.view, self.view.index
        value, target = self.asked.leaves[name], self.asked.targets.get(name)
        leaf, keeps = stored_leaf(index, name), not _abstract(value, target)
        if name in view.misfits and keeps:
            source = stored_leaf(view.checkpoint.index, view.misfits[name])
            self.mismatched.append((name, _shape(source), _shape(target)))
        elif name not in self.have:
            if keeps and (self.policy.keep_missing or name in view.kept):
                self.kept.append(name)
            else:
                self.rows.append(self.missing(name))
        elif target is not None and isinstance(leaf, ArrayEntry):
            self._add_array(name, leaf, target, self.policy.keep_mismatched and keeps)
        else:
            self.loaded.append(name)
            problem = _problem(value, leaf, target, name in index.per_process)
            if problem is not None:
                asked = _asked(value, target)
                self.rows.append(Difference(name, problem, leaf_text(leaf), asked))

    def fits(self, name: str, entry: ArrayEntry, target: ArrayTarget) -> bool:
        """Whether a leaf of `like` is an array just as it is stored."""
        if entry.shape != target.shape or target.prng is not None or name in self.view.misfits:
            return False
        return target.dtype == dtypes.from_name(entry.dtype)

    def missing(self, name: str) -> Difference:
        """The row of a leaf of `like` that is not stored."""
        asked = _asked(self.asked.leaves[name], self.asked.targets.get(name))
        return Difference(name, "missing", "-", asked)

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
        """Whether nothing of `like` is loaded, or none of its arrays although there are some.

        A step counter has the same name everywhere, so finding one does not mean that `like` fits.
        """
        there = {*self.loaded, *(name for name, _, _ in self.mismatched)}
        lost = [name for name in self.kept if name not in self.view.kept]
        if not lost:
            return False
        if not there:
            return True
        index, targets = self.view.checkpoint.index, self.asked.targets
        return (
            any(name in targets for name in lost)
            and any(isinstance(stored_leaf(index, name), ArrayEntry) for name in skipped)
            and not any(name in targets for name in there)
        )


def compare(view: CheckpointView, asked: LoadRequest, policy: Policy) -> LoadReport:
    """Compares all leaves of `like` with the checkpoint, before anything is read.

    Arguments:
        view: the checkpoint.
        asked: what `like` requests.
        policy: what may differ.

    Returns:
        What will be loaded and what will not.

    Raises:
        LoadMismatch: lists all differences.
    """
    where, selection = str(view.checkpoint.location), policy.selection
    names = [*asked.leaves, *asked.left_out]
    selection.check(where, names, (*view.index.names, *view.unused))
    found = _Comparison(view, asked, policy, view.index.names)
    entries, targets = view.index.entries, asked.targets
    for name in asked.leaves:
        entry, target = entries.get(name), targets.get(name)
        if entry is not None and target is not None and found.fits(name, entry, target):
            found.loaded.append(name)  # as nearly all
        else:
            found.add(name)
    found.rows.sort(key=lambda row: natural(row.name))
    # Orbax stores None for an empty namedtuple, such as a state of optax without arrays.
    nothing = {name for name in view.unused if _is_none(view, name)}
    if nothing:
        nothing.intersection_update(tree.empty_containers(asked.node))
    skipped = sorted(set(view.unused) - nothing - asked.left_out.keys(), key=natural)
    unexpected = [
        Difference(name, "unexpected", view.shown(name), "-")
        for name in skipped
        if selection.has(name)
    ]
    refused = () if policy.skip_unexpected else unexpected
    rows = [*found.rows, *refused, *_shared_memory(view, asked.targets)]
    if rows:
        raise LoadMismatch(mismatch.message(where, rows, view.checkpoint.lacks))
    if found.nothing_fits(skipped):
        lost = [found.missing(name) for name in found.kept]
        raise LoadMismatch(mismatch.nothing_fits(where, [*lost, *unexpected]))
    return LoadReport(
        where,
        tuple(found.loaded),
        tuple(sorted(found.kept, key=natural)),
        tuple(skipped),
        tuple(sorted(found.mismatched, key=_natural_first)),
        tuple(sorted(found.cast, key=_natural_first)),
        tuple((stored, name) for name, stored in sorted(view.renamed.items())),
        left_out=tuple(sorted(asked.left_out, key=natural)),
    )


def _natural_first(row: tuple[str, Any, Any]) -> Any:
    return natural(row[0])


def _is_none(view: CheckpointView, name: str) -> bool:
    return name in view.index.values and view.index.values[name] is None


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


def _shared_memory(view: CheckpointView, targets: Mapping[str, ArrayTarget]) -> list[Difference]:
    """Leaves of `like` that share one array, but are stored as different arrays."""
    first: dict[Any, str] = {}
    rows = []
    for name, target in targets.items():
        other = first.setdefault(target.identity, name) if target.identity is not None else name
        if other == name:
            continue
        entry, one = (stored_leaf(view.index, n) for n in (name, other))
        if not (isinstance(entry, ArrayEntry) and isinstance(one, ArrayEntry)):
            continue
        if entry.name != one.name and not _is_same_data(view, entry, one):
            rows.append(
                Difference(name, "tied", "an array of its own", f"the same memory as {other}")
            )
    return rows


def _is_same_data(view: CheckpointView, a: ArrayEntry, b: ArrayEntry) -> bool:
    ours, theirs = view.unchanged_entry(a.name), view.unchanged_entry(b.name)
    stored = view.checkpoint
    if ours is None or theirs is None:
        return False
    # Two names of one stored array, or two arrays that were equal when they were stored.
    return ours.name == theirs.name or same_digests(stored, ours, stored, theirs)


def _shape(array: Any) -> Shape:
    """The shape of an entry or a target; a plain value has no dimensions."""
    return tuple(getattr(array, "shape", ()))


def _asked(value: Any, target: ArrayTarget | None) -> str:
    if target is not None:
        return dtypes.with_shape(dtypes.name_of(target.dtype), target.shape)
    return "a PerProcess" if isinstance(value, PerProcess) else f"plain {type(value).__name__}"
