"""A node whose files cannot be read: another program answers at its port, or none."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

from unickpt.plugins.nodes import file_server

_HALF = b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + bytes(1000)


class FaultyNode:
    """A server at the port of a node.

    Arguments:
        port: its port.
        kind: "silent" accepts and never answers; "garbage" answers something else than HTTP;
            "vanishes" answers as the node until a file of a step is read, sends a part of that,
            and never answers again; "lies" sends other bytes; "refuses" does not listen.
        identity: of the node.
    """

    def __init__(self, port: int, kind: str, identity: str) -> None:
        self.kind, self.identity, self.is_gone = kind, identity.encode(), False
        self._socket = socket.socket(socket.AF_INET6)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        self._socket.bind(("", port))
        self._socket.listen(100)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        while request := connection.recv(1 << 16):
            if self.kind == "silent" or self.is_gone:
                time.sleep(600)
            elif self.kind == "garbage":
                connection.sendall(b"\x00\xff not HTTP\r\n\r\n" * 99)
                connection.close()
                return
            elif b"/.node " in request:
                connection.sendall(_whole(self.identity))
            elif self.kind == "vanishes":
                self.is_gone = True
                connection.sendall(_HALF)
                time.sleep(600)
            else:
                connection.sendall(_whole(bytes(5000)))


def _whole(data: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(data), data)


def replace(server: Any, folder: str, kind: str) -> None:
    """Puts another program in the place of the `FileServer` of a folder, which has served nothing
    yet."""
    port = server._server.server_address[1]
    server.close()
    if kind != "refuses":
        with open(f"{folder}.node") as file:
            FaultyNode(port, kind, file.read())


def replace_early(kind: str) -> None:
    """As `replace`, for the server that this process is about to start."""
    start = file_server.FileServer.__init__

    def started(self: Any, folder: str) -> None:
        start(self, folder)
        replace(self, folder, kind)

    file_server.FileServer.__init__ = started  # type: ignore[method-assign]
