"""Hosts in network namespaces of this machine, each with a name and an address, on one switch."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NEW_MOUNTS, _NEW_NAME, _NEW_NET = 0x00020000, 0x04000000, 0x40000000
_BIND, _PRIVATE = 1 << 12, 1 << 14 | 1 << 18


def _ip(*words: object) -> None:
    subprocess.run(["ip", *map(str, words)], check=True, capture_output=True, timeout=60)


def address(number: int) -> str:
    """The address of a host."""
    return f"10.213.0.{number + 1}"


class Hosts:
    """Some hosts, and a switch between them.

    Arguments:
        folder: for their list of names.
        count: how many.
    """

    def __init__(self, folder: Path, count: int) -> None:
        self.count, self._tag = count, f"ck{os.getpid()}"
        self.switch, self.names = f"{self._tag}-s", f"{folder}/hosts"
        lines = [f"{address(number)} host{number}" for number in range(count)]
        Path(self.names).write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))

    def namespace(self, number: int) -> str:
        """The name of a host's namespace."""
        return f"{self._tag}-{number}"

    def start(self) -> None:
        """Makes them. Raises CalledProcessError, OSError if this machine cannot."""
        _ip("netns", "add", self.switch)
        _ip("-n", self.switch, "link", "add", "name", "bridge", "type", "bridge")
        _ip("-n", self.switch, "link", "set", "dev", "bridge", "up")
        for number in range(self.count):
            name, port = self.namespace(number), f"p{number}"
            _ip("netns", "add", name)
            ends = ["netns", name, "type", "veth", "peer", "name", port, "netns", self.switch]
            _ip("link", "add", "e0", *ends)
            _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
            _ip("-n", name, "address", "add", f"{address(number)}/24", "dev", "e0")
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", "e0", "up")

    def close(self) -> None:
        """Removes them."""
        for name in [self.switch, *map(self.namespace, range(self.count))]:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, timeout=60)

    def cut(self, number: int, seconds: float) -> None:
        """Nothing gets to a host, or from it, for some time."""
        _ip("-n", self.switch, "link", "set", f"p{number}", "down")
        time.sleep(seconds)
        _ip("-n", self.switch, "link", "set", f"p{number}", "up")


@contextmanager
def running(folder: Path, count: int) -> Iterator[Hosts]:
    """Hosts, which go at the end. Arguments, and what it raises: as for `Hosts`."""
    hosts = Hosts(folder, count)
    try:
        hosts.start()
        yield hosts
    finally:
        hosts.close()


def enter(namespace: str, names: str, number: int) -> None:
    """Makes this process, which has one thread, one of a host.

    Arguments:
        namespace: of the host.
        names: the list of the names of all hosts.
        number: of the host.
    """
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            raise OSError(ctypes.get_errno(), f"{name}: {os.strerror(ctypes.get_errno())}")

    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    call("setns", handle, _NEW_NET)
    os.close(handle)
    call("unshare", _NEW_NAME | _NEW_MOUNTS)
    call("mount", b"none", b"/", None, _PRIVATE, None)
    call("mount", names.encode(), b"/etc/hosts", None, _BIND, None)
    socket.sethostname(f"host{number}")
