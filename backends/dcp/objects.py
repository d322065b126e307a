"""Values that are no tensors, as torch.save wrote them: containers, plain values, inner tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.backends.dcp.chunks import Compressed, Known, MemoryFile, decompressed
from unickpt.backends.dcp.metadata import Blob
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.foreign.file_ranges import FileBox
from unickpt.foreign.files import Files
from unickpt.foreign.known_objects import decoded, key_of
from unickpt.foreign.pickle_objects import BadPickle, Global, PickledObject, attributes, unread
from unickpt.foreign.torch_pickles import TorchFile
from unickpt.foreign.torch_tensors import Tensor, TorchStorage, holds_tensors
from unickpt.quoting import quoted, shortened
from unickpt.storage.errors import Failed, reading, reading_failed
from unickpt.threads import Pool
from unickpt.trees import tree, tree_json

_MOST_OBJECTS = 1 << 30  # bytes of all values that are no tensors; they are read by `open`
_MOST_COMPRESSED = 16 << 20  # bytes that one of them may become
# Bytes of objects of unknown classes, and of texts, bytes and integers, for each byte of their
# pickle, which can recall them.
_OPAQUE = _LENGTH = 64
_GAP, _SWEEP = 4 << 10, 8 << 20
_THREADS = 16


@dataclass(frozen=True)
class InnerTensor:
    """A tensor within a value, such as within a list.

    Arguments:
        tensor: as its pickle describes it.
        box: where it is.
    """

    tensor: Tensor
    box: FileBox


def read_objects(files: Files, objects: Mapping[str, Blob]) -> dict[str, Any]:
    """Values by name, in few requests: most are a number or a text.

    Arguments:
        files: of the checkpoint.
        objects: where each of them is.

    Returns:
        Containers of plain values, some of them objects of unknown classes, and of `InnerTensor`.

    Raises:
        CheckpointCorrupt: names the one that is damaged.
        UnsupportedFormat: they are very large.
        StorageError: the storage failed.
    """
    if sum(blob.length for blob in objects.values()) > _MOST_OBJECTS:
        raise files.unsupported(
            f"the values that are no tensors have more than {_MOST_OBJECTS} bytes"
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


def read_file(files: Files, name: str) -> Any:
    """What torch.save wrote into a file, as `read_objects` returns it.

    Raises:
        CheckpointCorrupt: it is missing or damaged.
        StorageError: the storage failed.
    """
    try:
        found = TorchFile(files, name)
        return _PickledValues(found, found.pickle_size).value(found.value)
    except BadPickle as error:
        raise unread(error, f"{files.location}: {name}") from error
    except Failed as error:
        raise reading_failed(error, f"{files.location}: {name}") from error


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
    with reading(where):
        data = files.read(first.file, first.offset, last.offset + last.length - first.offset)
        known = Known(files, [(first.offset, data)])
        return {name: _read_object(known, name, blob) for name, blob in sweep}


def _read_object(files: Files, name: str, blob: Blob) -> Any:
    try:
        if not blob.compressed:
            found = TorchFile(files, blob.file, blob.offset, blob.length)
            return _PickledValues(found, blob.length).value(found.value)
        data = files.read(blob.file, blob.offset, blob.length)
        plain = decompressed(data, _MOST_COMPRESSED, blob.file)
        found = TorchFile(MemoryFile(files, plain), blob.file)
        return _PickledValues(found, len(plain), blob).value(found.value)
    except (CheckpointCorrupt, UnsupportedFormat, BadPickle) as error:
        reason = str(error).removeprefix(f"{files.location}: ")
        kind = UnsupportedFormat if isinstance(error, UnsupportedFormat) else CheckpointCorrupt
        raise kind(f"{files.location}: {quoted(name)}: {reason}") from error


class _PickledValues:
    """Turns pickled values into containers of plain values and of `InnerTensor`.

    Arguments:
        file: which holds them.
        most: values; shared containers of a pickle could stand for any number of them.
        compressed: the blob that is the file, if it is compressed.
    """

    def __init__(self, file: TorchFile, most: int, compressed: Blob | None = None) -> None:
        self._file, self._left, self._compressed = file, most, compressed
        self._most_opaque = _OPAQUE * most
        self._length = _LENGTH * most
        self._without: set[int] = set()  # what holds no tensor, by its identity

    def value(self, found: Any, depth: int = 1) -> Any:
        self._spend(1)
        if depth >= tree.MAX_DEPTH:
            raise BadPickle(f"it is nested deeper than {tree.MAX_DEPTH} levels")
        if isinstance(found, PickledObject):
            found = decoded(found)
        if tree_json.is_plain(found):
            self._length -= tree_json.length(found)
            if self._length < 0:
                raise BadPickle("its values are too long for its size")
            return found
        if isinstance(found, dict):
            named = {key_of(k): x for k, x in found.items()}
            if len(named) == len(found) and all(map(_is_key, named)):
                return {key: self.value(item, depth + 1) for key, item in named.items()}
        if isinstance(found, (list, set, frozenset)):
            return [self.value(item, depth + 1) for item in found]
        if isinstance(found, tuple):
            return tuple(self.value(item, depth + 1) for item in found)
        if isinstance(found, Tensor):
            numbers = Box.whole(found.shape).size
            # One that repeats its elements could have any size.
            if numbers * dtypes.from_name(found.dtype).itemsize <= found.nbytes:
                return InnerTensor(found, self._box(found))
        if isinstance(found, PickledObject) and holds_tensors(found, self._without, self._spend):
            found = dict(attributes(found))
            if all(map(_is_key, found)):
                return self.value(found, depth + 1)
        elif isinstance(found, (PickledObject, Global)):
            made = self._file.opaque(found, self._most_opaque)
            self._most_opaque -= len(made.pickle)
            return made
        return f"<{_class_of(found)}>"

    def _spend(self, values: int) -> None:
        self._left -= values
        if self._left < 0:
            raise BadPickle("its containers refer to each other too often")

    def _box(self, tensor: Tensor) -> FileBox:
        box = self._file.box(tensor)
        if self._compressed is None or tensor.storage.data is not None:
            return box
        elements = Compressed(self._compressed, _MOST_COMPRESSED, lambda: box.elements)
        return replace(box, elements=elements)


def _is_key(key: Any) -> bool:
    if type(key) is str:
        return key.isascii() or key.encode(errors="replace").decode() == key
    return type(key) is int


def _class_of(found: Any) -> str:
    if isinstance(found, (PickledObject, Global)):
        return shortened(found.name, 200)
    names = {TorchStorage: "torch.UntypedStorage", Tensor: "torch.Tensor"}
    return names.get(type(found), type(found).__name__)
