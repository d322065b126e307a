"""export(): writes a checkpoint in another format, within a memory budget, split over processes."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from unickpt import LoadOptions, SaveOptions
from unickpt.errors import CheckpointCorrupt, CheckpointExists, UnsupportedLeaf
from unickpt.extend import (
    Box,
    ComparedViews,
    HostBuffers,
    Index,
    LeavesOut,
    MemoryBudget,
    NeedsElements,
    OfEachProcess,
    Opaque,
    PathLike,
    Plan,
    PlannedFile,
    Reader,
    RuledView,
    Sections,
    StoredView,
    View,
    Writer,
    adapters,
    counted,
    current_group,
    decode_per_process,
    first_few,
    open_reader,
    quoted,
    read_boxes,
    reporting,
    resolve_path,
    tree_to_json,
    within,
)
from unickpt.plugins.export.destinations import ExportDestination, destination
from unickpt.plugins.export.job import ExportJob
from unickpt.types import Group, SaveReport

_MOST_LINES = 10
_MOST_PARTS = 4
_OPTIMIZER = re.compile(r"(^|/)(opt|optim|optimizer|optimizers|opt_state|optimizer_states?)(/|$)")


def export(
    view: View,
    path: PathLike,
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
        overwrite: whether to replace an existing checkpoint.
        verify: whether to read the written files back, and to compare them with the source.

    Raises:
        UnsupportedLeaf: the format cannot hold something; nothing was written.
        CheckpointExists: the destination is in use.
        CheckpointCorrupt: the source is damaged, or the written files differ when they are read
            back; none of them remains.
        SaveConflict: another export to this destination is under way.
        All that `save` raises.
    """
    started = time.perf_counter()
    group = within(options.group or current_group(adapters()), options.timeout_s)
    target = destination(path, writer.suffixes, group.next_attempt(), options.fsync)
    source = view.checkpoint.location
    if target.file is None and source.url.startswith(target.folder.url):
        raise CheckpointExists(f"{target.name} contains the source, {source}; choose another path")
    structured = replace(view.index, tree=tree_to_json(view.node()))  # rules make no tree
    left_out = set(writer.left_out(structured)) if isinstance(writer, LeavesOut) else set()
    budget_bytes = options.working_bytes
    reading = LoadOptions(budget_bytes=MemoryBudget(budget_bytes, "process"))
    if isinstance(view, RuledView):
        view.check(reading)
    index = _with_per_process(view, structured)
    # All processes must plan the same files, whatever their nodes have.
    requested = MemoryBudget.from_option(options.budget_bytes)
    most = target.most_bytes(requested.share(group.count))
    try:
        _check_leaves(view.index, left_out, getattr(writer, "per_process", False))
        writer = with_needed(writer, view, index, budget_bytes, reading)
        plan = writer.plan(index, most, target.file)
    except UnsupportedLeaf as error:
        raise UnsupportedLeaf(f"{_parts_text(view, str(source))}{error}") from error
    with reporting(options.progress, "exporting", group.index) as notify:
        job = ExportJob(view, plan, target, group, budget_bytes, options.timeout_s, notify)
        job.check(most, requested)
        job.run(overwrite, lambda: _verify(view, plan, target, group, reading) if verify else None)
    exported_entries = [entry for name, entry in index.arrays.items() if name not in left_out]
    return SaveReport(
        url=target.name,
        arrays=len(exported_entries),
        bytes=sum(entry.nbytes for entry in exported_entries),
        written_bytes=job.written_bytes,
        chunks=job.count,
        processes=group.count,
        seconds=time.perf_counter() - started,
        process=group.index,
        left_out=tuple(name for name in view.index.names if name in left_out),
    )


def _with_per_process(view: View, index: Index) -> Index:
    """The index of a view, with the values that all processes saved."""
    values: dict[str, Any] = dict(index.values)
    for name in index.per_process:
        where = f"{view.checkpoint.location}: per-process leaf {name!r}"
        every = view.per_process(name)
        decoded = [decode_per_process(stored, where, None, adapters()) for stored in every]
        values[name] = OfEachProcess(tuple(map(_without_sections, decoded)))
    return replace(index, values=values, per_process={})


def _without_sections(value: Any) -> Any:
    """A value of one process, as other formats know it."""
    if not isinstance(value, Sections):
        return value
    return {"facts": dict(value.facts), "sections": dict(value.values)}


def _check_leaves(index: Index, left_out: Set[str], per_process: bool) -> None:
    """Refuses leaves that a format does not hold. Raises UnsupportedLeaf.

    Arguments:
        index: of the source.
        left_out: names of leaves that the format leaves out.
        per_process: whether it holds leaves that differ by process.
    """
    values = index.values.items()
    opaque = {n: v.class_name for n, v in values if isinstance(v, Opaque) and n not in left_out}
    apart = set() if per_process else index.per_process.keys() - left_out
    problems = [f"{name!r} differs by process" for name in sorted(apart)]
    problems += [f"{name!r} is an object of the class {kind}" for name, kind in opaque.items()]
    if problems:
        name = min(apart, default="") or next(iter(opaque))
        raise UnsupportedLeaf(
            f"{first_few(problems)}, which only unickpt's own format can hold; drop it by a rule: "
            f"{name} <-> drop"
        )


def _parts_text(view: View, source: str) -> str:
    """The hint if a format of arrays cannot hold a training step: to export its model first."""
    if isinstance(view, RuledView) or view.checkpoint.under:
        return ""
    counts = _parts_of_arrays(view.index)
    if not counts:
        return ""
    ordered = sorted(counts.items(), key=lambda x: (bool(_OPTIMIZER.search(x[0])), -x[1]))
    shown = ordered[:_MOST_PARTS]
    parts = [f"under={part!r} ({counted(n, 'array')})" for part, n in shown]
    more = f", and {len(counts) - len(shown)} others" if len(counts) > len(shown) else ""
    module = ""
    if any(part.endswith("/_parameters") for part in counts):
        module = " It is a whole module of torch: save its state_dict() there for all its arrays."
    return (
        f"{source} contains more than arrays. To export a part of it, pass {', or '.join(parts)}"
        f"{more}; on the command line, --under {shown[0][0]}.{module} "
        "The whole cannot be exported:\n"
    )


def _parts_of_arrays(index: Index) -> Counter[str]:
    """The largest containers whose leaves are all arrays, and their numbers of arrays."""
    mixed = {part for name in (*index.values, *index.per_process) for part in _containers(name)}
    parts = (next((p for p in _containers(n) if p not in mixed), None) for n in index.entries)
    return Counter(part for part in parts if part is not None)


def _containers(name: str) -> list[str]:
    """The names of the containers of a leaf, the outermost first."""
    return [name[:end] for end in range(len(name)) if name[end] == "/"]


def written(target: ExportDestination, part: str = "") -> Reader:
    """The written files, as a checkpoint.

    Arguments:
        target: where.
        part: the file of a part that is a checkpoint; none for all of it.

    Raises:
        CheckpointCorrupt: it is none.
    """
    name, readable = target.name, target.readable
    if part:
        name, readable = f"{name.rstrip('/')}/{part}", f"{str(readable).rstrip('/')}/{part}"
    reader = open_reader(resolve_path(readable, or_file=True))
    if reader is None:
        raise CheckpointCorrupt(f"{name} was written, but is no checkpoint when read back")
    return reader


def _verify(
    view: View, plan: Plan, target: ExportDestination, group: Group, options: LoadOptions
) -> None:
    """Compares the written files with the source; each process a part."""
    dataless_files = [file for file in plan.files if not file.data and file.copied is None]
    lines = [
        f"  {file.name} has other bytes"
        for file in dataless_files[group.index :: group.count]
        if target.read(file.name) != _bytes_of(file)
    ]
    for part, of_part in (plan.parts or {"": plan}).items():
        lines += _differences(view, of_part, written(target, part).checking(), group, options)
    if lines:
        differences = "\n".join(lines[:_MOST_LINES])
        raise CheckpointCorrupt(
            f"{target.name} was written, but differs when read back:\n{differences}"
        )


def _differences(
    view: View, plan: Plan, reader: Reader, group: Group, options: LoadOptions
) -> list[str]:
    """A line for each difference between a checkpoint that was written and the source."""
    lines = list(_other_names(plan, reader.index.names))
    expected = {shown: view.index.values[name] for name, shown in plan.values.items()}
    for shown, ours in {**expected, **plan.made}.items():
        theirs = reader.index.values.get(shown)
        if (type(ours), repr(ours)) != (type(theirs), repr(theirs)):
            lines.append(f"  {shown!r}: {ours!r} is read back as {theirs!r}")
    if lines:
        return lines
    mine = list(plan.arrays.items())[group.index :: group.count]
    return _unequal(view, reader, dict(mine), plan, options)


def _unequal(
    ours: View, written: Reader, names: Mapping[str, str], plan: Plan, options: LoadOptions
) -> list[str]:
    """Compares arrays of a view with their copies, bit for bit.

    Arguments:
        ours: the view.
        written: has the copies.
        names: of the copies, by those of the view's arrays or aliases.
        plan: of the copies, with the casts.
        options: see `LoadOptions`; `budget_bytes` bounds the memory for both.

    Returns:
        A line for each array that differs.
    """
    theirs, differences = StoredView(written), list[str]()
    with ComparedViews(ours, theirs, options) as pair:
        for name, shown in names.items():
            mine, other = ours.index.entry(name), theirs.index.entry(shown)
            mine = replace(mine, dtype=plan.casts.get(mine.name, mine.dtype))
            if (mine.dtype, mine.shape) != (other.dtype, other.shape):
                became = f"{mine.dtype_and_shape} became {other.dtype_and_shape}"
                differences.append(f"  {name!r}: {became}")
            elif (row := pair.difference(name, mine, other)) is not None:
                differences.append(f"  {name!r}: {row.unequal} elements differ")
    return differences


def _bytes_of(file: PlannedFile) -> bytes:
    """The bytes of a file without data, which are known before it is written."""
    contents = bytearray(file.size)
    ending = file.ending([]) if file.ending is not None else {}
    for offset, text in {**file.texts, **ending}.items():
        contents[offset : offset + len(text)] = text
    return bytes(contents)


def _other_names(plan: Plan, names: Mapping[str, Any]) -> list[str]:
    expected = {*plan.arrays.values(), *plan.values.values(), *plan.made}
    missing = [f"  {name!r} is missing" for name in expected if name not in names]
    if plan.others:
        return missing
    return missing + [f"  {name!r} is not expected" for name in names if name not in expected]


# --- small arrays that a writer must know to plan its files ---------------------------------------


_SHARE = 6  # of the budget; their form in a file takes a few times their memory


def with_needed(
    writer: Writer, view: View, index: Index, budget_bytes: int, options: LoadOptions
) -> Writer:
    """A writer with the elements that it needs, if it needs any.

    Arguments:
        writer: of a format.
        view: the source.
        index: of the checkpoint to write.
        budget_bytes: of memory, for this process.
        options: of reading.

    Raises:
        UnsupportedLeaf: they are too large; names the largest.
    """
    if not isinstance(writer, NeedsElements):
        return writer
    entries = [index.arrays[name] for name in writer.needed(index)]
    total = sum(entry.nbytes for entry in entries)
    if total * _SHARE > budget_bytes:
        largest = max(entries, key=lambda entry: entry.nbytes)
        raise UnsupportedLeaf(
            f"{quoted(largest.name)}: {largest.dtype_and_shape} is written in one piece with "
            f"others, {total} bytes in all: set budget_bytes={total * _SHARE}, or drop it by a "
            f"rule: {largest.name} <-> drop"
        )
    boxes = [(entry, Box.whole(entry.shape)) for entry in entries]
    read = read_boxes(view, boxes, options, HostBuffers(total))
    pairs = zip(entries, read, strict=True)
    return writer.with_elements({entry.name: array for entry, (array, _) in pairs})
