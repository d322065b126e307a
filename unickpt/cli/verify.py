"""verify: compares every byte of a checkpoint with its digest."""

from __future__ import annotations

from dataclasses import asdict

import typer
from rich.text import Text

import unickpt
from unickpt.cli.nonfinite import Nonfinite, count_nonfinite
from unickpt.quoting import counted, size_text
from unickpt.reading.verification import VerifyReport
from unickpt.tools.terminal.command_options import HintOption, source_of
from unickpt.tools.terminal.output import (
    DAMAGED,
    AsJson,
    Where,
    clean,
    console,
    print_json,
    transfer,
    verdict,
)
from unickpt.tools.terminal.tables import print_table


def command(
    path: Where, nonfinite: Nonfinite = False, hint: HintOption = None, as_json: AsJson = False
) -> None:
    """Read a whole checkpoint and compare every byte with its digest.

    Exits with 1 if anything is damaged, missing, or does not belong there.

    \b
    unickpt verify runs/step_100
    unickpt verify s3://bucket/runs/step_100 --json
    unickpt verify runs --nonfinite

    With --nonfinite, it reads only arrays of floats, compares their bytes with the digests, and
    exits with 1 if any element is NaN or infinite. In a folder, it reads the checkpoints in the
    order of their steps, up to the first that has any. --json then prints {url, ok, checked,
    checkpoints, arrays: [{name, nan, infinite, elements, first}]}.

    --json prints {url, ok, arrays, chunks, bytes, seconds, damage, unverified}, damage being a
    list of {array, box, process, reason}; array and box are empty, and process is null, where the
    damage is not in a chunk. unverified says why changed bytes would not be noticed; it is empty
    if all arrays have digests or checksums.

    Fields are only ever added.
    """
    if nonfinite:
        if not count_nonfinite(path, hint, as_json):
            raise typer.Exit(DAMAGED)
        return
    with transfer() as progress:
        report = unickpt.verify(source_of(path, hint), progress=progress)
    with verdict(0 if report.ok else DAMAGED):
        if as_json:
            print_json({**asdict(report), "ok": report.ok})
        else:
            _print_report(report)


def _print_report(report: VerifyReport) -> None:
    out = console()
    checked = (
        f"{counted(report.arrays, 'array')}, {counted(report.chunks, 'chunk')}, "
        f"{size_text(report.bytes)} checked in {report.seconds:.2f} s ({report.gb_per_s:.2f} GB/s)"
    )
    if report.ok:
        out.print(Text.assemble(("ok: ", "bold green"), checked))
        if report.unverified:
            out.print(Text.assemble(("not verified: ", "bold yellow"), clean(report.unverified)))
        return
    rows = (
        (d.array, d.box, "" if d.process is None else str(d.process), d.reason)
        for d in report.damage
    )
    print_table(("array", "box", "process", "reason"), rows, right=("process",))
    places = counted(len(report.damage), "place")
    out.print(Text.assemble(("damaged: ", "bold red"), f"{places} in {checked}"))
