"""open(): reads a committed checkpoint lazily, without any framework."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, ValuesView
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np
import tensorstore as ts

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.arrays.layout import Layout
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, CheckpointReplaced, UnickptError
from unickpt.format import chunk_grid, chunk_store, digest_table, index_json
from unickpt.format.chunk_grid import Part
from unickpt.format.chunk_store import ChunkStore
from unickpt.format.index import DIGESTS_KEY, INDEX_KEY, ArrayEntry, Index
from unickpt.frameworks.per_process import blob_key
from unickpt.quoting import quoted, shortened
from unickpt.reading.chunk_reader import read_box
from unickpt.reading.listing import checkpoints_below
from unickpt.storage import contexts, errors, locations, ocdbt
from unickpt.storage.kvstore import Failed
from unickpt.trees import plain_values

T = TypeVar("T")

# How often a reader starts again because a save replaced the checkpoint.
_OPENINGS = 50
_READINGS = 20
_SHOWN = 8  # names of checkpoints, in a message


def open(path: locations.Path) -> Checkpoint:
    """Opens a checkpoint by reading its index, one small object; arrays are read on access.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs).

    If a save replaces the checkpoint during the call, the new one is opened.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be opened.
        CheckpointCorrupt: its index is damaged.
        UnsupportedFormat: it was written by a newer unickpt.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/open", {"w": np.arange(6).reshape(2, 3)})
        >>> unickpt.open("memory://run/open")["w"][1, :2]
        array([3, 4])
    """
    location = locations.resolve(path)
    return again(lambda: _open(location), _OPENINGS)


def reading(path: locations.Path, work: Callable[[Checkpoint], T]) -> T:
    """Opens a checkpoint and reads from it; starts again if a save replaces it during the read.

    Arguments:
        path: as for `open`.
        work: reads; its result is discarded if it has to start again.

    Raises:
        CheckpointReplaced: saves replaced it repeatedly.
    """
    return again(lambda: work(open(path)), _READINGS)


def again(work: Callable[[], T], times: int = _READINGS) -> T:
    """Calls `work`, and calls it again if it raises CheckpointReplaced."""
    replaced = None
    for _ in range(times):
        try:
            return work()
        except CheckpointReplaced as error:
            replaced = error  # opened again it is the new one, or gone
        except CheckpointNotFound as error:
            if replaced is None:
                raise
            raise CheckpointNotFound(
                f"{error}. It existed a moment ago and was removed while it was being read"
            ) from replaced
    assert replaced is not None, "it was tried at least once"
    raise replaced


def _open(location: locations.Location) -> Checkpoint:
    # Its own context has its own cache, so another save at this path does not affect it.
    context = contexts.context()
    try:
        pinned = location.pinned(context)
    except Failed as error:
        raise errors.translate(error, str(location)) from error
    if pinned is None:
        raise CheckpointNotFound(_nothing_at(location))
    return open_at(pinned, context)


def open_at(location: locations.Location, context: ts.Context) -> Checkpoint:
    """As `open`, for a location with a pinned manifest; see `Location.pinned`."""
    try:
        contents = location.values(context)
        return Checkpoint(location, context, _read_index(location, contents), contents)
    except UnickptError as error:
        found = chunk_store.unless_replaced(error, location, context)
        if found is error:
            raise
        raise found from error


def _read_index(location: locations.Location, contents: ocdbt.Values) -> Index:
    try:
        found = contents.read(INDEX_KEY)
    except Failed as error:
        raise errors.translate(error, str(location)) from error
    if found is None:
        raise CheckpointNotFound(
            f"no checkpoint at {location}: the database there has no unickpt index"
        )
    return index_json.decode(found, str(location))


def _nothing_at(location: locations.Location) -> str:
    """Why nothing can be opened here, and which path may have been meant."""
    said = f"no checkpoint at {location}"
    try:
        below = [listed for listed in checkpoints_below(location.url) if listed.name != "."]
    except UnickptError:
        below = []
    if not below:
        return (
            f"{said}: nothing was committed there. `unickpt ls` lists the checkpoints below a "
            "directory"
        )
    names = [listed.name for listed in below]
    shown = ", ".join(names if len(names) <= _SHOWN else [names[0], "...", *names[1 - _SHOWN :]])
    hint = f"give the path of one, such as {below[-1].path!r}"
    if all(name.startswith("step_") for name in names):
        hint = (
            f"load the newest with unickpt.Checkpointer({str(location)!r}).load(), or give the "
            f"path of a step, such as {below[-1].path!r}"
        )
    return f"{said}: it contains checkpoints but is not one itself ({shown}); {hint}"


class Checkpoint(Mapping[str, "StoredArray"]):
    """A committed checkpoint: its arrays by name, tied arrays under each of their names.

    `metadata` is what `save` was given, `values` the plain values by name, `index` everything else.
    """

    def __init__(
        self,
        location: locations.Location,
        context: ts.Context,
        index: Index,
        contents: ocdbt.Values | None = None,
    ) -> None:
        self.location, self.index = location, index
        self._chunks = ChunkStore(location, context, index.codecs, contents)

    @property
    def url(self) -> str:
        return self.location.url

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.index.metadata

    @property
    def values(self) -> PlainValues:
        """The plain values by name."""
        return PlainValues(self)

    def __getitem__(self, name: str) -> StoredArray:
        target = self.index.aliases.get(name, name)
        entry = self.index.arrays.get(target)
        if entry is None:
            raise KeyError(self._no_array(name))
        return StoredArray(self, name, entry)

    def _no_array(self, name: object) -> str:
        """Why there is no array of a name, and what to use instead."""
        if name in self.index.values:
            return f"{name!r} is a plain value; read it with .values[{name!r}]"
        if name in self.index.per_process:
            return f"{name!r} differs by process; unickpt.load(path) returns the values of all"
        below = [n for n in self if isinstance(name, str) and n.startswith(f"{name}/")]
        if below:
            return f"{name!r} is a container, not an array; it contains {_first_names(below)}"
        return f"{name!r} is not in this checkpoint; arrays are {_first_names(self)}"

    def __iter__(self) -> Iterator[str]:
        yield from self.index.arrays
        yield from self.index.aliases

    def __len__(self) -> int:
        return len(self.index.arrays) + len(self.index.aliases)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self.url, self.index.attempt, self.index.created)

    def __repr__(self) -> str:
        return f"Checkpoint({str(self.location)!r}, {len(self)} arrays)"

    @property
    def nbytes(self) -> int:
        """Logical bytes of all arrays; tied ones count once."""
        return sum(entry.nbytes for entry in self.index.arrays.values())

    def per_process(self, name: str, of: Sequence[int] | None = None) -> tuple[bytes, ...]:
        """The encoded values of a per-process leaf, checked against their digests.

        Arguments:
            name: of the leaf.
            of: the processes whose values to read; all by default.

        Raises:
            CheckpointCorrupt: one is missing or does not match its digest.
        """
        blobs = self.index.per_process[name].blobs
        out = []
        for process in range(len(blobs)) if of is None else of:
            size, digest = blobs[process]
            data = self.read_key(blob_key(name, process), size)
            if chunk_store.digest(np.frombuffer(data, np.uint8)) != digest:
                raise self.damaged(
                    f"the value of process {process} for {name!r} does not match its digest"
                )
            out.append(data)
        return tuple(out)

    # --- for load and verify -------------------------------------------------------------------

    def damaged(self, reason: str) -> Exception:
        """The error for bad stored data: damage, unless the checkpoint was replaced since."""
        return self._chunks.unless_replaced(CheckpointCorrupt(f"{self.location}: {reason}"))

    def check_unchanged(self) -> None:
        """Checks that this is still the checkpoint at its path.

        Raises:
            CheckpointReplaced: it is not.
        """
        found = self.damaged("")
        if not isinstance(found, CheckpointCorrupt):
            raise found

    def count_keys(self) -> int:
        """The number of keys in the database according to its manifest; lists none."""
        try:
            return self.location.database_facts(self._chunks.context).keys
        except Failed as error:
            raise self._chunks.explained(error, str(self.location)) from error

    def key_length(self, key: str) -> int | None:
        """The length of a key's value in bytes, without reading it; None if the key is missing.

        Raises:
            CheckpointCorrupt: the database is damaged.
        """
        try:
            return self._chunks.values.length(key)
        except Failed as error:
            raise self._chunks.explained(error, f"{self.location}: key {key!r}") from error

    def request_key(self, key: str) -> Any:
        """Starts to read a key of the database; pass the result to `read_key`."""
        return self._chunks.request_key(key)

    def read_key(self, key: str, length: int | None = None, requested: Any = None) -> bytes:
        """The bytes of one key of the database.

        Arguments:
            key: of the database.
            length: the number of bytes it must have, if the index says.
            requested: the result of `request_key` for it.

        Raises:
            CheckpointCorrupt: it is missing, unreadable or has a different length.
        """
        where = f"{self.location}: key {key!r}"
        try:
            data = self._chunks.read_key(key, length, requested)
        except Failed as error:
            raise self._chunks.explained(error, where) from error
        if data is None:
            raise self.damaged(f"key {key!r} is missing")
        return data

    def read_digests(self) -> digest_table.Table:
        """The digest table; its length is checked against the index before it is read.

        Raises:
            CheckpointCorrupt: it is missing, or does not belong to the index.
        """
        nbytes = self.key_length(DIGESTS_KEY)
        if nbytes is None:
            raise self.damaged(f"key {DIGESTS_KEY!r} is missing")
        try:
            digest_table.check(nbytes, self.index, digest_table.length(self.index.arrays))
            return digest_table.decode(self.read_key(DIGESTS_KEY, nbytes), self.index)
        except digest_table.Mismatch as error:
            raise self.damaged(str(error)) from None

    @cached_property
    def _digests(self) -> tuple[digest_table.Table, dict[str, slice]]:
        return self.read_digests(), digest_table.spans(self.index.arrays)

    def digests_of(self, name: str) -> digest_table.Table:
        """The rows of an array's chunks, in the order of its parts."""
        table, spans = self._digests
        return table[spans[name]]

    def check_backed(self, entry: ArrayEntry) -> None:
        """Checks that enough data is stored to justify the memory that an array's shape needs.

        Raises:
            CheckpointCorrupt: the digest table or the first chunk contradicts the shape.
        """
        self.digests_of(entry.name)
        try:
            for part in chunk_grid.parts(entry)[:1]:
                self._chunks.check_backed(entry, part)
        except Failed as error:
            where = f"{self.location}: array {entry.name!r}"
            raise self._chunks.explained(error, where) from error

    def request_chunk(self, entry: ArrayEntry, part: Part, number: int) -> Any:
        """Starts to read a small chunk; pass the result to `read_chunk`."""
        return self._chunks.request(entry, part, number)

    def read_chunk(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        row: Any,
        out: Array,
        requested: Any = None,
    ) -> bool:
        """Reads a chunk into contiguous memory.

        Returns:
            Whether it matches its digest, if its row (of `digests_of`) is given.

        Raises:
            CheckpointCorrupt: it is missing or cannot be decoded.
        """
        hashed = row is not None
        digest = self._chunks.read(entry, part, number, out, requested, hashed=hashed)
        return not hashed or digest == row["digest"]

    def open_part(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        try:
            self._chunks.values.check(part.key)
            return self._chunks.array(entry, part)
        except Failed as error:
            where = f"{self.location}: array {entry.name!r}"
            raise self._chunks.explained(error, where) from error


def _reopen(url: str, attempt: str, created: str) -> Checkpoint:
    """The checkpoint that was pickled.

    Raises:
        CheckpointReplaced: a save has replaced it.
    """
    found = open(url)
    if (found.index.attempt, found.index.created) != (attempt, created):
        raise CheckpointReplaced(
            f"{found.location}: the pickled checkpoint, created {created}, was replaced by one "
            f"created {found.index.created}; open it again and pickle the new one"
        )
    return found


class PlainValues(Mapping[str, plain_values.Plain]):
    """A checkpoint's plain values by name; calling it gives its arrays, as `Mapping.values()`
    does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> plain_values.Plain:
        found = self._checkpoint.index.values
        if name in found:
            return found[name]
        if name in self._checkpoint:
            raise KeyError(f"{name!r} is an array; read it with checkpoint[{name!r}]")
        raise KeyError(
            f"{name!r} is not a plain value of this checkpoint; these are {_first_names(found)}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.index.values)

    def __len__(self) -> int:
        return len(self._checkpoint.index.values)

    def __call__(self) -> ValuesView[StoredArray]:
        return ValuesView(self._checkpoint)

    def __repr__(self) -> str:
        return repr(dict(self))


class StoredArray:
    """An array of a checkpoint; slicing reads it.

    `x[10:20, ::2]` gives a NumPy array and reads only the chunks it needs.
    """

    def __init__(self, checkpoint: Checkpoint, name: str, entry: ArrayEntry) -> None:
        self._checkpoint, self.name, self._entry = checkpoint, name, entry

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
        """The URL with which TensorStore opens it, if it has a single part."""
        name = quote(self._entry.name)
        return f"{self._checkpoint.url}|ocdbt:{name}/" if name else f"{self._checkpoint.url}|ocdbt:"

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
        return read_box(self._checkpoint, self._entry, box, verify=verify)

    def __reduce__(self) -> tuple[Any, ...]:
        return operator.getitem, (self._checkpoint, self.name)

    def __getitem__(self, key: Any) -> Array:
        box, rest = _parse(key, self.shape, self.name)
        found: Array = self.read(box)[rest]
        return found

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if copy is False:
            raise ValueError(f"{self.name!r} must be read from storage, so copy=False is invalid")
        array = self[...]
        return array if dtype is None else np.asarray(array, dtype)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def tensorstore(self) -> ts.TensorStore:
        """The array as a read-only TensorStore, for lazy expressions and asynchronous reads.

        TensorStore does not know the digests, so it does not check what it reads.
        """
        self._checkpoint.check_backed(self._entry)
        layers = []
        for part in self.parts:
            array = self._checkpoint.open_part(self._entry, part)
            if len(self.parts) > 1:
                array = array[ts.d[:].translate_to[part.box.start]]
            layers.append(array)
        if not layers:
            empty = np.empty(self.shape, ts.dtype(dtypes.stored_as(self._entry.dtype)).numpy_dtype)
            return ts.array(empty)
        return layers[0] if len(layers) == 1 else ts.overlay(layers)

    def __repr__(self) -> str:
        return f"StoredArray({self.name!r}, {self._entry.dtype}{list(self.shape)}, {self.layout})"


def _parse(key: Any, shape: tuple[int, ...], name: str) -> tuple[Box, tuple[Any, ...]]:
    """NumPy basic indexing as the box to read and the remaining index within it."""
    items = list(key) if isinstance(key, tuple) else [key]
    if any(item is Ellipsis for item in items):
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - len(items) + 1)
    items += [slice(None)] * (len(shape) - len(items))
    if len(items) > len(shape):
        raise IndexError(f"too many indices for {name!r} of shape {shape}")
    start, stop = [], []
    rest: list[int | slice] = []
    for item, n in zip(items, shape, strict=True):
        if isinstance(item, slice):
            picked = range(n)[item]
            low = min(picked[0], picked[-1]) if picked else 0
            high = max(picked[0], picked[-1]) + 1 if picked else 0
            rest.append(slice(None, None, picked.step))
        elif hasattr(item, "__index__") and not np.ndim(item):
            i = item.__index__()
            if not -n <= i < n:
                raise IndexError(f"index {i} is out of bounds for {name!r} of shape {shape}")
            low, high = i % n, i % n + 1
            rest.append(0)
        else:
            raise IndexError(
                f"{name!r} takes integers and slices, not {quoted(item)}; for other indices read "
                "it first, as array[...]"
            )
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop)), tuple(rest)


def _first_names(found: Iterable[str]) -> str:
    names = list(found)
    return (
        ", ".join(shortened(name, 120) for name in names[:5]) + (", ..." if len(names) > 5 else "")
        or "none"
    )
