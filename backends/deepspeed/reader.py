"""DeepSpeed's checkpoints, read in place: ZeRO's partitions, tensor parallelism, pipelines.

Nothing is merged or written, and opening reads only the pickles, not the tensors. Names:
`module/<p>` is the module's state, `fp32/<p>` the same in float32, from the optimizer's masters
where there are any; `exp_avg/<p>`, `step/<p>` and so on are the optimizer's slots.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from unickpt.backends._files.torch_tensors import Tensor
from unickpt.backends._files.torch_trees import expand
from unickpt.backends._files.tree_tables import table_of_tree
from unickpt.backends.deepspeed import folder as folders
from unickpt.backends.deepspeed import tensor_parallel_boxes
from unickpt.backends.deepspeed.contents import Contents
from unickpt.backends.deepspeed.sources import MergedArray, whole
from unickpt.errors import CoverageError
from unickpt.extend import (
    CHUNK_BYTES,
    Array,
    ArrayEntry,
    ArrayTable,
    Box,
    Failed,
    FileBox,
    Files,
    Leaf,
    ParallelMap,
    RangeReader,
    Reader,
    check_boxes,
    cut_box,
    dtype_from_name,
    entry_of_box,
    entry_of_boxes,
    read_file_box,
    reading,
    reading_failed,
)

HINTS: Collection[str] = tensor_parallel_boxes.HINTS
# For the trainer, by `format_named`.
TensorParallelRules = tensor_parallel_boxes.TensorParallelRules

# Into how many chunks an array is cut, and the fewest bytes of a chunk.
_CHUNKS, _LEAST_CHUNK = 16, 16 << 10


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens a DeepSpeed checkpoint: the folder of a tag, or the one above; None if it is none.

    Raises:
        CheckpointCorrupt: a file is damaged or missing, or files of several saves are mixed.
        UnsupportedFormat: it uses features that are not supported.
        HintError: a hint is wrong, or fits nothing.
        StorageError: the storage failed.
    """
    with reading(files.location):
        folder = folders.find(files)
        if folder is None:
            return None
        tensor_parallel_boxes.check_hints(hints)
        return DeepSpeedReader(Contents(folder, hints))


_Copy = tuple[str, Sequence[FileBox], Sequence[FileBox]]


class DeepSpeedReader(RangeReader):
    """The arrays and plain values of a checkpoint.

    Arguments:
        contents: of the checkpoint.
    """

    format = "deepspeed"

    def __init__(self, contents: Contents) -> None:
        files = contents.folder.files
        copies: list[_Copy] = []

        def put(table: ArrayTable, leaf: Leaf) -> None:
            array = leaf.value
            if isinstance(array, Tensor):  # of a user's state
                array = whole(contents.files_of[id(array)].source(array, f"array {leaf.name!r}"))
            table.put(_entry(files, leaf.name, array), array.boxes)
            copies.extend((leaf.name, array.boxes, copy.boxes) for copy in array.copies)

        table = table_of_tree(files, contents.root, (MergedArray, Tensor), put, expand)
        meshes = [len(e.layout.mesh.processes) for e in table.entries.values() if e.layout]
        super().__init__(files, table.index(processes=max(meshes, default=1)), table.boxes)
        self._copies = copies
        self.version = contents.version

    def check_structure(self, run: ParallelMap) -> Iterator[tuple[str, str]]:
        """Compares the copies of parameters that several ranks hold; loads read one of them."""
        for (name, *_), differs in zip(self._copies, run(self._differs, self._copies), strict=True):
            if differs:
                yield name, differs

    def _differs(self, copy: _Copy) -> str:
        """How a copy of an array differs; empty if it does not."""
        name, ours, theirs = copy
        dtype = dtype_from_name(self.index.arrays[name].dtype)
        most = CHUNK_BYTES // dtype.itemsize
        try:
            for mine, other in zip(ours, theirs, strict=True):
                for box in cut_box(mine.box, most):
                    both = [
                        self._elements(file_box, box, dtype).tobytes() for file_box in (mine, other)
                    ]
                    if both[0] != both[1]:
                        return f"two ranks hold different elements in {box}"
        except Failed as error:
            return str(reading_failed(error, f"{self.location}: array {name!r}"))
        return ""

    def _elements(self, file_box: FileBox, box: Box, dtype: Any) -> Array:
        out = np.empty(box.shape, dtype)
        read_file_box(self._files, file_box, box.relative_to(file_box.box.start), out)
        return out


def _entry(files: Files, name: str, array: MergedArray) -> ArrayEntry:
    # A part of an array is in the files of some ranks only: chunks must not span those of all.
    nbytes = math.prod(array.shape) * dtype_from_name(array.dtype).itemsize
    most = min(max(_LEAST_CHUNK, nbytes // _CHUNKS), CHUNK_BYTES)
    if len(array.boxes) == 1 and array.boxes[0].box.shape == array.shape:
        return entry_of_box(name, array.shape, array.dtype, array.boxes[0], most)
    entry = entry_of_boxes(name, array.shape, array.dtype, array.boxes, most)
    try:
        check_boxes(entry, entry.boxes or ())
    except CoverageError as error:
        raise files.damaged(f"{error}") from error
    if array.layout is None:
        return entry
    split = tuple(d for d, axes in enumerate(array.layout.dims) if axes)
    return replace(entry, layout=array.layout, cut=split, boxes=None)
