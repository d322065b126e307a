"""Google Cloud Storage on this machine, for tests: the part of its JSON API that TensorStore uses.

No emulator that a package registry has refuses a conditional write, on which commits rely.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

PAGE = 10  # objects in one answer to a listing, so that runs have more than one answer


@dataclass
class Bucket:
    """Objects by their names, each with its generation."""

    objects: dict[str, tuple[bytes, int]] = field(default_factory=dict)
    generation: int = 1000
    lock: threading.Lock = field(default_factory=threading.Lock)

    def generation_of(self, name: str) -> int:
        """0 for an object that does not exist, as conditions have it."""
        return self.objects[name][1] if name in self.objects else 0


class Server(ThreadingHTTPServer):
    """Holds buckets by their names."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.buckets: dict[str, Bucket] = {}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""

    def do_GET(self) -> None:
        self.answer("GET")

    def do_POST(self) -> None:
        self.answer("POST")

    def do_DELETE(self) -> None:
        self.answer("DELETE")

    def answer(self, method: str) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        self.query = {k: v[0] for k, v in parse_qs(url.query, keep_blank_values=True).items()}
        match = re.fullmatch(r"(?:/upload)?/storage/v1/b/([^/]+)/o(?:/([^/]+))?", url.path)
        if match is None or match[1] not in self.server.buckets:
            return self.refuse(HTTPStatus.NOT_FOUND)
        bucket = self.server.buckets[match[1]]
        name = unquote(match[2]) if match[2] else self.query.get("name")
        with bucket.lock:
            if name is None:
                return self.list(bucket)
            if not self.holds(bucket.generation_of(name)):
                return None
            if method == "POST":
                bucket.generation += 1
                bucket.objects[name] = (body, bucket.generation)
                return self.send_json({"name": name, "generation": str(bucket.generation)})
            if name not in bucket.objects:
                return self.refuse(HTTPStatus.NOT_FOUND)
            if method == "DELETE":
                del bucket.objects[name]
                return self.send(HTTPStatus.NO_CONTENT)
            return self.read(*bucket.objects[name])

    def holds(self, generation: int) -> bool:
        """Whether the request's conditions do; else it is answered."""
        wanted, known = (self.query.get(f"ifGeneration{each}") for each in ("Match", "NotMatch"))
        if wanted is not None and int(wanted) != generation:
            self.refuse(HTTPStatus.PRECONDITION_FAILED)
            return False
        if known is not None and int(known) == generation:
            self.send(HTTPStatus.NOT_MODIFIED)
            return False
        return True

    def list(self, bucket: Bucket) -> None:
        token = bytes.fromhex(self.query.get("pageToken", "")).decode()
        first = max(self.query.get("startOffset", ""), token)
        end, prefix = self.query.get("endOffset"), self.query.get("prefix", "")
        names = [
            name
            for name in sorted(bucket.objects)
            if name.startswith(prefix) and name >= first and (end is None or name < end)
        ]
        items = [{"name": n, "size": str(len(bucket.objects[n][0]))} for n in names[:PAGE]]
        more = {"nextPageToken": names[PAGE].encode().hex()} if len(names) > PAGE else {}
        self.send_json({"items": items, **more})

    def read(self, value: bytes, generation: int) -> None:
        headers = {"x-goog-generation": str(generation)}
        asked = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            return self.send(HTTPStatus.OK, value, headers)
        start = int(asked[1]) if asked[1] else len(value) - int(asked[2])
        stop = min(int(asked[2]) + 1, len(value)) if asked[1] and asked[2] else len(value)
        if start >= len(value):
            return self.refuse(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE)
        headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(value)}"
        return self.send(HTTPStatus.PARTIAL_CONTENT, value[start:stop], headers)

    def refuse(self, status: HTTPStatus) -> None:
        self.send_json({"error": {"code": int(status), "message": status.phrase}}, status)

    def send_json(self, value: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send(status, json.dumps(value).encode())

    def send(
        self, status: HTTPStatus, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if status not in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED):
            self.wfile.write(body)


@contextmanager
def running() -> Iterator[Server]:
    """A server with no buckets: `server.buckets["name"] = Bucket()` makes one."""
    server = Server()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def use(server: Server, patch: pytest.MonkeyPatch) -> None:
    """Has TensorStore talk to this server."""
    patch.setenv("TENSORSTORE_GCS_HTTP_URL", f"http://127.0.0.1:{server.server_port}")
    patch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "anyone")
