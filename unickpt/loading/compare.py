"""Compares what `like` requests with what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from unickpt.loading.ruled_view import same_digests
from unickpt.loading.views import View, shown, stored_leaf, stored_names
from unickpt.trees import plain_values
from unickpt.trees.name_ranges import natural

Shape = tuple[int, ...]


@dataclass
class _Found:
    """What a comparison finds: the fields of `LoadReport`, and the rows that prevent loading."""

    rows: list[Difference] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, Shape, Shape]] = field(default_factory=list)
    cast: list[tuple[str, str, str]] = field(default_factory=list)


def compare(
    view: View,
    wanted: Mapping[str, Any],
    targets: Mapping[str, ArrayTarget],
    *,
    strict: bool,
    cast: bool,
    keep_mismatched: bool = False,
) -> LoadReport:
    """Compares all leaves of `like` with the checkpoint, before anything is read.

    Arguments:
        view: the checkpoint.
        wanted: the leaves of `like` by name.
        targets: the arrays among them.
        strict, cast: as for `load`.
        keep_mismatched: whether leaves whose shape differs from the stored one keep what they hold.

    Returns:
        What will be loaded and what will not.

    Raises:
        LoadMismatch: lists all differences.
    """
    index = view.index
    have = stored_names(index)
    found = _Found()
    for name in sorted(wanted, key=natural):
        value, target, leaf = wanted[name], targets.get(name), stored_leaf(index, name)
        keeps = not _abstract(value, target)
        if name in view.misfits and keeps:
            source = stored_leaf(view.checkpoint.index, view.misfits[name])
            found.mismatched.append((name, _shape(source), _shape(target)))
        elif name not in have:
            if keeps and (not strict or name in view.kept):
                found.kept.append(name)
            else:
                found.rows.append(Difference(name, "missing", "-", _asked(value, target)))
        elif target is not None and isinstance(leaf, ArrayEntry):
            _compare_array(view, name, leaf, target, cast, keep_mismatched and keeps, found)
        else:
            found.loaded.append(name)
            problem = _problem(value, leaf, target, name in index.per_process)
            if problem is not None:
                found.rows.append(Difference(name, problem, shown(leaf), _asked(value, target)))
    skipped = sorted(view.unused, key=natural)
    unexpected = [Difference(name, "unexpected", view.shown(name), "-") for name in skipped]
    rows = [*found.rows, *(unexpected if strict else ()), *_shared_memory(view, targets)]
    where = str(view.checkpoint.location)
    if rows:
        raise LoadMismatch(mismatch.message(where, rows))
    if _nothing_fits(view, targets, found, skipped):
        lost = [
            Difference(n, "missing", "-", _asked(wanted[n], targets.get(n))) for n in found.kept
        ]
        raise LoadMismatch(mismatch.nothing_fits(where, [*lost, *unexpected]))
    return LoadReport(
        where,
        tuple(found.loaded),
        tuple(found.kept),
        tuple(skipped),
        tuple(found.mismatched),
        tuple(found.cast),
        tuple((stored, name) for name, stored in sorted(view.renamed.items())),
    )


def _nothing_fits(
    view: View, targets: Mapping[str, ArrayTarget], found: _Found, skipped: Sequence[str]
) -> bool:
    """Whether nothing of `like` is loaded, or none of its arrays although there are some to load.

    A step counter has the same name everywhere, so finding one does not mean that `like` fits.
    """
    there = {*found.loaded, *(name for name, _, _ in found.mismatched)}
    lost = [name for name in found.kept if name not in view.kept]
    if not lost:
        return False
    if not there:
        return True
    index = view.checkpoint.index
    return (
        any(name in targets for name in lost)
        and any(isinstance(stored_leaf(index, name), ArrayEntry) for name in skipped)
        and not any(name in targets for name in there)
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
        scalar = tuple(target.shape) == () and plain_values.is_kind(leaf, target.dtype)
        return "value" if scalar else "kind"
    try:
        plain_values.as_asked(leaf, value)
    except ValueError:
        return "member"
    return None


def is_number(value: Any, entry: ArrayEntry) -> bool:
    """Whether a stored 0-d array holds the same kind of number as a plain leaf of `like`.

    A step counter is an int in a fresh training state, and an array after the first step.
    """
    if entry.shape != () or entry.prng is not None:
        return False
    return plain_values.is_kind(value, dtypes.from_name(entry.dtype))


def _compare_array(
    view: View,
    name: str,
    entry: ArrayEntry,
    target: ArrayTarget,
    cast: bool,
    keep: bool,
    found: _Found,
) -> None:
    have, want = dtypes.from_name(entry.dtype), target.dtype
    shapes = _shape(entry), _shape(target)
    if shapes[0] != shapes[1] and keep:
        found.mismatched.append((name, *shapes))
        return
    found.loaded.append(name)
    if shapes[0] != shapes[1]:
        found.rows.append(Difference(name, "shape", *(str(list(s)) for s in shapes)))
    if have != want and cast and dtypes.castable(have, want):
        found.cast.append((name, entry.dtype, dtypes.name_of(want)))
    elif have != want:
        stored = shown(view.numbers[name]) if name in view.numbers else entry.dtype
        found.rows.append(Difference(name, "dtype", stored, dtypes.name_of(want)))
    if target.prng is not None and target.prng != entry.prng:
        found.rows.append(Difference(name, "PRNG key", str(entry.prng), target.prng))


def _shared_memory(view: View, targets: Mapping[str, ArrayTarget]) -> list[Difference]:
    """Leaves of `like` that share one array, but are stored as different arrays."""
    first: dict[Any, str] = {}
    rows = []
    for name, target in targets.items():
        other = first.setdefault(target.identity, name) if target.identity is not None else name
        entry, one = (stored_leaf(view.index, n) for n in (name, other))
        if other == name or not (isinstance(entry, ArrayEntry) and isinstance(one, ArrayEntry)):
            continue
        if entry.name != one.name and not _same_data(view, entry, one):
            rows.append(
                Difference(name, "tied", "an array of its own", f"the same memory as {other}")
            )
    return rows


def _same_data(view: View, a: ArrayEntry, b: ArrayEntry) -> bool:
    ours, other = view.twin(a.name), view.twin(b.name)
    stored = view.checkpoint
    return ours is not None and other is not None and same_digests(stored, ours, stored, other)


def _shape(array: Any) -> Shape:
    """The shape of an entry or a target; a plain value has no dimensions."""
    return tuple(getattr(array, "shape", ()))


def _asked(value: Any, target: ArrayTarget | None) -> str:
    if target is not None:
        return f"{dtypes.name_of(target.dtype)}{list(target.shape)}"
    return "a PerProcess" if isinstance(value, PerProcess) else f"plain {type(value).__name__}"
