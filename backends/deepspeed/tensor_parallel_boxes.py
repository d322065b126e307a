"""Which boxes of a parameter the tensor-parallel ranks hold, by a universal checkpoint's rules.

Sources: deepspeed/checkpoint/ds_to_universal.py (`merge_tp_slices`) and checkpoint/affine.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unickpt.backends._files.headers import sizes
from unickpt.backends._files.pickles import PickledObject
from unickpt.backends.deepspeed.patterns import BadPattern, PatternTable
from unickpt.backends.deepspeed.sources import unraveled
from unickpt.errors import HintError
from unickpt.extend import Box, quoted, row_major

Extents = tuple[int, ...]

REPLICATED = "tp_replicated_parameter_patterns"
AVERAGED = "parameter_to_average_patterns"
ROWS = "parameter_with_row_parallelism_patterns"
HALVES = "parameter_with_2_sub_params_cat_dim_0"
SUB_PARAMETERS = "parameter_with_sub_params"
WIDTHS = "sub_param_shard_widths"
VOCABULARY = "vocabulary_parameter_patterns"
VOCABULARY_SIZE = "original_vocab_size"
_VERSION, _AFFINE, _UNSUPPORTED = (
    "universal_checkpoint_version", "affine_map", "autotp_unsupported_parameter_patterns",
)  # fmt: skip
_LISTS = (REPLICATED, AVERAGED, ROWS, HALVES, VOCABULARY)
HINTS = (*_LISTS, SUB_PARAMETERS, WIDTHS, VOCABULARY_SIZE)
"""The keys of `universal_checkpoint_info` that users can say where a folder does not."""
_WITH_WIDTHS = 0.4
_AFFINE_VERSION = 1
_MOST_PARTS = 10_000


class BadInfo(ValueError):
    """The facts about tensor parallelism are wrong, or do not fit a parameter."""


class Unsupported(ValueError):
    """The facts about tensor parallelism are not supported."""


@dataclass(frozen=True)
class RankPiece:
    """A box of a parameter, and where one rank has it.

    Arguments:
        box: of the parameter.
        rank: tensor-parallel.
        first: the index of its first element in the rank's tensor, in row-major order.
        strides: of the box's dimensions there.
        scale: factor of the rank's elements.
    """

    box: Box
    rank: int
    first: int
    strides: tuple[int, ...]
    scale: float = 1.0


@dataclass(frozen=True)
class TensorParallelPlan:
    """How to assemble a parameter from the ranks' tensors.

    Arguments:
        shape: of the parameter.
        pieces: cover it exactly once; for a mean, one for each rank that is all of it.
        mean: whether it is the mean of the pieces.
    """

    shape: Extents
    pieces: Sequence[RankPiece]
    mean: bool = False


class TensorParallelRules:
    """How tensor-parallel ranks share parameters.

    Arguments:
        info: a `universal_checkpoint_info`; untrusted.
        hints: of the user; override some of it.
        degree: of tensor parallelism.

    Raises:
        BadInfo: it is damaged.
        HintError: a hint is.
        Unsupported: it says that something cannot be merged, or is of a later version.
    """

    def __init__(self, info: Mapping[str, Any], hints: Mapping[str, Any], degree: int) -> None:
        check_hints(hints)
        self._degree = degree
        settings = {**info, **hints}
        self._hinted = {key for key in hints if key in _LISTS}
        unsupported = settings.get(_UNSUPPORTED) or {}
        if unsupported:
            raise Unsupported(
                f"DeepSpeed says that parameters cannot be merged: {quoted(unsupported)}"
            )
        self._lists = {key: _list_of_patterns(settings, key) for key in _LISTS}
        self._sub_parameters = _sub_parameters(settings.get(SUB_PARAMETERS) or ())
        self._widths = _dict(settings.get(WIDTHS) or {}, WIDTHS)
        version = settings.get(_VERSION, 0.0)
        has_widths = type(version) in (int, float) and version >= _WITH_WIDTHS
        self._needs_widths = has_widths and SUB_PARAMETERS not in hints
        self._vocabulary = settings.get(VOCABULARY_SIZE)
        self._affine = _affine_maps(_dict(settings.get(_AFFINE) or {}, _AFFINE))
        self.known = bool(hints) or any(
            settings.get(key) for key in (*_LISTS, SUB_PARAMETERS, _AFFINE)
        )
        """Whether it says anything; otherwise ranks cannot be merged."""

    def plan(self, name: str, shapes: Sequence[Extents]) -> TensorParallelPlan:
        """How to assemble a parameter from the ranks' tensors.

        Arguments:
            name: of the parameter.
            shapes: of each rank's tensor.

        Raises:
            BadInfo: the rule for it does not fit the shapes.
            Unsupported: it is not supported.
        """
        try:
            plan = self._plan(name, shapes)
            if self._lists[VOCABULARY].find(name):
                plan = _cut(plan, self._vocabulary)
        except BadPattern as error:
            raise BadInfo(str(error)) from error
        return plan

    def held(self, name: str, shapes: Sequence[Extents], rank: int) -> Sequence[RankPiece]:
        """One rank's part of a parameter, also if another one holds the same.

        Arguments:
            name, shapes: as for `plan`.
            rank: tensor-parallel.

        Raises: as `plan`.
        """
        plan = self.plan(name, shapes)
        if plan.mean or self._lists[REPLICATED].find(name):
            return [replace(piece, rank=rank) for piece in plan.pieces[:1]]
        affine = self._affine.find(name)
        if affine is None:
            return [piece for piece in plan.pieces if piece.rank == rank]
        of_rank = affine[1]["ranks"]
        said = of_rank[str(rank)] if str(rank) in of_rank else of_rank[rank]
        pieces = (
            _affine_piece(p, rank, plan.shape, math.prod(shapes[rank])) for p in said["pieces"]
        )
        return [piece for piece in pieces if piece is not None]

    def check_hints_used(self, where: str) -> None:
        """Checks that each pattern of a hint has matched a name.

        Arguments:
            where: the checkpoint, for the error.

        Raises:
            HintError: one has not.
        """
        for key in self._hinted:
            for pattern in sorted(self._lists[key].unused):
                raise HintError(
                    f"{where}: the pattern {quoted(pattern)} of the hint {key} matches no "
                    "parameter that several ranks share"
                )

    def _plan(self, name: str, shapes: Sequence[Extents]) -> TensorParallelPlan:
        affine = self._affine.find(name)
        if affine is not None:
            self._mark_used(name)
            return _affine_plan(affine[1], shapes)
        if self._lists[REPLICATED].find(name):
            _check_equal(shapes)
            return TensorParallelPlan(shapes[0], [_all_of(0, shapes[0])])
        if self._lists[AVERAGED].find(name):
            _check_equal(shapes)
            return TensorParallelPlan(
                shapes[0], [_all_of(r, s) for r, s in enumerate(shapes)], mean=True
            )
        if self._lists[HALVES].find(name):
            return _sub_plan(shapes, 0, _halves(shapes))
        sub = self._sub_parameters.find(name)
        if sub is not None:
            return self._of_sub_parameters(*sub, shapes)
        dim = 1 if self._lists[ROWS].find(name) else 0
        return _sub_plan(shapes, dim, [[_extent(shape, dim) for shape in shapes]])

    def _mark_used(self, name: str) -> None:
        for patterns in (*self._lists.values(), self._sub_parameters):
            patterns.find(name)

    def _of_sub_parameters(
        self, pattern: str, said: Mapping[str, Any], shapes: Sequence[Extents]
    ) -> TensorParallelPlan:
        dim, spec = said["partition_dim"], said["shape"][said["partition_dim"]]
        full = sum(_extent(shape, dim) for shape in shapes)
        if self._needs_widths or pattern in self._widths:
            if pattern not in self._widths:
                raise BadInfo(f"{WIDTHS} has nothing for {quoted(pattern)}")
            return _sub_plan(shapes, dim, _numbers(self._widths[pattern], self._degree))
        # Older versions gave the number of sub-parameters, and split each of them evenly.
        sizes = [full // spec] * spec if type(spec) is int and 0 < spec <= _MOST_PARTS else spec
        if not isinstance(sizes, list | tuple) or not all(type(n) is int and n >= 0 for n in sizes):
            raise BadInfo(f"{SUB_PARAMETERS} has no sizes for {quoted(pattern)}: {quoted(spec)}")
        if sum(sizes) != full or any(n % self._degree for n in sizes):
            raise BadInfo(
                f"its sub-parameters, {quoted(spec)}, do not divide {full} evenly among "
                f"{self._degree} ranks"
            )
        return _sub_plan(shapes, dim, [[n // self._degree] * self._degree for n in sizes])


# --- concatenations -----------------------------------------------------------------------------


def _extent(shape: Extents, dim: int) -> int:
    if dim >= len(shape):
        raise BadInfo(
            f"it has {len(shape)} dimensions, and is said to be split along dimension {dim}"
        )
    return shape[dim]


def _all_of(rank: int, shape: Extents) -> RankPiece:
    return RankPiece(Box.whole(shape), rank, 0, row_major(shape))


def _check_equal(shapes: Sequence[Extents]) -> None:
    if any(shape != shapes[0] for shape in shapes):
        raise BadInfo(
            f"it is said to be the same on all ranks, but its shapes are {quoted(shapes)}"
        )


def _halves(shapes: Sequence[Extents]) -> list[list[int]]:
    extents = [_extent(shape, 0) for shape in shapes]
    return [[-(-n // 2) for n in extents], [n // 2 for n in extents]]  # as torch.chunk


def _sub_plan(
    shapes: Sequence[Extents], dim: int, widths: Sequence[Sequence[int]]
) -> TensorParallelPlan:
    """Sub-parameters one after the other along a dimension, each of all ranks in turn.

    Arguments:
        shapes: of each rank's tensor.
        dim: the dimension.
        widths: by sub-parameter, by rank.
    """
    extents = [_extent(shape, dim) for shape in shapes]
    if [sum(rank_widths) for rank_widths in zip(*widths, strict=True)] != extents:
        raise BadInfo(
            f"its ranks hold {extents} along dimension {dim}, but the widths of its sub-parameters "
            f"are {quoted(widths)}"
        )
    other_extents = {shape[:dim] + shape[dim + 1 :] for shape in shapes}
    if len(other_extents) > 1:
        raise BadInfo(
            f"its ranks hold shapes that do not fit along dimension {dim}: {quoted(shapes)}"
        )
    pieces, position, begins = [], 0, [0] * len(shapes)
    for by_rank in widths:
        for rank, (shape, width) in enumerate(zip(shapes, by_rank, strict=True)):
            steps = row_major(shape)
            start = tuple(position if d == dim else 0 for d in range(len(shape)))
            stop = tuple(position + width if d == dim else n for d, n in enumerate(shape))
            pieces.append(RankPiece(Box(start, stop), rank, begins[rank] * steps[dim], steps))
            position, begins[rank] = position + width, begins[rank] + width
    full = tuple(position if d == dim else n for d, n in enumerate(shapes[0]))
    return TensorParallelPlan(full, pieces)


def _cut(plan: TensorParallelPlan, size: Any) -> TensorParallelPlan:
    """A plan without the rows that only pad a vocabulary."""
    if type(size) is not int or size < 1:
        raise BadInfo(f"it is padded to a vocabulary whose size is {quoted(size)}")
    if not plan.shape or plan.shape[0] <= size:
        return plan
    limit = Box.whole((size, *plan.shape[1:]))
    pieces = []
    for piece in plan.pieces:
        box = piece.box.intersect(limit)
        if box is not None and not box.empty:
            pieces.append(replace(piece, box=box))
    return TensorParallelPlan(limit.shape, pieces, plan.mean)


# --- affine maps --------------------------------------------------------------------------------


def _affine_plan(said: Any, shapes: Sequence[Extents]) -> TensorParallelPlan:
    """An affine map as strided pieces of each rank's tensor and of the parameter."""
    said = _dict(said, "an affine map")
    logical = _shape(said.get("logical_shape"), "logical_shape")
    by_rank = {int(rank): spec for rank, spec in _dict(said.get("ranks"), "ranks").items()}
    if sorted(by_rank) != list(range(len(shapes))):
        raise BadInfo(f"its affine map is of the ranks {quoted(sorted(by_rank))}, of {len(shapes)}")
    pieces: dict[tuple[int, ...], RankPiece] = {}
    for rank in range(len(shapes)):
        of_rank = _dict(by_rank[rank], "a rank of an affine map")
        if math.prod(_shape(of_rank.get("shard_shape"), "shard_shape")) != math.prod(shapes[rank]):
            raise BadInfo(
                f"its affine map gives rank {rank} the shape {quoted(of_rank.get('shard_shape'))}, "
                f"but that is {list(shapes[rank])}"
            )
        for spec in _sequence(of_rank.get("pieces"), "pieces"):
            piece = _affine_piece(_dict(spec, "a piece"), rank, logical, math.prod(shapes[rank]))
            if piece is None:
                continue
            first = pieces.setdefault(piece.box.start, piece)  # replicated: of the first rank
            if first is not piece and (first.box, first.scale) != (piece.box, piece.scale):
                raise BadInfo(f"its affine map has two pieces at {list(piece.box.start)}")
    return TensorParallelPlan(logical, [*pieces.values()])


def _affine_piece(
    said: Mapping[str, Any], rank: int, logical: Extents, count: int
) -> RankPiece | None:
    """A piece of an affine map; None if it is empty."""
    shape = _shape(said.get("shape"), "a piece")
    parameter_place, from_ = (
        _strided(said.get(side), len(shape), side) for side in ("source", "dest")
    )
    scale = said.get("scale", 1.0)
    if type(scale) not in (int, float) or not math.isfinite(scale) or scale == 0:
        raise BadInfo(f"the scale of a piece is {quoted(scale)}")
    if 0 in shape:
        return None
    last = from_[0] + sum((n - 1) * s for n, s in zip(shape, from_[1], strict=True))
    if last >= count or parameter_place[0] >= math.prod(logical):
        raise BadInfo(f"a piece of its affine map lies outside of the elements of rank {rank}")
    # The piece is a box of the parameter: each of its dimensions is one of the parameter's.
    matched = _dimensions(shape, parameter_place[1], logical)
    start = unraveled(parameter_place[0], logical)
    extents = [1 if d is None else shape[d] for d in matched or ()]
    stop = tuple(a + n for a, n in zip(start, extents, strict=False))
    if matched is None or any(b > n for b, n in zip(stop, logical, strict=True)):
        raise Unsupported(
            f"a piece of its affine map, {quoted(said)}, is not a box of the shape {list(logical)}"
        )
    strides = tuple(0 if d is None else from_[1][d] for d in matched)
    return RankPiece(Box(start, stop), rank, from_[0], strides, float(scale))


def _dimensions(shape: Extents, steps: Extents, logical: Extents) -> list[int | None] | None:
    """For each dimension of a parameter, which one of a piece it is, by their strides; None if the
    piece has others."""
    left, matches = [d for d, n in enumerate(shape) if n > 1], list[int | None]()
    for n, step in zip(logical, row_major(logical), strict=True):
        match = next((d for d in left if n > 1 and steps[d] == step), None)
        if match is not None:
            left.remove(match)
        matches.append(match)
    return None if left else matches


def _strided(value: Any, dimensions: int, what: str) -> tuple[int, tuple[int, ...]]:
    pair = _sequence(value, what)
    if len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0:
        raise BadInfo(f"the {what} of a piece is {quoted(value)}")
    strides = _shape(pair[1], what)
    if len(strides) != dimensions:
        raise BadInfo(f"the {what} of a piece has {len(strides)} dimensions, of {dimensions}")
    return pair[0], strides


def _affine_maps(said: Mapping[str, Any]) -> PatternTable:
    version = said.get("version", _AFFINE_VERSION)
    if type(version) is not int or version > _AFFINE_VERSION:
        raise Unsupported(
            f"its affine_map is of version {quoted(version)}, and unickpt reads {_AFFINE_VERSION}"
        )
    return _patterns(_dict(said.get("params") or {}, "the affine map's params"), _AFFINE)


# --- checks of untrusted input ------------------------------------------------------------------


def check_hints(hints: Mapping[str, Any]) -> None:
    """Checks the types and values of hints.

    Raises:
        HintError: one is wrong.
    """
    try:
        for key in _LISTS:
            _list_of_patterns(hints, key)
        _sub_parameters(hints.get(SUB_PARAMETERS) or ())
        _dict(hints.get(WIDTHS) or {}, WIDTHS)
        size = hints.get(VOCABULARY_SIZE, 1)
        if type(size) is not int or size < 1:
            raise BadInfo(f"{VOCABULARY_SIZE} is {quoted(size)}, not a number of rows")
        if hints.get(VOCABULARY) and VOCABULARY_SIZE not in hints:
            raise BadInfo(f"{VOCABULARY} needs the hint {VOCABULARY_SIZE} too")
    except BadInfo as error:
        raise HintError(f"the hint is wrong: {error}") from error


def _dict(value: Any, what: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise BadInfo(f"{what} is no dict: {quoted(value)}")
    return value


def _sequence(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise BadInfo(f"{what} is no list: {quoted(value)}")
    return value


def _shape(value: Any, what: str) -> Extents:
    try:
        return sizes(value)
    except ValueError as error:
        raise BadInfo(f"{what}: {error}") from error


def _numbers(value: Any, degree: int) -> list[Sequence[int]]:
    rows = [_shape(row, WIDTHS) for row in _sequence(value, WIDTHS)]
    if not rows or any(len(row) != degree for row in rows):
        raise BadInfo(f"{WIDTHS} has not {degree} widths for each sub-parameter: {quoted(value)}")
    return [*rows]


def _patterns(values: Mapping[str, Any], what: str) -> PatternTable:
    if not all(isinstance(pattern, str) for pattern in values):
        raise BadInfo(f"{what} has patterns that are no texts: {quoted(list(values))}")
    try:
        return PatternTable(values)
    except BadPattern as error:
        raise BadInfo(f"{what}: {error}") from error


def _list_of_patterns(said: Mapping[str, Any], key: str) -> PatternTable:
    patterns = _sequence(said.get(key) or (), key)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise BadInfo(f"{key} has patterns that are no texts: {quoted(patterns)}")
    return _patterns(dict.fromkeys(patterns), key)


def _sub_parameters(said: Any) -> PatternTable:
    """The facts of parameters that consist of several, by pattern."""
    fields_by_pattern: dict[str, Mapping[str, Any]] = {}
    for item in _sequence(said, SUB_PARAMETERS):
        fields = _dict(item.state if isinstance(item, PickledObject) else item, SUB_PARAMETERS)
        shape, dim = fields.get("shape"), fields.get("partition_dim")
        sizes = _sequence(shape, f"the shape of {SUB_PARAMETERS}")
        if type(dim) is not int or not 0 <= dim < len(sizes):
            raise BadInfo(f"{SUB_PARAMETERS} has no partition_dim: {quoted(item)}")
        for pattern in _sequence(fields.get("patterns"), "patterns"):
            if isinstance(pattern, str):
                fields_by_pattern.setdefault(pattern, fields)  # as DeepSpeed, which takes the first
    return _patterns(fields_by_pattern, SUB_PARAMETERS)
