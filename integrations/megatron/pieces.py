"""Megatron's sharded tensors as boxes of global arrays, each with the memory that holds it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import Box, row_major

Ends = tuple[tuple[int, ...], tuple[int, ...]]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class TensorPiece:
    """A box of a global array.

    Arguments:
        key: Megatron's name of the array.
        shape: of the array.
        box: in it.
        data: a view of the local tensor, of the shape of the box.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    data: torch.Tensor


def is_main(replica_id: Any) -> bool:
    """Whether of all replicas it is this one that is saved."""
    return replica_id == 0 if isinstance(replica_id, int) else all(part == 0 for part in replica_id)


def pieces_of(sharded: Any) -> list[TensorPiece]:
    """The boxes of a `ShardedTensor`: one, or several if it has a `flattened_range`.

    Raises:
        UnsupportedLeaf: its tensor is of a class that is not stored.
    """
    data = plain_tensor(sharded.data, sharded.key)
    flat = sharded.flattened_range
    if flat is not None:
        local = Strided(row_major(sharded.local_shape))
        return flat_pieces(sharded, data, (flat.start, flat.stop), local)
    return [_piece(sharded, data, (0,) * len(sharded.local_shape), tuple(sharded.local_shape))]


@dataclass(frozen=True)
class Strided:
    """Where the elements of a tensor are in the flattened parameter that it is a part of.

    Arguments:
        strides: in elements.
        offset: of its first element.
    """

    strides: tuple[int, ...]
    offset: int = 0


def flat_pieces(
    sharded: Any, data: torch.Tensor, part: tuple[int, int], where: Strided
) -> list[TensorPiece]:
    """The boxes of a `ShardedTensor` that is only partly on this rank.

    Arguments:
        sharded: says where in the global array its tensor lies.
        data: elements of the flattened parameter, contiguous, one-dimensional.
        part: which: of the first, and after the last.
        where: where those of the `ShardedTensor` are in the flattened parameter.

    Raises:
        UnsupportedLeaf: the parameter's elements are in another order there.
    """
    first, after = part
    shape = tuple(sharded.local_shape)
    if data.ndim != 1 or data.shape[0] != after - first or not data.is_contiguous():
        raise UnsupportedLeaf(
            f"{sharded.key!r}: elements {first} to {after} of its parameter are in a tensor of "
            f"shape {list(data.shape)}, which is not the contiguous, one-dimensional one of that "
            "length that it should be"
        )
    if not _is_ordered(shape, where.strides):
        raise UnsupportedLeaf(
            f"{sharded.key!r}: a ShardedTensorFactory changes the order of its parameter's "
            "elements, so flat ranges of the optimizer's state are not boxes of the parameter; "
            "save with --dist-ckpt-optim-fully-reshardable "
            "(distrib_optim_sharding_type='fully_reshardable')"
        )
    pieces = []
    for start, stop in boxes_between(shape, where.strides, where.offset, first, after):
        steps = zip(start, where.strides, strict=True)
        offset = where.offset + sum(i * step for i, step in steps) - first
        size = tuple(b - a for a, b in zip(start, stop, strict=True))
        view = data.as_strided(size, where.strides, data.storage_offset() + offset)
        pieces.append(_piece(sharded, view, start, stop))
    return pieces


def boxes_between(
    shape: tuple[int, ...], strides: tuple[int, ...], offset: int, first: int, after: int
) -> Iterator[Ends]:
    """Boxes of a strided region that together have those of its elements whose positions in memory
    are in a range.

    Arguments:
        shape, strides, offset: of the region, whose elements are in memory in their own order.
        first, after: the range.

    Example:
        >>> list(boxes_between((3, 2), (4, 1), 2, 3, 8))  # of [[2, 3], [6, 7], [10, 11]]
        [((0, 1), (1, 2)), ((1, 0), (2, 2))]
    """
    if 0 in shape:
        return
    span = sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
    if after <= offset or first > offset + span:
        return
    if first <= offset and offset + span < after:
        yield (0,) * len(shape), shape
        return
    if shape[0] == 1:
        rows, whole, step, inner = range(1), range(0), 0, span
    else:
        step = strides[0]
        inner = span - (shape[0] - 1) * step
        rows = _clipped(-((offset + inner - first) // step), (after - 1 - offset) // step, shape[0])
        last = (after - 1 - inner - offset) // step
        whole = _clipped(-((offset - first) // step), last, shape[0])
    before = range(rows.start, whole.start) if whole else rows
    for row in before:
        yield from _row(row, shape, strides, offset + row * step, first, after)
    if whole:
        yield (whole.start, *(0 for _ in shape[1:])), (whole.stop, *shape[1:])
    for row in range(whole.stop, rows.stop) if whole else ():
        yield from _row(row, shape, strides, offset + row * step, first, after)


def _row(
    row: int, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, first: int, after: int
) -> Iterator[Ends]:
    """As `boxes_between`, of one row of the region, whose first element is at `offset`."""
    for start, stop in boxes_between(shape[1:], strides[1:], offset, first, after):
        yield (row, *start), (row + 1, *stop)


def _clipped(low: int, high: int, extent: int) -> range:
    """From one row to another, both included, of those that there are."""
    return range(max(0, low), min(extent, high + 1))


def _is_ordered(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements of a strided region are in memory in their own order."""
    span = 0
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent > 1 and stride <= span:
            return False
        span += (extent - 1) * stride
    return True


def _piece(
    sharded: Any, data: torch.Tensor, start: Sequence[int], stop: Sequence[int]
) -> TensorPiece:
    """A box of the tensor of a `ShardedTensor`, in the global array.

    Arguments:
        data: of the shape of the box.
        start, stop: of the box, in the local tensor.
    """
    extra, offset = sharded.prepend_axis_num, sharded.global_offset
    low = tuple(o + a for o, a in zip(offset[extra:], start, strict=True))
    high = tuple(o + b for o, b in zip(offset[extra:], stop, strict=True))
    stacked = tuple(offset[:extra])
    box = Box((*stacked, *low), (*(i + 1 for i in stacked), *high))
    shape = tuple(int(n) for n in sharded.global_shape)
    return TensorPiece(sharded.key, shape, box, data[(None,) * extra] if extra else data)


def plain_tensor(data: Any, key: str) -> torch.Tensor:
    """A tensor, without its history.

    Raises:
        UnsupportedLeaf: there is none, or it is of another class, such as those of FP8.
    """
    if type(data) not in _PLAIN:
        kind = "nothing" if data is None else f"a {type(data).__name__}"
        raise UnsupportedLeaf(
            f"{key!r}: its ShardedTensor holds {kind}, not a torch.Tensor; quantised parameters "
            "(fp8_param_gather, fp4) are not stored: keep parameters in bf16"
        )
    plain: torch.Tensor = data.detach()
    return plain
