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
from unickpt.reuse.experts import ExpertSteps
from unickpt.storage.btree.builder import INLINE, PLACE_DTYPE, PLACE_FIELDS

# `array` is the number of the array in the process's own description, `chunk` that of the chunk in
# the array's parts, in order (for arrays with boxes instead of a layout: in this process's boxes).
CHUNK_DTYPE = np.dtype([("array", "<u4"), ("chunk", "<u8"), ("digest", "<u8"), *PLACE_FIELDS])
# Where the patch of a chunk is; `row` is the position of the chunk among those of the record.
PATCH_DTYPE = np.dtype([("row", "<u8"), *PLACE_FIELDS])
ELSEWHERE = -2
"""Instead of a file: the chunk is in a checkpoint beside this one."""
# A fingerprint of an array that is assumed to be equal on all processes that have it.
REPLICA_DTYPE = np.dtype([("array", "<u4"), ("fingerprint", "<u8")])
_SEAL_BYTES = 8
Place = tuple[int, int, int]
"""Where a value is: the number of its file, offset and length; see `PLACE_DTYPE`."""


@dataclass(frozen=True)
class Record:
    """What a process wrote.

    Arguments:
        description: xxh3-64 of the process's encoded description.
        chunks: one element of `CHUNK_DTYPE` per chunk: also where it is; of a patched one, where
            the full chunk is.
        files: the paths of the files with values, below the process's folder.
        inline: the values that are so small that they are in no file, joined.
        boxes: for arrays that no layout describes, this process's boxes by array number.
        blobs: per-process values by name: size in bytes and xxh3-64, and where each is.
        described: where the description is; None if the coordinator need not read it.
        statistics: bytes and seconds, for the report.
        replaces: xxh3-64 of the root manifest that the process found, empty if it found none.
        replicas: one element of `REPLICA_DTYPE` for each array whose replication is assumed.
        checked: whether `replicas` cover every byte; else only a sample.
        base: the checkpoint beside this one from which chunks are borrowed, if any are.
        patches: one element of `PATCH_DTYPE` for each chunk that is stored as a patch, ascending.
        errors: of the arrays that are quantised, by array number: the largest absolute and relative
            error (`format.index.ArrayEntry`).
        experts: of which step its experts are, by key, if some may be left out of a save.
    """

    description: int
    chunks: np.ndarray[Any, Any]
    files: tuple[str, ...] = ()
    inline: bytes = b""
    boxes: Mapping[int, tuple[Box, ...]] = field(default_factory=dict)
    blobs: Mapping[str, tuple[int, int, Place]] = field(default_factory=dict)
    described: Place | None = None
    statistics: Mapping[str, float] = field(default_factory=dict)
    replaces: str = ""
    replicas: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, REPLICA_DTYPE))
    checked: bool = False
    base: BaseEntry | None = None
    patches: np.ndarray[Any, Any] = field(default_factory=lambda: np.zeros(0, PATCH_DTYPE))
    errors: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    experts: ExpertSteps = field(default_factory=dict)

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
            "described": self.described,
            "statistics": self.statistics,
            "replaces": self.replaces,
            "checked": self.checked,
            "experts": {key: list(steps.items()) for key, steps in self.experts.items()},
            "base": None if self.base is None else [self.base.name, self.base.manifest],
            "errors": [[number, *found] for number, found in self.errors.items()],
            "files": self.files,
            "inline": len(self.inline),
            "chunks": len(self.chunks),
            "patches": len(self.patches),
        }
        line = json.dumps(head, separators=(",", ":")).encode() + b"\n"
        tables = (self.chunks, self.patches, self.replicas)
        body = b"".join([line, self.inline, *(table.tobytes() for table in tables)])
        return body + xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little")

    @classmethod
    def decode(cls, data: bytes) -> Record:
        """Decodes a record; raises ValueError if the bytes are not one."""
        body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
        if xxhash.xxh3_64_intdigest(body).to_bytes(_SEAL_BYTES, "little") != seal:
            raise ValueError("the record does not match its checksum")
        head_bytes, _, payload = body.partition(b"\n")
        try:
            head, rest = json.loads(head_bytes), _Payload(payload)
            found = cls(
                description=head["description"],
                files=tuple(head["files"]),
                inline=bytes(rest.take(head["inline"], np.dtype(np.uint8))),
                chunks=rest.take(head["chunks"], CHUNK_DTYPE),
                patches=rest.take(head["patches"], PATCH_DTYPE),
                replicas=rest.rest(REPLICA_DTYPE),
                boxes={
                    number: tuple(Box(tuple(start), tuple(stop)) for start, stop in boxes)
                    for number, boxes in head["boxes"]
                },
                blobs={
                    name: (size, digest, (file, offset, length))
                    for name, (size, digest, (file, offset, length)) in head["blobs"].items()
                },
                described=None if head["described"] is None else tuple(head["described"]),
                statistics=head["statistics"],
                replaces=head["replaces"],
                checked=head["checked"],
                base=None if head["base"] is None else BaseEntry(*head["base"]),
                errors={number: (worst, relative) for number, worst, relative in head["errors"]},
                experts={
                    key: {int(n): int(s) for n, s in steps}
                    for key, steps in head["experts"].items()
                },
            )
            found._check()
            return found
        except (
            KeyError, TypeError, AttributeError, ValueError, OverflowError, RecursionError
        ) as error:  # fmt: skip
            raise ValueError(f"the record is malformed: {error!r}") from None

    def _check(self) -> None:
        """Checks that it refers only to what is there, below the process's folder.

        Raises:
            ValueError: it does not.
        """
        more = [place for _, _, place in self.blobs.values()]
        others = np.array([*more, *([self.described] if self.described else [])], PLACE_DTYPE)
        for table, least in (self.chunks, ELSEWHERE), (self.patches, INLINE), (others, INLINE):
            file = table["file"]
            if len(file) and (int(file.min()) < least or int(file.max()) >= len(self.files)):
                raise ValueError("a value is in a file that is not listed")
            size = np.uint64(len(self.inline))
            offset, length = (table[each][file == INLINE] for each in ("offset", "length"))
            if (length > size).any() or (offset > size - np.minimum(length, size)).any():
                raise ValueError("a value ends after all of them")
        if self.base is None and (self.chunks["file"] == ELSEWHERE).any():
            raise ValueError("it does not say where each value is")
        rows = self.patches["row"]
        if len(rows) and (int(rows.max()) >= len(self.chunks) or (rows[1:] <= rows[:-1]).any()):
            raise ValueError("a patch is not of one of its chunks")
        for path in self.files:
            if path.startswith("/") or "\0" in path or ".." in path.split("/"):
                raise ValueError(f"{path[:200]!r} is not a file of the process")


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
