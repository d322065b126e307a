"""safetensors files, and Hugging Face folders of them.

Source: transformers' `model.safetensors.index.json`. torch's distributed checkpoints in this
format record in the header where each piece belongs (`DCP_SHARDING_INFO`,
torch/distributed/checkpoint/_hf_utils.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from unickpt.backends._files import file_choice
from unickpt.backends._files.file_choice import FoundFiles, open_kind, weight_map
from unickpt.backends._files.flat_names import SEPARATOR, can_nest, nested_name
from unickpt.backends._files.safetensors_headers import SHARDING, SafetensorsHeader, read_header
from unickpt.errors import CoverageError
from unickpt.extend import (
    ArrayEntry,
    ArrayTable,
    Box,
    FileBox,
    Files,
    RangeReader,
    Reader,
    check_boxes,
    entry_of_box,
    entry_of_boxes,
    name_component,
    quoted,
)

_SUFFIX = ".safetensors"
# As transformers numbers the files of a folder; those of torch's ranks are numbered otherwise.
_NUMBERED = r"(?!shard-\d)(.*)-\d{5}-of-(\d{5})\.safetensors"

HINTS: Collection[str] = ()


def open(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """Opens safetensors files; None if there are none.

    Raises:
        CheckpointCorrupt: a header is damaged, or files are missing.
        StorageError: the storage failed.
    """

    def make(selection: FoundFiles) -> SafetensorsReader:
        where = None if selection.index is None else weight_map(files, selection.index, (_SUFFIX,))
        names = selection.names if where is None else sorted({*where.values()})
        _check_complete(files, names)
        headers = {name: read_header(files, name) for name in names}
        return SafetensorsReader(files, headers, where)

    return open_kind(files, file_choice.SAFETENSORS, make)


def _check_complete(files: Files, names: Collection[str]) -> None:
    """Checks that no file is missing, where names tell how many there are."""
    for name in names:
        match = re.fullmatch(_NUMBERED, name)
        if match is None:
            continue
        begin, count = match[1], match[2]
        every = (f"{begin}-{n:05d}-of-{count}{_SUFFIX}" for n in range(1, int(count) + 1))
        missing = next((other for other in every if other not in names), None)
        if missing is not None:
            raise files.damaged(
                f"there is {name}, and no {missing}; was the folder copied, or written, as a whole?"
            )


class SafetensorsReader(RangeReader):
    """Tensors of one or several files.

    Arguments:
        files: the folder.
        headers: of its files, by name.
        where: the file of each tensor, if an index says.
    """

    format = "safetensors"

    def __init__(
        self,
        files: Files,
        headers: Mapping[str, SafetensorsHeader],
        where: Mapping[str, str] | None,
    ) -> None:
        pieces = _pieces(files, headers, where)
        metadata = {k: v for header in headers.values() for k, v in header.metadata.items()}
        metadata.pop(SHARDING, None)
        is_nested = metadata.pop(SEPARATOR, None) == "/" and can_nest(pieces)
        name_of = nested_name if is_nested else name_component
        table = ArrayTable()
        for name, (dtype, of_tensor) in pieces.items():
            try:
                table.put(_entry(name_of(name), dtype, of_tensor), of_tensor)
            except CoverageError as error:
                raise files.damaged(
                    f"the pieces of {quoted(name)} do not make it up; are files missing? {error}"
                ) from error
        super().__init__(files, table.index(metadata), table.boxes)


def _entry(name: str, dtype: str, boxes: Sequence[FileBox]) -> ArrayEntry:
    if len(boxes) == 1 and not any(boxes[0].box.start):
        return entry_of_box(name, boxes[0].box.shape, dtype, boxes[0])
    shape = [
        max(file_box.box.stop[d] for file_box in boxes) for d in range(len(boxes[0].box.start))
    ]
    filled = [file_box for file_box in boxes if file_box.box.size]
    if not filled and math.prod(shape) == 0:
        return entry_of_box(name, shape, dtype, boxes[0])
    entry = entry_of_boxes(name, shape, dtype, filled or boxes)
    check_boxes(entry, [(file_box.box, (0,)) for file_box in filled])
    return entry


def _pieces(
    files: Files, headers: Mapping[str, SafetensorsHeader], where: Mapping[str, str] | None
) -> dict[str, tuple[str, list[FileBox]]]:
    """The dtype and the boxes of each tensor."""
    pieces: dict[str, tuple[str, list[FileBox]]] = {}
    first_in: dict[str, str] = {}
    for file, header in headers.items():
        for name, tensor in header.tensors.items():
            if where is not None and where.get(name, file) != file:
                continue  # the index wins; arrays that it lacks are shown
            start = header.offsets.get(name)
            if name in pieces and start is None:
                raise files.damaged(
                    f"{quoted(name)} is in {first_in[name]} and in {file}, and no index says which "
                    "one counts"
                )
            origin = start or (0,) * len(tensor.shape)
            if (
                len(origin) != len(tensor.shape)
                or pieces.get(name, (tensor.dtype,))[0] != tensor.dtype
            ):
                raise files.damaged(
                    f"the pieces of {quoted(name)} do not fit together; one is "
                    f"{tensor.dtype}{list(tensor.shape)} at {list(origin)} in {file}"
                )
            stop = tuple(a + n for a, n in zip(origin, tensor.shape, strict=True))
            box = FileBox(Box(origin, stop), tensor.elements)
            first_in.setdefault(name, file)
            pieces.setdefault(name, (tensor.dtype, []))[1].append(box)
    missing = sorted((where or {}).keys() - pieces.keys())
    if missing:
        name = missing[0]
        raise files.damaged(
            f"the index says that {quoted(name)} is in {(where or {})[name]}, which does not "
            f"contain it; {len(missing)} missing in all"
        )
    return pieces
