"""Files that are one pickle, without its arrays: large bytes stay where they are in the file."""

from __future__ import annotations

import pickle
import pickletools
from typing import Any

from unickpt.backends._files import pickles
from unickpt.backends._files.headers import Cursor
from unickpt.backends._files.pickle_objects import BadPickle, FileBytes, NotSupported, unread
from unickpt.backends._files.pickles import Constructors
from unickpt.errors import CheckpointCorrupt
from unickpt.extend import Files

MOST_PICKLE = 1 << 30
"""Bytes of a pickle in memory."""
_LARGE = 16 << 10  # bytes that stay in the file
# What is followed by its length, of so many bytes, and by bytes; of Python 2 in texts as well.
_BYTES = {pickle.BINBYTES: 4, pickle.BINBYTES8: 8, pickle.BYTEARRAY8: 8, pickle.BINSTRING: 4}
_OUTSIDE = (pickle.PERSID, pickle.BINPERSID)
_LENGTHS = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_ARGUMENTS = {
    op.code.encode("latin-1"): op.arg.n if op.arg else 0 for op in pickletools.opcodes
}  # fmt: skip
_TWO_LINES = (pickle.GLOBAL, pickle.INST)


class BarePickle:
    """A file that is one pickle.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        constructors: see `pickles.read`.

    Raises:
        CheckpointCorrupt: it is damaged.
        UnsupportedFormat: it has what unickpt does not read.
        Failed: the storage failed.
    """

    big_endian = False

    def __init__(self, files: Files, name: str, constructors: Constructors) -> None:
        self._files, self._name = files, name
        cursor = Cursor(files, name)
        try:
            self._data = self._compacted(cursor)
            self.value, _ = pickles.read(self._data, constructors, self._left)
        except BadPickle as error:
            raise unread(error, f"{files.location}: {name}", "its pickle") from error
        if not cursor.at_end():
            raise files.unsupported(
                f"{name} has more behind its pickle, such as another: load it with pickle if you "
                "trust it, and save its arrays"
            )
        self.pickle_size = cursor.at

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return self._files.damaged(f"{self._name}: {reason}")

    def pickle(self) -> tuple[bytes, int]:
        """The bytes that contain the pickle, and where it begins in them."""
        return self._data, 0

    def persistent(self, persistent_id: Any) -> Any:
        """What a persistent id stands for in a pickle that is described."""
        return self._left(persistent_id)

    def offset(self, torch_storage: Any) -> int:
        """Where a storage begins; a bare pickle has none."""
        raise self.damaged("it refers to data outside of it")

    def _left(self, persistent_id: Any) -> FileBytes:
        """The bytes for which `_compacted` has put a persistent id."""
        offset, size, is_text = persistent_id

        def read() -> bytes | str:
            data = self._files.read(self._name, offset, size)
            return data.decode("latin-1") if is_text else data

        return FileBytes(offset, size, read)

    def _compacted(self, cursor: Cursor) -> bytes:
        """The pickle with persistent ids in the place of large bytes: where these are."""
        out = bytearray()
        code = b""
        while code != pickle.STOP:
            if len(out) > MOST_PICKLE:
                raise self.damaged(f"its pickle has more than {MOST_PICKLE} bytes besides arrays")
            code = cursor.take(1)
            if code in _OUTSIDE:
                raise NotSupported("it refers to data outside of it")
            out += self._bytes(cursor, code) if code in _BYTES else self._other(cursor, code)
        return bytes(out)

    def _bytes(self, cursor: Cursor, code: bytes) -> bytes:
        head = cursor.take(_BYTES[code])
        size = int.from_bytes(head, "little")
        if size < _LARGE:
            return code + head + cursor.take(size)
        place = b"".join(
            pickle.LONG1 + b"\x0a" + number.to_bytes(10, "little")
            for number in (cursor.skip(size), size, code == pickle.BINSTRING)
        )
        return place + pickle.TUPLE3 + pickle.BINPERSID

    def _other(self, cursor: Cursor, code: bytes) -> bytes:
        size = _ARGUMENTS.get(code)
        if size is None:
            raise BadPickle(f"unknown opcode {code!r} at byte {cursor.at - 1}")
        if size == pickletools.UP_TO_NEWLINE:
            lines = (cursor.line(MOST_PICKLE) for _ in range(2 if code in _TWO_LINES else 1))
            return code + b"".join(lines)
        if size >= 0:
            return code + cursor.take(size)
        head = cursor.take(_LENGTHS[size])
        count = int.from_bytes(head, "little")
        if count > MOST_PICKLE:
            raise BadPickle(f"a value of {count} bytes at byte {cursor.at}")
        return code + head + cursor.take(count)
