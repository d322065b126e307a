"""Items of Orbax's checkpoints: trees of arrays, JSON, and files that only others understand.

Source: orbax/checkpoint/_src/handlers.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorstore as ts

from unickpt.backends._files.file_choice import is_flax
from unickpt.backends.orbax import aggregate, metadata, zarr
from unickpt.backends.orbax.metadata import NamedTuple, Stored
from unickpt.backends.orbax.zarr import InDatabase, InFolders, Store, ZarrArray
from unickpt.errors import CheckpointCorrupt, naming_memory
from unickpt.extend import (
    MANIFEST,
    Array,
    Box,
    Files,
    Layout,
    OcdbtDatabase,
    Pool,
    StorageFuture,
    asking_storage,
    dtype_and_shape,
    in_batches,
    quoted,
    reading,
    storage_context,
    zarr_dtype,
)

ITEM = "_METADATA"
"""The file that makes a folder an item of arrays."""
COMMITTED = "commit_success.txt"
METRICS = "metrics"
_JSON = "metadata"
_SHARDINGS, _TEXTS, _KEYS = "_sharding", "_strings.json", "array_metadatas/process_0"
_MOST_METADATA = 1 << 30
_MOST_OTHER = 8 << 20  # bytes of a file that only its library can interpret
_DEPTH = 3  # of items within items
_THREADS, _AT_ONCE = 16, 32
_DRIVERS = {2: "zarr", 3: "zarr3"}
# Memory for larger chunks is allocated only if enough bytes are stored; see `ChunkStore`.
_BELIEVED = 16 << 20


@dataclass(frozen=True)
class Item:
    """An item of a checkpoint.

    Arguments:
        tree: containers, plain values, `Located` and `Inline`.
        custom: metadata that the user added.
    """

    tree: Any
    custom: Mapping[str, Any]


@dataclass(frozen=True)
class Located:
    """An array, or a number that is stored as one.

    Arguments:
        store: where it is.
        name: its name there.
        array: its metadata.
        fill: whether missing chunks are legal.
        is_scalar: whether it is a number.
        is_numpy: whether it was an array of NumPy.
        layout: how it was sharded; None if that is not recorded.
        sharding: the same, as recorded.
        prng: as of `ArrayEntry`.
    """

    store: Store
    name: str
    array: ZarrArray
    fill: bool
    is_scalar: bool = False
    is_numpy: bool = False
    layout: Layout | None = None
    sharding: Any = None
    prng: str | None = None

    def opened(self, context: ts.Context) -> ts.TensorStore:
        """The array as a TensorStore; opened without I/O.

        Arguments:
            context: as for the store.

        Raises:
            Damaged: the metadata contradicts itself.
        """
        spec = {
            "driver": _DRIVERS[self.array.version],
            "kvstore": self.store.spec(self.name),
            "metadata": dict(self.array.metadata),
            "fill_missing_data_reads": self.fill,
        }
        with asking_storage():
            return ts.open(spec, context=context, open=True, assume_metadata=True).result()

    def start(self, source: ts.TensorStore, box: Box) -> StorageFuture[Any]:
        """Starts to read a small box into new memory; raises as `read`."""
        self._check(self.array.keys(box))
        with asking_storage():
            return StorageFuture(source[box.slices].read())

    def read(self, source: ts.TensorStore, box: Box, out: Array, context: ts.Context) -> None:
        """Reads a box into contiguous memory.

        Raises:
            Damaged: a chunk is missing or cannot be decoded.
            OutOfMemory: this machine has no memory for a chunk, for which TensorStore would abort
                the process.
            Failed: the storage failed.
        """
        if self.array.chunk_bytes > _BELIEVED:
            facts = dtype_and_shape(self.array.dtype, self.array.chunk)
            with naming_memory(f"a chunk of {facts}"):
                np.empty(self.array.chunk_bytes, np.uint8)
        self._check(self.array.keys(box))
        stored = ts.dtype(zarr_dtype(self.array.dtype)).numpy_dtype
        with asking_storage():
            target = ts.array(out if out.dtype == stored else out.view(stored), context=context)
            target.write(source[box.slices]).result()

    def check_ends(self) -> None:
        """Checks that the first and the last chunk are there, if they must be.

        Raises:
            Damaged: one is not, or is too small.
        """
        if math.prod(self.array.shape):
            ends = Box.whole(self.array.shape)
            last = Box(tuple(n - 1 for n in ends.stop), ends.stop)
            first = Box(ends.start, tuple(1 for _ in ends.stop))
            self._check(key for box in (first, last) for key in self.array.keys(box))

    def _check(self, keys: Iterable[str]) -> None:
        self.store.check(self.name, keys, self.array.least_stored, fill=self.fill)


def any_item(files: Files, context: ts.Context, depth: int = _DEPTH, json_file: str = "") -> Item:
    """An item of any kind: arrays, JSON, items of items, or files that only others understand.

    Arguments:
        json_file: the file that is all of it, if that is known.
    """
    if is_item(files):
        return read_item(files, context)
    if json_file in files.here:
        return Item(read_json(files, json_file), {})
    below = folders(files)
    sign = next((name for name in (MANIFEST, _SHARDINGS) if name in files.here), None)
    if sign is not None:
        raise files.incomplete(f"{ITEM} is missing, which lists the arrays that {sign} is for")
    content: dict[str, Any] = {}
    for file in files.here:
        if file == COMMITTED:
            continue
        if file == _JSON or (file == METRICS and not below):
            return Item(read_json(files, file), {})
        content[file] = _whole(files, file, _MOST_OTHER)
    if below and depth == 1:
        raise files.unsupported(
            "an item of a kind that is not known; open the items that are needed by their own paths"
        )
    for name in below:
        content[name] = any_item(Files(files.location.child(name)), context, depth - 1).tree
    return Item(content, {})


def is_item(files: Files, above: str = "") -> bool:
    """Whether a folder is an item of arrays.

    Arguments:
        files: of the checkpoint.
        above: the folder, a path that ends with a slash; that of the checkpoint by default.
    """
    if has(files, above + ITEM):
        return True
    if files.single is not None or not has(files, above + aggregate.FILE):
        return False
    if is_flax(files.head(above + aggregate.FILE)) or has(files, above + MANIFEST):
        return True
    name = zarr.METADATA[2]
    return any(has(files, f"{above}{below}/{name}") for below in folders(files, above))


def is_json(files: Files, name: str) -> bool:
    """Whether a folder is an item that is JSON, as version 0 writes it."""
    return has(files, f"{name}/{_JSON}")


def read_item(files: Files, context: ts.Context) -> Item:
    """An item of arrays."""
    description = _described(files)
    leaves = description.stored
    texts = [leaf.name for leaf in leaves if leaf.kind == "text"]
    values: dict[Stored, Any] = {}
    if texts:
        if not has(files, _TEXTS):
            raise files.damaged(f"{_TEXTS} with {quoted(texts[0])} is missing")
        of_name = metadata.texts(_whole(files, _TEXTS), texts, f"{files.location}: {_TEXTS}")
        values.update({leaf: of_name[leaf.name] for leaf in leaves if leaf.kind == "text"})
    arrays = [leaf for leaf in leaves if leaf.kind != "text"]
    if arrays:
        values.update(zip(arrays, _locate(files, description, arrays, context), strict=True))
    return Item(_replaced(description.tree, values), description.custom)


def _described(files: Files) -> metadata.ItemMetadata:
    """The content of an item: `_METADATA`, with the values that old versions keep elsewhere."""
    description = None
    if has(files, ITEM):
        description = metadata.item(_whole(files, ITEM), f"{files.location}: {ITEM}")
    if description is not None and not has(files, aggregate.FILE):
        return description
    return aggregate.added(files, description)


def _replaced(content: Any, values: Mapping[Stored, Any]) -> Any:
    if isinstance(content, Stored):
        return values[content]
    if isinstance(content, NamedTuple):
        return NamedTuple(content.type_name, _replaced(content.fields, values))
    if isinstance(content, Mapping):
        return {key: _replaced(child, values) for key, child in content.items()}
    if isinstance(content, (list, tuple)):
        return type(content)(_replaced(child, values) for child in content)
    return content


def _locate(
    files: Files, item: metadata.ItemMetadata, leaves: list[Stored], context: ts.Context
) -> list[Located]:
    """The arrays of an item."""
    store = _store(files, item, context)
    shardings = _optional(files, _SHARDINGS, metadata.shardings)
    keys = _optional(files, _KEYS, metadata.key_implementations)

    def located(leaf: Stored) -> Located:
        where = f"{files.location}: array {quoted(leaf.name)}"
        key = zarr.below(leaf.name, zarr.METADATA[item.version])
        with reading(where):
            data = store.read(key)
        if data is None:
            raise CheckpointCorrupt(
                f"{where}: there is no {quoted(key)}; was the folder copied as a whole?"
            )
        array = zarr.parse(item.version, data, where)
        if leaf.facts not in (None, (array.dtype, array.shape)):
            raise CheckpointCorrupt(
                f"{where} is {dtype_and_shape(array.dtype, array.shape)}, and "
                f"{dtype_and_shape(*leaf.facts)} by the file {aggregate.FILE!r}; are both of one "
                "save?"
            )
        sharding = shardings.get(leaf.name)
        layout = metadata.layout(sharding, len(array.shape), f"{where}: {_SHARDINGS}")
        kinds = leaf.kind == "scalar", leaf.kind == "numpy"
        how = layout, sharding, keys.get(leaf.name)
        return Located(store, leaf.name, array, item.fill, *kinds, *how)

    batches = list(in_batches(leaves, _AT_ONCE))
    with Pool(max(1, min(_THREADS, len(batches)))) as threads:
        arrays_by_batch = threads.map(lambda batch: [located(leaf) for leaf in batch], batches)
        return [located_array for batch in arrays_by_batch for located_array in batch]


def _store(files: Files, item: metadata.ItemMetadata, context: ts.Context) -> Store:
    pinned = OcdbtDatabase(files.location, context).pinned() if item.ocdbt is not False else None
    if pinned is not None:
        return InDatabase(pinned)
    if item.ocdbt:
        raise files.damaged(
            f"there is no {MANIFEST}, which leads to the arrays; the save did not finish, or "
            "the folder was not copied as a whole"
        )
    return InFolders(files)


def _optional(
    files: Files, file: str, read: Callable[[bytes, str], dict[str, Any]]
) -> dict[str, Any]:
    """The content of a file that older versions do not write."""
    if not has(files, file):
        return {}
    return read(_whole(files, file), f"{files.location}: {file}")


# --- files --------------------------------------------------------------------------------------


def folders(files: Files, above: str = "") -> list[str]:
    """The names of the folders directly in one.

    Arguments:
        files: of the checkpoint.
        above: the folder, a path that ends with a slash; that of the checkpoint by default.
    """
    if files.location.is_local:
        location = files.location.child(above) if above else files.location
        return location.folders(storage_context())
    # In object storage all is listed anyway, once.
    below = (name[len(above) :] for name in files.names if name.startswith(above))
    return sorted({name.partition("/")[0] for name in below if "/" in name})


def has(files: Files, file: str) -> bool:
    """Whether there is a file; without a request to object storage."""
    if files.location.is_local:
        return files.exists(file)
    index = bisect_left(files.names, file)
    return files.names[index : index + 1] == [file]


def read_json(files: Files, file: str) -> Any:
    try:
        return json.loads(_whole(files, file))
    except (ValueError, RecursionError) as error:
        raise files.damaged(f"{file} is not valid JSON: {error}") from error


def _whole(files: Files, file: str, most: int = _MOST_METADATA) -> bytes:
    data = files.tail(file, most + 1)
    if len(data) > most:
        raise files.unsupported(
            f"{file} has more than {most} bytes; open the items that are needed by their own paths"
        )
    return data
