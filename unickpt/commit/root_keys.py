"""All keys of a root database in order, each with where its value is; nothing here does I/O.

The keys of a part's chunks follow from its grid, so they are not compared one by one: only those of
parts and of single values are sorted.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress, product
from operator import attrgetter
from typing import Any

import numpy as np

from unickpt.commit.merge_chunks import PATCHED, WHOLE, Chunks
from unickpt.commit.record import Place
from unickpt.format import chunk_grid, patches, zarr_metadata
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.zarr_metadata import join_key
from unickpt.storage.btree.builder import PLACE_DTYPE, TreeEntries

Column = np.ndarray[Any, Any]


def runs(index: Index, chunks: Chunks, extra: Mapping[str, Place]) -> Iterator[TreeEntries]:
    """All entries of the root database of a checkpoint.

    Arguments:
        index: of the checkpoint.
        chunks: all of its chunks.
        extra: of the values that are neither chunks nor per-process values, by key.
    """
    others = {**extra, **chunks.blobs}
    keys, rows, grids = [key.encode() for key in others], list[int](), list[_Grid]()
    patch_places = np.zeros(0, PLACE_DTYPE)
    if len(chunks.patches):  # a row for each chunk, as of the others
        patch_places = np.zeros(len(chunks.kinds), PLACE_DTYPE)
        patch_places[chunks.kinds == PATCHED] = chunks.patches
    first = 0
    for entry in index.arrays.values():
        is_whole = not entry.patched and not index.bases
        for part in chunk_grid.parts(entry):
            count = part.count
            if count == 1 and is_whole:
                keys.append(zarr_metadata.chunk_key(part, 0).encode())
                rows.append(first)
            else:
                own = slice(first, first + count)
                grids += _grids(part, entry, chunks, patch_places, own)
            first += count
    places = np.concatenate(
        [np.array(list(others.values()), PLACE_DTYPE), chunks.places[np.array(rows, np.int64)]]
    )
    order = sorted(range(len(keys)), key=keys.__getitem__)
    yield from _ordered([keys[at] for at in order], places[order], grids)


def _grids(
    part: Part, entry: ArrayEntry, chunks: Chunks, patch_places: Column, rows: slice
) -> Iterator[_Grid]:
    """The chunks of a part, and the patches and full chunks of those that are patched."""
    kinds, places = chunks.kinds[rows], chunks.places[rows]
    yield _Grid(part, places, kinds == WHOLE)
    if entry.patched:
        is_patch = kinds == PATCHED
        yield _Grid(patches.full_of(part), places, is_patch)
        yield _Grid(patches.patch_of(part), patch_places[rows], is_patch)


@dataclass(frozen=True, eq=False)
class _Grid:
    """Some chunks of a part.

    Arguments:
        part: the part.
        places: of all its chunks, by their numbers.
        chosen: for each of all its chunks whether it is one of these.
    """

    part: Part
    places: Column
    chosen: Column

    @property
    def prefix(self) -> bytes:
        """Of the keys of these chunks, and of no other key."""
        return join_key(self.part.key, "c").encode()

    def run(self, orders: _Orders) -> TreeEntries:
        """Their entries."""
        tails, numbers = orders.of(self.part.grid)
        prefix, chosen = self.prefix, self.chosen[numbers]
        if not chosen.all():
            tails, numbers = list(compress(tails, chosen.tolist())), numbers[chosen]
        return TreeEntries([prefix + tail for tail in tails], self.places[numbers])


class _Orders:
    """How the keys of the chunks of a grid end, ascending, and the chunks' numbers; kept for the
    next part, which often has the same grid."""

    def __init__(self) -> None:
        self._grid: tuple[int, ...] | None = None
        self._found: tuple[list[bytes], Column] = ([], np.zeros(0, np.int64))

    def of(self, grid: tuple[int, ...]) -> tuple[list[bytes], Column]:
        """Those of a grid."""
        if grid != self._grid:
            # "/" and the end of a key come before all digits: the order is that of the components.
            along = [sorted((b"/%d" % n, n) for n in range(extent)) for extent in grid]
            tails = [b"".join(parts) for parts in product(*([t for t, _ in d] for d in along))]
            every = np.arange(math.prod(grid)).reshape(grid)
            self._found = tails, every[np.ix_(*([n for _, n in d] for d in along))].reshape(-1)
            self._grid = grid
        return self._found


def _ordered(
    keys: Sequence[bytes], places: Column, grids: Sequence[_Grid]
) -> Iterator[TreeEntries]:
    """Entries, and between them those of grids, all in order."""
    at, orders = 0, _Orders()
    for grid in sorted(grids, key=attrgetter("prefix")):
        end = bisect_left(keys, grid.prefix, at)
        if end > at:
            yield TreeEntries(keys[at:end], places[at:end])
        at = end
        yield grid.run(orders)
    if at < len(keys):
        yield TreeEntries(keys[at:], places[at:])
