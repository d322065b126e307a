"""A part of a checkpoint, as a checkpoint of its own: the leaves whose names share a prefix."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import tensorstore as ts

from unickpt.errors import CheckpointCorrupt, LoadMismatch
from unickpt.format import chunk_grid
from unickpt.format.chunk_grid import Part
from unickpt.format.digest_table import Table
from unickpt.format.index import CONVERSION, OF_THE_WHOLE, RESERVED, ArrayEntry, Index
from unickpt.format.reader_protocol import Reader, Request
from unickpt.frameworks.sections import StoredValue
from unickpt.quoting import counted, first_few, quoted
from unickpt.trees import tree, tree_json

T = TypeVar("T")
_MOST_COMPARED = 200  # characters; longer names, which may be hostile, are not compared
# Attributes and methods of a reader that hold for a part as for the whole.
_OF_THE_WHOLE = (
    *("lacks", "most_per_byte", "beside", "has_wide_checksums", "timing", "stored_bytes"),
    *("check_unchanged", "check_structure", "check_rest"),
)


class Subtree(Reader):
    """Another reader's leaves under a name or a prefix, without it.

    Arguments:
        whole: the reader of all of the checkpoint.
        under: see `Checkpoint.under`.

    Raises:
        LoadMismatch: nothing is stored there.
        CheckpointCorrupt: the tree of the index is invalid.
    """

    def __init__(self, whole: Reader, under: str) -> None:
        if isinstance(whole, Subtree):
            whole, under = whole.whole, whole.under + under
        self.under = under if under.endswith((".", "/")) else f"{under}/"
        self.whole: Reader = whole
        self.format, self.version, self.location = whole.format, whole.version, whole.location
        for attribute in _OF_THE_WHOLE:
            setattr(self, attribute, getattr(whole, attribute))
        self.blocks = _inner(whole.blocks, self.under)
        if not any(_is_in(name, self.under) for name in whole.index.names):
            raise LoadMismatch(_nothing(whole, under))
        try:
            self.index, self._stored = _part_of(whole.index, self.under)
        except tree_json.BadTree as error:
            raise CheckpointCorrupt(f"{self.location}: {error}") from None

    def _request(self, request: Request) -> Request:
        return request._replace(
            entry=self._stored[request.entry.name], part=self._part(request.entry, request.part)
        )

    def _part(self, entry: ArrayEntry, part: Part) -> Part:
        stored, suffix = self._stored[entry.name].name, part.key[len(entry.name) :].lstrip("/")
        return replace(part, key=tree.join(stored, suffix) if suffix else stored)

    def read(self, requests: Sequence[Request]) -> Sequence[int]:
        return self.whole.read(list(map(self._request, requests)))

    def reads_boxes(self, entry: ArrayEntry) -> bool:
        return self.whole.reads_boxes(self._stored[entry.name])

    def first_digests(self, entries: Sequence[ArrayEntry]) -> Table | None:
        return self.whole.first_digests([self._stored[entry.name] for entry in entries])

    def digests_of(self, name: str) -> Table | None:
        return self.whole.digests_of(self._stored[name].name)

    def check_backed(self, entry: ArrayEntry) -> None:
        self.whole.check_backed(self._stored[entry.name])

    def per_process(
        self, name: str, processes: Sequence[int] | None = None
    ) -> tuple[StoredValue, ...]:
        stored = self.whole.index.per_process
        return self.whole.per_process(_inner({n: n for n in stored}, self.under)[name], processes)

    def damaged(self, reason: str) -> Exception:
        return self.whole.damaged(f"under {self.under!r}, {reason}")

    def checking(self) -> Reader:
        return Subtree(self.whole.checking(), self.under)

    def file_damage(self) -> Iterator[str]:
        return self.whole.file_damage()

    def unchecked(self) -> Sequence[str]:
        names = {entry.name: name for name, entry in self._stored.items()}
        return [names[name] for name in self.whole.unchecked() if name in names]

    def part_url(self, part: Part) -> str:
        name = part.key if part.key in self._stored else part.key.rpartition("/")[0]
        return self.whole.part_url(self._part(self.index.arrays[name], part))

    def open_part(self, entry: ArrayEntry, part: Part) -> ts.TensorStore:
        return self.whole.open_part(self._stored[entry.name], self._part(entry, part))


def _is_in(name: str, under: str) -> bool:
    return name.startswith(under) or f"{name}/" == under


def _inner(values_by_name: Mapping[str, T], under: str) -> dict[str, T]:
    """The facts by name for the leaves in a part, by their new names."""
    return {name[len(under) :]: x for name, x in values_by_name.items() if _is_in(name, under)}


def _part_of(index: Index, under: str) -> tuple[Index, dict[str, ArrayEntry]]:
    """The index of a part, and the stored arrays by the names in it.

    Raises:
        BadTree: the tree of the index is invalid.
    """
    stored: dict[str, ArrayEntry] = {}
    aliases: dict[str, str] = {}
    first: dict[str, str] = {}  # names in the part, by the stored names of their arrays
    for name, entry in _inner(index.entries, under).items():
        if first.setdefault(entry.name, name) == name:
            stored[name] = entry
        else:
            aliases[name] = first[entry.name]
    arrays = {name: replace(entry, name=name) for name, entry in stored.items()}
    values, per_process = _inner(index.values, under), _inner(index.per_process, under)
    part = replace(
        index,
        tree=_structure(index.tree, under, [*arrays, *aliases, *values, *per_process]),
        arrays=arrays,
        aliases=aliases,
        values=values,
        per_process=per_process,
        metadata=_metadata(index.metadata, under),
        chunks=sum(map(chunk_grid.chunk_count, arrays.values())),
    )
    return part, stored


def _structure(whole: Any, under: str, names: Iterable[str]) -> Any:
    root = None if whole is None else tree_json.from_json(whole)
    node = tree.find(root, under[:-1]) if under.endswith("/") else None
    return tree_json.to_json(tree_json.from_names(names) if node is None else node)


def _metadata(metadata: Mapping[str, Any], under: str) -> Mapping[str, Any]:
    """Metadata whose record of a conversion has the names of a part, without facts about the tree
    as a whole."""
    metadata = {key: content for key, content in metadata.items() if key not in OF_THE_WHOLE}
    library_metadata = metadata.get(RESERVED)
    if not isinstance(library_metadata, dict):
        return metadata
    conversion = library_metadata.get(CONVERSION)
    if not isinstance(conversion, dict):
        return metadata
    part = {
        key: _inner(x, under) if key != "conventions" and isinstance(x, dict) else x
        for key, x in conversion.items()
    }
    return {**metadata, RESERVED: {**library_metadata, CONVERSION: part}}


def _nothing(whole: Reader, under: str) -> str:
    import difflib  # here, so that importing unickpt stays fast

    counts = Counter(re.sub("/.*", "/", name, flags=re.DOTALL) for name in whole.index.names)
    shown = first_few(
        [f"{quoted(name)} ({counted(n, 'leaf', 'leaves')})" for name, n in counts.items()]
    )
    short = [name for name in counts if len(name) < _MOST_COMPARED]
    bare = re.sub(r"^[./]+|[./]+$", "", under[:_MOST_COMPARED])
    if any(name.startswith(f"{under}.") for name in whole.index.names):
        near = [f"{under}."]
    elif f"{bare}/" in counts:
        near = [bare]
    else:
        near = difflib.get_close_matches(bare, short, 1)
    meant = f" (did you mean {near[0].rstrip('/')!r}?)" if near else ""
    return (
        f"{whole.location}: nothing is stored under {quoted(under)}{meant}; there are "
        f"{shown or 'none'}. "
        "`under` is the name of a container, such as 'model' or 'train/model'; or the beginning of "
        "names, with a dot at its end"
    )
