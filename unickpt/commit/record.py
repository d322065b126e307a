"""The record: what one process wrote, as the small object that ends its part of a save."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from unickpt.arrays.box import Box
from unickpt.format.index import BaseEntry
from unickpt.reuse.experts import Steps

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

    def with_statistics(self, more: Mapping[str, float]) -> Record:
        """The same with more statistics."""
        return replace(self, statistics={**self.statistics, **more})

    def encode(self) -> bytes:
        """A line of JSON, chunks and replicas as they are in memory, and the xxh3-64 of it."""
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
        }
        line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        tables = (self.chunks, self.borrowed, self.patched, self.replicas)
        body = b"".join([line, *(table.tobytes() for table in tables)])
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
            end = head["chunks"] * CHUNK_DTYPE.itemsize
            base = None if head["base"] is None else BaseEntry(*head["base"])
            patched = end + (0 if base is None else head["chunks"])
            rest = patched + head["patched"]
            return cls(
                head["description"],
                np.frombuffer(payload[:end], CHUNK_DTYPE),
                {n: tuple(Box(tuple(a), tuple(b)) for a, b in bs) for n, bs in head["boxes"]},
                {name: (size, digest) for name, (size, digest) in head["blobs"].items()},
                head["statistics"],
                head["replaces"],
                np.frombuffer(payload[rest:], REPLICA_DTYPE),
                head["checked"],
                head["linked"],
                base,
                np.frombuffer(payload[end:patched], np.bool_),
                {number: (absolute, relative) for number, absolute, relative in head["errors"]},
                {key: {int(n): int(s) for n, s in steps} for key, steps in head["experts"].items()},
                np.frombuffer(payload[patched:rest], np.bool_),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the record is malformed: {error!r}") from None


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
