"""Two tiers: checkpoints are committed to fast storage first, and copied from there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from unickpt import backends, chunks
from unickpt.backends.kvstore import Failed, Future, KvStore
from unickpt.backends.ocdbt import MANIFEST
from unickpt.errors import CheckpointNotFound, SaveConflict, UnickptError
from unickpt.lease import Lease
from unickpt.root import Root
from unickpt.stage import Window
from unickpt.steps import Steps

_log = logging.getLogger("unickpt")
_AT_ONCE = 4


class Tier(Steps):
    """A folder of steps, and the right to change it.

    Arguments:
        root: a local path or a URL.
    """

    def __init__(self, root: backends.Path) -> None:
        super().__init__(root)
        self.lease = Lease(self.location)
        self._is_clean = False

    def open(self, in_flight: Sequence[int], session: str) -> None:
        """Takes the lease, and once removes what crashed jobs left behind.

        Arguments:
            in_flight, session: see `Steps.remove_debris`.

        Raises:
            SaveConflict: another job has the lease.
            StorageError: the storage failed.
        """
        self.lease.take()
        if self._is_clean or not self.lease.is_settled:
            return
        try:
            self.remove_debris(in_flight, session)
            self._is_clean = True
        except (UnickptError, Failed) as error:
            _log.warning("%s: debris cannot be removed now: %s", self.location, error)

    def copy_from(self, source: Steps, step: int, budget_bytes: int, timeout_s: float) -> None:
        """Copies a step, file by file; it appears here at one stroke, and may replace another.

        Arguments:
            source: where it is committed.
            step: its number.
            budget_bytes: host memory to use, at least that of the largest file.
            timeout_s: how long to wait for another process that writes here.

        Raises:
            CheckpointNotFound: there is none to copy.
            StorageError: a storage failed.
            SaveConflict: another job saved here meanwhile, or has the lease.
        """
        origin, destination = source.at(step), self.at(step)
        context = backends.context()
        try:
            found = Root(destination, context).read()
            reader, writer = origin.store(context), destination.store(context)
            manifest = reader.read(MANIFEST).result()
            if manifest.state != "value":
                raise CheckpointNotFound(f"no checkpoint at {origin}")
            keys = sorted(key for key in _keys(reader) if key.startswith("processes/"))
            _copy(keys, reader, writer, budget_bytes)
            for folder in sorted({key.rpartition("/")[0] for key in keys}):
                destination.child(folder).sync(destination)
            self.lease.check()
            if not Root(destination, context).replace(found, manifest.value, timeout_s):
                raise SaveConflict(f"{destination}: another job committed here meanwhile")
        except Failed as error:
            where = f"copying {origin} to {destination}"
            raise chunks.translate(error, where, reading=False) from error
        _log.info("copied %s to %s", origin, destination)
        with suppress(Failed):  # what is left does no harm
            self.remove_older(step)


def _keys(store: KvStore) -> Iterator[str]:
    return (key.decode() for key in store.list().result())


def _copy(keys: list[str], reader: KvStore, writer: KvStore, budget_bytes: int) -> None:
    window = Window(budget_bytes, _AT_ONCE)
    for key in keys:
        data = reader.read(key).result().value
        window.make_room(len(data))
        written = writer.write(key, data)
        window.add(len(data), partial(_wait, written))
    window.drain()


def _wait(written: Future[Any]) -> None:
    written.result()
