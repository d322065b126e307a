"""clean: removes what failed and killed saves left behind."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from unickpt.quoting import counted, size_text
from unickpt.reading.listing import checkpoints_below
from unickpt.runs import orphans
from unickpt.runs.orphans import Orphan, OrphanSearch
from unickpt.storage import paths
from unickpt.tools.terminal.output import AsJson, clean, confirm, console, fail, print_json, warn
from unickpt.tools.terminal.tables import print_table


def command(
    root: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Remove without asking.")] = False,
    unknown_age: Annotated[
        bool,
        typer.Option("--unknown-age", help="Also remove what has no known time of writing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove what failed and killed saves left in a folder of checkpoints, or in one checkpoint.

    Shows what it would remove, asks, and removes exactly that: folders in which a save never
    committed a checkpoint, attempts that no checkpoint uses, leftover lock files, and steps that
    were removed but for what others borrowed, and that nothing needs any more (kind "retired").
    What killed exports left beside local destinations is removed, too; a checkpoint that one had
    moved away to replace it (kind "replaced") is put back. It never removes a checkpoint, a file
    that no save has written, what was written in the last 15 minutes, or anything through a
    symbolic link, and nothing while a job saves there.

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
    found = orphans.find(root)
    if found.holder is not None:
        fail(f"{root}: a job saves here now ({found.holder}); clean up when it has ended")
    wanted = [*found.orphans, *(found.unknown if unknown_age else ())]
    kept = [*found.under_way, *(() if unknown_age else found.unknown)]
    if not as_json:
        _show(root, wanted, found, unknown_age)
    if wanted and not yes:
        confirm(f"Remove {counted(len(wanted), 'orphan')}?")
    removed = orphans.clean(root, wanted) if wanted else []
    kept += [orphan for orphan in wanted if orphan not in removed]
    if as_json:
        sides = {"removed": removed, "kept": kept}
        print_json({"root": root, **{side: rows_json(rows) for side, rows in sides.items()}})
        return
    for orphan in wanted:
        if orphan not in removed:
            warn(f"{orphan.name} has changed meanwhile, and was not removed")
    if removed:
        nbytes = size_text(sum(orphan.nbytes for orphan in removed))
        console().print(f"removed {counted(len(removed), 'orphan')}, {nbytes}")


def _show(root: str, wanted: Sequence[Orphan], found: OrphanSearch, unknown_age: bool) -> None:
    if wanted:
        print_orphans(wanted)
    else:
        print(f"nothing to remove in {clean(root)}")
    print_kept(found, unknown_age)


# --- also for ls ----------------------------------------------------------------------------------


def print_orphans(found: Sequence[Orphan]) -> None:
    """A table of orphans."""
    columns = ("orphan", "kind", "files", "bytes", "written")
    print_table(columns, map(_cells, found), right=("files", "bytes"))


def print_kept(found: OrphanSearch, unknown_age: bool = False) -> None:
    """What is left alone, and why."""
    out = console()
    if found.under_way and found.holder is None:
        out.print(Text(f"perhaps of a save in progress, {_summary(found.under_way)}", "dim"))
    elif found.holder is not None:
        of_it = f"; perhaps of its saves: {_summary(found.under_way)}" if found.under_way else ""
        out.print(Text(f"a job saves here now ({clean(found.holder)}){of_it}", "dim"))
    if found.unknown and not unknown_age:
        text = f"of unknown age (see clean --unknown-age), {_summary(found.unknown)}"
        out.print(Text(text, "dim"))


def rows_json(found: Sequence[Orphan]) -> list[dict[str, Any]]:
    """Orphans for programs."""
    return [
        {"name": r.name, "kind": r.kind, "files": r.files, "bytes": r.nbytes, "age_s": r.age_s}
        for r in found
    ]


def _summary(found: Sequence[Orphan]) -> str:
    names = ", ".join(clean(remnant.name) for remnant in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{size_text(sum(orphan.nbytes for orphan in found))}: {names}{more}"


def _cells(found: Orphan) -> tuple[str, ...]:
    age = "unknown" if found.age_s is None else f"{_duration(found.age_s)} ago"
    return found.name, found.kind, f"{found.files:,}", size_text(found.nbytes), age


def _duration(seconds: float) -> str:
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= 2 * length:
            return counted(int(seconds // length), unit)
    return counted(int(seconds), "second")
