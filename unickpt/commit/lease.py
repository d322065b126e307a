"""The lease on a folder: at most one job at a time writes into it.

A local folder is locked by the operating system, which releases the lock when its holder ends. On
other storage the job writes an object and keeps renewing it; another job takes it over only if it
was not renewed for some time (Gray and Cheriton, "Leases", SOSP 1989), or its holder ran on the
same machine and is dead. A job whose object was taken over no longer commits.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec
import tensorstore as ts

from unickpt.commit.messages import parse_note
from unickpt.errors import SaveConflict
from unickpt.frameworks.os_process_states import DEAD, Identity, own_identity, state_of
from unickpt.frameworks.process_group import saved_apart
from unickpt.storage import errors, paths
from unickpt.storage.local_folders import FileLock
from unickpt.storage.locations import Location
from unickpt.storage.tensorstore_calls import KvStore
from unickpt.threads import start

NAME = ".unickpt.lock"
_RENEW_S = 10.0
_EXPIRES_S = 40.0
# For this long, a write that a job began before it lost its lease may still be retried.
_SETTLES_S = 900.0
# Of a holder that did not renew another lease for `_EXPIRES_S`, such as that of the other tier.
_EXPIRES_TOO_S = 15.0
_silent_programs: set[str] = set()
# A unique name of this process; two containers may have the same host name and process id.
_PROGRAM = secrets.token_hex(8)


class Use(NamedTuple):
    """The purpose of a lease.

    Arguments:
        name: of the file in the folder.
        here, there: the messages if another user in this process has it, or another process,
            "{who}". They follow the folder's name.
    """

    name: str
    in_process: str
    elsewhere: str


SAVES = Use(
    NAME,
    "another Checkpointer of this same process saves here and is not closed. Call its close(), or "
    "use it in a `with` statement, before the next one saves",
    "another job saves here now ({who}); two jobs in one folder would mix their steps. End that "
    "job, or give this one its own folder",
)


@dataclass(frozen=True)
class _Holder:
    """The holder's text about itself; of another program's text, only the fields that fit."""

    host: str = ""
    process: int = -1
    program: str = ""
    session: str = ""
    renewed: float | None = None
    identity: Identity | None = None

    def encode(self) -> bytes:
        return msgspec.json.encode(self)


class Lease:
    """The right to write into a folder; held after `take` returns.

    Arguments:
        location: the folder.
        use: its purpose.
    """

    def __init__(self, location: Location, use: Use = SAVES) -> None:
        self._location, self._use = location, use
        session = secrets.token_hex(8)
        host, identity = socket.gethostname(), own_identity()
        self._holder = _Holder(host, os.getpid(), _PROGRAM, session, identity=identity)
        self._lease: _Lock | _LeaseObject | None = None
        self._changing = threading.RLock()  # saves, removals and the end of a run run on threads
        self._settled_at = 0.0

    def take(self) -> bool:
        """Takes the lease, if this job does not hold it.

        Returns:
            Whether it was not held before, so that another job may have saved here.

        Raises:
            SaveConflict: another job holds it.
            StorageError: the storage failed.
        """
        with self._changing:
            try:
                if self._lease is not None and self._lease.is_valid():
                    return False
                self.give_back()
                kind = _Lock if self._location.is_local else _LeaseObject
                lease = kind(self._location, self._holder, self._use)
                if lease.take():
                    self._settled_at = time.monotonic() + _SETTLES_S
            except errors.Failed as error:
                raise errors.writing_failed(error, str(self._location)) from error
            self._lease = lease
            return True

    @property
    def is_settled(self) -> bool:
        """Whether writes of an earlier holder can no longer arrive."""
        return time.monotonic() >= self._settled_at

    def check(self) -> None:
        """Checks before a commit that no other job took over the lease.

        Raises:
            SaveConflict: another job took it over, because this one did not renew it in time.
            StorageError: the storage failed.
        """
        with self._changing:
            try:
                if self._lease is not None:
                    self._lease.check()
            except errors.Failed as error:
                raise errors.writing_failed(error, str(self._location)) from error

    def give_back(self) -> None:
        """Releases the lease, so that another job can take it. Does nothing in a forked process,
        which does not hold it, and where a lock that a parent's thread held is never released.
        """
        if os.getpid() != self._holder.process:
            return
        with self._changing:
            if self._lease is not None:
                with suppress(Exception):  # the next job waits until it expires
                    self._lease.release()
                self._lease = None

    @staticmethod
    def was_taken(location: Location) -> bool:
        """Whether any job holds or held the lease on a folder."""
        return location.has_file(NAME, paths.context())


def holder(location: Location) -> str | None:
    """Describes the holder of the lease on a folder; None if no holder is visible.

    A lock on a local folder by a job on another machine is not always visible.
    """
    if location.is_local:
        said = FileLock(location.path, NAME).holder()
        return None if said is None else _who(said)
    read = location.store(paths.context()).read(NAME).result()
    if read.state != "value":
        return None
    owner = parse_note(read.value, _Holder)
    if owner is None or owner.renewed is None:
        return _who("")
    is_visible = time.time() - owner.renewed < _EXPIRES_S and not _is_dead(owner)
    return _who(read.value) if is_visible else None


def _is_dead(owner: _Holder | None) -> bool:
    """Whether a holder is seen to be dead, on this machine."""
    return owner is not None and owner.identity is not None and state_of(owner.identity) == DEAD


def _who(said: str | bytes) -> str:
    owner = parse_note(said, _Holder)
    if owner is None or not owner.host:
        return "another process"
    return f"process {owner.process} on {owner.host}"


class _Lock(FileLock):
    """A lock of the operating system, on a file in a local folder."""

    def __init__(self, location: Location, holder: _Holder, use: Use) -> None:
        super().__init__(location.path, use.name)
        self._location, self._holder, self._use = location, holder, use

    def take(self) -> bool:
        """Takes the lease. Returns False, because writes of its last holder ended with that
        process.

        Raises:
            SaveConflict: another process holds it.
        """
        try:
            self.acquire(self._holder.encode().decode())
        except errors.LockHeld as error:
            raise _conflict(self._location, self._use, error.holder) from None
        return False

    def check(self) -> None:
        """Does nothing: no job can take over a lock, and a commit fails if the folder is gone."""


class _LeaseObject:
    """An object that its job keeps renewing."""

    def __init__(self, location: Location, holder: _Holder, use: Use) -> None:
        self._location, self._holder, self._use = location, holder, use
        self._generation: bytes | None = None
        self._ended, self._writing = threading.Event(), threading.Lock()

    @property
    def _store(self) -> KvStore:
        """The folder, with the storage's present credentials: a lease may outlive them."""
        return self._location.store(paths.context())

    def take(self) -> bool:
        """Takes the lease. Returns whether the last holder had not released it.

        Raises:
            SaveConflict: another job renews it.
        """
        before = self._store.read(self._use.name).result()
        was_held = before.state == "value"
        owner = parse_note(before.value, _Holder)
        program = "" if owner is None else owner.program
        wait_s = min(_EXPIRES_S, _EXPIRES_TOO_S) if program in _silent_programs else _EXPIRES_S
        deadline = time.monotonic() + wait_s
        while before.state == "value" and time.monotonic() < deadline:
            if _is_dead(owner):
                break
            time.sleep(_RENEW_S / 4)
            now = self._store.read(self._use.name).result()
            if now.stamp.generation != before.stamp.generation and now.state == "value":
                raise _conflict(self._location, self._use, now.value.decode(errors="replace"))
            before = now
        else:
            if program and before.state == "value":
                _silent_programs.add(program)
        if not self._write(before.stamp.generation):
            stored = self._store.read(self._use.name).result().value
            raise _conflict(self._location, self._use, stored.decode(errors="replace"))
        # At interpreter exit no thread starts, so nothing renews it; `check` still detects a
        # takeover.
        start(self._renew, "unickpt lease", daemon=True)
        return was_held

    def is_valid(self) -> bool:
        """Whether no other job took it over."""
        return self._is_ours(self._store.read(self._use.name).result())

    def check(self) -> None:
        """Raises SaveConflict if another job took it over."""
        stored = self._store.read(self._use.name).result()
        if not self._is_ours(stored):
            raise _conflict(self._location, self._use, stored.value.decode(errors="replace"))

    def release(self) -> None:
        """Lets another job take it at once."""
        self._ended.set()
        with self._writing:
            self._store.write(self._use.name, None, if_equal=self._generation).result()

    def _write(self, expected: bytes) -> bool:
        data = replace(self._holder, renewed=time.time()).encode()
        stamp = self._store.write(self._use.name, data, if_equal=expected).result()
        if stamp.generation:
            self._generation = stamp.generation
            return True
        # Refused; or this answers a retry, and the answer to the first request was lost.
        stored = self._store.read(self._use.name).result()
        if self._is_ours(stored):
            self._generation = stored.stamp.generation
            return True
        return False

    def _is_ours(self, stored: ts.KvStore.ReadResult) -> bool:
        owner = parse_note(stored.value, _Holder)
        return owner is not None and owner.session == self._holder.session

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            with self._writing, suppress(Exception):  # `check` detects a lasting failure
                assert self._generation is not None
                if not self._ended.is_set() and not self._write(self._generation):
                    return


def _conflict(location: Location, use: Use, said: str) -> SaveConflict:
    owner = parse_note(said, _Holder)
    if owner is not None and (owner.process, owner.program) == (os.getpid(), _PROGRAM):
        return SaveConflict(f"{location}: {use.in_process}")
    text = use.elsewhere.replace("{who}", _who(said))
    return SaveConflict(f"{location}: {text}{saved_apart()}")
