"""torch's distributed checkpoints (DCP), as `FileSystemWriter` writes them.

Source: torch/distributed/checkpoint/filesystem.py and _nested_dict.py. The tree is that of the
saved state, as far as the metadata records the path of each value. A value without a recorded path
has DCP's name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.backends._files.known_objects import LOCAL
from unickpt.backends._files.pickles import BadPickle, unread
from unickpt.backends._files.torch_trees import expand
from unickpt.backends.dcp import metadata
from unickpt.backends.dcp.chunks import ChunkFinder, zstandard
from unickpt.backends.dcp.metadata import KeyPath, Metadata
from unickpt.backends.dcp.objects import InnerTensor, read_objects
from unickpt.errors import CheckpointCorrupt, CheckpointNotFound, CoverageError, UnsupportedLeaf
from unickpt.extend import (
    WHOLE_BOXES,
    ArrayEntry,
    ArrayTable,
    Box,
    FileBox,
    FileRange,
    Files,
    RangeReader,
    Reader,
    check_boxes,
    entry_of_box,
    entry_of_boxes,
    flatten_tree,
    is_plain,
    leaves_of_tree,
    quoted,
    reading,
)

METADATA = ".metadata"
_MOST_METADATA = 1 << 30
_DATA = re.compile(r"__\d+_\d+\.distcp")

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a folder with a `.metadata` of torch; None if there is none.

    Raises:
        CheckpointNotFound: there are its data without it.
        CheckpointCorrupt: the metadata is damaged, chunks leave gaps or overlap, files are missing,
            or a value that is no tensor is damaged.
        UnsupportedFormat: data was transformed in a way that is not known, or a dtype is not known.
        StorageError: the storage failed.
    """
    with reading(files.location):
        if not files.exists(METADATA):
            if any(map(_DATA.fullmatch, files.here)):
                raise CheckpointNotFound(
                    f"no checkpoint at {files.location}: there are files of torch's DCP, but no "
                    f"{METADATA}, which is written last: the save is under way or failed, or the "
                    f"folder was not copied as a whole. Open an earlier one, or copy {METADATA}"
                )
            return None
        metadata = read_metadata(files)
        if metadata is None:
            return None
        return DcpReader(
            files, nested(files, state_of(files, metadata), metadata.paths), metadata.version
        )


def read_metadata(
    files: Files, name: str = METADATA, roots: Collection[str] = metadata.ROOTS
) -> Metadata | None:
    """Reads a `.metadata`.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        roots: the classes of the format's metadata.

    Returns:
        None if it belongs to another format.

    Raises:
        As `open`.
    """
    where = f"{files.location}: {name}"
    size = files.size(name)
    if size is not None and size > _MOST_METADATA:
        raise CheckpointCorrupt(f"{where} has {size} bytes, too many")
    try:
        return metadata.read(files.whole(name), where, roots)
    except BadPickle as error:
        raise unread(error, where) from error


# --- stored values ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChunkedArray:
    """An array, a leaf of a state.

    Arguments:
        dtype: the checkpoint's name of its dtype.
        shape: global.
        boxes: where its elements are; none of an empty array.
        compressed: whether a box can only be read as a whole.
    """

    dtype: str
    shape: tuple[int, ...]
    boxes: Sequence[FileBox]
    compressed: bool = False


def state_of(files: Files, metadata: Metadata) -> dict[str, Any]:
    """All that a `.metadata` describes, by its names: arrays, and containers of plain values.

    Raises:
        As `open`.
    """
    check_files(files, metadata)
    values = read_objects(files, metadata.objects)
    finder, arrays = ChunkFinder(), dict[str, ChunkedArray]()
    for name, facts in metadata.tensors.items():
        boxes = [FileBox(c.box, finder.elements(name, facts, c)) for c in facts.chunks]
        compressed = any(chunk.blob.compressed for chunk in facts.chunks)
        arrays[name] = ChunkedArray(facts.dtype, facts.shape, boxes, compressed)
    return {name: arrays[name] if name in arrays else values[name] for name in metadata.names}


def check_files(files: Files, metadata: Metadata) -> None:
    """Checks that no file is missing, nor the library that decompresses them.

    Raises:
        CheckpointCorrupt: one is missing.
        UnsupportedFormat: the library is.
        Failed: the storage failed.
    """
    needed = {chunk.blob.file: name for name, t in metadata.tensors.items() for chunk in t.chunks}
    needed.update({blob.file: name for name, blob in metadata.objects.items()})
    # One listing is cheaper than a request for each file; a local folder may hold much else.
    listed_files = set[str]() if files.location.is_local else set(files.names)
    for file, name in sorted(needed.items()):
        if file not in listed_files and not files.exists(file):
            raise files.incomplete(f"the file {file}, with data of {quoted(name)}, is missing")
    for file, name in sorted(metadata.compressed.items()):
        zstandard(f"{files.location}: {quoted(name)} in {file}")


def nested(files: Files, state: Mapping[str, Any], paths: Mapping[str, KeyPath]) -> Any:
    """A state as it was saved: nested containers.

    Arguments:
        files: of the checkpoint, for messages.
        state: its values by name.
        paths: the keys that each name consists of, as far as they are known.

    Raises:
        CheckpointCorrupt: one value lies within another.
    """
    root = _NestedLevel()
    for name, value in state.items():
        *above, last = paths.get(name) or (name,)
        level = root
        for key in above:
            level = level.setdefault(key, _NestedLevel())
            if not isinstance(level, _NestedLevel):
                break
        if not isinstance(level, _NestedLevel) or last in level:
            raise files.damaged(
                f"{METADATA}: {quoted(name)} has the same place in the saved state as another value"
            )
        level[last] = value
    return root.containers()


class _NestedLevel(dict[Any, Any]):
    """A container of a state; values can be dicts, too."""

    def containers(self) -> Any:
        children = {
            k: v.containers() if isinstance(v, _NestedLevel) else v for k, v in self.items()
        }
        numbered = bool(children) and all(type(key) is int for key in children)
        if numbered and max(children) == len(children) - 1:
            return [children[position] for position in range(len(children))]
        return children


# --- the reader ---------------------------------------------------------------------------------


_ONE_PART = (
    "with flatten_state_dict=False, DCP stores of a DTensor in a nested dict only the part of the "
    f"rank that wrote the dict (<name>/{LOCAL}); the other parts are not in the checkpoint"
)


class DcpReader(RangeReader):
    """Reads arrays that are stored in chunks; for all formats that build on DCP.

    Arguments:
        files: of the checkpoint.
        state: nested containers of `ChunkedArray`, `InnerTensor` and plain values.
        version: of the metadata.

    Raises:
        CheckpointCorrupt: the chunks of an array leave gaps or overlap, or its name is malformed.
    """

    format = "dcp"
    most_per_byte = 1 << 10  # they may be compressed

    def __init__(self, files: Files, state: Any, version: str) -> None:
        try:
            node = flatten_tree(state, _is_leaf, expand)
        except UnsupportedLeaf as error:
            raise files.damaged(f"{METADATA}: {error}") from error
        table = ArrayTable(node)
        for leaf in leaves_of_tree(node):
            name, value = leaf.name, leaf.value
            if isinstance(value, ChunkedArray):
                table.put(_entry(files, name, value), value.boxes)
            elif isinstance(value, InnerTensor):
                facts = value.tensor.shape, value.tensor.dtype, value.box
                table.put(entry_of_box(name, *facts), (value.box,))
            else:
                table.values[name] = value
        super().__init__(files, table.index(), table.boxes)
        self.version = version
        if any(name.rpartition("/")[2] == LOCAL for name in table.entries):
            self.lacks = _ONE_PART


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (ChunkedArray, InnerTensor)) or is_plain(value)


def _entry(files: Files, name: str, array: ChunkedArray) -> ArrayEntry:
    everything = Box.whole(array.shape)
    if everything.empty:
        return entry_of_box(name, array.shape, array.dtype, FileBox(everything, FileRange("", 0)))
    if not array.boxes:
        raise files.damaged(
            f"{METADATA} lists no data of array {name!r}, whose shape is {list(array.shape)}"
        )
    if [file_box.box for file_box in array.boxes] == [everything] and not array.compressed:
        return entry_of_box(name, array.shape, array.dtype, array.boxes[0])
    entry = entry_of_boxes(
        name, array.shape, array.dtype, array.boxes, WHOLE_BOXES if array.compressed else None
    )
    try:
        check_boxes(entry, entry.boxes or ())
    except CoverageError as error:
        raise files.damaged(f"{METADATA}: {error}") from error
    return entry
