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
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import tensorstore as ts

from unickpt import backends, chunks
from unickpt.backends import Location, file
from unickpt.backends.kvstore import Failed
from unickpt.errors import SaveConflict
from unickpt.workers import start

NAME = ".unickpt.lock"
_RENEW_S = 10.0
_EXPIRES_S = 40.0
# A write that a job began before it lost its lease may be tried again and again for so long.
_SETTLES_S = 900.0
# Names this process among all of the world; two containers may have the same host and number.
_PROGRAM = secrets.token_hex(8)


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
            "program": _PROGRAM,
            "session": secrets.token_hex(8),
        }
        self._held: _Lock | _Claim | None = None
        self._settled_at = 0.0

    def take(self) -> bool:
        """Takes the lease, if this job does not have it yet, or lost it.

        Returns:
            Whether it did not have it; another job may have saved here.

        Raises:
            SaveConflict: another job has it.
            StorageError: the storage failed.
        """
        with self._translated():
            if self._held is not None and not self._held.is_valid():
                self.give_back()
            if self._held is not None:
                return False
            kind = _Lock if self._location.is_local else _Claim
            held = kind(self._location, self._holder)
            if held.take():
                self._settled_at = time.monotonic() + _SETTLES_S
            self._held = held
            return True

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
        with self._translated():
            if self._held is not None:
                self._held.check()

    def give_back(self) -> None:
        """Lets another job take it."""
        if self._held is not None:
            with suppress(Exception):  # who comes next waits for its end
                self._held.release()
            self._held = None

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Failed as error:
            raise chunks.translate(error, str(self._location), reading=False) from error

    @staticmethod
    def was_taken(location: Location) -> bool:
        """Whether some job has, or had, the lease on a folder."""
        if location.is_local:
            return os.path.isfile(os.path.join(location.spec["path"], NAME))
        read = location.store(backends.context()).read(NAME).result()
        return bool(read.state == "value")


def holder(location: Location) -> str | None:
    """Who has the lease on a folder, in words; None where nobody has it, as far as one can see.

    A job on another machine that locks a local folder is not always seen.
    """
    if location.is_local:
        said = file.Hold.said(location.spec["path"], NAME)
        return None if said is None else _who(said)
    read = location.store(backends.context()).read(NAME).result()
    if read.state != "value":
        return None
    try:
        renewed = float(json.loads(read.value)["renewed"])
    except (ValueError, KeyError, TypeError):
        return _who("")
    return _who(read.value) if time.time() - renewed < _EXPIRES_S else None


def _who(said: str | bytes) -> str:
    try:
        facts = json.loads(said)
        return f"process {facts['process']} on {facts['host']}"
    except (ValueError, KeyError, TypeError):
        return "another process"


class _Lock:
    """A lock of the operating system, on a file in a local folder."""

    def __init__(self, location: Location, holder: dict[str, object]) -> None:
        self._location, self._holder = location, holder

    def take(self) -> bool:
        """Takes the lease. What its last holder had begun ended with that process: False.

        Raises:
            SaveConflict: another process has it.
        """
        try:
            self._hold = file.Hold(self._location.spec["path"], NAME, json.dumps(self._holder))
        except BlockingIOError as error:
            raise _conflict(self._location, str(error)) from None
        return False

    def is_valid(self) -> bool:
        """Whether this is still the lock; else the folder was removed, and made anew by whom?"""
        return self._hold.is_valid()

    def check(self) -> None:
        """Nothing: nobody can take it over, and the commit finds out that a folder is gone."""

    def release(self) -> None:
        self._hold.release()


class _Claim:
    """An object that is renewed for as long as its job lives."""

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
        # Without a thread, at the end of a program, nobody renews it; `check` still tells.
        start(self._renew, "unickpt lease", daemon=True)
        return was_held

    def is_valid(self) -> bool:
        """Whether nobody took it over."""
        return self._is_ours(self._store.read(NAME).result())

    def check(self) -> None:
        """Raises SaveConflict where somebody took it over."""
        found = self._store.read(NAME).result()
        if not self._is_ours(found):
            raise _conflict(self._location, found.value.decode(errors="replace"))

    def release(self) -> None:
        """Lets another job take it at once."""
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


def _conflict(location: Location, said: str) -> SaveConflict:
    with suppress(ValueError, KeyError, TypeError):
        holder = json.loads(said)
        if (holder["process"], holder["program"]) == (os.getpid(), _PROGRAM):
            return SaveConflict(
                f"{location}: another Checkpointer of this same process saves here and is not "
                "closed. Call its close(), or use it in a `with` statement, before the next one "
                "saves"
            )
    return SaveConflict(
        f"{location}: another job saves here now ({_who(said)}); two jobs in one folder would mix "
        "their steps. End that job, or give this one its own folder"
    )
