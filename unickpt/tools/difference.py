"""diff(): how two checkpoints differ; reads only values that digests cannot compare."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, cut
from unickpt.arrays.dtypes import Array
from unickpt.errors import LoadMismatch, RuleError
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.loading.views import StoredView, View, same_digests, unchanged_entry
from unickpt.progress import Progress, ProgressFunction, reporting
from unickpt.reading import checkpoint
from unickpt.reading.array_reader import read_made
from unickpt.reading.chunk_reader import ChunkReader
from unickpt.reading.load_options import LoadOptions
from unickpt.rules.rule_set import Rules
from unickpt.rules.view import RuledView, stored_facts, through
from unickpt.trees import name_ranges

_MISSING = "missing"


@dataclass(frozen=True)
class ArrayDifference:
    """How one leaf differs.

    Arguments:
        name: its name in the second checkpoint.
        problem: "missing" (not in the first), "unexpected" (not in the second), "kind", "shape",
            "dtype", "value", or "layout", which changes no value.
        first, second: the leaf in each checkpoint.
        unequal: number of elements whose bits differ; None if they were not compared.
        max_abs, max_rel: largest absolute and relative difference of elements, in float64.
    """

    name: str
    problem: str
    first: str
    second: str
    unequal: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None


@dataclass(frozen=True, repr=False)
class DiffReport:
    """The result of `diff`; `same` if nothing differs except layouts. As text, it has a row for
    each difference.

    Arguments:
        differences: a row for each leaf that differs.
        arrays: number of arrays that were compared.
        read_bytes: logical bytes of the second checkpoint that were compared element by element;
            the others are equal by their digests.
        seconds: time of the comparison.
    """

    differences: tuple[ArrayDifference, ...]
    arrays: int
    read_bytes: int
    seconds: float

    @property
    def same(self) -> bool:
        return all(difference.problem == "layout" for difference in self.differences)

    def __repr__(self) -> str:
        return f"DiffReport({self._summary})"

    @property
    def _summary(self) -> str:
        problems = Counter(row.problem for row in self.differences)
        counts = ", ".join(f"{count} {problem}" for problem, count in problems.items())
        same = "the same" if self.same else "different"
        return f"{same}: {self.arrays} arrays compared" + (f", {counts}" if counts else "")

    def __str__(self) -> str:
        rows = [_HEADINGS, *self._rows[:_MOST_ROWS]] if self.differences else []
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  " + "  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        more = len(self._rows) - _MOST_ROWS
        lines += [f"  ... and {more} more rows"] if more > 0 else []
        return "\n".join([self._summary, *lines])

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        """The differences, with similar ones folded."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for row in self.differences:
            values = (row.unequal, row.max_abs, row.max_rel)
            texts = tuple("" if value is None else f"{value:.4g}" for value in values)
            alike.setdefault((row.problem, row.first, row.second, *texts), []).append(row.name)
        return [
            (name or "(root)", *texts)
            for texts, names in alike.items()
            for name in name_ranges.fold_all(names)
        ]

    def _repr_html_(self) -> str:
        from unickpt.display import html  # here, so that importing unickpt stays fast

        rows = self._rows
        return html.page("DiffReport", "", [self._summary], html.table(_HEADINGS, rows, len(rows)))


_HEADINGS = ("name", "differs in", "first", "second", "unequal", "max abs", "max rel")
_MOST_ROWS = 100


def diff(
    first: checkpoint.Source,
    second: checkpoint.Source,
    *,
    rules: Rules | None = None,
    under: str = "",
    layout: bool = False,
    rtol: float = 0.0,
    options: LoadOptions | None = None,
    progress: Progress = None,
) -> DiffReport:
    """Compares two checkpoints.

    Arguments:
        first, second: local paths or URLs of committed checkpoints, or what `unickpt.open`
            returned.
        rules: map names and axes of the first to those of the second. Leaves that they drop on
            either side are no difference.
        under: compare this part of each, such as "model"; see `load`. If one of them has no such
            part, all of it is compared, as an export of the part.
        layout: whether to report different meshes and splits too; they change no value.
        rtol: the relative difference up to which elements count as equal, for rules with
            arithmetic; by default bits must be equal.
        options: see `LoadOptions`; `budget_bytes` bounds the memory for both.
        progress: True for a bar, or a function of the bytes compared so far and in total.

    Raises:
        CheckpointNotFound, CheckpointCorrupt: of either.
        RuleError: the rules do not fit.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/x", {"w": np.zeros(3)})
        >>> _ = unickpt.save("memory://run/y", {"w": np.array([0, 0, 2.0])})
        >>> row = unickpt.diff("memory://run/x", "memory://run/y").differences[0]
        >>> row.name, row.problem, row.unequal, row.max_abs
        ('w', 'value', 1, 2.0)
    """
    started = time.perf_counter()
    options = LoadOptions.or_default(options)
    with reporting(
        options.progress if progress is None else progress, "comparing"
    ) as report_progress:
        a, b = _parts_of(first, second, under)
        rows, arrays, read = _compared(a, b, rules, layout, rtol, options, report_progress)
    return DiffReport(rows, arrays, read, time.perf_counter() - started)


def _parts_of(
    first: checkpoint.Source, second: checkpoint.Source, under: str
) -> tuple[Reader, Reader]:
    """The parts of two checkpoints to compare.

    Raises:
        LoadMismatch: neither has anything there.
    """
    both = [checkpoint.opened(source) for source in (first, second)]
    if not under:
        return both[0].reader, both[1].reader
    refused: list[LoadMismatch] = []
    for number, opened in enumerate(both):
        try:
            both[number] = opened.under(under)
        except LoadMismatch as error:
            refused.append(error)
    if len(refused) == len(both):
        raise LoadMismatch("\n".join(map(str, refused)))
    return both[0].reader, both[1].reader


def _compared(
    a: Reader,
    b: Reader,
    rules: Rules | None,
    layout: bool,
    rtol: float,
    options: LoadOptions,
    report_progress: ProgressFunction,
) -> tuple[tuple[ArrayDifference, ...], int, int]:
    ours: View = StoredView(a) if rules is None else _through(a, rules, b)
    if isinstance(ours, RuledView):
        ours.check(options)
    theirs = StoredView(b)
    rows = list(_structure(ours, theirs))
    left, right = ours.index.entries, theirs.index.entries
    both = [name for name in right if name in left]
    b.check_total([right[name] for name in both])
    done, read = 0, 0
    total = sum(right[name].nbytes for name in both)
    with ComparedViews(ours, theirs, options) as pair:
        for name in both:
            mine, other = left[name], right[name]
            if layout and not isinstance(ours, RuledView) and mine.layout != other.layout:
                rows.append(ArrayDifference(name, "layout", str(mine.layout), str(other.layout)))
            if mine.shape == other.shape and not pair.same_digests(mine, other):
                row = pair.difference(name, mine, other)
                read += other.nbytes
                small = rtol and row is not None and row.max_rel is not None and row.max_rel <= rtol
                if row is not None and not small:
                    rows.append(row)
            done += other.nbytes
            report_progress(done, total)
    order = {name: n for n, name in enumerate({**_shown(ours), **_shown(theirs)})}
    rows.sort(key=lambda row: order.get(row.name, -1))
    return tuple(rows), len(both), read


class ComparedViews(AbstractContextManager["ComparedViews"]):
    """Two checkpoints whose arrays are compared, box by box; a context manager.

    Arguments:
        ours, theirs: the checkpoints.
        options: see `LoadOptions`; `budget_bytes` bounds the memory for both.
    """

    def __init__(self, ours: View, theirs: View, options: LoadOptions) -> None:
        self._ours, self._theirs, self._options = ours, theirs, options
        self._readers = ChunkReader(ours.checkpoint), ChunkReader(theirs.checkpoint)

    def __exit__(self, *_: object) -> None:
        for reader in self._readers:
            reader.close()

    def same_digests(self, mine: ArrayEntry, other: ArrayEntry) -> bool:
        """Whether digests alone prove that two arrays are equal."""
        ours, theirs = self._ours, self._theirs
        left, right = unchanged_entry(ours, mine.name), unchanged_entry(theirs, other.name)
        if left is None or right is None:
            return False
        return same_digests(ours.checkpoint, left, theirs.checkpoint, right)

    def same_bits(self, mine: ArrayEntry, other: ArrayEntry) -> bool:
        """Whether arrays of the same shape have the same dtype and bits."""
        if (mine.dtype, mine.prng) != (other.dtype, other.prng):
            return False
        pairs = self._elements(mine, other)
        return self.same_digests(mine, other) or not any(_unequal_bits(*p).any() for p in pairs)

    def difference(self, name: str, mine: ArrayEntry, other: ArrayEntry) -> ArrayDifference | None:
        """How the elements of arrays of the same shape differ."""
        unequal, most_abs, most_rel = 0, 0.0, 0.0
        for a, b in self._elements(mine, other):
            differ = _unequal_bits(a, b) if mine.dtype == other.dtype else _wide(a) != _wide(b)
            if mine.dtype == other.dtype and not differ.any():
                continue
            unequal += int(differ.sum())
            absolute, relative = _largest(a, b)
            most_abs, most_rel = max(most_abs, absolute), max(most_rel, relative)
        if not unequal:
            return None
        size = f"of {int(np.prod(other.shape))}"
        return ArrayDifference(name, "value", "", size, unequal, most_abs, most_rel)

    def _elements(self, mine: ArrayEntry, other: ArrayEntry) -> Iterator[tuple[Array, Array]]:
        most = max(1, self._options.working_bytes // 8 // other.itemsize)
        sides = (self._ours, mine, self._readers[0]), (self._theirs, other, self._readers[1])
        for box in cut(Box.whole(other.shape), most):
            a, b = (
                read_made(view.checkpoint, e, view.recipe(e.name), box, self._options, reader)
                for view, e, reader in sides
            )
            yield a, b


def _through(a: Reader, rules: Rules, b: Reader) -> RuledView:
    """The first checkpoint through rules; the second one's names resolve ambiguous rules.

    If the two differ in more than values, only the rules decide what should exist.
    """
    try:
        return through(a, rules, stored_facts(b).facts)
    except RuleError:
        return through(a, rules)


def _structure(ours: View, theirs: View) -> Iterator[ArrayDifference]:
    left, right = _shown(ours), _shown(theirs)
    for name in dict.fromkeys([*left, *right]):
        mine, other = left.get(name), right.get(name)
        if mine is None and name in ours.kept_names:
            continue
        if mine is None or other is None:
            problem = _MISSING if mine is None else "unexpected"
            yield ArrayDifference(name, problem, _text(mine), _text(other))
        elif isinstance(mine, ArrayEntry) and isinstance(other, ArrayEntry):
            if mine.shape != other.shape:
                yield ArrayDifference(name, "shape", _text(mine), _text(other))
            elif mine.dtype != other.dtype:
                yield ArrayDifference(name, "dtype", mine.dtype, other.dtype)
        elif type(mine) is not type(other):
            yield ArrayDifference(name, "kind", _text(mine), _text(other))
        elif not _same_value(mine, other):
            yield ArrayDifference(name, "value", _text(mine), _text(other))


def _same_value(a: Any, b: Any) -> bool:
    """Whether two values are the same; nan is the same as nan."""
    return bool(a == b) or (isinstance(a, tuple) and a[0] != a[0] and b[0] != b[0])


def _shown(view: View) -> dict[str, Any]:
    """Every leaf: arrays as their entries, values in a tuple, per-process leaves as their
    digests."""
    values = {name: (value, type(value)) for name, value in view.index.values.items()}
    return {**view.index.entries, **values, **view.index.per_process}


def _text(stored: Any) -> str:
    match stored:
        case None:
            return "-"
        case ArrayEntry():
            return stored.dtype_and_shape
        case tuple():
            return repr(stored[0])
    return f"a PerProcess of {len(stored.blobs)} processes"


def _unequal_bits(a: Array, b: Array) -> Any:
    kind = np.dtype(("V", a.itemsize)) if a.itemsize > 8 else np.dtype(f"u{a.itemsize}")
    return np.ascontiguousarray(a).view(kind) != np.ascontiguousarray(b).view(kind)


def _wide(a: Array) -> Array:
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _largest(a: Array, b: Array) -> tuple[float, float]:
    """The largest absolute and relative difference; infinite if only one is nan."""
    if dtypes.kind(a.dtype) == "other" and a.dtype != np.bool_:
        return float("nan"), float("nan")
    x, y = np.atleast_1d(_wide(a), _wide(b))
    with np.errstate(all="ignore"):
        apart = np.abs(x - y)
        apart[(x == y) | (np.isnan(x) & np.isnan(y))] = 0
        apart[np.isnan(apart)] = np.inf
        scale = np.maximum(np.abs(x), np.abs(y))
        relative = np.where(apart == 0, 0, apart / scale)
        relative[np.isnan(relative)] = np.inf
    return float(apart.max()), float(relative.max())
