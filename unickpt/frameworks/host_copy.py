"""Copies a box of a fragment to host memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from unickpt.arrays import strided_copy
from unickpt.arrays.box import Box
from unickpt.arrays.dtypes import Array, DType
from unickpt.frameworks.protocol import Fragment


def stage(
    fragment: Fragment,
    box: Box,
    dtype: DType,
    take: Callable[[int], Array],
    *,
    copied: bool = False,
) -> Array:
    """Contiguous host memory of a fragment's box, in native byte order; a view where possible.

    Arguments:
        fragment: what holds the data.
        box: in global coordinates, within the fragment's.
        dtype: of the array.
        take: allocates this many bytes, if the data must be copied; see `HostBuffers`.
        copied: copy even if a view is possible.
    """

    made: list[Array] = []

    def make_buffer() -> Array:
        if not made:
            nbytes = box.size * dtype.itemsize
            made.append(take(nbytes)[:nbytes].view(dtype).reshape(box.shape))
        return made[0]

    data = fragment.read(box, make_buffer)
    if dtype == np.bool_:
        # A bool may be any byte in memory; only 0 and 1 are valid for every reader.
        return np.not_equal(data.view(np.uint8), 0, out=make_buffer())
    if not copied and data.flags.c_contiguous and data.dtype == dtype:
        return data.reshape(box.shape)
    if data is not make_buffer():
        strided_copy.copy(make_buffer(), data)
    return make_buffer()
