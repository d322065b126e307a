"""Members of zip files as ranges of a file."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt import CheckpointCorrupt
from unickpt.backends._files.zip_files import STORED, ZipFile
from unickpt.format.files import Files
from unickpt.storage.errors import Failed
from unickpt.storage.paths import resolve

CONTENT = {"a/data": b"first", "a/é": b"x" * 1000, "empty": b""}


def packed(method: int = zipfile.ZIP_STORED, comment: bytes = b"", zip64: bool = False) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.comment = comment
        for name, data in CONTENT.items():
            with archive.open(name, "w", force_zip64=zip64) as member:
                member.write(data)
    return out.getvalue()


def opened(folder: Path, data: bytes, begin: int = 0, length: int | None = None) -> ZipFile:
    (folder / "x.zip").write_bytes(data)
    return ZipFile(Files(resolve(folder)), "x.zip", begin, length)


def contents(found: ZipFile) -> dict[str, bytes]:
    return {name: found.read(member) for name, member in found.members.items()}


@pytest.mark.parametrize("comment", [b"", b"a comment", b"PK\x05" * 5000])
@pytest.mark.parametrize("zip64", [False, True])
def test_members_and_where_they_are(comment: bytes, zip64: bool, tmp_path: Path) -> None:
    data = packed(comment=comment, zip64=zip64)
    found = opened(tmp_path, data)
    assert contents(found) == CONTENT
    for name, member in found.members.items():
        at = found.offset(member)
        assert data[at : at + member.size] == CONTENT[name]


def test_a_zip_file_within_a_file(tmp_path: Path) -> None:
    data = packed()
    assert contents(opened(tmp_path, b"x" * 77 + data + b"y" * 99, 77, len(data))) == CONTENT
    with pytest.raises((CheckpointCorrupt, Failed), match=r"x\.zip"):
        opened(tmp_path, b"x" * 77 + data, 77, len(data) + 1)


def test_a_zip64_directory(tmp_path: Path) -> None:
    data = packed()
    at = data.rfind(b"PK\x05\x06")
    count, size, start = struct.unpack("<10xHII2x", data[at:])
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    end = b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2)
    assert contents(opened(tmp_path, data[:at] + record + locator + end)) == CONTENT
    far = struct.pack("<4sIQI", b"PK\6\7", 0, (1 << 64) - 1, 1)
    with pytest.raises((CheckpointCorrupt, Failed), match=r"x\.zip"):
        opened(tmp_path, data[:at] + record + far + end)


def test_compressed_members_are_told(tmp_path: Path) -> None:
    found = opened(tmp_path, packed(zipfile.ZIP_DEFLATED))
    assert found.members["a/é"].method != STORED
    with pytest.raises(CheckpointCorrupt, match="a/é is compressed"):
        found.read(found.members["a/é"])


def test_changed_data_do_not_match_their_checksum(tmp_path: Path) -> None:
    data = packed().replace(b"first", b"other", 1)
    found = opened(tmp_path, data)
    with pytest.raises(CheckpointCorrupt, match="a/data does not match its checksum"):
        found.read(found.members["a/data"])


def test_checksums_that_were_not_computed_are_not_compared(tmp_path: Path) -> None:
    data = packed()
    directory = data.index(b"PK\x01\x02")
    data = data[:14] + bytes(4) + data[18 : directory + 16] + bytes(4) + data[directory + 20 :]
    found = opened(tmp_path, data.replace(b"first", b"other", 1))
    assert found.read(found.members["a/data"]) == b"other"


def test_truncation_at_every_byte_is_an_error(tmp_path: Path) -> None:
    data = packed()
    for count in range(len(data)):
        with pytest.raises((CheckpointCorrupt, Failed), match=r"x\.zip"):
            opened(tmp_path, data[:count])


def test_a_name_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("name1", b"1")
        archive.writestr("name2", b"2")
    with pytest.raises(CheckpointCorrupt, match="name1 occurs twice"):
        opened(tmp_path, out.getvalue().replace(b"name2", b"name1"))


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=5))
def test_changed_bytes_are_an_error_or_other_members(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(packed())
    for at, byte in changes:
        data[-1 - at % 400] = byte
    with contextlib.suppress(CheckpointCorrupt, Failed):
        contents(opened(tmp_path_factory.mktemp("z"), bytes(data)))


ENDS = {  # offsets of fields in the record at the end
    "members in this file": 8, "members": 10, "bytes of the directory": 12, "its offset": 16,
    "the disk": 4, "the comment": 20,
}  # fmt: skip


@pytest.mark.parametrize("field", ENDS)
@pytest.mark.parametrize("bit", [1, 2, 8, 64])
@pytest.mark.parametrize("zip64", [False, True])
def test_no_changed_bit_at_the_end_hides_members(
    field: str, bit: int, zip64: bool, tmp_path: Path
) -> None:
    data = bytearray(packed())
    if zip64:
        at = data.rfind(b"PK\x05\x06")
        count, size, start = struct.unpack("<10xHII2x", data[at:])
        record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        data[at:at] = record + struct.pack("<4sIQI", b"PK\6\7", 0, at, 1)
    data[data.rfind(b"PK\x05\x06") + ENDS[field]] ^= bit
    with pytest.raises((CheckpointCorrupt, Failed), match=r"x\.zip"):
        opened(tmp_path, bytes(data))


@pytest.mark.parametrize("at", [*range(24, 56)])
def test_no_changed_bit_of_a_zip64_record_hides_members(at: int, tmp_path: Path) -> None:
    data = packed()
    end = data.rfind(b"PK\x05\x06")
    count, size, start = struct.unpack("<10xHII2x", data[end:])
    record = bytearray(
        struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
    )
    record[at] ^= 2
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, end, 1)
    for last in (data[end:], b"PK\5\6" + bytes(4) + b"\xff" * 12 + bytes(2)):
        with pytest.raises((CheckpointCorrupt, Failed), match=r"x\.zip"):
            opened(tmp_path, data[:end] + bytes(record) + locator + last)


@pytest.mark.parametrize("count", [1, 2])
def test_a_shorter_directory_hides_no_members(count: int, tmp_path: Path) -> None:
    data = bytearray(packed())
    at = data.rfind(b"PK\x05\x06")
    struct.pack_into("<HH", data, at + 8, count, count)
    with pytest.raises(CheckpointCorrupt, match=f"{count} members expected, 3 found"):
        opened(tmp_path, bytes(data))
    start = data.index(b"PK\x01\x02")
    ends = [i for i in range(start + 1, at + 1) if data[i : i + 4] in (b"PK\1\2", b"PK\5\6")]
    struct.pack_into("<I", data, at + 12, ends[count - 1] - start)
    with pytest.raises(CheckpointCorrupt, match="its zip directory is said to have"):
        opened(tmp_path, bytes(data))


@pytest.mark.parametrize("at", [0, 2, 8, 9, 15, 20, 26, 30, 33])
def test_a_header_must_agree_with_the_directory(at: int, tmp_path: Path) -> None:
    data = bytearray(packed())
    data[at] ^= 1
    found = opened(tmp_path, bytes(data))
    with pytest.raises(CheckpointCorrupt, match="a/data"):
        found.offset(found.members["a/data"])


def test_members_must_not_overlap(tmp_path: Path) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("outer", b"x" * 100 + b"PK")
        archive.writestr("next", b"y" * 100)
    data = bytearray(out.getvalue())
    second = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, second + 42, 60)
    with pytest.raises(CheckpointCorrupt, match="outer overlaps what lies behind it"):
        opened(tmp_path, bytes(data))
    data = bytearray(out.getvalue())
    struct.pack_into("<H", data, 28, 40)  # bytes of its extra field: its data begins 40 later
    found = opened(tmp_path, bytes(data))
    with pytest.raises(CheckpointCorrupt, match="outer overlaps what lies behind it"):
        found.offset(found.members["outer"])


def test_a_comment_may_look_like_an_end(tmp_path: Path) -> None:
    comment = b"PK\5\6" + bytes(18) + b"more"
    assert contents(opened(tmp_path, packed(comment=comment))) == CONTENT


def test_deflated_members_are_checked_as_they_are_decompressed(tmp_path: Path) -> None:
    content = bytes(range(256)) * 20_000
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", content)
    found = opened(tmp_path, out.getvalue())
    member, memory = found.members["a"], bytearray(len(content) - 7)
    found.inflate(member, memoryview(memory), 7)
    assert bytes(memory) == content[7:]
    for wrong in (
        replace(member, crc=member.crc ^ 1),
        replace(member, size=member.size + 1),
        replace(member, compressed=member.compressed - 1),
    ):
        found.offset = lambda _: 31  # type: ignore[method-assign]
        with pytest.raises(CheckpointCorrupt, match="a does not match its checksum"):
            found.inflate(wrong, memoryview(bytearray(wrong.size - 7)), 7)
    short = replace(member, size=member.size - 1)
    with pytest.raises(CheckpointCorrupt, match="a does not match its checksum"):
        found.inflate(short, memoryview(bytearray(short.size - 7)), 7)
