"""clean: removes what failed and killed saves left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from unickpt.quoting import counted, size_text
from unickpt.reading.checkpoints_below import checkpoints_below
from unickpt.runs import save_leftovers
from unickpt.runs.save_leftovers import Orphan, OrphanSearch
from unickpt.storage import paths
from unickpt.tools.terminal.output import AsJson, clean, confirm, console, fail, print_json, warn
from unickpt.tools.terminal.tables import print_table


def command(
    root: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    unknown_age: Annotated[
        bool, typer.Option("--unknown-age", help="Also remove what has no known time of writing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove the remains of failed and killed saves from a folder of checkpoints, or from one.

    Shows what it would remove, asks, and removes exactly that: folders without a committed
    checkpoint, attempts that no checkpoint uses, leftover lock files, and the rest of retired
    steps that no step needs any more (kind "retired"). It also removes the remains of killed
    exports next to local destinations, and puts back a checkpoint that an export had moved away
    (kind "replaced"). It never removes a checkpoint, a file that no save has written, anything
    written in the last 15 minutes, or anything through a symbolic link; and nothing while a job
    saves there.

    \b
    unickpt clean runs/llama
    unickpt clean s3://bucket/runs/llama --yes --json

    --json prints {root, removed: [{name, kind, files, bytes, age_s}], kept: [the same]}. Fields
    are only ever added. Exits with 1 if it asks and the answer is not yes.
    """
    location = paths.resolve(root, whole=True)
    if location.link is not None:
        fail(f"{root} is a symbolic link; give {os.path.realpath(str(location))}")
    checkpoints_below(root)  # raises where there is no such folder
    search = save_leftovers.find(root)
    if search.holder is not None:
        fail(f"{root}: a job saves here now ({search.holder}); clean up when it has ended")
    to_remove = [*search.orphans, *(search.unknown if unknown_age else ())]
    remaining = [*search.under_way, *(() if unknown_age else search.unknown)]
    if not as_json:
        _show(root, to_remove, search, unknown_age)
    if to_remove and not yes:
        confirm(f"Remove {counted(len(to_remove), 'orphan')}?")
    removed = save_leftovers.clean(root, to_remove) if to_remove else []
    remaining += [orphan for orphan in to_remove if orphan not in removed]
    if as_json:
        sides = {"removed": removed, "kept": remaining}
        print_json({"root": root, **{side: rows_json(rows) for side, rows in sides.items()}})
        return
    for orphan in to_remove:
        if orphan not in removed:
            warn(f"{orphan.name} has changed meanwhile, and was not removed")
    if removed:
        nbytes = size_text(sum(orphan.nbytes for orphan in removed))
        console().print(f"removed {counted(len(removed), 'orphan')}, {nbytes}")


def _show(root: str, to_remove: Sequence[Orphan], search: OrphanSearch, unknown_age: bool) -> None:
    if to_remove:
        print_orphans(to_remove)
    else:
        print(f"nothing to remove in {clean(root)}")
    print_kept(search, unknown_age)


# --- also for ls ----------------------------------------------------------------------------------


def print_orphans(rows: Sequence[Orphan]) -> None:
    """A table of orphans."""
    columns = ("orphan", "kind", "files", "bytes", "written")
    print_table(columns, map(_cells, rows), right=("files", "bytes"))


def print_kept(search: OrphanSearch, unknown_age: bool = False) -> None:
    """Prints what the search skipped, and why."""
    out = console()
    if search.under_way and search.holder is None:
        out.print(Text(f"perhaps of a save in progress, {_summary(search.under_way)}", "dim"))
    elif search.holder is not None:
        of_it = f"; perhaps of its saves: {_summary(search.under_way)}" if search.under_way else ""
        out.print(Text(f"a job saves here now ({clean(search.holder)}){of_it}", "dim"))
    if search.unknown and not unknown_age:
        text = f"of unknown age (see clean --unknown-age), {_summary(search.unknown)}"
        out.print(Text(text, "dim"))


def rows_json(rows: Sequence[Orphan]) -> list[dict[str, Any]]:
    """Orphans for programs."""
    return [
        {"name": r.name, "kind": r.kind, "files": r.files, "bytes": r.nbytes, "age_s": r.age_s}
        for r in rows
    ]


def _summary(rows: Sequence[Orphan]) -> str:
    names = ", ".join(clean(remnant.name) for remnant in rows[:3])
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return f"{size_text(sum(orphan.nbytes for orphan in rows))}: {names}{more}"


def _cells(orphan: Orphan) -> tuple[str, ...]:
    age = "unknown" if orphan.age_s is None else f"{_duration(orphan.age_s)} ago"
    return orphan.name, orphan.kind, f"{orphan.files:,}", size_text(orphan.nbytes), age


def _duration(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return counted(int(seconds // length), unit)
    return counted(int(seconds), "second")
