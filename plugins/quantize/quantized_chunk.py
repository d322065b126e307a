"""A quantised chunk: its elements -> the bytes that are stored, and back.

The bytes are the smallest decoded value of each block, then the scale of each block, then the codes
(docs/format.md, section 9). Decoding gives the same bits on every machine: a product and a sum in
float32 or float64, each rounded, then the dtype of the array.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unickpt.extend import Array, DType, dtype_from_name, dtype_name
from unickpt.plugins.quantize import codes as kinds
from unickpt.plugins.quantize import packing, range_search
from unickpt.plugins.quantize.blocks import Blocks, stored_bytes


class NotQuantizable(ValueError):
    """Why elements cannot be quantised."""


class BadCodes(ValueError):
    """Why stored bytes cannot be decoded."""


@dataclass(frozen=True)
class QuantizedChunk:
    """A chunk in its stored form.

    Arguments:
        data: its bytes.
        absolute: the largest error of an element.
        relative: the largest error in relation to the largest magnitude in its block.
    """

    data: Array
    absolute: float
    relative: float


def encode(chunk: Array, codes: str) -> QuantizedChunk:
    """Quantises a chunk.

    Arguments:
        chunk: its elements.
        codes: how they are stored; must fit the dtype, see `codes.check`.

    Raises:
        NotQuantizable: an element is not finite, or a block's range is too large.
    """
    dtype = dtype_name(chunk.dtype)
    work, blocks = kinds.working(dtype), Blocks.of(chunk.shape)
    source = np.ascontiguousarray(chunk).reshape(blocks.rows, blocks.length)
    data = np.empty(stored_bytes(chunk.shape, dtype, codes), np.uint8)
    if codes == kinds.ROUNDED:
        coded = data.view(dtype_from_name(kinds.ROUNDED)).reshape(source.shape)
        scales = None
    else:
        coded = np.empty(source.shape, np.uint8)
        scales = _scales(data, blocks, work)
    absolute = relative = 0.0
    # `_check_finite` finds overflows, and names them in its message.
    with np.errstate(over="ignore", invalid="ignore"):
        for tile in blocks.tiles():
            values = source[tile.rows, tile.elements].astype(work).reshape(-1, tile.extent)
            low, high = values.min(axis=1), values.max(axis=1)
            _check_finite("it has elements that are not finite", low, high)
            if scales is None:
                tile_codes = values.astype(coded.dtype)
                error = _worst(values, tile_codes.astype(work))
            else:
                start, scale, tile_codes, error = _quantized(values, low, high, chunk.dtype, codes)
                shape = scales[0][tile.rows, tile.blocks].shape
                scales[0][tile.rows, tile.blocks] = start.reshape(shape)
                scales[1][tile.rows, tile.blocks] = scale.reshape(shape)
            _check_finite(f"the range of its elements is too large for {codes}", error)
            destination = coded[tile.rows, tile.elements]
            destination[...] = tile_codes.reshape(destination.shape)
            largest = np.maximum(np.abs(low), np.abs(high))
            absolute = max(absolute, float(error.max()))
            relative = max(relative, float((error / np.where(largest > 0, largest, 1)).max()))
    if scales is not None:
        packed = packing.pack(coded.reshape(-1), kinds.BITS[codes])
        data[data.size - packed.size :] = packed
    return QuantizedChunk(data, absolute, relative)


def _scales(data: Array, blocks: Blocks, work: DType) -> tuple[Array, Array]:
    """The places of the smallest values and of the scales of all blocks."""
    shape = blocks.rows, blocks.per_row
    count = blocks.rows * blocks.per_row
    both = data[: 2 * count * work.itemsize].view(work.newbyteorder("<"))
    return both[:count].reshape(shape), both[count:].reshape(shape)


def _check_finite(reason: str, *arrays: Array) -> None:
    if not all(np.isfinite(array).all() for array in arrays):
        raise NotQuantizable(reason)


def _quantized(
    values: Array, low: Array, high: Array, dtype: DType, codes: str
) -> tuple[Array, Array, Array, Array]:
    """Smallest value, scale, codes and largest error of each block."""
    bits = kinds.BITS[codes]
    # No negative zeros: which of two zeros is the smallest element depends on the machine.
    low, high = low + low.dtype.type(0), high + high.dtype.type(0)
    whole = _in_range(values, low, high, dtype, bits)
    if bits not in range_search.BINS:
        return whole
    begin, end = range_search.shrunk(values, low, high, bits)
    narrow = _in_range(values, begin, end, dtype, bits)
    span = np.where(high > low, high - low, 1)
    # The search compares errors only roughly.
    keep = ~(_squares(values, narrow, dtype, span) < _squares(values, whole, dtype, span))
    for mine, other in zip(narrow, whole, strict=True):
        mine[keep] = other[keep]
    return narrow


def _in_range(
    values: Array, low: Array, high: Array, dtype: DType, bits: int
) -> tuple[Array, Array, Array, Array]:
    """As `_quantized`, with codes that cover a range."""
    levels = (1 << bits) - 1
    scale = _scale(low, high, levels)
    steps = values - low[:, None]
    steps /= np.where(scale > 0, scale, 1)[:, None]
    np.rint(steps, out=steps)
    np.clip(steps, 0, levels, out=steps)
    codes = steps.astype(np.uint8)
    return low.copy(), scale, codes, _worst(values, _decoded(steps, low, scale, dtype))


def _squares(values: Array, quantized: tuple[Array, ...], dtype: DType, span: Array) -> Array:
    """The sum of squared errors of each block, in relation to its range."""
    low, scale, codes, _ = quantized
    apart = _decoded(codes.astype(values.dtype), low, scale, dtype)
    apart -= values
    apart /= span[:, None]
    apart *= apart
    total: Array = apart.sum(axis=1)
    return total


def _decoded(steps: Array, low: Array, scale: Array, dtype: DType) -> Array:
    """Codes as elements, rounded to the dtype of the array; overwrites them."""
    steps *= scale[:, None]
    steps += low[:, None]
    return steps if dtype == steps.dtype else steps.astype(dtype).astype(steps.dtype)


def _scale(low: Array, high: Array, levels: int) -> Array:
    """The steps between codes: at least so large that all codes together reach the end."""
    span = high.astype(np.float64) - low
    scale = (span / levels).astype(low.dtype)
    short = scale.astype(np.float64) * levels < span
    rounded_up: Array = np.where(short, np.nextafter(scale, low.dtype.type(np.inf)), scale)
    return rounded_up


def _worst(values: Array, decoded: Array) -> Array:
    largest: Array = np.abs(values - decoded).max(axis=1)
    return largest


def decode(data: Array, out: Array, codes: str) -> None:
    """Decodes a stored chunk.

    Arguments:
        data: its bytes, as many as `stored_bytes` says; untrusted.
        out: contiguous memory of the chunk's shape and the array's dtype.
        codes: how it is stored.

    Raises:
        BadCodes: a value is not finite, or a scale is negative.
    """
    dtype = dtype_name(out.dtype)
    work, blocks = kinds.working(dtype), Blocks.of(out.shape)
    target = out.reshape(blocks.rows, blocks.length)
    if codes == kinds.ROUNDED:
        _round_back(data, target)
        return
    low, scale = _scales(data, blocks, work)
    bits = kinds.BITS[codes]
    with np.errstate(over="ignore", invalid="ignore"):
        _check_scales(low, scale, (1 << bits) - 1, out.dtype)
        packed = data[2 * low.nbytes :]
        coded = packing.unpack(packed, bits, out.size).reshape(target.shape)
        for tile in blocks.tiles():
            values = coded[tile.rows, tile.elements].astype(work).reshape(-1, tile.extent)
            values *= scale[tile.rows, tile.blocks].reshape(-1, 1)
            values += low[tile.rows, tile.blocks].reshape(-1, 1)
            destination = target[tile.rows, tile.elements]
            destination[...] = values.reshape(destination.shape)


def _round_back(data: Array, target: Array) -> None:
    stored = data.view(dtype_from_name(kinds.ROUNDED)).reshape(target.shape)
    target[...] = stored.astype(target.dtype)
    if not np.isfinite(target).all():
        raise BadCodes("an element is not finite")


def _check_scales(low: Array, scale: Array, levels: int, dtype: DType) -> None:
    """Checks that every code of every block is finite."""
    if not (scale >= 0).all():
        raise BadCodes("a scale is negative or NaN")
    for end in (low, scale * levels + low):
        if not np.isfinite(end.astype(dtype)).all():
            raise BadCodes("the range of a block is not finite")
