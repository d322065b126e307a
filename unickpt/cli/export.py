"""export and import: to and from other systems' formats."""

from __future__ import annotations

from typing import Annotated

import typer

import unickpt
from unickpt.cli.options import (
    Budget,
    Hints,
    Inverse,
    Overwrite,
    RulesName,
    Sizes,
    Verify,
    of_process,
    read_rules,
    source_of,
)
from unickpt.cli.output import (
    AsJson,
    Where,
    fail,
    job,
    print_written,
    transfer,
)
from unickpt.foreign import writers
from unickpt.saving.options import SaveOptions

To = Annotated[str, typer.Option("--to", help=f"The format: {', '.join(writers.names())}.")]


def export(
    source: Where,
    destination: Annotated[str, typer.Argument(help="A path or URL: a folder, or one file.")],
    to: To,
    rules: RulesName = None,
    inverse: Inverse = False,
    size: Sizes = None,
    max_shard_size: Annotated[
        str | None, typer.Option("--max-shard-size", help="hf: the largest file, such as 5GB.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="hf: cast floats to it, such as bfloat16.")
    ] = None,
    config: Annotated[
        str | None, typer.Option("--config", help="hf: a folder with configuration and tokenizer.")
    ] = None,
    template: Annotated[
        str | None, typer.Option("--template", help="universal: a DeepSpeed folder of the model.")
    ] = None,
    overwrite: Overwrite = False,
    verify: Verify = True,
    budget: Budget = None,
    hint: Hints = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint for another system, with bounded memory.

    What was written is read again and compared with the source. Under torchrun, the processes share
    the work. Values that the format cannot hold are an error; drop them by rules.

    \b
    unickpt export runs/llama/step_100 llama-hf --to hf --config meta-llama --rules my.rules
    unickpt export runs/llama/step_100 model.safetensors --to safetensors
    unickpt export runs/llama/step_100 s3://bucket/dcp --to dcp
    torchrun --nproc-per-node 8 -m unickpt.cli export runs/llama/step_100 dcp --to dcp

    --json prints {url, arrays, bytes, chunks, processes, seconds}. Fields are only ever added.
    """
    given = {
        "max_shard_size": max_shard_size,
        "dtype": dtype,
        "config": config,
        "template": template,
    }
    options = {name: value for name, value in given.items() if value is not None}
    wanted = read_rules(rules, inverse, size)
    try:
        writers.make(to, options)
    except (ValueError, TypeError) as error:
        fail(str(error))
    with job() as first, transfer(source, shown=first) as progress:
        report = unickpt.convert(
            source_of(source, hint),
            destination,
            rules=wanted,
            overwrite=overwrite,
            verify=verify,
            options=SaveOptions(budget_bytes=of_process(budget)),
            progress=progress,
            to=to,
            **options,
        )
    if first:
        print_written("exported", report, verify, as_json)


def import_(
    source: Where,
    destination: Annotated[str, typer.Argument(help="The path of the new checkpoint.")],
    rules: RulesName = None,
    inverse: Inverse = False,
    size: Sizes = None,
    overwrite: Overwrite = False,
    budget: Budget = None,
    hint: Hints = None,
    as_json: AsJson = False,
) -> None:
    """Make a checkpoint of unickpt's own format from another system's.

    What was written is checked against its digests, and compared with the source, bit for bit.
    Under torchrun, the processes share the work.

    \b
    unickpt import llama-hf runs/llama
    unickpt import runs/deepspeed/global_step100 runs/llama --rules my.rules

    --json prints {url, arrays, bytes, chunks, processes, seconds}. Fields are only ever added.
    """
    wanted = read_rules(rules, inverse, size)
    opened = source_of(source, hint)
    with job() as first, transfer(source, shown=first) as progress:
        report = unickpt.convert(
            opened,
            destination,
            rules=wanted,
            overwrite=overwrite,
            options=SaveOptions(budget_bytes=of_process(budget)),
            progress=progress,
        )
        if first:
            found = unickpt.diff(opened, destination, rules=wanted)
            if not found.same:
                row = found.differences[0]
                fail(f"{row.name!r} differs from the source: {row.problem}; import it again")
    if first:
        print_written("imported", report, True, as_json)
