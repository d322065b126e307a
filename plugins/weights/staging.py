"""An update before it is live: which chunks and arrays differ, and the changes, in separate memory.

A chunk that an array of the engine shows without arithmetic is made from the live elements and
patches. Of arrays that rules compute, all sources are read again if one of them changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import local
from typing import Any, NamedTuple

import numpy as np

from unickpt import LoadOptions
from unickpt.extend import (
    Array,
    Box,
    HostBuffers,
    LoadRequest,
    OcdbtReader,
    Part,
    Pool,
    View,
    dtype_from_name,
    numbered_parts,
    read_boxes,
    strided_view,
)
from unickpt.plugins.weights.chunk_states import (
    ChunkState,
    VersionChunk,
    VersionReader,
    digest_in_memory,
)
from unickpt.plugins.weights.live_arrays import (
    Change,
    ElementsChange,
    LiveLeaf,
    MemoryChange,
    change_of,
    live_leaves,
)
from unickpt.plugins.weights.page_swap import with_pages

_COMPUTED_BYTES = 64 << 20  # memory for boxes that rules compute, beyond one of them


class ShownBox(NamedTuple):
    """A box of an array of the engine that shows a stored array.

    Arguments:
        leaf: the array.
        position: of the box.
        needed: what it needs of the stored array.
    """

    leaf: LiveLeaf
    position: int
    needed: Any


class Grid(NamedTuple):
    """How a stored array is cut and encoded, and the digests of its chunks."""

    facts: Any
    digests: Array


@dataclass
class LiveState:
    """What a follower knows about the chunks that are live.

    Arguments:
        grids: of the stored arrays, by name.
        chunks: by keys of `VersionChunk`.
        copies: the elements of chunks of which the engine has only a part.
    """

    grids: dict[str, Grid] = field(default_factory=dict)
    chunks: dict[tuple[str, int], ChunkState] = field(default_factory=dict)
    copies: dict[tuple[str, int], Array] = field(default_factory=dict)


@dataclass
class StagedUpdate:
    """An update that is ready to go live.

    Arguments:
        changes: of the live memory.
        state: what is known of the chunks afterwards.
        leaves: the arrays of the engine.
        values: the leaves of its tree, by name; the changes put new ones in.
        read_bytes: read from the storage.
        read_s: seconds for which threads waited for them, together.
        staged_bytes: of the changes.
        chunks: how many were changed, and of these, read whole.
    """

    changes: list[Change]
    state: LiveState
    leaves: Mapping[str, LiveLeaf]
    values: dict[str, Any]
    read_bytes: int = 0
    read_s: float = 0.0
    staged_bytes: int = 0
    chunks: tuple[int, int] = (0, 0)


class Stager:
    """Stages a version beside the live one.

    Arguments:
        view, request: of the version and the engine's tree.
        live: what is known of the live chunks; not changed.
        replaced: arrays of the engine whose elements are unknown, as they are in other memory.
        keep_copies: whether to keep the elements of chunks of which the engine has only a part.
        most_undo: bytes of earlier states to keep.
        threads: how many read.
        spared: tensors that take the memory of the request's in the flip, by name.
        pages: whether the flip exchanges pages, where that is possible.
    """

    def __init__(
        self,
        view: View,
        request: LoadRequest,
        live: LiveState,
        *,
        replaced: Collection[str],
        keep_copies: bool,
        most_undo: int,
        threads: int,
        spared: Mapping[str, Any],
        pages: bool,
    ) -> None:
        assert isinstance(view.checkpoint, OcdbtReader), "it was checked"
        self._replaced = replaced
        self._view, self._live, self._reader = view, live, VersionReader(view.checkpoint)
        self._keep_copies, self._most_undo, self._threads = keep_copies, most_undo, threads
        self._leaves, self._spared, self._pages = live_leaves(request), spared, pages
        self._changes: dict[str, list[ElementsChange]] = {name: [] for name in self._leaves}
        self._state = LiveState()
        self._scratch = local()
        self._read_bytes = self._undo_bytes = self._whole = self._changed = 0
        self._values = dict(request.leaves)

    def stage(self) -> StagedUpdate:
        """Reads and compares what changed.

        Raises:
            CheckpointCorrupt: stored bytes do not match their digest.
            StorageError: the storage failed.
        """
        shown, computed = self._consumers()
        arrays = self._view.checkpoint.index.arrays
        changed = set[str]()
        work = list[tuple[VersionChunk, ChunkState | None, Sequence[ShownBox]]]()
        for name in arrays:
            table = self._view.checkpoint.digests_of(name)
            assert table is not None, "unickpt's own format has digests"
            grid = Grid(_facts(arrays[name]), table["digest"].copy())
            live_grid = self._live.grids.get(name)
            live_grid = live_grid if live_grid and live_grid.facts == grid.facts else None
            self._state.grids[name] = grid
            if live_grid is None or not np.array_equal(live_grid.digests, grid.digests):
                changed.add(name)
            if name in shown:
                if any(consumer.leaf.name in self._replaced for consumer in shown[name]):
                    live_grid = None
                work += self._chunks(name, grid, live_grid, shown[name])
        with Pool(self._threads - 1, "unickpt weights") as pool:
            pending = [pool.submit(self._stage_chunk, *item) for item in work]
            try:
                for ended in pending:
                    self._count(*ended.result())
            finally:
                for ended in pending:
                    ended.cancel()
        for leaf in self._leaves.values():
            self._fill(leaf)
            sources = computed.get(leaf.name)
            if sources is not None and (
                not sources or sources & changed or leaf.name in self._replaced
            ):
                self._compute(leaf)
        return self._finished()

    def _consumers(self) -> tuple[dict[str, list[ShownBox]], dict[str, set[str]]]:
        """The consumers of each stored array; and the arrays that rules compute, with the names of
        their sources, none if unknown."""
        shown: dict[str, list[ShownBox]] = {}
        computed: dict[str, set[str]] = {}
        for name, leaf in self._leaves.items():
            recipe = self._view.recipe(self._stored_name(name))
            exact = recipe.function is None and all(
                source.is_exact and dtype_from_name(source.entry.dtype) == leaf.target.dtype
                for source in recipe.sources
            )
            if not exact:
                sources = set[str]() if recipe.function else {s.entry.name for s in recipe.sources}
                computed[name] = sources
                continue
            for position, box in enumerate(leaf.boxes):
                for source in recipe.sources:
                    needed = source.within(box)
                    if needed is not None:
                        consumer = ShownBox(leaf, position, needed)
                        shown.setdefault(source.entry.name, []).append(consumer)
        return shown, computed

    def _stored_name(self, name: str) -> str:
        """The name of an array in the view's index."""
        return self._view.index.aliases.get(name, name)

    def _chunks(
        self, name: str, grid: Grid, live_grid: Grid | None, consumers: Sequence[ShownBox]
    ) -> Iterator[tuple[VersionChunk, ChunkState | None, Sequence[ShownBox]]]:
        """The chunks of an array that are needed and may differ; keeps the others' states."""
        entry = self._view.checkpoint.index.arrays[name]
        for first, part in numbered_parts(entry):
            for number in sorted(set(_needed_chunks(part, consumers))):
                digest = int(grid.digests[first + number])
                chunk = VersionChunk(entry, part, number, digest)
                state = None
                if live_grid is not None:
                    state = self._live.chunks.get(chunk.key)
                if state is not None and state.digest == digest:
                    self._keep(chunk, state, self._live.copies.get(chunk.key))
                else:
                    yield chunk, state, consumers

    def _keep(self, chunk: VersionChunk, state: ChunkState, elements: Array | None) -> None:
        self._undo_bytes += state.nbytes
        if self._undo_bytes > self._most_undo:
            state = ChunkState(state.digest, state.patches)
        self._state.chunks[chunk.key] = state
        if elements is not None:
            self._state.copies[chunk.key] = elements

    def _count(
        self,
        chunk: VersionChunk,
        state: ChunkState,
        elements: Array | None,
        changes: Sequence[tuple[str, ElementsChange]],
        nbytes: int,
        is_whole: bool,
    ) -> None:
        """Adds the result of `_stage_chunk`."""
        self._keep(chunk, state, elements)
        for name, change in changes:
            self._changes[name].append(change)
        self._read_bytes += nbytes
        self._changed += bool(changes)
        self._whole += is_whole

    def _stage_chunk(
        self, chunk: VersionChunk, live: ChunkState | None, consumers: Sequence[ShownBox]
    ) -> tuple[Any, ...]:
        """Stages a chunk; the arguments of `_count`."""
        box = chunk.part.chunk_box(chunk.number)
        out = self._memory(box, chunk.entry.dtype)
        places = [
            (consumer, copy, _out_view(consumer, copy))
            for consumer in consumers
            for copy in consumer.needed.copies(box)
        ]
        before = self._live.copies.get(chunk.key)
        is_partial = before is None and not _gather(places, out)
        if before is not None:
            out[...] = before
        if live is None and not is_partial:  # as an engine has it that loaded weights elsewhere
            live = ChunkState(digest_in_memory(chunk, out))
        state, nbytes, is_whole = ChunkState(0), 0, False
        if live is not None and not is_partial and live.digest != chunk.digest:
            state, nbytes = self._reader.advance(chunk, live, out)
        elif live is not None and live.digest == chunk.digest:
            state = live
        if state.digest != chunk.digest:
            state, whole_bytes = self._reader.read(chunk, out)
            nbytes, is_whole = nbytes + whole_bytes, True
        changes = []
        for consumer, copy, view in places:
            change = change_of(view, strided_view(out, copy.source, copy.source_steps, copy.shape))
            if change is not None:
                changes.append((consumer.leaf.name, change))
        is_kept = self._keep_copies and (is_partial or before is not None)
        return chunk, state, out.copy() if is_kept else None, changes, nbytes, is_whole

    def _memory(self, box: Box, dtype: str) -> Array:
        """Memory for a chunk, which a thread uses again for the next."""
        nbytes = box.size * dtype_from_name(dtype).itemsize
        raw = getattr(self._scratch, "raw", None)
        if raw is None or raw.nbytes < nbytes:
            raw = self._scratch.raw = np.empty(nbytes, np.uint8)
        return raw[:nbytes].view(dtype_from_name(dtype)).reshape(box.shape)

    def _fill(self, leaf: LiveLeaf) -> None:
        """Stages the constants of a leaf."""
        for fill in self._view.recipe(self._stored_name(leaf.name)).fills:
            for position, box in enumerate(leaf.boxes):
                for copy in fill.copies(box):
                    view = strided_view(leaf.memory[position], copy.out, copy.out_steps, copy.shape)
                    self._add(leaf, view, np.full(copy.shape, fill.value, view.dtype))

    def _compute(self, leaf: LiveLeaf) -> None:
        """Stages a leaf that rules compute, box by box."""
        entry = self._view.index.entry(leaf.name)
        buffers = HostBuffers(_COMPUTED_BYTES)
        for position, box in enumerate(leaf.boxes):
            if box.empty:
                continue
            options = LoadOptions(verify=True)
            ((data, memory),) = read_boxes(self._view, [(entry, box)], options, buffers)
            self._read_bytes += data.nbytes
            self._add(leaf, leaf.memory[position], data)
            buffers.give(memory)

    def _add(self, leaf: LiveLeaf, view: Array, data: Array) -> None:
        change = change_of(view, data)
        if change is not None:
            self._changes[leaf.name].append(change)

    def _finished(self) -> StagedUpdate:
        changes, in_place = list[Change](), list[ElementsChange]()
        staged_bytes, memory = 0, list[Array]()
        for name, of_leaf in self._changes.items():
            leaf = self._leaves[name]
            if leaf.in_place and name not in self._spared:
                in_place += of_leaf
                memory += leaf.memory if of_leaf else ()
                continue
            staged_bytes += sum(change.nbytes for change in of_leaf)
            of_this: list[Change] = [*of_leaf]
            if not leaf.in_place and (of_leaf or leaf.target.abstract):
                of_this = [leaf.change(of_leaf, self._values)]
            if name in self._spared and of_this:
                for change in of_this:
                    change.apply()
                live = self._spared[name]
                of_this = [MemoryChange(live, leaf.leaf, live.detach())]
            changes += of_this
        self._changes.clear()
        staged = with_pages(in_place, memory, self._threads) if self._pages else in_place
        staged = sorted(staged, key=lambda change: -change.nbytes)  # threads take the next one each
        staged_bytes += sum(change.nbytes for change in staged)
        return StagedUpdate(
            [*staged, *changes],
            self._state,
            self._leaves,
            self._values,
            self._read_bytes,
            self._reader.seconds,
            staged_bytes,
            (self._changed, self._whole),
        )


def _facts(entry: Any) -> Any:
    """The facts on which the meaning of an array's chunks depends."""
    layout = entry.layout if entry.cut else None
    return (entry.shape, entry.dtype, entry.chunk, entry.cut, layout, entry.boxes, entry.encoding)


def _needed_chunks(part: Part, consumers: Sequence[ShownBox]) -> Iterator[int]:
    for consumer in consumers:
        for box in consumer.needed.boxes:
            yield from part.chunks_in(box)


def _out_view(consumer: ShownBox, copy: Any) -> Array:
    memory = consumer.leaf.memory[consumer.position]
    return strided_view(memory, copy.out, copy.out_steps, copy.shape)


def _identity(rank: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(int(i == j) for j in range(rank)) for i in range(rank))


def _gather(places: Sequence[tuple[ShownBox, Any, Array]], out: Array) -> bool:
    """Fills a chunk with the live elements; returns whether the engine has all of them."""
    is_there = None
    for consumer, copy, view in places:
        if consumer.leaf.target.abstract:
            continue
        strided_view(out, copy.source, copy.source_steps, copy.shape)[...] = view
        if copy.shape == out.shape and copy.source_steps == _identity(out.ndim):
            return True
        if is_there is None:
            is_there = np.zeros(out.shape, bool)
        strided_view(is_there, copy.source, copy.source_steps, copy.shape)[...] = True
    return is_there is not None and bool(is_there.all())
