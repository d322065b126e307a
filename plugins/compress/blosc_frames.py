"""Frames of Blosc: a chunk as byte planes, each compressed by zstd alone; or stored uncompressed.

Every Blosc reads them: the format is that of c-blosc 1, `README_HEADER.rst` there. None writes them
so fast: c-blosc hands zstd a whole block, at levels that search for repetitions, which weights do
not have. Here each plane of a block is a stream of its own, where zstd codes little but byte
frequencies. Planes without a pattern, as the low bits of a mantissa, are stored.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from unickpt.extend import Array

BLOCK_BYTES = 512 << 10  # measured: a plane is then one or two blocks of zstd
HEADER_BYTES = 16
_FORMAT, _ZSTD_FORMAT = 2, 1
_SHUFFLED, _STORED, _ZSTD = 1, 2, 4 << 5
_LEAST_SPLIT = 128  # elements of a block; shorter ones are one stream
_PROBES, _PROBE_SHARE = 4, 64  # sampled of a plane that did not shrink in the last block
_MOST_OF_PLANE = 1 - 1 / 64
_MOST_OF_CHUNK = 1 - 1 / 32  # else it is not worth decoding
_HEADER = struct.Struct("<BBBBIII")
_LENGTH = struct.Struct("<i")


def configuration(itemsize: int, *, bits: bool) -> dict[str, int | str]:
    """The entry of frames in `zarr.json`.

    Arguments:
        itemsize: bytes of an element.
        bits: whether they have planes of bits, not of bytes.
    """
    shuffle = "bitshuffle" if bits else "noshuffle" if itemsize == 1 else "shuffle"
    return {
        "cname": "zstd",
        "clevel": 1,
        "shuffle": shuffle,
        "typesize": itemsize,
        "blocksize": BLOCK_BYTES,
    }


def stored_header(nbytes: int, itemsize: int) -> memoryview:
    """The header of a frame whose bytes follow uncompressed; the frame is longer by this header."""
    return memoryview(_header(_STORED, itemsize, nbytes, nbytes + HEADER_BYTES))


def compressor() -> Any:
    """A compressor for `compressed`, for one thread; None if `zstandard` is not installed."""
    try:
        import zstandard
    except ImportError:
        return None
    # Practically no search for repetitions: only byte frequencies are coded.
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST,
        min_match=7,
        hash_log=6,
        chain_log=6,
        search_log=1,
        window_log=17,
        target_length=0,
    )
    return zstandard.ZstdCompressor(compression_params=parameters)


def is_shorter(length: int, nbytes: int) -> bool:
    """Whether a frame is so much shorter than the bytes in it that it is used."""
    return length < _MOST_OF_CHUNK * nbytes


def compressed(data: Array, itemsize: int, zstd: Any) -> memoryview | None:
    """A frame of some bytes; None if it would not be shorter.

    Arguments:
        data: the bytes, whole elements.
        itemsize: bytes of an element: 1, 2, 4, 8 or 16.
        zstd: from `compressor`.
    """
    block = min(BLOCK_BYTES, len(data))
    count = -(-len(data) // block)
    room = int(_MOST_OF_CHUNK * len(data))
    end = HEADER_BYTES + count * _LENGTH.size
    if end >= room:
        return None
    out, starts = np.empty(room, np.uint8), np.zeros(count, "<i4")
    planes = np.empty((itemsize, block // itemsize), np.uint8)
    shrank = [True] * itemsize
    for number in range(count):
        starts[number] = end
        piece = data[number * block : (number + 1) * block]
        block_planes = planes[:, : len(piece) // itemsize]
        _split(piece, itemsize, block_planes)
        is_split = len(piece) == block and block // itemsize >= _LEAST_SPLIT
        streams = [*block_planes] if is_split else [np.ascontiguousarray(block_planes).reshape(-1)]
        for plane, stream in enumerate(streams):
            coded = None
            if shrank[plane] or not is_split or _may_shrink(stream, zstd):
                coded = _coded(stream, zstd)
            shrank[plane] = coded is not None
            stored = stream if coded is None else np.frombuffer(coded, np.uint8)
            if end + _LENGTH.size + len(stored) >= room:
                return None
            out[end : end + _LENGTH.size] = np.frombuffer(_LENGTH.pack(len(stored)), np.uint8)
            end += _LENGTH.size
            out[end : end + len(stored)] = stored
            end += len(stored)
    flags = _ZSTD if itemsize == 1 else _ZSTD | _SHUFFLED
    out[:HEADER_BYTES] = np.frombuffer(_header(flags, itemsize, len(data), end), np.uint8)
    out[HEADER_BYTES : HEADER_BYTES + starts.nbytes] = starts.view(np.uint8)
    return out[:end].data


def _may_shrink(stream: Array, zstd: Any) -> bool:
    """Whether a few places of a stream say that it shrinks."""
    size, step = len(stream) // _PROBE_SHARE, len(stream) // _PROBES
    probes = [stream[start : start + size] for start in range(step - size, len(stream), step)]
    return _coded(np.concatenate(probes), zstd) is not None


def _coded(stream: Array, zstd: Any) -> bytes | None:
    """A stream as zstd has it; None if it is stored, which Blosc knows by its length."""
    coded: bytes = zstd.compress(stream.data)
    return coded if len(coded) < _MOST_OF_PLANE * len(stream) else None


def _split(data: Array, itemsize: int, planes: Array) -> None:
    """Splits elements into their first, second, ... bytes."""
    word = min(itemsize, 8)
    words = data.view(f"<u{word}").reshape(-1, itemsize // word)
    for plane, out in enumerate(planes):
        column = words[:, plane // word]
        # By shifts, which compilers turn into vector instructions; a copy by strides is slow.
        np.copyto(out, column >> (8 * (plane % word)) if plane % word else column, casting="unsafe")


def _header(flags: int, itemsize: int, nbytes: int, length: int) -> bytes:
    block = min(BLOCK_BYTES, nbytes)
    return _HEADER.pack(_FORMAT, _ZSTD_FORMAT, flags, itemsize, nbytes, block, length)
