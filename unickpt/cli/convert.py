"""convert and copy: make a checkpoint from another one, through rules or as it is."""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated

import typer
from rich.text import Text

import unickpt
from unickpt.cli.options import (
    Budget,
    Compression,
    Hints,
    Inverse,
    Overwrite,
    Quantize,
    RulesName,
    Sizes,
    Verify,
    of_process,
    parsed_quantize,
    read_rules,
    source_of,
)
from unickpt.cli.output import (
    AsJson,
    Cell,
    Where,
    clean,
    console,
    counted,
    fail,
    job,
    new_table,
    plain_cells,
    print_json,
    print_rows,
    print_written,
    size_text,
    transfer,
    warn,
)
from unickpt.frameworks.budget import MOST_WORKING
from unickpt.saving.options import SaveOptions
from unickpt.tools.conversion_preview import Preview, Row, folded, preview


def convert(
    source: Where,
    destination: Annotated[str, typer.Argument(help="The path of the new checkpoint.")],
    rules: RulesName = None,
    inverse: Inverse = False,
    size: Sizes = None,
    like: Annotated[
        str | None,
        typer.Option("--like", help="A checkpoint with the names and shapes of the new one."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be made of what, and stop.")
    ] = False,
    overwrite: Overwrite = False,
    verify: Verify = True,
    budget: Budget = None,
    compression: Compression = None,
    quantize: Quantize = None,
    hint: Hints = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint from another one, through rules, with bounded memory.

    The source is checked while it is read, and the destination is read again and checked.
    Under torchrun, the processes share the work.

    \b
    unickpt convert runs/jax/step_100 runs/hf --rules transformers-llama --dry-run
    unickpt convert runs/jax/step_100 runs/hf --rules transformers-llama
    unickpt convert runs/hf runs/jax/tuned --rules transformers-llama --inverse
    unickpt convert runs/hf runs/jax/tuned --rules my.rules --inverse --like runs/jax/step_100
    unickpt convert runs/jax/step_100 small --quantize '**/step=none' --quantize 'opt/**=uint8'
    torchrun --nproc-per-node 8 -m unickpt.cli convert s3://b/jax s3://b/hf --rules my.rules

    --json prints {url, arrays, bytes, chunks, processes, seconds, quantized: {name: {largest_error,
    largest_relative_error}}}, or for --dry-run {plan: [{made, made_of, source, destination, rule,
    notes}], doubts: [text]}. Fields are only ever added.
    """
    wanted = read_rules(rules, inverse, size)
    opened = source_of(source, hint)
    if like is not None and wanted is None:
        fail("--like needs --rules")
    if dry_run or os.environ.get("RANK", "0") == "0":
        found = preview(opened, wanted, like)
        for doubt in found.doubts:
            warn(doubt)
    if dry_run:
        _print_preview(found, as_json)
        return
    try:
        options = SaveOptions(
            budget_bytes=of_process(budget),
            compression=compression,
            quantize=parsed_quantize(quantize),
        )
    except ValueError as error:
        fail(str(error))
    with job() as first, transfer(source, shown=first) as progress:
        report = unickpt.convert(
            opened,
            destination,
            rules=wanted,
            like=like,
            overwrite=overwrite,
            verify=verify,
            options=options,
            progress=progress,
        )
    if not first:
        return
    print_written("converted", report, verify, as_json)


def _print_preview(found: Preview, as_json: bool) -> None:
    rows = found.rows
    if as_json:
        print_json({"plan": [row.as_dict() for row in rows], "doubts": list(found.doubts)})
        return
    out = console()
    table = new_table("stored", "", "made", "", "rule", "notes")
    print_rows(out, table, map(_cells, folded(rows)))
    inexact = sum("inexact" in row.notes for row in rows)
    made = sum(row.is_made for row in rows)
    dropped = sum(not row.made for row in rows)
    summary = f"{counted(made, 'leaf', 'leaves')} made, {dropped} dropped, {inexact} inexact"
    out.print(Text(summary, "bold"))


def _cells(row: Row) -> list[Cell]:
    notes = ", ".join(row.notes)
    texts = (row.made_of, row.source, row.made, row.destination, row.rule, notes)
    return plain_cells(texts)


def copy(
    source: Annotated[str, typer.Argument(help="A checkpoint of unickpt's own format.")],
    destination: Annotated[str, typer.Argument(help="The path of the copy.")],
    overwrite: Overwrite = False,
    budget: Budget = None,
    as_json: AsJson = False,
) -> None:
    """Copy a checkpoint to another place, and check it there.

    The copy appears when all of it was read again and matches its digests. Run the command again if
    it was interrupted: it goes on with the files that are there. The copy needs no other
    checkpoint, even if the source shares chunks with those beside it.

    \b
    unickpt copy runs/llama/step_100 s3://bucket/llama/step_100
    unickpt copy s3://bucket/llama/step_100 /scratch/step_100

    --json prints {url, arrays, bytes, borrowed, seconds}. Fields are only ever added.
    """
    with transfer(source) as progress:
        report = unickpt.copy(
            source,
            destination,
            overwrite=overwrite,
            budget_bytes=budget or MOST_WORKING,
            progress=progress,
        )
    if as_json:
        print_json(dataclasses.asdict(report))
        return
    brought = f", {report.borrowed:,} chunks came from checkpoints beside it" * bool(
        report.borrowed
    )
    print(
        f"copied {counted(report.arrays, 'array')}, {size_text(report.bytes)}, to "
        f"{clean(report.url)} in {report.seconds:.1f} s; every digest matches{brought}"
    )
