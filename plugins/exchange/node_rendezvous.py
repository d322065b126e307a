"""Processes of one node with a common task at the same time find each other and share memory.

They meet at a Unix socket whose name identifies the task. The first process waits for the others
and forwards their messages. Neither socket nor memory has a name in a file system, so nothing is
left when a process is killed; its death is detected at once, because its socket closes.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import struct
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from mmap import ACCESS_READ, ACCESS_WRITE, mmap

import numpy as np

from unickpt.extend import Array

_MOST_PROCESSES = 64
_MOST_BYTES = 1 << 30  # of a message
_LENGTH = struct.Struct("<Q")
_START = struct.Struct("<II")  # a member's index, and the number of members
_PAUSE_S = 0.002
_LEAST_WAIT_S = 0.0005
_GREETING_S = 1.0  # for the first message of a process


class RendezvousEnded(Exception):
    """The processes are not, or no longer, together."""


class Rendezvous:
    """Some processes that are together until one of them ends, fails, or keeps others waiting.

    Arguments:
        index: of this process.
        links: the connections of the first process to all others; of the others, to the first.
        memory: a file in memory of each process.
    """

    def __init__(self, index: int, links: Sequence[socket.socket], memory: Sequence[int]) -> None:
        self.index, self.count = index, len(memory)
        self._links, self._memory = links, memory

    def gather(self, own_message: bytes) -> list[bytes]:
        """The messages of all processes; returns once all have called it.

        Raises:
            RendezvousEnded: a process has left, or keeps the others waiting.
        """
        try:
            if self.index > 0:
                (first,) = self._links
                _send(first, own_message)
                return [_receive(first) for _ in range(self.count)]
            every = [own_message, *(_receive(link) for link in self._links)]
            joined = b"".join(_LENGTH.pack(len(message)) + message for message in every)
            for link in self._links:
                link.sendall(joined)
        except OSError as error:
            raise RendezvousEnded(f"a process of this node left the others: {error}") from error
        return every

    def share(self, nbytes: int) -> list[Array]:
        """Memory of each process, which all can read, as bytes; called by all at the same point.

        Arguments:
            nbytes: of each; the same for all, and more than 0.

        Raises:
            RendezvousEnded: as `gather`; or the system gives no memory.
        """
        try:
            os.ftruncate(self._memory[self.index], nbytes)
            self.gather(b"")
            maps = [
                mmap(file, nbytes, access=ACCESS_WRITE if p == self.index else ACCESS_READ)
                for p, file in enumerate(self._memory)
            ]
        except (OSError, ValueError) as error:  # ValueError: a file is shorter
            raise RendezvousEnded(
                f"the processes of this node cannot share memory: {error}"
            ) from error
        return [np.frombuffer(memory_map, np.uint8) for memory_map in maps]


def can_meet(count: int) -> bool:
    """Whether so many processes can meet on this system."""
    return 1 < count <= _MOST_PROCESSES and sys.platform == "linux"


class Arrival(ExitStack):
    """A process that waits to meet the processes of this user on this node with the same purpose,
    until it leaves; it may do other work meanwhile.

    Any processes will do: as many as are missing are accepted as they come.

    Arguments:
        purpose: identifies their task.
        count: how many there are.
        timeout_s: how long to wait for each other once they have met, each time.
    """

    def __init__(self, purpose: str, count: int, timeout_s: float) -> None:
        super().__init__()
        identity = f"{os.getuid()} {count} {purpose}".encode()
        self._name = b"\0unickpt-" + hashlib.blake2b(identity, digest_size=16).hexdigest().encode()
        self._count, self._timeout_s = count, timeout_s
        self._memory = os.memfd_create("unickpt-load", os.MFD_CLOEXEC)
        self.callback(os.close, self._memory)
        self._place: socket.socket | None = None  # of the first
        self._come: list[tuple[socket.socket, int]] = []  # to it: links, and their memory
        self._link: socket.socket | None = None  # to the first

    def wait(self, patience_s: float) -> Rendezvous | None:
        """Waits for the others, at least for a moment.

        Arguments:
            patience_s: how long.

        Returns:
            None if not all have come in this time; they still may.

        Raises:
            RendezvousEnded: they cannot meet.
        """
        deadline = time.monotonic() + patience_s
        try:
            while True:
                try:
                    met = self._met(deadline)
                    break
                except (ConnectionError, BlockingIOError):
                    # It does not listen yet, had enough others, or left; this one may be the
                    # first of the next.
                    self._leave()
                    if time.monotonic() > deadline:
                        return None
                    time.sleep(_PAUSE_S)
        except TimeoutError:
            return None
        except OSError as error:
            self._leave()
            raise RendezvousEnded(f"the processes of this node cannot meet: {error}") from error
        for link in met._links:
            link.settimeout(self._timeout_s)
        return met

    def _met(self, deadline: float) -> Rendezvous:
        if self._place is None and self._link is None:
            place = self.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                place.bind(self._name)
                place.listen(self._count)
                self._place = place
            except OSError as error:
                place.close()
                if error.errno != errno.EADDRINUSE:
                    raise
                self._link = self._connected(deadline)
        if self._place is not None:
            return self._await(self._place, deadline)
        assert self._link is not None, "it is the first, or has come to it"
        return self._join(self._link, deadline)

    def _await(self, place: socket.socket, deadline: float) -> Rendezvous:
        """Waits for the others, as the first."""
        while len(self._come) < self._count - 1:
            place.settimeout(_left(deadline))
            link = self.enter_context(place.accept()[0])
            if not _is_own(link):
                link.close()
                if time.monotonic() > deadline:
                    raise TimeoutError
                continue
            link.settimeout(_GREETING_S)
            try:
                _, received, _, _ = socket.recv_fds(link, 1, 1)
            except OSError:
                received = []
            for file in received:
                self.callback(os.close, file)
            if len(received) == 1:
                self._come.append((link, received[0]))
            else:
                link.close()
            self._come = [peer for peer in self._come if not _has_left(peer[0])]
        place.close()  # a process that comes now belongs to the next load
        links, files = (
            [link for link, _ in self._come],
            [self._memory, *(file for _, file in self._come)],
        )
        for index, link in enumerate(links, 1):
            try:
                socket.send_fds(link, [_START.pack(index, self._count)], files)
            except OSError as error:
                raise RendezvousEnded(f"a process of this node left the others: {error}") from error
        return Rendezvous(0, links, files)

    def _connected(self, deadline: float) -> socket.socket:
        """Connects to the first."""
        link = self.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            link.settimeout(_left(deadline))
            link.connect(self._name)
            if not _is_own(link):
                raise OSError("the socket belongs to another user")
            socket.send_fds(link, [b"\0"], [self._memory])
        except OSError:
            link.close()
            raise
        return link

    def _join(self, link: socket.socket, deadline: float) -> Rendezvous:
        """Waits until all have connected to the first."""
        link.settimeout(_left(deadline))
        start, files, _, _ = socket.recv_fds(link, _START.size, self._count)
        for file in files:
            self.callback(os.close, file)
        if len(start) < _START.size or len(files) != self._count:
            raise ConnectionError("the rendezvous is full, or not all came")
        index, _ = _START.unpack(start)
        return Rendezvous(index, [link], files)

    def _leave(self) -> None:
        for end in (self._place, self._link, *(link for link, _ in self._come)):
            if end is not None:
                end.close()
        self._place, self._link, self._come = None, None, []


def _has_left(link: socket.socket) -> bool:
    """Whether a process that waits, and so sends nothing, has ended its connection."""
    link.setblocking(False)
    try:
        return not link.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True


def _is_own(link: socket.socket) -> bool:
    """Whether the other process belongs to this user: any user may use the name."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return bool(user == os.getuid())


def _left(deadline: float) -> float:
    """The seconds that are left, for a socket's timeout: 0 would mean another kind of socket."""
    return max(_LEAST_WAIT_S, deadline - time.monotonic())


def _send(link: socket.socket, message: bytes) -> None:
    link.sendall(_LENGTH.pack(len(message)) + message)


def _receive(link: socket.socket) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(link, _LENGTH.size))
    if length > _MOST_BYTES:
        raise OSError(f"a message of {length} bytes")
    return _exactly(link, length)


def _exactly(link: socket.socket, nbytes: int) -> bytes:
    buffer = bytearray()
    while len(buffer) < nbytes:
        part = link.recv(min(nbytes - len(buffer), 1 << 20))
        if not part:
            raise ConnectionError("a connection has ended")
        buffer += part
    return bytes(buffer)
