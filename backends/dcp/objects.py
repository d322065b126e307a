"""Values that are no tensors, as torch.save wrote them: containers, plain values, inner tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.backends._files.known_objects import key_of
from unickpt.backends._files.pickles import BadPickle, unread
from unickpt.backends._files.torch_pickles import TorchFile
from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.torch_trees import PlainTree
from unickpt.backends.dcp.chunks import ChunkFacts, Compressed, decompressed, in_memory
from unickpt.backends.dcp.metadata import Blob
from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.extend import (
    Box,
    Failed,
    FileBox,
    Files,
    Pool,
    dtype_from_name,
    quoted,
    reading,
    reading_failed,
)

_MOST_OBJECTS = 1 << 30  # bytes of all values that are no tensors; they are read by `open`
_MOST_COMPRESSED = 16 << 20  # bytes that one of them may become
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
        values_by_sweep = threads.map(lambda sweep: _read_sweep(files, sweep), sweeps)
        return {name: value for values in values_by_sweep for name, value in values.items()}


def read_file(files: Files, name: str) -> Any:
    """The content of a file of torch.save, as `read_objects` returns it.

    Raises:
        CheckpointCorrupt: it is missing or damaged.
        StorageError: the storage failed.
    """
    try:
        file = TorchFile(files, name)
        return _PickledValues(file, f"{files.location}: {name}").tree(file.value, 0, 0)
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
        sweep_files = ChunkFacts(files, [(first.offset, data)])
        return {name: _read_object(sweep_files, name, blob) for name, blob in sweep}


def _read_object(files: Files, name: str, blob: Blob) -> Any:
    try:
        if not blob.compressed:
            torch_file = TorchFile(files, blob.file, blob.offset, blob.length)
            return _PickledValues(torch_file, blob.file).tree(torch_file.value, 0, 0)
        data = files.read(blob.file, blob.offset, blob.length)
        plain = decompressed(data, _MOST_COMPRESSED, blob.file)
        torch_file = TorchFile(in_memory(files, blob.file, plain), blob.file)
        return _PickledValues(torch_file, blob.file, blob).tree(torch_file.value, 0, 0)
    except (CheckpointCorrupt, UnsupportedFormat, BadPickle) as error:
        reason = str(error).removeprefix(f"{files.location}: ")
        kind = UnsupportedFormat if isinstance(error, UnsupportedFormat) else CheckpointCorrupt
        raise kind(f"{files.location}: {quoted(name)}: {reason}") from error


class _PickledValues(PlainTree):
    """Makes containers of plain values and of `InnerTensor`.

    Arguments:
        file: which holds them.
        where: the file, for errors.
        compressed: the blob that is the file, if it is compressed.
    """

    def __init__(self, file: TorchFile, where: str, compressed: Blob | None = None) -> None:
        super().__init__(file, where)
        self._compressed = compressed

    def leaf(self, tensor: Tensor) -> InnerTensor | str:
        numbers = Box.whole(tensor.shape).size
        if numbers * dtype_from_name(tensor.dtype).itemsize > tensor.nbytes:
            return "<torch.Tensor>"  # it repeats its elements, so it could have any size
        box = self.file.box(tensor)
        if self._compressed is None or tensor.storage.data is not None:
            return InnerTensor(tensor, box)
        elements = Compressed(self._compressed, _MOST_COMPRESSED, lambda: box.elements)
        return InnerTensor(tensor, replace(box, elements=elements))

    def a_dict(self, entries: Mapping[Any, Any], depth: int, letters: int) -> Any:
        is_named = all(type(key_of(key)) in (str, int) for key in entries)
        return super().a_dict(entries, depth, letters) if is_named else "<dict>"
