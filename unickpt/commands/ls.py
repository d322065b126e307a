"""ls: the checkpoints in a folder."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import unickpt
from unickpt.commands.output import (
    AsJson,
    clean,
    console,
    date_text,
    new_table,
    print_json,
    size_text,
)
from unickpt.errors import UnickptError
from unickpt.listing import Listed, checkpoints_below

_OPEN_AT_ONCE = 8


def ls(
    root: Annotated[str, typer.Argument(help="A directory, or a URL: file, s3, gs or memory.")],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder.

    What a crashed or running save has left behind is no checkpoint, and is not listed. One whose
    index cannot be read is listed with the reason.

    \b
    unickpt ls runs/llama
    unickpt ls s3://bucket/runs/llama --json

    --json prints {root, checkpoints: [{name, path, created, arrays, bytes, processes, error}]}.
    Fields are only ever added. Where error is not null, the facts before it are null.
    """
    with ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
        found = list(pool.map(_listed_json, checkpoints_below(root)))
    if as_json:
        print_json({"root": root, "checkpoints": found})
        return
    if not found:
        print(f"no checkpoints in {clean(root)}")
        return
    console().print(_listing_table(found))


def _listed_json(listed: Listed) -> dict[str, Any]:
    facts: dict[str, Any] = {"name": listed.name, "path": listed.path}
    try:
        checkpoint = unickpt.open(listed.path)
    except UnickptError as error:
        unknown = dict.fromkeys(("created", "arrays", "bytes", "processes"))
        return {**facts, **unknown, "error": str(error)}
    index = checkpoint.index
    return {
        **facts,
        "created": index.created,
        "arrays": len(index.arrays),
        "bytes": checkpoint.nbytes,
        "processes": index.processes,
        "error": None,
    }


def _listing_table(found: Sequence[dict[str, Any]]) -> Table:
    numeric = ("arrays", "bytes", "processes")
    table = new_table("name", "created", *numeric, right=numeric)
    for facts in found:
        name = Text(clean(facts["name"]))
        if facts["error"] is not None:
            name.append(f"  {clean(facts['error'])}", "red")
            table.add_row(name)
            continue
        table.add_row(
            name,
            Text(clean(date_text(facts["created"])), no_wrap=True),
            f"{facts['arrays']:,}",
            size_text(facts["bytes"]),
            str(facts["processes"]),
        )
    return table
