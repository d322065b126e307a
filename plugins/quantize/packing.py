"""Codes of less than a byte, packed: code `i` has the bits from `i * bits` on, the lowest first."""

from __future__ import annotations

import numpy as np

from unickpt.extend import Array

_GROUP = 8  # codes: as many fill whole bytes


def pack(codes: Array, bits: int) -> Array:
    """Packs codes, one a byte, into bytes; the unused bits of the last one are 0."""
    if bits == 8:
        return codes
    groups = np.zeros((-(-codes.size // _GROUP), _GROUP), np.uint8)
    groups.reshape(-1)[: codes.size] = codes
    words = np.zeros(len(groups), "<u4")
    for position in range(_GROUP):
        words |= groups[:, position].astype("<u4") << np.uint32(bits * position)
    packed = words.view(np.uint8).reshape(-1, 4)[:, :bits].reshape(-1)
    return packed[: -(-codes.size * bits // 8)]


def unpack(packed: Array, bits: int, count: int) -> Array:
    """The first `count` codes of packed bytes, one a byte."""
    if bits == 8:
        return packed[:count]
    groups = -(-count // _GROUP)
    whole = np.zeros((groups, bits), np.uint8)
    whole.reshape(-1)[: packed.size] = packed
    spread = np.zeros((groups, 4), np.uint8)
    spread[:, :bits] = whole
    words = spread.view("<u4").reshape(-1)
    codes = np.empty((groups, _GROUP), np.uint8)
    for position in range(_GROUP):
        codes[:, position] = (words >> np.uint32(bits * position)) & np.uint32((1 << bits) - 1)
    return codes.reshape(-1)[:count]
