"""A patch: a chunk as the words in which it differs from an earlier state of the same chunk.

Where elements change scattered over an array, every chunk changes, but little of each. A patch
stores the gaps between the words that differ and how much each differs, byte by byte of these
numbers, deflated where that pays: little more than the entropy. Nothing here does I/O.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

import numpy as np

from unickpt.extend import Array, NotDecodable

_HEADER = struct.Struct("<QIIBBH")
_PLAIN, _DIFFERENCES = 0, 1
"""How the words that differ are stored: unchanged, or as differences."""
_MOST_GAP_BYTES = 4
_SIZE = struct.Struct("<I")
# Compared while they are in the processor's cache.
_AT_ONCE = 1 << 18
# So many numbers say how well all of them can be deflated.
_SAMPLE = 1 << 14
# Deflating bytes that are nearly random takes long, and gains nothing.
_MOST_BITS = 7.9
# Deflated bytes take a little less than their entropy where they repeat.
_LESS_THAN_ENTROPY = 0.7
# Measured: of these numbers, only runs are ever repeated.
_STRATEGY = zlib.Z_RLE


class BadPatch(NotDecodable):
    """A patch that contradicts the format; says how."""


@dataclass(frozen=True)
class PatchedState:
    """A state of a chunk that a patch refers to.

    Arguments:
        digest: of its elements, or of the stored bytes if its codec is none of Zarr's.
        generation: which save made it (`chains`).
    """

    digest: int
    generation: int = 0


def encode(old: Array, new: Array, state: PatchedState, generation: int, most: int) -> bytes | None:
    """The difference of a chunk from an earlier state of it, bit by bit.

    Arguments:
        old: the elements of the earlier state.
        new: those of the chunk, of the same shape and dtype.
        state: facts about the earlier state.
        generation: of the chunk.
        most: how many bytes the patch may have.

    Returns:
        The patch; None if it would be longer, or if that is not decided soon.
    """
    before, after = words_of(old), words_of(new)
    positions = _differing(before, after)
    was, now = before[positions], after[positions]
    gaps = np.diff(positions, prepend=positions.dtype.type(-1)) - 1
    if len(gaps) >> 32 or (len(gaps) and int(gaps.max()) >> 8 * _MOST_GAP_BYTES):
        return None
    mode, values = _cheaper(was, now)
    if _probable_bytes(gaps, values) * _LESS_THAN_ENTROPY > most:
        return None
    spread = [
        *_split_planes(gaps.astype("<u4"), _bytes_needed(gaps)),
        *_split_planes(values, values.itemsize),
    ]
    stored = [_packed(plane) for plane in spread]
    count = len(stored) - values.itemsize
    patch = b"".join(
        [
            _HEADER.pack(state.digest, generation, len(gaps), mode, count, 0),
            *(_SIZE.pack(len(plane)) for plane in stored),
            *stored,
        ]
    )
    return patch if len(patch) <= most else None


def state_of(patch: bytes) -> PatchedState:
    """A patch's record of the state that it refers to; its generation is that of the patch.

    Arguments:
        patch: the patch; untrusted.

    Raises:
        BadPatch: it is too short.
    """
    digest, generation, *_ = _header(patch)
    return PatchedState(digest, generation)


def apply(patch: bytes, out: Array) -> None:
    """Makes an earlier state of a chunk the one that a patch describes.

    Arguments:
        patch: the patch; untrusted.
        out: the elements of the earlier state, contiguous; changed in place, and undefined after
            an error.

    Raises:
        BadPatch: its numbers contradict each other, or a position is outside the chunk.
    """
    words = words_of(out)
    _, _, count, mode, gap_bytes, reserved = _header(patch)
    if mode not in (_PLAIN, _DIFFERENCES) or gap_bytes > _MOST_GAP_BYTES or reserved:
        raise BadPatch(f"a patch of kind {mode}, {gap_bytes}, {reserved}")
    if count > len(words):
        raise BadPatch(f"a patch of {count} words for a chunk of {len(words)}")
    planes = _unpacked(patch, gap_bytes + words.itemsize, count)
    gaps = _join_planes(planes[:gap_bytes], count, np.dtype("<u4"))
    positions = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if count and positions[-1] >= len(words):
        raise BadPatch(f"a patch of word {positions[-1]} of {len(words)}")
    values = _join_planes(planes[gap_bytes:], count, words.dtype)
    words[positions] = values if mode == _PLAIN else words[positions] + _from_zigzag(values)


def _header(patch: bytes) -> tuple[int, int, int, int, int, int]:
    if len(patch) < _HEADER.size:
        raise BadPatch(f"a patch of {len(patch)} bytes, at least {_HEADER.size} expected")
    return _HEADER.unpack_from(patch)


def words_of(array: Array) -> Array:
    """The elements as integers: -0.0 differs from 0.0, and a NaN from others. Of 16 bytes, two."""
    size = min(array.itemsize, 8)
    return np.ascontiguousarray(array).reshape(-1).view(f"<u{size}")


def _differing(before: Array, after: Array) -> Array:
    """The positions of the words that differ."""
    dtype = np.dtype(np.int32 if len(after) < 1 << 31 else np.int64)
    positions: list[Array] = [np.empty(0, dtype)]
    for first in range(0, len(after), _AT_ONCE):
        block = slice(first, first + _AT_ONCE)
        differ: Array = np.flatnonzero(before[block] != after[block])
        positions.append((differ + first).astype(dtype))
    return np.concatenate(positions)


# --- numbers --------------------------------------------------------------------------------------


def _cheaper(was: Array, now: Array) -> tuple[int, Array]:
    """How words are stored in fewer bytes, and their stored form."""
    sample = slice(None, None, max(1, len(now) // _SAMPLE))
    apart = _to_zigzag(now[sample] - was[sample])
    if _bits(apart, apart.itemsize) <= _bits(now[sample], now.itemsize):
        return _DIFFERENCES, _to_zigzag(now - was)
    return _PLAIN, now


def _to_zigzag(words: Array) -> Array:
    """Small numbers of either sign as small numbers without: 0, -1, 1, -2, ..."""
    signed = words.view(f"<i{words.itemsize}")
    zigzag: Array = ((signed << 1) ^ (signed >> (8 * words.itemsize - 1))).view(words.dtype)
    return zigzag


def _from_zigzag(words: Array) -> Array:
    low_bit = words.dtype.type(1)
    decoded: Array = (words >> low_bit) ^ (words & low_bit) * words.dtype.type(
        -1 % (1 << 8 * words.itemsize)
    )
    return decoded


def _bytes_needed(gaps: Array) -> int:
    return (int(gaps.max()).bit_length() + 7) // 8 if len(gaps) else 0


def _split_planes(numbers: Array, count: int) -> list[Array]:
    """The lowest bytes of all numbers, then the bytes above these, and so on."""
    split = np.ascontiguousarray(numbers).view(np.uint8).reshape(-1, numbers.itemsize)
    return [np.ascontiguousarray(split[:, byte]) for byte in range(count)]


def _join_planes(planes: list[Array], count: int, dtype: np.dtype[np.unsignedinteger]) -> Array:
    """The numbers whose bytes are in planes."""
    split = np.zeros((count, dtype.itemsize), np.uint8)
    for byte, plane in enumerate(planes):
        split[:, byte] = plane
    return split.view(dtype).reshape(-1)


# --- their bytes ----------------------------------------------------------------------------------


def _bits(numbers: Array, count: int) -> float:
    """How many bits the bytes of a number have on average, if each is coded by how often it is."""
    return sum(map(_entropy, _split_planes(numbers, count)))


def _entropy(plane: Array) -> float:
    if not len(plane):
        return 0.0
    often = np.bincount(plane, minlength=1)
    shares = often[often > 0] / len(plane)
    return float(-(shares * np.log2(shares)).sum())


def _probable_bytes(gaps: Array, values: Array) -> float:
    """About how many bytes the numbers of a patch take."""
    sample = slice(None, None, max(1, len(gaps) // _SAMPLE))
    bits = _bits(gaps[sample].astype("<u4"), _bytes_needed(gaps))
    return (bits + _bits(values[sample], values.itemsize)) * len(gaps) / 8


def _packed(plane: Array) -> bytes:
    """The bytes of a plane: none if all are 0; unchanged, or deflated if that is shorter."""
    if not plane.any():
        return b""
    raw = plane.tobytes()
    sample = plane[:: max(1, len(plane) // _SAMPLE)]
    if _entropy(sample) > _MOST_BITS and not _has_runs(plane):
        return raw
    deflate = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS, 9, _STRATEGY)
    short = deflate.compress(raw) + deflate.flush()
    return short if len(short) < len(raw) else raw


def _has_runs(plane: Array) -> bool:
    sample = plane[:_SAMPLE]
    return bool(np.count_nonzero(sample[1:] == sample[:-1]) * 8 > len(sample))


def _unpacked(patch: bytes, count: int, length: int) -> list[Array]:
    """The planes of a patch, each of a length.

    Raises:
        BadPatch: it has not as many, or of another length.
    """
    offset = _HEADER.size + count * _SIZE.size
    if len(patch) < offset:
        raise BadPatch(f"a patch of {len(patch)} bytes, at least {offset} expected")
    sizes = [size for (size,) in _SIZE.iter_unpack(patch[_HEADER.size : offset])]
    if len(patch) != offset + sum(sizes):
        raise BadPatch(f"a patch of {len(patch)} bytes, {offset + sum(sizes)} expected")
    planes = []
    for size in sizes:
        planes.append(_plane(patch[offset : offset + size], length))
        offset += size
    return planes


def _plane(stored: bytes, length: int) -> Array:
    if not stored:
        return np.zeros(length, np.uint8)
    if len(stored) > length:
        raise BadPatch(f"{len(stored)} bytes for {length} words")
    if len(stored) < length:
        inflate = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            raw = inflate.decompress(stored, length)
        except zlib.error as error:
            raise BadPatch(f"bytes that cannot be inflated: {error}") from None
        # The end of the stream may be left after the last byte.
        if (
            len(raw) == length
            and not inflate.eof
            and inflate.decompress(inflate.unconsumed_tail, 1)
        ):
            raise BadPatch(f"more than {length} bytes in a deflated stream")
        if len(raw) != length or not inflate.eof or inflate.unused_data:
            raise BadPatch(f"{len(raw)} bytes in a deflated stream, {length} expected")
        stored = raw
    return np.frombuffer(stored, np.uint8)
