"""Facts as HTML for notebooks: a title, tables, and the grid of an array's fragments.

All text is escaped, because names come from untrusted storage. There are no scripts. Styles are
only inline and translucent, so that they look alike on light and dark pages, and survive in viewers
of notebooks. The HTML never has more than some 100 kB.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import islice, takewhile

from unickpt.arrays.layout import Layout
from unickpt.display import fragment_grid
from unickpt.display.fragment_grid import BoxHolders, FragmentGrid
from unickpt.display.tree_table import OutlineRow
from unickpt.quoting import shortened, size_text

MOST_ROWS = 100
MOST_FRAGMENTS = 4096
"""Arrays with more fragments are summarised: a map would take seconds, and show no more."""
_MOST_TEXT = 160
_INDENT = "\N{NO-BREAK SPACE}"
_LINE = "1px solid rgba(128,128,128,.35)"
_CELL = "text-align:left;padding:2px 12px 2px 0"
_NUMBER = "text-align:right;padding:2px 12px 2px 0;white-space:nowrap"
_HEAD = f"border-bottom:{_LINE};font-weight:600;opacity:.75"

Cell = str | int | float
"""Numbers are right-aligned."""


def page(title: str, about: str, facts: Iterable[str], *bodies: str) -> str:
    """The display of one object.

    Arguments:
        title, about: its kind and its name.
        facts: texts on a line below.
        bodies: HTML from other functions of this module.
    """
    line = " · ".join(_text(fact) for fact in facts)
    return (
        f'<div style="font-size:90%"><div><b>{_text(title)}</b> <code>{_text(about)}</code></div>'
        f'<div style="opacity:.75">{line}</div>{"".join(bodies)}</div>'
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[Cell]], count: int) -> str:
    """A table of at most `MOST_ROWS` rows, with a remark if there are more.

    Arguments:
        headings: of the columns.
        rows: their cells.
        count: of all rows.

    Example:
        >>> "<td" in table(["name", "bytes"], [("w", 8)], 1)
        True
    """
    if not count:
        return ""
    shown = list(islice(rows, MOST_ROWS))
    right = [
        all(not isinstance(row[column], str) for row in shown) for column in range(len(headings))
    ]
    styles = [_NUMBER if is_right else _CELL for is_right in right]
    heads = "".join(
        f'<th style="{style};{_HEAD}">{_text(head)}</th>'
        for head, style in zip(headings, styles, strict=True)
    )
    body = "".join(
        "<tr>"
        + "".join(
            f'<td style="{style}">{_shown(cell)}</td>'
            for cell, style in zip(row, styles, strict=True)
        )
        + "</tr>"
        for row in shown
    )
    return (
        f'<table style="border-collapse:collapse"><thead><tr>{heads}</tr></thead>'
        f"<tbody>{body}</tbody></table>{_more(count - len(shown))}"
    )


def outline(rows: Sequence[OutlineRow]) -> str:
    """The table of a checkpoint's tree."""

    def cells(row: OutlineRow) -> Sequence[Cell]:
        facts = row.facts
        name = _INDENT * min(4 * row.depth, 40) + row.label
        shape = "" if facts is None or facts.shape is None else shape_text(facts.shape)
        count = f"{row.count:,} ×" if row.count > 1 else ""
        kind, layout = ("", "") if facts is None else (facts.dtype, facts.layout)
        return name, count, shape, kind, layout, size_text(row.nbytes) if row.nbytes else ""

    headings = ("name", "", "shape", "dtype", "layout", "size")
    return table(headings, map(cells, rows), len(rows))


def fragments(shape: Sequence[int], count: int, holders: BoxHolders, layout: Layout | None) -> str:
    """The map of an array's fragments.

    Arguments:
        shape: of the array.
        count: of its fragments; if there are too many for a map, a sentence says so.
        holders: the fragments; not used if there are too many.
        layout: of the array.
    """
    if not count:
        return _remark("The array has no elements, and so no fragments.")
    if count > MOST_FRAGMENTS:
        return _remark(f"{count:,} fragments: too many for a map.")
    grid = next(fragment_grid.grids(shape, holders, layout))
    heads = "".join(_map_head(fragment_grid.head(column)) for column in grid.columns)
    corner = '<td style="padding:0"></td>' if grid.down is not None else ""
    top = f"<tr>{corner}{heads}</tr>" if grid.across is not None else ""
    body = "".join(_map_row(grid, row) for row in range(len(grid.rows)))
    drawn = f'<table style="border-collapse:collapse;font-family:monospace">{top}{body}</table>'
    return drawn + (_remark(f"p: process; {grid.remark}") if grid.remark else "")


def facts_table(facts: Mapping[str, Cell]) -> str:
    """A table of two columns without headings."""
    body = "".join(
        f'<tr><td style="{_CELL};opacity:.75">{_text(name)}</td>'
        f'<td style="{_CELL}">{_shown(value)}</td></tr>'
        for name, value in facts.items()
    )
    return f'<table style="border-collapse:collapse"><tbody>{body}</tbody></table>'


def shape_text(shape: Sequence[int]) -> str:
    """A shape as people read it, such as `3 × 4`, or "scalar"."""
    return " × ".join(map(str, shape)) or "scalar"


def seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s"


def _map_head(text: str) -> str:
    return f'<td style="text-align:center;padding:2px 6px;opacity:.75">{_text(text)}</td>'


def _map_row(grid: FragmentGrid, row: int) -> str:
    """A row of the map; a fragment is one cell, over all its rows and columns of the grid."""
    cells = [] if grid.down is None else [_map_head(fragment_grid.head(grid.rows[row]))]
    for column, owner in enumerate(grid.owner[row]):
        if owner is None:
            cells.append(_map_cell([fragment_grid.ELIDED], ""))
            continue
        above = row > 0 and grid.owner[row - 1][column] == owner
        if above or (column > 0 and grid.owner[row][column - 1] == owner):
            continue
        high = _run([of_row[column] for of_row in grid.owner[row:]])
        wide = _run(grid.owner[row][column:])
        span = (f' rowspan="{high}"' if high > 1 else "") + (
            f' colspan="{wide}"' if wide > 1 else ""
        )
        cells.append(_map_cell(grid.labels[owner], span))
    return f"<tr>{''.join(cells)}</tr>"


def _run(owners: Sequence[int | None]) -> int:
    """The number of equal items at the start; with omitted cells, a fragment has several runs."""
    return sum(1 for _ in takewhile(lambda owner: owner == owners[0], owners))


def _map_cell(lines: Sequence[str], span: str) -> str:
    # The same processes have the same colour; neighbouring numbers are far apart in hue.
    first = lines[0][1:].partition("-")[0].partition(",")[0]
    hue = int(first) * 137 % 360 if first.isdecimal() else None
    colour = "" if hue is None else f";background:hsla({hue},65%,50%,.22)"
    text = "<br>".join(map(_text, lines))
    style = f"text-align:center;padding:6px 10px;border:{_LINE}{colour}"
    return f'<td{span} style="{style}">{text}</td>'


def plain(text: str, most: int = _MOST_TEXT) -> str:
    """Text from a checkpoint in one line: shortened, and without characters that change its look.

    Example:
        >>> plain("a\\nb\\u202e")
        'a b '
    """
    short = shortened(text, most)
    return "".join(c if c.isprintable() or c == "\N{NO-BREAK SPACE}" else " " for c in short)


def _shown(cell: Cell) -> str:
    if isinstance(cell, str):
        return _text(cell)
    return f"{cell:,}" if isinstance(cell, int) else f"{cell:.4g}"


def _text(text: str) -> str:
    return escape(plain(text))


def _more(count: int) -> str:
    return _remark(f"... and {count:,} more") if count > 0 else ""


def _remark(text: str) -> str:
    return f'<div style="opacity:.75">{_text(text)}</div>'
