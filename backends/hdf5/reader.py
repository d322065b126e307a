"""HDF5 files of Keras, and others that hold nothing but arrays.

Sources: keras/src/saving/saving_lib.py and the HDF5 file format specification. pyfive parses them;
libhdf5 takes no part, since some files crash it, or let it run without end. Links to other files
are refused. A `.keras` file is a zip file with such a file in it, as a rule without compression.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import struct
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import FoundFiles, decoded, open_kind
from unickpt.backends._files.headers import naming
from unickpt.backends._files.zip_files import DEFLATED, STORED, Member, ZipFile
from unickpt.backends.hdf5.chunks import HDF5Chunk, HDF5Storage, storage
from unickpt.backends.hdf5.objects import HDF5File, HDF5Object
from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.extend import (
    CHUNK_BYTES,
    MAX_DEPTH,
    Array,
    ArrayEntry,
    ArrayTable,
    Box,
    Damaged,
    Failed,
    FileBox,
    FileRange,
    Files,
    Index,
    ParallelMap,
    Part,
    RangeReader,
    Reader,
    Request,
    dtype_and_shape,
    dtype_name,
    entry_of_box,
    name_component,
    quoted,
    read_file_box,
    reading,
    tree_from_names,
    tree_to_json,
)

_MOST_RANK = 32
# Chunks can be compressed or missing. The memory of an array may exceed its stored bytes by this
# factor, and that of all together by so many bytes more.
_MOST_REPEATED, _SMALL = 1032, 64 << 20
_LAYERS, _VARIABLES = "layers", "vars"
# Attributes of a file into which Keras saved a whole model.
_CONFIGURATION = ("model_config", "training_config", "keras_version", "backend")
_MOST_CONFIGURATION = 64 << 20
_IN_KERAS, _KERAS_METADATA = "model.weights.h5", "metadata.json"
# Compressed files are unpacked into memory.
_MOST_UNPACKED, _MOST_JSON = 256 << 20, 1 << 20
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class _HDF5Place:
    """Where an HDF5 file is.

    Arguments:
        begin, size: its bytes in the file of the checkpoint.
        unpacked: its bytes, if it is compressed there.
        is_summed: whether it has a checksum, as in a zip file.
        version: of Keras, if the zip file records it.
    """

    begin: int
    size: int
    unpacked: bytes | None = None
    is_summed: bool = False
    version: str = ""


def _stored(files: Files, name: str) -> _HDF5Place:
    """Where the HDF5 file is.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: a zip file does not contain it, or too compressed.
        Failed: the storage failed.
    """
    if files.head(name)[:4] != _ZIP:
        return _HDF5Place(0, _size(files, name))
    archive = ZipFile(files, name)
    member = archive.members.get(_IN_KERAS)
    if member is None:
        raise files.unsupported(
            f"{name} is a zip file without {_IN_KERAS}; it has {quoted(sorted(archive.members))}"
        )
    version = _version(archive)
    if member.method == STORED:
        begin = archive.offset(member)
        archive.summed(member, begin)
        return _HDF5Place(begin, member.size, None, bool(member.crc), version)
    data = _unpacked(archive, member, _MOST_UNPACKED)
    return _HDF5Place(0, member.size, data, bool(member.crc), version)


def _unpacked(archive: ZipFile, member: Member, most: int) -> bytes:
    """The bytes of a member, at most so many."""
    label = f"{archive.files.location}: {archive.name}: {member.name}"
    if member.method not in (STORED, DEFLATED) or max(member.size, member.compressed) > most:
        raise UnsupportedFormat(
            f"{label} has {member.size} bytes, compressed to {member.compressed} by the method "
            f"{member.method}: at most {most} are unpacked, by the methods {STORED} and "
            f"{DEFLATED}; unpack the zip file, and open the file in it"
        )
    return archive.first(member, member.size)


def _version(archive: ZipFile) -> str:
    """The version of Keras; empty if the zip file does not record it."""
    member = archive.members.get(_KERAS_METADATA)
    if member is None:
        return ""
    data = _unpacked(archive, member, _MOST_JSON)
    try:
        version = json.loads(data).get("keras_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise archive.damaged(f"{member.name} is not JSON of Keras: {error}") from error
    return version if isinstance(version, str) and len(version) < 40 else ""


def _size(files: Files, name: str) -> int:
    """Bytes of a file; as its head says if the storage does not tell."""
    size = files.size(name)
    if size is not None:
        return size
    head = files.head(name)
    field_offset = {0: 40, 1: 44, 2: 28, 3: 28}.get(head[8] if len(head) > 8 else -1)
    if field_offset is None or len(head) < field_offset + 8:
        raise files.damaged(f"{name} has no valid head")
    return int(struct.unpack_from("<Q", head, field_offset)[0])


LayerNames = Mapping[tuple[str, ...], Mapping[str, str]]
"""By the path of a group of layers, the names of these by those in the file."""


class _HDF5Walk:
    """Finds the datasets of a file.

    Arguments:
        where: the file, for messages.
        names: those of layers.
    """

    def __init__(self, where: str, names: LayerNames) -> None:
        self._where, self._names = where, names
        self.datasets: dict[str, HDF5Object] = {}
        """By their names."""
        self.aliases: dict[str, str] = {}
        """The other names of datasets."""
        self._by_address: dict[int, str] = {}
        self.groups: dict[int, str] = {}
        """The path in the file of each group, by its place."""

    def visit(self, group: HDF5Object, path: tuple[str, ...], stored: tuple[str, ...]) -> None:
        """Finds the datasets of a group.

        Arguments:
            group: of the file.
            path: the components of its name.
            stored: those in the file.
        """
        if len(path) > MAX_DEPTH:
            raise UnsupportedFormat(f"{self._where} is nested deeper than {MAX_DEPTH} levels")
        names = self._names.get(stored, {})
        if len({*names.values()}) != len(names):
            names = {}
        for link in group.links:
            label = f"{self._where}: {quoted('/'.join((*path, link.name)))}"
            if link.address is None:
                raise UnsupportedFormat(f"{label} is a link, which could lead to other files")
            item = group.file.object(link.address)
            item_path = (*path, names.get(link.name, link.name))
            if item.is_dataset:
                name = "/".join(map(name_component, item_path))
                first = self._by_address.setdefault(item.address, name)
                if first == name:
                    self.datasets[name] = item
                else:
                    self.aliases[name] = first
            elif item.is_group:
                if item.address in self.groups:
                    raise UnsupportedFormat(f"{label} is a group with several names")
                self.groups[item.address] = "/".join((*stored, link.name))
                self.visit(item, item_path, (*stored, link.name))
            else:
                raise UnsupportedFormat(f"{label} is neither a group nor a dataset")


class Hdf5Reader(RangeReader):
    """The datasets of one file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        names: those of layers, if others of the model's files may have them.
    """

    format = "hdf5"
    most_per_byte = 1 << 10  # they may be compressed

    def __init__(self, files: Files, name: str, names: LayerNames | None = None) -> None:
        self._where, self._name = f"{files.location}: {name}", name
        self._stored = _stored(files, name)
        self.version = self._stored.version
        self._storages: dict[str, HDF5Storage] = {}
        self._chunks: dict[str, Mapping[tuple[int, ...], HDF5Chunk]] = {}
        self._counted: dict[str, tuple[int, int]] = {}
        self._lock = threading.Lock()
        table = ArrayTable()
        with _damages(f"{self._where} is damaged"):
            root = _root(files, name, self._stored)
            walk = _HDF5Walk(self._where, _layer_names(root) if names is None else names)
            walk.visit(root, (), ())
            for array, dataset in walk.datasets.items():
                table.entries[array], where = self._entry(array, dataset)
                if where is not None:
                    table.boxes[array] = (where,)
            self._check_total(table.entries)
            table.aliases.update(walk.aliases)
            texts = {key: root.text(key, _MOST_CONFIGURATION) for key in _CONFIGURATION}
            index = table.index({key: text for key, text in texts.items() if text is not None})
        self.groups = {*walk.groups.values()}
        """The paths of the file's groups."""
        super().__init__(files, index, table.boxes)

    # --- opening --------------------------------------------------------------------------------

    def _check_total(self, entries: Mapping[str, ArrayEntry]) -> None:
        """Chunks need not be stored, and who lists or verifies them goes through all of them."""
        total, most = sum(e.nbytes for e in entries.values()), _MOST_REPEATED * self._stored.size
        if total > most + _SMALL:
            name = max(entries, key=lambda name: entries[name].nbytes)
            entry = entries[name]
            raise CheckpointCorrupt(
                f"{self._where} has {self._stored.size} bytes, too few for its arrays of {total} "
                f"bytes; the largest is {name!r}, {dtype_and_shape(entry.dtype, entry.shape)}"
            )

    def _entry(self, name: str, dataset: HDF5Object) -> tuple[ArrayEntry, FileBox | None]:
        label, shape = f"{self._where}: {quoted(name)}", dataset.shape
        if shape is None or len(shape) > _MOST_RANK:
            raise UnsupportedFormat(f"{label} has no shape, or too many dimensions")
        how = self._storages[name] = storage(dataset, quoted(name))
        dtype = _dtype(dataset, label)
        if how.begin is not None:
            size = math.prod(shape) * dataset.type.size
            if how.size < size:
                raise dataset.file.damaged(f"{quoted(name)} has {how.size} bytes of {size}")
            if self._stored.unpacked is None and how.inline is None:
                where = self._box(dataset, shape, how.begin)
                return entry_of_box(name, shape, dtype, where), where
            self._storages[name] = replace(how, chunk=shape)
            self._chunks[name] = {(0,) * len(shape): HDF5Chunk(how.begin, size)}
        chunk = tuple(max(1, n) for n in shape)
        if how.chunk is not None:
            chunk = _chunk(how.chunk, shape, dataset.type.size)
        entry = entry_of_box(name, shape, dtype, self._box(dataset, shape, 0))
        return ArrayEntry(name, entry.shape, dtype, chunk, entry.layout), None

    def _box(self, dataset: HDF5Object, shape: tuple[int, ...], offset: int) -> FileBox:
        """Elements that lie in one piece."""
        dtype = dataset.type.dtype
        swapped = dtype is not None and dtype.byteorder == ">"
        return FileBox(
            Box.whole(shape), FileRange(self._name, self._stored.begin + offset, swapped)
        )

    # --- data in several pieces -----------------------------------------------------------------

    def check_backed(self, entry: ArrayEntry) -> None:
        if entry.name in self._boxes:
            super().check_backed(entry)
            stored = entry.nbytes
            if stored and (self._storages[entry.name].begin or 0) + stored > self._stored.size:
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r} needs bytes after the end of the HDF5 "
                    f"file in {self._name}"
                )
        else:
            stored = sum(chunk.size for chunk in self._chunks_of(entry).values())
        missing = max(0, entry.nbytes - _MOST_REPEATED * stored)
        with self._lock:  # the total of all requested arrays
            self._counted[entry.name] = stored, missing
            every, all_missing = map(sum, zip(*self._counted.values(), strict=True))
        if (missing and all_missing > _SMALL) or every > self._stored.size:
            raise CheckpointCorrupt(
                f"{self.location}: array {entry.name!r} has {stored} bytes in {self._name}, too "
                f"few for {dtype_and_shape(entry.dtype, entry.shape)}, or shared with others"
            )

    def _chunks_of(self, entry: ArrayEntry) -> Mapping[tuple[int, ...], HDF5Chunk]:
        how = self._storages[entry.name]
        with self._lock:
            if entry.name not in self._chunks:
                where = f"{self.location}: array {entry.name!r}"
                damaged = f"{where}: its index in {self._name} is damaged"
                with reading(where), _damages(damaged):
                    self._chunks[entry.name] = how.chunks() if how.chunk else {}
            return self._chunks[entry.name]

    def unchecked(self) -> Sequence[str]:
        return [] if self._stored.is_summed else list(self.index.arrays)

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return True

    def read_box(self, entry: ArrayEntry, part: Part, box: Box, out: Array) -> None:
        if entry.name not in self._counted:
            self.check_backed(entry)
        if entry.name in self._boxes:
            super().read_box(entry, part, box, out)
            return
        how, chunks = self._storages[entry.name], self._chunks_of(entry)
        out[...] = _fill(how.dataset, out.dtype)
        if not chunks or not out.size:
            return
        extents = how.chunk or ()
        ranges = [
            range(a // c, -(-b // c)) for a, b, c in zip(box.start, box.stop, extents, strict=True)
        ]
        near = math.prod(map(len, ranges)) <= len(chunks)
        with naming(self.location, f"array {entry.name!r} {box}"):
            for place in itertools.product(*ranges) if near else chunks:
                start = tuple(i * c for i, c in zip(place, extents, strict=True))
                stop = tuple(a + c for a, c in zip(start, extents, strict=True))
                overlap = box.intersect(Box(start, stop))
                if place in chunks and overlap is not None and overlap.size:
                    piece = out[overlap.relative_to(box.start).slices]
                    self._read_chunk(how, chunks[place], overlap.relative_to(start), piece)

    def _read_chunk(self, how: HDF5Storage, chunk: HDF5Chunk, local: Box, out: Array) -> None:
        """Reads a part of a chunk."""
        shape = how.chunk or ()
        begin, unpacked = self._stored.begin + chunk.begin, self._stored.unpacked
        if how.inline is not None:
            begin, unpacked = 0, how.inline
        if not how.filters and unpacked is None:
            read_file_box(self._files, self._box(how.dataset, shape, chunk.begin), local, out)
            return
        if unpacked is not None:
            data = unpacked[begin : begin + chunk.size]
        else:
            data = self._files.read(self._name, begin, chunk.size)
        elements = how.decode(chunk, data).view(how.dataset.type.dtype or out.dtype)
        out[...] = elements.reshape(shape)[local.slices]


def _fill(dataset: HDF5Object, dtype: Any) -> Any:
    """The value of elements that are not stored."""
    if not dataset.fill:
        return np.zeros((), dtype)
    return np.frombuffer(dataset.fill, dataset.type.dtype or dtype, 1)[0]


def _root(files: Files, name: str, stored: _HDF5Place) -> HDF5Object:
    """The root group of a file, or of unpacked bytes."""
    begin, unpacked = stored.begin, stored.unpacked

    def read(offset: int, count: int) -> bytes:
        if unpacked is not None:
            return unpacked[offset : offset + count]
        return files.read(name, begin + offset, count)

    return HDF5File(f"{files.location}: {name}", stored.size, read).root


@contextmanager
def _damages(what: str) -> Iterator[None]:
    """Where any error of pyfive is one of this package."""
    try:
        yield
    except (UnickptError, Failed):
        raise
    except NotImplementedError as error:
        raise UnsupportedFormat(f"{what}, or pyfive does not read such files: {error}") from error
    except Exception as error:
        raise CheckpointCorrupt(f"{what}: pyfive cannot parse it: {error!r}") from error


def _layer_names(root: HDF5Object) -> LayerNames:
    """The names that Keras gives layers, by those in the file, which count them by class; for each
    group of layers, by its path in the file."""
    names: dict[tuple[str, ...], dict[str, str]] = {}
    waiting, seen = list[tuple[tuple[str, ...], HDF5Object]]([((), root)]), set[int]()
    while waiting:
        path, group = waiting.pop()
        for link in group.links:
            if link.address is None or link.address in seen or len(path) > MAX_DEPTH:
                continue  # which `_walk` refuses
            seen.add(link.address)
            item = root.file.object(link.address)
            if not item.is_group:
                continue
            waiting.append(((*path, link.name), item))
            if path[-1:] == (_LAYERS,):
                addresses = [child.address for child in item.links if child.name == _VARIABLES]
                variables = root.file.object(addresses[0]) if addresses and addresses[0] else None
                name = variables.text("name") if variables is not None else None
                names.setdefault(path, {})[link.name] = name or link.name
    return names


def _dtype(dataset: HDF5Object, label: str) -> str:
    """The checkpoint's name of a dataset's dtype."""
    datatype = dataset.type
    if datatype.opaque and datatype.size == 2 and dataset.text("dtype") == "bfloat16":  # of Keras
        return "bfloat16"
    try:
        if datatype.dtype is not None:
            return dtype_name(datatype.dtype.newbyteorder("="))
    except TypeError:
        pass
    raise UnsupportedFormat(f"{label} has {datatype.description}; only numbers are read")


def _chunk(chunk: tuple[int, ...], shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """The shape of one read: several chunks of a dataset, the last dimensions first."""
    extents = [min(c, max(1, n)) for c, n in zip(chunk, shape, strict=True)]
    for dim in reversed(range(len(extents))):
        room = CHUNK_BYTES // (math.prod(extents) * itemsize)
        extents[dim] = min(extents[dim] * max(1, room), max(1, shape[dim]))
    return tuple(extents)


# --- which files ----------------------------------------------------------------------------------


_SHARD = re.compile(r"(.+)_[0-9]{5}(\.weights)\.h5", re.DOTALL)
_MOST_INDEX = 64 << 20


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an HDF5 file, or a .keras file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it contains objects that are not arrays, links, or filters that are not
            read.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> Reader:
        if selection.index is not None:
            return ShardsReader(files, selection.index)
        reader = Hdf5Reader(files, selection.names[0])
        index = index_of(selection.names[0])
        if index is not None and _is_there(files, index):
            reader.lacks = f"this is one of several files of a model; open {index} for the whole"
            reader.beside = (index,)
        return reader

    return open_kind(files, file_choice.HDF5, make)


def _is_there(files: Files, name: str) -> bool:
    try:
        return bool(files.head(name))
    except Damaged:
        return False


def index_of(shard: str) -> str | None:
    """The name that the index of a model has, if a file is named like one of several."""
    match = _SHARD.fullmatch(shard)
    return None if match is None else f"{match[1]}{match[2]}.json"


class ShardsReader(Reader):
    """The datasets of all files.

    Arguments:
        files: of the checkpoint.
        index: the name of the index.
    """

    format, version = "hdf5", ""
    most_per_byte = Hdf5Reader.most_per_byte

    def __init__(self, files: Files, index: str) -> None:
        self.location, self._files = files.location, files
        groups = _groups(files, index)
        self._shards = sorted({name for names in groups.values() for name in names})
        names: dict[tuple[str, ...], dict[str, str]] = {}
        for shard in self._shards:
            for path, present_names in _present(files, shard, index).items():
                layer_names = names.setdefault(path, {})
                for k, name in present_names.items():
                    if name != k or k not in layer_names:
                        layer_names[k] = name
        entries, self._reader_of = dict[str, ArrayEntry](), dict[str, Hdf5Reader]()
        raw = dict[str, set[str]]()
        for shard in self._shards:
            reader = Hdf5Reader(files, shard, names)
            raw[shard] = reader.groups
            for name, entry in reader.index.arrays.items():
                if name in entries:
                    raise CheckpointCorrupt(f"{self.location}: {quoted(name)} is in two files")
                entries[name], self._reader_of[name] = entry, reader
        for group, shards in groups.items():
            lacking = next((shard for shard in shards if group not in raw[shard]), None)
            if lacking is not None:
                raise CheckpointCorrupt(
                    f"{self.location}: {index} says that {quoted(group)} is in {lacking}, which "
                    "does not contain it; are the files of one save?"
                )
        self.index = Index(tree_to_json(tree_from_names(entries)), entries)

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        for request in requests:
            self._reader_of[request.entry.name].read([request])
        return ()

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return True

    def check_backed(self, entry: ArrayEntry) -> None:
        self._reader_of[entry.name].check_backed(entry)

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        return iter(())

    def stored_bytes(self) -> int | None:
        return self._files.total(self._shards)


class _DatasetIndex(msgspec.Struct):
    weight_map: dict[str, list[str]]


def _groups(files: Files, index: str) -> Mapping[str, Sequence[str]]:
    """The files of each group, by its path."""
    weight_map = decoded(files, index, _DatasetIndex, _MOST_INDEX).weight_map
    groups = {name.strip("/"): shards for name, shards in weight_map.items()}
    for name in {name for shards in groups.values() for name in shards}:
        if "/" in name or index_of(name) != index:
            raise files.damaged(f"{index} names the file {quoted(name)}")
    return groups


def _present(files: Files, shard: str, index: str) -> LayerNames:
    """The names that Keras gives layers in one of several files of a model."""
    try:
        with _damages(f"{files.location}: {shard} is damaged"):
            return _layer_names(_root(files, shard, _stored(files, shard)))
    except Damaged as error:
        raise files.damaged(
            f"{shard} is missing, or damaged, which belongs to {index}: {error}"
        ) from error
