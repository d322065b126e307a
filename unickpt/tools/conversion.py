"""convert(): makes a checkpoint from another, within a memory budget, split over processes."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.host_memory import HostBuffers
from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.foreign import writers
from unickpt.format.index import ArrayEntry
from unickpt.format.reader import Reader
from unickpt.format.writer import Writer
from unickpt.frameworks import per_process
from unickpt.frameworks.leaves import Described, PerProcess
from unickpt.frameworks.process_group import Group
from unickpt.frameworks.protocol import ArraySource, Memory, whole_source
from unickpt.frameworks.registry import adapters
from unickpt.loading.ruled_view import RuledView, request_through, stored_facts, through
from unickpt.loading.views import CheckpointView, StoredView
from unickpt.quoting import quoted
from unickpt.reading import checkpoint
from unickpt.reading.options import LoadOptions
from unickpt.rules import Rules
from unickpt.rules.plan import Fact
from unickpt.saving.chunk_source import StagedChunk
from unickpt.saving.options import SaveOptions, SaveReport
from unickpt.saving.save_job import SaveJob, call_metrics
from unickpt.saving.write_plan import WriteItem
from unickpt.storage import paths
from unickpt.threads import in_batches
from unickpt.tools import verification
from unickpt.tools.exporting import export
from unickpt.tools.slabs import read_boxes
from unickpt.trees import tree

# Shares of the budget: two slabs that are read ahead, and what the writer holds.
_AHEAD, _WRITER = 6, 2
OWN = "unickpt"
"""The name of unickpt's own format."""


def convert(
    source: checkpoint.Source,
    destination: paths.Path,
    *,
    rules: Rules | None = None,
    like: Any = None,
    overwrite: bool = False,
    verify: bool = True,
    options: SaveOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    to: str = OWN,
    **format_options: Any,
) -> SaveReport:
    """Makes a checkpoint from another one through rules, without holding all of it in memory.

    In a job of several processes (`torch.distributed`, `jax.distributed`), all of them call this
    with the same arguments, and each converts its own part.

    Arguments:
        source: a local path or a URL of a committed checkpoint, or what `unickpt.open` returned.
        destination: the path or URL of the new checkpoint.
        rules: map the names and axes of the source to those of the destination; without rules all
            arrays stay the same, and only options (chunks, compression) change.
        like: gives names, shapes and dtypes of the destination: another checkpoint's path or URL,
            or a tree as for `load`. Needed for rules whose names are ambiguous; see docs/rules.md.
            Plain values that rules drop on this side (`drop <-> name`) are taken from it.
        overwrite: as for `save`.
        verify: whether to read the destination back and check it: against its digests, or, in
            another system's format, which has none, against the source.
        options: as for `save`; `budget_bytes` bounds the memory of the whole conversion.
        progress: called with this process's bytes converted so far and in total.
        to: the format: unickpt's own, or "hf", "safetensors", "dcp", "orbax", "torch", "npz" or
            "universal"; see docs/formats/writing.md.
        format_options: of that format, such as `max_shard_size="5GB"` of "hf".

    Returns:
        A report of what was written and how long it took.

    Raises:
        RuleError: the rules do not fit the source; nothing was written.
        CheckpointCorrupt: a chunk of the source or of the destination is damaged.
        LoadMismatch: data would be lost: a cast is not exact, arrays that become one differ, a
            `PerProcess` leaf was saved by a different number of processes; or `like` has another
            dtype.
        ValueError, TypeError: `like` without rules; there is no such format, or it has no such
            option.
        UnsupportedLeaf: the format cannot hold something; nothing was written.
        All that `save` raises.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/jax", {"up": {"kernel": np.ones((3, 5))}})
        >>> rules = unickpt.Rules.parse("{m...}/kernel [i o] <-> {m...}.weight [o i]")
        >>> _ = unickpt.convert("memory://run/jax", "memory://run/torch", rules=rules)
        >>> unickpt.open("memory://run/torch")["up.weight"].shape
        (5, 3)
    """
    options = SaveOptions.or_default(options)
    writer = _writer(to, format_options, options)
    stored = checkpoint.opened(source).reader
    view = convertible(stored, rules, like)
    if writer is not None:
        report = export(
            view,
            destination,
            writer,
            options,
            overwrite=overwrite,
            verify=verify,
            progress=progress,
        )
        call_metrics(options, report)
        return report
    reading = LoadOptions(budget_bytes=max(1, options.budget_bytes // _AHEAD))
    metadata = stored.index.metadata
    if isinstance(view, RuledView):
        view.check(reading)
        metadata = view.provenance.merged_into(metadata)
    writing = replace(options, budget_bytes=max(1, options.budget_bytes // _WRITER))
    job = SaveJob(destination, overwrite, writing)
    leaves = _leaves(view, job.group)
    job.describe(tree.with_values(view.node(), leaves.__getitem__), metadata)
    plan = job.plan()
    chunks = _ViewSource(view, plan.own, reading, options.budget_bytes, progress)
    try:
        report = job.run(plan, chunks)
    finally:
        chunks.close()
    call_metrics(options, report)
    if verify and job.group.index == 0:
        found = verification.verify(destination)
        if not found.ok:
            damage = "\n".join(f"  {d}" for d in found.damage[:10])
            raise CheckpointCorrupt(
                f"{found.url} was written, but is damaged when read back:\n{damage}"
            )
    return report


def _writer(to: str, format_options: Mapping[str, Any], options: SaveOptions) -> Writer | None:
    """The writer of another system's format; None for unickpt's own."""
    if to == OWN:
        if format_options:
            raise TypeError(
                f"unickpt's own format has no option {quoted(min(format_options))}; say to= which "
                f"format to write: {', '.join(writers.names())}"
            )
        return None
    if options.compression is not None or options.chunk_shape is not None:
        raise ValueError(
            f"compression and chunk_shape are options of unickpt's own format, not {to}"
        )
    return writers.make(to, format_options)


def convertible(stored: Reader, rules: Rules | None, like: Any) -> StoredView | RuledView:
    """What `convert` makes of a checkpoint; reads only indices. Raises as `convert`."""
    if rules is None:
        if like is not None:
            raise ValueError("`like` gives the names that rules make; pass rules too")
        return StoredView(stored)
    if like is None:
        return through(stored, rules)
    asked: Mapping[str, Fact]
    held: Mapping[str, Any]
    if isinstance(like, str | os.PathLike | checkpoint.Checkpoint):
        template = checkpoint.opened(like).reader
        asked, held = stored_facts(template).facts, template.index.values
    else:
        wanted = request_through(like, stored, rules, adapters())
        asked, held = wanted.facts, wanted.leaves
    view = through(stored, rules, asked)
    # As in a load, `like` keeps what rules drop on purpose, such as hyper-parameters.
    view.keep({n: held[n] for n in view.kept if asked[n].kind == "value"})
    others = [
        f"  {name!r} is made as {entry.dtype}, but `like` has {asked[name].dtype}; write "
        f"`as {asked[name].dtype}` in its rule"
        for name, entry in view.index.arrays.items()
        if name in asked and asked[name].kind == "array" and asked[name].dtype != entry.dtype
    ]
    if others:
        raise LoadMismatch("\n".join([f"{stored.location} does not fit `like`:", *others[:10]]))
    return view


def _leaves(view: CheckpointView, group: Group) -> dict[str, Any]:
    index = view.index
    leaves: dict[str, Any] = {name: Converted(entry) for name, entry in index.arrays.items()}
    leaves |= {alias: leaves[name] for alias, name in index.aliases.items()}
    leaves |= index.values
    for name, entry in index.per_process.items():
        where = f"{view.checkpoint.location}: per-process leaf {name!r}"
        if len(entry.blobs) != group.count:
            raise LoadMismatch(
                f"{where} was saved by "
                f"{len(entry.blobs)} processes, and {group.count} convert it; convert with as many,"
                f" or drop it by a rule: {name} <-> drop"
            )
        (data,) = view.per_process(name, [group.index])
        leaves[name] = PerProcess(per_process.decode(data, where, None, adapters()))
    return leaves


class Converted(Described):
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


class _ViewSource:
    """The chunks of a view, for the writer; reads them in slabs, one slab ahead.

    Arguments:
        view: the source.
        items: the chunks that this process writes, in order.
        options: of reading.
        budget_bytes: of the whole conversion.
        progress: see `convert`.
    """

    behind = False
    staged_bytes = 0

    def __init__(
        self,
        view: CheckpointView,
        items: Sequence[WriteItem],
        options: LoadOptions,
        budget_bytes: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self._view, self._options = view, options
        self._buffers = HostBuffers(budget_bytes // _WRITER)
        self._slabs = list(in_batches(items, None, options.budget_bytes, attrgetter("nbytes")))
        self._slab_of = {item: at for at, slab in enumerate(self._slabs) for item in slab}
        self._reading: dict[int, Future[dict[WriteItem, tuple[Array, Array]]]] = {}
        self._ready: dict[WriteItem, tuple[Array, Array]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="unickpt-convert")
        self._progress = progress or (lambda done, total: None)
        self._done, self._total = 0, sum(item.nbytes for item in items)

    def ready(self, items: Sequence[WriteItem]) -> bool:
        return True

    def digest(self, item: WriteItem) -> int:
        raise AssertionError("asked of assumed replicas, and a view has none")

    def fetch(self, item: WriteItem) -> StagedChunk:
        if item not in self._ready:
            at = self._slab_of.pop(item, None)
            if at is None or at not in self._start(at):
                self._ready |= self._read([item])  # requested again by the coordinator
            else:
                self._ready |= self._reading.pop(at).result()
                self._start(at + 1)
        data, memory = self._ready.pop(item)
        self._done += item.nbytes
        self._progress(min(self._done, self._total), self._total)
        return StagedChunk(data, data.nbytes, partial(self._buffers.give, memory))

    def close(self) -> None:
        """Stops reading; discards slabs that were not used."""
        self._pool.shutdown(cancel_futures=True)

    def _start(self, at: int) -> Mapping[int, Any]:
        """Starts to read the next slab, if there is one."""
        if at < len(self._slabs) and self._slabs[at]:
            slab, self._slabs[at] = self._slabs[at], []
            self._reading[at] = self._pool.submit(self._read, slab)
        return self._reading

    def _read(self, items: Sequence[WriteItem]) -> dict[WriteItem, tuple[Array, Array]]:
        by_array: dict[str, list[WriteItem]] = {}
        for item in items:
            by_array.setdefault(item.entry.name, []).append(item)
        arrays = self._view.index.arrays
        wanted = {
            name: (arrays[name], [item.box for item in of_array])
            for name, of_array in by_array.items()
        }
        found = read_boxes(self._view, wanted, self._options, self._buffers)
        return {
            item: data
            for name, of_array in by_array.items()
            for item, data in zip(of_array, found[name], strict=True)
        }
