"""The arrays of a checkpoint; slicing reads them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry
from unickpt.format.reader_protocol import Reader
from unickpt.quoting import quoted, size_text
from unickpt.reading.array_reader import read_box


class StoredArray:
    """An array of a checkpoint; slicing reads it.

    `x[10:20, ::2]` gives a NumPy array and reads only the chunks it needs.
    """

    def __init__(
        self, checkpoint: Mapping[str, StoredArray], reader: Reader, name: str, entry: ArrayEntry
    ) -> None:
        self._checkpoint, self._reader = checkpoint, reader
        self.name, self._entry = name, entry

    @property
    def shape(self) -> tuple[int, ...]:
        return self._entry.shape

    @property
    def dtype(self) -> dtypes.DType:
        return dtypes.from_name(self._entry.dtype)

    @property
    def layout(self) -> Layout | None:
        """How the writer's mesh split it; None if no layout describes the fragments."""
        return self._entry.layout

    @property
    def fragments(self) -> tuple[tuple[Box, tuple[int, ...]], ...]:
        """Every fragment that was saved: its box and the processes that held it."""
        if self._entry.boxes is not None:
            return self._entry.boxes
        assert self._entry.layout is not None
        return tuple(self._entry.layout.fragments(self.shape))

    @property
    def parts(self) -> tuple[Part, ...]:
        """The stored zarr arrays that carry it; usually one."""
        return tuple(chunk_grid.parts(self._entry))

    @property
    def chunk(self) -> tuple[int, ...]:
        return self._entry.chunk

    @property
    def nbytes(self) -> int:
        return self._entry.nbytes

    @property
    def url(self) -> str:
        """The URL with which TensorStore opens it, if it has a single part; empty if it cannot."""
        if self._entry.codec is not None or self._entry.composed:
            return ""
        whole = Part.whole(self._entry.name, self.shape, self.chunk)
        return self._reader.part_url(self.parts[0] if len(self.parts) == 1 else whole)

    def read(self, box: Box, *, verify: bool = True) -> Array:
        """Reads a box.

        Arguments:
            box: in the array's coordinates.
            verify: whether to check each chunk that is read against its digest.

        Returns:
            A new NumPy array of the box's shape.

        Raises:
            IndexError: the box does not lie within the array.
            CheckpointCorrupt: a chunk is damaged.
            CheckpointReplaced: a save replaced the checkpoint since it was opened.
        """
        if len(box.start) != len(self.shape) or not Box.whole(self.shape).contains(box):
            raise IndexError(f"box {box} does not lie within {self.name!r} of shape {self.shape}")
        return read_box(self._reader, self._entry, box, verify=verify)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._checkpoint, self.name)

    def __getitem__(self, key: Any) -> Array:
        box, inner_index = _parse(key, self.shape, self.name)
        array: Array = self.read(box)[inner_index]
        return array

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name!r} must be read from storage, so copy=False is invalid")
        array = self.read(Box.whole(self.shape))  # `self[...]` of no axes is a scalar
        return array if dtype is None else np.asarray(array, dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def tensorstore(self) -> ts.TensorStore:
        """The array as a read-only TensorStore, for lazy expressions and asynchronous reads.

        TensorStore does not know the digests, so it does not check what it reads.

        Raises:
            UnsupportedFormat: its codec is none of Zarr's, some of its chunks are patches, or
                TensorStore cannot read the format.
        """
        self._reader.check_backed(self._entry)
        layers = []
        for part in self.parts:
            array = self._reader.open_part(self._entry, part)
            if len(self.parts) > 1:
                array = array[ts.d[:].translate_to[part.box.start]]
            layers.append(array)
        if not layers:
            empty = np.empty(self.shape, ts.dtype(dtypes.stored_as(self._entry.dtype)).numpy_dtype)
            return ts.array(empty)
        return layers[0] if len(layers) == 1 else ts.overlay(layers)

    def __repr__(self) -> str:
        layout = "" if self.layout is None or not self.layout.mesh.shape else f", {self.layout}"
        return f"StoredArray({quoted(self.name)}, {self._entry.dtype_and_shape}{layout})"

    def _repr_html_(self) -> str:
        """The stored facts, with a map of the fragments, for notebooks; reads nothing."""
        from unickpt.display import html, tree_table  # here, so that importing unickpt stays fast

        entry = self._entry
        facts = [
            html.shape_text(self.shape),
            entry.stored_dtype,
            size_text(self.nbytes),
            f"chunks of {html.shape_text(self.chunk)}",
            "" if self.layout is None else str(self.layout),
        ]
        count = tree_table.fragment_count(entry)
        fragments = self.fragments if count <= html.MOST_FRAGMENTS else ()
        drawn = html.fragments(self.shape, count, fragments, self.layout)
        return html.page("StoredArray", self.name, filter(None, facts), drawn)


def _parse(key: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """NumPy basic indexing as the box to read and the remaining index within it."""
    items = list(key) if isinstance(key, tuple) else [key]
    if any(item is Ellipsis for item in items):
        position = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[position : position + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) > len(shape):
        raise IndexError(f"too many indices for {name!r} of shape {shape}")
    start, stop = [], []
    inner_index: list[int | slice] = []
    for item, n in zip(items, shape, strict=True):
        if isinstance(item, slice):
            picked = range(n)[item]
            low = min(picked[0], picked[-1]) if picked else 0
            high = max(picked[0], picked[-1]) + 1 if picked else 0
            inner_index.append(slice(None, None, picked.step))
        elif hasattr(item, "__index__") and not np.ndim(item):
            i = item.__index__()
            if not -n <= i < n:
                raise IndexError(f"index {i} is out of bounds for {name!r} of shape {shape}")
            low, high = i % n, i % n + 1
            inner_index.append(0)
        else:
            raise IndexError(
                f"{name!r} takes integers and slices, not {quoted(item)}; for other indices read "
                "it first, as array[...]"
            )
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop)), tuple(inner_index)
