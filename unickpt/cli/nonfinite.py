"""The output of `inspect --nonfinite` and `verify --nonfinite`: NaN and infinity in each array."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

import unickpt
from unickpt.quoting import counted
from unickpt.tools.terminal.command_options import source_of
from unickpt.tools.terminal.output import clean, console, print_json, transfer
from unickpt.tools.terminal.tables import print_table

Nonfinite = Annotated[
    bool,
    typer.Option(
        "--nonfinite",
        help="Count NaN and infinity in each array. Of a folder of checkpoints, find the first "
        "step that has any.",
    ),
]


def count_nonfinite(path: str, hints: list[str] | None, as_json: bool, under: str = "") -> bool:
    """Counts, prints the counts, and returns whether all are finite."""
    with transfer() as progress:
        report = unickpt.find_nonfinite(source_of(path, hints, under), progress=progress)
    if as_json:
        arrays = [array._asdict() for array in report.arrays]
        facts = {"url": report.url, "ok": report.ok, "checked": report.checked}
        print_json({**facts, "checkpoints": report.checkpoints, "arrays": arrays})
        return report.ok
    out = console()
    checked = f"{counted(report.checked, 'array')} of floats"
    if report.checkpoints > 1:
        checked += f" in the last of {counted(report.checkpoints, 'checkpoint')} that were read"
    if report.ok:
        out.print(Text.assemble(("ok: ", "bold green"), f"no NaN or infinity in {checked}"))
        return report.ok
    numbers = ("NaN", "infinite", "elements")
    rows = (
        (a.name, f"{a.nan:,}", f"{a.infinite:,}", f"{a.elements:,}", str(list(a.first)))
        for a in report.arrays
    )
    print_table(("array", *numbers, "first"), rows, right=numbers)
    places = f"{len(report.arrays)} of {checked}: {clean(report.url)}"
    out.print(Text.assemble(("not finite: ", "bold red"), places))
    return report.ok
