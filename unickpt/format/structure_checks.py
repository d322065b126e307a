"""Checks of `verify` besides chunks: the tree, keys, metadata and values of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from unickpt.errors import CheckpointCorrupt
from unickpt.format import chunk_encoding
from unickpt.format.index import BORROWED_KEY, DIGESTS_KEY, INDEX_KEY, extra_key
from unickpt.format.reader_protocol import ParallelMap, Reader
from unickpt.format.verified_chunks import ChunkStore
from unickpt.storage.errors import reading
from unickpt.threads import in_batches
from unickpt.trees import tree, tree_json

# Zarr metadata of one array has a few hundred bytes; many hostile keys may share one large value.
_MOST_METADATA = 1 << 20
_KEYS_AT_ONCE = 256


class KeyChecks:
    """Compares the keys of a database with its index.

    Arguments:
        reader: of the checkpoint.
        chunks: its database.
    """

    def __init__(self, reader: Reader, chunks: ChunkStore) -> None:
        self._reader, self._chunks = reader, chunks

    def check(self, borrowed: int, run: ParallelMap) -> Iterator[tuple[str, str]]:
        """As `Reader.check_structure`, of a checkpoint whose digest table was read.

        Arguments:
            borrowed: how many values of chunks are in other checkpoints.
            run: does work on several threads.
        """
        index = self._reader.index
        try:
            names = {leaf.name for leaf in tree.leaves(tree_json.from_json(index.tree))}
        except tree_json.BadTree as error:
            yield "", f"the tree in the index is invalid: {error}"
            return
        for name in sorted(names ^ index.names.keys()):
            yield name, "is in the tree or in the index, but not in both"
        expected = chunk_encoding.zarr_keys(index)
        for different in run(self._different, list(in_batches(expected.items(), _KEYS_AT_ONCE))):
            for key in different:
                yield "", f"{key!r} differs from its description in the index"
        for name in index.per_process:
            try:
                for stored in self._reader.per_process(name):
                    stored.check()
            except CheckpointCorrupt as error:
                yield name, str(error)
        blobs = sum(len(entry.blobs) for entry in index.per_process.values())
        keys = [INDEX_KEY, DIGESTS_KEY, *((BORROWED_KEY,) if index.bases else ())]
        extra = map(extra_key, index.extra)
        keys += [key for key in extra if self._chunks.key_length(key) is not None]
        try:
            self._reader.timing()
        except CheckpointCorrupt as error:
            yield "", str(error)
        own_values = index.chunks - borrowed
        own_values += sum(entry.additions for entry in index.arrays.values())
        implied = len(expected) + own_values + blobs + len(keys)
        with reading("its manifest", self._chunks.explained):
            key_count = self._chunks.database.facts().keys  # in its manifest
        if key_count != implied:
            # Counted, not listed: a few hostile nodes that share children can give any number of
            # keys.
            yield "", f"the database has {key_count} keys, but the index implies {implied}"

    def _different(self, expected: Sequence[tuple[str, bytes]]) -> list[str]:
        """The keys whose stored value differs from the expected one."""
        small = [key for key, _ in expected if self._is_small(key)]
        stored = dict(zip(small, self._values(small), strict=True))
        return [key for key, value in expected if not _is_json(stored.get(key), value)]

    def _is_small(self, key: str) -> bool:
        """Whether a key's value is no larger than Zarr metadata is."""
        try:
            return (self._chunks.key_length(key) or 0) <= _MOST_METADATA
        except CheckpointCorrupt:
            return False

    def _values(self, keys: Sequence[str]) -> Iterator[bytes | None]:
        """The values of some keys; None where one is missing or damaged."""
        requested = self._chunks.values.request_all(keys)
        for key in keys:
            try:
                if key in requested:
                    with self._chunks.naming_key(key):
                        yield bytes(requested[key].result().value)
                else:
                    yield self._chunks.read_key(key)
            except CheckpointCorrupt:
                yield None


def _is_json(stored: bytes | None, expected: bytes) -> bool:
    """Whether bytes are these, or JSON of the same."""
    if stored is None or stored == expected:
        return stored is not None
    try:
        return bool(json.loads(stored) == json.loads(expected))
    except (ValueError, RecursionError):  # not valid JSON
        return False
