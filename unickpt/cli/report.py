"""report: a run or a checkpoint as a page for browsers."""

from __future__ import annotations

from typing import Annotated

import typer

import unickpt
from unickpt.cli.output import clean, console, size_text


def report(
    path: Annotated[
        str,
        typer.Argument(
            metavar="RUN|STEP", help="A directory or a URL of checkpoints, or of one checkpoint."
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", help="The file to write; replaced if it exists.")
    ] = "report.html",
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metrics",
            metavar="FILE",
            help="What unickpt.integrations.metrics.JsonLines wrote; can be given several times.",
        ),
    ] = None,
) -> None:
    """Write a page about a run, or one checkpoint: one HTML file that needs no network.

    Of a run: its steps, what each shares with others, and how long it took. Of the newest steps:
    when each process did what, the processes over the mesh, and the slowest. Of the newest: its
    arrays and their layouts. No arrays are read.

    \b
    unickpt report runs/llama -o report.html
    unickpt report s3://bucket/runs/llama/step_100 -o step_100.html
    unickpt report runs/llama --metrics saves.jsonl

    With --metrics, it also shows steps that are removed, the time to each commit, and loads.
    """
    written = unickpt.report(path, out, metrics=metrics or ())
    console().print(clean(f"{written}: {size_text(written.stat().st_size)}"), soft_wrap=True)
