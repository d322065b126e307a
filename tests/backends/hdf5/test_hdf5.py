"""HDF5 files of Keras: read in place where they lie in one piece, bit for bit."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import sys
import tracemalloc
import warnings
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import foreign, s3_server
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, UnickptError
from unickpt.backends.hdf5 import reader as hdf5
from unickpt.backends.hdf5.bounded_file import BoundedFile
from unickpt.cli.app import app
from unickpt.errors import UnsupportedFormat
from unickpt.format import file_ranges
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite

h5py = pytest.importorskip("h5py")
pytest.importorskip("pyfive")


@contextlib.contextmanager
def writing(path: Path) -> Iterator[Any]:
    path.mkdir(exist_ok=True)
    with h5py.File(path / "model.weights.h5", "w") as file:
        yield file


class TestSuite(ReaderSuite):
    values: Mapping[str, Any] = {}
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        with writing(path) as file:
            for name, array in arrays.items():
                chunks = {"chunks": (3, 2, 4), "compression": "gzip"} if array.ndim == 3 else {}
                file.create_dataset(name, data=array, **chunks)

    def damage(self, path: Path, name: str) -> None:
        file = path / "model.weights.h5"
        with h5py.File(file, "r") as opened:
            begin = struct.pack("<Q", opened[name].id.get_offset())
        data = file.read_bytes()
        assert data.count(begin) == 1
        file.write_bytes(data.replace(begin, struct.pack("<Q", 1 << 40)))

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        with foreign.registered(hdf5), pytest.MonkeyPatch.context() as patch:
            patch.setattr(file_ranges, "CHUNK_BYTES", 1 << 10)
            patch.setattr(hdf5, "CHUNK_BYTES", 1 << 10)
            yield


def test_what_keras_wrote_reads_bit_for_bit() -> None:
    path = foreign.folder("keras-h5")
    for at in (path, path / "model.weights.h5"):
        found = unickpt.open(at)
        others = [f"optimizer/vars/{n}" for n in range(14)]
        assert sorted(foreign.differences("keras-h5", found)) == sorted(others)
        assert (found["optimizer/vars/10"].shape, found["optimizer/vars/0"][...]) == ((4, 2), 1)


# --- .keras files ---------------------------------------------------------------------------------

ZIPPED = "keras-zip"
INNER = "model.weights.h5"


@pytest.fixture
def zipped(tmp_path: Path) -> Path:
    """What Keras's model.save wrote, to be damaged."""
    return Path(shutil.copy(foreign.folder(ZIPPED) / "model.keras", tmp_path))


def zip_again(file: Path, **changes: Any) -> None:
    """Writes a zip file with `changes`: its `compression`, or members by name without suffix."""
    with zipfile.ZipFile(file) as old:
        members = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(file, "w", changes.get("compression", zipfile.ZIP_STORED)) as new:
        for name, data in members.items():
            data = changes.get(name.partition(".")[0], data)
            if data is not None:
                new.writestr(name, data)


def test_what_keras_saved_with_its_model_reads_bit_for_bit(zipped: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(zipped) as file:
        file.extract(INNER, tmp_path / "unpacked")
    weights = unickpt.open(tmp_path / "unpacked")
    for at in (foreign.folder(ZIPPED), zipped):
        found = unickpt.open(at)
        assert foreign.differences(ZIPPED, found) == []
        assert (sorted(found), found.reader.version) == (sorted(weights), "3.15.1")
        assert all(found[name][...].tobytes() == weights[name][...].tobytes() for name in found)
    assert found["layers/down/vars/0"].dtype == ml_dtypes.bfloat16
    assert unickpt.verify(zipped).ok
    unickpt.convert(zipped, tmp_path / "own")
    assert foreign.differences(ZIPPED, unickpt.open(tmp_path / "own")) == []


def test_a_keras_file_is_read_in_place(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = unickpt.open(zipped)
    reads = foreign.count_reads(monkeypatch)
    _ = found["layers/up/vars/0"][1:3]
    assert reads == [("model.keras", 2 * 5 * 4)]


def test_a_compressed_keras_file(zipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zip_again(zipped, compression=zipfile.ZIP_DEFLATED)
    assert foreign.differences(ZIPPED, unickpt.open(zipped)) == []
    assert unickpt.verify(zipped).ok
    whole = zipped.read_bytes()
    middle = len(whole) // 2
    zipped.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(CheckpointCorrupt, match=r"model\.weights\.h5 (cannot be|does not match)"):
        unickpt.open(zipped)
    zipped.write_bytes(whole)
    monkeypatch.setattr(hdf5, "_MOST_UNPACKED", 20_000)
    with pytest.raises(UnsupportedFormat, match=r"h5 has 22724 bytes.*at most 20000 .*unpack"):
        unickpt.open(zipped)
    zip_again(zipped, compression=zipfile.ZIP_LZMA)
    with pytest.raises(UnsupportedFormat, match="by the method 14"):
        unickpt.open(zipped)


def test_damaged_keras_files_are_named(zipped: Path) -> None:
    whole = zipped.read_bytes()
    for end in (100, 5000, len(whole) - 10):
        zipped.write_bytes(whole[:end])
        with pytest.raises(CheckpointCorrupt, match=r"model\.keras"):
            unickpt.open(zipped)
    zipped.write_bytes(whole)
    with h5py.File(zipfile.ZipFile(zipped).open(INNER), "r") as opened:
        at = opened["layers/dense/vars/0"].id.get_offset()
    begin = zipfile.ZipFile(zipped).getinfo(INNER).header_offset + 30 + len(INNER)
    changed = bytearray(whole)
    changed[begin + at] ^= 1
    zipped.write_bytes(changed)
    damage = unickpt.verify(zipped).damage
    assert "model.weights.h5 does not match its checksum" in damage[-1].reason
    for to in ("own", "again"):
        with pytest.raises(CheckpointCorrupt, match=r"model\.weights\.h5 does not match its check"):
            unickpt.convert(zipped, zipped.parent / to)
    assert unickpt.verify(foreign.folder(ZIPPED)).unverified == ""
    data = whole[begin : begin + 22724]
    for far in (struct.pack("<Q", 22720), struct.pack("<Q", 1 << 40)):
        zipped.write_bytes(whole)
        zip_again(zipped, model=data.replace(struct.pack("<Q", at), far))
        with pytest.raises(CheckpointCorrupt, match=r"model\.keras.*layers/up/vars/0"):
            unickpt.load(zipped)
    zipped.write_bytes(whole)
    zip_again(zipped, metadata=b"[1")
    with pytest.raises(CheckpointCorrupt, match=r"metadata\.json is not JSON"):
        unickpt.open(zipped)
    zip_again(zipped, model=None, metadata=b"{}")
    with pytest.raises(
        UnsupportedFormat, match=r"without model\.weights\.h5; it has.*config\.json"
    ):
        unickpt.open(zipped)


def test_a_keras_file_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "zipped")
    store = resolve("s3://zipped/a").store(paths.context())
    store.write("model.keras", (foreign.folder(ZIPPED) / "model.keras").read_bytes()).result()
    for at in ("s3://zipped/a", "s3://zipped/a/model.keras"):
        assert foreign.differences(ZIPPED, unickpt.open(at)) == []


# --- names, and what is not read ------------------------------------------------------------------


def test_layers_have_the_names_that_the_model_gave_them(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        for key, name, inner in (
            ("dense", "a/b", ""), ("dense_1", "dense", ""), ("dense_2", "", "/cell"),
            ("model", "encoder", "/layers/dense"),
        ):  # fmt: skip
            file[f"layers/{key}{inner}/vars/0"] = np.full(2, len(key))
            file.require_group(f"layers/{key}/vars").attrs["name"] = name
        file["layers/model/layers/dense/vars"].attrs["name"] = "up"
    assert sorted(unickpt.open(tmp_path / "x")) == [
        "layers/a%2Fb/vars/0", "layers/dense/vars/0", "layers/dense_2/cell/vars/0",
        "layers/encoder/layers/up/vars/0",
    ]  # fmt: skip
    with writing(tmp_path / "x") as file:
        for key in ("dense", "dense_1"):  # names that are not unique do not count
            file[f"layers/{key}/vars/0"] = np.ones(2)
            file[f"layers/{key}/vars"].attrs["name"] = "same"
    assert sorted(unickpt.open(tmp_path / "x")) == ["layers/dense/vars/0", "layers/dense_1/vars/0"]


ARRAYS = {
    "bool": np.array([True, False]), "complex": np.array([1 + 2j]), "half": np.ones(3, np.float16),
    "big": np.arange(6, dtype=">i4").reshape(2, 3), "scalar": np.float64(2.5),
    "empty": np.zeros((0, 3)), "u8": np.arange(5, dtype=np.uint8),
}  # fmt: skip


@pytest.mark.parametrize("stored", [{}, {"chunks": True}, {"compression": "gzip"}])
def test_dtypes_and_ways_to_store(stored: dict[str, Any], tmp_path: Path) -> None:
    bf16 = np.arange(700, dtype=ml_dtypes.bfloat16).reshape(70, 10)
    with writing(tmp_path / "x") as file:
        for name, array in ARRAYS.items():
            how = stored if np.ndim(array) and np.size(array) else {}
            file.create_dataset(name, data=array, **how)
        file.create_dataset("bf16", data=bf16.view("V2"), **stored).attrs["dtype"] = "bfloat16"
        file["tied"] = file["u8"]
    found = unickpt.open(tmp_path / "x")
    for name, array in ARRAYS.items():
        expected = np.asarray(array, np.asarray(array).dtype.newbyteorder("="))
        assert found[name].dtype == expected.dtype
        assert np.asarray(found[name][...]).tobytes() == expected.tobytes()
    assert found["bf16"][3:50, 2:].tobytes() == bf16[3:50, 2:].tobytes()
    assert found.index.aliases == {"u8": "tied"} or found.index.aliases == {"tied": "u8"}
    assert unickpt.verify(tmp_path / "x").ok


@pytest.mark.integration
def test_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "hdf5")
    store = resolve("s3://hdf5/a").store(paths.context())
    data = (foreign.folder("keras-h5") / "model.weights.h5").read_bytes()
    store.write("model.weights.h5", data).result()
    found = unickpt.open("s3://hdf5/a")
    assert len(foreign.differences("keras-h5", found)) == 14
    for version in ("earliest", "v108"):
        with h5py.File(tmp_path / "x.h5", "w", libver=(version, "v108")) as file:
            file.create_dataset("w", data=np.arange(100), chunks=(7,))
        store.write("x.h5", (tmp_path / "x.h5").read_bytes()).result()
        assert np.array_equal(unickpt.open("s3://hdf5/a/x.h5")["w"][5:], np.arange(5, 100))


def test_a_part_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.arange(2_000_000).reshape(2000, 1000)
    with writing(tmp_path / "x") as file:
        file.create_dataset("plain", data=big)
        file.create_dataset("chunked", data=big, chunks=(100, 1000))
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tmp_path / "x")
    assert sum(count for _, count in reads) < 700_000
    for name in ("plain", "chunked"):
        reads.clear()
        assert np.array_equal(found[name][3:5], big[3:5])
        assert sum(count for _, count in reads) < 6_000_000  # of 16 MB


def test_links_to_other_files_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(100))
    layout = h5py.VirtualLayout((3,), np.float64)
    layout[:] = h5py.VirtualSource("other.h5", "w", (3,))
    for write, told in (
        (lambda f: f.__setitem__("w", h5py.ExternalLink("other.h5", "/w")), "'w' is a link"),
        (lambda f: f.__setitem__("w", h5py.SoftLink("/x")), "'w' is a link"),
        (lambda f: f.__setitem__("layers/w", h5py.SoftLink("/x")), "'layers/w' is a link"),
        (lambda f: f.create_virtual_dataset("w", layout), "'w' lies in other files"),
        (
            lambda f: f.create_dataset("w", (3,), "f8", external=[(str(secret), 0, 24)]),
            "in other files",
        ),
        (lambda f: f.__setitem__("a/b", f.create_group("c")), "several names"),
        (lambda f: f.__setitem__("w", "text"), "dtype"),
        (lambda f: f.__setitem__("w", h5py.Empty("f")), "no shape"),
        (lambda f: f.__setitem__("w", np.dtype("f8")), "neither a group nor a dataset"),
        (lambda f: f.__setitem__("w", np.zeros(3, [("a", int), ("b", float)])), "dtype"),
    ):
        with writing(tmp_path / "x") as file:
            write(file)
        with pytest.raises(UnsupportedFormat, match=told):
            unickpt.open(tmp_path / "x")


def test_a_dtype_that_numpy_lacks_is_refused(tmp_path: Path) -> None:
    odd = h5py.h5t.IEEE_F32LE.copy()
    odd.set_fields(31, 20, 11, 0, 20)
    odd.set_ebias(1023)
    with writing(tmp_path / "x") as file:
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(file.id, b"w", odd, space)
    with pytest.raises(UnsupportedFormat, match="'w' has a dtype like float"):
        unickpt.open(tmp_path / "x")


def test_without_data_no_memory_is_taken(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        file.create_dataset("w", (1 << 40,), np.float64, chunks=(1 << 20,))
    with pytest.raises(CheckpointCorrupt, match=r"too few for its arrays.*'w'"):
        unickpt.load(tmp_path / "x")


def test_arrays_that_are_not_stored_count_together(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        for name in "abc":
            file.create_dataset(name, (12 << 20,), np.float32, chunks=(1 << 20,))
        file["stored"] = np.arange(20_000)
    found = unickpt.open(tmp_path / "x")
    assert np.array_equal(found["a"][:5], np.zeros(5))
    with pytest.raises(CheckpointCorrupt, match=r"'[abc]' has 0 bytes.*too few"):
        unickpt.load(tmp_path / "x")
    assert not unickpt.verify(tmp_path / "x").ok


def test_arrays_and_chunks_that_share_bytes_are_refused(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        file["a"] = np.arange(13_000)
        file.create_dataset("b", (13_000,), np.int64)
        at = file["a"].id.get_offset()
    path = tmp_path / "x" / "model.weights.h5"
    size = struct.pack("<Q", 104_000)
    data = path.read_bytes().replace(b"\xff" * 8 + size, struct.pack("<Q", at) + size)
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match="shared with others"):
        unickpt.load(path)
    with writing(tmp_path / "x") as file:
        file.create_dataset("a", data=np.arange(80).reshape(2, 40), chunks=(1, 40))
        one, other = (file["a"].id.get_chunk_info(n).byte_offset for n in range(2))
    data = path.read_bytes()
    path.write_bytes(data.replace(struct.pack("<Q", other), struct.pack("<Q", one)))
    with pytest.raises(CheckpointCorrupt, match="chunks share bytes"):
        unickpt.load(path)


def test_filters_that_are_not_read_are_named(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        file.create_dataset("w", data=np.arange(100), chunks=(10,), compression="lzf")
    with pytest.raises(UnsupportedFormat, match=r"'w' is stored with the filter 32000 \(lzf\)"):
        unickpt.open(tmp_path / "x")
    with writing(tmp_path / "x") as file:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_chunk((10,))
        made.set_deflate(9)
        made.set_deflate(9)
        space = h5py.h5s.create_simple((100,))
        h5py.h5d.create(file.id, b"w", h5py.h5t.IEEE_F32LE, space, made)
    with pytest.raises(UnsupportedFormat, match="the filter 1 twice"):
        unickpt.open(tmp_path / "x")


def test_structures_that_lead_back_to_themselves_end(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        file["a/b/w"] = np.arange(10)
        groups = [h5py.h5o.get_info(file[name].id).addr for name in ("a", "a/b")]
    path = tmp_path / "x" / "model.weights.h5"
    data = path.read_bytes()
    above, below = (struct.pack("<Q", at) for at in groups)
    path.write_bytes(data.replace(below, above))
    with pytest.raises(UnickptError, match=r"several names|damaged"):
        unickpt.open(path)


def test_a_chunk_that_does_not_match_its_checksum_is_damage(tmp_path: Path) -> None:
    for size in (7, 70_001):
        with writing(tmp_path / "x") as file:
            array = np.arange(size, dtype=np.uint8)
            file.create_dataset("w", data=array, chunks=(size,), fletcher32=True)
            at = file["w"].id.get_chunk_info(0).byte_offset
        path = tmp_path / "x" / "model.weights.h5"
        assert unickpt.verify(path).ok
        data = bytearray(path.read_bytes())
        data[at + 3] ^= 1
        path.write_bytes(data)
        (damage,) = unickpt.verify(path).damage
        assert "'w'" in damage.reason
        assert "does not match its checksum" in damage.reason


@pytest.mark.parametrize("version", ["earliest", "v108", "latest"])
def test_every_version_reads_as_with_h5py(version: str, tmp_path: Path) -> None:
    rng, path = np.random.default_rng(0), tmp_path / "x.h5"
    with h5py.File(path, "w", libver=version) as file:
        for name, shape, chunks, most in (
            ("tree", (61, 5), (2, 3), None), ("grows", (61, 3), (2, 2), (None, 3)),
            ("both", (9, 61), (2, 3), (None, None)), ("upto", (61, 3), (2, 2), (100, 7)),
            ("one", (61, 3), (61, 3), None), ("many", (700,), (1,), None),
            ("manygrow", (5000,), (1,), (None,)),
        ) if version != "latest" else ():  # fmt: skip
            for how in ({}, {"compression": "gzip", "shuffle": True, "fletcher32": True}):
                if name == "manygrow" and how:
                    continue  # it is there for the three levels of its tree
                file.create_dataset(
                    name + "z" * len(how), data=rng.integers(0, 999, shape), chunks=chunks,
                    maxshape=most, **how,
                )  # fmt: skip
        if version != "latest":
            sparse = file.create_dataset("sparse", (9000,), ">i4", chunks=(1,), fillvalue=7)
            sparse[5], sparse[8000:8010] = 1, 2
            far = file.create_dataset("far", (60_000,), "i2", chunks=(1,), maxshape=(None,))
            far[40_000:40_050] = 1
        filled = file.create_dataset("filled", (9,), ">f4", fillvalue=7)
        assert filled.id.get_offset() is None
        bf16 = file.create_dataset("bf16", data=np.arange(60, dtype="u2").view("V2"))
        for n in range(20):  # more than a header holds
            bf16.attrs[f"a{n}"] = n
        bf16.attrs["dtype"] = "bfloat16"
        tracked = file.create_group("tracked", track_order=True)
        for n in range(300):
            tracked[f"a{n}"] = n
    found = unickpt.open(path)
    with h5py.File(path) as file:
        assert len(found) == (302 if version == "latest" else 13 + 4 + 300)
        for name in found:
            expected = np.asarray(file[name][()])
            expected = expected.astype(expected.dtype.newbyteorder("="))
            assert np.asarray(found[name][...]).tobytes() == expected.tobytes(), name
    assert unickpt.verify(path).ok


@pytest.mark.parametrize("version", ["v110", "latest"])
def test_chunks_of_newer_versions_are_refused_by_name(version: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver=version) as file:
        file.create_dataset("w", data=np.arange(100), chunks=(7,))
    with pytest.raises(UnsupportedFormat, match=r"x\.h5: 'w' has a layout.*libver=\(\"earliest"):
        unickpt.open(tmp_path / "x.h5")


def test_a_compact_dataset(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        made = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        made.set_layout(h5py.h5d.COMPACT)
        for name, value in (("w", np.arange(12.0).reshape(3, 4)), ("one", np.array(5.0))):
            space = h5py.h5s.create_simple(value.shape) if value.ndim else h5py.h5s.create(0)
            made_here = h5py.h5d.create(file.id, name.encode(), h5py.h5t.IEEE_F64BE, space, made)
            made_here.write(h5py.h5s.ALL, h5py.h5s.ALL, value)
    found = unickpt.open(tmp_path / "x")
    assert np.array_equal(found["w"][1:, 2:], np.arange(12.0).reshape(3, 4)[1:, 2:])
    assert found["one"][...] == 5
    assert unickpt.verify(tmp_path / "x").ok


def test_damage_is_an_error_or_other_data(tmp_path: Path) -> None:
    data = [(foreign.folder("keras-h5") / "model.weights.h5").read_bytes()]
    for version in ("earliest", "v108", "latest"):
        with h5py.File(tmp_path / "x.h5", "w", libver=version) as file:
            for n in range(30):
                file[f"g/a{n}"] = np.arange(3)
                file["g"].attrs[f"a{n}"] = n
            file["bool"], file["complex"] = np.array([True]), np.ones(3, complex)
            if version != "latest":
                how = {"compression": "gzip", "shuffle": True, "fletcher32": True}
                file.create_dataset("c", data=np.arange(99).reshape(33, 3), chunks=(2, 2), **how)
        data.append((tmp_path / "x.h5").read_bytes())
    rng = np.random.default_rng(0)
    for n in range(120):
        bad = bytearray(data[n % 4])
        for at in rng.integers(0, len(bad) - 8, rng.choice([1, 3, 20])):
            if n % 3:
                bad[at] = rng.integers(0, 255)
            else:  # an address, or a size
                word = rng.choice([0, 1, 1 << 40, len(bad) - 1, rng.integers(0, len(bad))])
                bad[at & ~7 : (at & ~7) + 8] = struct.pack("<Q", word)
        (tmp_path / "x.h5").write_bytes(bad[: None if n % 2 else rng.integers(1, len(bad))])
        with contextlib.suppress(UnickptError):
            unickpt.load(tmp_path / "x.h5")


def test_a_chunk_that_expands_beyond_its_size_is_not_unpacked(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        w = file.create_dataset("w", (1000,), np.uint8, chunks=(1000,), compression="gzip")
        w.id.write_direct_chunk((0,), zlib.compress(bytes(1 << 26)))
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointCorrupt, match=r"'w'.*has 1005 bytes, 1000 expected"):
            unickpt.load(tmp_path / "x")
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_names_that_share_bytes_end(tmp_path: Path) -> None:
    with writing(tmp_path / "x") as file:
        for n in range(3000):
            file.create_group(f"group{n:04}")
    path = tmp_path / "x" / "model.weights.h5"
    data, names = path.read_bytes(), b"".join(b"group%04d" % n + bytes(7) for n in range(3000))
    assert names in data
    path.write_bytes(data.replace(names, names[:-1].replace(b"\0", b"x") + b"\0"))
    with pytest.raises(CheckpointCorrupt, match="lead back to themselves"):
        unickpt.open(path)


@pytest.mark.parametrize("version", ["earliest", "v108", "latest"])
def test_many_small_groups_are_no_damage(version: str, tmp_path: Path) -> None:
    with h5py.File(tmp_path / "x.h5", "w", libver=(version, "latest")) as file:
        file["w"] = np.ones(2)
        for n in range(2000):
            file.create_group(f"groups/{n}")
            if n < 400:
                file["groups"].attrs[f"a{n}"] = n
    assert list(unickpt.open(tmp_path / "x.h5")) == ["w"]


def test_what_pyfive_is_led_to_read_is_bounded() -> None:
    reads = list[tuple[int, int]]()

    def fetch(offset: int, count: int) -> bytes:
        reads.append((offset, count))
        return bytes(count)

    file = BoundedFile("x.h5", 200_000, fetch)
    with file.at_most(1000), pytest.raises(CheckpointCorrupt, match="is too large"):
        file.read(1001)
    assert reads == []
    with file.at_most(1000, 2500):  # copied: 1000 bytes each time, with those before
        file.read(1000)
        file.read(0)
        with pytest.raises(CheckpointCorrupt, match="is too large"):
            file.read(0)
    file.seek(0)
    assert file.read() == bytes(200_000)
    file.seek(-1)
    with pytest.raises(CheckpointCorrupt, match="needs bytes -1 to 9, and has 200000"):
        file.read(10)
    for _ in range(12):
        file.seek(0)
        file.read(199_999)
    file.seek(0)
    with pytest.raises(CheckpointCorrupt, match="lead back to themselves"):
        file.read(199_999)


@pytest.mark.parametrize(
    "error", [RecursionError(), MemoryError(), IndexError(1), AssertionError(), struct.error("x")]
)
def test_every_error_of_pyfive_names_the_file(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("pyfive.dataobjects.DataObjects.find_msg_type", fail)
    told = rf"model\.weights\.h5 is damaged: pyfive cannot parse it: {type(error).__name__}"
    with pytest.raises(CheckpointCorrupt, match=told):
        unickpt.open(foreign.folder("keras-h5"))


def test_without_pyfive_the_error_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyfive.dataobjects", None)
    with pytest.raises(UnsupportedFormat, match=r"h5: .*pip install 'unickpt\[h5\]'"):
        unickpt.open(foreign.folder("keras-h5"))
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n"
    (tmp_path / "x.h5").write_text(pointer)
    with pytest.raises(UnsupportedFormat, match="Git LFS"):
        unickpt.open(tmp_path)


def test_nothing_needs_h5py(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "h5py", None)
    assert len(unickpt.load(foreign.folder("keras-h5"))) > 0


# --- several files of one model -------------------------------------------------------------------


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What Keras's save_weights wrote, in one file and in several."""
    keras: Any = pytest.importorskip("keras")
    path = tmp_path_factory.mktemp("sharded")
    inner = keras.Sequential([keras.layers.Dense(4, name="in_a"), keras.layers.Dense(3)])
    layers = [keras.layers.LSTM(6, name="rnn"), inner, keras.layers.Dense(2, name="out")]
    model = keras.Sequential([keras.layers.Input((5, 3)), *layers])
    (path / "shards").mkdir()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Keras, about NumPy's `copy`
        model.save_weights(path / "whole.weights.h5")
        model.save_weights(path / "shards" / "model.weights.json", max_shard_size=6e-7)
    return path


@pytest.mark.integration
def test_weights_in_several_files_are_one_checkpoint(sharded: Path, tmp_path: Path) -> None:
    whole = unickpt.open(sharded / "whole.weights.h5")
    assert len(list((sharded / "shards").glob("*.h5"))) > 2
    for path in (sharded / "shards", sharded / "shards" / "model.weights.json"):
        found = unickpt.open(path)
        assert sorted(found) == sorted(whole)
        assert all(found[name][...].tobytes() == whole[name][...].tobytes() for name in whole)
        assert unickpt.verify(path).ok
    unickpt.convert(sharded / "shards", tmp_path / "own")
    assert unickpt.diff(tmp_path / "own", sharded / "whole.weights.h5").same


@pytest.mark.integration
def test_one_of_several_files_says_so(sharded: Path) -> None:
    shard = sharded / "shards" / "model_00001.weights.h5"
    told = CliRunner().invoke(app, ["inspect", str(shard)]).output
    assert "not part of it: model.weights.json" in told
    with pytest.raises(unickpt.LoadMismatch, match=r"one of several files.*model\.weights\.json"):
        unickpt.load(shard, {"layers/rnn/cell/vars/0": np.zeros((3, 24), np.float32)})


@pytest.mark.integration
def test_a_shard_that_is_missing_or_another_is_named(sharded: Path, tmp_path: Path) -> None:
    path = Path(shutil.copytree(sharded / "shards", tmp_path / "c"))
    index = json.loads((path / "model.weights.json").read_text())
    index["weight_map"]["/layers/new/vars"] = ["model_00001.weights.h5"]
    (path / "model.weights.json").write_text(json.dumps(index))
    with pytest.raises(
        CheckpointCorrupt, match=r"'layers/new/vars' is in model_00001.*not contain"
    ):
        unickpt.open(path)
    for text in (b"{", b"[]", b'{"weight_map": {"/a": ["../x_00000.weights.h5"]}}'):
        (path / "model.weights.json").write_bytes(text)
        with pytest.raises(CheckpointCorrupt, match=r"model\.weights\.json"):
            unickpt.open(path)
    shutil.copy(sharded / "shards" / "model.weights.json", path)
    (path / "model_00001.weights.h5").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"model_00001\.weights\.h5 is missing"):
        unickpt.open(path)


@pytest.mark.parametrize("latest", [False, True])
def test_the_configuration_of_a_whole_model_is_metadata(latest: bool, tmp_path: Path) -> None:
    long = '{"layers": "' + "x" * 200_000 + '"}'
    with h5py.File(tmp_path / "m.h5", "w", libver="latest" if latest else "earliest") as file:
        file.attrs["model_config"] = long
        file.attrs["keras_version"] = np.bytes_(b"2.3.1")
        file.create_dataset("model_weights/dense/kernel:0", data=np.ones((2, 2), "f4"))
    found = unickpt.open(tmp_path / "m.h5")
    assert found.metadata == {"model_config": long, "keras_version": "2.3.1"}
    unickpt.convert(found, tmp_path / "own")
    assert unickpt.open(tmp_path / "own").metadata["model_config"] == long
