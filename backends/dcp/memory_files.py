"""Files of which some bytes are in memory; for those who parse them."""

from __future__ import annotations

from collections.abc import Iterable

from unickpt.foreign.files import Files
from unickpt.storage.errors import Damaged

_ZIP_END = b"PK\x05\x06"


class Known(Files):
    """Files of which some bytes are in memory already.

    Arguments:
        files: the others.
        known: offsets and bytes, all of the one file that is parsed.
    """

    def __init__(self, files: Files, known: Iterable[tuple[int, bytes]]) -> None:
        super().__init__(files.location, files.single is not None)
        self._files, self._all = files, list(known)
        self.summed = files.summed

    def read(self, file: str, offset: int, length: int) -> bytes:
        for begin, data in self._all:
            if begin <= offset and offset + length <= begin + len(data):
                return data[offset - begin : offset - begin + length]
        begin, data = self._all[-1]
        if offset + length == begin + len(data) and _ZIP_END in data:
            # Who looks for the end of a zip asks for more than the end has, except for comments.
            return bytes(length - len(data)) + data
        return self._files.read(file, offset, length)


class Rest(Files):
    """Files without their first bytes.

    Arguments:
        files: the whole ones.
        begin: how many bytes are missing.
    """

    def __init__(self, files: Files, begin: int) -> None:
        super().__init__(files.location, files.single is not None)
        self._files, self._begin = files, begin

    def size(self, file: str) -> int | None:
        size = self._files.size(file)
        return None if size is None else size - self._begin

    def read(self, file: str, offset: int, length: int) -> bytes:
        return self._files.read(file, self._begin + offset, length)


class InMemory(Files):
    """One file, whose bytes are all in memory; under any name.

    Arguments:
        files: of the checkpoint, for messages.
        data: the bytes.
    """

    def __init__(self, files: Files, data: bytes) -> None:
        super().__init__(files.location, files.single is not None)
        self._data = data

    def size(self, file: str) -> int | None:
        return len(self._data)

    def read(self, file: str, offset: int, length: int) -> bytes:
        if not 0 <= offset <= offset + length <= len(self._data):
            raise Damaged(f"{file} ends before byte {offset + length} of its contents")
        return self._data[offset : offset + length]

    def tail(self, file: str, most: int) -> bytes:
        return self._data[-most:]

    def read_into(self, file: str, offset: int, out: memoryview) -> None:
        out[:] = self.read(file, offset, len(out))
