"""Members of zip files as ranges of a file."""

from __future__ import annotations

import contextlib
import io
import struct
import zipfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unickpt import CheckpointCorrupt
from unickpt.foreign.files import Files
from unickpt.foreign.zip_files import STORED, ZipFile
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
    data = data[: directory + 16] + bytes(4) + data[directory + 20 :]
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
