"""Serves the files of this node's folder to the job's other processes, by HTTP with ranges."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
import stat
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

import msgspec

from unickpt.plugins.nodes.addresses import node_address
from unickpt.plugins.nodes.node_folder import files_below

_log = logging.getLogger("unickpt")
_RANGE = re.compile(r"bytes=(\d+)-(\d*)")
_STALLED_S = 60.0


class FileServer:
    """A server of files, on threads of this process.

    Only who knows its URL, which has a random part, gets files; the URL is in the root's folder.

    Arguments:
        folder: the folder; its files are served, but no links.
    """

    def __init__(self, folder: str) -> None:
        self._token = secrets.token_urlsafe(24)
        handler = _handler(folder, f"/{self._token}/")
        self._server = _Server(("", 0), handler)
        serve = self._server.serve_forever
        self._thread = threading.Thread(target=serve, name="unickpt node", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The URL of the folder; ends with `/`."""
        return f"http://{node_address()}:{self._server.server_address[1]}/{self._token}/"

    def close(self) -> None:
        """Ends the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    """A server at all addresses of this machine, of IPv6 as well, if it has that."""

    daemon_threads = True
    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        TCPServer.server_bind(self)  # HTTPServer's looks up the name of this machine


def _handler(folder: str, prefix: str) -> Callable[..., BaseHTTPRequestHandler]:
    class FileRequest(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = _STALLED_S

        def do_GET(self) -> None:
            name = self.path.removeprefix(prefix)
            parts = name.rstrip("/").split("/")
            if name == self.path or not all(parts) or {".", ".."} & {*parts}:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            if name.endswith("/"):
                self._send_names(folder + name)
                return
            try:
                handle = os.open(folder + name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                os.close(handle)
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            with open(handle, "rb") as file:
                self._send(file)

        def _send_names(self, path: str) -> None:
            if not os.path.isdir(path):  # else it would seem to be empty
                self.send_error(HTTPStatus.NOT_FOUND)
                return
            names = msgspec.json.encode(files_below(path))
            self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(len(names)))
            self.end_headers()
            self.wfile.write(names)

        def _send(self, file: Any) -> None:
            nbytes = os.fstat(file.fileno()).st_size
            start, end = 0, nbytes
            if match := _RANGE.fullmatch(self.headers.get("Range", "")):
                start = int(match[1])
                end = min(end, int(match[2]) + 1) if match[2] else end
                if start >= end:
                    self.send_error(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
                    return
                self.send_response(HTTPStatus.PARTIAL_CONTENT)
                self.send_header("Content-Range", f"bytes {start}-{end - 1}/{nbytes}")
            else:
                self.send_response(HTTPStatus.OK)
            self.send_header("Content-Length", str(end - start))
            self.end_headers()
            if end > start:
                self.wfile.flush()
                self.connection.sendfile(file, start, end - start)

        def log_message(self, format: str, *arguments: Any) -> None:
            _log.debug(format, *arguments)

    return FileRequest
