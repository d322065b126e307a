"""The lease on a folder of checkpoints: at most one job at a time saves into it.

A local folder is locked by the operating system, whose lock ends with its holder. Elsewhere the
job writes an object and keeps renewing it; another job takes that over only after it has stood
still for a while (Gray and Cheriton, "Leases", SOSP 1989), and a job whose object was taken over
does not commit any more.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import tensorstore as ts

from unickpt import backends, chunks
from unickpt.backends import Location, file
from unickpt.errors import SaveConflict

NAME = ".unickpt.lock"
_RENEW_S = 10.0
_EXPIRES_S = 40.0
# A write that a job began before it lost its lease may be tried again and again for so long.
_SETTLES_S = 900.0


class Lease:
    """The right to save into a folder, once `take` has returned.

    Arguments:
        location: the folder.
    """

    def __init__(self, location: Location) -> None:
        self._location = location
        self._holder = {
            "host": socket.gethostname(),
            "process": os.getpid(),
            "session": secrets.token_hex(8),
        }
        self._release: Callable[[], None] | None = None
        self._settled_at = 0.0

    def take(self) -> None:
        """Takes the lease, if this job does not have it yet.

        Raises:
            SaveConflict: another job has it.
            StorageError: the storage failed.
        """
        try:
            if isinstance(self._release, file.Hold) and not self._release.is_valid():
                self.give_back()  # the folder was removed, and made anew by whom?
            if self._release is not None:
                return
            if self._location.is_local:
                self._release = self._lock()
            else:
                claim = _Claim(self._location, self._holder)
                if claim.take():
                    self._settled_at = time.monotonic() + _SETTLES_S
                self._release = claim
        except chunks.FAILURES as error:
            raise chunks.translate(error, str(self._location), reading=False) from error

    @property
    def is_settled(self) -> bool:
        """Whether nothing can come any more of what a holder before this one had begun."""
        return time.monotonic() >= self._settled_at

    def check(self) -> None:
        """Makes sure, before a commit, that nobody took the lease over.

        Raises:
            SaveConflict: another job did, because this one stood still for too long.
            StorageError: the storage failed.
        """
        try:
            if isinstance(self._release, _Claim):
                self._release.check()
        except chunks.FAILURES as error:
            raise chunks.translate(error, str(self._location), reading=False) from error

    def give_back(self) -> None:
        """Lets another job take it."""
        if self._release is not None:
            with suppress(Exception):  # who comes next waits for its end
                self._release()
            self._release = None

    def _lock(self) -> file.Hold:
        try:
            return file.Hold(self._location.spec["path"], NAME, json.dumps(self._holder))
        except BlockingIOError as error:
            raise _conflict(self._location, str(error)) from None


class _Claim:
    """An object that is renewed for as long as its job lives; calling it gives it back."""

    def __init__(self, location: Location, holder: dict[str, object]) -> None:
        self._location, self._holder = location, holder
        self._store = location.store(backends.context())
        self._generation: bytes | None = None
        self._ended, self._writing = threading.Event(), threading.Lock()

    def take(self) -> bool:
        """Takes the lease; whether that was from a holder who had not given it back.

        Raises:
            SaveConflict: somebody renews it.
        """
        before = self._store.read(NAME).result()
        was_held = before.state == "value"
        deadline = time.monotonic() + _EXPIRES_S
        while before.state == "value" and time.monotonic() < deadline:
            time.sleep(_RENEW_S / 4)
            now = self._store.read(NAME).result()
            if now.stamp.generation != before.stamp.generation and now.state == "value":
                raise _conflict(self._location, now.value.decode(errors="replace"))
            before = now
        if not self._write(before.stamp.generation):
            found = self._store.read(NAME).result().value
            raise _conflict(self._location, found.decode(errors="replace"))
        threading.Thread(target=self._renew, name="unickpt lease", daemon=True).start()
        return was_held

    def check(self) -> None:
        found = self._store.read(NAME).result()
        if not self._is_ours(found):
            raise _conflict(self._location, found.value.decode(errors="replace"))

    def __call__(self) -> None:
        self._ended.set()
        with self._writing:
            self._store.write(NAME, None, if_equal=self._generation).result()

    def _write(self, expected: bytes) -> bool:
        text = json.dumps({**self._holder, "renewed": time.time()})
        stamp = self._store.write(NAME, text.encode(), if_equal=expected).result()
        if stamp.generation:
            self._generation = stamp.generation
            return True
        # Refused; or that is the answer to a second request, and the one to the first got lost.
        found = self._store.read(NAME).result()
        if self._is_ours(found):
            self._generation = found.stamp.generation
            return True
        return False

    def _is_ours(self, found: ts.KvStore.ReadResult) -> bool:
        try:
            return bool(json.loads(found.value)["session"] == self._holder["session"])
        except (ValueError, KeyError, TypeError):
            return False

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            with self._writing, suppress(Exception):  # a failure shows in `check`, if it lasts
                assert self._generation is not None
                if not self._ended.is_set() and not self._write(self._generation):
                    return


def _conflict(location: Location, holder: str) -> SaveConflict:
    try:
        said = json.loads(holder)
        who = f"process {said['process']} on {said['host']}"
    except (ValueError, KeyError, TypeError):
        who = "another process"
    return SaveConflict(
        f"{location}: another job saves here at this moment ({who}); two jobs in one folder would "
        "mix their steps. End that one, or give this job a folder of its own"
    )
