"""Restorers: they supply the bytes of files that are damaged or missing, such as from copies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import tensorstore as ts

from unickpt import doors
from unickpt.storage.btree.nodes import DataReference
from unickpt.storage.locations import Location


class Restorer(Protocol):
    """Supplies bytes of a checkpoint. The target of a door of the group `restorers` returns those
    for a location and a context, in the order in which they are tried."""

    def read(self, path: str, offset: int, length: int) -> bytes | None:
        """Some bytes of a file; None if it is sound, or unknown here.

        Arguments:
            path: of the file, below the checkpoint's folder.
            offset: of the first byte.
            length: the number of bytes.

        Raises:
            Damaged: the file is damaged or missing, and cannot be restored; says why.
        """

    def damage(self) -> Iterator[str]:
        """For users: the damaged files that were read, those that are beside the data, and whether
        they can be restored."""


def restorers_at(location: Location, context: ts.Context) -> Sequence[Restorer]:
    """The restorers for a checkpoint, in the order in which they are tried.

    Arguments:
        location: of the checkpoint.
        context: for the storage.

    Raises:
        Failed: the storage failed.
    """
    targets = [door.open() for door in doors.every() if door.group == "restorers"]
    return [restorer for target in targets for restorer in target(location, context)]


def restoring(restorer: Restorer, fetch: Callable[..., bytes]) -> Callable[..., bytes]:
    """A function that fetches the bytes of a reference, from a restorer where its file is damaged.

    Arguments:
        restorer: of the checkpoint.
        fetch: fetches the bytes of other files; see `ocdbt.fetch`.
    """

    def fetch_restored(reference: DataReference, may_be_sparse: bool = True) -> bytes:
        data = restorer.read(reference.path, reference.offset, reference.length)
        return fetch(reference, may_be_sparse) if data is None else data

    return fetch_restored
