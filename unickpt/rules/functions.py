"""Functions in Python for what the notation cannot express; they declare their input region."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array
from unickpt.errors import RuleError


def _same_shape(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    return shapes[0]


@dataclass(frozen=True)
class Function:
    """A function of arrays that a rule names: `a [v e] <-> b [v e] via name`.

    Without `region`, it works element by element: axes are moved as the rule says, and the function
    gets the result. With it, the function gets parts of the arrays as they are stored, and the axes
    of the rule only define the shapes.

    Arguments:
        apply: makes a box of the array: called with the box and with NumPy arrays, one for each
            array on the other side; returns an array of the box's shape.
        region: returns the box of each input that a box of the array needs; called with the box and
            the shapes of all inputs.
        shape: with `region`, the array's shape, called with those of the inputs. Without it, the
            first one's.
        inverse: the function of the other direction; None if there is none.

    Example:
        >>> double = Function(lambda box, x: x * 2)
        >>> halve = Function(lambda box, x: x / 2, inverse=double)
    """

    apply: Callable[..., Array]
    region: Callable[..., Sequence[Box]] | None = None
    shape: Callable[..., tuple[int, ...]] = _same_shape
    inverse: Function | None = None

    @classmethod
    def dequantised(
        cls,
        dtype: str,
        *,
        codes: str | None = None,
        block: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
    ) -> Function:
        """A function of codes, their scales and perhaps their zero points, in this order, that
        returns their values.

        An element is `float32(code) * float32(scale)`, or `float32(int32(code) - int32(zero)) *
        float32(scale)`, rounded once to `dtype`, to nearest, ties to even. The scales have as many
        dimensions as the codes, one element for each block; or a single element.

        Arguments:
            dtype: of the array that is made.
            codes: the dtype of the codes, such as "float8_e4m3fn", if they are stored as uint8.
            block: the sizes of a block, one for each dimension. Without it, the codes must consist
                of whole blocks.
            axes: the dimensions of the codes in the order of the array, as of `numpy.transpose`;
                by default their own order.

        Raises:
            RuleError: when it is used, if codes and scales do not fit together.

        Example:
            >>> rules = "w/qdata [o i], w/scale [b c] <-> w [o i] as bfloat16 via f"
            >>> f = Function.dequantised("bfloat16")  # Rules.parse(rules, functions={"f": f})
            >>> f.apply(Box((0,), (4,)), np.int8([1, 2, 3, 4]), np.float32([0.5, 2.0])).tolist()
            [0.5, 1.0, 6.0, 8.0]
        """
        function = _Dequantised(dtype, codes, None if block is None else tuple(block), axes)
        return cls(function.apply, function.region, function.shape)


@dataclass(frozen=True)
class _Dequantised:
    """See `Function.dequantised`."""

    dtype: str
    codes: str | None
    block: tuple[int, ...] | None
    axes: Sequence[int] | None

    def shape(self, codes: tuple[int, ...], *scales: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(codes[axis] for axis in self._order(len(codes)))

    def region(self, box: Box, codes: tuple[int, ...], *scales: tuple[int, ...]) -> Sequence[Box]:
        """Whole blocks of the codes if they have several scales, and these scales."""
        order = self._order(len(codes))
        start, stop = [0] * len(codes), [0] * len(codes)
        for dim, axis in enumerate(order):
            start[axis], stop[axis] = box.start[dim], box.stop[dim]
        first, *zero_boxes = [self._blocks(codes, shape, start, stop) for shape in scales]
        for e, (low, high) in enumerate(zip(first.start, first.stop, strict=True)):
            if high - low > 1:
                block = self._each(codes, scales[0], e)
                start[e], stop[e] = low * block, min(high * block, codes[e])
        return [Box(tuple(start), tuple(stop)), first, *zero_boxes]

    def apply(self, box: Box, codes: Array, scales: Array, *zero: Array) -> Array:
        values = codes if self.codes is None else codes.view(dtypes.from_name(self.codes))
        if zero:
            values = values.astype(np.int32) - self._spread(zero[0], codes.shape).astype(np.int32)
        products = values.astype(np.float32) * self._spread(scales.astype(np.float32), codes.shape)
        order = self._order(codes.ndim)
        cut = [slice(None)] * codes.ndim
        for dim, axis in enumerate(order):
            if scales.size > 1 and scales.shape[axis] > 1:
                skipped = box.start[dim] % self._each(codes.shape, scales.shape, axis)
                cut[axis] = slice(skipped, skipped + box.shape[dim])
        return products[tuple(cut)].transpose(order).astype(dtypes.from_name(self.dtype))

    def _order(self, rank: int) -> Sequence[int]:
        return range(rank) if self.axes is None else self.axes

    def _each(self, codes: Sequence[int], scales: Sequence[int], axis: int) -> int:
        """The codes of one block along an axis."""
        if self.block is not None:
            return self.block[axis]
        return codes[axis] // scales[axis] if scales[axis] else 0

    def _blocks(
        self, codes: Sequence[int], scales: Sequence[int], start: Sequence[int], stop: Sequence[int]
    ) -> Box:
        """The scales of a box of codes.

        Raises:
            RuleError: they do not fit together.
        """
        whole = Box.whole(tuple(scales))
        if whole.size == 1:
            return whole
        blocks = [
            self._each(codes, scales, axis) for axis in range(len(codes)) if len(scales) > axis
        ]
        fits = len(scales) == len(codes) and all(
            k and -(-n // k) == m and (self.block is not None or n == k * m)
            for n, m, k in zip(codes, scales, blocks, strict=True)
        )
        if not fits:
            raise RuleError(
                f"codes of shape {list(codes)} do not have scales of shape {list(scales)} for "
                f"{'whole blocks' if self.block is None else f'blocks of {list(self.block)}'}; "
                "pass block=, the sizes of a block, to Function.dequantised"
            )
        pairs = list(zip(start, stop, blocks, strict=True))
        return Box(tuple(a // k for a, _, k in pairs), tuple(-(-b // k) for _, b, k in pairs))

    def _spread(self, scales: Array, codes: Sequence[int]) -> Array:
        """A scale for each code."""
        if scales.size == 1:
            return scales.reshape(())
        for axis, n in enumerate(scales.shape):
            if n > 1:
                block = self._each(codes, scales.shape, axis)
                take = (slice(None),) * axis + (slice(codes[axis]),)
                scales = scales.repeat(block, axis)[take]
        return scales
