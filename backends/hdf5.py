"""HDF5 files of Keras, and others that hold nothing but arrays.

Sources: keras/src/saving/saving_lib.py and the HDF5 file format specification. h5py says where the
datasets are; those that lie in one piece are then read in place, and the others through h5py. Links
to other files are refused. A `.keras` file is a zip file with such a file in it, as a rule without
compression.
"""

from __future__ import annotations

import importlib
import io
import json
import math
import os
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import CheckpointCorrupt, UnickptError, UnsupportedFormat
from unickpt.foreign import loose_files
from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import CHUNK_BYTES, FileBox, RangeReader, whole
from unickpt.foreign.files import Files
from unickpt.foreign.loose_files import open_kind
from unickpt.foreign.zip_files import DEFLATED, STORED, Member, ZipFile
from unickpt.format.chunk_grid import Part
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import ParallelMap, Reader
from unickpt.quoting import quoted
from unickpt.storage.errors import Failed, reading_failed
from unickpt.trees import tree

_WINDOW = 64 << 10
_MOST_RANK = 32
# Chunks can be compressed or missing. What an array takes in memory may exceed what is stored for
# it by this factor, or be this large.
_MOST_REPEATED, _SMALL = 1032, 64 << 20
_LAYERS, _VARIABLES = "layers", "vars"
_IN_KERAS, _KERAS_METADATA = "model.weights.h5", "metadata.json"
# What is compressed is unpacked into memory.
_MOST_UNPACKED, _MOST_JSON = 256 << 20, 1 << 20
_ZIP = b"PK\x03\x04"

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an HDF5 file, or a .keras file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: h5py is not installed; or it contains what is no array, or links.
        StorageError: the storage failed.
    """
    return open_kind(files, loose_files.HDF5, lambda found: Hdf5Reader(files, found.names[0]))


@dataclass(frozen=True)
class _Stored:
    """Where an HDF5 file is.

    Arguments:
        begin, size: its bytes in the file of the checkpoint.
        unpacked: its bytes, if it is compressed there.
        zip: the zip file that contains it, and as what; None if there is none.
        version: of Keras, if the zip file tells it.
    """

    begin: int
    size: int
    unpacked: bytes | None = None
    zip: tuple[ZipFile, Member] | None = None
    version: str = ""


def _stored(files: Files, name: str) -> _Stored:
    """Where the HDF5 file is.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: a zip file does not contain it, or too compressed.
        Failed: the storage failed.
    """
    if files.head(name)[:4] != _ZIP:
        return _Stored(0, _size(files, name))
    found = ZipFile(files, name)
    member = found.members.get(_IN_KERAS)
    if member is None:
        raise UnsupportedFormat(
            f"{files.location}: {name} is a zip file without {_IN_KERAS}; it has "
            f"{quoted(sorted(found.members))}"
        )
    version = _version(found)
    if member.method == STORED:
        return _Stored(found.offset(member), member.size, None, (found, member), version)
    data = _unpacked(found, member, _MOST_UNPACKED)
    return _Stored(0, member.size, data, (found, member), version)


def _unpacked(found: ZipFile, member: Member, most: int) -> bytes:
    """The bytes of a member, at most so many."""
    told = f"{found.files.location}: {found.name}: {member.name}"
    if member.method not in (STORED, DEFLATED) or max(member.size, member.compressed) > most:
        raise UnsupportedFormat(
            f"{told} has {member.size} bytes, compressed to {member.compressed} by the method "
            f"{member.method}: at most {most} are unpacked, by the methods {STORED} and "
            f"{DEFLATED}; unpack the zip file, and open the file in it"
        )
    data = found.files.read(found.name, found.offset(member), member.compressed)
    if member.method == DEFLATED:
        try:
            data = zlib.decompressobj(-15).decompress(data, max(1, member.size))
        except zlib.error as error:
            raise found.damaged(f"{member.name} cannot be decompressed: {error}") from error
    found.check(member, data)
    return data


def _version(found: ZipFile) -> str:
    """That of Keras; empty if the zip file does not tell it."""
    member = found.members.get(_KERAS_METADATA)
    if member is None:
        return ""
    data = _unpacked(found, member, _MOST_JSON)
    try:
        told = json.loads(data).get("keras_version")
    except (ValueError, AttributeError, RecursionError) as error:
        raise found.damaged(f"{member.name} is not JSON of Keras: {error}") from error
    return told if isinstance(told, str) and len(told) < 40 else ""


class _Raw(io.RawIOBase):
    """A range of a file of a checkpoint as Python's kind of file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        stored: the range.
    """

    def __init__(self, files: Files, name: str, stored: _Stored) -> None:
        self._files, self._name, self._at = files, name, 0
        self._begin, self._size = stored.begin, stored.size

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_CUR: self._at, os.SEEK_END: self._size}.get(whence, 0)
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = memoryview(buffer)[: max(0, self._size - self._at)]
        if out:
            self._files.read_into(self._name, self._begin + self._at, out)
        self._at += len(out)
        return len(out)


def _size(files: Files, name: str) -> int:
    """Bytes of a file; as its head says if the storage does not tell."""
    size = files.size(name)
    if size is not None:
        return size
    head = files.head(name)
    at = {0: 40, 1: 44, 2: 28, 3: 28}.get(head[8] if len(head) > 8 else -1)
    if at is None or len(head) < at + 8:
        raise CheckpointCorrupt(f"{files.location}: {name} has no valid head")
    return int(struct.unpack_from("<Q", head, at)[0])


@dataclass(frozen=True)
class _Found:
    """What the walk through a file found.

    Arguments:
        datasets: by their names.
        aliases: the other names of datasets.
        by_address: the name of each dataset by its place in the file.
    """

    datasets: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    by_address: dict[int, str] = field(default_factory=dict)


class Hdf5Reader(RangeReader):
    """The datasets of one file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
    """

    format = "hdf5"
    most_per_byte = 1 << 10  # they may be compressed

    def __init__(self, files: Files, name: str) -> None:
        try:
            self._h5py = importlib.import_module("h5py")
        except ImportError:
            raise UnsupportedFormat(
                f"{files.location}: {name} is an HDF5 file, which needs h5py: install unickpt[h5]"
            ) from None
        self._where, self._name = f"{files.location}: {name}", name
        self._stored = _stored(files, name)
        self.version = self._stored.version
        found, entries, boxes = _Found(), dict[str, ArrayEntry](), dict[str, tuple[FileBox]]()
        self._datasets: Mapping[str, Any] = found.datasets
        try:
            # Kept open: no file of the operating system belongs to it.
            self._file = self._h5py.File(self._opened(files), "r")
            self._walk(self._file, (), found, set())
            for array, dataset in found.datasets.items():
                entries[array], where = self._entry(array, dataset)
                if where is not None:
                    boxes[array] = (where,)
            node = tree.from_names([*entries, *found.aliases])
        except (UnickptError, Failed):
            raise
        except Exception as error:  # of any type, as h5py raises it
            raise CheckpointCorrupt(f"{self._where} is damaged: {error}") from error
        index = Index(tree.to_json(node), entries, aliases=found.aliases)
        super().__init__(files, index, boxes)

    # --- opening --------------------------------------------------------------------------------

    def _opened(self, files: Files) -> io.BufferedIOBase:
        if self._stored.unpacked is not None:
            return io.BytesIO(self._stored.unpacked)
        return io.BufferedReader(_Raw(files, self._name, self._stored), _WINDOW)

    def _walk(self, group: Any, path: tuple[str, ...], found: _Found, above: set[int]) -> None:
        """Finds the datasets of a group.

        Arguments:
            group: of h5py.
            path: the components of its name.
            found: receives them.
            above: the places of all groups that were walked through.
        """
        if len(path) > tree.MAX_DEPTH:
            raise UnsupportedFormat(f"{self._where} is nested deeper than {tree.MAX_DEPTH} levels")
        names = self._names(group) if path[-1:] == (_LAYERS,) else {}
        for key in group:
            told = self._told(path, key)
            if not isinstance(group.get(key, getlink=True), self._h5py.HardLink):
                raise UnsupportedFormat(f"{told} is a link, which could lead to other files")
            try:
                item, at = group[key], (*path, names.get(key, key))
            except Exception as error:  # of any type, as h5py raises it
                raise CheckpointCorrupt(f"{told} cannot be read: {error}") from error
            address = self._h5py.h5o.get_info(item.id).addr
            if isinstance(item, self._h5py.Group):
                if address in above:
                    raise UnsupportedFormat(f"{told} is a group with several names")
                above.add(address)
                self._walk(item, at, found, above)
            elif isinstance(item, self._h5py.Dataset):
                name = "/".join(map(tree.component, at))
                first = found.by_address.setdefault(address, name)
                if first == name:
                    found.datasets[name] = item
                else:
                    found.aliases[name] = first
            else:
                raise UnsupportedFormat(f"{told} is neither a group nor a dataset")

    def _names(self, layers: Any) -> dict[str, str]:
        """The names that Keras gives layers, by those in the file, which count them by class."""
        names = {}
        for key in layers:
            if isinstance(layers.get(key, getlink=True), self._h5py.HardLink):
                inner = layers[key]
                variables = inner.get(_VARIABLES) if isinstance(inner, self._h5py.Group) else None
                name = None if variables is None else variables.attrs.get("name")
                names[key] = name if isinstance(name, str) and name else key
        return names if len({*names.values()}) == len(names) else {}

    def _told(self, path: tuple[str, ...], key: str) -> str:
        return f"{self._where}: {quoted('/'.join((*path, key)))}"

    def _entry(self, name: str, dataset: Any) -> tuple[ArrayEntry, FileBox | None]:
        told = f"{self._where}: {quoted(name)}"
        if dataset.shape is None or len(dataset.shape) > _MOST_RANK:
            raise UnsupportedFormat(f"{told} has no shape, or too many dimensions")
        if dataset.external or dataset.is_virtual:
            raise UnsupportedFormat(f"{told} lies in other files")
        shape, dtype = dataset.shape, self._dtype(dataset, told)
        offset = dataset.id.get_offset()
        if dataset.chunks is None and offset is not None and self._stored.unpacked is None:
            begin = self._stored.begin + offset
            box = Box.whole(shape)
            where = FileBox(box, FileRange(self._name, begin, dataset.dtype.byteorder == ">"))
            return whole(name, shape, dtype, where), where
        chunk = _chunk(dataset) if dataset.chunks else tuple(max(1, n) for n in shape)
        entry = whole(name, shape, dtype, FileBox(Box.whole(shape), FileRange(self._name, 0)))
        return ArrayEntry(name, entry.shape, dtype, chunk, entry.layout), None

    def _dtype(self, dataset: Any, told: str) -> str:
        """The checkpoint's name of a dataset's dtype."""
        found = dataset.dtype
        kept = dataset.attrs.get("dtype")  # of Keras
        if found.kind == "V" and found.itemsize == 2 and kept == "bfloat16":
            return "bfloat16"
        try:
            name = dtypes.name_of(found.newbyteorder("="))
        except TypeError:
            raise UnsupportedFormat(f"{told} has the dtype {quoted(str(found))}") from None
        if self._h5py.h5t.py_create(found, logical=True) != dataset.id.get_type():
            raise UnsupportedFormat(f"{told} has a dtype like {name}, which NumPy lacks")
        return name

    # --- what does not lie in one piece ---------------------------------------------------------

    def check_backed(self, entry: ArrayEntry) -> None:
        if entry.name in self._boxes:
            super().check_backed(entry)
            return
        stored = self._datasets[entry.name].id.get_storage_size()
        if entry.nbytes > max(_SMALL, _MOST_REPEATED * stored):
            raise CheckpointCorrupt(
                f"{self.location}: array {entry.name!r} has {stored} bytes in {self._name}, too "
                f"few for {dtypes.with_shape(entry.dtype, entry.shape)}"
            )

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        """Compares the checksum in a zip file."""
        if self._stored.zip is None or self._stored.unpacked is not None:
            return  # none, or compared when it was opened
        found, member = self._stored.zip
        crc, end = 0, self._stored.begin + self._stored.size
        try:
            for begin in range(self._stored.begin, end, CHUNK_BYTES):
                data = self._files.read(self._name, begin, min(CHUNK_BYTES, end - begin))
                crc = zlib.crc32(data, crc)
        except Failed as error:
            raise reading_failed(error, self._where) from error
        if member.crc and crc != member.crc:
            yield "", str(found.damaged(f"{member.name} does not match its checksum"))

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return True

    def read_box(self, entry: ArrayEntry, part: Part, box: Box, out: Array) -> None:
        if entry.name in self._boxes:
            super().read_box(entry, part, box, out)
            return
        try:
            found = self._datasets[entry.name][box.slices]
        except Exception as error:  # of any type, as h5py raises it
            raise CheckpointCorrupt(
                f"{self.location}: array {entry.name!r} {box} cannot be read from {self._name}: "
                f"{error}"
            ) from error
        out[...] = np.asarray(found).view(out.dtype) if entry.dtype == "bfloat16" else found


def _chunk(dataset: Any) -> tuple[int, ...]:
    """What is read at once: several chunks of a dataset, the last dimensions first."""
    chunk = [min(c, max(1, n)) for c, n in zip(dataset.chunks, dataset.shape, strict=True)]
    for dim in reversed(range(len(chunk))):
        room = CHUNK_BYTES // (math.prod(chunk) * dataset.dtype.itemsize)
        chunk[dim] = min(chunk[dim] * max(1, room), max(1, dataset.shape[dim]))
    return tuple(chunk)
