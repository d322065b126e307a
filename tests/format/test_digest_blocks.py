"""Rows of a digest table that is stored in blocks."""

from __future__ import annotations

import numpy as np

from unickpt.format import digest_table
from unickpt.format.digest_table import DTYPE, TableBlocks


def test_any_range_has_the_rows_of_the_table_and_is_a_copy() -> None:
    table = np.zeros(29, DTYPE)
    table["digest"], table["process"] = np.arange(29) * 7919, np.arange(29) % 3
    digests = digest_table.blocks(table, rows=8)
    assert digests is not None
    data = table.tobytes()
    blocks = TableBlocks(digests, len(table), lambda first, count: data[first : first + count])
    for start in range(30):
        for stop in range(start, 30):
            rows = blocks.rows(slice(start, stop))
            assert rows.dtype == DTYPE
            assert rows.tobytes() == table[start:stop].tobytes()
            rows["digest"] = 1  # only there
    assert blocks.rows(slice(0, 29)).tobytes() == data
    numbers = np.array([28, 3, 3, 16])
    assert blocks.rows(numbers).tobytes() == table[numbers].tobytes()
