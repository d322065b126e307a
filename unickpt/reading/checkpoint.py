"""open(): reads a committed checkpoint lazily, without any framework."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, TypeVar

import tensorstore as ts

from unickpt.errors import CheckpointNotFound, CheckpointReplaced, HintError, out_of_memory
from unickpt.format import ocdbt_reader
from unickpt.format.reader_protocol import Reader
from unickpt.quoting import counted, first_few, printable, quoted, size_text
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.storage.regular_files import files_kept_open
from unickpt.threads import collection_paused
from unickpt.trees import tree_json

if TYPE_CHECKING:
    from unickpt.format.timing import Timing
    from unickpt.reading.stored_array import StoredArray

T = TypeVar("T")
Hints = Mapping[str, Any]

# Files that other systems write into the top of a checkpoint folder. Weights are not among them:
# users put those for inference next to the state of a run. Only local folders are searched:
# elsewhere, each file would be a request.
_MARKERS = (".metadata", "_CHECKPOINT_METADATA", "latest", "latest_checkpointed_iteration.txt")
_FORMAT_HINT = "format"
OWN: Hints = {_FORMAT_HINT: ocdbt_reader.FORMAT}
"""Hints for a folder that may hold another system's checkpoint too."""
_MOST_ATTEMPTS = 50
"""How often a reader starts again because a save replaced the checkpoint."""


def open(path: paths.PathLike, *, hints: Hints | None = None) -> Checkpoint:
    """Opens a checkpoint by reading its index, one small object; arrays are read on access.

    Arguments:
        path: a local path or a URL (file, memory, s3, gs) of a folder; or of a file, if another
            system's checkpoint is one.
        hints: facts that the files of another system's checkpoint do not contain, by name;
            docs/formats lists them by format. `{"format": "unickpt"}`, or the name of another
            format, is needed where one folder holds checkpoints of two.

    If a save replaces the checkpoint during the call, the new one is opened.

    Raises:
        CheckpointNotFound: no committed checkpoint exists there.
        CheckpointReplaced: saves replaced it repeatedly, faster than it could be opened.
        CheckpointCorrupt: its index is damaged.
        UnsupportedFormat: it needs a feature that this unickpt does not know, or holds what unickpt
            cannot read.
        HintError: the format does not take a hint, or not this value; or the folder holds
            checkpoints of two formats, and no hint says which one is meant.

    Example:
        >>> import numpy as np, unickpt
        >>> _ = unickpt.save("memory://run/open", {"w": np.arange(6).reshape(2, 3)})
        >>> unickpt.open("memory://run/open")["w"][1, :2]
        array([3, 4])
    """
    return again(lambda: _open(path, hints or {}))


def opened(source: Source, under: str = "", *, once: bool = False) -> Checkpoint:
    """The checkpoint at a path, or one that is already open, such as with hints; or a part of it.

    Arguments:
        source: the path, or the checkpoint.
        under: the part; see `load`.
        once: for work that `again` repeats: a checkpoint that is replaced meanwhile is an error.
    """
    if not isinstance(source, Checkpoint):
        source = _open(source, {}) if once else open(source)
    return source.under(under) if under else source


def reading(path: paths.PathLike, work: Callable[[Checkpoint], T]) -> T:
    """Opens a checkpoint and reads from it; starts again if a save replaces it during the read.

    Arguments:
        path: as for `open`.
        work: reads; its result is discarded if it has to start again.

    Raises:
        CheckpointReplaced: saves replaced it repeatedly.
    """
    return again(lambda: work(_open(path, {})))


def again(work: Callable[[], T], source: Source | None = None) -> T:
    """Calls `work`, and calls it again if it raises CheckpointReplaced.

    Arguments:
        work: opens `source` and reads it.
        source: a path; or an open checkpoint, which stays replaced, so that `work` is called once.
    """
    replaced = None
    for _ in range(1 if isinstance(source, Checkpoint) else _MOST_ATTEMPTS):
        try:
            return work()
        except CheckpointReplaced as error:
            replaced = error  # opened again it is the new one, or gone
        except CheckpointNotFound as error:
            if replaced is None:
                raise
            raise CheckpointNotFound(
                f"{error}. It existed a moment ago and was removed while it was being read"
            ) from replaced
    assert replaced is not None, "it was tried at least once"
    raise replaced


def _open(path: paths.PathLike, hints: Hints) -> Checkpoint:
    location = paths.resolve(path, or_file=True)
    try:
        with collection_paused(), files_kept_open():
            reader = open_reader(location, hints)
    except MemoryError as error:
        raise out_of_memory(f"opening {location}", error) from error
    if reader is None:
        from unickpt.reading.not_found import nothing_at

        raise CheckpointNotFound(nothing_at(location, open_reader))
    return Checkpoint(reader, hints)


def open_reader(location: Location, hints: Hints | None = None) -> Reader | None:
    """Opens the checkpoint at a location; None if no format recognises one there.

    Arguments:
        location: of the checkpoint.
        hints: the user's facts about it.

    Raises:
        CheckpointNotFound: a database is there, but no checkpoint of a known format.
        UnickptError: as `reader_registry.open_foreign`.
    """
    other_hints = dict(hints or {})
    format = other_hints.pop(_FORMAT_HINT, None)
    context = paths.context()
    if location.is_local and os.path.isfile(str(location)):
        from unickpt.format import reader_registry

        reader: Reader | None = reader_registry.open_file(location, other_hints)
    else:
        reader = _open_folder(location, context, other_hints, format)
    if reader is not None and format not in (None, reader.format):
        raise HintError(
            f"{location} is of the format {reader.format!r}, and the hint says {quoted(format)}; "
            "leave the hint out"
        )
    return reader


def _open_folder(
    location: Location, context: ts.Context, hints: Hints, format: str | None
) -> Reader | None:
    own_reader = no_checkpoint = None
    try:
        own_reader = ocdbt_reader.open(location, context)
    except CheckpointNotFound as error:  # a database, which other systems use too
        no_checkpoint = error
    markers = list[str]()
    if own_reader is not None and format in (None, own_reader.format):
        if format is None and location.is_local:
            markers = [m for m in _MARKERS if os.path.isfile(f"{location.path}{m}")]
        if not markers and not hints:
            return own_reader
    from unickpt.format import reader_registry

    if own_reader is not None and format in (None, own_reader.format):
        for marker in markers:
            reader_registry.check_alone(own_reader, marker)
        reader_registry.check_hints(own_reader, hints)
        return own_reader
    reader = reader_registry.open_foreign(location, hints)
    if reader is None and no_checkpoint is not None:
        raise no_checkpoint
    return own_reader if reader is None else reader


class Checkpoint(Mapping[str, "StoredArray"]):
    """A committed checkpoint: its arrays by name, tied arrays under each of their names.

    `metadata` is what `save` was given, `values` the plain values by name, `index` everything else.

    Example:
        >>> import numpy as np, unickpt
        >>> state = {"w": np.arange(6).reshape(2, 3), "step": 7}
        >>> _ = unickpt.save("memory://checkpoint/docs", state)
        >>> checkpoint = unickpt.open("memory://checkpoint/docs")
        >>> list(checkpoint), checkpoint.values["step"], checkpoint["w"][1].tolist()
        (['w'], 7, [3, 4, 5])
    """

    def __init__(self, reader: Reader, hints: Hints | None = None) -> None:
        self.reader, self._hints = reader, hints or {}
        """Reads its chunks; for `load` and the tools."""
        self.location, self.index = reader.location, reader.index

    @property
    def url(self) -> str:
        return self.location.url

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.index.metadata

    @property
    def values(self) -> PlainValues:
        """The plain values by name."""
        return PlainValues(self)

    @property
    def timing(self) -> Timing | None:
        """How long the save took, by process and phase; None if that was not kept, as by other
        systems. Reads it again.

        Raises:
            CheckpointCorrupt: it is damaged; all else may be sound.
        """
        return self.reader.timing()

    def __getitem__(self, name: str) -> StoredArray:
        target = self.index.aliases.get(name, name)
        entry = self.index.arrays.get(target)
        if entry is None:
            raise KeyError(self._no_array(name))
        from unickpt.reading.stored_array import StoredArray

        return StoredArray(self, self.reader, name, entry)

    def under(self, name: str) -> Checkpoint:
        """The part whose names share a prefix, as a checkpoint of its own; reads nothing.

        Arguments:
            name: of a container, such as "model"; or the beginning of names, with a dot at its end.
                The names of the part do not have it.

        Raises:
            LoadMismatch: nothing is stored there.

        Example:
            >>> import numpy as np, unickpt
            >>> _ = unickpt.save("memory://checkpoint/under", {"model": {"w": np.ones(2)}})
            >>> list(unickpt.open("memory://checkpoint/under").under("model"))
            ['w']
        """
        from unickpt.reading.subtree import Subtree  # here: most read from all of a checkpoint

        return Checkpoint(Subtree(self.reader, name), self._hints)

    def _no_array(self, name: object) -> str:
        """Why there is no array of a name, and what to use instead."""
        if name in self.index.values:
            return f"{name!r} is a plain value; read it with .values[{name!r}]"
        if name in self.index.per_process:
            return f"{name!r} differs by process; unickpt.load(path) returns the values of all"
        below = [n for n in self if isinstance(name, str) and n.startswith(f"{name}/")]
        if below:
            return f"{name!r} is a container, not an array; it contains {_first_names(below)}"
        return f"{name!r} is not in this checkpoint; arrays are {_first_names(self)}"

    def __iter__(self) -> Iterator[str]:
        yield from self.index.arrays
        yield from self.index.aliases

    def __len__(self) -> int:
        return len(self.index.arrays) + len(self.index.aliases)

    def __reduce__(self) -> tuple[Any, ...]:
        index, under = self.index, self.reader.under
        return _reopen, (self.url, dict(self._hints), index.attempt, index.created, under)

    def __repr__(self) -> str:
        under = f", under={self.reader.under!r}" if self.reader.under else ""
        return f"Checkpoint({str(self.location)!r}{under}, {counted(len(self), 'array')})"

    def _repr_html_(self) -> str:
        """The tree with equal layers folded, for notebooks; reads nothing."""
        from unickpt.display import html, tree_table  # here, so that importing unickpt stays fast

        index = self.index
        facts = [
            counted(len(index.arrays), "array"),
            size_text(self.nbytes),
            f"saved by {counted(index.processes, 'process', 'processes')}",
            *([f"created {index.created}"] if index.created else []),
        ]
        rows = tree_table.outline(index, self.url)
        return html.page("Checkpoint", self.url, facts, html.outline(rows))

    @property
    def nbytes(self) -> int:
        """Logical bytes of all arrays; tied ones count once."""
        return sum(entry.nbytes for entry in self.index.arrays.values())


def _reopen(url: str, hints: Hints, attempt: str, created: str, under: str) -> Checkpoint:
    """The checkpoint that was pickled.

    Raises:
        CheckpointReplaced: a save has replaced it.
    """
    checkpoint = open(url, hints=hints)
    if (checkpoint.index.attempt, checkpoint.index.created) != (attempt, created):
        raise CheckpointReplaced(
            f"{checkpoint.location}: the pickled checkpoint, created {created}, was replaced by "
            f"one created {checkpoint.index.created}; open it again and pickle the new one"
        )
    return checkpoint.under(under) if under else checkpoint


Source = paths.PathLike | Checkpoint
"""The path of a checkpoint, or an opened one."""


class PlainValues(Mapping[str, tree_json.Plain]):
    """A checkpoint's plain values by name; calling it gives its arrays, as `Mapping.values()`
    does."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def __getitem__(self, name: str) -> tree_json.Plain:
        values = self._checkpoint.index.values
        if name in values:
            return values[name]
        if name in self._checkpoint:
            raise KeyError(f"{name!r} is an array; read it with checkpoint[{name!r}]")
        raise KeyError(
            f"{name!r} is not a plain value of this checkpoint; these are {_first_names(values)}"
        )

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.index.values)

    def __len__(self) -> int:
        return len(self._checkpoint.index.values)

    def __call__(self) -> ValuesView[StoredArray]:
        return ValuesView(self._checkpoint)

    def __repr__(self) -> str:
        return repr(dict(self))


def _first_names(names: Iterable[str]) -> str:
    return first_few([printable(name, 120) for name in names], 5) or "none"
