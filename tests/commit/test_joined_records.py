"""The chunks of several records in one table: whose files, values and checkpoints they refer to."""

from __future__ import annotations

from typing import Any

import numpy as np

from unickpt.commit.merge_chunks import merged_chunks
from unickpt.commit.messages import ADDITION_DTYPE, CHUNK_DTYPE, ELSEWHERE, Record
from unickpt.format.chunk_grid import FULL_LINK
from unickpt.format.index import ArrayEntry, BaseEntry, Index

OLD, NEW = (BaseEntry(name, "00" * 8) for name in ("step_1", "step_2"))


def rows(dtype: np.dtype[Any], *rows: dict[str, int]) -> np.ndarray[Any, Any]:
    table = np.zeros(len(rows), dtype)
    for number, row in enumerate(rows):
        for column, value in row.items():
            table[column][number] = value
    return table


def joined(records: list[Record], **options: Any) -> Any:
    """Chunks of one array `w` with a chunk of each process."""
    arrays = {"w": ArrayEntry("w", (len(records), 4), "float32", (1, 4))}
    index = Index("*", arrays, processes=len(records))
    return merged_chunks(index, list(enumerate(records)), [["w"]] * len(records), **options)


def test_added_values_in_other_checkpoints_refer_to_the_bases_of_all() -> None:
    """Two processes number the checkpoints that they borrow from differently."""

    def borrows(chunk: int, full: int, added: int, *bases: BaseEntry) -> Record:
        chunks = rows(CHUNK_DTYPE, {"chunk": chunk, "file": ELSEWHERE, "offset": full})
        place = {"link": FULL_LINK + 1, "file": ELSEWHERE, "offset": added}
        return Record(0, chunks, bases=bases, additions=rows(ADDITION_DTYPE, {"row": 0, **place}))

    chunks = joined([borrows(0, 0, 1, OLD, NEW), borrows(1, 1, 0, NEW, OLD)])
    assert chunks.bases == (OLD, NEW)
    borrowed = chunks.borrowed[["row", "link", "base"]].tolist()
    links = FULL_LINK, FULL_LINK + 1
    assert borrowed == [(0, links[0], 0), (0, links[1], 1), (1, links[0], 0), (1, links[1], 1)]


def test_added_values_stay_with_their_chunks_when_chunks_before_them_are_dropped() -> None:
    """Of an array for which only one process counts, the chunks of the process before it go."""

    def writes(chunk: int, digest: int, *added: int) -> Record:
        chunks = rows(CHUNK_DTYPE, {"chunk": chunk, "digest": digest, "length": 16})
        additions = [
            {"row": 0, "link": FULL_LINK + 1 + n, "offset": offset, "length": 8}
            for n, offset in enumerate(added)
        ]
        return Record(0, chunks, ("d/0",), additions=rows(ADDITION_DTYPE, *additions))

    records = [writes(1, 7, 32), writes(1, 8, 48, 64)]
    chunks = joined(records, assumed={"w"}, winners={"w": 1})
    assert chunks.table["digest"].tolist() == [0, 8]
    additions = chunks.additions[["row", "link", "file", "offset"]].tolist()
    assert additions == [(1, FULL_LINK + 1, 1, 48), (1, FULL_LINK + 2, 1, 64)]
