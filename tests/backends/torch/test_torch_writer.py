"""Files of torch.save and of NumPy that unickpt writes, as torch and NumPy read them."""

from __future__ import annotations

import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support.saving import in_job

import unickpt
from unickpt import SaveOptions, UnsupportedLeaf
from unickpt.backends._files import zip_layout
from unickpt.backends._files.zip_layout import Content, ZipLayout

FAST = SaveOptions(fsync=False)
KINDS = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16",
    "bfloat16", "float32", "float64", "complex64", "complex128", "float8_e4m3fn",
    "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu",
]  # fmt: skip


def arrays(kinds: list[str]) -> dict[str, Any]:
    raw = np.random.default_rng(3).integers(0, 2, (len(kinds), 15 * 16), np.uint8)
    dtypes = [np.dtype(getattr(ml_dtypes, kind, kind)) for kind in kinds]
    found = {
        kind: data.view(dtype)[:15].reshape(5, 3)
        for kind, dtype, data in zip(kinds, dtypes, raw, strict=True)
    }
    return {**found, "none": np.empty((0, 4), np.float32), "one": np.array(2.5, np.float32)}


def save(path: Path, tree: Any) -> None:
    unickpt.save(path, tree, options=FAST)


@pytest.mark.integration
def test_torch_reads_every_dtype_and_container(tmp_path: Path) -> None:
    import torch

    state = arrays(KINDS)
    pair = namedtuple("pair", "left right")
    tree = {
        "model": OrderedDict(state),
        "list": [np.arange(5), (np.ones(2), None, [])],
        "pair": pair(np.arange(3), 1 << 70),
        "tied": state["bfloat16"],
        "plain": [7, 1.5, float("inf"), True, "text", b"\x00\xff", ""],
        3: {"3": np.arange(2), 3: 1},
    }
    save(tmp_path / "c", tree)
    for name in ("x.pt", "folder"):
        unickpt.convert(tmp_path / "c", tmp_path / name, to="torch", options=FAST)
    assert unickpt.diff(tmp_path / "c", tmp_path / "folder").same
    for mmap in (False, True):
        found = torch.load(tmp_path / "x.pt", weights_only=True, mmap=mmap)
        assert type(found["model"]) is OrderedDict
        for name, array in state.items():
            tensor = found["model"][name]
            assert str(tensor.dtype) == f"torch.{array.dtype.name}"
            assert tuple(tensor.shape) == array.shape
            assert tensor.is_contiguous()
            assert tensor.reshape(-1).view(torch.uint8).numpy().tobytes() == array.tobytes()
        assert found["tied"] is found["model"]["bfloat16"]
        assert found["list"][1][1:] == (None, [])
        assert found["pair"]["right"] == 1 << 70
        assert found["plain"] == tree["plain"]
        assert found[3]["3"].tolist() == [0, 1]
        assert found[3][3] == 1
    assert zipfile.ZipFile(tmp_path / "x.pt").testzip() is None
    # What torch makes of it is equal too.
    torch.save(found, tmp_path / "again.pt")
    one = np.array([7], np.float32)
    save(tmp_path / "d", one)
    unickpt.convert(tmp_path / "d", tmp_path / "one.pt", to="torch", options=FAST)
    assert torch.load(tmp_path / "one.pt", weights_only=True).tolist() == [7]


def test_numpy_reads_it(tmp_path: Path) -> None:
    state = arrays([kind for kind in KINDS if kind == "bool" or hasattr(np, kind)])
    days = np.array(["2020-01-01", "NaT"], "M8[D]")
    save(tmp_path / "c", {**state, "a": {"b": state["int64"], "c/d": days}})
    for name in ("x.npz", "folder"):
        unickpt.convert(tmp_path / "c", tmp_path / name, to="npz", options=FAST)
    with np.load(tmp_path / "x.npz") as found:
        assert set(found) == {*state, "a/b", "a/c/d"}
        for name, array in {**state, "a/b": state["int64"], "a/c/d": days}.items():
            assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
            assert found[name].tobytes() == array.tobytes()
    assert zipfile.ZipFile(tmp_path / "x.npz").testzip() is None
    opened = unickpt.open(tmp_path / "folder")
    assert all((opened[name][...] == array).all() for name, array in state.items())


def test_a_name_that_is_also_a_container(tmp_path: Path) -> None:
    save(tmp_path / "c", {"a": np.arange(2), "a/b": np.arange(3)})
    unickpt.convert(tmp_path / "c", tmp_path / "x.npz", to="npz", options=FAST)
    assert set(np.load(tmp_path / "x.npz")) == {"a", "a/b"}


@pytest.mark.parametrize("to", ["torch", "npz"])
def test_dtypes_that_the_format_lacks(to: str, tmp_path: Path) -> None:
    save(tmp_path / "c", {"w": np.ones(3), "f": np.ones((2, 3), ml_dtypes.float8_e3m4)})
    with pytest.raises(UnsupportedLeaf, match=r"'f': float8_e3m4\[2, 3\]"):
        unickpt.convert(tmp_path / "c", tmp_path / "x", to=to, options=FAST)
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("to", ["torch", "npz"])
def test_processes_write_ranges_of_one_file(to: str, tmp_path: Path) -> None:
    """Checksums are joined from those of the parts; no part depends on who wrote it."""
    rng = np.random.default_rng(5)
    state = {"large": rng.random((700, 301)), "small": rng.random(7), "next": rng.random(90_000)}
    unickpt.save(tmp_path / "c", state, options=SaveOptions(fsync=False, chunk_bytes=1 << 14))
    unickpt.convert(tmp_path / "c", tmp_path / "one", to=to, options=FAST)

    def run(group: unickpt.ProcessGroup) -> Any:
        mine = SaveOptions(group=group, timeout_s=20, fsync=False)
        return unickpt.convert(tmp_path / "c", tmp_path / "three", to=to, options=mine)

    reports = in_job(3, run)
    assert all(0 < report.written_bytes < reports[0].bytes // 2 for report in reports)
    (one,), (three,) = ((tmp_path / folder).iterdir() for folder in ("one", "three"))
    assert one.read_bytes() == three.read_bytes()
    assert zipfile.ZipFile(three).testzip() is None


def test_a_zip_file_beyond_four_gigabytes(tmp_path: Path) -> None:
    """Its large member is a hole."""
    size = (1 << 32) + 5
    layout = ZipLayout([Content("large", b"", "w", unickpt.types.Box((0,), (size,)), size),
                        Content("after", b"text")])  # fmt: skip
    path = tmp_path / "x.zip"
    with path.open("wb") as file:
        for offset, text in {**layout.texts, **layout.ending([0])}.items():
            file.seek(offset)
            file.write(text)
    assert path.stat().st_size == layout.size
    with zipfile.ZipFile(path) as found:
        assert [(i.filename, i.file_size) for i in found.infolist()] == [
            ("large", size),
            ("after", 4),
        ]
        assert found.read("after") == b"text"
        assert found.open("large").read(3) == bytes(3)
    assert layout.data[0].offset % zip_layout.ALIGN == 0
