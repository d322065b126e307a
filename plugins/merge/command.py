"""merge: makes one checkpoint of several."""

from __future__ import annotations

from typing import Annotated, Any, cast

import typer
from rich.text import Text

from unickpt import UnickptError
from unickpt.extend import counted
from unickpt.extend import terminal_options as options
from unickpt.extend import terminal_output as terminal
from unickpt.plugins.merge import method_parameters
from unickpt.plugins.merge.merging import merge
from unickpt.plugins.merge.sources import preview

app = terminal.command_app()

METHODS = "mean, weighted, metric, step, ema, slerp, task_arithmetic, ties, dare"
_PARAMETER = "a parameter and its value, such as density=0.3"


@app.command()
def command(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... DESTINATION",
            help="What to merge, the oldest first, and the path of the new checkpoint.",
        ),
    ],
    how: Annotated[str, typer.Option("--how", help=METHODS)] = "mean",
    parameters: Annotated[
        list[str] | None,
        typer.Option("--with", help="A parameter of the method, as in --with density=0.3."),
    ] = None,
    weights: Annotated[
        list[float] | None, typer.Option("--weight", help="Of a source; once for each, in order.")
    ] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="The checkpoint from which the sources started.")
    ] = None,
    last: Annotated[
        int | None,
        typer.Option("--last", help="Merge this many of the newest steps of a run.", min=1),
    ] = None,
    rules: options.RulesName = None,
    inverse: options.Inverse = False,
    size: options.Sizes = None,
    integers: Annotated[
        str,
        typer.Option("--integers", help="equal: must be equal; last: use those of the last one."),
    ] = "equal",
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Merge NaN and infinite elements too.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Compare the sources, print the plan, and stop.")
    ] = False,
    overwrite: options.Overwrite = False,
    verify: options.Verify = True,
    budget: options.BudgetOption = None,
    compression: options.Compression = None,
    quantize: options.Quantize = None,
    hint: options.HintOption = None,
    as_json: terminal.AsJson = False,
) -> None:
    """Merge several checkpoints: averages, interpolations, task arithmetic.

    Everything else comes from the last source. Under torchrun, the processes share the work.
    docs/merge.md describes the methods and their parameters.

    \b
    unickpt merge runs/a/step_100 runs/b/step_100 runs/soup
    unickpt merge runs/a runs/average --last 5 --how ema --with decay=0.8
    unickpt merge runs/a runs/best --last 10 --how metric --with metric=loss --with penalty=4
    unickpt merge math code merged --base llama --how ties --with density=0.2
    unickpt merge math code merged --base llama --how task_arithmetic --weight 0.6 --weight 0.4

    --hint applies to every source, but not to --base.

    --json prints {url, arrays, bytes, chunks, processes, seconds, quantized: {name: {largest_error,
    largest_relative_error}}, method, sources: [{url, weight}], notes: [text]}, or for --dry-run
    {method, sources, merged: [name], from_last: [name], values_differ: [name], dtypes_differ:
    [name]}. Fields are only ever added.
    """
    if len(paths) < 2:
        terminal.fail("give the sources and then the destination")
    *sources, destination = paths
    if last is not None and len(sources) != 1:
        terminal.fail("--last takes one source, the folder of a run")
    if last is not None and hint:
        terminal.fail(
            "--hint is for checkpoints of other systems, not for the steps of a run (--last)"
        )
    opened = (options.source_of(source, hint) for source in sources)
    merge_sources: Any = sources[0] if last is not None else [*opened]
    source_rules = options.read_rules(rules, inverse, size)
    try:
        values = options.named_values("--with", parameters, _PARAMETER)
        method = method_parameters.method_of(cast(Any, how), values)
        written_as = options.save_options(budget, compression, quantize)
        arguments: dict[str, Any] = {"weights": weights, "base": base, "last": last}
        arguments |= {"rules": source_rules, "integers": integers}
        if dry_run:
            budget_bytes = written_as.working_bytes
            plan = preview(merge_sources, method, budget_bytes=budget_bytes, **arguments)
            _print_plan(plan, as_json)
            return
        arguments |= {"allow_nonfinite": allow_nonfinite, "overwrite": overwrite, "verify": verify}
        with terminal.job() as first, terminal.transfer(shown=first) as progress:
            report = merge(
                merge_sources,
                destination,
                how=method,
                options=written_as,
                progress=progress,
                **arguments,
            )
    except UnickptError:
        raise
    except ValueError as error:
        terminal.fail(str(error))
    if first:
        _print_report(report, verify, as_json)


def _print_report(report: Any, verified: bool, as_json: bool) -> None:
    if as_json:
        pairs = zip(report.sources, report.weights, strict=True)
        terminal.print_json(
            {
                **terminal.written_json(report.saved),
                "method": report.method,
                "sources": [{"url": url, "weight": weight} for url, weight in pairs],
                "notes": list(report.notes),
            }
        )
        return
    for note in report.notes:
        terminal.warn(note)
    what = f"merged {len(report.sources)} checkpoints:"
    terminal.print_written(what, report.saved, verified, False)


def _print_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        names = ("merged", "from_last", "values_differ", "dtypes_differ")
        terminal.print_json({**plan.record, **{name: list(getattr(plan, name)) for name in names}})
        return
    out = terminal.console()
    for source, weight in zip(plan.sources, plan.weights, strict=True):
        step = "" if source.facts.step is None else f"  step {source.facts.step}"
        out.print(f"{weight:10.4g}  {terminal.clean(source.url)}{step}")
    if plan.base is not None:
        out.print(f"      base  {terminal.clean(plan.base.url)}")
    parts = [
        f"{counted(len(plan.merged), 'array')} merged by {plan.method}",
        f"{len(plan.from_last)} taken from the last source",
        f"{len(plan.values_differ)} values that differ",
        f"{len(plan.dtypes_differ)} of other dtypes",
    ]
    out.print(Text(terminal.clean(", ".join(parts)), "bold"))
