"""Tables of the commands: columns, names that break between lines, and many rows."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from unickpt.tools.terminal.output import clean, console

Cell = str | tuple[str, str]
"""A text from a checkpoint; or a text to print unchanged, and its style."""

MANY_ROWS = 500
_LEAST_NAME = 24


def new_table(columns: Iterable[str], right: Sequence[str] = ()) -> Table:
    """A table without rows; cells of the columns in `right` are aligned to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


def print_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Cell]],
    right: Sequence[str] = (),
    out: Console | None = None,
) -> None:
    """Prints a table.

    Tables of rich take 0.3 ms for each row. Many rows are printed as plain lines as they come, in
    columns as wide as the first of them need.

    Arguments:
        columns: the headings.
        rows: the cells of each; the last ones can be missing.
        right: the columns that are aligned to the right.
        out: where to print; by default the standard output.
    """
    out = out or console()
    waiting = ([_styled(cell) for cell in row] for row in rows)
    first = list(itertools.islice(waiting, MANY_ROWS + 1))
    lines = [columns, *([text for text, _ in row] for row in first)]
    widths = [max(map(cell_len, column)) for column in itertools.zip_longest(*lines, fillvalue="")]
    if len(first) <= MANY_ROWS:
        table = new_table(columns, right)
        room = max(_LEAST_NAME, out.width - sum(widths[1:]) - 2 * len(widths[1:]))
        for (name, style), *other_cells in first:
            cells = [(wrapped(name, room), style), *other_cells]
            table.add_row(*(Text(text, style) for text, style in cells))
        out.print(table)
        return
    for texts in itertools.chain(lines, ([text for text, _ in row] for row in waiting)):
        spaces = (" " * (n - cell_len(text)) for n, text in zip(widths, texts, strict=False))
        cells_of = zip(columns, texts, spaces, strict=False)
        padded = (space + text if c in right else text + space for c, text, space in cells_of)
        out.file.write("  ".join(padded).rstrip() + "\n")


def _styled(cell: Cell) -> tuple[str, str]:
    return (clean(cell), "") if isinstance(cell, str) else cell


def wrapped(name: str, width: int) -> str:
    """A name in lines that break after a slash or a dot, where there are any.

    Example:
        >>> wrapped("model.decoder.layer", 15).splitlines()
        ['model.decoder.', '  layer']
    """
    if cell_len(name) <= width or name != name.rstrip():
        return name
    indent = " " * (len(name) - len(name.lstrip()) + 2)
    lines = [""]
    for piece in re.findall(r"[^/.]*[/.]?", name):
        if lines[-1].strip() and cell_len(lines[-1] + piece) > width:
            lines.append(indent)
        lines[-1] += piece
    return "\n".join(lines)


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def date_text(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC")
