"""The storage's failures: their types within unickpt, and the errors that users get for them.

Any failure of storage, in TensorStore or the operating system, raises a `Failed` or one of its
kinds below. Code that knows what was being read or written turns it into an error of
`unickpt.errors` that names it: `reading_failed` or `writing_failed`. Any other exception is a bug
of unickpt or of a caller, and is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from unickpt.errors import CheckpointCorrupt, StorageError


class Failed(StorageError):
    """A storage operation failed; callers raise another error that names its purpose.

    Arguments:
        reason: the message, without the status.
        errno: the operating system's error number, if any.
        status: TensorStore's name of the kind of failure, if any; it begins the message.
    """

    def __init__(self, reason: str, errno: int | None = None, status: str = "") -> None:
        super().__init__(f"{status}: {reason}" if status else reason)
        self.reason, self.errno, self.status = reason, errno, status


class Damaged(Failed, ValueError):
    """Stored data that a checkpoint needs is missing, or not valid."""


class MissingFolder(Failed):
    """The folder does not exist."""


class LockHeld(Failed):
    """Another process, or this one, holds a lock.

    Arguments:
        name: of the lock file.
        holder: the holder's text about itself.
    """

    def __init__(self, name: str, holder: str = "") -> None:
        super().__init__(f"{name}: another process holds this lock")
        self.holder = holder


def reading_failed(error: Failed, where: str) -> CheckpointCorrupt | StorageError:
    """The user's error for a failure to read data of a checkpoint.

    Arguments:
        error: the failure.
        where: the path and the item in it, for the message.
    """
    if isinstance(error, Damaged):
        return CheckpointCorrupt(f"{where}: stored data is damaged or missing: {error.reason}")
    return StorageError(f"{where}: the storage failed: {error}")


@contextmanager
def reading(
    where: object, failed: Callable[[Failed, str], Exception] = reading_failed
) -> Iterator[None]:
    """Within the block, a failure of the storage becomes the error that a function returns for it.

    Arguments:
        where: the path and the item in it, for the message.
        failed: the function; takes the failure, and `where` as text.
    """
    try:
        yield
    except Failed as error:
        raise failed(error, str(where)) from error


def writing(where: object) -> AbstractContextManager[None]:
    """As `reading`, for any other failure; see `writing_failed`."""
    return reading(where, writing_failed)


def writing_failed(error: Failed, where: str, room: str = "") -> StorageError:
    """The user's error for any other failure, which never means a damaged checkpoint.

    Arguments:
        error: the failure.
        where: the path, for the message.
        room: how much room was needed and free; see `disk_space.room_text`.
    """
    return StorageError(f"{where}: the storage failed: {error}{room}")
