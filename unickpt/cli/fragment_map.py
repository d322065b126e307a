"""The fragment map: the processes that held each box of an array, in box-drawing characters."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from unickpt.arrays.layout import Layout
from unickpt.display import fragment_grid
from unickpt.display.fragment_grid import ELIDED, BoxHolders, FragmentGrid

_WIDTH = 56
# The line characters by the arms that meet (up, down, left, right as bits 8, 4, 2, 1).
_LINES = " ╶╴─╷┌┐┬╵└┘┴│├┤┼"
ASCII = str.maketrans("╶╴─╷┌┐┬╵└┘┴│├┤┼", "---|+++|+++|+++")


@dataclass(frozen=True)
class Map:
    """The lines of a drawing, and a remark about the parts that it omits."""

    lines: tuple[str, ...]
    remark: str


def draw(
    shape: Sequence[int], fragments: BoxHolders, layout: Layout | None = None, width: int = 100
) -> Map:
    """Draws the fragments of an array.

    Arguments:
        shape, fragments, layout: see `fragment_grid.grids`.
        width: characters in a line; wider drawings omit the middle.

    Example:
        >>> from unickpt.arrays.box import Box
        >>> left, right = Box((0, 0), (2, 3)), Box((0, 3), (2, 6))
        >>> print(*draw((2, 6), [(left, (0,)), (right, (1,))]).lines, sep="\\n")
                         0:3                          3:6
            ┌────────────────────────────┬────────────────────────────┐
        0:2 │             p0             │             p1             │
            └────────────────────────────┴────────────────────────────┘
    """
    if not fragments:
        return Map((), "The array has no elements, and so no fragments.")
    for grid in fragment_grid.grids(shape, fragments, layout):
        lines = _Drawing(grid).lines()
        if max(map(len, lines)) <= width:
            break
    return Map(tuple(lines), grid.remark)


class _Drawing:
    """A grid of cells without walls between neighbours of the same owner."""

    def __init__(self, grid: FragmentGrid) -> None:
        self.rows, self.columns, self.owner = grid.rows, grid.columns, grid.owner
        self.down, self.across = grid.down, grid.across
        self.texts = grid.labels
        self.height = max((len(text) for text in self.texts), default=1)
        self.step = self.height + 1
        self.widths = self._column_widths()
        self.lefts = list(accumulate((width + 1 for width in self.widths), initial=0))
        self.canvas = [[" "] * (self.lefts[-1] + 1) for _ in range(self.step * len(self.rows) + 1)]

    def lines(self) -> list[str]:
        is_plane = self.down is not None
        heads = [fragment_grid.head(row) for row in self.rows] if is_plane else [""]
        margin = max(map(len, heads)) + 1 if is_plane else 0
        out = []
        if self.across is not None:
            titles = [
                fragment_grid.head(column).center(width)
                for column, width in zip(self.columns, self.widths, strict=True)
            ]
            out.append((" " * (margin + 1) + " ".join(titles)).rstrip())
        for r, c in itertools.product(range(len(self.rows) + 1), range(len(self.columns) + 1)):
            self._draw_point(r, c)
        for r, c in itertools.product(range(len(self.rows)), range(len(self.columns))):
            self._write(r, c)
        for line_number, line in enumerate(self.canvas):
            row, offset = divmod(line_number, self.step)
            head = heads[row] if offset == 1 + (self.height - 1) // 2 else ""
            out.append((head.rjust(margin - 1) + " " if margin else "") + "".join(line))
        return out

    def _column_widths(self) -> list[int]:
        total = max(1, self.columns[-1][1][1] - self.columns[0][1][0])
        widths = []
        for c, (j, (a, b)) in enumerate(self.columns):
            labels = {o for row in self.owner if (o := row[c]) is not None}
            longest = max((len(t) for o in labels for t in self.texts[o]), default=len(ELIDED))
            proportional_width = _WIDTH * (b - a) // total if j is not None else 0
            widths.append(
                max(longest + 2, len(fragment_grid.head((j, (a, b)))), proportional_width)
            )
        return widths

    def _cell(self, r: int, c: int) -> tuple[int, ...]:
        """The key that distinguishes a cell from its neighbours: its owner, or its position."""
        if not (0 <= r < len(self.rows) and 0 <= c < len(self.columns)):
            return ()
        owner = self.owner[r][c]
        return (owner,) if owner is not None else (r, c)

    def _draw_point(self, r: int, c: int) -> None:
        """A corner with the walls to its right and below it."""
        nw, ne = self._cell(r - 1, c - 1), self._cell(r - 1, c)
        sw, se = self._cell(r, c - 1), self._cell(r, c)
        arms = 8 * (nw != ne) + 4 * (sw != se) + 2 * (nw != sw) + (ne != se)
        y, x = r * self.step, self.lefts[c]
        self.canvas[y][x] = _LINES[arms]
        if ne != se:
            for k in range(x + 1, self.lefts[c + 1]):
                self.canvas[y][k] = "─"
        if sw != se:
            for k in range(y + 1, y + self.step):
                self.canvas[k][x] = "│"

    def _write(self, r: int, c: int) -> None:
        """The label of a fragment, once, in its middle."""
        cell = self._cell(r, c)
        if cell in (self._cell(r - 1, c), self._cell(r, c - 1)):
            return
        bottom, right = r, c
        while self._cell(bottom + 1, c) == cell:
            bottom += 1
        while self._cell(r, right + 1) == cell:
            right += 1
        text = self.texts[cell[0]] if len(cell) == 1 else [ELIDED]
        top = (r * self.step + 1 + (bottom + 1) * self.step - len(text)) // 2
        left, end = self.lefts[c] + 1, self.lefts[right + 1]
        for k, line in enumerate(text):
            x = left + (end - left - len(line)) // 2
            self.canvas[top + k][x : x + len(line)] = line
