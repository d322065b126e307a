"""Reads the small arrays that a writer must know to plan its files."""

from __future__ import annotations

from unickpt.arrays.box import Box
from unickpt.errors import UnsupportedLeaf
from unickpt.format.index import Index
from unickpt.format.writer import NeedsElements, Writer
from unickpt.frameworks.host_memory import HostBuffers
from unickpt.loading.views import CheckpointView
from unickpt.quoting import quoted
from unickpt.reading.options import LoadOptions
from unickpt.tools.slabs import read_boxes

_SHARE = 6  # of the budget; what they become in a file takes a few times their memory


def with_needed(
    writer: Writer, view: CheckpointView, index: Index, budget_bytes: int, options: LoadOptions
) -> Writer:
    """A writer with the elements that it needs, if it needs any.

    Arguments:
        writer: of a format.
        view: the source.
        index: what is going to be written.
        budget_bytes: of memory, for this process.
        options: of reading.

    Raises:
        UnsupportedLeaf: they are too large; names the largest.
    """
    if not isinstance(writer, NeedsElements):
        return writer
    entries = [index.arrays[name] for name in writer.needed(index)]
    total = sum(entry.nbytes for entry in entries)
    if total * _SHARE > budget_bytes:
        largest = max(entries, key=lambda entry: entry.nbytes)
        raise UnsupportedLeaf(
            f"{quoted(largest.name)}: {largest.dtype_and_shape} is written in one piece with "
            f"others, {total} bytes in all, which takes budget_bytes={total * _SHARE}; or drop it "
            f"by a rule: {largest.name} <-> drop"
        )
    boxes = [(entry, Box.whole(entry.shape)) for entry in entries]
    read = read_boxes(view, boxes, options, HostBuffers(total))
    pairs = zip(entries, read, strict=True)
    return writer.with_elements({entry.name: array for entry, (array, _) in pairs})
