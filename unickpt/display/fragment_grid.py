"""The processes that held each box of an array, as the cells of a drawable grid."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout
from unickpt.trees import name_ranges

BoxHolders = Sequence[tuple[Box, tuple[int, ...]]]
Interval = tuple[int, int]
GridBand = tuple[int | None, Interval]
"""A row or a column, and its interval of the dimension; None stands for several omitted ones."""

_MAX_ROWS = 16
_MAX_COLUMNS = 16
_LABEL_WIDTH = 16
ELIDED = "..."


@dataclass(frozen=True)
class FragmentGrid:
    """A plane of an array, cut at all boundaries of its fragments.

    Arguments:
        down, across: the dimensions that run down and to the right; None if there is none.
        rows, columns: of the grid.
        owner: for each row and column the number of its fragment; None where cells are omitted.
        labels: for each fragment the processes that held it, and its devices if these differ.
        remark: names the parts that the grid does not show.
    """

    down: int | None
    across: int | None
    rows: Sequence[GridBand]
    columns: Sequence[GridBand]
    owner: Sequence[Sequence[int | None]]
    labels: Sequence[Sequence[str]]
    remark: str


def grids(
    shape: Sequence[int], fragments: BoxHolders, layout: Layout | None = None
) -> Iterator[FragmentGrid]:
    """The fragments of an array as grids, from the one with the most columns to the narrowest.

    Arguments:
        shape: shape of the array.
        fragments: the distinct boxes with the processes that held each; at least one.
        layout: if it has more devices than processes, cells also name the devices.

    Returns:
        For up to two dimensions the whole array; for more, the plane through the first element
        along the first two dimensions that are split.
    """
    down, across = _plane(shape, fragments)
    other_dims = [d for d in range(len(shape)) if d not in (down, across)]
    shown = [f for f in fragments if all(f[0].start[d] == 0 for d in other_dims)]
    devices = _devices(shape, layout) if layout is not None else {}
    rows, columns = _pick(_cuts(shown, down), _MAX_ROWS), _cuts(shown, across)
    labels = [_label(holders, devices.get(box)) for box, holders in shown]
    boxes = [_across(box, down, across) for box, _ in shown]
    remarks = []
    if down is not None:
        remarks.append(f"dimension {down} runs down, dimension {across} to the right")
    if split := _split(other_dims, fragments):
        pieces = " x ".join(str(len({f[0].start[d] for f in fragments})) for d in split)
        remarks.append(f"the first of {pieces} pieces along dimension {', '.join(map(str, split))}")
    for limit in range(_MAX_COLUMNS, 2, -1):
        picked = _pick(columns, limit)
        owner = _owners(rows, picked, boxes)
        yield FragmentGrid(down, across, rows, picked, owner, labels, "; ".join(remarks))


def head(slot: GridBand) -> str:
    """The text of the interval of a row or a column."""
    number, interval = slot
    return ELIDED if number is None else f"{interval[0]}:{interval[1]}"


def _plane(shape: Sequence[int], fragments: BoxHolders) -> tuple[int | None, int | None]:
    """The dimensions that run down and to the right."""
    if len(shape) < 2:
        return None, 0 if shape else None
    split = _split(range(len(shape)), fragments)
    down, across = sorted(list(dict.fromkeys([*split[:2], *range(len(shape))]))[:2])
    return down, across


def _split(dims: Iterable[int], fragments: BoxHolders) -> list[int]:
    """Those dimensions along which fragments differ."""
    return [d for d in dims if len({(box.start[d], box.stop[d]) for box, _ in fragments}) > 1]


def _cuts(fragments: BoxHolders, dim: int | None) -> list[Interval]:
    """The intervals between all boundaries along a dimension."""
    if dim is None:
        return [(0, 1)]
    points = sorted({p for box, _ in fragments for p in (box.start[dim], box.stop[dim])})
    return list(itertools.pairwise(points))


def _across(box: Box, down: int | None, across: int | None) -> tuple[Interval, Interval]:
    """A box in the drawn plane."""
    rows = (0, 1) if down is None else (box.start[down], box.stop[down])
    return rows, (0, 1) if across is None else (box.start[across], box.stop[across])


def _devices(shape: Sequence[int], layout: Layout) -> Mapping[Box, list[int]]:
    """The devices of each box, numbered row-major; empty if they equal the processes."""
    if len(set(layout.mesh.processes)) == len(layout.mesh.processes):
        return {}
    devices: dict[Box, list[int]] = {}
    for number, coordinate in enumerate(np.ndindex(layout.mesh.shape)):
        devices.setdefault(layout.box(shape, coordinate), []).append(number)
    return devices


def _label(holders: Sequence[int], devices: Sequence[int] | None) -> list[str]:
    lines = ["p" + numbers(holders)]
    return lines if devices is None else [*lines, "d" + numbers(devices)]


def numbers(items: Sequence[int]) -> str:
    """Ascending numbers as ranges, shortened.

    Example:
        >>> numbers([0, 1, 2, 3, 8]), numbers(range(0, 60, 2))
        ('0-3,8', '0,2,4,6,.. (30)')
    """
    texts = name_ranges.runs(list(map(str, items)), "-")
    whole = ",".join(texts)
    if len(whole) < _LABEL_WIDTH:
        return whole
    tail, count = f",.. ({len(items)})", 1
    while len(",".join(texts[: count + 1])) + len(tail) < _LABEL_WIDTH:
        count += 1
    return ",".join(texts[:count]) + tail


def _pick(cuts: list[Interval], limit: int) -> list[GridBand]:
    """Positions to draw with their intervals; None represents omitted ones."""
    numbered: list[GridBand] = list(enumerate(cuts))
    if len(cuts) <= limit:
        return numbered
    gap = (cuts[limit - 2][0], cuts[-2][1])
    return [*numbered[: limit - 2], (None, gap), numbered[-1]]


def _owners(
    rows: Sequence[GridBand],
    columns: Sequence[GridBand],
    boxes: Sequence[tuple[Interval, Interval]],
) -> list[list[int | None]]:
    owner: list[list[int | None]] = [[None] * len(columns) for _ in rows]
    for number, (high, wide) in enumerate(boxes):
        for r in _inside(rows, high):
            for c in _inside(columns, wide):
                owner[r][c] = number
    return owner


def _inside(picked: Sequence[GridBand], interval: Interval) -> list[int]:
    """Positions of the picked intervals within another interval; omitted ones are in none."""
    return [
        position
        for position, (number, (a, b)) in enumerate(picked)
        if number is not None and interval[0] <= a and b <= interval[1]
    ]
