"""The members of a zip file that are stored without compression, as ranges of the file.

Python's `zipfile` reads whole members, and refuses those whose checksum was not computed, as torch
may write them. Source: APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3 (zip64).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from unickpt.errors import CheckpointCorrupt
from unickpt.extend import ChecksummedRange, Files

_END, _END64, _LOCATOR64 = b"PK\x05\x06", b"PK\x06\x06", b"PK\x06\x07"
_ENTRY, _LOCAL = b"PK\x01\x02", b"PK\x03\x04"
_LOCAL_BYTES = 30  # before the name
_SIZES_FOLLOW = 8  # a flag: the local header has no sizes
_WIDE = 0xFFFFFFFF
_STEP = 1 << 20  # bytes at a time
_SPARE = 1000  # how many bytes a short compressed beginning can exceed its decompressed size
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
        limit: where the next member begins, or the directory; its bytes end before.
    """

    name: str
    method: int
    compressed: int
    size: int
    header: int
    crc: int = 0
    limit: int = 1 << 63


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
        return self.files.damaged(f"{self.name}: {reason}")

    def offset(self, member: Member) -> int:
        """Where the data of a member begins in the file; costs one small read.

        Raises:
            CheckpointCorrupt: its local header is damaged, or is not of this member.
        """
        encoded = member.name.encode()
        head = self.files.read(self.name, member.header, _LOCAL_BYTES + len(encoded))
        if head[:4] != _LOCAL:
            raise self.damaged(f"{member.name} has no header at byte {member.header}")
        flags, method, crc, compressed, size, name, extra = struct.unpack(
            "<6xHH4xIIIHH", head[:_LOCAL_BYTES]
        )
        expected = (member.crc, member.compressed, member.size)
        header_facts = (crc, compressed, size)
        # Sizes unknown at the time of writing follow the data; those of more than 32 bits are
        # elsewhere.
        differs = not flags & _SIZES_FOLLOW and any(
            t not in (e, _WIDE) for t, e in zip(header_facts, expected, strict=True)
        )
        if differs or (method, name, head[_LOCAL_BYTES:]) != (member.method, len(encoded), encoded):
            raise self.damaged(
                f"the header of {member.name} at byte {member.header} contradicts the zip directory"
            )
        begin = member.header + _LOCAL_BYTES + int(name) + int(extra)
        if begin + member.compressed > member.limit:
            raise self.damaged(f"{member.name} overlaps what lies behind it")
        return begin

    def summed(self, member: Member, begin: int, head: bytes = b"") -> None:
        """Registers an uncompressed member that is read in ranges: a full read through
        `CheckedFiles` compares it with its checksum.

        Arguments:
            member: the member.
            begin: its `offset`.
            head: its first bytes, which were read already.
        """
        first, end = begin + len(head), begin + member.size
        if member.crc and first < end:
            facts = member.crc, zlib.crc32(head), member.name
            self.files.summed.add(ChecksummedRange(self.name, first, end, *facts))

    def inflate(self, member: Member, out: memoryview, skipped: int) -> None:
        """Decompresses a member into memory, piece by piece, and checks it.

        Arguments:
            member: the member.
            out: receives it, but its first bytes.
            skipped: how many these are.

        Raises:
            CheckpointCorrupt: it cannot be decompressed, or its bytes are not those that were
                written.
            Failed: the storage failed.
        """
        stream, crc, done, begin = zlib.decompressobj(-15), 0, -skipped, self.offset(member)
        try:
            for position in range(0, member.compressed, _STEP):
                count = min(_STEP, member.compressed - position)
                data = self.files.read(self.name, begin + position, count)
                while not stream.eof and data and done <= len(out):
                    most = -done if done < 0 else min(_STEP, len(out) - done + 1)
                    chunk = stream.decompress(data, most)
                    if done >= 0:
                        out[done : done + len(chunk)] = chunk[: len(out) - done]
                    crc, done = zlib.crc32(chunk, crc), done + len(chunk)
                    data = stream.unconsumed_tail
        except zlib.error as error:
            raise self.damaged(f"{member.name} cannot be decompressed: {error}") from error
        self._compare(member, crc, skipped + done if stream.eof else -1)

    def first(self, member: Member, most: int) -> bytes:
        """The first bytes of a member in memory, at most so many; checked if these are all.

        Raises:
            CheckpointCorrupt: they are not those that were written, or the file ends before.
        """
        count = member.compressed
        if most < member.size:
            count = min(count, most + _SPARE if member.method == DEFLATED else most)
        data = self.files.read(self.name, self.offset(member), count)
        if member.method == DEFLATED:
            try:
                data = zlib.decompressobj(-15).decompress(data, max(1, most))
            except zlib.error as error:
                raise self.damaged(f"{member.name} cannot be decompressed: {error}") from error
        if most >= member.size:
            self._compare(member, zlib.crc32(data), len(data))
        return data

    def read(self, member: Member) -> bytes:
        """The bytes of a member without compression.

        Raises:
            CheckpointCorrupt: it is compressed, or the file ends before.
        """
        if member.method != STORED:
            raise self.damaged(f"{member.name} is compressed, so ranges of it cannot be read")
        return self.first(member, member.size)

    def _compare(self, member: Member, crc: int, size: int) -> None:
        if size != member.size or (member.crc and crc != member.crc):
            raise self.damaged(f"{member.name} does not match its checksum")

    def _directory(self) -> dict[str, Member]:
        tail, end = self._tail(_SHORT_TAIL)
        record_offset = _end_record(tail)
        if record_offset < 20:
            tail, end = self._tail(_TAIL)
            record_offset = _end_record(tail)
        if record_offset < 0:
            raise self.damaged("it is not a zip file, or incomplete")
        numbers: Sequence[int] = struct.unpack_from("<4xHHHHII", tail, record_offset)
        end_of_entries = end - len(tail) + record_offset - self._begin
        if record_offset >= 20 and tail[record_offset - 20 :].startswith(_LOCATOR64):
            numbers, end_of_entries = self._wide_record(
                numbers, tail[record_offset - 20 : record_offset], end_of_entries - 20
            )
        *disks, count_in_file, count, size, start = numbers
        if any(disks) or count_in_file != count:
            raise self.damaged(
                f"its zip directory is said to have {count} members, {count_in_file} of them in "
                "this file"
            )
        if size > _MOST_DIRECTORY or start + size != end_of_entries:
            raise self.damaged(
                f"its zip directory is said to have {size} bytes from byte {start}, and ends at "
                f"byte {end_of_entries}"
            )
        in_tail = self._begin + start - (end - len(tail))
        if in_tail >= 0 and len(tail) <= _SHORT_TAIL:
            data = tail[in_tail : in_tail + size]
        else:
            data = self.files.read(self.name, self._begin + start, size)
        return self._bounded(self._entries(data, count), self._begin + start)

    def _wide_record(
        self, numbers: Sequence[int], locator: bytes, end: int
    ) -> tuple[Sequence[int], int]:
        """The numbers of a directory of more than 32 bits, and where it ends."""
        disk, record, _ = struct.unpack("<4xIQI", locator)
        head = self.files.read(self.name, self._begin + record, 56)
        if head[:4] != _END64 or disk:
            raise self.damaged("its zip64 record is missing")
        length, *wide = struct.unpack("<4xQ4xIIQQQQ", head)
        most = (0xFFFF,) * 4 + (_WIDE,) * 2
        if record + 12 + length != end or any(
            t not in (w, m) for t, w, m in zip(numbers, wide, most, strict=True)
        ):
            raise self.damaged("its zip64 record contradicts the record at its end")
        return wide, record

    def _bounded(self, members: dict[str, Member], end: int) -> dict[str, Member]:
        """Members that end where the next one begins, at the latest, the last at `end`."""
        limits = dict[str, int]()
        for member in sorted(members.values(), key=lambda m: m.header, reverse=True):
            if member.header + _LOCAL_BYTES + member.compressed > end or member.header < 0:
                raise self.damaged(f"{member.name} overlaps what lies behind it")
            limits[member.name] = end
            end = member.header
        return {name: replace(member, limit=limits[name]) for name, member in members.items()}

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
        record_offset = _end_record(tail)
        end = 0
        if record_offset >= 20 and tail[record_offset - 20 :].startswith(_LOCATOR64):
            end = struct.unpack_from("<8xQ", tail, record_offset - 20)[0] + 56 + 20
        elif record_offset >= 0:
            end = sum(struct.unpack_from("<12xII", tail, record_offset))
        return tail, end + len(tail) - record_offset

    def _entries(self, data: bytes, count: int) -> dict[str, Member]:
        members: dict[str, Member] = {}
        offset = 0
        while offset < len(data):
            if data[offset : offset + 4] != _ENTRY:
                raise self.damaged("its zip directory is damaged")
            flags, method, crc, compressed, size, *lengths, header = struct.unpack_from(
                "<8xHH4xIIIHHH8xI", data, offset
            )
            ends = list(accumulate(lengths, initial=offset + 46))  # of the name, and so on
            name, extra = data[ends[0] : ends[1]].decode(), data[ends[1] : ends[2]]
            size, compressed, header = _zip64(extra, size, compressed, header)
            if name in members:
                raise self.damaged(f"{name} occurs twice")
            if flags & 1:
                raise self.damaged(f"{name} is encrypted")
            if method == STORED and compressed != size:
                raise self.damaged(f"{name} has {compressed} bytes, {size} expected")
            members[name] = Member(name, method, compressed, size, self._begin + header, crc)
            offset = ends[3]
        if len(members) != count:
            raise self.damaged(f"{count} members expected, {len(members)} found")
        return members


def _end_record(tail: bytes) -> int:
    """Where the record at the end of a zip file begins, whose comment ends it; -1 if nowhere."""
    offset = tail.rfind(_END, 0, max(0, len(tail) - 18))
    while offset >= 0:
        if int.from_bytes(tail[offset + 20 : offset + 22], "little") == len(tail) - offset - 22:
            return offset
        offset = tail.rfind(_END, 0, offset)
    return -1


def _zip64(extra: bytes, size: int, compressed: int, header: int) -> tuple[int, int, int]:
    """The numbers of an entry that take more than 32 bits."""
    wide: list[int] = []
    offset = 0
    while offset + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, offset)
        if kind == 1:
            body = extra[offset + 4 : offset + 4 + length]
            wide = [x for (x,) in struct.iter_unpack("<Q", body[: len(body) // 8 * 8])]
        offset += 4 + length
    size, compressed, header = (
        wide.pop(0) if number == _WIDE and wide else number for number in (size, compressed, header)
    )
    return size, compressed, header
