"""NumPy's .npz: stored members are ranges, deflated ones are read whole, objects are refused."""

from __future__ import annotations

import contextlib
import io
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import foreign, s3_server

from unickpt import Checkpoint, CheckpointCorrupt, UnickptError
from unickpt.backends.numpy import npz
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite


def opened(path: Path | str) -> Checkpoint:
    found = foreign.opened(path, npz)
    assert found is not None
    return found


class TestSuite(ReaderSuite):
    values: Mapping[str, Any] = {}
    has_digests = False
    has_checksums = True

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.mkdir(exist_ok=True)
        np.savez(path / "weights.npz", **arrays)

    def damage(self, path: Path, name: str) -> None:
        with zipfile.ZipFile(path / "weights.npz") as archive:
            every = {info.filename: archive.read(info) for info in archive.infolist()}
        with zipfile.ZipFile(path / "weights.npz", "w", zipfile.ZIP_DEFLATED) as archive:
            for file, data in every.items():
                archive.writestr(file, data)
            at = archive.getinfo(f"{name}.npy").header_offset + 30 + len(name) + 4
            length = archive.getinfo(f"{name}.npy").compress_size
        data = bytearray((path / "weights.npz").read_bytes())
        data[at + length // 2] ^= 1
        (path / "weights.npz").write_bytes(data)


@pytest.mark.parametrize("file", ["weights.npz", "compressed.npz"])
def test_what_numpy_wrote_reads_bit_for_bit(file: str, tmp_path: Path) -> None:
    shutil.copy(foreign.folder("npz") / file, tmp_path)
    assert foreign.differences("npz", opened(tmp_path)) == []


def test_several_files_are_told() -> None:
    with pytest.raises(UnsupportedFormat, match=r"compressed\.npz, weights\.npz"):
        opened(foreign.folder("npz"))


def test_a_name_within_a_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", **{"a": np.ones(2), "a/b": np.zeros(1)})
    assert sorted(opened(tmp_path)) == ["a", "a%2Fb"]


@pytest.mark.parametrize(
    "array", [np.array([{}], object), np.array(["x"]), np.zeros(2, "i4,f4"), np.zeros(2, "V3")]
)
def test_arrays_that_are_no_numbers_are_refused(array: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", a=array)
    with pytest.raises(UnsupportedFormat, match=r"'a\.npy' has the dtype"):
        opened(tmp_path)


def packed(head: bytes, data: bytes = bytes(8), method: int = zipfile.ZIP_STORED) -> bytes:
    out = io.BytesIO()
    body = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + data
    with zipfile.ZipFile(out, "w", method) as archive:
        archive.writestr("a.npy", body)
    return out.getvalue()


HEAD = b"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}"


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    ("old", "new"),
    [(b"(2,)", b"(3,)"), (b"(2,)", b"(-2,)"), (b"(2,)", b"2"), (b"(2,)", b"(2.0,)"),
     (b"(2,)", b"(" + b"1," * 40 + b"2)"), (b"False", b"0"), (b"'shape'", b"'s'"),
     (HEAD, b""), (HEAD, b"{"), (HEAD, b"__import__('os').system('x')"), (HEAD, b"(" * 9000),
     (b"(2,)", b"(4611686018427387903, 4611686018427387903)")],
)  # fmt: skip
def test_a_bad_header_is_an_error(old: bytes, new: bytes, method: int, tmp_path: Path) -> None:
    (tmp_path / "x.npz").write_bytes(packed(HEAD, method=method))
    assert opened(tmp_path)["a"].shape == (2,)
    (tmp_path / "x.npz").write_bytes(packed(HEAD.replace(old, new), method=method))
    with pytest.raises(CheckpointCorrupt, match=r"x\.npz"):
        opened(tmp_path)


def test_truncation_is_an_error(tmp_path: Path) -> None:
    data = packed(HEAD)
    for count in range(len(data)):
        (tmp_path / "x.npz").write_bytes(data[:count])
        with pytest.raises(CheckpointCorrupt, match=r"x\.npz"):
            opened(tmp_path)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_bytes_are_other_arrays_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray((foreign.folder("npz") / "compressed.npz").read_bytes())
    for at, byte in changes:
        data[at % len(data)] = byte
    path = tmp_path_factory.mktemp("z")
    (path / "x.npz").write_bytes(data)
    with contextlib.suppress(UnickptError):
        found = opened(path)
        for name in found:
            found[name][...]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_all_of_it_from_s3(save: Any, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "npz-files")
    arrays = {"w": np.arange(6000.0).reshape(60, 100), "b": np.arange(7)}
    file = io.BytesIO()
    save(file, **arrays)
    store = resolve("s3://npz-files/a").store(paths.context())
    store.write("weights.npz", file.getvalue()).result()
    found = opened("s3://npz-files/a")
    assert all(np.array_equal(found[name][...], array) for name, array in arrays.items())
    store.write("weights.npz", file.getvalue()[:-30]).result()
    with pytest.raises(CheckpointCorrupt, match=r"weights\.npz"):
        opened("s3://npz-files/a")
