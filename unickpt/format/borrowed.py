"""Chunks that a checkpoint borrows from siblings: which ones, from which bases, and its borrowers.

Storage without hard links, such as object storage, cannot give a file to two checkpoints. There a
checkpoint names its *bases*, and readers find the borrowed chunks in them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorstore as ts
import xxhash

from unickpt.format.chunk_grid import WHOLE_LINK
from unickpt.format.index import BaseEntry, Index
from unickpt.storage.database import Database, digest_of
from unickpt.storage.errors import Damaged
from unickpt.storage.local_folders import LOCK_SUFFIX
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST, RETIRED

DTYPE = np.dtype([("row", "<u8"), ("base", "<u4"), ("link", "<u4")])
"""A borrowed value: the chunk's row in the digest table, the position of its base in the index, and
which value of the chunk it is, as `chunk_grid` numbers them."""
BorrowedTable = np.ndarray[Any, Any]
MARKS = "borrowers"
"""In the folder of an attempt: a file for each checkpoint that may borrow from it."""
_DIGEST = re.compile("[0-9a-f]{16}")

MOST_BASES = 16
"""Opening so many takes a reader about as long as a large index."""
LEAST_USED = 0.5
"""The share of a checkpoint's bytes that the next one must use to keep it alive as a base."""


def decode(data: bytes, index: Index) -> BorrowedTable:
    """Decodes the table of borrowed chunks.

    Arguments:
        data: the stored table, as long as the index says; untrusted.
        index: the index.

    Raises:
        ValueError: says what is wrong.
    """
    if f"{xxhash.xxh3_64_intdigest(data):016x}" != index.borrowed_xxh3:
        raise ValueError("the table of borrowed chunks does not match its digest in the index")
    table: BorrowedTable = np.frombuffer(data, DTYPE)
    rows, links = table["row"], table["link"]
    is_later = (rows[1:] == rows[:-1]) & (links[1:] > links[:-1]) & (links[:-1] != WHOLE_LINK)
    in_order = bool(((rows[1:] > rows[:-1]) | is_later).all())
    if not in_order or (len(rows) and rows[-1] >= index.chunks):
        raise ValueError(
            "the table of borrowed chunks names chunks that do not exist, or one twice"
        )
    if len(rows) and table["base"].max() >= len(index.bases):
        raise ValueError("the table of borrowed chunks names a base that the index does not")
    return table


def name_of(location: Location) -> str:
    """The name of a checkpoint's folder."""
    return location.path.rstrip("/").rpartition("/")[2]


def sibling(location: Location, name: str) -> Location:
    """The location of a sibling of a checkpoint.

    Raises:
        Damaged: it can have no siblings.
    """
    parent = location.parent
    if parent is None:
        raise Damaged(f"nothing can be next to {location}")
    return parent.child(name)


def pinned(location: Location, base: BaseEntry, context: ts.Context) -> Database:
    """The database of a base, in the version from which chunks were borrowed.

    Arguments:
        location: of the checkpoint that borrows.
        base: the base.
        context: for the database.

    Raises:
        Damaged: it is missing, or was replaced by another checkpoint; says what to do.
        Failed: the storage failed.
    """
    base_location = sibling(location, base.name)
    database = Database(base_location, context).pinned()
    if database is not None and database.manifest_digest() == base.manifest:
        return database
    manifest = retired_manifest(base_location, base.manifest, context)
    if manifest is not None and digest_of(manifest) == base.manifest:
        return Database(base_location, context, manifest)
    what = "is missing" if database is None else "was replaced by another checkpoint"
    raise Damaged(
        f"chunks that did not change are in {base_location}, which {what}; put it back, or open a "
        "checkpoint that has all of its chunks (`unickpt copy` makes one)"
    )


# --- checkpoints that are only borrowed from ---


def retire(location: Location, context: ts.Context) -> str | None:
    """Retires a checkpoint: only its borrowers still see it, and its files stay. If the process is
    killed meanwhile, the checkpoint is unchanged.

    Returns:
        The digest of its manifest; None if there is none.

    Raises:
        Failed: the storage failed.
    """
    store = location.store(context)
    read = store.read(MANIFEST).result()
    if read.state != "value":
        return None
    digest = digest_of(read.value)
    store.write(_retired_at(digest), read.value).result()
    location.sync(location)
    store.write(MANIFEST, None).result()
    location.sync(location)
    return digest


def retired_manifest(location: Location, digest: str, context: ts.Context) -> bytes | None:
    """The manifest of a checkpoint that was retired; None if there is none.

    Raises:
        Failed: the storage failed.
    """
    if not _DIGEST.fullmatch(digest):  # which may be what a stranger wrote
        return None
    read = location.store(context).read(_retired_at(digest)).result()
    return read.value if read.state == "value" else None


def _retired_at(digest: str) -> str:
    return f"{RETIRED}/{digest}/manifest"


# --- borrowers ------------------------------------------------------------------------------------


def mark(base: Location, attempt: str, borrower: str, context: ts.Context) -> None:
    """Notes in a base that a checkpoint is about to borrow from it.

    Arguments:
        base: its location.
        attempt: the attempt that made it.
        borrower: the name of the other checkpoint's folder, next to it.
        context: for the storage.

    Raises:
        Failed: the storage failed.
    """
    _marks(base, attempt).store(context).write(borrower, b"").result()


def marked(base: Location, attempt: str, context: ts.Context) -> list[str]:
    """The names of the checkpoints that may borrow from one; they may no longer exist."""
    if not attempt:
        return []
    # A process that is killed while it marks leaves TensorStore's lock file, which is no borrower.
    names = _marks(base, attempt).files(context)
    return [name for name in names if not name.endswith(LOCK_SUFFIX)]


def _marks(base: Location, attempt: str) -> Location:
    return base.child(f"processes/{attempt}/{MARKS}")


def names(table: BorrowedTable, spans: Mapping[str, slice], base: int) -> list[str]:
    """The names of the arrays with values in a base.

    Arguments:
        table: of borrowed values.
        spans: the rows of each array, by name.
        base: the number of the base.
    """
    rows = table["row"][table["base"] == base]
    return [
        name
        for name, span in spans.items()
        if np.diff(np.searchsorted(rows, (span.start, span.stop)))[0]
    ]
