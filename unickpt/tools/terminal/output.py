"""Output of the commands: texts without control characters, JSON, progress, exit codes; and the
output of commands that write checkpoints, once for all processes of torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn
from rich.text import Text

from unickpt.quoting import counted, printable, size_text
from unickpt.save_report import SaveReport

DAMAGED, DIFFERENT, FAILED = 1, 1, 2
_REFUSED = 1
_MOST_TEXT = 1000  # characters of a name, or of a fact; JSON has all
_UNBOUNDED = 1 << 16  # columns of output that goes to no terminal, so that nothing wraps

Where = Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def command_app(**settings: Any) -> typer.Typer:
    """An app for a command, or for several below one name: a target of `unickpt.commands`."""
    return typer.Typer(add_completion=False, rich_markup_mode=None, **settings)


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with 1, which means that something is damaged


def console(*, stderr: bool = False) -> Console:
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNBOUNDED
    return _Console(file=stream, width=width, highlight=False, markup=False, emoji=False)


def print_json(body: Any) -> None:
    print(json.dumps(body, indent=2))


def drop_output() -> None:
    """Discards all further output, after its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def verdict(code: int) -> Iterator[None]:
    """Prints the report of a command, and ends it with an exit code, even if the reader closes the
    pipe early."""
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


def confirm(question: str) -> None:
    """Prompts the user; ends the command if the answer is no, or if there is no terminal."""
    if not is_interactive():
        warn("nothing was removed: no terminal to ask on; pass --yes")
        raise typer.Exit(_REFUSED)
    typer.confirm(question, abort=True)


def is_interactive() -> bool:
    """Whether a user can answer a prompt."""
    return sys.stdin.isatty()


@contextmanager
def transfer(*, shown: bool = True) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal; gives a function that takes bytes done and bytes in all."""
    out = console(stderr=True)
    columns = (*Progress.get_default_columns()[1:], DownloadColumn(), TransferSpeedColumn())
    hidden = not (shown and out.is_terminal)
    with Progress(*columns, console=out, transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def clean(text: str, keep: str = "") -> str:
    """Text from a checkpoint; see `printable`. Lines of a message, if kept, are not shortened."""
    return printable(text, len(text) if keep else _MOST_TEXT, keep)


@contextmanager
def job() -> Iterator[bool]:
    """Joins the other processes of torchrun, if any; returns whether this is the first."""
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
    """Prints what was written.

    Arguments:
        done: the operation, in words.
        report: of it.
        verified: whether the result was read back.
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
    """The report of what was written, for programs."""
    names = ("url", "arrays", "bytes", "chunks", "processes", "seconds")
    errors = {
        name: {"largest_error": absolute, "largest_relative_error": relative}
        for name, (absolute, relative) in report.quantized.items()
    }
    facts = {name: getattr(report, name) for name in names}
    return {**facts, "quantized": errors, "left_out": list(report.left_out)}
