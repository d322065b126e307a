"""Counts what is read: chunks, and keys of databases, by TensorStore, as it says, and past it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from typing import Any, NamedTuple
from unittest import mock

import tensorstore as ts

from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.reader_protocol import Request
from unickpt.storage.database import LocalDatabaseReader
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
    read = OcdbtReader.read

    def counted(self: OcdbtReader, requests: Sequence[Request]) -> Sequence[int]:
        seen.extend(ChunkRead(r.part.key, r.number, r.out.nbytes) for r in requests)
        return read(self, requests)

    with mock.patch.object(OcdbtReader, "read", counted):
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

    def all_counted(real: Any) -> Any:
        def request_all(self: DatabaseReader, keys: Sequence[str]) -> Any:
            found = real(self, keys)
            past.extend(found)
            return found

        return request_all

    into = LocalDatabaseReader.read_into

    def into_counted(self: LocalDatabaseReader, keys: Sequence[str], *rest: Any) -> Any:
        done = into(self, keys, *rest)
        past.extend(compress(keys, done))
        return done

    with (
        mock.patch.object(LocalDatabaseReader, "read_into", into_counted),
        mock.patch.object(DatabaseReader, "read", counted(DatabaseReader.read)),
        mock.patch.object(DatabaseReader, "request", counted(DatabaseReader.request)),
        mock.patch.object(
            LocalDatabaseReader, "request_all", all_counted(LocalDatabaseReader.request_all)
        ),
        mock.patch.object(DatabaseReader, "request_all", all_counted(DatabaseReader.request_all)),
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
