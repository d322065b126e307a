"""The files of another system's checkpoint: names, sizes and ranges of bytes, in any storage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING

from unickpt.errors import CheckpointCorrupt, UnsupportedFormat
from unickpt.format.crc32 import ChecksummedRanges, Parts
from unickpt.storage import paths, regular_files
from unickpt.storage.errors import Damaged
from unickpt.storage.locations import Location, folders_with
from unickpt.storage.ocdbt import MANIFEST
from unickpt.storage.regular_files import RegularFiles
from unickpt.storage.tensorstore_calls import KvStore

if TYPE_CHECKING:
    from unickpt.format.crc32 import Range

_MOST = 1 << 62  # bytes of a file
_HEAD, _MOST_TEXT = 512, 1000
_AT_ONCE = 16 << 20


class Files:
    """The files below a location, or the single file at it. Its methods are called from several
    threads.

    Only regular files are opened, and only in the location: symbolic links are followed as
    `regular_files.RegularFiles` says. The location itself may be a link.

    Arguments:
        location: the folder; or the file, if it is one.
        is_file: whether the location is a file. Only that file is listed then; others in its folder
            can be read, such as those that it names.
    """

    def __init__(self, location: Location, is_file: bool = False) -> None:
        self.location = location
        above, _, name = location.path.rstrip("/").rpartition("/")
        self.single = name if is_file else None
        """The name of the file at the location; None for a folder."""
        self._local: RegularFiles | None = None
        if location.is_local:  # the file that the user gave may be a link to anywhere
            folder = f"{above}/" if is_file else location.path
            self._local = RegularFiles(folder, self.single)
        self.heads: dict[str, bytes] = {}
        """Cached results of `head`, by file."""
        self.summed = ChecksummedRanges()
        """The ranges of the files that have a checksum; the parser of a file adds them."""

    @cached_property
    def _store(self) -> KvStore:
        folder = self.location if self.single is None else self.location.parent
        assert folder is not None, "only a local file has no folder"
        return folder.store(paths.context())

    @property
    def _folder(self) -> str | None:
        return None if self._local is None else self._local.folder

    @cached_property
    def here(self) -> list[str]:
        """The files directly in the location, ascending.

        Raises:
            Failed: the storage failed.
        """
        if self.single is not None:
            return [self.single]
        if self._folder is None:
            return [name for name in self.names if "/" not in name]
        with regular_files.system_calls():
            try:
                with os.scandir(self._folder) as entries:
                    return sorted(entry.name for entry in entries if not _is_folder(entry))
            except (FileNotFoundError, NotADirectoryError):
                return []

    @cached_property
    def names(self) -> list[str]:
        """All files, as paths below the location, ascending.

        Raises:
            Failed: the storage failed.
        """
        if self.single is not None:
            return [self.single]
        if self._folder is None:
            return sorted(key.decode(errors="replace") for key in self._store.list().result())
        names = []
        with regular_files.system_calls():
            for folder, _, files in os.walk(self._folder, followlinks=False):
                below = os.path.relpath(folder, self._folder)
                names += [name if below == "." else f"{below}/{name}" for name in files]
        return sorted(names)

    def exists(self, file: str) -> bool:
        """Whether there is a file; cheaper than `names`.

        Raises:
            Failed: the storage failed.
        """
        if self.single is not None:
            return file == self.single
        if self._folder is not None:
            return os.path.isfile(self._folder + file)
        return bool(self._store.read(file, byte_range=slice(0, 0)).result().state == "value")

    @cached_property
    def databases(self) -> list[str]:
        """The folders directly in the location that hold a database, as a checkpoint of unickpt's
        own format does.

        Raises:
            Failed: the storage failed.
        """
        if self.single is not None:
            return []
        if self._folder is None:
            split = (name.split("/") for name in self.names)
            return [parts[0] for parts in split if parts[1:] == [MANIFEST]]
        folders = folders_with(self.location, MANIFEST, paths.context())
        return sorted(name for name in folders if name != ".")

    def head(self, file: str) -> bytes:
        """The first bytes of a file, enough to tell its format; all if it is short. Raises as
        `read`."""
        if file not in self.heads:
            size = self.size(file)
            try:
                self.heads[file] = self.read(file, 0, _HEAD if size is None else min(size, _HEAD))
            except Damaged:
                if size is not None:
                    raise
                self.heads[file] = self.whole(file)  # it is shorter
        return self.heads[file]

    def size(self, file: str) -> int | None:
        """The size of a file in bytes; None if the storage does not report it.

        Raises:
            Damaged: it is missing, as its `errno` shows, or no regular file.
            Failed: the storage failed.
        """
        return None if self._local is None else self._local.size(file)

    def total(self, names: Iterable[str]) -> int | None:
        """The bytes of the given files together, 0 for those that are missing or no regular files;
        None if the storage does not report them.

        Raises:
            Failed: the storage failed.
        """
        if self._folder is None:
            return None
        total = 0
        for name in names:
            with suppress(Damaged):
                total += self.size(name) or 0
        return total

    def read(self, file: str, offset: int, length: int) -> bytes:
        """Bytes of a file.

        Raises:
            Damaged: it is missing, no regular file, or too short.
            Failed: the storage failed.
        """
        if not 0 <= offset <= offset + length < _MOST:
            raise Damaged(f"{self.location.url}{file} has no bytes {offset} to {offset + length}")
        if self._folder is None:
            return self._fetch(file, slice(offset, offset + length))
        size = self.size(file) or 0
        if offset + length > size:  # before memory is allocated
            raise Damaged(f"{self._folder + file} has {size} bytes, {offset + length} expected")
        out = bytearray(length)
        self.read_into(file, offset, memoryview(out))
        return bytes(out)

    def whole(self, file: str) -> bytes:
        """All bytes of a file, even if the storage does not report its size. Raises as `read`."""
        size = self.size(file)
        return self._fetch(file, slice(None)) if size is None else self.read(file, 0, size)

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for files that are damaged, or do not fit each other."""
        return CheckpointCorrupt(f"{self.location}: {reason}")

    def incomplete(self, reason: str) -> CheckpointCorrupt:
        """The error for a file, or a part of one, that is missing."""
        return self.damaged(f"{reason}; was the folder copied as a whole?")

    def unsupported(self, reason: str) -> UnsupportedFormat:
        """The error for content that is not read."""
        return UnsupportedFormat(f"{self.location}: {reason}")

    def text(self, file: str) -> str:
        """The text of a small file, such as the name of the latest step. Raises as `read`."""
        return self.tail(file, _MOST_TEXT).decode(errors="replace").strip()

    def tail(self, file: str, most: int) -> bytes:
        """The last bytes of a file, at most so many. Raises as `read`."""
        if self._folder is None:
            try:
                return self._fetch(file, slice(-most, None))
            except Damaged as error:
                if error.status != "OUT_OF_RANGE":
                    raise
                return self._fetch(file, slice(0, None))  # it is shorter
        size = self.size(file) or 0
        return self.read(file, max(0, size - most), min(most, size))

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        """Reads bytes of a file into memory. Raises as `read`."""
        if self._local is None:
            out[:] = self._fetch(file, slice(offset, offset + len(out)))
            return
        path = self._local.folder + file
        with self._local.opened(file) as handle, regular_files.system_calls("read", path):
            while out:
                count = os.preadv(handle, [out], offset)
                if count == 0:
                    raise Damaged(f"{path} ends at byte {offset}")
                offset, out = offset + count, out[count:]

    def _fetch(self, file: str, part: slice) -> bytes:
        read = self._store.read(file, byte_range=part).result()
        if read.state != "value":
            raise Damaged(f"no file {self.location.url}{file}", errno.ENOENT)
        data: bytes = read.value
        if part.stop is not None and len(data) != part.stop - part.start:
            raise Damaged(f"{self.location.url}{file} ends before byte {part.stop}")
        return data


class CheckedFiles(Files):
    """Files, for one piece of work; compares each range that has a checksum as soon as all of it
    has been read.

    Arguments:
        files: the others.
    """

    def __init__(self, files: Files) -> None:
        self.__dict__.update(files.__dict__)
        self._files = files
        self._parts: dict[Range, Parts] = {}

    def size(self, file: str) -> int | None:
        return self._files.size(file)

    def tail(self, file: str, most: int) -> bytes:
        return self._files.tail(file, most)

    def read(self, file: str, offset: int, length: int) -> bytes:
        data = self._files.read(file, offset, length)
        self._compare(file, offset, memoryview(data))
        return data

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        self._files.read_into(file, offset, out)
        self._compare(file, offset, out)

    def _compare(self, file: str, offset: int, data: memoryview) -> None:
        for range_ in self.summed.within(file, offset, offset + len(data)):
            parts = self._parts.setdefault(range_, Parts(range_))
            if parts.differs(offset, data):
                raise Damaged(f"{file}: {range_.name} does not match its checksum")

    def begun(self, index: int = 0, count: int = 1) -> Iterator[Range]:
        """The ranges that have been read in part.

        Arguments:
            index, count: this process's number, and how many processes share the work; a range
                that several of them read is completed by one.
        """
        for number, range_ in enumerate(self.summed):
            parts = self._parts.get(range_)
            if parts is not None and not parts.gaps:
                continue
            if count == 1:
                is_own = parts is not None
            else:  # no process may have read its beginning; not all processes know all ranges
                has_begin = parts is not None and parts.gaps[0][0] > range_.begin
                is_own = has_begin or number % count == index
            if is_own:
                yield range_

    def complete(self, requested: Range) -> None:
        """Reads the unread bytes of a range.

        Raises:
            Damaged: it does not match its checksum.
            Failed: the storage failed.
        """
        parts = self._parts.setdefault(requested, Parts(requested))
        for begin, end in list(parts.gaps):
            for offset in range(begin, end, _AT_ONCE):
                self.read(requested.file, offset, min(_AT_ONCE, end - offset))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself, or to a place that this user may not access
        return False
