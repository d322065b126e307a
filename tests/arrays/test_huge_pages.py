"""Huge pages for arrays that are going to be filled."""

from __future__ import annotations

import mmap
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import unickpt
from unickpt.frameworks import host_memory
from unickpt.frameworks.host_memory import prefer_huge_pages

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"), reason="Linux's advice"
)
MIB = 1 << 20


@pytest.fixture(autouse=True)
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a machine that gives no memory back to its host, whatever this one does."""
    file = tmp_path / "page_reporting_order"
    file.write_text("-1\n")
    monkeypatch.setattr(host_memory, "_REPORTED_ORDER", str(file))
    host_memory._madvise.cache_clear()
    yield file
    host_memory._madvise.cache_clear()


def advised(address: int) -> bool:
    """Whether the system was asked for huge pages at an address."""
    found = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            found = int(span[1], 16) <= address < int(span[2], 16)
        elif found and line.startswith("VmFlags:"):
            return "hg" in line.split()
    raise AssertionError(f"no memory at {address:#x}")


def mapped(nbytes: int) -> np.ndarray:
    """Memory of its own, of which nobody has asked anything."""
    return np.frombuffer(mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


@pytest.mark.parametrize("offset", [0, 1, 4095])
def test_all_pages_within_an_array_are_advised(offset: int) -> None:
    memory = mapped(16 * MIB)
    start = memory.ctypes.data
    prefer_huge_pages(memory[4 * MIB + offset : 12 * MIB + offset])
    assert not advised(start)
    assert not advised(start + 4 * MIB - 1)
    assert advised(start + 4 * MIB) == (offset == 0)
    assert advised(start + 4 * MIB + 4096)
    assert advised(start + 12 * MIB - 1)
    assert not advised(start + 12 * MIB + 4096)


@pytest.mark.parametrize("made", [lambda m: m[:MIB], lambda m: m[::2], lambda m: m[:0]])
def test_small_and_scattered_arrays_are_left_alone(made: object) -> None:
    memory = mapped(16 * MIB)
    prefer_huge_pages(made(memory))  # type: ignore[operator]
    assert not advised(memory.ctypes.data)


def test_a_load_asks_for_them(tmp_path: Path) -> None:
    """With pages of 4 KiB, new memory takes longer than the reading itself."""
    source = torch.arange(12 * MIB, dtype=torch.int32)
    unickpt.save(tmp_path / "c", {"w": source}, options=unickpt.SaveOptions(fsync=False))
    into = torch.empty(12 * MIB, dtype=torch.int32)
    address = into.data_ptr() + into.nbytes // 2
    assert not advised(address)
    unickpt.load(tmp_path / "c", {"w": into})
    assert advised(address)
    assert torch.equal(into, source)


def test_none_are_asked_of_the_host_of_a_virtual_machine(reported: Path) -> None:
    reported.write_text("9\n")
    memory = mapped(16 * MIB)
    prefer_huge_pages(memory)
    assert not advised(memory.ctypes.data + 8 * MIB)
    reported.unlink()
    host_memory._madvise.cache_clear()
    prefer_huge_pages(memory)
    assert advised(memory.ctypes.data + 8 * MIB), "a kernel without the feature"
