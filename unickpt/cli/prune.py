"""prune: removes the steps of a run that no rule keeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import typer

from unickpt.quoting import counted, first_few
from unickpt.runs.pruning import PrunePlan, PruneRun
from unickpt.runs.retention import Retention
from unickpt.tools.terminal.output import FAILED, AsJson, clean, confirm, fail, print_json, warn
from unickpt.tools.terminal.tables import print_table


def command(
    root: Annotated[str, typer.Argument(help="The run: a directory, or a URL.")],
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", metavar="N", help="Keep the newest N steps.")
    ] = None,
    keep_every: Annotated[
        int | None, typer.Option("--keep-every", metavar="N", help="Keep multiples of N.")
    ] = None,
    keep_best: Annotated[
        int | None, typer.Option("--keep-best", metavar="N", help="Keep the best N by --metric.")
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="The name of a metric of the steps.")
    ] = None,
    best: Annotated[
        Literal["min", "max"], typer.Option("--best", help="Which values of --metric are best.")
    ] = "min",
    local: Annotated[
        str | None, typer.Option("--local", help="The fast tier of the run, if it has one.")
    ] = None,
    roles: Annotated[
        list[str] | None,
        typer.Option("--roles", help="The run of a role, also this one's; may be repeated."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be removed.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the steps of a run that no rule keeps.

    The rules are those of `Checkpointer`, and the options have the names of its arguments: a step
    stays if any rule keeps it. The newest step stays, and so do steps that others borrow from; in a
    run with experts=, only their borrowed files stay. Shows what it would remove and why the others
    stay, asks, and removes exactly that. It removes nothing while a job saves there.

    \b
    unickpt prune runs/llama --keep-last 3 --keep-every 1000 --dry-run
    unickpt prune s3://bucket/runs/llama --keep-last 1 --keep-best 2 --metric loss --yes

    --json prints {root, removed: [step], kept: [{step, reasons}], failed: [step]}. Fields are only
    ever added. With --dry-run, removed has what would be. Exits with 1 if it asks and the answer is
    not yes.
    """
    try:
        rules = Retention(keep_last, keep_every, keep_best, metric, best)
        run = PruneRun(root, rules, local=local, roles=roles or ())
        plan = run.plan()
    except ValueError as error:
        fail(str(error))
    saving = run.holder
    if saving is not None and not dry_run:
        fail(f"{root}: a job saves here now ({saving}); prune when it has ended")
    if not as_json:
        _show(root, plan)
    if dry_run:
        if saving is not None:
            warn(f"a job saves here now ({saving})")
        if as_json:
            _print_json(root, plan, plan.removed)
        return
    if plan.removed and not yes:
        confirm(f"Remove {counted(len(plan.removed), 'step')}?")
    removed = run.remove(plan) if plan.removed else []
    if as_json:
        _print_json(root, plan, removed)
    elif removed:
        print(f"removed {counted(len(removed), 'step')}: {first_few(removed)}")
    failed = [step for step in plan.removed if step not in removed]
    if failed:
        warn(f"{counted(len(failed), 'step')} could not be removed: {first_few(failed)}")
        raise typer.Exit(FAILED)


def _show(root: str, plan: PrunePlan) -> None:
    rows = {step: ("stays", ", ".join(reasons)) for step, reasons in plan.kept.items()}
    for step in plan.removed:
        names = plan.borrowed.get(step)
        rows[step] = "goes", f"but for what {first_few(names)} borrow" if names else ""
    cells = ((str(step), *rows[step]) for step in sorted(rows))
    print_table(("step", "", "why"), cells, right=("step",))
    if not plan.removed:
        print(f"nothing to remove in {clean(root)}")


def _print_json(root: str, plan: PrunePlan, removed: Sequence[int]) -> None:
    kept_steps = [{"step": step, "reasons": list(reasons)} for step, reasons in plan.kept.items()]
    failed = [step for step in plan.removed if step not in removed]
    print_json({"root": root, "removed": list(removed), "kept": kept_steps, "failed": failed})
