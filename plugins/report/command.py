"""report: a run or a checkpoint as a page for browsers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from unickpt.extend import size_text
from unickpt.extend import terminal_output as terminal
from unickpt.plugins.report.html_report import report

app = terminal.command_app()


@app.command()
def command(
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
    trace: Annotated[
        str | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Also write the phases of each process as a trace.",
        ),
    ] = None,
) -> None:
    """Write a page about a run or a checkpoint: one HTML file that needs no network.

    It shows the steps, the data that they share, and how long each took; for the newest steps, a
    timeline of the processes, the processes over the mesh, and the slowest; and the arrays of the
    newest step with their layouts. No arrays are read.

    \b
    unickpt report runs/llama -o report.html
    unickpt report s3://bucket/runs/llama/step_100 -o step_100.html
    unickpt report runs/llama --metrics saves.jsonl
    unickpt report runs/llama --trace saves.json

    With --trace, it also writes the timeline as trace events (JSON), to open in
    https://ui.perfetto.dev or chrome://tracing: a track for each process of each save, with its
    phases, and their bytes as arguments.

    With --metrics, the page also shows removed steps, the time to each commit, loads,
    failures and lost time.
    """
    page = report(path, out, metrics=metrics or (), trace=trace)
    for written in (page, *([Path(trace)] if trace else [])):
        terminal.console().print(
            terminal.clean(f"{written}: {size_text(written.stat().st_size)}"), soft_wrap=True
        )
