"""Orbax checkpoints of version 0 and 1, as a `Reader`. Everything is read through TensorStore."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.backends.orbax import folders, metadata, zarr
from unickpt.backends.orbax.aggregate import Inline
from unickpt.backends.orbax.folders import CheckpointFolder
from unickpt.backends.orbax.items import Located
from unickpt.backends.orbax.metadata import NamedTuple
from unickpt.backends.orbax.zarr import ZarrArray
from unickpt.errors import UnsupportedLeaf
from unickpt.extend import (
    Array,
    ArrayEntry,
    Box,
    Expansion,
    Files,
    Index,
    Layout,
    Part,
    Pool,
    Reader,
    Request,
    SavedArrays,
    dtype_from_name,
    flatten_tree,
    is_plain,
    leaves_of_tree,
    open_own,
    reading,
    storage_context,
    tree_to_json,
)

_THREADS = 16

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an item, or a checkpoint with all of its items; None if there is none of Orbax.

    Raises:
        CheckpointNotFound: Orbax has not committed it, it is a run of several steps, or a step with
            an item of ours and others.
        CheckpointCorrupt: metadata is damaged, or a file is missing.
        UnsupportedFormat: an array has a dtype or a codec that is not known.
        StorageError: the storage failed.
    """
    # Shared by all reads: it keeps the manifests of databases as they are now.
    context = storage_context()
    with reading(files.location):
        if (own_item := folders.own_item(files)) is not None:
            return open_own(files.location.child(own_item))
        contents = folders.find(files, context)
        return None if contents is None else OrbaxReader(files, contents, context)


class OrbaxReader(Reader):
    """Reads a checkpoint, or an item of it.

    Arguments:
        files: its folder.
        contents: of the folder.
        context: that located its arrays.

    Raises:
        CheckpointCorrupt: its tree cannot be, or a number is damaged.
        StorageError: the storage failed.
    """

    format, version = "orbax", ""
    most_per_byte = 1 << 10  # chunks may be compressed, or left out

    def __init__(self, files: Files, contents: CheckpointFolder, context: ts.Context) -> None:
        self.location, self._files, self._context = files.location, files, context
        self.lacks = contents.lacks
        try:
            node = flatten_tree(contents.tree, _is_leaf, _expand)
        except UnsupportedLeaf as error:
            raise files.damaged(f"{error}") from error
        self._open: dict[str, ts.TensorStore] = {}
        self._arrays, self._inline = dict[str, Located](), dict[str, Reader]()
        scalars, values = dict[str, Located](), dict[str, Any]()
        for leaf in leaves_of_tree(node):
            if isinstance(leaf.value, Inline):
                self._inline[leaf.name] = leaf.value.reader(leaf.name)
            elif not isinstance(leaf.value, Located):
                values[leaf.name] = leaf.value
            elif leaf.value.is_scalar and _is_number(leaf.value.array):
                scalars[leaf.name] = leaf.value
            else:
                self._arrays[leaf.name] = leaf.value
        values |= self._numbers(scalars)
        self.saved = SavedArrays(
            {*self._inline, *(name for name, leaf in self._arrays.items() if leaf.is_numpy)},
            metadata.meshes(leaf.sharding for leaf in self._arrays.values()),
        )
        entries = {name: inline.index.arrays[name] for name, inline in self._inline.items()}
        for name, located in self._arrays.items():
            array = located.array
            layout = located.layout or Layout.replicated(len(array.shape), 1)
            facts = name, array.shape, array.dtype, array.read_at_once, layout
            entries[name] = ArrayEntry(*facts, prng=located.prng)
        self.index = Index(
            tree_to_json(node),
            entries,
            values=values,
            metadata=contents.metadata,
            library="orbax-checkpoint",
            created=contents.created,
        )

    def _numbers(self, scalars: Mapping[str, Located]) -> dict[str, Any]:
        """The values that are numbers."""
        if not scalars:
            return {}

        def number(name: str) -> Any:
            leaf = scalars[name]
            out = np.empty((), dtype_from_name(leaf.array.dtype))
            self._read(name, leaf, Box((), ()), out)
            return out.item()

        with Pool(min(_THREADS, len(scalars))) as threads:
            return dict(zip(scalars, threads.map(number, list(scalars)), strict=True))

    def check_backed(self, entry: ArrayEntry) -> None:
        if entry.name in self._inline:
            self._inline[entry.name].check_backed(entry)
            return
        with reading(f"{self.location}: array {entry.name!r}"):
            self._arrays[entry.name].check_ends()

    def stored_bytes(self) -> int | None:
        with reading(self.location):
            return self._files.total(self._files.names)

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        started = [self._start(request) for request in requests]
        for request, values in zip(requests, started, strict=True):
            self._finish(request, values)
        return ()

    def _start(self, request: Request) -> Any:
        """Starts to read a small chunk; None for others."""
        entry, part, number, *_ = request
        if entry.name in self._inline:
            return None
        leaf, box = self._arrays[entry.name], part.chunk_box(number)
        nbytes = box.size * dtype_from_name(entry.dtype).itemsize
        if max(nbytes, leaf.array.chunk_bytes) > zarr.SMALL:
            return None
        with reading(f"{self.location}: array {entry.name!r} {box}"):
            return leaf.start(self._opened(entry.name, leaf), box)

    def _finish(self, request: Request, started: Any) -> None:
        entry, part, number, out, *_ = request
        if entry.name in self._inline:
            self._inline[entry.name].read([request])
            return
        leaf, box = self._arrays[entry.name], part.chunk_box(number)
        if started is None:
            self._read(entry.name, leaf, box, out)
            return
        with reading(f"{self.location}: array {entry.name!r} {box}"):
            out[...] = started.result().view(out.dtype)

    def _read(self, name: str, leaf: Located, box: Box, out: Array) -> None:
        with reading(f"{self.location}: array {name!r} {box}"):
            leaf.read(self._opened(name, leaf), box, out, self._context)

    def _opened(self, name: str, leaf: Located) -> ts.TensorStore:
        store = self._open.get(name)
        if store is None:  # two threads may open it
            store = self._open[name] = leaf.opened(self._context)
        return store

    def open_part(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        if entry.name in self._inline:
            return super().open_part(entry, part)
        with reading(f"{self.location}: array {entry.name!r}"):
            return self._opened(entry.name, self._arrays[entry.name])


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (Located, Inline)) or is_plain(value)


def _expand(value: Any, name: str) -> Expansion | None:
    return value.expanded() if isinstance(value, NamedTuple) else None


def _is_number(array: ZarrArray) -> bool:
    """Whether a number is a plain value, which complex ones are not."""
    kind = dtype_from_name(array.dtype).kind
    return array.shape == () and kind in "biuf"
