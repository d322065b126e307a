"""torch's distributed checkpoints (DCP), as `FileSystemWriter` writes them.

Source: torch/distributed/checkpoint/filesystem.py. A file holds a zip of torch.save for each chunk,
or, if it was written with `SerializationFormat.SAFETENSORS`, one safetensors file of all its
tensors after the zips of its other values. Arrays have the names that DCP gives them: the keys of
the state that was saved, joined by dots.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.backends.dcp import metadata
from unickpt.backends.dcp.metadata import Blob, Chunk, Metadata, TensorFacts
from unickpt.backends.safetensors import Header, read_header
from unickpt.errors import CheckpointCorrupt, CoverageError, UnsupportedFormat, UnsupportedLeaf
from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import FileBox, RangeReader, of_boxes, whole
from unickpt.foreign.files import Files
from unickpt.foreign.pickles import BadPickle, Constructors, Global, Opaque
from unickpt.foreign.torch_pickles import Storage, Tensor, TorchFile
from unickpt.format.chunk_grid import Part
from unickpt.format.coverage import check_boxes
from unickpt.format.index import ArrayEntry, Index
from unickpt.format.reader import Reader
from unickpt.quoting import quoted, shortened
from unickpt.storage.errors import Failed, reading_failed
from unickpt.threads import Pool
from unickpt.trees import plain_values, tree

_METADATA = ".metadata"
_MOST_METADATA = 1 << 30
_MOST_OBJECTS = 1 << 30  # bytes of all values that are no tensors; they are read by `open`
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_EDGE = 1024  # of a chunk's zip: its pickle is at the beginning, its directory at the end
_GAP, _SWEEP = 4 << 10, 8 << 20
_THREADS = 16


HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a folder with a `.metadata` of torch; None if there is none.

    Raises:
        CheckpointCorrupt: the metadata is damaged, chunks leave gaps or overlap, files are missing,
            or a value that is no tensor is damaged.
        UnsupportedFormat: data was transformed, such as compressed, or a dtype is not known.
        StorageError: the storage failed.
    """
    try:
        if not files.exists(_METADATA):
            return None
        found = _read_metadata(files)
        return None if found is None else DcpReader(files, found)
    except Failed as error:
        raise reading_failed(error, str(files.location)) from error


def _read_metadata(files: Files) -> Metadata | None:
    where = f"{files.location}: {_METADATA}"
    size = files.size(_METADATA)
    if size is not None and size > _MOST_METADATA:
        raise CheckpointCorrupt(f"{where} has {size} bytes, too many")
    try:
        return metadata.read(files.whole(_METADATA), where)
    except BadPickle as error:
        raise CheckpointCorrupt(f"{where} is damaged: {error}") from error


class DcpReader(RangeReader):
    """Reads chunks; where the data of each begins in its file is found out when it is first read.

    Arguments:
        files: the folder.
        metadata: what its `.metadata` says.

    Raises:
        CheckpointCorrupt, UnsupportedFormat: see `open`.
        Failed: the storage failed.
    """

    format = "dcp"

    def __init__(self, files: Files, metadata: Metadata) -> None:
        _check_files(files, metadata)
        values = _read_objects(files, metadata.objects)
        state = {
            name: metadata.tensors[name] if name in metadata.tensors else values[name]
            for name in metadata.names
        }
        try:
            node = tree.flatten(state, _is_leaf, lambda obj, name: None)
        except UnsupportedLeaf as error:
            raise CheckpointCorrupt(f"{files.location}: {_METADATA}: {error}") from error
        leaves = {leaf.name: leaf.value for leaf in tree.leaves(node)}
        entries, boxes = dict[str, ArrayEntry](), dict[str, Sequence[FileBox]]()
        self._chunks: dict[str, dict[tuple[int, ...], Chunk]] = {}
        for name, value in leaves.items():
            if isinstance(value, TensorFacts):
                entries[name] = _entry(files, name, value)
                self._chunks[name] = {chunk.box.start: chunk for chunk in value.chunks}
                boxes[name] = ()
            elif isinstance(value, _Inside):
                entries[name] = whole(name, value.tensor.shape, value.tensor.dtype, value.box)
                boxes[name] = (value.box,)
        plain = {name: value for name, value in leaves.items() if name not in entries}
        super().__init__(files, Index(tree.to_json(node), entries, values=plain), boxes)
        self.version = metadata.version
        self.paths = {tree.component(name): path for name, path in metadata.paths.items()}
        """The keys of the saved state of which the name of each of its leaves consists."""
        self._saved_as = {tree.component(name): name for name in metadata.tensors}
        self._headers: dict[tuple[str, int], Header] = {}

    def check_backed(self, entry: ArrayEntry) -> None:
        itemsize = dtypes.from_name(entry.dtype).itemsize
        for chunk in self._chunks.get(entry.name, {}).values():
            blob, needed = chunk.blob, chunk.box.size * itemsize
            end = blob.offset + blob.length
            if blob.length < needed or not self._reaches(entry, blob.file, end):
                raise CheckpointCorrupt(
                    f"{self.location}: array {entry.name!r} {chunk.box} of {needed} bytes is said "
                    f"to be in the {blob.length} bytes from {blob.offset} on of {blob.file}, which "
                    "does not have them"
                )
        super().check_backed(entry)

    def read_chunk(
        self,
        entry: ArrayEntry,
        part: Part,
        number: int,
        row: Any,
        out: Array,
        requested: Any = None,
    ) -> bool:
        located, start = self._boxes[entry.name], part.box.start
        if start not in located:  # two threads may find it out twice
            located[start] = self._locate(entry, self._chunks[entry.name][start])
        return super().read_chunk(entry, part, number, row, out, requested)

    def _locate(self, entry: ArrayEntry, chunk: Chunk) -> FileBox:
        """Where the elements of a chunk are, by its own header, which must fit the metadata."""
        where = f"{self.location}: array {entry.name!r} {chunk.box}"
        blob = chunk.blob
        try:
            header = self._headers.get((blob.file, blob.offset))
            if header is not None:
                return self._in_safetensors(entry, chunk, header)
            head = self._files.read(blob.file, blob.offset, min(_EDGE, blob.length))
            if head[:4] == _ZIP:
                return self._in_zip(entry, chunk, head)
            header = read_header(_Rest(self._files, blob.offset), blob.file)
            self._headers[blob.file, blob.offset] = header
            return self._in_safetensors(entry, chunk, header)
        except Failed as error:
            raise reading_failed(error, where) from error
        except CheckpointCorrupt as error:
            reason = str(error).removeprefix(f"{self.location}: ")
            raise CheckpointCorrupt(f"{where}: {reason}") from error

    def _in_zip(self, entry: ArrayEntry, chunk: Chunk, head: bytes) -> FileBox:
        blob = chunk.blob
        end = blob.offset + blob.length
        known = [(blob.offset, head)]
        if blob.length > _EDGE:
            known.append((end - _EDGE, self._files.read(blob.file, end - _EDGE, _EDGE)))
        found = TorchFile(_Known(self._files, known), blob.file, blob.offset, blob.length)
        tensor = found.value
        if not isinstance(tensor, Tensor):
            raise self._contradicts(entry, chunk, "no tensor")
        self._check(entry, chunk, tensor.dtype, tensor.shape)
        return found.box(tensor, chunk.box)

    def _in_safetensors(self, entry: ArrayEntry, chunk: Chunk, header: Header) -> FileBox:
        name = self._saved_as[entry.name]
        tensor = header.tensors.get(name)
        others = [c for c in self._chunks[entry.name].values() if c.blob.file == chunk.blob.file]
        if tensor is None or len(others) > 1:  # it can hold one tensor of a name
            raise self._contradicts(entry, chunk, "no tensor of its own for this chunk")
        self._check(entry, chunk, tensor.dtype, tensor.shape)
        told = _recorded_start(header, name)
        if told is not None and told != list(chunk.box.start):
            raise self._contradicts(entry, chunk, f"the part of it that begins at {quoted(told)}")
        return FileBox(chunk.box, FileRange(chunk.blob.file, chunk.blob.offset + tensor.offset))

    def _check(self, entry: ArrayEntry, chunk: Chunk, dtype: str, shape: tuple[int, ...]) -> None:
        if (dtype, shape) != (entry.dtype, chunk.box.shape):
            raise self._contradicts(entry, chunk, dtypes.with_shape(dtype, shape))

    def _contradicts(self, entry: ArrayEntry, chunk: Chunk, found: str) -> CheckpointCorrupt:
        expected = dtypes.with_shape(entry.dtype, chunk.box.shape)
        return CheckpointCorrupt(
            f"{chunk.blob.file} contains {found} at byte {chunk.blob.offset}, where {_METADATA} "
            f"expects {expected} for {chunk.box}; are the files of one save?"
        )


# --- arrays -------------------------------------------------------------------------------------


def _check_files(files: Files, metadata: Metadata) -> None:
    """Checks that no file is missing."""
    needed = {chunk.blob.file: name for name, t in metadata.tensors.items() for chunk in t.chunks}
    needed.update({blob.file: name for name, blob in metadata.objects.items()})
    # One listing is cheaper than a request for each file; a local folder may hold much else.
    there = set[str]() if files.location.is_local else set(files.names)
    for file, name in sorted(needed.items()):
        if file not in there and not files.exists(file):
            raise CheckpointCorrupt(
                f"{files.location}: there is no file {file}, which holds data of {quoted(name)}; "
                "was the folder copied as a whole?"
            )


def _entry(files: Files, name: str, facts: TensorFacts) -> ArrayEntry:
    everything = Box.whole(facts.shape)
    boxes = [
        FileBox(chunk.box, FileRange(chunk.blob.file, chunk.blob.offset)) for chunk in facts.chunks
    ]
    if everything.empty or [found.box for found in boxes] == [everything]:
        return whole(name, facts.shape, facts.dtype, FileBox(everything, FileRange("", 0)))
    if not boxes:
        raise CheckpointCorrupt(
            f"{files.location}: {_METADATA} lists no data of array {name!r}, whose shape is "
            f"{list(facts.shape)}"
        )
    entry = of_boxes(name, facts.shape, facts.dtype, boxes)
    try:
        check_boxes(entry, entry.boxes or ())
    except CoverageError as error:
        raise CheckpointCorrupt(f"{files.location}: {_METADATA}: {error}") from error
    return entry


def _recorded_start(header: Header, name: str) -> Any:
    """Where a tensor of a safetensors file begins in the whole one, if the file says it."""
    text = header.metadata.get("DCP_SHARDING_INFO", "{}")
    try:
        return json.loads(text).get(name, {}).get("saved_offsets")
    except (ValueError, AttributeError, RecursionError) as error:
        raise CheckpointCorrupt(
            f"the places of tensors in its header are damaged: {error}"
        ) from error


# --- other values -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Inside:
    """A tensor within a value, such as within a list.

    Arguments:
        tensor: as its pickle describes it.
        box: where it is.
    """

    tensor: Tensor
    box: FileBox


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (TensorFacts, _Inside)) or plain_values.is_plain(value)


def _read_objects(files: Files, objects: Mapping[str, Blob]) -> dict[str, Any]:
    """All values that are no tensors, in few requests: most are a number or a text."""
    if sum(blob.length for blob in objects.values()) > _MOST_OBJECTS:
        raise UnsupportedFormat(
            f"{files.location}: the values that are no tensors have more than {_MOST_OBJECTS} bytes"
        )
    order = sorted(objects.items(), key=lambda item: (item[1].file, item[1].offset))
    sweeps: list[list[tuple[str, Blob]]] = []
    for name, blob in order:
        if not sweeps or not _goes_on(sweeps[-1][0][1], sweeps[-1][-1][1], blob):
            sweeps.append([])
        sweeps[-1].append((name, blob))
    with Pool(max(1, min(_THREADS, len(sweeps)))) as threads:
        found = threads.map(lambda sweep: _read_sweep(files, sweep), sweeps)
        return {name: value for values in found for name, value in values.items()}


def _goes_on(first: Blob, last: Blob, blob: Blob) -> bool:
    """Whether to read a blob in one request with those before it."""
    return (
        blob.file == first.file
        and last.offset + last.length <= blob.offset <= last.offset + last.length + _GAP
        and blob.offset + blob.length - first.offset <= _SWEEP
    )


def _read_sweep(files: Files, sweep: Sequence[tuple[str, Blob]]) -> dict[str, Any]:
    first, last = sweep[0][1], sweep[-1][1]
    where = f"{files.location}: {quoted(sweep[0][0])}"
    try:
        data = files.read(first.file, first.offset, last.offset + last.length - first.offset)
        known = _Known(files, [(first.offset, data)])
        return {name: _read_object(known, name, blob) for name, blob in sweep}
    except Failed as error:
        raise reading_failed(error, where) from error


def _read_object(files: Files, name: str, blob: Blob) -> Any:
    try:
        found = TorchFile(files, blob.file, blob.offset, blob.length, _BYTES)
        return _Values(found, blob.length).value(found.value)
    except (CheckpointCorrupt, BadPickle) as error:
        reason = str(error).removeprefix(f"{files.location}: ")
        raise CheckpointCorrupt(f"{files.location}: {quoted(name)}: {reason}") from error


def _encoded(text: Any, codec: Any = "latin1") -> bytes:
    if not isinstance(text, str) or codec != "latin1":
        raise BadPickle("bytes are not pickled as Python does it")
    return text.encode("latin1")


# Bytes, as they are pickled for versions of Python that had none.
_BYTES: Constructors = {
    "_codecs.encode": _encoded,
    "builtins.bytes": lambda: b"",
    "__builtin__.bytes": lambda: b"",
}


class _Values:
    """Turns pickled values into containers of plain values; all else becomes a text.

    Arguments:
        file: which holds them.
        most: values; shared containers of a pickle could stand for any number of them.
    """

    def __init__(self, file: TorchFile, most: int) -> None:
        self._file, self._left = file, most

    def value(self, found: Any, depth: int = 1) -> Any:
        self._left -= 1
        if self._left < 0 or depth >= tree.MAX_DEPTH:
            raise BadPickle("its containers refer to each other too often")
        if plain_values.is_plain(found):
            return found
        if isinstance(found, dict) and all(map(_is_key, found)):
            return {key: self.value(item, depth + 1) for key, item in found.items()}
        if isinstance(found, (list, set, frozenset)):
            return [self.value(item, depth + 1) for item in found]
        if isinstance(found, tuple):
            return tuple(self.value(item, depth + 1) for item in found)
        if isinstance(found, Tensor):
            numbers = Box.whole(found.shape).size
            # One that repeats its elements could have any size.
            if numbers * dtypes.from_name(found.dtype).itemsize <= found.nbytes:
                return _Inside(found, self._file.box(found))
        return f"<{_class_of(found)}>"


def _is_key(key: Any) -> bool:
    if type(key) is str:
        return key.isascii() or key.encode(errors="replace").decode() == key
    return type(key) is int


def _class_of(found: Any) -> str:
    if isinstance(found, (Opaque, Global)):
        return shortened(found.name, 200)
    names = {Storage: "torch.UntypedStorage", Tensor: "torch.Tensor"}
    return names.get(type(found), type(found).__name__)


# --- files --------------------------------------------------------------------------------------


class _Known(Files):
    """Files of which some bytes are in memory already; for those who parse them.

    Arguments:
        files: the others.
        known: offsets and bytes, all of the one file that is parsed.
    """

    def __init__(self, files: Files, known: Iterable[tuple[int, bytes]]) -> None:
        self.location, self._files, self._all = files.location, files, list(known)

    def read(self, file: str, offset: int, length: int) -> bytes:
        for begin, data in self._all:
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin : offset - begin + length]
        begin, data = self._all[-1]
        if offset + length == begin + len(data) and _ZIP_END in data:
            # Who looks for the end of a zip asks for more than the end has, except for comments.
            return bytes(length - len(data)) + data
        return self._files.read(file, offset, length)


class _Rest(Files):
    """Files without their first bytes.

    Arguments:
        files: the whole ones.
        begin: how many bytes are missing.
    """

    def __init__(self, files: Files, begin: int) -> None:
        self.location, self._files, self._begin = files.location, files, begin

    def size(self, file: str) -> int | None:
        size = self._files.size(file)
        return None if size is None else size - self._begin

    def read(self, file: str, offset: int, length: int) -> bytes:
        return self._files.read(file, self._begin + offset, length)
