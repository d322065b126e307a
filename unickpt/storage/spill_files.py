"""Files without names in a local folder, for what has no room in memory."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from unickpt.arrays.dtypes import Array
from unickpt.errors import StorageError

_log = logging.getLogger("unickpt")
# A file ends, and its room on the disk is free again, when nothing in it is needed any more.
_FILE_BYTES = 1 << 30
_KEPT_FREE = 20  # this part of the disk is left free
_IN_MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
_PIECE = 16 << 20


class SpillFiles:
    """Places in files of a folder; may be used by several threads.

    The files have no names, so that nothing remains of them when the process ends, however it does.
    If the folder cannot be used, or its disk is full, there is simply no place.

    Arguments:
        folder: where; it is made when it is needed.
        beside: a folder that is going to be written to, and how many bytes; if it is on the same
            disk, so many more are left free.
    """

    def __init__(self, folder: str, beside: tuple[str, int] | None = None) -> None:
        self._folder, self._beside = folder, beside
        self._lock = threading.Lock()
        self._file: _File | None = None
        self._files: list[_File] = []
        self._kept_free = 0
        self._usable: bool | None = None
        """Whether the folder can be used; None before it is needed."""

    @property
    def usable(self) -> bool:
        """Whether the folder can be used, full or not; looks the first time."""
        with self._lock:
            if self._usable is None:
                self._usable = self._look()
            return self._usable

    def _look(self) -> bool:
        try:
            os.makedirs(self._folder, exist_ok=True)
            if (kind := file_system_of(self._folder)) in _IN_MEMORY:
                _log.warning(
                    "SaveOptions.spill=%r is in memory (%s), so nothing is spilled; choose a "
                    "folder on a disk",
                    *(self._folder, kind),
                )
                return False
            system = os.statvfs(self._folder)
            self._kept_free = system.f_blocks * system.f_frsize // _KEPT_FREE
            if self._beside is not None and _same_disk(self._folder, self._beside[0]):
                self._kept_free += self._beside[1]
            return True
        except OSError as error:
            self._warn(error)
            return False

    def reserve(self, nbytes: int) -> Slot | None:
        """A place for `nbytes`; None if there is none now."""
        if not self.usable:
            return None
        with self._lock:
            try:
                if self._file is None or self._file.end >= _FILE_BYTES:
                    opened = self._file = _File(self._folder)
                    self._files.append(opened)
                system = os.statvfs(self._folder)
            except OSError as error:
                self._fail(error)
                return None
            self._files = [file for file in self._files if file.is_open]
            unwritten = sum(file.unwritten for file in self._files)
            free = system.f_bavail * system.f_frsize - unwritten
            if free - nbytes < self._kept_free:
                return None
            return Slot(self, self._file, self._file.extend(nbytes), nbytes)

    def failed(self, error: OSError) -> None:
        """Nothing more is spilled, because something could not be written."""
        with self._lock:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if self._usable:
            self._warn(error)
        self._usable = False

    def _warn(self, error: OSError) -> None:
        _log.warning("nothing is spilled to SaveOptions.spill=%r: %s", self._folder, error)

    def close(self) -> None:
        """Ends all files; what is in them is not needed any more."""
        with self._lock:
            for file in self._files:
                file.close()
            self._file, self._files, self._usable = None, [], False


class Slot:
    """A place in a file.

    Arguments:
        files: what it is part of.
        file, offset, nbytes: where.
    """

    def __init__(self, files: SpillFiles, file: _File, offset: int, nbytes: int) -> None:
        self._files, self._file, self._offset, self.nbytes = files, file, offset, nbytes
        self._written = False
        self.digest = 0
        """Of what was written, by xxh3."""

    def write(self, data: Array) -> bool:
        """Writes contiguous memory of `nbytes`; false if that failed."""
        raw = data.reshape(-1).view(np.uint8)
        self.digest = xxhash.xxh3_64_intdigest(raw.data)
        try:
            done = 0
            while done < self.nbytes:
                piece = raw[done : done + _PIECE].data
                done += os.pwrite(self._file.number, piece, self._offset + done)
        except OSError as error:
            self._files.failed(error)
            return False
        self._written = True
        self._file.wrote(self.nbytes)
        return True

    def read(self, out: Array) -> None:
        """Reads it back into contiguous memory.

        Raises:
            StorageError: it is not what was written.
        """
        raw = out.reshape(-1).view(np.uint8)
        try:
            done = 0
            while done < self.nbytes:
                pieces = [raw[done : done + _PIECE].data]
                n = os.preadv(self._file.number, pieces, self._offset + done)
                if not n:
                    break
                done += n
        except OSError as error:
            raise StorageError(f"a spilled copy cannot be read: {error}") from error
        # The system reports lost writes only to those who wait for the disk.
        if xxhash.xxh3_64_intdigest(raw.data) != self.digest:
            raise StorageError("a spilled copy is damaged: the disk of SaveOptions.spill lost it")

    def free(self) -> None:
        """Gives the place back."""
        if not self._written:
            self._file.wrote(self.nbytes)
        self._file.leave()


class _File:
    """A file without a name, which ends when nothing in it is used."""

    def __init__(self, folder: str) -> None:
        made = tempfile.TemporaryFile(dir=folder, prefix="unickpt-spill-", buffering=0)  # noqa: SIM115
        self._made, self.number = made, made.fileno()
        self._lock = threading.Lock()
        self._used = 1  # also by those who may extend it
        self.end = self.unwritten = 0
        self.is_open = True

    def extend(self, nbytes: int) -> int:
        with self._lock:
            offset, self.end = self.end, self.end + nbytes
            self.unwritten += nbytes
            self._used += 1
            if self.end >= _FILE_BYTES:
                self._used -= 1  # it is not extended again
            return offset

    def wrote(self, nbytes: int) -> None:
        with self._lock:
            self.unwritten -= nbytes

    def leave(self) -> None:
        """Something in it is not used any more."""
        with self._lock:
            self._used -= 1
            if self._used:
                return
        self.close()

    def close(self) -> None:
        """Frees the disk, even if a forked process has the file."""
        with self._lock:
            if self.is_open:
                self.is_open = False
                with suppress(OSError), self._made:
                    os.ftruncate(self.number, 0)


def _same_disk(folder: str, other: str) -> bool:
    """Whether a folder is on the disk of another one, which may not exist yet."""
    parents = (path for path in (Path(other), *Path(other).absolute().parents) if path.exists())
    found = next(parents, None)
    return found is None or os.stat(folder).st_dev == os.stat(found).st_dev


def file_system_of(folder: str, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the file system that a folder is in, such as "ext4"; empty if that is unknown."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2:3] == [name]:
            return after.split()[0]
    return ""
