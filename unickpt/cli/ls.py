"""ls: the checkpoints in a folder."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

import unickpt
from unickpt.arrays.names import natural
from unickpt.cli.clean import print_kept, print_orphans, rows_json
from unickpt.errors import CheckpointNotFound, InvalidPath, UnickptError
from unickpt.format.reader_registry import SeveralCheckpoints
from unickpt.quoting import first_few, size_text
from unickpt.reading.checkpoint import Checkpoint, open_reader
from unickpt.reading.checkpoints_below import Listed, checkpoints_below, other_folders
from unickpt.runs import save_leftovers
from unickpt.runs.save_leftovers import OrphanSearch
from unickpt.storage import paths
from unickpt.tools.terminal.output import AsJson, clean, print_json
from unickpt.tools.terminal.tables import Cell, date_text, print_table

_OPEN_AT_ONCE = 8
_MOST_DEPTH, _MOST_FOLDERS = 4, 2000  # to search below a folder that has no checkpoints itself
_NUMERIC = ("arrays", "bytes", "new", "processes")


def command(
    root: Annotated[
        str, typer.Argument(help="A directory, a file, or a URL: file, s3, gs or memory.")
    ],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints in a folder, including those of other systems, and remains of saves.

    A local folder without checkpoints is searched four levels deep: a cache of the Hugging Face
    Hub, or a folder of several models. For a file, its own row is shown.

    The remains of failed saves are listed below; `unickpt clean` removes them. A
    checkpoint whose index cannot be read is listed with the reason.

    \b
    unickpt ls runs/llama
    unickpt ls s3://bucket/runs/llama --json
    unickpt ls ~/.cache/huggingface/hub
    unickpt ls model.safetensors

    --json prints {root, checkpoints: [{name, path, format, created, arrays, bytes, new_bytes,
    processes, error}], orphans: [{name, kind, files, bytes, age_s}], under_way: [the same],
    unknown_age: [the same], holder}.

    Fields are only ever added. Where error is not null, the facts before it are null. under_way may
    belong to saves in progress; holder is the job that saves here, or null.
    """
    location = paths.resolve(root, or_file=True, whole=True)
    if location.is_local and os.path.isfile(str(location)):
        checkpoints = [_listed_json(Listed(Path(str(location)).name, root))]
        left = OrphanSearch((), (), (), None)
    else:
        with ThreadPoolExecutor(_OPEN_AT_ONCE) as pool:
            checkpoints = _search(root, pool)
        checkpoints.sort(key=lambda facts: natural(facts["name"]))
        left = save_leftovers.find(root)
    if as_json:
        beside = {
            "orphans": rows_json(left.orphans),
            "under_way": rows_json(left.under_way),
            "unknown_age": rows_json(left.unknown),
            "holder": left.holder,
        }
        print_json({"root": root, "checkpoints": checkpoints, **beside})
        return
    if checkpoints:
        print_table(
            ("name", "format", "created", *_NUMERIC), map(_cells, checkpoints), right=_NUMERIC
        )
    else:
        folders = [clean(folder.name) for folder in other_folders(root) if folder.name != "."]
        has = f"; its folders are {first_few(folders)}" if folders else ""
        print(f"no checkpoints in {clean(root)}{has}")
    if left.orphans:
        print(f"\nleft by failed saves; `unickpt clean {clean(root)}` removes it:")
        print_orphans(left.orphans)
    print_kept(left)


def _search(root: str, pool: ThreadPoolExecutor) -> list[dict[str, Any]]:
    """The facts of the checkpoints in a folder; if it has none, of those in the folders below.

    In object storage only the folder itself is searched: each level costs a listing.
    """
    checkpoints, folders = _level(Listed(".", root), pool)
    depth = _MOST_DEPTH if paths.resolve(root, whole=True).is_local else 1
    for _ in range(1, depth):
        if checkpoints:
            break
        deeper: list[Listed] = []
        for folder in folders[:_MOST_FOLDERS]:
            with suppress(UnickptError):  # such as a folder that this user may not read
                rows, below = _level(folder, pool)
                checkpoints += rows
                deeper += below
        folders = deeper
    return checkpoints


def _level(above: Listed, pool: ThreadPoolExecutor) -> tuple[list[dict[str, Any]], list[Listed]]:
    """The facts of the checkpoints directly in a folder, and the folders that are none."""
    listings = [_below(above, listed) for listed in checkpoints_below(above.path)]
    checkpoints = list(pool.map(_listed_json, listings))
    folders = [_below(above, listed) for listed in other_folders(above.path)]
    empty: list[Listed] = []
    for folder, rows in zip(folders, pool.map(_foreign_json, folders), strict=True):
        names = {facts["name"] for facts in checkpoints}
        checkpoints += [facts for facts in rows if facts["name"] not in names]
        if not rows and folder.name != above.name:
            empty.append(folder)
    return checkpoints, empty


def _below(above: Listed, listed: Listed) -> Listed:
    """A folder with its name below the root."""
    return Listed(os.path.normpath(f"{above.name}/{listed.name}"), listed.path)


def _foreign_json(listed: Listed) -> list[dict[str, Any]]:
    """The facts of a folder that may be a checkpoint of another system, or contain some that are
    files."""
    try:
        reader = open_reader(paths.resolve(listed.path))
        return [] if reader is None else [_facts_of(listed, Checkpoint(reader))]
    except (CheckpointNotFound, InvalidPath):  # such as a whole bucket
        return []
    except SeveralCheckpoints as error:
        prefix = "" if listed.name == "." else f"{listed.name}/"
        return [_listed_json(Listed(prefix + name, path)) for name, path in error.paths.items()]
    except UnickptError as error:
        return [_unknown(listed, error)]


def _listed_json(listed: Listed) -> dict[str, Any]:
    try:
        return _facts_of(listed, unickpt.open(listed.path))
    except UnickptError as error:
        return _unknown(listed, error)


def _unknown(listed: Listed, error: UnickptError) -> dict[str, Any]:
    unknown = dict.fromkeys(("format", "created", "arrays", "bytes", "new_bytes", "processes"))
    return {"name": listed.name, "path": listed.path, **unknown, "error": str(error)}


def _facts_of(listed: Listed, checkpoint: Checkpoint) -> dict[str, Any]:
    index = checkpoint.index
    return {
        "name": listed.name,
        "path": listed.path,
        "format": checkpoint.reader.format,
        "created": index.created,
        "arrays": len(index.arrays),
        "bytes": checkpoint.nbytes,
        "new_bytes": max(0, checkpoint.nbytes - index.reused),
        "processes": index.processes,
        "error": None,
    }


def _cells(facts: dict[str, Any]) -> list[Cell]:
    name = facts["name"]
    if facts["error"] is not None:
        return [(f"{clean(name)}  {clean(facts['error'])}", "red")]
    return [
        name,
        facts["format"],
        date_text(facts["created"]),
        f"{facts['arrays']:,}",
        size_text(facts["bytes"]),
        size_text(facts["new_bytes"]),
        str(facts["processes"]),
    ]
