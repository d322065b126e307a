"""Output of the commands: tables, numbers with units, text without control characters; what those
that write checkpoints print, once for all processes of torchrun."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskProgressColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table
from rich.text import Text

from unickpt.quoting import counted, printable, size_text
from unickpt.types import SaveReport

DAMAGED, DIFFERENT, FAILED = 1, 1, 2
_MOST_TEXT = 1000  # characters of a name, or of a fact; JSON has all
_UNBOUNDED = 1 << 16  # columns of output that goes to no terminal, so that nothing wraps

Where = Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1, which says that something is damaged


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_json(body: Any) -> None:
    print(json.dumps(body, indent=2))


def drop_output() -> None:
    """Writes all further output nowhere, after its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def verdict(code: int) -> Iterator[None]:
    """Prints the report of a command, and ends it with an exit code, also if the reader closes the
    pipe before it has all of it."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
    if code:
        raise typer.Exit(code)


def warn(message: str) -> None:
    console(stderr=True).print(Text.assemble(("warning: ", "bold yellow"), clean(message, "\n")))


def fail(message: str) -> NoReturn:
    console(stderr=True).print(Text.assemble(("unickpt: ", "bold red"), clean(message, "\n")))
    raise typer.Exit(FAILED)


@contextmanager
def transfer(what: str, *, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; gives a function that takes bytes done and bytes in all."""
    out = console(stderr=True)
    columns = (
        TaskProgressColumn(),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    hidden = not (shown and out.is_terminal)
    with Progress(*columns, console=out, transient=True, disable=hidden) as progress:
        task = progress.add_task(escape(what), total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def clean(text: str, keep: str = "") -> str:
    """Text from a checkpoint; see `printable`. Lines of a message, if they are kept, are as long as
    they are."""
    return printable(text, len(text) if keep else _MOST_TEXT, keep)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column in right:
            table.add_column(column, justify="right", no_wrap=True)
        else:
            table.add_column(column, overflow="fold")
    return table


StyledText = tuple[str, str]
"""A text, and its style."""

MANY_ROWS = 500
_LEAST_NAME = 24


def print_rows(out: Console, table: Table, rows: Iterable[Sequence[StyledText]]) -> None:
    """Prints rows below the headings of a table.

    Tables of rich take 0.3 ms for each row. Where there are many rows, they are printed as plain
    lines, as they come, in columns as wide as the first of them need.
    """
    waiting = iter(rows)
    first = list(itertools.islice(waiting, MANY_ROWS + 1))
    if len(first) <= MANY_ROWS:
        width = _room_of_names(out, table, first)
        for row in first:
            (name, style), *others = row
            cells = [(wrapped(name, width), style), *others]
            table.add_row(*(Text(text, style) for text, style in cells))
        out.print(table)
        return
    headings = [(str(column.header), "") for column in table.columns]
    right = [column.justify == "right" for column in table.columns]
    lines = [[text for text, _ in row] for row in (headings, *first)]
    widths = [max(map(cell_len, column)) for column in itertools.zip_longest(*lines, fillvalue="")]
    for row in itertools.chain([headings], first, waiting):
        padded = map(_padded, (text for text, _ in row), widths, right)
        out.file.write("  ".join(padded).rstrip() + "\n")


def _room_of_names(out: Console, table: Table, rows: Sequence[Sequence[StyledText]]) -> int:
    """The columns of a terminal that the other cells leave for the first ones."""
    lines = [[str(column.header) for column in table.columns], *([t for t, _ in r] for r in rows)]
    widths = [max(map(cell_len, column)) for column in itertools.zip_longest(*lines, fillvalue="")]
    return max(_LEAST_NAME, out.width - sum(widths[1:]) - 2 * len(widths[1:]))


def wrapped(name: str, width: int) -> str:
    """A name in lines that break behind a slash or a dot, as far as these are there.

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


def plain_cells(texts: Iterable[str]) -> list[StyledText]:
    """Cells of texts from a checkpoint."""
    return [(clean(text), "") for text in texts]


def _padded(text: str, width: int, right: bool) -> str:
    space = " " * (width - cell_len(text))
    return space + text if right else text + space


def shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


def date_text(created: str) -> str:
    return created.replace("T", " ").replace("+00:00", " UTC")


@contextmanager
def job() -> Iterator[bool]:
    """Joins the other processes of torchrun, where there are any; whether this is the first."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "MASTER_ADDR" not in os.environ:
        yield True
        return
    import torch.distributed as dist  # here, so that the commands start fast

    dist.init_process_group("gloo")
    try:
        yield dist.get_rank() == 0
        dist.barrier()
    finally:
        dist.destroy_process_group()


def print_written(done: str, report: SaveReport, verified: bool, as_json: bool) -> None:
    """Says what was written.

    Arguments:
        done: what was done.
        report: of it.
        verified: whether what was written was read again.
        as_json: for programs.
    """
    if as_json:
        print_json(written_json(report))
        return
    checked = ", and checked" if verified else ""
    console().print(
        f"{done} {counted(report.arrays, 'array')}, {size_text(report.bytes)} in "
        f"{report.seconds:.2f} s ({report.gb_per_s:.2f} GB/s){checked}: {clean(report.url)}"
    )
    if report.left_out:
        names = ", ".join(map(clean, report.left_out))
        console().print(f"left out, because the format has no place for it: {names}")
    if report.quantized:
        worst = max(relative for _, relative in report.quantized.values())
        console().print(
            f"{counted(len(report.quantized), 'array')} with fewer bits; the largest error is "
            f"{worst:.3g} of the largest element of its block"
        )


def written_json(report: SaveReport) -> dict[str, Any]:
    """What was written, for programs."""
    names = ("url", "arrays", "bytes", "chunks", "processes", "seconds")
    errors = {
        name: {"largest_error": absolute, "largest_relative_error": relative}
        for name, (absolute, relative) in report.quantized.items()
    }
    told = {name: getattr(report, name) for name in names}
    return {**told, "quantized": errors, "left_out": list(report.left_out)}
