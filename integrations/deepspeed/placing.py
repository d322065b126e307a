"""Maps this rank's elements of a parameter to positions in an array, with tensor, pipeline and data
parallelism.

Without tensor parallelism a rank's parameter is the array. With it, `universal_checkpoint_info`
says which boxes of the array a rank's part consists of, as in DeepSpeed's own checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from unickpt.errors import HintError, UnsupportedLeaf
from unickpt.extend import Box, flat_range_to_boxes, format_named, row_major
from unickpt.integrations.deepspeed.held import PIPE_REPLICATED, ElementRange, Parameter, shape_of

Shapes = tuple[tuple[int, ...], ...]
_WHOLE_ROWS_FROM = 1 << 20  # bytes: smaller weights are written by one of the ranks that have them


@dataclass(frozen=True)
class RankGrid:
    """The ranks of an engine.

    Arguments:
        tp, pp, dp: this process's tensor-, pipeline- and data-parallel rank.
        tp_size, dp_size: how many there are.
        tp_group: the process group of the tensor-parallel ranks.
    """

    tp: int
    pp: int
    dp: int
    tp_size: int
    dp_size: int
    pp_size: int
    tp_group: Any

    @classmethod
    def from_engine(cls, engine: Any) -> RankGrid:
        """Finds them.

        Raises:
            UnsupportedLeaf: the engine does not span all ranks of torch.distributed.
        """
        from deepspeed.utils import bwc

        mpu, dp = engine.mpu, engine.seq_data_parallel_group
        tp_size = int(bwc.bwc_tensor_model_parallel_world_size(mpu))
        pp_size = int(bwc.bwc_pipeline_parallel_world_size(mpu))
        tp = int(bwc.bwc_tensor_model_parallel_rank(mpu))
        pp = int(mpu.get_pipe_parallel_rank()) if pp_size > 1 else 0
        dp_rank, dp_size = dist.get_rank(dp), dist.get_world_size(dp)
        if tp_size * pp_size * dp_size != dist.get_world_size():
            raise UnsupportedLeaf(
                f"rank {dist.get_rank()}: the engine has {dp_size} data-parallel x {tp_size} "
                f"tensor-parallel x {pp_size} pipeline ranks, but torch.distributed has "
                f"{dist.get_world_size()}; all ranks must be the engine's. Was the process group "
                "changed after deepspeed.initialize?"
            )
        group = bwc.bwc_tensor_model_parallel_group(mpu) if tp_size > 1 else None
        return cls(tp, pp, dp_rank, tp_size, dp_size, pp_size, group)

    @property
    def is_model_parallel(self) -> bool:
        """Whether ranks have different parameters, or different parts of them."""
        return self.tp_size * self.pp_size > 1


@dataclass(frozen=True)
class LiveRankPiece:
    """A box of a parameter, and where one rank has it; boxes of the format's rules have the same
    attributes.

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
class ParameterPlace:
    """Where a parameter of this rank is in an array.

    Arguments:
        name: of the array, without the slot.
        shape: of the array.
        local: this rank's part of it.
        pieces: the boxes of the array that come from it.
        own: of these, those that no other model-parallel rank saves.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    pieces: Sequence[LiveRankPiece]
    own: Sequence[LiveRankPiece]

    def fragments(
        self, local_parts: Iterable[tuple[Box, torch.Tensor]], pieces: Sequence[LiveRankPiece]
    ) -> list[tuple[Box, torch.Tensor]]:
        """Boxes of the array with their data.

        Arguments:
            local_parts: boxes of this rank's part, with their data.
            pieces: which pieces of the array to make from them.
        """
        fragments = []
        for box, data in local_parts:
            for piece in pieces:
                local_box = self._local_box(piece)
                part = box.intersect(local_box)
                if part is None or part.empty:
                    continue
                inside = part.relative_to(box.start).slices
                corners = zip(part.start, piece.box.start, local_box.start, strict=True)
                start = tuple(a + b - c for a, b, c in corners)
                stop = tuple(a + n for a, n in zip(start, part.shape, strict=True))
                fragments.append((Box(start, stop), data[inside] if inside else data))
        return fragments

    def _local_box(self, piece: LiveRankPiece) -> Box:
        """The box of this rank's part that is a piece of the array."""
        start, remainder = [], piece.first
        for step in row_major(self.local):
            start.append(remainder // step if step else 0)
            remainder -= start[-1] * step
        stop = [a + n for a, n in zip(start, piece.box.shape, strict=True)]
        return Box(tuple(start), tuple(stop))


@dataclass
class Placing:
    """The places of an engine's parameters.

    Arguments:
        grid: the ranks.
        info: `universal_checkpoint_info`, of the module or the user.
        hints: of the user; override some of it.
    """

    grid: RankGrid
    info: Mapping[str, Any]
    hints: Mapping[str, Any]
    _rules: Any = None  # of the format of DeepSpeed: how tensor-parallel ranks share parameters
    _shapes: dict[str, Shapes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.grid.tp_size > 1:
            try:
                rules = format_named("deepspeed").TensorParallelRules
                self._rules = rules(self.info, self.hints, self.grid.tp_size)
            except HintError:
                raise
            except ValueError as error:
                raise UnsupportedLeaf(f"universal_checkpoint_info: {error}") from error

    def learn(self, params: Mapping[str, Parameter]) -> None:
        """Gets the shapes of the other tensor-parallel ranks' parts, once.

        Arguments:
            params: of the module, by name.
        """
        if self.grid.tp_size == 1 or self._shapes.keys() >= params.keys():
            return
        mine = {name: shape_of(param) for name, param in params.items()}
        every: list[Any] = [None] * self.grid.tp_size
        dist.all_gather_object(every, mine, self.grid.tp_group)
        for name in mine:
            missing = [rank for rank, shapes in enumerate(every) if name not in shapes]
            if missing:
                raise UnsupportedLeaf(
                    f"{name!r}: tensor-parallel rank {missing[0]} has no such parameter, and rank "
                    f"{self.grid.tp} (rank {dist.get_rank()} of the job) has it: give all "
                    "tensor-parallel ranks the same module"
                )
            self._shapes[name] = tuple(shapes[name] for shapes in every)

    def place(self, name: str, param: Parameter) -> ParameterPlace:
        """Where a parameter is.

        Raises:
            UnsupportedLeaf: its description does not fit, or is not supported.
        """
        local = shape_of(param)
        is_owner = not getattr(param, PIPE_REPLICATED, False)
        if self._rules is None or not self._rules.known:
            # Where rules are needed, no file records how to put the parts of ranks together.
            name = name if self._rules is None else f"{name}@{self.grid.tp}"
            piece = [LiveRankPiece(Box.whole(local), self.grid.tp, 0, row_major(local))]
            return ParameterPlace(name, local, local, piece, piece if is_owner else ())
        try:
            plan = self._rules.plan(name, self._shapes[name])
            pieces = self._rules.held(name, self._shapes[name], self.grid.tp)
            _check(plan, pieces, local)
        except ValueError as error:
            raise UnsupportedLeaf(f"{name!r}: universal_checkpoint_info: {error}") from error
        mine = [piece for piece in plan.pieces if piece.rank == self.grid.tp]
        return ParameterPlace(name, plan.shape, local, pieces, mine if is_owner else ())

    def shared(self, params: Mapping[str, Parameter]) -> dict[str, list[Box]]:
        """Which part of each parameter's weights this data-parallel rank saves, of those that all
        of them have: the same number of bytes each. The answer is the same everywhere."""
        shares, size = {}, self.grid.dp_size
        small = {n: p for n, p in params.items() if p.nbytes < _WHOLE_ROWS_FROM or not p.ndim}
        total, before = sum(p.nbytes for p in small.values()), 0
        for name, param in params.items():
            whole = Box.whole(shape_of(param))
            if name in small:
                owner = min(size - 1, before * size // max(1, total))
                before += param.nbytes
                shares[name] = [whole] if owner == self.grid.dp else []
                continue
            rows = whole.stop[0]
            first, last = (rows * rank // size for rank in (self.grid.dp, self.grid.dp + 1))
            shares[name] = [Box((first, *whole.start[1:]), (last, *whole.stop[1:]))]
        return shares


def of_range(
    shape: tuple[int, ...], part: ElementRange, data: torch.Tensor
) -> list[tuple[Box, Any]]:
    """The boxes of a range of a parameter, with their data.

    Arguments:
        shape: of the parameter.
        part: the range.
        data: one-dimensional, has it.
    """
    boxes, offset = [], part.at
    for box in flat_range_to_boxes(shape, part.start, part.start + part.count):
        boxes.append((box, data[offset : offset + box.size].reshape(box.shape)))
        offset += box.size
    return boxes


def _check(plan: Any, pieces: Sequence[LiveRankPiece], local: tuple[int, ...]) -> None:
    if plan.mean:
        raise ValueError(
            "it is the mean of the ranks' (parameter_to_average_patterns), which a save without "
            "communication cannot compute; keep it equal on all ranks, and name it among "
            "tp_replicated_parameter_patterns"
        )
    steps = row_major(local)
    for piece in pieces:
        if piece.scale != 1.0:
            raise ValueError("its affine_map scales it; unickpt does not")
        wrong = any(
            n > 1 and a != b for n, a, b in zip(piece.box.shape, piece.strides, steps, strict=True)
        )
        if wrong:
            raise ValueError("a rank has it in another order than row-major")
