"""The arrays of a checkpoint as rows, the layouts they have, and maps of their fragments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from unickpt import Checkpoint
from unickpt.extend import (
    MOST_FRAGMENTS_SHOWN,
    ArrayEntry,
    FragmentGrid,
    GridBand,
    fragment_count,
    fragment_grids,
    grid_band_text,
    layout_text,
    meshes_of,
    shape_text,
    shown_text,
)
from unickpt.types import Mesh

_MOST_ARRAYS = 5000
_MOST_MAPS = 200
_MOST_FRAGMENTS = 40_000
"""Of all arrays whose maps are drawn: each takes some 30 us."""
_MOST_NAME = 300
MOST_BYTES = 1 << 63
"""An index may claim any size; the page counts in floats."""


def describe_arrays(checkpoint: Checkpoint) -> dict[str, Any]:
    """The arrays of a checkpoint for the page, the largest first.

    Returns:
        `rows`, for each array [name, dtype, shape, bytes, number of its layout, fragments, number
        of its map or -1]; `layouts`, texts; `maps`, see `_map`; `more` and `more_bytes`, of the
        arrays that are left out.
    """
    index = checkpoint.index
    entries = sorted(index.arrays.values(), key=lambda entry: -entry.nbytes)
    shown = entries[:_MOST_ARRAYS]
    layouts, maps = dict[str, int](), _Maps(checkpoint)
    several = len(meshes_of(index)) > 1
    rows = [
        [
            shown_text(entry.name, _MOST_NAME),
            _dtype(entry),
            shown_text(shape_text(entry.shape)),
            min(entry.nbytes, MOST_BYTES),
            layouts.setdefault(shown_text(_layout(entry, several)), len(layouts)),
            fragment_count(entry),
            maps.number(entry),
        ]
        for entry in shown
    ]
    return {
        "rows": rows,
        "layouts": list(layouts),
        "maps": maps.drawn,
        "more": len(entries) - len(shown),
        "more_bytes": min(sum(entry.nbytes for entry in entries[_MOST_ARRAYS:]), MOST_BYTES),
    }


def mesh_facts(meshes: Iterable[Mesh], processes: int) -> list[dict[str, Any]]:
    """The meshes that can show values of each process, the largest first."""
    facts = []
    for mesh in sorted(meshes, key=lambda mesh: -len(mesh.processes)):
        if max(mesh.processes) >= processes:
            continue
        in_order = mesh.processes == tuple(range(len(mesh.processes)))
        facts.append(
            {
                "axes": [shown_text(axis, 40) for axis in mesh.axes],
                "shape": list(mesh.shape),
                "processes": None if in_order else list(mesh.processes),
            }
        )
    return facts


class _Maps:
    """The maps of arrays; equal ones are drawn once, and not more than a browser should get."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.drawn: list[dict[str, Any]] = []
        self._checkpoint, self._left = checkpoint, _MOST_FRAGMENTS
        self._numbers: dict[Any, int] = {}

    def number(self, entry: ArrayEntry) -> int:
        """The number of an array's map; -1 if it has none."""
        key = entry.shape, entry.layout, entry.boxes
        if key in self._numbers:
            return self._numbers[key]
        count = fragment_count(entry)
        self._left -= min(count, MOST_FRAGMENTS_SHOWN)
        if not 0 < count <= MOST_FRAGMENTS_SHOWN or self._left < 0 or len(self.drawn) >= _MOST_MAPS:
            return -1
        fragments = self._checkpoint[entry.name].fragments
        self.drawn.append(_map(next(fragment_grids(entry.shape, fragments, entry.layout))))
        self._numbers[key] = len(self.drawn) - 1
        return self._numbers[key]


def _map(grid: FragmentGrid) -> dict[str, Any]:
    """A grid with the labels of those fragments alone that are in it."""
    used = sorted({owner for row in grid.owner for owner in row if owner is not None})
    place = {owner: number for number, owner in enumerate(used)}
    return {
        "down": None if grid.down is None else _heads(grid.rows),
        "across": None if grid.across is None else _heads(grid.columns),
        "owner": [[-1 if o is None else place[o] for o in row] for row in grid.owner],
        "labels": [list(grid.labels[owner]) for owner in used],
        "remark": grid.remark,
    }


def _heads(slots: Sequence[GridBand]) -> list[str]:
    return [grid_band_text(slot) for slot in slots]


def _layout(entry: ArrayEntry, several: bool) -> str:
    """The layout, with its mesh if there are several."""
    text = layout_text(entry.layout)
    if entry.layout is None or not several:
        return text
    mesh = entry.layout.mesh
    axes = ", ".join(f"{axis}={n}" for axis, n in zip(mesh.axes, mesh.shape, strict=True))
    return f"{text} on ({axes})"


def _dtype(entry: ArrayEntry) -> str:
    dtype = entry.stored_dtype
    return dtype if entry.prng is None else f"{dtype} key"
