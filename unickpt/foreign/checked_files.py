"""Files that are compared with their checksums while they are read, whoever reads them."""

from __future__ import annotations

from collections.abc import Iterator

from unickpt.foreign.crc32 import Parts, Range
from unickpt.foreign.files import Files
from unickpt.storage.errors import Damaged

_AT_ONCE = 16 << 20


class CheckedFiles(Files):
    """Files, for one piece of work; each range that has a checksum is compared with it as soon as
    all of it has been read.

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
        for found in self.summed.within(file, offset, offset + len(data)):
            parts = self._parts.setdefault(found, Parts(found))
            if parts.differs(offset, data):
                raise Damaged(f"{file}: {found.name} does not match its checksum")

    def begun(self, index: int = 0, count: int = 1) -> Iterator[Range]:
        """The ranges of which only some has been read.

        Arguments:
            index, count: which process this is of how many that share the work: of what several
                read, one is to complete it.
        """
        for number, found in enumerate(self.summed):
            parts = self._parts.get(found)
            if parts is not None and not parts.gaps:
                continue
            if count == 1:
                is_own = parts is not None
            else:  # of some nobody reads the beginning; others are only known to who read them
                has_begin = parts is not None and parts.gaps[0][0] > found.begin
                is_own = has_begin or number % count == index
            if is_own:
                yield found

    def complete(self, found: Range) -> None:
        """Reads what has not been read of a range.

        Raises:
            Damaged: it does not match its checksum.
            Failed: the storage failed.
        """
        parts = self._parts.setdefault(found, Parts(found))
        for begin, end in list(parts.gaps):
            for at in range(begin, end, _AT_ONCE):
                self.read(found.file, at, min(_AT_ONCE, end - at))
