"""diff: how two checkpoints differ."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.text import Text

import unickpt
from unickpt.quoting import counted, size_text
from unickpt.tools.terminal import command_options
from unickpt.tools.terminal.output import (
    DIFFERENT,
    AsJson,
    Where,
    console,
    print_json,
    transfer,
    verdict,
)
from unickpt.tools.terminal.tables import print_table
from unickpt.types import ArrayDifference, DiffReport


def command(
    first: Where,
    second: Where,
    rules: command_options.RulesName = None,
    inverse: command_options.Inverse = False,
    size: command_options.Sizes = None,
    under: command_options.Under = "",
    layout: Annotated[
        bool, typer.Option("--layout", help="Also show different meshes and splits.")
    ] = False,
    rtol: Annotated[
        float, typer.Option("--rtol", help="Relative difference that counts as none.", min=0.0)
    ] = 0.0,
    hint: command_options.HintOption = None,
    as_json: AsJson = False,
) -> None:
    """Compare two checkpoints: names, shapes, dtypes and values.

    Arrays with equal digests are not read. With --under, a checkpoint without that part is compared
    as a whole. Exits with 1 if anything but a layout differs.

    \b
    unickpt diff runs/a/step_100 runs/b/step_100
    unickpt diff runs/jax/step_100 runs/hf --rules transformers-llama
    unickpt diff runs/a/step_100 model.safetensors --under model

    --json prints {same, arrays, read_bytes, seconds, differences: [{name, problem, first, second,
    unequal, max_abs, max_rel}]}. Fields are only ever added.
    """
    parsed_rules = command_options.read_rules(rules, inverse, size)
    with transfer() as progress:
        report = unickpt.diff(
            command_options.source_of(first, hint),
            second,
            rules=parsed_rules,
            under=under,
            layout=layout,
            rtol=rtol,
            progress=progress,
        )
    with verdict(0 if report.same else DIFFERENT):
        if as_json:
            rows = [{k: _finite(v) for k, v in asdict(row).items()} for row in report.differences]
            print_json({**asdict(report), "same": report.same, "differences": rows})
        else:
            _print_report(report)


def _finite(value: Any) -> Any:
    """A value for JSON, which knows neither inf nor nan."""
    return str(value) if isinstance(value, float) and not abs(value) < float("inf") else value


def _print_report(report: DiffReport) -> None:
    out = console()
    if report.differences:
        columns = ("leaf", "differs in", "first", "second", "max abs", "max rel")
        print_table(columns, map(_cells, report.differences))
    compared = f"{counted(report.arrays, 'array')} compared in {report.seconds:.2f} s"
    if report.arrays:
        read = size_text(report.read_bytes)
        compared += f"; {read} read, the rest is equal by its digests"
    head = ("same: ", "bold green") if report.same else ("different: ", "bold red")
    out.print(Text.assemble(head, compared))


def _cells(row: ArrayDifference) -> tuple[str, ...]:
    if row.unequal is None:
        return row.name, row.problem, row.first, row.second, "", ""
    largest = (f"{row.max_abs:.3g}", f"{row.max_rel:.3g}")
    return row.name, row.problem, f"{row.unequal:,} elements", row.second, *largest
