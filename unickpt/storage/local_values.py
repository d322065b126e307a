"""Reads the values of a database in a local folder directly into existing memory."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import tensorstore as ts

from unickpt.storage import ocdbt
from unickpt.storage.kvstore import Damaged, Future, KvStore, asking_system
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.ocdbt_nodes import MOST_MANIFEST_BYTES, Place

_HOLE_BYTES = 1 << 20
_PIECE_BYTES = 2 << 20  # measured: a verified load is 7 % faster than with whole chunks of 8 MiB


class Files:
    """The regular files of one folder; never blocks on other kinds of files.

    An untrusted checkpoint may contain a FIFO, which blocks forever, or a link to a device or to a
    file elsewhere on this machine, whose bytes must not get into arrays. The folder itself may be a
    link or lie below one.

    Arguments:
        folder: ends with `/`.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known: dict[str, tuple[int, int]] = {}

    @cached_property
    def _top(self) -> str:
        return os.path.realpath(self.folder).rstrip("/") + "/"

    def check(self, path: str) -> None:
        """Checks that TensorStore may open a file.

        Arguments:
            path: below the folder.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        self._known[path] = _identity(self._look(path))

    def _look(self, path: str) -> os.stat_result:
        at = self.folder + path
        with asking_system():
            # Without a link on the way, the path cannot lead out of the folder.
            real = os.path.realpath(at) if self._has_link(path) else None
            try:
                found = os.stat(at)
            except FileNotFoundError:
                raise Damaged(f"no file {at}") from None
        if real is not None and not real.startswith(self._top):
            raise Damaged(
                f"{at} is {real}, outside of the checkpoint's folder: a link may not lead out of it"
            )
        _check_regular(found, at)
        return found

    def _has_link(self, path: str) -> bool:
        """Whether a file below the folder, or a folder on the way to it, is a symbolic link."""
        at = self.folder.rstrip("/")
        for name in path.split("/"):
            at = f"{at}/{name}"
            if os.path.islink(at) or name == "..":
                return True
        return False

    @contextmanager
    def opened(self, path: str) -> Iterator[int]:
        """Opens a file of the folder for reading.

        Raises:
            Damaged: it is missing, or no regular file, or not in the folder.
            Failed: the storage failed.
        """
        if path not in self._known:
            self.check(path)
        at = self.folder + path
        with asking_system():
            try:
                handle = os.open(at, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            except FileNotFoundError:
                raise Damaged(f"no file {at}") from None
        try:
            found = os.fstat(handle)
            _check_regular(found, at)
            if _identity(found) != self._known[path]:
                self.check(path)
                if _identity(found) != self._known[path]:
                    raise Damaged(f"{at} changed while it was being opened")
            yield handle
        finally:
            os.close(handle)

    def read(self, place: Place) -> bytes:
        """The bytes at a place, for values that are read at once, such as nodes and the index.

        Raises:
            Damaged: some are missing.
            Failed: the storage failed.
        """
        with self.opened(place.path) as handle:
            size, end = os.fstat(handle).st_size, place.offset + place.length
            # A hole takes no space and reads as zeros, and valid bytes never have thousands of
            # zeros in a row. So gigabytes of zeros are refused before they take memory.
            if size < end or _has_hole(handle, place.offset, end):
                raise Damaged(
                    f"{self.folder + place.path} has no bytes {place.offset} to {end}: its size is "
                    f"{size}, or it has a hole"
                )
            parts, at = [], place.offset
            while at < end:
                with asking_system():
                    part = os.pread(handle, end - at, at)
                if not part:
                    raise Damaged(f"{self.folder + place.path} ends at byte {at}")
                parts.append(part)
                at += len(part)
        return b"".join(parts)

    def check_if_present(self, path: str) -> None:
        """Checks that TensorStore may read a file, which may be missing.

        Raises:
            Damaged: it is no regular file, or not in the folder, or a manifest larger than any
                valid one.
            Failed: the storage failed.
        """
        at = self.folder + path
        if not os.path.lexists(at):
            return
        try:
            size = self._look(path).st_size
        except Damaged:
            if os.path.lexists(at):
                raise
            return  # removed meanwhile
        if path == MANIFEST and size > MOST_MANIFEST_BYTES:
            raise Damaged(f"{at} has {size} bytes, too many for a manifest")


class Store(KvStore):
    """The key-value store of a local folder; reads only its regular files, as `Files`.

    Arguments:
        raw: TensorStore's.
        folder: ends with `/`.
    """

    def __init__(self, raw: ts.KvStore, folder: str) -> None:
        super().__init__(raw)
        self._folder = folder

    def read(self, key: str, **options: Any) -> Future[ts.KvStore.ReadResult]:
        Files(self._folder).check_if_present(key)
        return super().read(key, **options)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _check_regular(found: os.stat_result, at: str) -> None:
    if not stat.S_ISREG(found.st_mode):
        kinds = {
            stat.S_IFIFO: "a FIFO",
            stat.S_IFSOCK: "a socket",
            stat.S_IFDIR: "a directory",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
        }
        kind = kinds.get(stat.S_IFMT(found.st_mode), "something else")
        raise Damaged(f"{at} is {kind}, not a file")


def _has_hole(handle: int, start: int, end: int) -> bool:
    if end - start < _HOLE_BYTES or not hasattr(os, "SEEK_HOLE"):
        return False
    try:
        return os.lseek(handle, start, os.SEEK_HOLE) < end
    except OSError:  # the file system does not support it
        return False


class Values(ocdbt.Values):
    """The values of a database in a local folder, read directly into existing memory.

    TensorStore reads a value into new memory or maps it, and then copies it: two thirds of this
    speed, as measured; and if a mapped file is truncated, the process is killed.

    Arguments:
        store: the key-value store of the folder.
        files: the files of the folder.
        tree: the database's B-tree.
    """

    def __init__(self, store: KvStore, files: Files, tree: ocdbt.Tree) -> None:
        super().__init__(store, tree)
        self._files = files

    def _bytes(self, place: Place) -> bytes:
        return self._files.read(place)

    def _check_file(self, path: str) -> None:
        self._files.check(path)

    def read_into(
        self, key: str, out: memoryview, length: int, look: Callable[[memoryview], object]
    ) -> None:
        """Reads the first bytes of a value, as many as `out` takes.

        Arguments:
            key: of the value.
            out: contiguous bytes.
            length: of the value, in bytes.
            look: called with each piece that was read, while it is in the processor's cache.

        Raises:
            Damaged: the value is missing or incomplete, or the database is damaged.
            Failed: the storage failed.
        """
        found = self.tree.find(key)
        if found is None:
            raise Damaged(f"no bytes stored, {length} expected")
        if ocdbt.length_of(found) != length:
            raise Damaged(f"{ocdbt.length_of(found)} bytes stored, {length} expected")
        if isinstance(found, Place):
            self._read_into(found, out, look)
        else:
            out[:] = found[: len(out)]
            look(out)

    def _read_into(
        self, place: Place, out: memoryview, look: Callable[[memoryview], object]
    ) -> None:
        offset = place.offset
        with self._files.opened(place.path) as handle:
            while out:
                with asking_system():
                    count = os.preadv(handle, [out[:_PIECE_BYTES]], offset)
                if count == 0:
                    path = self._files.folder + place.path
                    raise Damaged(f"{path} ends at byte {offset}")
                look(out[:count])
                offset, out = offset + count, out[count:]
