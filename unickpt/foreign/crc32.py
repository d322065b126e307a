"""CRC-32 of bytes that come in parts."""

from __future__ import annotations

from functools import cache

_POLYNOMIAL = 0xEDB88320


def combined(first: int, second: int, second_length: int) -> int:
    """The CRC-32 of bytes, from those of their two parts (as zlib's crc32_combine).

    Arguments:
        first: the CRC-32 of the first part.
        second: of the second part.
        second_length: bytes of the second part.

    Example:
        >>> import zlib
        >>> combined(zlib.crc32(b"one"), zlib.crc32(b"two"), 3) == zlib.crc32(b"onetwo")
        True
    """
    length, power = second_length, 3  # 8 bits in a byte
    while length:
        if length & 1:
            first = _times(_zeros(power), first)
        length >>= 1
        power += 1
    return first ^ second


@cache
def _zeros(power: int) -> tuple[int, ...]:
    """The matrix over GF(2) that appends 2 to the `power` zero bits."""
    if power == 0:
        return (_POLYNOMIAL, *(1 << n for n in range(31)))
    half = _zeros(power - 1)
    return tuple(_times(half, column) for column in half)


def _times(matrix: tuple[int, ...], vector: int) -> int:
    found, at = 0, 0
    while vector:
        if vector & 1:
            found ^= matrix[at]
        vector >>= 1
        at += 1
    return found
