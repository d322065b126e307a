"""watch: the checkpoints of a run, and how far those are that are being saved."""

from __future__ import annotations

import json
import time
from contextlib import nullcontext
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from unickpt.extend import first_few, size_text
from unickpt.extend import terminal_output as terminal
from unickpt.extend import terminal_tables as tables
from unickpt.plugins.watch.watching import FAILED, CommittedStep, Look, UnderWay, Watch

app = terminal.command_app()
_SHARE = 10
"""At most one part in so many of the time is spent looking, however slow the storage is."""
_COLUMNS = ("checkpoint", "state", "processes", "bytes", "rate", "for", "who")
_QUIET_S = 15.0


@app.command()
def command(
    run: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    once: Annotated[bool, typer.Option("--once", help="Look once, and end.")] = False,
    every: Annotated[float, typer.Option("--every", help="Seconds between looks.", min=0.1)] = 2.0,
    last: Annotated[
        int, typer.Option("--last", help="How many committed checkpoints to show.", min=0)
    ] = 8,
    as_json: terminal.AsJson = False,
) -> None:
    """Follow the saves of a run until Ctrl-C, from the storage alone.

    Several processes report their progress from the start of a save, and whether a neighbour on
    their machine is stopped or waits for a disk. A process that saves alone reports it after five
    seconds.

    \b
    unickpt watch runs/llama
    unickpt watch s3://bucket/runs/llama --every 30
    unickpt watch runs/llama --once --json

    An abandoned save looks like one in progress in which nothing changes; `unickpt clean` removes
    its remains.

    --json prints one object for each look, on one line: {committed: [{name, created, nbytes,
    new_bytes, processes, seconds, error}], under_way: [{name, attempt, processes, phases, nbytes,
    total, seconds, quiet_s}]}. phases has the numbers of the processes by what they do.
    """
    watching, out = Watch(run, last), terminal.console()
    with Live(console=out, auto_refresh=False) if out.is_terminal else nullcontext() as live:
        while True:
            began = time.monotonic()
            try:
                look = watching.look()
                if as_json:
                    print(json.dumps(asdict(look)), flush=True)
                elif live is None:
                    out.print(_drawn(run, look))
                else:
                    live.update(_drawn(run, look), refresh=True)
                if once:
                    return
                time.sleep(max(every, _SHARE * (time.monotonic() - began)))
            except KeyboardInterrupt:
                return


def _drawn(run: str, look: Look) -> Any:
    if not look.committed and not look.under_way:
        return Text(f"nothing is saved in {terminal.clean(run)}, and nothing is being saved")
    table = tables.new_table(_COLUMNS, right=("processes", "bytes", "rate", "for"))
    for committed in look.committed:
        _add(table, _committed_row(committed), "red" if committed.error else "")
    for under_way in look.under_way:
        failed = FAILED in under_way.phases
        _add(table, _under_way_row(under_way), "red" if failed else "bold")
    return Group(Text(terminal.clean(run), "bold"), table)


def _add(table: Table, row: list[str], style: str) -> None:
    table.add_row(*(Text(terminal.clean(text), style) for text in row))


def _committed_row(checkpoint: CommittedStep) -> list[str]:
    if checkpoint.error:
        return [checkpoint.name, "cannot be opened", "", "", "", "", checkpoint.error]
    seconds = checkpoint.seconds
    return [
        checkpoint.name,
        tables.date_text(checkpoint.created),
        f"{checkpoint.processes:,}",
        size_text(checkpoint.new_bytes),
        "" if not seconds else f"{size_text(int(checkpoint.new_bytes / seconds))}/s",
        "" if seconds is None else f"{seconds:.1f} s",
        "",
    ]


def _under_way_row(save: UnderWay) -> list[str]:
    done = len(save.phases.get("done", ()))
    share = f" of {size_text(save.total)}" if save.total else ""
    rate = f"{size_text(int(save.nbytes / save.seconds))}/s" if save.seconds else ""
    quiet = f"; nothing changed for {save.quiet_s:.0f} s" if save.quiet_s > _QUIET_S else ""
    who = [
        f"{first_few(processes)} {phase}"
        for phase, processes in sorted(save.phases.items(), key=lambda item: len(item[1]))
        if phase != "done"
    ]
    return [
        save.name,
        FAILED if FAILED in save.phases else "saving",
        f"{done:,}/{save.processes:,}",
        f"{size_text(save.nbytes)}{share}" if save.total else "",
        rate,
        f"{save.seconds:.1f} s" if save.seconds else "",
        ", ".join(who) + quiet,
    ]
