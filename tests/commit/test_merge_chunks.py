"""The chunks of all records, each at its row, in blocks of rows as in jobs with many chunks."""

from __future__ import annotations

import re
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unickpt.arrays.layout import Layout, Mesh
from unickpt.commit import merge_chunks
from unickpt.commit.messages import CHUNK_DTYPE, Record
from unickpt.errors import CoverageError
from unickpt.format.index import ArrayEntry, Index

ALONE = Layout(Mesh((), (), (0,)), ((),))


def index_of(counts: list[int]) -> Index:
    """Arrays of so many chunks each."""
    arrays = {
        f"a{n}": ArrayEntry(f"a{n}", (count,), "uint8", (1,), ALONE)
        for n, count in enumerate(counts)
    }
    return Index("*", arrays, chunks=sum(counts))


def records_of(counts: list[int], writers: list[int]) -> list[tuple[int, Record]]:
    """The chunks of all arrays, each written by one process; digests are their rows."""
    every = [(a, c) for a, count in enumerate(counts) for c in range(count)]
    records = []
    for process in range(max(writers) + 1):
        rows = [row for row, writer in enumerate(writers) if writer == process]
        chunks = np.zeros(len(rows), CHUNK_DTYPE)
        for position, row in enumerate(rows):
            chunks[position] = (*every[row], 100 + row, 0, 7 * row, 7)
        records.append((process, Record(1, chunks[::-1].copy(), ("d/f",))))
    return records


@settings(deadline=None)
@given(st.data(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.sampled_from([1, 3, 64]))
def test_each_chunk_comes_to_its_row(data: st.DataObject, counts: list[int], block: int) -> None:
    total = sum(counts)
    writers = data.draw(st.lists(st.integers(0, 3), min_size=total, max_size=total))
    records, names = records_of(counts, writers), [[f"a{n}" for n in range(len(counts))]] * 4
    is_again = data.draw(st.booleans())
    if is_again:  # process 0 writes all that a replica, the last process, has written too
        last, record = len(records), replace(records[0][1])
        records.append((last, record))
        names = [*names[:last], names[0]]
    with patch.object(merge_chunks, "_BLOCK", block):
        chunks = merge_chunks.merged_chunks(index_of(counts), records, names)
    rows = np.arange(total)
    assert np.array_equal(chunks.table["digest"], 100 + rows)
    assert np.array_equal(chunks.table["process"], writers)
    assert np.array_equal(chunks.places["offset"], 7 * rows)
    assert np.array_equal(chunks.places["file"], writers)
    assert (chunks.kinds == merge_chunks.WHOLE).all()
    assert not chunks.counts.any()
    assert not chunks.contested


@pytest.mark.parametrize("block", [1, 4, 64])
@pytest.mark.parametrize(("array", "chunk"), [(0, 5), (1, 3), (2, 0), (1, 1 << 63), (1 << 31, 0)])
def test_a_process_that_lists_a_chunk_that_does_not_exist_is_named(
    array: int, chunk: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merge_chunks, "_BLOCK", block)
    records = records_of([5, 3], [0, 1, 2, 0, 1, 2, 2, 1])
    records[2][1].chunks["array"][1], records[2][1].chunks["chunk"][1] = array, chunk
    said = re.escape("process 2 lists chunks that do not exist")
    with pytest.raises(CoverageError, match=said):
        merge_chunks.merged_chunks(index_of([5, 3]), records, [["a0", "a1"]] * 3)


def test_a_chunk_that_no_process_lists_stays_missing_though_another_is_listed_twice() -> None:
    records = records_of([5, 3], [0, 1, 0, 0, 1, 0, 0, 1])
    other = records[1][1].chunks.copy()
    other[0] = records[0][1].chunks[-1]  # the last chunk becomes the first one
    again = replace(records[1][1], chunks=other)
    names = [["a0", "a1"]] * 2
    chunks = merge_chunks.merged_chunks(index_of([5, 3]), [records[0], (1, again)], names)
    assert np.flatnonzero(chunks.kinds == merge_chunks.MISSING).tolist() == [7]
    assert chunks.table["process"][:7].tolist() == [0, 1, 0, 0, 1, 0, 0]
