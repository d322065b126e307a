"""Counts what is read: chunks, and keys of databases, by TensorStore, as it says, and past it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import tensorstore as ts

from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.storage.local_database import LocalDatabaseReader
from unickpt.storage.ocdbt import DatabaseReader


class ChunkRead(NamedTuple):
    """A chunk: the key of its part, its number there, its bytes."""

    key: str
    number: int
    nbytes: int


@contextmanager
def chunks_read() -> Iterator[list[ChunkRead]]:
    """Lists each chunk that is read, by any thread, until the block ends."""
    seen: list[ChunkRead] = []
    read = OcdbtReader.read_chunk

    def counted(
        self: OcdbtReader, entry: Any, part: Any, number: int, row: Any, out: Any, *rest: Any
    ) -> bool:
        seen.append(ChunkRead(part.key, number, out.nbytes))
        return read(self, entry, part, number, row, out, *rest)

    each = OcdbtReader.read_chunks

    def each_counted(self: OcdbtReader, chunks: Any, rows: Any, out: Any) -> Any:
        if not self._bases:  # else `read_chunk` reads them
            each_one = zip(chunks, out, strict=True)
            seen.extend(ChunkRead(part.key, n, to.nbytes) for (_, part, n), to in each_one)
        return each(self, chunks, rows, out)

    together = OcdbtReader.read_whole

    def all_counted(self: OcdbtReader, entries: Any, rows: Any, out: Any) -> Any:
        seen.extend(ChunkRead(e.name, 0, to.nbytes) for e, to in zip(entries, out, strict=True))
        return together(self, entries, rows, out)

    with (
        mock.patch.object(OcdbtReader, "read_chunk", counted),
        mock.patch.object(OcdbtReader, "read_chunks", each_counted),
        mock.patch.object(OcdbtReader, "read_whole", all_counted),
    ):
        yield seen


@dataclass
class Count:
    keys: int = 0


@contextmanager
def keys_read() -> Iterator[Count]:
    """Counts each time a key is read; the count stands when the block ends."""
    count, before = Count(), _by_tensorstore()
    past: list[str] = []

    def counted(real: Any) -> Any:
        def read(self: DatabaseReader, key: str, *rest: Any) -> Any:
            past.append(key)  # from several threads
            return real(self, key, *rest)

        return read

    together = LocalDatabaseReader.request_all

    def all_counted(self: LocalDatabaseReader, keys: Sequence[str]) -> Any:
        found = together(self, keys)
        past.extend(found)
        return found

    each = LocalDatabaseReader.read_each

    def each_counted(self: LocalDatabaseReader, keys: Sequence[str], *rest: Any) -> Any:
        past.extend(keys)
        return each(self, keys, *rest)

    with (
        mock.patch.object(LocalDatabaseReader, "read_into", counted(LocalDatabaseReader.read_into)),
        mock.patch.object(LocalDatabaseReader, "read_each", each_counted),
        mock.patch.object(DatabaseReader, "read", counted(DatabaseReader.read)),
        mock.patch.object(DatabaseReader, "request", counted(DatabaseReader.request)),
        mock.patch.object(LocalDatabaseReader, "request_all", all_counted),
    ):
        yield count
    count.keys = _by_tensorstore() - before + len(past)


def _by_tensorstore() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/ocdbt/read")
    return sum(int(metric["values"][0]["value"]) for metric in found)  # none before the first read


def lines_run(act: Callable[[], Any]) -> int:
    """Counts the lines of Python and the functions in C that a call executes."""
    events = [0]

    def trace(frame: Any, event: str, argument: Any) -> Any:
        events[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return events[0]
