"""convert, export, import and copy: make a checkpoint from another one."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.text import Text

import unickpt
from unickpt import Checkpoint
from unickpt.format import writer_registry
from unickpt.frameworks.host_memory import MOST_WORKING
from unickpt.quoting import counted, size_text
from unickpt.tools.conversion_preview import Preview, PreviewRow, folded, preview
from unickpt.tools.terminal import command_options, output
from unickpt.tools.terminal.tables import print_table


def _make(
    done: str,
    opened: str | Checkpoint,
    destination: str,
    as_json: bool,
    *,
    check: Callable[[], None] = lambda: None,
    **arguments: Any,
) -> None:
    """Makes a checkpoint together with the other processes of torchrun; the first one checks it
    and says what was made."""
    with output.job() as first, output.transfer(shown=first) as progress:
        report = unickpt.convert(opened, destination, progress=progress, **arguments)
        if first:
            check()
    if first:
        output.print_written(done, report, arguments.get("verify", True), as_json)


def command(
    source: output.Where,
    destination: Annotated[str, typer.Argument(help="The path of the new checkpoint.")],
    rules: command_options.RulesName = None,
    inverse: command_options.Inverse = False,
    size: command_options.Sizes = None,
    under: command_options.Under = "",
    like: Annotated[
        str | None,
        typer.Option("--like", help="A checkpoint with the names and shapes of the new one."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print which leaves would be made from which, and stop."),
    ] = False,
    overwrite: command_options.Overwrite = False,
    verify: command_options.Verify = True,
    budget: command_options.BudgetOption = None,
    compression: command_options.Compression = None,
    quantize: command_options.Quantize = None,
    hint: command_options.HintOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Convert a checkpoint through rules, with bounded memory.

    The source is checked while it is read. The destination is read back and checked.
    Under torchrun, the processes share the work.

    \b
    unickpt convert runs/jax/step_100 runs/hf --rules transformers-llama --dry-run
    unickpt convert runs/jax/step_100 runs/hf --rules transformers-llama
    unickpt convert runs/hf runs/jax/tuned --rules transformers-llama --inverse
    unickpt convert runs/hf runs/jax/tuned --rules my.rules --inverse --like runs/jax/step_100
    unickpt convert runs/jax/step_100 small --quantize '**/step=none' --quantize 'opt/**=uint8'
    unickpt convert llama-Q4_K_M.gguf runs/llama --hint dequantize=float32
    unickpt convert model.pth model.safetensors
    torchrun --nproc-per-node 8 -m unickpt.cli convert s3://b/jax s3://b/hf --rules my.rules

    --json prints {url, arrays, bytes, chunks, processes, seconds, quantized: {name: {largest_error,
    largest_relative_error}}}, or for --dry-run {plan: [{made, made_of, source, destination, rule,
    notes}], doubts: [text]}. Fields are only ever added.
    """
    parsed_rules = command_options.read_rules(rules, inverse, size)
    opened = command_options.source_of(source, hint, under)
    if like is not None and parsed_rules is None:
        output.fail("--like needs --rules")
    if dry_run or os.environ.get("RANK", "0") == "0":
        plan = preview(opened, parsed_rules, like)
        for doubt in plan.doubts:
            output.warn(doubt)
    if dry_run:
        _print_preview(plan, as_json)
        return
    written_as = command_options.save_options(budget, compression, quantize)
    format_name = command_options.checked_format(None, destination)
    if format_name != writer_registry.OWN and (compression or quantize):
        output.fail(f"--compression and --quantize are of unickpt's own format, not {format_name}")
    made_by: dict[str, Any] = {"rules": parsed_rules, "overwrite": overwrite, "to": format_name}
    made_by |= {"like": like, "verify": verify, "options": written_as}
    _make("converted", opened, destination, as_json, **made_by)


def _print_preview(plan: Preview, as_json: bool) -> None:
    rows = plan.rows
    if as_json:
        plan_rows = list(map(dataclasses.asdict, rows))
        output.print_json({"plan": plan_rows, "doubts": list(plan.doubts)})
        return
    print_table(("stored", "", "made", "", "rule", "notes"), map(_cells, folded(rows)))
    inexact = sum("inexact" in row.notes for row in rows)
    made = sum(row.is_made for row in rows)
    dropped = sum(not row.made for row in rows)
    summary = f"{counted(made, 'leaf', 'leaves')} made, {dropped} dropped, {inexact} inexact"
    output.console().print(Text(summary, "bold"))


def _cells(row: PreviewRow) -> tuple[str, ...]:
    notes = ", ".join(row.notes)
    return row.made_of, row.source, row.made, row.destination, row.rule, notes


def export(
    source: output.Where,
    destination: Annotated[str, typer.Argument(help="A path or URL: a folder, or one file.")],
    to: command_options.To = None,
    rules: command_options.RulesName = None,
    inverse: command_options.Inverse = False,
    size: command_options.Sizes = None,
    under: command_options.Under = "",
    max_shard_size: Annotated[
        str | None,
        typer.Option("--max-shard-size", help="hf, trainer: the largest file, such as 5GB."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="hf: cast floats to it, such as bfloat16.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", help="hf, trainer: a folder with configuration and tokenizer."),
    ] = None,
    template: Annotated[
        str | None,
        typer.Option("--template", help="universal: copy settings from this universal folder."),
    ] = None,
    untrained: Annotated[
        bool,
        typer.Option("--untrained", help="universal: also write buffers and frozen parameters."),
    ] = False,
    layout: Annotated[
        str | None, typer.Option("--layout", help="orbax: tree, the default, or step.")
    ] = None,
    overwrite: command_options.Overwrite = False,
    verify: command_options.Verify = True,
    budget: command_options.BudgetOption = None,
    hint: command_options.HintOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Write a checkpoint for another system, with bounded memory.

    The result is read back and compared with the source. Under torchrun, the processes share
    the work. Values that the format cannot hold are an error; drop them by rules.

    \b
    unickpt export runs/llama/step_100 llama-hf --to hf --config meta-llama --rules my.rules
    unickpt export runs/llama/step_100 model.safetensors --under model
    unickpt export runs/llama/step_100 s3://bucket/dcp --to dcp
    unickpt export runs/llama/step_100 out/checkpoint-100 --to trainer
    unickpt export runs/gpt/global_step100 universal --to universal
    unickpt export llama-Q4_K_M.gguf llama.safetensors --hint dequantize=float32
    torchrun --nproc-per-node 8 -m unickpt.cli export runs/llama/step_100 dcp --to dcp

    --json prints {url, arrays, bytes, chunks, processes, seconds}. Fields are only ever added.
    """
    format_options = {
        "max_shard_size": max_shard_size,
        "dtype": dtype,
        "config": config,
        "template": template,
        "layout": layout,
        "untrained": untrained or None,
    }
    of_format: Any = {name: value for name, value in format_options.items() if value is not None}
    parsed_rules = command_options.read_rules(rules, inverse, size)
    to = command_options.checked_format(to, destination)
    if to == writer_registry.OWN:
        output.fail(f"say with --to which format to write: {', '.join(writer_registry.names())}")
    try:
        writer_registry.make_writer(to, of_format)
    except (ValueError, TypeError) as error:
        output.fail(str(error))
    _make(
        "exported", command_options.source_of(source, hint, under), destination, as_json, to=to,
        rules=parsed_rules, overwrite=overwrite, verify=verify,
        options=command_options.save_options(budget), **of_format,
    )  # fmt: skip


def import_(
    source: output.Where,
    destination: Annotated[str, typer.Argument(help="The path of the new checkpoint.")],
    rules: command_options.RulesName = None,
    inverse: command_options.Inverse = False,
    size: command_options.Sizes = None,
    under: command_options.Under = "",
    overwrite: command_options.Overwrite = False,
    budget: command_options.BudgetOption = None,
    hint: command_options.HintOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Convert another system's checkpoint to unickpt's own format.

    The result is checked against its digests and compared with the source, bit for bit.
    Under torchrun, the processes share the work.

    \b
    unickpt import llama-hf runs/llama
    unickpt import runs/deepspeed/global_step100 runs/llama --rules my.rules
    unickpt import llama-Q4_K_M.gguf runs/llama --hint dequantize=float32

    --json prints {url, arrays, bytes, chunks, processes, seconds}. Fields are only ever added.
    """
    parsed_rules = command_options.read_rules(rules, inverse, size)
    opened = command_options.source_of(source, hint, under)

    def check() -> None:
        report = unickpt.diff(opened, destination, rules=parsed_rules)
        if not report.same:
            row = report.differences[0]
            output.fail(f"{row.name!r} differs from the source: {row.problem}; import it again")

    written_as = command_options.save_options(budget)
    made_by: dict[str, Any] = {"rules": parsed_rules, "overwrite": overwrite}
    made_by |= {
        "options": written_as,
        "to": command_options.checked_format(writer_registry.OWN, destination),
    }
    _make("imported", opened, destination, as_json, check=check, **made_by)


def copy(
    source: Annotated[str, typer.Argument(help="A checkpoint of unickpt's own format.")],
    destination: Annotated[str, typer.Argument(help="The path of the copy.")],
    overwrite: command_options.Overwrite = False,
    budget: command_options.BudgetOption = None,
    as_json: output.AsJson = False,
) -> None:
    """Copy a checkpoint to another place, and check it there.

    The copy appears when all of it has been read back and matches its digests. If the command was
    interrupted, run it again: it keeps complete files. The copy needs no other checkpoint, even if
    the source shares chunks with others.

    \b
    unickpt copy runs/llama/step_100 s3://bucket/llama/step_100
    unickpt copy s3://bucket/llama/step_100 /scratch/step_100

    --json prints {url, arrays, bytes, borrowed, seconds}. Fields are only ever added.
    """
    with output.transfer() as progress:
        most = budget or MOST_WORKING
        report = unickpt.copy(
            source, destination, overwrite=overwrite, budget_bytes=most, progress=progress
        )
    if as_json:
        output.print_json(dataclasses.asdict(report))
        return
    borrowed = report.borrowed
    brought = f", {borrowed:,} chunks came from checkpoints next to it" if borrowed else ""
    print(
        f"copied {counted(report.arrays, 'array')}, {size_text(report.bytes)}, to "
        f"{output.clean(report.url)} in {report.seconds:.1f} s; every digest matches{brought}"
    )
