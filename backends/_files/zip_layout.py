"""Zip files of stored members, planned before the bytes of their arrays are known.

Source: APPNOTE.TXT of PKWARE, sections 4.3 and 4.5.3 (zip64); torch pads headers as its
caffe2/serialize/inline_container.cc does.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from unickpt.errors import UnsupportedLeaf
from unickpt.extend import Box, Data, combined_crc32, quoted

ALIGN = 64
_WIDE, _MOST_NAME = 0xFFFFFFFF, 0xFFFF
_DATE = 0x21  # 1980-01-01: files do not depend on the time
_UNICODE = 0x800


@dataclass(frozen=True)
class Content:
    """A member of a zip file: bytes that are known, and then the elements of an array.

    Arguments:
        name: its path.
        text: the bytes.
        array: the name of the array; empty if there is none.
        box: its elements.
        nbytes: of these.
    """

    name: str
    text: bytes = b""
    array: str = ""
    box: Box | None = None
    nbytes: int = 0

    @property
    def size(self) -> int:
        return len(self.text) + self.nbytes


class ZipLayout:
    """Where everything is in a zip file.

    Arguments:
        contents: its members.
        begin: where it begins in the file that contains it.
    """

    def __init__(self, contents: Sequence[Content], begin: int = 0) -> None:
        self._contents, self._begin = contents, begin
        self._headers: list[int] = []
        self.texts: dict[int, bytes] = {}
        """Known bytes, by their offsets in the file."""
        self.data: list[Data] = []
        """Elements of arrays."""
        offset = 0
        for content in contents:
            if len(content.name.encode()) > _MOST_NAME:
                raise UnsupportedLeaf(
                    f"{quoted(content.name)}: a name in a zip file has at most {_MOST_NAME} bytes; "
                    "give it another by a rule"
                )
            self._headers.append(offset)
            offset += len(_local(content, offset, 0))
            if content.text:
                self.texts[begin + offset] = content.text
            if content.nbytes and content.box is not None:
                start = begin + offset + len(content.text)
                self.data.append(Data(start, content.array, content.box))
            offset += content.size
        self._directory = offset
        self.size = offset + len(self._ending([0] * len(contents)))
        """Bytes of the zip file."""

    def ending(self, sums: Sequence[int]) -> Mapping[int, bytes]:
        """The headers and the directory, by their offsets in the file.

        Arguments:
            sums: the CRC-32 of each of `data`.
        """
        left = list(sums)
        every = [
            combined_crc32(zlib.crc32(c.text), left.pop(0), c.nbytes)
            if c.nbytes
            else zlib.crc32(c.text)
            for c in self._contents
        ]
        headers = {
            self._begin + offset: _local(content, offset, crc)
            for offset, content, crc in zip(self._headers, self._contents, every, strict=True)
        }
        return headers | {self._begin + self._directory: self._ending(every)}

    def _ending(self, sums: Sequence[int]) -> bytes:
        """The central directory and the records at the end."""
        entries = b"".join(
            _entry(content, offset, crc)
            for content, offset, crc in zip(self._contents, self._headers, sums, strict=True)
        )
        count, start = len(self._contents), self._directory
        wide = b""
        if count >= 0xFFFF or start >= _WIDE or len(entries) >= _WIDE:
            numbers = (count, count, len(entries), start)
            wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, *numbers)
            wide += struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(entries), 1)
        few, near = min(count, 0xFFFF), min(start, _WIDE)
        end = struct.pack(
            "<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, min(len(entries), _WIDE), near, 0
        )
        return entries + wide + end


def _local(content: Content, offset: int, crc: int) -> bytes:
    """The header before a member, whose data begins at a multiple of `ALIGN`.

    Arguments:
        content: the member.
        offset: where the header begins in the zip file.
        crc: the CRC-32 of the member.
    """
    name = content.name.encode()
    wide = content.size >= _WIDE
    extra = struct.pack("<HHQQ", 1, 16, content.size, content.size) if wide else b""
    padding = -(offset + 30 + len(name) + len(extra) + 4) % ALIGN
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    size = min(content.size, _WIDE)
    head = struct.pack(
        "<4sHHHHHIIIHH",
        *(b"PK\x03\x04", 45 if wide else 20, _flags(name), 0, 0, _DATE, crc, size, size),
        *(len(name), len(extra)),
    )
    return head + name + extra


def _entry(content: Content, offset: int, crc: int) -> bytes:
    """The entry of a member in the central directory."""
    name = content.name.encode()
    numbers = [n for n in (content.size, content.size, offset) if n >= _WIDE]
    extra = struct.pack("<HH", 1, 8 * len(numbers)) if numbers else b""
    extra += b"".join(struct.pack("<Q", n) for n in numbers)
    version, size = 45 if numbers else 20, min(content.size, _WIDE)
    head = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", version, version, _flags(name), 0, 0, _DATE, crc, size, size),
        *(len(name), len(extra), 0, 0, 0, 0, min(offset, _WIDE)),
    )
    return head + name + extra


def _flags(name: bytes) -> int:
    return 0 if name.isascii() else _UNICODE
