"""Arrays that Megatron-Core until 0.13 wrote flattened: boxes, each a flat range in pieces.

Source: megatron/core/dist_checkpointing/strategies/torch.py of 0.13,
`sharded_tensor_to_torch_sharded_tensor`. An array [X, Y] in boxes [x, y] is stored as an array
[X / x, Y / y, x * y]; the elements of a box are in row-major order, in one or several pieces.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from unickpt.backends._files.elements import ElementRun, JoinedElements
from unickpt.backends._files.pickle_objects import BadPickle
from unickpt.backends.dcp.metadata import extents
from unickpt.backends.dcp.reader import ChunkedArray
from unickpt.extend import Box, FileBox, quoted

_SHAPE = "nd_reformulated_orig_global_shape"


def shapes_of(mcore_data: Any) -> Mapping[str, tuple[int, ...]]:
    """The shapes of the arrays that are stored flattened, by name.

    Arguments:
        mcore_data: the field `mcore_data` of the metadata; None if it has none.

    Raises:
        BadPickle: it is malformed.
    """
    if mcore_data is None:
        return {}
    if not isinstance(mcore_data, dict):
        raise BadPickle("its mcore_data is no dict")
    return {
        name: extents(facts[_SHAPE], f"the shape of {quoted(name)} in mcore_data")
        for name, facts in mcore_data.items()
        if isinstance(facts, dict) and _SHAPE in facts
    }


def unflattened(name: str, stored: ChunkedArray, shape: tuple[int, ...]) -> ChunkedArray:
    """A flattened array as it was before.

    Arguments:
        name: of the array, for messages.
        stored: as the metadata describes it.
        shape: as it was.

    Raises:
        BadPickle: the shapes contradict each other, or elements are missing.
    """
    if len(stored.shape) != len(shape) + 1:
        raise _contradicts(name, stored, shape)
    *counts, size = stored.shape
    if any(n and extent % n for n, extent in zip(counts, shape, strict=True)):
        raise _contradicts(name, stored, shape)
    inner = tuple(extent // n if n else 0 for n, extent in zip(counts, shape, strict=True))
    if math.prod(inner) != size:
        raise _contradicts(name, stored, shape)
    pieces = dict[tuple[int, ...], list[tuple[int, ElementRun]]]()
    for file_box in stored.boxes:
        *block_index, first = file_box.box.start
        if any(n != 1 for n in file_box.box.shape[:-1]):
            raise BadPickle(
                f"a piece of {quoted(name)} at {list(block_index)} belongs to several boxes"
            )
        run = ElementRun(file_box.elements, 0, file_box.box.size)
        pieces.setdefault(tuple(block_index), []).append((first, run))
    boxes = []
    for index, runs in pieces.items():
        start = tuple(i * n for i, n in zip(index, inner, strict=True))
        box = Box(start, tuple(a + n for a, n in zip(start, inner, strict=True)))
        boxes.append(FileBox(box, _joined(name, box, runs)))
    return replace(stored, shape=shape, boxes=boxes)


def _joined(name: str, box: Box, pieces: list[tuple[int, ElementRun]]) -> JoinedElements:
    """The elements of a box: all its pieces in order."""
    end = 0
    for first, run in sorted(pieces, key=lambda piece: piece[0]):
        if first != end:
            what = "missing" if first > end else "stored twice"
            raise BadPickle(
                f"{quoted(name)}: elements {min(first, end)} to {max(first, end)} of {box} are "
                f"{what}"
            )
        end += run.count
    if end != box.size:
        raise BadPickle(f"{quoted(name)}: elements {end} to {box.size} of {box} are missing")
    return JoinedElements([run for _, run in sorted(pieces, key=lambda piece: piece[0])])


def _contradicts(name: str, stored: ChunkedArray, shape: tuple[int, ...]) -> BadPickle:
    return BadPickle(
        f"{quoted(name)} of shape {list(shape)} is stored flattened as {list(stored.shape)}, which "
        "does not divide it"
    )
