"""Processes of one node that do the same at the same time: they find each other, and share memory.

They meet at a Unix socket whose name says what they do. Whoever comes first waits for the others,
and passes on what they tell. Nothing of this has a name in a file system, so that nothing is left
when a process is killed; and its death is noticed at once, because its socket ends.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from mmap import ACCESS_READ, ACCESS_WRITE, mmap

import numpy as np

from unickpt.arrays.dtypes import Array

_MOST_PROCESSES = 64
_MOST_BYTES = 1 << 30  # of a message
_LENGTH = struct.Struct("<Q")
_START = struct.Struct("<II")  # a member's index, and the number of members
_PAUSE_S = 0.002


class Apart(Exception):
    """The processes are not, or no longer, together."""


class Meeting:
    """Some processes that are together until one of them ends, fails, or keeps others waiting.

    Arguments:
        index: of this process.
        links: the connections of the first process to all others; of the others, to the first.
        memory: a file in memory of each process.
    """

    def __init__(self, index: int, links: Sequence[socket.socket], memory: Sequence[int]) -> None:
        self.index, self.count = index, len(memory)
        self._links, self._memory = links, memory

    def gather(self, told: bytes) -> list[bytes]:
        """What each process tells; returns once all have called it.

        Raises:
            Apart: a process has left, or keeps the others waiting.
        """
        try:
            if self.index > 0:
                (first,) = self._links
                _send(first, told)
                return [_receive(first) for _ in range(self.count)]
            every = [told, *(_receive(link) for link in self._links)]
            joined = b"".join(_LENGTH.pack(len(one)) + one for one in every)
            for link in self._links:
                link.sendall(joined)
        except OSError as error:
            raise Apart(f"a process of this node left the others: {error}") from error
        return every

    def share(self, nbytes: int) -> list[Array]:
        """Memory of each process, which all can read, as bytes; called by all at the same point.

        Arguments:
            nbytes: of each; the same for all, and more than 0.

        Raises:
            Apart: as `gather`; or the system gives no memory.
        """
        try:
            os.ftruncate(self._memory[self.index], nbytes)
            self.gather(b"")
            maps = [
                mmap(file, nbytes, access=ACCESS_WRITE if p == self.index else ACCESS_READ)
                for p, file in enumerate(self._memory)
            ]
        except (OSError, ValueError) as error:  # ValueError: a file is shorter
            raise Apart(f"the processes of this node cannot share memory: {error}") from error
        return [np.frombuffer(one, np.uint8) for one in maps]


def can_meet(count: int) -> bool:
    """Whether so many processes can meet on this system."""
    return 1 < count <= _MOST_PROCESSES and sys.platform == "linux"


@contextmanager
def meeting(purpose: str, count: int, patience_s: float, timeout_s: float) -> Iterator[Meeting]:
    """Meets other processes of this user on this node, which have the same purpose.

    Which ones they are does not matter: as many as are missing are taken as they come. No process
    waits if somebody may come later than that.

    Arguments:
        purpose: what they are going to do.
        count: how many there are.
        patience_s: how long to wait for the others.
        timeout_s: how long to wait for them later, each time.

    Raises:
        Apart: not all came in time.
    """
    deadline = time.monotonic() + patience_s
    told = f"{os.getuid()} {count} {purpose}".encode()
    name = b"\0unickpt-" + hashlib.blake2b(told, digest_size=16).hexdigest().encode()
    with ExitStack() as stack:
        try:
            memory = os.memfd_create("unickpt-load", os.MFD_CLOEXEC)
            stack.callback(os.close, memory)
            found = _met(name, memory, count, deadline, stack)
            for link in found._links:
                link.settimeout(timeout_s)
        except OSError as error:
            raise Apart(f"the {count} processes of this node did not meet: {error}") from error
        yield found


def _met(name: bytes, memory: int, count: int, deadline: float, stack: ExitStack) -> Meeting:
    while True:
        place = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with place:
            try:
                place.bind(name)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
            else:
                place.listen(count)
                return _await(place, memory, count, deadline, stack)
        link = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        link.settimeout(_left(deadline))
        try:
            link.connect(name)
            return _join(link, memory, count, deadline, stack)
        except (ConnectionError, BlockingIOError):
            # It does not listen yet, or had enough others; this one may be the first of the next.
            link.close()
            _left(deadline)
            time.sleep(_PAUSE_S)


def _await(
    place: socket.socket, memory: int, count: int, deadline: float, stack: ExitStack
) -> Meeting:
    """Waits for the others, as the first."""
    links: list[socket.socket] = []
    files = [memory]
    while len(links) < count - 1:
        place.settimeout(_left(deadline))
        link = stack.enter_context(place.accept()[0])
        if not _is_own(link):
            link.close()
            continue
        link.settimeout(_left(deadline))
        _, received, _, _ = socket.recv_fds(link, 1, 1)
        for file in received:
            stack.callback(os.close, file)
        if len(received) == 1:  # else it has left already
            links.append(link)
            files += received
    for index, link in enumerate(links, 1):
        socket.send_fds(link, [_START.pack(index, count)], files)
    return Meeting(0, links, files)


def _join(
    link: socket.socket, memory: int, count: int, deadline: float, stack: ExitStack
) -> Meeting:
    """Comes to the first, and waits until all are there."""
    if not _is_own(link):
        raise OSError("another user has taken the name")
    socket.send_fds(link, [b"\0"], [memory])
    link.settimeout(_left(deadline))
    start, files, _, _ = socket.recv_fds(link, _START.size, count)
    for file in files:
        stack.callback(os.close, file)
    if len(start) < _START.size or len(files) != count:
        raise ConnectionError("the meeting is full, or not all came")
    index, _ = _START.unpack(start)
    return Meeting(index, [link], files)


def _is_own(link: socket.socket) -> bool:
    """Whether the other process is of this user: anybody may use the name."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("not all came in time")
    return left


def _send(link: socket.socket, told: bytes) -> None:
    link.sendall(_LENGTH.pack(len(told)) + told)


def _receive(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > _MOST_BYTES:
        raise OSError(f"a message of {length} bytes")
    return _exactly(link, length)


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    found = bytearray()
    while len(found) < nbytes:
        part = link.recv(min(nbytes - len(found), 1 << 20))
        if not part:
            raise ConnectionError("a connection has ended")
        found += part
    return bytes(found)
