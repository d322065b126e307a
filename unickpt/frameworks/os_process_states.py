"""Processes as others on their machine see them: running, stopped, waiting for a disk, or dead."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

RUNS, STOPPED, DISK, DEAD = "running", "stopped", "waiting for a disk", "dead"
LOCKED = "holding Python's lock"
"""It runs, but none of its other threads gets a turn: no state of the system's."""
CAUSES = STOPPED, DISK, LOCKED
"""The states that explain why a process makes no progress."""
_LETTERS = {"T": STOPPED, "t": STOPPED, "D": DISK}
_MOST_THREADS = 128
# Positions in /proc/<pid>/stat, after the name, which may hold any characters.
_STATE, _THREADS, _STARTED = 0, 17, 19
_PROC = Path("/proc")

_Name = Annotated[str, msgspec.Meta(pattern=r"\A[\w.-]{0,64}\Z")]
_Pid = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Ticks = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True)
class Identity:
    """A process, for others that look for it.

    Arguments:
        host: the name of its machine, for messages.
        place: the same for processes that see each other's ids; empty if that is unknown.
        pid: its id.
        started: when it began, in clock ticks of the machine: ids are used again.
    """

    host: _Name
    place: _Name
    pid: _Pid
    started: _Ticks

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.host or 'an unknown host'}"


def own_identity() -> Identity:
    """The identity of this process."""
    return _identity_of(os.getpid())


@cache
def _identity_of(pid: int) -> Identity:
    host = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in _host())
    stat = _stat_of(pid)
    if stat is None:
        return Identity(host, "", pid, 0)
    return Identity(host, _place(), pid, stat.started)


if hasattr(os, "register_at_fork"):  # a child may get an id that an ancestor had
    os.register_at_fork(after_in_child=_identity_of.cache_clear)


def _host() -> str:
    return socket.gethostname()[:64]


def _place() -> str:
    """The name of the machine and of the namespaces that give ids and times their meaning."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(_PROC / "self/ns/pid")]
    except OSError:
        return ""
    with suppress(OSError):  # younger than that of ids
        namespaces.append(os.readlink(_PROC / "self/ns/time"))
    return hashlib.blake2b(" ".join([boot, *namespaces]).encode(), digest_size=8).hexdigest()


def state_of(process: Identity, *, threads: bool = False) -> str | None:
    """The state of a process; None if it cannot be seen from here, as on another machine.

    A process is only `DEAD` on evidence: no process has its id, or a younger one has it, or it is
    a zombie.

    Arguments:
        process: the process.
        threads: whether one that waits for a disk with any of its threads is `DISK`.
    """
    watcher = own_identity()
    if not watcher.place or watcher.place != process.place:
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return DEAD
    except OSError:
        pass  # another user's
    stat = _stat_of(process.pid)
    if stat is None:  # hidden, or it has just ended
        return RUNS
    # The main thread of a process may end before its other threads.
    is_zombie = stat.letter in "ZX" and stat.threads <= 1
    if stat.started != process.started or is_zombie:
        return DEAD
    letters = [stat.letter, *(_thread_letters(process.pid) if threads else ())]
    return next((_LETTERS[letter] for letter in letters if letter in _LETTERS), RUNS)


class _Stat(NamedTuple):
    letter: str
    threads: int
    started: int


def _stat_of(pid: int) -> _Stat | None:
    try:
        fields = _fields(_PROC / str(pid) / "stat")
        return _Stat(fields[_STATE], int(fields[_THREADS]), int(fields[_STARTED]))
    except (OSError, ValueError, IndexError):
        return None


def _thread_letters(pid: int) -> Iterator[str]:
    with suppress(OSError, IndexError):
        for name in os.listdir(_PROC / str(pid) / "task")[:_MOST_THREADS]:
            yield _fields(_PROC / str(pid) / "task" / name / "stat")[_STATE]


def _fields(path: Path) -> list[str]:
    return path.read_text(errors="replace").rpartition(")")[2].split()
