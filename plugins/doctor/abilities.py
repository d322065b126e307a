"""Tests the storage operations that unickpt needs, at the place of a checkpoint."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import tensorstore as ts

from unickpt.extend import (
    Failed,
    Location,
    local_folders,
    size_text,
    storage_context,
    sync_folder,
)


@dataclass(frozen=True)
class Ability:
    """Something that a storage can do, or not.

    Arguments:
        name: of the tested operation.
        works: whether it succeeded.
        detail: how; or the error, and its consequence for checkpoints.
        is_needed: whether no checkpoint can be saved without it.
    """

    name: str
    works: bool
    detail: str
    is_needed: bool = False


def abilities(location: Location) -> Iterator[Ability]:
    """Tries out a location, which need not exist; nothing of it stays.

    Arguments:
        location: of a checkpoint, or of a run.
    """
    if location.is_local:
        yield from _of_folder(location.path)
    else:
        yield from _of_store(location)


def _of_folder(path: str) -> Iterator[Ability]:
    above = os.path.realpath(path)
    while not os.path.isdir(above):
        above = os.path.dirname(above)
    try:
        folder = tempfile.mkdtemp(prefix=".unickpt-doctor-", dir=above)
    except OSError as error:
        yield Ability("write", False, f"{above}: {error.strerror}", is_needed=True)
        return
    try:
        yield _tried("write and flush", lambda: _write(folder), f"in {above}", is_needed=True)
        yield _tried("hard links", lambda: _link(folder), "", "unchanged arrays are copied")
        yield _tried("locks", lambda: _lock(folder), "", "a second job may go unnoticed")
        yield _tried(
            *("atomic exchange", lambda: _exchange(folder), ""),
            "an export that replaces another is missing for a moment",
        )
        free = shutil.disk_usage(folder).free
        yield Ability("free space", free > 0, size_text(free), is_needed=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _tried(
    name: str, work: Callable[[], object], detail: str, lack: str = "", *, is_needed: bool = False
) -> Ability:
    """The result of a test.

    Arguments:
        detail: if it works.
        lack: the consequence if it does not.
    """
    try:
        work()
    except (OSError, Failed) as error:
        reason = getattr(error, "strerror", None) or str(error)
        return Ability(name, False, "; ".join(filter(None, (reason, lack))), is_needed)
    return Ability(name, True, detail, is_needed)


def _write(folder: str) -> None:
    with open(os.path.join(folder, "file"), "xb") as file:
        file.write(b"unickpt")
        file.flush()
        os.fsync(file.fileno())
    sync_folder(folder)


def _link(folder: str) -> None:
    source, other = (os.path.join(folder, name) for name in ("file", "link"))
    os.link(source, other)
    if not os.path.samefile(source, other):
        raise OSError("a hard link is another file")


def _lock(folder: str) -> None:
    name = os.path.join(folder, "lock")
    with open(name, "wb") as file, open(name, "wb") as again:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
            raise OSError("a lock was given twice")


def _exchange(folder: str) -> None:
    first, other = (os.path.join(folder, name) for name in ("one", "other"))
    for name in (first, other):
        os.mkdir(name)
    if not local_folders.exchange(first, other):
        raise OSError("not supported here")


def _of_store(location: Location) -> Iterator[Ability]:
    name = f".unickpt-doctor-{secrets.token_hex(8)}"
    try:
        store = location.store(storage_context())
        first = store.write(name, b"unickpt").result()
    except Failed as error:
        yield Ability("write", False, error.reason, is_needed=True)
        return
    try:
        content = bytes(store.read(name).result().value)
        yield Ability("write and read", content == b"unickpt", "", is_needed=True)
        keys = ts.KvStore.KeyRange(name, name + "\0")
        yield Ability("list", bool(store.list(range=keys).result()), "", is_needed=True)
        store.write(name, b"newer").result()
        store.write(name, b"stale", if_equal=first.generation).result()
        is_refused = store.read(name).result().value == b"newer"
        lack = "" if is_refused else "ignored: two jobs that save at one path are noticed late"
        yield Ability("conditional writes", is_refused, lack)
    except Failed as error:
        yield Ability("read, list and replace", False, error.reason, is_needed=True)
    finally:
        with suppress(Failed):
            store.write(name, None).result()
