"""Opens HDF5 files: one, or those into which Keras wrote the weights of one model.

`model.weights.json` says which groups lie in which of several files.

Source: keras/src/saving/saving_lib.py, `ShardedH5IOStore`. A group can continue in the next file,
and only the first of these has the name of its layer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unickpt.backends.hdf5.reader import Hdf5Reader, LayerNames, layer_names
from unickpt.errors import CheckpointCorrupt
from unickpt.foreign import loose_files
from unickpt.foreign.files import Files
from unickpt.foreign.loose_files import FoundFiles, open_kind
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import ParallelMap, Reader, Request
from unickpt.quoting import quoted
from unickpt.storage.errors import Damaged
from unickpt.trees import tree_json

_SHARD = re.compile(r"(.+)_[0-9]{5}(\.weights)\.h5", re.DOTALL)
_MOST_INDEX = 64 << 20


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens an HDF5 file, or a .keras file; None if there is none.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it contains what is no array, links, or filters that are not read.
        StorageError: the storage failed.
    """

    def make(found: FoundFiles) -> Reader:
        if found.index is not None:
            return ShardsReader(files, found.index)
        reader = Hdf5Reader(files, found.names[0])
        index = index_of(found.names[0])
        if index is not None and _is_there(files, index):
            reader.lacks = f"this is one of several files of a model; open {index} for all of it"
            reader.beside = (index,)
        return reader

    return open_kind(files, loose_files.HDF5, make)


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
            for path, found in _present(files, shard, index).items():
                known = names.setdefault(path, {})
                known.update({k: name for k, name in found.items() if name != k or k not in known})
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
        self.index = Index(tree_json.to_json(tree_json.from_names(entries)), entries)

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


def _groups(files: Files, index: str) -> Mapping[str, Sequence[str]]:
    """The files of each group, by its path."""
    size = files.size(index)
    try:
        if size is not None and size > _MOST_INDEX:
            raise ValueError(f"{size} bytes")
        found = json.loads(files.tail(index, _MOST_INDEX))["weight_map"]
        groups = {str(name).strip("/"): list(map(str, of)) for name, of in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise files.damaged(f"{index} is damaged: {error!r}") from error
    for name in {name for of in groups.values() for name in of}:
        if "/" in name or index_of(name) != index:
            raise files.damaged(f"{index} names the file {quoted(name)}")
    return groups


def _present(files: Files, shard: str, index: str) -> LayerNames:
    try:
        return layer_names(files, shard)
    except Damaged as error:
        raise files.damaged(
            f"{shard} is missing, or damaged, which belongs to {index}: {error}"
        ) from error
