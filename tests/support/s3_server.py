"""S3 servers on this machine, for tests."""

from __future__ import annotations

import re
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any, NamedTuple
from unittest import mock

import pytest


@cache
def prepare_moto() -> None:
    """Mends what moto lacks to answer several requests at the same time as S3 does; and hastens
    it."""
    _hasten()
    _keep_replaced()
    _serialize_conditions()
    _list_whole()


def _keep_replaced() -> None:
    """Has moto keep an object that is replaced until no request needs it: its answers to a PUT and
    a GET read the object too late, and fail."""
    from moto.s3.models import FakeKey

    make, dispose = FakeKey.__init__, FakeKey.dispose

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        _ = self.etag

    def disposed(self: Any, garbage: bool = False) -> None:
        self.disposed = True
        if garbage:  # nobody has it any more
            dispose(self)

    FakeKey.__init__, FakeKey.dispose = made, disposed


def _serialize_conditions() -> None:
    """Has moto check a condition and write in one step, as S3 does: between its own two, another
    request of a thread can write, and both would be told that they were first."""
    from moto.s3.responses import S3Response

    one_at_a_time = threading.Lock()
    for name in "put_object", "delete_object":
        answer = getattr(S3Response, name)

        def answered(self: Any, answer: Any = answer) -> Any:
            has_condition = self.headers.get("If-Match") or self.headers.get("If-None-Match")
            with one_at_a_time if has_condition else nullcontext():
                return answer(self)

        setattr(S3Response, name, answered)


def _list_whole() -> None:
    """Has moto list again where another request of a thread changed the bucket meanwhile: its
    listing fails then, which that of S3 does not."""
    from moto.s3.models import S3Backend

    answer = S3Backend.list_objects

    def listed(self: Any, *args: Any, **kwargs: Any) -> Any:
        for _ in range(100):
            with suppress(KeyError, RuntimeError):
                return answer(self, *args, **kwargs)
        return answer(self, *args, **kwargs)

    S3Backend.list_objects = listed


def _hasten() -> None:
    """Leaves out what moto does for each request besides answering it.

    It lists its own folder, which is 40 % of the time that a small one takes; it writes a line of a
    log, and takes a thread and a connection for each.
    """
    from moto import backends
    from werkzeug.serving import WSGIRequestHandler

    found = frozenset(backends.list_of_moto_modules())
    backends.list_of_moto_modules = lambda: found
    WSGIRequestHandler.log_request = lambda *_, **__: None  # type: ignore[method-assign]
    WSGIRequestHandler.protocol_version = "HTTP/1.1"


def make_bucket(endpoint: str, name: str) -> None:
    request = urllib.request.Request(f"{endpoint}/{name}", method="PUT")
    urllib.request.urlopen(request, timeout=60).close()


def remove_bucket(endpoint: str, name: str) -> None:
    """Removes a bucket and what is in it."""
    import boto3  # which moto needs, too

    keys = {"aws_access_key_id": "anyone", "aws_secret_access_key": "anything"}
    storage = boto3.resource("s3", endpoint_url=endpoint, region_name="us-east-1", **keys)
    storage.Bucket(name).objects.all().delete()
    storage.Bucket(name).delete()


def use(endpoint: str, patch: pytest.MonkeyPatch) -> None:
    """Has TensorStore talk to this server."""
    patch.setenv("AWS_ACCESS_KEY_ID", "anyone")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "anything")
    patch.setenv("AWS_ENDPOINT_URL", endpoint)
    patch.setenv("AWS_REGION", "us-east-1")
    patch.setenv("AWS_MAX_ATTEMPTS", "2")


class Request(NamedTuple):
    """A request that a server on this machine got.

    Arguments:
        method: such as "PUT".
        key: what follows the server's name, such as "/bucket/key".
        nbytes: of its body.
        signer: the id of the key that signed it; empty if it is not signed.
        range_bytes: how many bytes of the object it asks for; None for all.
    """

    method: str
    key: str
    nbytes: int
    signer: str
    range_bytes: int | None = None


@contextmanager
def requests() -> Iterator[list[Request]]:
    """Lists the requests to servers of moto in this process, until the block ends."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication

    real, seen = DomainDispatcherApplication.__call__, list[Request]()

    def counted(self: Any, environ: dict[str, Any], start_response: Any) -> Any:
        nbytes = int(environ.get("CONTENT_LENGTH") or 0)
        signature = environ.get("HTTP_AUTHORIZATION", "")
        match = re.search(r"Credential=([^/]+)/", signature)
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", environ.get("HTTP_RANGE", ""))
        range_bytes = int(span[2]) - int(span[1]) + 1 if span else None
        seen.append(Request(method, path, nbytes, match[1] if match else "", range_bytes))
        return real(self, environ, start_response)

    with mock.patch.object(DomainDispatcherApplication, "__call__", counted):
        yield seen
