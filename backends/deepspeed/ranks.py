"""The model-parallel ranks of a checkpoint: their parts of arrays, put together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from unickpt.backends._files.elements import ElementRun, MeanElements
from unickpt.backends.deepspeed import tensor_parallel_boxes
from unickpt.backends.deepspeed.sources import MergedArray, unraveled, whole
from unickpt.errors import CheckpointCorrupt, HintError, UnsupportedFormat
from unickpt.extend import Box, FileBox, Layout, Mesh, TensorSource, quoted, row_major


class Named(NamedTuple):
    """An array of the checkpoint.

    Arguments:
        name: its own.
        of: the name that its ranks have for it.
        rank: the model-parallel rank that owns it alone, if no file records how ranks share it;
            else the lowest that holds it.
        array: the array.
    """

    name: str
    of: str
    rank: int
    array: MergedArray


class EngineRanks:
    """Puts together the parts of model-parallel ranks; rank = stage * degree + tensor-parallel
    rank.

    Arguments:
        where: the checkpoint, for errors.
        degree: of tensor parallelism.
        info: about tensor parallelism, from the files.
        hints: of the user.

    Raises:
        CheckpointCorrupt, UnsupportedFormat, HintError: they are wrong, or not supported.
    """

    def __init__(
        self, where: str, degree: int, info: Mapping[str, Any], hints: Mapping[str, Any]
    ) -> None:
        self.where, self.degree = where, degree
        self._hinted = bool(hints)
        try:
            self.rules = tensor_parallel_boxes.TensorParallelRules(info, hints, degree)
        except tensor_parallel_boxes.BadInfo as error:
            raise CheckpointCorrupt(f"{where}: universal_checkpoint_info: {error}") from error
        except tensor_parallel_boxes.Unsupported as error:
            raise UnsupportedFormat(f"{where}: {error}") from error
        self._plan = cache(self.rules.plan)

    def combined(
        self, kind: str, parts_by_rank: Sequence[Mapping[str, TensorSource]]
    ) -> Iterator[Named]:
        """The arrays whose parts ranks hold.

        Arguments:
            kind: the slot, for errors.
            parts_by_rank: the parts of each rank by name. Several sets of ranks can follow each
                other, such as those with other experts.

        Raises:
            CheckpointCorrupt: parts do not fit together.
            UnsupportedFormat: how they do is not supported.
            HintError: a hint does not fit.
        """
        arrays: dict[str, MergedArray] = {}
        for first in range(0, len(parts_by_rank), self.degree):
            together = parts_by_rank[first : first + self.degree]
            for name in dict.fromkeys(name for parts in together for name in parts):
                parts = [by_name.get(name) for by_name in together]
                for named in self._merged(kind, name, first, parts):
                    first_array = arrays.setdefault(named.name, named.array)
                    if first_array is named.array:
                        yield named
                        continue
                    array = named.array
                    if (first_array.shape, first_array.dtype) != (array.shape, array.dtype):
                        raise CheckpointCorrupt(
                            f"{self.where}: array '{kind}/{name}' has the shape "
                            f"{list(first_array.shape)} on some ranks, and {list(array.shape)} on "
                            "others"
                        )
                    first_array.copies.append(array)  # such as a tied one, in several stages

    def apart(
        self, kind: str, parts_by_rank: Sequence[Mapping[str, TensorSource]]
    ) -> Iterator[Named]:
        """The ranks' parts of state without names, as arrays of their own.

        Arguments: as for `combined`.
        """
        for rank, parts in enumerate(parts_by_rank):
            for name, part in parts.items():
                unique_name = name if len(parts_by_rank) == 1 else f"{name}@{rank}"
                yield Named(unique_name, name, rank, whole(part))

    def _merged(
        self, kind: str, name: str, first: int, parts: Sequence[TensorSource | None]
    ) -> Iterator[Named]:
        present = [(rank, part) for rank, part in enumerate(parts) if part is not None]
        if self.degree == 1:
            yield Named(name, name, first, whole(present[0][1]))
            return
        if not self.rules.known:
            for rank, part in present:
                yield Named(f"{name}@{rank}", name, first + rank, whole(part))
            return
        sources = [part for _, part in present]
        if len(sources) < self.degree or len({source.dtype for source in sources}) > 1:
            ranks = {rank: part.dtype for rank, part in present}
            raise CheckpointCorrupt(
                f"{self.where}: array '{kind}/{name}': the tensor-parallel ranks 0 to "
                f"{self.degree - 1} have to hold it in one dtype; those that do: {ranks}"
            )
        try:
            array = self._array(kind, name, sources)
        except tensor_parallel_boxes.Unsupported as error:
            raise UnsupportedFormat(f"{self.where}: array '{kind}/{name}': {error}") from error
        except tensor_parallel_boxes.BadInfo as error:
            by = "with the hints" if self._hinted else "by its universal_checkpoint_info"
            kind_of_error = HintError if self._hinted else CheckpointCorrupt
            raise kind_of_error(f"{self.where}: {by}, array '{kind}/{name}': {error}") from error
        yield Named(name, name, first, array)

    def _array(self, kind: str, name: str, sources: Sequence[TensorSource]) -> MergedArray:
        shapes = tuple(source.shape for source in sources)
        plan = self._plan(name, shapes)
        scales = {piece.scale for piece in plan.pieces} - {1.0}
        if scales:
            raise tensor_parallel_boxes.Unsupported(
                f"its affine_map scales it by {quoted(scales)}; unickpt does not"
            )
        dtype = sources[0].dtype
        if plan.mean:
            return _mean(plan, sources)
        boxes = [_box(piece, sources[piece.rank]) for piece in plan.pieces if not piece.box.empty]
        if not boxes:
            return whole(TensorSource(dtype, plan.shape, sources[0].elements))
        array = MergedArray(dtype, plan.shape, boxes, _layout(plan, self.degree))
        if all(source.shape == plan.shape for source in sources):
            array.copies.extend(whole(source) for source in sources[1:])
        return array


def _layout(plan: tensor_parallel_boxes.TensorParallelPlan, degree: int) -> Layout | None:
    """The layout that splits one dimension among the ranks, if they hold such parts."""
    mesh = Mesh(("tp",), (degree,), tuple(range(degree)))
    boxes = [piece.box for piece in plan.pieces]
    dims = [d for d, n in enumerate(plan.shape) if boxes[0].shape[d] != n]
    if [piece.rank for piece in plan.pieces] != list(range(degree)) or len(dims) != 1:
        return None
    layout = Layout(mesh, tuple(("tp",) if d in dims else () for d in range(len(plan.shape))))
    same = all(layout.box(plan.shape, (rank,)) == box for rank, box in enumerate(boxes))
    return layout if same else None


def _box(piece: tensor_parallel_boxes.RankPiece, source: TensorSource) -> FileBox:
    """A piece, as a box of a rank's tensor."""
    if source.is_row_major:
        return FileBox(piece.box, source.elements, source.first + piece.first, piece.strides)
    expected = row_major(source.shape)
    extents = piece.box.shape
    if len(extents) != len(expected) or any(
        n > 1 and a != b for n, a, b in zip(extents, piece.strides, expected, strict=True)
    ):
        raise tensor_parallel_boxes.Unsupported(
            "a rank stores it in pieces, and not in row-major order"
        )
    start = unraveled(piece.first, source.shape) if source.count else (0,) * len(extents)
    first = source.first + sum(a * s for a, s in zip(start, source.steps, strict=True))
    return FileBox(piece.box, source.elements, first, source.steps)


def _mean(
    plan: tensor_parallel_boxes.TensorParallelPlan, sources: Sequence[TensorSource]
) -> MergedArray:
    """The mean of the ranks' tensors, each of which has all elements."""
    steps = sources[0].steps
    if any(source.steps != steps for source in sources):
        raise tensor_parallel_boxes.Unsupported(
            "it is a mean, and the ranks hold it in different orders"
        )
    runs = [ElementRun(source.elements, source.first, source.count) for source in sources]
    mean = MeanElements(runs, sources[0].dtype)
    # The plan can be smaller: without the padding of a vocabulary.
    box = FileBox(Box.whole(plan.shape), mean, 0, steps)
    return MergedArray(sources[0].dtype, plan.shape, (box,))
