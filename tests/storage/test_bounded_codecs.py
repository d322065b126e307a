"""crc32c and zstd for untrusted bytes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nodes import node, plain, zstd

from unickpt.storage.btree import bounded_codecs, nodes


@given(st.binary(max_size=300), st.integers(0, 300))
def test_a_stream_is_unpacked_as_far_as_asked(data: bytes, size: int) -> None:
    stream = plain(data) if data else zstd((0, b"", 0))
    told, most = bounded_codecs.zstd_sizes(stream)
    assert told <= len(data) <= most or most == len(data)
    if size:
        assert bounded_codecs.zstd_prefix(stream, size) == (
            data[:size] if size <= len(data) else None
        )


@pytest.mark.parametrize("size", [1, 100, 5000])
def test_a_checksum_is_checked(size: int) -> None:
    sound = node(bytes(size))
    assert nodes.is_sealed(sound)
    for at in (0, size // 2, len(sound) - 1):
        changed = bytearray(sound)
        changed[at] ^= 1
        assert not nodes.is_sealed(bytes(changed))
