"""What copies take of checkpoints from which one borrows: the stored values themselves."""

from __future__ import annotations

from collections.abc import Iterator

from unickpt.format import chunk_grid
from unickpt.format.chunk_values import Value
from unickpt.format.ocdbt_reader import OcdbtReader


def borrowed_values(reader: OcdbtReader) -> Iterator[tuple[str, bytes]]:
    """The keys and the stored bytes of all values of a checkpoint that others beside it have.

    Raises:
        CheckpointCorrupt: one is missing.
        StorageError: the storage failed.
    """
    values, lent = reader.chunk_values, reader.borrowed
    for entry in reader.index.arrays.values() if reader.index.bases else ():
        for part in chunk_grid.parts(entry):
            for number in range(part.count):
                for link, base in lent.links(entry, part, number).items():
                    value, key_part = Value(lent.bases[base], part), part
                    if link != chunk_grid.WHOLE_LINK:
                        value = values.chain(entry, part, number)[link - chunk_grid.FULL_LINK]
                        key_part = part.linked(link)
                    data = values.read_value(entry, value, number)
                    yield chunk_grid.chunk_key(key_part, number), data
