"""The fragment map: which processes held which box of an array, drawn with box-drawing lines."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout

Fragments = Sequence[tuple[Box, tuple[int, ...]]]
Interval = tuple[int, int]

_MAX_ROWS = 16
_MAX_COLUMNS = 16
_WIDTH = 56
_LABEL_WIDTH = 16
_ELIDED = "..."
# The line characters by the arms that meet (up, down, left, right as bits 8, 4, 2, 1).
_LINES = " ╶╴─╷┌┐┬╵└┘┴│├┤┼"
ASCII = str.maketrans("╶╴─╷┌┐┬╵└┘┴│├┤┼", "---|+++|+++|+++")


@dataclass(frozen=True)
class Map:
    """The lines of a drawing, and a remark about what it does not show."""

    lines: tuple[str, ...]
    remark: str


def draw(
    shape: Sequence[int], fragments: Fragments, layout: Layout | None = None, width: int = 100
) -> Map:
    """Draws the fragments of an array.

    Arguments:
        shape: shape of the array.
        fragments: the distinct boxes with the processes that held each.
        layout: if it has more devices than processes, cells also name the devices.
        width: characters in a line; wider drawings omit the middle.

    Returns:
        For up to two dimensions the whole array; for more, the plane through the first element
        along the first two dimensions that are split.

    Example:
        >>> left, right = Box((0, 0), (2, 3)), Box((0, 3), (2, 6))
        >>> print(*draw((2, 6), [(left, (0,)), (right, (1,))]).lines, sep="\\n")
                         0:3                          3:6
            ┌────────────────────────────┬────────────────────────────┐
        0:2 │             p0             │             p1             │
            └────────────────────────────┴────────────────────────────┘
    """
    if not fragments:
        return Map((), "The array has no elements, and so no fragments.")
    down, across = _plane(shape, fragments)
    others = [d for d in range(len(shape)) if d not in (down, across)]
    shown = [f for f in fragments if all(f[0].start[d] == 0 for d in others)]
    devices = _devices(shape, layout) if layout is not None else {}
    rows, columns = _pick(_cuts(shown, down), _MAX_ROWS), _cuts(shown, across)
    texts = [_label(holders, devices.get(box)) for box, holders in shown]
    boxes = [_across(box, down, across) for box, _ in shown]
    for limit in range(_MAX_COLUMNS, 2, -1):
        drawing = _Drawing(rows, _pick(columns, limit), boxes, texts)
        lines = drawing.lines(down, across)
        if max(map(len, lines)) <= width:
            break
    remarks = []
    if down is not None:
        names = (f"dimension {down} runs down", f"dimension {across} to the right")
        remarks.append(", ".join(names))
    split = [d for d in others if len({(f[0].start[d], f[0].stop[d]) for f in fragments}) > 1]
    if split:
        pieces = " x ".join(str(len({f[0].start[d] for f in fragments})) for d in split)
        remarks.append(f"the first of {pieces} pieces along dimension {', '.join(map(str, split))}")
    return Map(tuple(lines), "; ".join(remarks))


def _plane(shape: Sequence[int], fragments: Fragments) -> tuple[int | None, int | None]:
    """The dimensions that run down and to the right."""
    if len(shape) < 2:
        return None, 0 if shape else None
    split = [
        d
        for d in range(len(shape))
        if len({(box.start[d], box.stop[d]) for box, _ in fragments}) > 1
    ]
    dims = split[:2]
    for d in range(len(shape)):
        if len(dims) < 2 and d not in dims:
            dims.append(d)
    down, across = sorted(dims)
    return down, across


def _cuts(fragments: Fragments, dim: int | None) -> list[Interval]:
    """The intervals between all boundaries along a dimension."""
    if dim is None:
        return [(0, 1)]
    points = sorted({p for box, _ in fragments for p in (box.start[dim], box.stop[dim])})
    return list(itertools.pairwise(points))


def _across(box: Box, down: int | None, across: int | None) -> tuple[Interval, Interval]:
    """A box in the plane that is drawn."""
    rows = (0, 1) if down is None else (box.start[down], box.stop[down])
    return rows, (0, 1) if across is None else (box.start[across], box.stop[across])


def _devices(shape: Sequence[int], layout: Layout) -> Mapping[Box, list[int]]:
    """The devices of each box, numbered row-major; empty if they equal the processes."""
    if len(set(layout.mesh.processes)) == len(layout.mesh.processes):
        return {}
    found: dict[Box, list[int]] = {}
    for number, coordinate in enumerate(np.ndindex(layout.mesh.shape)):
        found.setdefault(layout.box(shape, coordinate), []).append(number)
    return found


def _label(holders: Sequence[int], devices: Sequence[int] | None) -> list[str]:
    lines = ["p" + numbers(holders)]
    return lines if devices is None else [*lines, "d" + numbers(devices)]


def numbers(items: Sequence[int]) -> str:
    """Ascending numbers as ranges, shortened.

    Example:
        >>> numbers([0, 1, 2, 3, 8]), numbers(range(0, 60, 2))
        ('0-3,8', '0,2,4,6,.. (30)')
    """
    runs: list[list[int]] = []
    for item in items:
        if runs and item == runs[-1][-1] + 1:
            runs[-1].append(item)
        else:
            runs.append([item])
    texts = [str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs]
    whole = ",".join(texts)
    if len(whole) < _LABEL_WIDTH:
        return whole
    tail = f",.. ({len(items)})"
    kept = texts[:1]
    while len(",".join(texts[: len(kept) + 1])) + len(tail) < _LABEL_WIDTH:
        kept = texts[: len(kept) + 1]
    return ",".join(kept) + tail


def _pick(cuts: list[Interval], limit: int) -> list[tuple[int | None, Interval]]:
    """Positions to draw with their intervals; None represents omitted ones."""
    numbered: list[tuple[int | None, Interval]] = list(enumerate(cuts))
    if len(cuts) <= limit:
        return numbered
    gap = (cuts[limit - 2][0], cuts[-2][1])
    return [*numbered[: limit - 2], (None, gap), numbered[-1]]


def _inside(picked: list[tuple[int | None, Interval]], interval: Interval) -> list[int]:
    """Positions of the picked intervals within another interval; omitted ones are in none."""
    return [
        at
        for at, (number, (a, b)) in enumerate(picked)
        if number is not None and interval[0] <= a and b <= interval[1]
    ]


class _Drawing:
    """A grid of cells without walls between neighbours of the same owner."""

    def __init__(
        self,
        rows: list[tuple[int | None, Interval]],
        columns: list[tuple[int | None, Interval]],
        boxes: Sequence[tuple[Interval, Interval]],
        texts: Sequence[Sequence[str]],
    ) -> None:
        self.rows, self.columns = rows, columns
        self.owner: list[list[int | None]] = [[None] * len(columns) for _ in rows]
        for number, (high, wide) in enumerate(boxes):
            for r in _inside(rows, high):
                for c in _inside(columns, wide):
                    self.owner[r][c] = number
        self.texts = texts
        self.height = max((len(text) for text in texts), default=1)
        self.widths = self._column_widths()

    def lines(self, down: int | None, across: int | None) -> list[str]:
        heads = [_head(i, interval) for i, interval in self.rows] if down is not None else [""]
        margin = max(map(len, heads)) + 1 if down is not None else 0
        out = []
        if across is not None:
            titles = [
                _head(j, interval).center(width)
                for (j, interval), width in zip(self.columns, self.widths, strict=True)
            ]
            out.append((" " * (margin + 1) + " ".join(titles)).rstrip())
        canvas = self._canvas()
        step = self.height + 1
        for at, line in enumerate(canvas):
            row, offset = divmod(at, step)
            head = heads[row] if offset == 1 + (self.height - 1) // 2 else ""
            out.append((head.rjust(margin - 1) + " " if margin else "") + "".join(line))
        return out

    def _column_widths(self) -> list[int]:
        total = max(1, self.columns[-1][1][1] - self.columns[0][1][0])
        widths = []
        for c, (j, (a, b)) in enumerate(self.columns):
            labels = {o for row in self.owner if (o := row[c]) is not None}
            longest = max((len(t) for o in labels for t in self.texts[o]), default=len(_ELIDED))
            wanted = _WIDTH * (b - a) // total if j is not None else 0
            widths.append(max(longest + 2, len(_head(j, (a, b))), wanted))
        return widths

    def _canvas(self) -> list[list[str]]:
        lefts = [0]
        for width in self.widths:
            lefts.append(lefts[-1] + width + 1)
        step = self.height + 1
        canvas = [[" "] * (lefts[-1] + 1) for _ in range(step * len(self.rows) + 1)]
        for r in range(len(self.rows) + 1):
            for c in range(len(self.columns) + 1):
                self._draw_point(canvas, r, c, lefts, step)
        for r in range(len(self.rows)):
            for c in range(len(self.columns)):
                self._write(canvas, r, c, lefts, step)
        return canvas

    def _at(self, r: int, c: int) -> tuple[int, ...]:
        """What distinguishes a cell from its neighbours: its owner, or its own position."""
        if not (0 <= r < len(self.rows) and 0 <= c < len(self.columns)):
            return ()
        owner = self.owner[r][c]
        return (owner,) if owner is not None else (r, c)

    def _draw_point(
        self, canvas: list[list[str]], r: int, c: int, lefts: Sequence[int], step: int
    ) -> None:
        """A corner with the walls to its right and below it."""
        nw, ne = self._at(r - 1, c - 1), self._at(r - 1, c)
        sw, se = self._at(r, c - 1), self._at(r, c)
        arms = 8 * (nw != ne) + 4 * (sw != se) + 2 * (nw != sw) + (ne != se)
        y, x = r * step, lefts[c]
        canvas[y][x] = _LINES[arms]
        if ne != se:
            for k in range(x + 1, lefts[c + 1]):
                canvas[y][k] = "─"
        if sw != se:
            for k in range(y + 1, y + step):
                canvas[k][x] = "│"

    def _write(
        self, canvas: list[list[str]], r: int, c: int, lefts: Sequence[int], step: int
    ) -> None:
        """The label of a fragment, once, in its middle."""
        at = self._at(r, c)
        if at in (self._at(r - 1, c), self._at(r, c - 1)):
            return
        bottom, right = r, c
        while self._at(bottom + 1, c) == at:
            bottom += 1
        while self._at(r, right + 1) == at:
            right += 1
        text = self.texts[at[0]] if len(at) == 1 else [_ELIDED]
        top = (r * step + 1 + (bottom + 1) * step - len(text)) // 2
        for k, line in enumerate(text):
            x = lefts[c] + 1 + (lefts[right + 1] - lefts[c] - 1 - len(line)) // 2
            canvas[top + k][x : x + len(line)] = line


def _head(number: int | None, interval: Interval) -> str:
    return _ELIDED if number is None else f"{interval[0]}:{interval[1]}"
