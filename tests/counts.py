"""Counts the keys of databases that are read: by TensorStore, as it says, and past it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import tensorstore as ts

from unickpt.backends.file import Values


@dataclass
class Count:
    keys: int = 0


@contextmanager
def keys_read() -> Iterator[Count]:
    """Counts each time a key is read; the count stands when the block ends."""
    count, before, read_into = Count(), _by_tensorstore(), Values.read_into
    past: list[str] = []

    def counted(self: Values, key: str, *rest: Any) -> None:
        past.append(key)  # from several threads
        read_into(self, key, *rest)

    with mock.patch.object(Values, "read_into", counted):
        yield count
    count.keys = _by_tensorstore() - before + len(past)


def _by_tensorstore() -> int:
    found = ts.experimental_collect_matching_metrics("/tensorstore/kvstore/ocdbt/read")
    return sum(int(metric["values"][0]["value"]) for metric in found)  # none before the first read
