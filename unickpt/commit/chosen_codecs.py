"""Which arrays are stored compressed, by what all processes wrote of them (`saving.compressing`).

Nothing here does I/O.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from unickpt.commit.merge_chunks import Chunks, Column
from unickpt.commit.messages import ELSEWHERE, Names, Records
from unickpt.errors import CoverageError
from unickpt.format import chunk_grid, codec
from unickpt.format.blosc_frames import HEADER_BYTES
from unickpt.format.index import ArrayEntry, Index


def settled(index: Index, chunks: Chunks, records: Records, names: Names) -> tuple[Index, Chunks]:
    """The index with the codecs that each array has, and where its chunks are with these.

    Arguments:
        index: of all processes, with the codecs that arrays may have.
        chunks: what they wrote.
        records: what else they say of that.
        names: for each process the arrays that it has.

    Raises:
        CoverageError: an array is compressed and not compressed.
    """
    followed: dict[str, set[bool]] = {}
    for process, record in records:
        for number, is_compressed in record.follows.items():
            followed.setdefault(names[process][number], set()).add(is_compressed)
    is_known = all(record.knows_base for _, record in records)
    places, arrays = chunks.places.copy(), dict(index.arrays)
    spans = chunk_grid.chunk_spans(index.arrays)
    for name, entry in index.arrays.items():
        if not codec.is_chosen(entry):
            continue
        own = places[spans[name].start : spans[name].stop]
        lengths = _raw_lengths(entry)
        said = followed.get(name, set())
        is_framed = own["length"] == lengths + HEADER_BYTES
        if True in said or not (said or is_framed.all()):
            if False in said:
                raise _contradiction(name, said)
            continue
        is_raw = (own["length"] == lengths) & bool(said) | (own["file"] == ELSEWHERE)
        if not (is_framed | is_raw).all():
            raise _contradiction(name, said)
        shift = HEADER_BYTES * (is_framed & ~is_raw).astype(own["offset"].dtype)
        own["offset"] += shift
        own["length"] -= shift.astype(own["length"].dtype)
        # Who did not know what the base says has not looked: the next save shall.
        arrays[name] = replace(entry, encoding=() if is_known or said else None)
    return replace(index, arrays=arrays), replace(chunks, places=places)


def _raw_lengths(entry: ArrayEntry) -> Column:
    """The bytes that are stored of each chunk without compression."""
    parts = chunk_grid.parts(entry)
    lengths = [math.prod(part.chunk) * entry.itemsize for part in parts]
    found: Column = np.repeat(np.array(lengths, np.int64), [part.count for part in parts])
    return found


def _contradiction(name: str, said: Sequence[bool] | set[bool]) -> CoverageError:
    return CoverageError(
        f"array {name!r}: some processes compressed it, and others took chunks that are not "
        f"compressed from the base (which says {sorted(said)}). All must save with the same "
        "SaveOptions.compression and base; save again"
    )
