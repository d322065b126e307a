"""The members of a zip file that are stored without compression, as ranges of the file.

Python's `zipfile` reads whole members, and refuses those whose checksum was not computed, as torch
may write them. Source: APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass

from unickpt.errors import CheckpointCorrupt
from unickpt.foreign.files import Files

_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_TAIL = 65_557  # the record at the end, with the longest comment
_SHORT_TAIL = 1024  # enough without a comment; has the directory, too, of a few members
_MOST_DIRECTORY = 1 << 30
STORED, DEFLATED = 0, 8


@dataclass(frozen=True)
class Member:
    """A file in a zip file.

    Arguments:
        name: its path there.
        method: how it is compressed; `STORED` if it is not.
        compressed, size: its bytes in the zip file, and without compression.
        header: where its local header begins in the file that contains the zip file.
        crc: the CRC-32 of its bytes without compression; 0 if none was computed.
    """

    name: str
    method: int
    compressed: int
    size: int
    header: int
    crc: int = 0


class ZipFile:
    """A zip file, which may be a part of a larger file.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        begin, length: where in the file the zip file is; by default all of it.

    Raises:
        CheckpointCorrupt: it is not a zip file, or damaged.
        Failed: the storage failed.
    """

    def __init__(self, files: Files, name: str, begin: int = 0, length: int | None = None) -> None:
        self.files, self.name = files, name
        self._begin, self._length = begin, length
        try:
            self.members = self._directory()
        except (struct.error, UnicodeDecodeError, IndexError) as error:
            raise self.damaged(f"its zip directory is damaged: {error}") from error

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return CheckpointCorrupt(f"{self.files.location}: {self.name}: {reason}")

    def offset(self, member: Member) -> int:
        """Where the data of a member begins in the file; costs one small read.

        Raises:
            CheckpointCorrupt: its local header is damaged.
        """
        head = self.files.read(self.name, member.header, 30)
        if head[:4] != _LOCAL:
            raise self.damaged(f"{member.name} has no header at byte {member.header}")
        name, extra = struct.unpack("<HH", head[26:30])
        return member.header + 30 + int(name) + int(extra)

    def read(self, member: Member) -> bytes:
        """The bytes of a member without compression.

        Raises:
            CheckpointCorrupt: it is compressed, or the file ends before.
        """
        if member.method != STORED:
            raise self.damaged(f"{member.name} is compressed, so ranges of it cannot be read")
        data = self.files.read(self.name, self.offset(member), member.size)
        self.check(member, data)
        return data

    def check(self, member: Member, data: bytes) -> None:
        """Checks the bytes of a member, if its checksum was computed.

        Raises:
            CheckpointCorrupt: they are not those that were written.
        """
        if len(data) != member.size or (member.crc and zlib.crc32(data) != member.crc):
            raise self.damaged(f"{member.name} does not match its checksum")

    def _directory(self) -> dict[str, Member]:
        tail, end = self._tail(_SHORT_TAIL)
        at = tail.rfind(_END)
        if at < 20 or tail[at + 20 : at + 22] != b"\0\0" or at + 22 != len(tail):
            tail, end = self._tail(_TAIL)
            at = tail.rfind(_END)
        if at < 0:
            raise self.damaged("it is not a zip file, or incomplete")
        count, size, start = struct.unpack("<10xHII2x", tail[at : at + 22])
        start_of_end = end - len(tail) + at
        locator = tail[at - 20 : at] if at >= 20 else b""
        if locator[:4] == _LOCATOR64:
            (record,) = struct.unpack("<8xQ4x", locator)
            head = self.files.read(self.name, self._begin + record, 56)
            if head[:4] != _END64:
                raise self.damaged("its zip64 record is missing")
            count, size, start = struct.unpack("<32xQQQ", head)
        if size > _MOST_DIRECTORY or start + size > start_of_end - self._begin:
            raise self.damaged("its zip directory lies outside of the file")
        in_tail = self._begin + start - (end - len(tail))
        if in_tail >= 0 and len(tail) <= _SHORT_TAIL:
            data = tail[in_tail : in_tail + size]
        else:
            data = self.files.read(self.name, self._begin + start, size)
        return self._entries(data, count)

    def _tail(self, most: int) -> tuple[bytes, int]:
        """The last bytes, at most so many, and where they end in the file."""
        if self._length is not None:
            most = min(most, self._length)
            end = self._begin + self._length
            return self.files.read(self.name, end - most, most), end
        tail = self.files.tail(self.name, most)
        size = self.files.size(self.name)
        if size is not None:
            return tail, size
        # The storage does not tell the size; the directory ends where the record begins.
        at = tail.rfind(_END)
        size_of, start = struct.unpack("<12xII", tail[at : at + 20]) if at >= 0 else (0, 0)
        if at >= 20 and tail[at - 20 : at - 16] == _LOCATOR64:
            (record,) = struct.unpack("<8xQ4x", tail[at - 20 : at])
            return tail, record + 56 + 20 + len(tail) - at
        return tail, start + size_of + len(tail) - at

    def _entries(self, data: bytes, count: int) -> dict[str, Member]:
        members: dict[str, Member] = {}
        at = 0
        while at < len(data) and len(members) < count:
            if data[at : at + 4] != _ENTRY:
                raise self.damaged("its zip directory is damaged")
            (flags, method, crc, compressed, size, name_length, extra_length, comment, header) = (
                struct.unpack("<8xHH4xIIIHHH8xI", data[at : at + 46])
            )
            name = data[at + 46 : at + 46 + name_length].decode()
            extra = data[at + 46 + name_length : at + 46 + name_length + extra_length]
            size, compressed, header = _zip64(extra, size, compressed, header)
            if name in members:
                raise self.damaged(f"{name} occurs twice")
            if flags & 1:
                raise self.damaged(f"{name} is encrypted")
            if method == STORED and compressed != size:
                raise self.damaged(f"{name} has {compressed} bytes, {size} expected")
            members[name] = Member(name, method, compressed, size, self._begin + header, crc)
            at += 46 + name_length + extra_length + comment
        if len(members) != count:
            raise self.damaged(f"{count} members expected, {len(members)} found")
        return members


def _zip64(extra: bytes, size: int, compressed: int, header: int) -> tuple[int, int, int]:
    """The numbers of an entry that take more than 32 bits."""
    wide: list[int] = []
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack("<HH", extra[at : at + 4])
        if kind == 1:
            body = extra[at + 4 : at + 4 + length]
            wide = [x for (x,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        at += 4 + length
    found = [
        wide.pop(0) if number == 0xFFFFFFFF and wide else number
        for number in (size, compressed, header)
    ]
    return found[0], found[1], found[2]
