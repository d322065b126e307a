"""Reads an index back before the commit: an index that a reader refuses is not committed."""

from __future__ import annotations

import threading

import xxhash

from unickpt.errors import CheckpointCorrupt, UnsupportedLeaf
from unickpt.format import index_json
from unickpt.format.index import tree_of
from unickpt.trees import tree_json

_MOST_CHECKED = 64
_lock = threading.Lock()


class CheckedStructures(dict[bytes, None]):
    """The digests of the structures that were last read back.

    A structure is the common part of saves of one tree. For 5,000 arrays, reading it back takes as
    long as encoding it, and the tree five times as long.
    """

    def add(self, digest: bytes) -> None:
        """Adds a structure; drops the least recently used one."""
        with _lock:
            self.pop(digest, None)
            self[digest] = None
            if len(self) > _MOST_CHECKED:
                del self[next(iter(self))]


_checked = CheckedStructures()


def check_readable(data: bytes, where: str, checked: CheckedStructures = _checked) -> None:
    """Checks that the reader's own code takes an index.

    Arguments:
        data: the index, encoded.
        where: the checkpoint's path, for messages.
        checked: structures that need not be read again; values and metadata are read in any case.

    Raises:
        UnsupportedLeaf: names the leaf that the reader refuses.
    """
    try:
        parts = index_json.IndexParts.split(data)
        structure = _digest(parts.tree, parts.arrays)
        if structure in checked:
            parts.check_others()
            checked.add(structure)
            return
        index = index_json.decode(data, where)
        # Arrays with patches are described differently in each save, and have the same names.
        tree = _digest(parts.tree, tree_json.ENCODER.encode(list(index.names)))
        if tree not in checked:
            tree_of(index)
    except (CheckpointCorrupt, ValueError) as error:
        reason = str(error).removeprefix(f"{where}: ")
        raise UnsupportedLeaf(
            f"{where}: this checkpoint could not be read again, so it is not committed: {reason}"
        ) from error
    checked.add(tree)
    checked.add(structure)


def _digest(*parts: bytes) -> bytes:
    return b"".join(map(xxhash.xxh3_128_digest, parts))
