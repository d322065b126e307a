"""export(): writes a checkpoint in another format, within a memory budget."""

from __future__ import annotations

from collections.abc import Iterator

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box, cut
from unickpt.format.index import ArrayEntry
from unickpt.format.writer import Writer
from unickpt.loading.ruled_view import RuledView, through
from unickpt.loading.views import CheckpointView, StoredView
from unickpt.reading import checkpoint
from unickpt.reading.chunk_reader import ChunkReader, read_made
from unickpt.reading.options import LoadOptions
from unickpt.rules import Rules


def export(
    source: checkpoint.Source,
    writer: Writer,
    *,
    rules: Rules | None = None,
    options: LoadOptions | None = None,
) -> None:
    """Reads a checkpoint of any readable format, and writes it through a `Writer`.

    Arguments:
        source: a local path or a URL, or what `unickpt.open` returned.
        writer: writes the other format.
        rules: map the names and axes of the source to those of the destination.
        options: of reading; `budget_bytes` bounds the size of a box.

    Raises:
        CheckpointCorrupt: the source is damaged; nothing remains of the destination.
        All that the writer raises.
    """
    options = LoadOptions.or_default(options)
    stored = checkpoint.opened(source).reader
    view: CheckpointView = StoredView(stored) if rules is None else through(stored, rules)
    if isinstance(view, RuledView):
        view.check(options)
    writer.begin(view.index)
    reader = ChunkReader(stored)
    try:
        for name, entry in view.index.arrays.items():
            for box in _boxes(entry, options.budget_bytes):
                data = read_made(stored, entry, view.recipe(name), box, options, reader)
                writer.write(entry, box, data)
        writer.finish()
    except BaseException:
        writer.discard()
        raise
    finally:
        reader.close()


def _boxes(entry: ArrayEntry, budget_bytes: int) -> Iterator[Box]:
    itemsize = dtypes.from_name(entry.dtype).itemsize
    return cut(Box.whole(entry.shape), max(1, budget_bytes // itemsize))
