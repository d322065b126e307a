"""export(): writes a checkpoint in another format, within a memory budget, split over processes."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unickpt.errors import CheckpointCorrupt, CheckpointExists, UnsupportedLeaf
from unickpt.format.index import Index
from unickpt.format.reader import Reader
from unickpt.format.writer import Plan, Writer
from unickpt.frameworks.host_memory import MemoryBudget
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import Group, current_group, within
from unickpt.loading.ruled_view import RuledView
from unickpt.loading.views import CheckpointView
from unickpt.progress import reporting
from unickpt.quoting import counted, some
from unickpt.reading import checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.storage import paths
from unickpt.tools import difference
from unickpt.tools.destinations import ExportDestination, destination
from unickpt.tools.export_job import ExportJob
from unickpt.trees import tree_json
from unickpt.trees.tree import Opaque

_MOST_LINES = 10


def export(
    view: CheckpointView,
    path: paths.PathLike,
    writer: Writer,
    options: SaveOptions,
    *,
    overwrite: bool = False,
    verify: bool = True,
) -> SaveReport:
    """Writes a view of a checkpoint in another format; all processes of a job call it.

    Arguments:
        view: the source.
        path: of the destination.
        writer: plans the files of the format.
        options: as for `save`; `budget_bytes`, `fsync`, `timeout_s` and `group` count.
        overwrite: whether to replace a checkpoint that is there.
        verify: whether to read what was written, and to compare it with the source.

    Raises:
        UnsupportedLeaf: the format cannot hold something; nothing was written.
        CheckpointExists: the destination is in use.
        CheckpointCorrupt: the source is damaged, or what was written differs when it is read back;
            nothing remains of what was written.
        SaveConflict: another export to this destination is under way.
        All that `save` raises.
    """
    started = time.perf_counter()
    group = within(options.group or current_group(adapters()), options.timeout_s)
    to = destination(path, writer.suffixes, group.next_attempt(), options.fsync)
    source = view.checkpoint.location
    if to.file is None and source.url.startswith(to.folder.url):
        raise CheckpointExists(f"{to.name} contains the source, {source}; choose another path")
    budget_bytes = options.working_bytes
    reading = LoadOptions(budget_bytes=MemoryBudget(budget_bytes, "process"))
    if isinstance(view, RuledView):
        view.check(reading)
    index = replace(view.index, tree=tree_json.to_json(view.node()))
    # All processes must plan the same files, whatever their nodes have.
    requested = MemoryBudget.of(options.budget_bytes)
    most = to.most_bytes(requested.share(group.count))
    try:
        _check_leaves(index)
        plan = writer.plan(index, most, to.file)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{_parts_text(view, str(source))}{error}") from error
    with reporting(options.progress, "exporting", group.index) as told:
        job = ExportJob(view, plan, to, group, budget_bytes, options.timeout_s, told)
        job.check(most, requested)
        job.run(overwrite, lambda: _verify(view, plan, to, group, reading) if verify else None)
    return SaveReport(
        url=to.name,
        arrays=len(index.arrays),
        bytes=sum(entry.nbytes for entry in index.arrays.values()),
        written_bytes=job.written_bytes,
        chunks=job.count,
        processes=group.count,
        seconds=time.perf_counter() - started,
        process=group.index,
    )


def _check_leaves(index: Index) -> None:
    """Refuses leaves that only unickpt's own format holds. Raises UnsupportedLeaf."""
    opaque = [name for name, v in index.values.items() if isinstance(v, Opaque)]
    found = [f"{name!r} differs by process" for name in sorted(index.per_process)]
    found += [f"{name!r} is an object of an unknown class" for name in opaque]
    if found:
        name = min(index.per_process, default="") or opaque[0]
        raise UnsupportedLeaf(
            f"{some(found)}, which only unickpt's own format can hold; drop it by a rule: "
            f"{name} <-> drop"
        )


def _parts_text(view: CheckpointView, source: str) -> str:
    """What to do first if a format of arrays cannot hold a training step: to export its model."""
    if isinstance(view, RuledView) or view.checkpoint.under:
        return ""
    index, counts = view.index, Counter[str]()
    tops = {name.partition("/")[0] for name in (*index.values, *index.per_process)}
    for name in index.entries:
        top, inner, _ = name.partition("/")
        if inner and top not in tops:
            counts[top] += 1
    if not counts:
        return ""
    parts = [f"under={top!r} ({counted(n, 'array')})" for top, n in counts.items()]
    return (
        f"{source} has more than arrays. To export a part of it, pass {', or '.join(parts)}; on "
        f"the command line, --under {next(iter(counts))}. Of the whole,\n"
    )


def written(to: ExportDestination) -> Reader:
    """What was written, as a checkpoint.

    Raises:
        CheckpointCorrupt: it is none.
    """
    reader = checkpoint.open_reader(paths.resolve(to.readable, or_file=True))
    if reader is None:
        raise CheckpointCorrupt(f"{to.name} was written, but is no checkpoint when read back")
    return reader


def _verify(
    view: CheckpointView, plan: Plan, to: ExportDestination, group: Group, options: LoadOptions
) -> None:
    """Compares what was written with the source; each process some of the arrays."""
    reader = written(to).checking()
    lines = list(_other_names(plan, reader.index.names))
    for name, shown in plan.values.items():
        ours, theirs = view.index.values[name], reader.index.values.get(shown)
        if (type(ours), repr(ours)) != (type(theirs), repr(theirs)):
            lines.append(f"  {name!r}: {ours!r} is read back as {theirs!r}")
    if not lines:
        mine = list(plan.arrays.items())[group.index :: group.count]
        lines = difference.unequal(view, reader, dict(mine), plan.casts, options)
    if lines:
        told = "\n".join(lines[:_MOST_LINES])
        raise CheckpointCorrupt(f"{to.name} was written, but differs when read back:\n{told}")


def _other_names(plan: Plan, found: Mapping[str, Any]) -> list[str]:
    expected = {*plan.arrays.values(), *plan.values.values()}
    missing = [f"  {name!r} is missing" for name in expected if name not in found]
    if plan.others:
        return missing
    return missing + [f"  {name!r} is not expected" for name in found if name not in expected]
