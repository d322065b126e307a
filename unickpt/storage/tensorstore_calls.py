"""All calls of TensorStore go through here; its errors become those of `storage.errors`.

Only this module parses the text of an error: TensorStore raises a few built-in exceptions, and only
their messages identify the failure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Generic, Self, TypeVar

import tensorstore as ts

from unickpt.errors import ForkedProcess
from unickpt.storage.errors import Damaged, Failed

T = TypeVar("T")

# All exception types that TensorStore raises for the status of an operation.
_RAISED = (ValueError, OSError, NotImplementedError, IndexError)
_STATUS = r"([A-Z_]+): "
# The end of a message: details for TensorStore's developers, as " [name='value']".
_DETAILS = r"(?s) \[[\w. -]+=['\"].*\Z"
_OS_CODE = r"\[os_error_code='(\d+)'\]"
_HTTP_CODE = r"\[http_response_code='(\d+)'\]"
_DENIED = ("401", "403")
# Messages of AWS about credentials, with other codes.
_OF_CREDENTIALS = ("credentials provider", "from provider", "ExpiredToken", "InvalidToken")
_NO_ANSWER = "CURL error"  # a request that failed without the answer of a server
_NETWORK = (
    " (check the network and, for s3://, the endpoint in AWS_ENDPOINT_URL; AWS_MAX_ATTEMPTS sets "
    "how often a request to S3 is tried)"
)
_ESCAPED = r"\\x([0-9a-f]{2})"
# Statuses that mean damaged data when a checkpoint is read.
_OF_DATA = ("DATA_LOSS", "OUT_OF_RANGE", "FAILED_PRECONDITION", "NOT_FOUND")


_credentials: Callable[[], str] = str


def describe_credentials(describe: Callable[[], str]) -> None:
    """Registers the function that names, for errors, the credentials of requests."""
    global _credentials
    _credentials = describe


def _refused(code: str, reason: str) -> str:
    """For messages: the credentials of a refused request; empty for any other error."""
    if code not in _DENIED and not any(text in reason for text in _OF_CREDENTIALS):
        return ""
    text = _credentials()
    return "check the credentials and their permissions" + (f"; {text}" if text else "")


def _failure(error: Exception) -> Failed:
    """An error of TensorStore's as one of this package's."""
    full = str(error)
    text = re.sub(_DETAILS, "", full)
    code, http = re.search(_OS_CODE, full), re.search(_HTTP_CODE, full)
    named = re.match(_STATUS, text)
    status = named[1] if named else ""
    reason = text[named.end() :] if named else text
    if http is not None:
        hint = _refused(http[1], reason)
        reason += f" (the server answered {http[1]}{': ' if hint else ''}{hint})"
    elif hint := _refused("", reason):
        reason += f" ({hint})"
    elif _NO_ANSWER in reason:
        reason += _NETWORK
    reason = re.sub(_ESCAPED, lambda match: chr(int(match[1], 16) or ord("/")), reason)
    # TensorStore's INVALID_ARGUMENT, its error for bytes that it cannot decode, has no name there.
    of_data = status in _OF_DATA or (not status and isinstance(error, ValueError))
    # A server's error does not mean damaged data, except that an object is too short.
    if http is not None and status != "OUT_OF_RANGE":
        of_data = False
    kind = Damaged if of_data else Failed
    return kind(reason, int(code[1]) if code else None, status)


@contextmanager
def asking() -> Iterator[None]:
    """Wraps TensorStore calls only: their errors become `Failed`."""
    if _use.is_over:
        raise _forked_process()
    _use.began = True
    try:
        yield
    except Failed:
        raise
    except _RAISED as error:
        raise _failure(error) from error


class Future(Generic[T]):
    """A TensorStore operation; `result` waits for its end.

    Arguments:
        future: TensorStore's.
    """

    __slots__ = ("_future",)

    def __init__(self, future: Any) -> None:
        self._future = future

    def result(self) -> T:
        """The result of the operation.

        Raises:
            Failed: the storage failed.
        """
        try:
            result: T = self._future.result()
        except _RAISED as error:
            raise _failure(error) from error
        return result


class KvStore:
    """TensorStore's key-value store with this module's futures and errors.

    Arguments:
        raw: TensorStore's.
    """

    def __init__(self, raw: ts.KvStore) -> None:
        self.raw = raw

    @classmethod
    def open(cls, spec: Any, context: ts.Context) -> Self:
        """Opens the store that a spec names."""
        opened: ts.KvStore = _begin(ts.KvStore.open, spec, context=context).result()
        return cls(opened)

    def with_transaction(self, transaction: ts.Transaction) -> KvStore:
        """This store within a transaction."""
        return KvStore(self.raw.with_transaction(transaction))

    def read(self, key: str, **options: Any) -> Future[ts.KvStore.ReadResult]:
        return _begin(self.raw.read, key, **options)

    def write(
        self, key: str, value: bytes | None, **options: Any
    ) -> Future[ts.KvStore.TimestampedStorageGeneration]:
        return _begin(self.raw.write, key, value, **options)

    def list(self, **options: Any) -> Future[list[bytes]]:
        return _begin(self.raw.list, **options)

    def delete_range(self, keys: ts.KvStore.KeyRange) -> Future[None]:
        return _begin(self.raw.delete_range, keys)

    def experimental_copy_range_to(self, other: KvStore, keys: ts.KvStore.KeyRange) -> Future[None]:
        return _begin(self.raw.experimental_copy_range_to, other.raw, keys)


def commit(transaction: ts.Transaction) -> Future[None]:
    """Starts to commit a transaction."""
    return _begin(transaction.commit_async)


def _begin(operation: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
    # As `asking`, without a context manager: a save of many small arrays begins thousands.
    if _use.is_over:
        raise _forked_process()
    _use.began = True
    try:
        return Future(operation(*arguments, **options))
    except _RAISED as error:
        raise _failure(error) from error


# --- fork ---------------------------------------------------------------------------------------


# Whether this process has used TensorStore, and whether it is a fork of one that had. If it is,
# TensorStore would abort the process, because its threads do not survive a fork. Importing it and
# opening stores start no threads; the first operation does.
_use = SimpleNamespace(began=False, is_over=False)


def _forked_process() -> ForkedProcess:
    return ForkedProcess(
        "this process was forked from one that had already used unickpt, whose I/O threads do "
        "not exist here. Start processes with "
        'multiprocessing.get_context("spawn") (or "forkserver"); with a PyTorch DataLoader: '
        'DataLoader(..., multiprocessing_context="spawn")'
    )


def _forked() -> None:
    _use.is_over = _use.began


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
