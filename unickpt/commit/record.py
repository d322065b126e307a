"""The record: what one process wrote, as the small object that ends its part of a save."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from unickpt.arrays.box import Box
from unickpt.commit.places import Places
from unickpt.format.index import BaseEntry
from unickpt.reuse.experts import Steps
from unickpt.storage.btree.builder import PLACE_DTYPE

# `array` is the number of the array in the process's own description, `chunk` that of the chunk in
# the array's parts, in order (for arrays with boxes instead of a layout: in this process's boxes).
CHUNK_DTYPE = np.dtype([("array", "<u4"), ("chunk", "<u8"), ("digest", "<u8")])
# A fingerprint of an array that is assumed to be equal on all processes that have it.
REPLICA_DTYPE = np.dtype([("array", "<u4"), ("fingerprint", "<u8")])
_SEAL_BYTES = 8


@dataclass(frozen=True)
class Record:
    """What a process wrote.

    Arguments:
        description: xxh3-64 of the process's encoded description.
        chunks: one element of `CHUNK_DTYPE` per chunk.
        boxes: for arrays that no layout describes, this process's boxes by array number.
        blobs: per-process values by name: size in bytes and xxh3-64.
        statistics: bytes and seconds, for the report.
        replaces: xxh3-64 of the root manifest that the process found, empty if it found none.
        replicas: one element of `REPLICA_DTYPE` for each array whose replication is assumed.
        checked: whether `replicas` cover every byte; else only a sample.
        linked: how many of the chunks are in linked files of an earlier checkpoint (`reuse.base`).
        base: the checkpoint beside this one from which chunks are borrowed, if any are.
        borrowed: with a base, for each of `chunks` whether it is borrowed.
        errors: of the arrays that are quantised, by array number: the largest absolute and relative
            error (`format.index.ArrayEntry`).
        experts: of which step its experts are, by key, if some may be left out of a save.
        patched: for each of `chunks` whether it is stored as a patch; empty if none is.
        places: where each of `chunks` is (of a patched one, the full chunk), then each patch, then
            each of `blobs`.
    """

    description: int
    chunks: np.ndarray[Any, Any]
    boxes: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)
    blobs: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    statistics: Mapping[str, float] = field(default_factory=dict)
    replaces: str = ""
    replicas: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, REPLICA_DTYPE))
    checked: bool = False
    linked: int = 0
    base: BaseEntry | None = None
    borrowed: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.bool_))
    errors: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    experts: Steps = field(default_factory=dict)
    patched: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, np.bool_))
    places: Places = field(default_factory=Places)

    def with_statistics(self, more: Mapping[str, float]) -> Record:
        """The same with more statistics."""
        return replace(self, statistics={**self.statistics, **more})

    def encode(self) -> bytes:
        """A line of JSON, the tables as they are in memory, and the xxh3-64 of it all."""
        head = {
            "description": self.description,
            "boxes": [
                [number, [[b.start, b.stop] for b in boxes]] for number, boxes in self.boxes.items()
            ],
            "blobs": self.blobs,
            "statistics": self.statistics,
            "replaces": self.replaces,
            "chunks": len(self.chunks),
            "checked": self.checked,
            "linked": self.linked,
            "experts": {key: list(steps.items()) for key, steps in self.experts.items()},
            "base": None if self.base is None else [self.base.name, self.base.manifest],
            "errors": [[number, *found] for number, found in self.errors.items()],
            "patched": len(self.patched),
            "files": self.places.files,
            "places": len(self.places.rows),
            "inline": len(self.places.inline),
        }
        line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        tables = (self.chunks, self.borrowed, self.patched, self.places.rows, self.replicas)
        body = b"".join([line, self.places.inline, *(table.tobytes() for table in tables)])
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Decodes a record; raises ValueError if the bytes are not one."""
        body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != seal:
            raise ValueError("the record does not match its checksum")
        head_bytes, _, payload = body.partition(b"\n")
        try:
            head = json.loads(head_bytes)
            base = None if head["base"] is None else BaseEntry(*head["base"])
            rest = _Payload(payload)
            inline = bytes(rest.take(head["inline"], np.dtype(np.uint8)))
            chunks = rest.take(head["chunks"], CHUNK_DTYPE)
            borrowed = rest.take(0 if base is None else len(chunks), np.dtype(np.bool_))
            patched = rest.take(head["patched"], np.dtype(np.bool_))
            rows = rest.take(head["places"], PLACE_DTYPE)
            places = Places(tuple(head["files"]), rows, inline)
            places.check(np.flatnonzero(borrowed))
            if len(patched) not in (0, len(chunks)) or len(rows) != len(chunks) + int(
                patched.sum()
            ) + len(head["blobs"]):
                raise ValueError("it does not say where each value is")
            return cls(
                head["description"],
                chunks,
                {n: tuple(Box(tuple(a), tuple(b)) for a, b in bs) for n, bs in head["boxes"]},
                {name: (size, digest) for name, (size, digest) in head["blobs"].items()},
                head["statistics"],
                head["replaces"],
                rest.rest(REPLICA_DTYPE),
                head["checked"],
                head["linked"],
                base,
                borrowed,
                {number: (absolute, relative) for number, absolute, relative in head["errors"]},
                {key: {int(n): int(s) for n, s in steps} for key, steps in head["experts"].items()},
                patched,
                places,
            )
        except (
            KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise ValueError(f"the record is malformed: {error!r}") from None


class _Payload:
    """Tables, one after the other.

    Arguments:
        data: their bytes.
    """

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The next table; raises ValueError if the bytes end before."""
        found = np.frombuffer(self._data, dtype, count, self._at) if count else np.zeros(0, dtype)
        self._at += found.nbytes
        return found

    def rest(self, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """The last table."""
        return np.frombuffer(self._data, dtype, offset=self._at)


Records = Sequence[tuple[int, Record]]
"""Processes, and their records."""
Names = Sequence[Sequence[str]]
"""For each process the arrays that it has."""


def statistics_of(records: Records, more: Records) -> tuple[Mapping[str, float], ...]:
    """The statistics of each process, with what it wrote later counted."""
    found = [dict(record.statistics) for _, record in records]
    for process, record in more:
        for name, value in record.statistics.items():
            found[process][name] = found[process].get(name, 0) + value
    return tuple(found)
