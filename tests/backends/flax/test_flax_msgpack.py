"""Files of Flax: read without flax and msgpack, bit for bit; arrays in place."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import foreign, s3_server

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt, UnickptError
from unickpt.backends.flax import reader as flax_msgpack
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested

CASES = ["flax-msgpack", "flax-legacy"]


def packed(value: Any) -> bytes:
    """As flax.serialization.msgpack_serialize, which needs jax."""

    def extension(x: Any) -> Any:
        if isinstance(x, complex):
            return msgpack.ExtType(2, msgpack.packb((x.real, x.imag)))
        array = np.asarray(x)
        data = msgpack.packb((array.shape, array.dtype.name, array.tobytes()), use_bin_type=True)
        return msgpack.ExtType(1 if isinstance(x, np.ndarray) else 3, data)

    found: bytes = msgpack.packb(value, default=extension, strict_types=True)
    return found


def opened(path: Path | str) -> Checkpoint:
    found = foreign.opened(path, flax_msgpack)
    assert found is not None
    return found


def written(path: Path, data: bytes) -> Path:
    path.mkdir(exist_ok=True)
    (path / "flax_model.msgpack").write_bytes(data)
    return path


def read(path: Path, value: Any) -> Checkpoint:
    return opened(written(path, packed(value)))


class TestSuite(ReaderSuite):
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        written(path, packed(nested({**arrays, **values})))

    def damage(self, path: Path, name: str) -> None:
        file = path / "flax_model.msgpack"
        data = bytearray(file.read_bytes())
        at = data.find(b"float32")
        data[at - 3] = 0x7F  # an extent of the first array
        file.write_bytes(data)


@pytest.mark.parametrize("case", CASES)
def test_what_flax_wrote_reads_bit_for_bit(case: str) -> None:
    found = opened(foreign.folder(case))
    assert [name for name in foreign.differences(case, found) if name != "complex"] == []
    assert found["complex"][...] == np.complex64(1 + 2j)
    assert found.values["step"] == 9
    [file] = foreign.folder(case).iterdir()
    assert unickpt.load(file)["opt"].keys() == {"0", "1"}


@pytest.mark.parametrize("case", CASES)
def test_from_s3(case: str, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, case)
    [file] = foreign.folder(case).iterdir()
    store = resolve(f"s3://{case}/a").store(paths.context())
    store.write(file.name, file.read_bytes()).result()
    for path in (f"s3://{case}/a", f"s3://{case}/a/{file.name}"):
        found = unickpt.open(path)
        assert foreign.differences(case, found) == ["complex"]
    for cut in (1, 60, 300):
        store.write(file.name, file.read_bytes()[:-cut]).result()
        with pytest.raises(CheckpointCorrupt, match=file.name):
            unickpt.open(f"s3://{case}/a")


def test_every_kind_of_value(tmp_path: Path) -> None:
    values = {
        "none": None, "yes": True, "no": False, "text": "ä" * 300, "bytes": b"\xff" * 70000,
        "float": 0.1, "inf": float("-inf"), "list": [1, [2.5, "x"]], "big": (1 << 64) - 1,
        **{f"int{n}": n for n in (0, 127, 128, 255, 256, 65535, 65536, 1 << 32, -1, -32, -33)},
        **{f"low{n}": n for n in (-128, -129, -32768, -32769, -(1 << 31) - 1, -(1 << 63))},
    }  # fmt: skip
    arrays = {
        "bf16": np.arange(5, dtype=ml_dtypes.bfloat16), "f8": np.ones(3, ml_dtypes.float8_e4m3fn),
        "c": np.array([1 + 2j]), "empty": np.zeros((0, 3)), "scalar": np.float32(2.5),
        "complex": 1 + 2j, "flag": np.bool_(True), "wide": np.zeros((1,) * 20, np.int8),
    }  # fmt: skip
    many = {str(n): {"x": n} for n in range(70_000)}
    loaded = unickpt.load(written(tmp_path / "x", packed({**values, **arrays, "many": many, 5: 6})))
    assert {k: v for k, v in loaded.items() if k in values} == values
    for name, array in arrays.items():
        assert loaded[name].dtype == np.asarray(array).dtype
        assert np.asarray(loaded[name]).tobytes() == np.asarray(array).tobytes()
    assert loaded["many"] == many
    assert loaded[5] == 6


def test_the_root_can_be_an_array(tmp_path: Path) -> None:
    (tmp_path / "x.msgpack").write_bytes(packed(np.arange(3)))
    assert np.array_equal(opened(tmp_path)[""][...], np.arange(3))


def chunked(array: np.ndarray, count: int) -> dict[str, Any]:
    flat = array.reshape(-1)
    pieces = [flat[at : at + count] for at in range(0, flat.size, count)]
    return {
        "__msgpack_chunked_array__": True,
        "shape": {str(n): x for n, x in enumerate(array.shape)},
        "chunks": {str(n): piece for n, piece in enumerate(pieces)},
    }


def test_cut_arrays_are_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    array = np.arange(600_000, dtype=np.float32).reshape(600, 1000)
    path = written(tmp_path / "x", packed({"w": chunked(array, 70_001)}))
    reads = foreign.count_reads(monkeypatch)
    found = opened(path)
    assert sum(count for _, count in reads) < 700_000  # a window for each chunk
    assert np.array_equal(found["w"][69:72, 5:900], array[69:72, 5:900])
    assert np.array_equal(found["w"][...], array)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": {"0": 5}}, {"shape": {"0": -6}}, {"shape": {"1": 6}}, {"shape": 6}, {"shape": {}},
        {"chunks": {"0": np.arange(6)}, "shape": None}, {"chunks": {}}, {"chunks": {"0": 5}},
        {"chunks": {"1": np.arange(6)}}, {"chunks": {"0": np.arange(3), "1": np.arange(3.0)}},
        {"shape": {"0": 1 << 62}}, {"shape": {str(n): 1 << 40 for n in range(20)}},
    ],
)  # fmt: skip
def test_a_wrongly_cut_array_is_damage(change: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"flax_model\.msgpack"):
        read(tmp_path / "x", {"w": {**chunked(np.arange(6), 4), **change}})


@pytest.mark.parametrize("text", ["PLACEHOLDER://w", "//GDAPlaceholder:w"])
def test_arrays_elsewhere_are_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="'a/b' is not in this file, but elsewhere"):
        read(tmp_path / "x", {"a": {"b": text}})


def test_what_is_not_known_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match="'a' is an extension of the unknown type 9"):
        read(tmp_path / "x", {"a": msgpack.ExtType(9, b"x")})
    inner = msgpack.packb(((2,), "str64", b"x" * 16))
    with pytest.raises(UnsupportedFormat, match="'a' has the dtype 'str64'"):
        read(tmp_path / "x", {"a": msgpack.ExtType(1, inner)})


def test_little_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {f"w{n}": np.arange(300_000, dtype=np.int64) for n in range(3)}
    path = written(tmp_path / "x", packed(arrays))
    reads = foreign.count_reads(monkeypatch)
    found = opened(path)
    assert sum(count for _, count in reads) < 300_000
    reads.clear()
    assert np.array_equal(found["w1"][1000:2000], np.arange(1000, 2000))
    assert sum(count for _, count in reads) < 2_500_000


def test_names_and_depth_are_bounded(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(300):
        deep = {"x": deep}
    with pytest.raises(UnsupportedFormat, match="nested deeper"):
        read(tmp_path / "x", deep)
    array: Any = b"\x00"
    for _ in range(300):
        array = msgpack.packb(msgpack.ExtType(1, array))
    with pytest.raises(CheckpointCorrupt):
        opened(written(tmp_path / "x", b"\x81\xa1x" + array))
    wide = {"k" * 50_000: {str(n): n for n in range(10_000)}}
    with pytest.raises(CheckpointCorrupt, match="names are too long"):
        read(tmp_path / "x", wide)


@given(st.data())
def test_damage_is_an_error_or_other_data(data: st.DataObject) -> None:
    whole = bytearray(packed({"a": np.arange(9.0), "b": {"c": chunked(np.arange(6), 4), "d": "x"}}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(1, len(whole)))
    memory = f"memory://flax-damage-{id(whole)}"
    store = resolve(memory).store(paths.context())
    store.write("x.msgpack", bytes(whole[:cut])).result()
    with contextlib.suppress(UnickptError):
        unickpt.load(memory)
    store.write("x.msgpack", None).result()


def test_several_steps_of_flax_are_named(tmp_path: Path) -> None:
    for step in (8, 9):
        shutil.copy(foreign.folder("flax-legacy") / "checkpoint_9", tmp_path / f"checkpoint_{step}")
    with pytest.raises(UnsupportedFormat, match="checkpoint_8, checkpoint_9; give the path of one"):
        unickpt.open(tmp_path)
    assert unickpt.open(tmp_path / "checkpoint_8").values["step"] == 9
