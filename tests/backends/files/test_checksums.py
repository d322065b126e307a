"""Ranges of files that have a checksum, read in parts, in any order, by several threads."""

from __future__ import annotations

import re
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.saving import in_job

import unickpt
from unickpt import CheckpointCorrupt, Rules
from unickpt.format import crc32, file_ranges
from unickpt.format.crc32 import Parts, Range
from unickpt.format.files import CheckedFiles, Files
from unickpt.storage.errors import Damaged
from unickpt.storage.paths import resolve

torch = pytest.importorskip("torch")

DATA = np.random.default_rng(3).bytes(1000)
CUTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 400)), max_size=40)


@given(CUTS, st.integers(0, 200), st.booleans())
def test_parts_in_any_order_have_the_checksum_of_the_whole(
    cuts: list[tuple[int, int]], begin: int, sound: bool
) -> None:
    crc = zlib.crc32(DATA) if sound else zlib.crc32(DATA) ^ 1
    parts = Parts(Range("f", begin, 1000, crc, zlib.crc32(DATA[:begin])))
    seen, told = np.zeros(1000, bool), []
    for at, count in [*cuts, (0, 1000)]:
        was_whole = seen[begin:].all()
        seen[at : at + count] = True
        differs = parts.differs(at, memoryview(DATA[at : at + count]))
        assert differs is bool(not sound and seen[begin:].all() and not was_whole)
        told.append(differs)
        gaps = np.zeros(1000, bool)
        for low, high in parts.gaps:
            gaps[low:high] = True
        assert (gaps[begin:] == ~seen[begin:]).all()
    assert any(told) is not sound


def test_memory_for_parts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc32, "_MOST_GAPS", 5)
    parts = Parts(Range("f", 0, 1000, zlib.crc32(DATA) ^ 1))
    for at in range(1, 900, 3):
        assert not parts.differs(at, memoryview(DATA[at : at + 1]))
        assert len(parts.gaps) <= 6
    for at in range(0, 1000, 10):
        assert parts.differs(at, memoryview(DATA[at : at + 10])) is (at == 990)


def test_threads_that_read_parts(tmp_path: Path) -> None:
    data = DATA * 3000
    (tmp_path / "f").write_bytes(data)
    for wrong in (0, 1):
        files = Files(resolve(tmp_path))
        files.summed.add(Range("f", 5, len(data) - 9, zlib.crc32(data[5:-9]) ^ wrong, 0, "it"))
        checked = CheckedFiles(files)
        with ThreadPoolExecutor(8) as pool:
            found = [
                pool.submit(checked.read, "f", at, min(7000, len(data) - at))
                for at in np.random.default_rng(0).permutation(np.arange(0, len(data), 7000))
            ]
        errors = [e for e in (f.exception() for f in found) if e is not None]
        assert [str(e) for e in errors] == ["f: it does not match its checksum"] * wrong
        assert all(isinstance(e, Damaged) for e in errors)
        assert list(checked.begun()) == []


@pytest.fixture
def views(tmp_path: Path) -> Path:
    """A file of torch of which one storage is used in part, and another is strided."""
    whole, other = torch.arange(3000.0), torch.arange(6000.0).reshape(60, 100)
    state = {"part": whole[1000:2000], "turned": other.T, "plain": torch.arange(900.0)}
    torch.save(state, tmp_path / "x.pt")
    return tmp_path / "x.pt"


def flip(file: Path, value: float) -> None:
    data = bytearray(file.read_bytes())
    at = data.index(np.arange(value, value + 3, dtype=np.float32).tobytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_what_is_used_in_part_is_compared_as_a_whole(views: Path, tmp_path: Path) -> None:
    assert unickpt.verify(views).unverified == ""
    assert unickpt.verify(views).ok
    flip(views, 2500.0)  # of the storage of `part`, and not of `part`
    assert unickpt.load(views)["part"][0] == 1000
    (damage,) = unickpt.verify(views).damage
    assert damage.array == "part"
    assert "x.pt: x/data/0 does not match its checksum" in damage.reason
    with pytest.raises(CheckpointCorrupt, match=r"'part'.*x/data/0 does not match its checksum"):
        unickpt.convert(views, tmp_path / "own")
    with pytest.raises(CheckpointCorrupt, match=r"'part'.*x/data/0 does not match its checksum"):
        unickpt.merge([views, views], tmp_path / "own")
    with pytest.raises(CheckpointCorrupt, match=r"'part'.*x/data/0 does not match its checksum"):
        unickpt.convert(views, tmp_path / "x.npz", to="npz")
    assert not (tmp_path / "x.npz").exists()
    unickpt.convert(
        views, tmp_path / "own", rules=Rules.parse("part <-> drop\ndefault {x} <-> {x}")
    )


@pytest.mark.parametrize("value", [10.0, 2990.0, 5900.0])
def test_strided_arrays(views: Path, value: float, tmp_path: Path) -> None:
    flip(views, value)
    with pytest.raises(CheckpointCorrupt, match="does not match its checksum"):
        unickpt.convert(views, tmp_path / "own")
    assert not unickpt.verify(views).ok


@pytest.mark.parametrize("value", [10.0, 600.0, 1500.0, 2500.0, 5900.0])
def test_processes_that_convert_each_a_part(
    views: Path, value: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", 1 << 10)
    flip(views, value)

    def convert(group: unickpt.ProcessGroup) -> None:
        options = unickpt.SaveOptions(group=group, chunk_shape=(100,))
        unickpt.convert(views, tmp_path / "own", options=options)

    found = in_job(3, convert)
    assert any(isinstance(error, CheckpointCorrupt) for error in found), found
    assert all(re.search("its checksum|failed", str(error)) for error in found)
    assert not (tmp_path / "own" / "manifest.ocdbt").exists()


def test_a_part_of_an_array_is_not_compared(views: Path) -> None:
    flip(views, 5900.0)
    assert unickpt.open(views)["turned"][3:5].shape == (2, 60)
    with pytest.raises(CheckpointCorrupt, match=r"'turned'.*does not match its checksum"):
        unickpt.open(views)["turned"][...]


def test_checksums_that_torch_did_not_compute(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.arange(100.0)}, tmp_path / "x.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    report = unickpt.verify(tmp_path / "x.pt")
    assert report.ok
    assert "stores no digests" in report.unverified
    flip(tmp_path / "x.pt", 50.0)
    assert len(unickpt.load(tmp_path / "x.pt")["w"]) == 100


def test_verify_names_the_arrays_without_a_checksum(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(100.0), "b": torch.arange(50.0)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    of_b = zlib.crc32(np.arange(50, dtype=np.float32).tobytes()).to_bytes(4, "little")
    assert data.count(of_b) == 2  # behind the data, and in the directory
    (tmp_path / "x.pt").write_bytes(data.replace(of_b, bytes(4)))
    report = unickpt.verify(tmp_path / "x.pt")
    assert report.ok
    assert report.unverified.startswith("1 of 2 arrays have no checksum ('b'): ")
