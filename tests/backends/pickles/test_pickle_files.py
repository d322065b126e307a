"""Plain pickles: arrays as ranges of the file, bit for bit, and nothing runs."""

from __future__ import annotations

import contextlib
import os
import pickle
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from support import file_writers, foreign, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends._files import torch_pickles
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite, nested


class TestSuite(ReaderSuite):
    has_digests = False

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.write_bytes(pickle.dumps(nested({**arrays, **values}), 4))

    @contextlib.contextmanager
    def registered(self) -> Iterator[None]:
        with super().registered(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_pickles, "_LARGE", 1000)  # so that most arrays stay in the file
            yield

    def test_damage_is_an_error_that_names_the_array(self, path: Path) -> None:
        """Of the file, as no array is known before the pickle has been read to its end."""
        path.write_bytes(path.read_bytes()[:-100])
        with pytest.raises(CheckpointCorrupt, match=r"c .*ends at byte"):
            unickpt.open(path)


ARRAYS = {
    "w": np.arange(30_000, dtype=np.float32).reshape(100, 300),
    "fortran": np.asfortranarray(np.arange(24_000.0).reshape(20, 30, 40)),
    "big endian": np.arange(9000, dtype=">i4"),
    "bfloat16": np.arange(20_000).astype(ml_dtypes.bfloat16),
    "float8": np.arange(20_000).astype(ml_dtypes.float8_e4m3fn),
    "small": np.arange(6, dtype=np.int16),
    "none": np.zeros((0, 3), np.uint8),
    "one": np.array(2.5),
}


def native(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.astype(array.dtype.newbyteorder("=")))


def check(found: unickpt.Checkpoint) -> None:
    for name, array in ARRAYS.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, native(array).dtype)
        assert found[name][...].tobytes() == native(array).tobytes()
    assert found["fortran"][3, 4:6, 7].tolist() == ARRAYS["fortran"][3, 4:6, 7].tolist()


@pytest.mark.parametrize("protocol", range(6))
def test_bit_for_bit(protocol: int, tmp_path: Path) -> None:
    value = {**ARRAYS, "list": [1, "x" * 70_000, {3: None}], "blob": b"\xff\0" * 50_000}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, protocol))
    found = unickpt.open(tmp_path)
    assert found.reader.format == "pickle"
    check(found)
    loaded = unickpt.load(tmp_path)
    assert (loaded["list"], loaded["blob"]) == (value["list"], value["blob"])


def test_arrays_are_not_read_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {str(n): np.full(1_000_000, n, np.float32) for n in range(5)}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(large, 4))
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tmp_path / "x.pkl")
    assert sum(count for _, count in reads) < 1_000_000
    reads.clear()
    assert found["3"][7:9].tolist() == [3, 3]
    assert sum(count for _, count in reads) < 1000


def test_a_pickle_of_python_2(tmp_path: Path) -> None:
    """Whose bytes are texts: opcodes `T` and `U` instead of `B` and `C`."""
    short = np.arange(40, dtype=np.uint8)
    data = pickle.dumps({"short": short, "long": ARRAYS["w"]}, 3)
    data = data.replace(b"C\x28" + short.tobytes(), b"U\x28" + short.tobytes())
    size = ARRAYS["w"].nbytes.to_bytes(4, "little")
    assert data.count(b"B" + size) == 1
    (tmp_path / "x.pkl").write_bytes(data.replace(b"B" + size, b"T" + size))
    found = unickpt.open(tmp_path / "x.pkl")
    assert found["short"][...].tobytes() == short.tobytes()
    assert found["long"][...].tobytes() == ARRAYS["w"].tobytes()


def test_arrays_of_jax_and_frozen_dicts(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    flax = pytest.importorskip("flax")
    w = jax.numpy.arange(12_000, dtype=jax.numpy.bfloat16).reshape(3, -1)
    tree = flax.core.freeze({"params": {"w": w, "b": jax.numpy.ones(3)}})
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(tree))
    found = unickpt.open(tmp_path / "x.pkl")
    assert sorted(found) == ["params/b", "params/w"]
    assert found["params/w"].dtype == ml_dtypes.bfloat16
    assert found["params/w"][...].tobytes() == np.asarray(w).tobytes()


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "pickle-files")
    store = resolve("s3://pickle-files/a").store(paths.context())
    data = pickle.dumps(ARRAYS, 4)
    store.write("x.pkl", data).result()
    check(unickpt.open("s3://pickle-files/a/x.pkl"))
    store.write("x.pkl", data[:-2000]).result()
    with pytest.raises(CheckpointCorrupt, match=r"x\.pkl"):
        unickpt.open("s3://pickle-files/a/x.pkl")


def test_a_pickle_counts_only_where_nothing_else_is(tmp_path: Path) -> None:
    (tmp_path / "stats.pkl").write_bytes(pickle.dumps({"mean": np.ones(2)}))
    (tmp_path / "model.pt").write_bytes(file_writers.torch_zip({"w": np.ones(2, np.float32)}))
    found = unickpt.open(tmp_path)
    assert (found.reader.format, list(found), found.reader.beside) == (
        "torch", ["w"], ("stats.pkl",),
    )  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
def test_pickles_beside_checkpoints_do_not_count(count: int, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step_1", {"w": np.ones(2)})
    for number in range(count):
        (tmp_path / f"{number}.pkl").write_bytes(pickle.dumps({"mean": np.ones(2)}))
    with pytest.raises(unickpt.CheckpointNotFound):
        unickpt.open(tmp_path)


def test_a_plain_pickle_under_a_name_of_torch(tmp_path: Path) -> None:
    (tmp_path / "model.pth").write_bytes(pickle.dumps(ARRAYS, 2))
    check(unickpt.open(tmp_path))
    check(unickpt.open(tmp_path / "model.pth"))


# --- what only its class can read -----------------------------------------------------------------


class Ran:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def test_nothing_that_a_pickle_names_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": np.ones(2), "x": Ran(str(made))}))
    found = unickpt.open(tmp_path / "x.pkl")
    assert found["w"][...].tolist() == [1, 1]
    assert isinstance(found.values["x"], unickpt.Opaque)
    assert not made.exists()


def test_an_object_with_large_bytes_is_opaque_and_whole(tmp_path: Path) -> None:
    value = {"masked": np.ma.masked_array(np.arange(30_000), np.arange(30_000) % 2), "n": 1}
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(value, 4))
    found = unickpt.load(tmp_path / "x.pkl")["masked"]
    assert isinstance(found, unickpt.Opaque)
    again = pickle.loads(found.pickle)
    assert (again.data == value["masked"].data).all()
    assert (again.mask == value["masked"].mask).all()


def test_a_pickle_of_one_object_is_refused_by_its_class(tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(pickle.dumps(Fraction(1, 3)))
    with pytest.raises(UnsupportedFormat, match=r"x\.pkl.*'fractions\.Fraction'.*pickle\.load"):
        unickpt.open(tmp_path / "x.pkl")


def test_tensors_in_a_plain_pickle_are_refused_with_the_way_out(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    (tmp_path / "x.pkl").write_bytes(pickle.dumps({"w": torch.ones(2)}))
    with pytest.raises(UnsupportedFormat, match=r"x\.pkl: .*torch\.save"):
        unickpt.open(tmp_path / "x.pkl")


# --- damage ---------------------------------------------------------------------------------------


def pickled(body: bytes) -> bytes:
    return b"\x80\x04" + body + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickled(b"\x8e" + (1 << 62).to_bytes(8, "little")), r"ends at byte"),
        (pickled(b"B\xff\xff\xff\xff"), r"ends at byte"),
        (pickled(b"\x8d" + (1 << 62).to_bytes(8, "little")), r"a value of \d+ bytes"),
        (pickled(b"X\x10\0\0\0abc"), r"ends at byte"),
        (pickled(b"}\xfe"), r"unknown opcode"),
        (pickled(b"cnumpy"), r"ends at byte"),
        (pickled(b"a"), r"the stack is empty"),
    ],
)
def test_damage_names_the_file_and_what_is_wrong(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=rf"x\.pkl.*{message}"):
        unickpt.open(tmp_path / "x.pkl")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickled(b"}Q"), "external data"),
        (pickled(b"Pmore\n"), "external data"),
        (pickle.dumps({"w": 1}) + pickle.dumps({"b": 2}), "more behind its pickle"),
    ],
)
def test_what_is_not_read_is_named(data: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.pkl").write_bytes(data)
    with pytest.raises(UnsupportedFormat, match=rf"x\.pkl.*{message}"):
        unickpt.open(tmp_path / "x.pkl")


def test_every_end_of_a_file_is_damage(tmp_path: Path) -> None:
    data = pickle.dumps({"w": ARRAYS["w"][:1], "x": [1.0, "text", Fraction(1, 2)]}, 4)
    for end in range(16, len(data), 5):
        (tmp_path / "x.pkl").write_bytes(data[:end])
        with pytest.raises(CheckpointCorrupt, match=r"x\.pkl"):
            unickpt.open(tmp_path / "x.pkl")
