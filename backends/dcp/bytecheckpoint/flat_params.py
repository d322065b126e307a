"""FSDP1's flat parameters, as ByteCheckpoint stores them: one array of all parameters of a module.

Source: bytecheckpoint/planner/fsdp/fsdp_hack.py and utilities/ckpt_format/fsdp_ckpt_utils.py. The
metadata of the model says which parameter is where; the flat arrays of the optimizer lie alike.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.backends._files.elements import ElementRun, JoinedElements
from unickpt.backends._files.pickle_objects import BadPickle
from unickpt.backends.dcp.metadata import extents
from unickpt.backends.dcp.reader import ChunkedArray
from unickpt.extend import Box, FileBox, quoted

FLAT = "_flat_param"
"""How the names of flat parameters end."""
_NAMES, _SHAPES = "fsdp_flat_param_to_fqns", "fsdp_shapes"
_COUNTS, _PADDING = "fsdp_numels_with_padding", "fsdp_is_padding_mask"
_MOST_PARTS = 1_000_000


@dataclass(frozen=True)
class FlatPart:
    """A parameter within a flat one.

    Arguments:
        name: of the parameter, in the whole model.
        shape: of the parameter.
        first: the number of its first element in the flat one.
    """

    name: str
    shape: tuple[int, ...]
    first: int


def parts_of(
    user_defined: Any, parameter_names: Collection[str]
) -> Mapping[str, Sequence[FlatPart]]:
    """The parameters in each flat one, by its name.

    Arguments:
        user_defined: the `user_defined_dict` of the model's metadata.
        parameter_names: names of parameters that the optimizer has.

    Raises:
        BadPickle: it is malformed.
    """
    if not isinstance(user_defined, dict) or _NAMES not in user_defined:
        return {}
    tables = [user_defined.get(key) for key in (_NAMES, _SHAPES, _COUNTS, _PADDING)]
    dicts = [table for table in tables if isinstance(table, dict)]
    if len(dicts) != len(tables):
        raise BadPickle("its facts of flat parameters are no dicts")
    # Lists can be shared, and stand for any number of parts then.
    if sum(len(x) for x in dicts[2].values() if isinstance(x, (list, tuple))) > _MOST_PARTS:
        raise BadPickle(f"it has more than {_MOST_PARTS} parts of flat parameters")
    return {
        flat: _parts(flat, [table.get(flat) for table in dicts], parameter_names)
        for flat in dicts[0]
    }


def _parts(flat: Any, lists: Sequence[Any], parameter_names: Collection[str]) -> Sequence[FlatPart]:
    if not isinstance(flat, str) or not all(isinstance(x, (list, tuple)) for x in lists):
        raise BadPickle(f"the facts of the flat parameter {quoted(flat)} are no lists")
    names, shapes, counts, padding = lists
    if len(counts) != len(padding) or len(names) != len(shapes):
        raise BadPickle(f"the facts of the flat parameter {quoted(flat)} contradict each other")
    if not all(isinstance(name, str) for name in names):
        raise BadPickle(f"the names in the flat parameter {quoted(flat)} are no texts")
    parts, first = list[FlatPart](), 0
    remaining = zip(_whole_names(flat, names, parameter_names), shapes, strict=True)
    for (count,), pads in zip(map(_one, counts), padding, strict=True):
        name, shape = (None, ()) if pads else next(remaining, (None, ()))
        if not pads:
            sizes = extents(shape, f"a shape in the flat parameter {quoted(flat)}")
            if name is None or math.prod(sizes) != count:
                raise BadPickle(
                    f"the flat parameter {quoted(flat)} has {count} elements of {quoted(name)}, "
                    f"whose shape is {list(sizes)}"
                )
            parts.append(FlatPart(name, sizes, first))
        first += count
    if next(remaining, None) is not None:
        raise BadPickle(f"the flat parameter {quoted(flat)} lacks elements of its last parameters")
    return parts


def _one(count: Any) -> tuple[int, ...]:
    return extents((count,), "the size of a part of a flat parameter")


def _whole_names(flat: str, names: Sequence[str], parameter_names: Collection[str]) -> list[str]:
    """The names of parameters in the whole model.

    They are stored relative to the module that is flattened, by old versions as a whole: if all
    of them begin as their module, and the optimizer knows them so.
    """
    above = flat.removesuffix(FLAT)
    relative = [above + name.removeprefix(".") for name in names]
    old = (
        all(name.startswith(above) for name in names)
        and any(name in parameter_names for name in names)
        and not any(name in parameter_names for name in relative)
    )
    return list(names) if old else relative


def split(name: str, flat: ChunkedArray, parts: Sequence[FlatPart]) -> Mapping[str, ChunkedArray]:
    """The parameters that are stored in a flat array, by name.

    Arguments:
        name: of the flat array, for messages.
        flat: one-dimensional; padding may be missing, and whole parameters that are not trained.
        parts: the parameters.

    Raises:
        BadPickle: elements are missing.
    """
    if len(flat.shape) != 1:
        raise BadPickle(f"the flat parameter {quoted(name)} has the shape {list(flat.shape)}")
    boxes = sorted(flat.boxes, key=lambda file_box: file_box.box.start)
    ends = [file_box.box.stop[0] for file_box in boxes]
    if any(end > after.box.start[0] for end, after in zip(ends, boxes[1:], strict=False)):
        raise BadPickle(f"chunks of the flat parameter {quoted(name)} overlap")
    arrays = {}
    for part in parts:
        runs = _runs(boxes, ends, part.first, part.first + math.prod(part.shape))
        count = sum(run.count for run in runs)
        if count not in (0, math.prod(part.shape)):
            raise BadPickle(
                f"the flat parameter {quoted(name)} holds {count} elements of {quoted(part.name)}, "
                f"whose shape is {list(part.shape)}"
            )
        if count or 0 in part.shape:
            box = FileBox(Box.whole(part.shape), JoinedElements(runs))
            arrays[part.name] = replace(flat, shape=part.shape, boxes=[box])
    return arrays


def _runs(boxes: Sequence[FileBox], ends: Sequence[int], first: int, stop: int) -> list[ElementRun]:
    """What is stored of the elements from `first` to `stop`, in order."""
    runs = []
    for index in range(bisect.bisect_right(ends, first), len(boxes)):
        begin = boxes[index].box.start[0]
        low, high = max(begin, first), min(ends[index], stop)
        if low >= high:
            break
        runs.append(ElementRun(boxes[index].elements, low - begin, high - low))
    return runs
