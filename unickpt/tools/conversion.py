"""convert(): makes a checkpoint from another, within a memory budget, split over processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from unickpt import doors
from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, CheckpointReplaced, LoadMismatch
from unickpt.features import SaveFeature
from unickpt.format import writer_registry
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.format.writer_protocol import Writer
from unickpt.frameworks import per_process
from unickpt.frameworks.adapter_protocol import ArraySource, Memory, whole_source
from unickpt.frameworks.host_memory import HostBuffers, MemoryBudget
from unickpt.frameworks.leaves import NOTHING, Described, PerProcess, adapters
from unickpt.frameworks.process_group import Group
from unickpt.loading.request import Policy
from unickpt.loading.views import StoredView, View
from unickpt.options import SaveOptions
from unickpt.progress import Progress
from unickpt.quoting import quoted
from unickpt.reading import checkpoint, verification
from unickpt.reading.load_options import LoadOptions
from unickpt.references.value_places import WriteItem
from unickpt.rules.plan import LeafKind
from unickpt.rules.rule_set import Rules
from unickpt.rules.view import RuledView, load_view, stored_facts, through
from unickpt.save_report import SaveReport
from unickpt.saving.task import SaveTask, call_metrics
from unickpt.storage import paths
from unickpt.threads import in_batches
from unickpt.tools.slab_reads import AHEAD, WRITER, Buffered, SlabSource, check_rest, read_boxes
from unickpt.trees import tree


def convert(
    source: checkpoint.Source,
    destination: paths.PathLike,
    *,
    rules: Rules | None = None,
    under: str = "",
    like: Any = None,
    overwrite: bool = False,
    verify: bool = True,
    options: SaveOptions | None = None,
    progress: Progress = None,
    to: str | None = None,
    **format_options: Any,
) -> SaveReport:
    """Makes a checkpoint from another one through rules, without holding all of it in memory.

    In a job of several processes (`torch.distributed`, `jax.distributed`), all of them call this
    with the same arguments, and each converts its own part.

    Arguments:
        source: a local path or a URL of a committed checkpoint, or what `unickpt.open` returned.
        destination: the path or URL of the new checkpoint.
        rules: map the names and axes of the source to those of the destination; without rules all
            arrays stay the same, and only options (chunks, compression, quantize) change.
        under: convert this part of the source, such as "model"; see `load`.
        like: gives names, shapes and dtypes of the destination: another checkpoint's path or URL,
            or a tree as for `load`. Needed for rules whose names are ambiguous; see docs/rules.md.
            Plain values that rules drop on this side (`drop <-> name`) are taken from it.
        overwrite: as for `save`.
        verify: whether to read the destination back and check it: against its digests, or, in
            another system's format, which has none, against the source.
        options: as for `save`; `budget_bytes` bounds the memory of the whole conversion.
        progress: as `SaveOptions.progress`, which it replaces.
        to: the format: "unickpt", or "hf", "safetensors", "dcp", "orbax", "torch", "npz",
            "universal", "trainer", "accelerate", "lightning" or "keras"; see
            docs/formats/writing.md. By default, the suffix of the destination determines it:
            .safetensors, .npz, .pt, .pth and .bin (torch); without one, it is unickpt's own.
        format_options: of that format, such as `max_shard_size="5GB"` of "hf".

    Returns:
        A report of the written checkpoint and of the time.

    Raises:
        RuleError: the rules do not fit the source; nothing was written.
        CheckpointCorrupt: a chunk of the source or of the destination is damaged.
        LoadMismatch: data would be lost: a cast is not exact, arrays that become one differ, a
            `PerProcess` leaf was saved by a different number of processes; or `like` has another
            dtype.
        ValueError, TypeError: `like` without rules; there is no such format, it has no such
            option, or the suffix of the destination is that of another format.
        UnsupportedLeaf: the format cannot hold a leaf; nothing was written.
        UnickptError: as `save`.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/jax", {"up": {"kernel": np.ones((3, 5))}})
        >>> rules = unickpt.Rules.parse("{m...}/kernel [i o] <-> {m...}.weight [o i]")
        >>> _ = unickpt.convert("memory://run/jax", "memory://run/torch", rules=rules)
        >>> unickpt.open("memory://run/torch")["up.weight"].shape
        (5, 3)
    """
    options = SaveOptions.or_default(options)
    if progress is not None:
        options = replace(options, progress=progress)
    writer = _writer(writer_registry.chosen(to, destination), format_options, options)
    stored = checkpoint.opened(source, under).reader.checking()
    view = convertible(stored, rules, like)
    stored.check_total(view.index.arrays.values())
    if writer is not None:
        export = doors.need("names", "export")
        report: SaveReport = export(
            view, destination, writer, options, overwrite=overwrite, verify=verify
        )
        call_metrics(options, report)
        return report
    ahead, writing_bytes = budgets(options)
    reading = LoadOptions(budget_bytes=MemoryBudget(ahead, "process"))
    metadata = stored.index.metadata
    if isinstance(view, RuledView):
        view.check(reading)
        metadata = view.provenance.merged_into(metadata)
    writing = replace(options, budget_bytes=MemoryBudget(writing_bytes, "process"))
    job = SaveTask(destination, overwrite, writing.with_feature(_SameSource(stored)))
    leaves = leaves_of(view, job.group, "convert")
    job.describe(tree.with_values(view.node(), leaves.__getitem__), metadata)
    buffers, arrays = HostBuffers(writing_bytes), view.index.arrays

    def read(items: Sequence[WriteItem]) -> list[Buffered]:
        boxes = [(arrays[item.entry.name], item.box) for item in items]
        return read_boxes(view, boxes, reading, buffers)

    report = write_streamed(
        job, read, buffers, ahead, attrgetter("nbytes"), lambda: check_rest(stored, job.group)
    )
    if verify and job.group.index == 0:
        check_written(destination)
    return report


@dataclass(frozen=True)
class _SameSource(SaveFeature):
    """Refuses a conversion whose processes opened different checkpoints.

    Arguments:
        stored: what this process converts.
    """

    stored: Reader
    name = "unickpt.source"

    def note(self) -> tuple[str, str]:
        return self.stored.identity, self.stored.label

    def merge_notes(self, notes: Mapping[int, Any]) -> None:
        check_same_source(notes)


def check_same_source(sources: Mapping[int, tuple[str, str]]) -> None:
    """Checks that all processes opened the same checkpoint.

    Arguments:
        sources: by process, the `identity` and the `label` of what it opened.

    Raises:
        CheckpointReplaced: two processes opened different ones; names both.
    """
    first, (first_identity, first_label) = next(iter(sources.items()))
    for process, (identity, label) in sources.items():
        if identity != first_identity:
            raise CheckpointReplaced(
                f"processes {first} and {process} opened different checkpoints, {first_label} and "
                f"{label}. A save replaced the source, or their paths differ; convert again, with "
                "the same path in all"
            )


def budgets(options: SaveOptions) -> tuple[int, int]:
    """Bytes of this process for making a slab, and for writing."""
    ahead, writing_bytes = (max(1, options.working_bytes // part) for part in (AHEAD, WRITER))
    return ahead, writing_bytes


def write_streamed(
    job: SaveTask,
    make: Callable[[Sequence[WriteItem]], Sequence[Buffered]],
    buffers: HostBuffers,
    slab_bytes: int,
    cost: Callable[[WriteItem], int],
    check: Callable[[], None],
) -> SaveReport:
    """Writes a described checkpoint, slab by slab.

    Arguments:
        job: the save.
        make: makes chunks.
        buffers: provide memory for `make`.
        slab_bytes: the largest cost of the chunks of a slab.
        cost: bytes of memory that it takes to make a chunk.
        check: called after the last chunk.
    """
    with job.failing():
        plan = job.plan()
    slabs = in_batches(plan.own_items, None, slab_bytes, cost)
    with closing(SlabSource(slabs, make, buffers)) as chunks:
        report = job.run(plan, chunks, check)
    call_metrics(job.options, report)
    return report


def check_written(destination: paths.PathLike) -> None:
    """Reads the written checkpoint back.

    Raises:
        CheckpointCorrupt: it is damaged.
    """
    report = verification.verify(destination)
    if not report.ok:
        damage = "\n".join(f"  {d}" for d in report.damage[:10])
        raise CheckpointCorrupt(
            f"{report.url} was written, but is damaged when read back:\n{damage}"
        )


def _writer(
    format_name: str, format_options: Mapping[str, Any], options: SaveOptions
) -> Writer | None:
    """The writer of another system's format; None for unickpt's own."""
    if format_name == writer_registry.OWN:
        if format_options:
            raise TypeError(
                f"unickpt's own format has no option {quoted(min(format_options))}; say to= which "
                f"format to write: {', '.join(writer_registry.names())}"
            )
        return None
    if options.compression is not None or options.chunk_shape is not None or options.quantize:
        raise ValueError(
            "compression, chunk_shape and quantize are options of unickpt's own format, not "
            f"{format_name}"
        )
    return writer_registry.make_writer(format_name, format_options)


def convertible(stored: Reader, rules: Rules | None, like: Any) -> StoredView | RuledView:
    """The view of a checkpoint that `convert` writes; reads only indices. Raises as `convert`."""
    if rules is None:
        if like is not None:
            raise ValueError("`like` gives the names that rules make; pass rules too")
        return StoredView(stored)
    if like is None:
        return through(stored, rules)
    template_values: Mapping[str, Any]
    if isinstance(like, str | os.PathLike | checkpoint.Checkpoint):
        template = checkpoint.opened(like).reader
        view = through(stored, rules, stored_facts(template).facts)
        template_values = template.index.values
    else:
        view, request = load_view(rules, stored, like, adapters(), Policy())
        template_values = request.leaves if request is not None else {}
    requested = view.requested
    # As in a load, `like` keeps values that rules drop on purpose, such as hyper-parameters.
    view.keep(
        {n: template_values[n] for n in view.kept_names if requested[n].kind is LeafKind.VALUE}
    )
    mismatches = [
        f"  {name!r} is made as {entry.dtype}, but `like` has {requested[name].dtype}; write "
        f"`as {requested[name].dtype}` in its rule"
        for name, entry in view.index.arrays.items()
        if name in requested and requested[name].is_array and requested[name].dtype != entry.dtype
    ]
    if mismatches:
        raise LoadMismatch("\n".join([f"{stored.location} does not fit `like`:", *mismatches[:10]]))
    return view


def leaves_of(view: View, group: Group, work: str) -> dict[str, Any]:
    """The leaves of a view to save, by name; its arrays are read later.

    Arguments:
        view: the source.
        group: the processes.
        work: the operation, for messages.

    Raises:
        LoadMismatch: `PerProcess` leaves are of another number of processes.
    """
    index = view.index
    leaves: dict[str, Any] = {name: ConvertedLeaf(entry) for name, entry in index.arrays.items()}
    leaves |= {alias: leaves[name] for alias, name in index.aliases.items()}
    leaves |= index.values
    for name, entry in index.per_process.items():
        where = f"{view.checkpoint.location}: per-process leaf {name!r}"
        if len(entry.blobs) != group.count:
            raise LoadMismatch(
                f"{where} was saved by {len(entry.blobs)} processes, and {group.count} {work} it; "
                f"{work} with as many, or drop it by a rule: {name} <-> drop"
            )
        (stored,) = view.per_process(name, [group.index])
        value = NOTHING if stored.is_empty else per_process.decode(stored, where, None, adapters())
        leaves[name] = PerProcess(value)
    return leaves


class ConvertedLeaf(Described):
    """An array of a view, as a leaf to save; any process can write any chunk of it."""

    def __init__(self, entry: ArrayEntry) -> None:
        self._entry = entry

    def source(self, group: Group) -> ArraySource:
        dtype = dtypes.from_name(self._entry.dtype)
        identity: Hashable = ("converted", self)
        whole = whole_source(self._entry.shape, dtype, group, _not_read, identity, _HOST)
        return replace(whole, prng=self._entry.prng, assumed=False)


_HOST = Memory(mutable=False)


def _not_read(box: Box, room: Callable[[], Array]) -> Array:
    raise AssertionError("chunks come from the chunk source, which reads many of them together")
