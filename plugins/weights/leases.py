"""Leases: notes of followers in a run's folder that keep the versions that they read.

A follower renews its note. A publisher ignores one that it has not seen change for some time, by
its own clock, and removes it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from unickpt import UnickptError
from unickpt.extend import Location, reading, storage_context

FOLDER = ".followers"
_log = logging.getLogger("unickpt")


class FollowerLease:
    """The note of a follower.

    Arguments:
        root: of the run.
        expires_s: publishers ignore a note that was not renewed for so long.
        rank: of the follower, for people.
    """

    def __init__(self, root: Location, expires_s: float, rank: int | None) -> None:
        self._folder, self._expires_s = root.child(FOLDER), expires_s
        self._key = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._facts = {"rank": rank, "host": socket.gethostname(), "process": os.getpid()}
        self._versions: list[int] = []
        self._renewals = 0
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._thread: threading.Thread | None = None

    def hold(self, versions: Iterable[int | None]) -> None:
        """Keeps these versions from now on, and no others.

        If the note cannot be written, as in a folder that the engine may only read, this logs a
        warning: a version that is removed while it is read is an error then, never a mixture.
        """
        with self._lock:
            self._versions = sorted({v for v in versions if v is not None})
            self._try_to_write()
        if self._thread is None:
            self._thread = threading.Thread(target=self._renew, name="unickpt lease", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Removes the note."""
        self._closed.set()
        if self._thread is None:
            return
        self._thread.join()
        with self._lock:
            try:
                with reading(self._folder):
                    self._folder.store(storage_context()).write(self._key, None).result()
            except UnickptError as error:  # it expires
                _log.warning("%s: a lease cannot be removed: %s", self._folder, error)

    def _renew(self) -> None:
        while not self._closed.wait(self._expires_s / 4):
            with self._lock:
                self._try_to_write()

    def _try_to_write(self) -> None:
        try:
            self._write()
        except UnickptError as error:  # the next renewal may succeed
            _log.warning("%s: a lease cannot be written now: %s", self._folder, error)

    def _write(self) -> None:
        self._renewals += 1
        note = {"versions": self._versions, "expires_s": self._expires_s}
        note |= {"renewals": self._renewals, **self._facts}
        with reading(self._folder):
            store = self._folder.store(storage_context())
            store.write(self._key, json.dumps(note).encode()).result()


class Leases:
    """The notes of all followers, as a publisher sees them.

    Arguments:
        root: of the run.
        clock: seconds; for tests.
    """

    def __init__(self, root: Location, clock: Callable[[], float] = time.monotonic) -> None:
        self._folder, self._clock = root.child(FOLDER), clock
        self._seen: dict[str, tuple[bytes, float]] = {}

    def leased_among(self, versions: Sequence[int]) -> Collection[int]:
        """Those of some versions that followers read; all if that cannot be found out."""
        try:
            leased = self._leased()
        except UnickptError as error:
            _log.warning("%s: all versions are kept: %s", self._folder, error)
            return versions
        return [version for version in versions if version in leased]

    def _leased(self) -> set[int]:
        leased, seen, now = set[int](), dict[str, tuple[bytes, float]](), self._clock()
        with reading(self._folder):
            store = self._folder.store(storage_context())
            keys = [key.decode() for key in store.list().result() if key.endswith(b".json")]
            for key in keys:
                content = bytes(store.read(key).result().value)
                last, since = self._seen.get(key, (b"", now))
                since = since if last == content else now
                note = _parsed(content)
                if note is None or now - since > note["expires_s"]:
                    store.write(key, None).result()
                    continue
                seen[key] = content, since
                leased |= set(note["versions"])
        self._seen = seen
        return leased


def _parsed(content: bytes) -> dict[str, Any] | None:
    """A note; None if it is none."""
    try:
        note = json.loads(content)
        versions, expires_s = note["versions"], note["expires_s"]
    except (ValueError, KeyError, TypeError):
        return None
    is_note = isinstance(versions, list) and all(type(v) is int for v in versions)
    return note if is_note and isinstance(expires_s, int | float) else None
