"""ONNX models: their initializers, read without onnx, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, s3_server

import unickpt
from unickpt import CheckpointCorrupt
from unickpt.backends.onnx import reader
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite

NUMBERS = {name: number for number, name in reader._DTYPES.items()}


# --- the wire format, written ---------------------------------------------------------------------


def varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])


def number(field: int, value: int) -> bytes:
    return varint(field << 3) + varint(value)


def message(field: int, *parts: bytes) -> bytes:
    data = b"".join(parts)
    return varint(field << 3 | 2) + varint(len(data)) + data


def tensor(name: str, kind: int, shape: tuple[int, ...], *data: bytes) -> bytes:
    dims = [number(1, n) for n in shape]
    return message(5, *dims, number(2, kind), message(8, name.encode()), *data)


def raw(name: str, array: np.ndarray) -> bytes:
    return tensor(name, NUMBERS[array.dtype.name], array.shape, message(9, array.tobytes()))


def external(name: str, array: np.ndarray, **facts: Any) -> bytes:
    pairs = [message(13, message(1, k.encode()), message(2, str(v).encode()))
             for k, v in facts.items()]  # fmt: skip
    return tensor(name, NUMBERS[array.dtype.name], array.shape, *pairs, number(14, 1))


def model(*tensors: bytes) -> bytes:
    node = message(1, message(1, b"x"), message(2, b"y"))
    graph = message(7, node, *tensors, message(2, b"graph"))
    return number(1, 8) + message(2, b"unickpt") + graph + message(8, number(2, 17))


class TestSuite(ReaderSuite):
    has_digests = False
    values: Mapping[str, Any] = {}

    def name(self, name: str) -> str:
        return name.replace("/", ".")

    def tree(self, name: str, leaf: Any) -> Any:
        return {self.name(name): leaf}

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        path.mkdir()
        tensors, data = [], b""
        for number, (name, array) in enumerate(arrays.items()):
            facts = {"location": "./w.bin", "offset": len(data), "length": array.nbytes}
            is_raw = number > 0
            tensors.append((raw if is_raw else external)(
                self.name(name), array, **({} if is_raw else facts)))  # fmt: skip
            data += b"" if is_raw else array.tobytes()
        (path / "w.bin").write_bytes(data)
        (path / "model.onnx").write_bytes(model(*tensors))

    def damage(self, path: Path, name: str) -> None:
        (path / "w.bin").write_bytes((path / "w.bin").read_bytes()[:1000])


# --- what onnx wrote ------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", "model.onnx"])
def test_what_onnx_wrote_reads_bit_for_bit(path: str) -> None:
    """All dtypes, in bytes, in typed fields and in a file beside: `make.py` there says how."""
    found = unickpt.open(foreign.folder("onnx") / path)
    assert found.reader.format == "onnx"
    assert len(found) == 47
    assert foreign.differences("onnx", found) == []


def test_all_of_it_from_s3(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "onnx-files")
    store = resolve("s3://onnx-files/a").store(paths.context())
    for file in foreign.folder("onnx").iterdir():
        store.write(file.name, file.read_bytes()).result()
    assert foreign.differences("onnx", unickpt.open("s3://onnx-files/a")) == []
    assert foreign.differences("onnx", unickpt.open("s3://onnx-files/a/model.onnx")) == []


def test_arrays_are_not_read_before_they_are_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = [raw(f"w{n}", np.full((1000, 300), n, np.float32)) for n in range(5)]
    (tmp_path / "x.onnx").write_bytes(model(*every))
    reads = foreign.count_reads(monkeypatch)
    found = unickpt.open(tmp_path)
    assert sum(count for _, count in reads) < 600_000  # of 6 MB
    reads.clear()
    assert found["w3"][7, :2].tolist() == [3, 3]
    assert sum(count for _, count in reads) < 1000


def opened(path: Path, *tensors: bytes) -> unickpt.Checkpoint:
    (path / "x.onnx").write_bytes(model(*tensors))
    return unickpt.open(path / "x.onnx")


def test_uint4_is_uint8_and_unknown_types_are_named_when_they_are_read(tmp_path: Path) -> None:
    found = opened(
        tmp_path,
        tensor("four", 21, (3,), message(9, b"\x21\x0f")),
        tensor("text", 8, (1,), message(6, b"abc")),
        tensor("two bits", 26, (4,), message(9, b"\x1b")),
        tensor("packed dims", 1, (), message(1, varint(2), varint(1)), message(9, bytes(8))),
    )
    assert (found["four"].dtype, found["four"][...].tolist()) == (np.uint8, [1, 2, 15])
    assert found["packed dims"].shape == (2, 1)
    for name, kind in (("text", 8), ("two bits", 26)):
        with pytest.raises(UnsupportedFormat, match=rf"'{name}' is of the type {kind}"):
            found[name][...]


def test_a_model_counts_only_where_nothing_else_is(tmp_path: Path) -> None:
    shutil.copytree(foreign.folder("onnx"), tmp_path / "c")
    np.savez(tmp_path / "c" / "x.npz", w=np.ones(2))
    assert unickpt.open(tmp_path / "c").reader.format == "npz"


def test_sparse_initializers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormat, match=r"x\.onnx has sparse initializers"):
        opened(tmp_path, message(15, message(1, b"")))


# --- damage ---------------------------------------------------------------------------------------

W = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize(
    ("bad", "message_"),
    [
        (tensor("w", 1, (7,), message(9, W.tobytes())), "'w': it has 24 bytes, 28 expected"),
        (tensor("w", 1, (-1,), message(9, b"")), "'w'.*not a list of sizes"),
        (tensor("w", 1, (1,) * 40, message(9, W[:1].tobytes())), "'w'.*not a list of sizes"),
        (tensor("w", 1, (1 << 61, 1 << 61), message(9, b"")), "'w': it has 0 bytes"),
        (tensor("w", 1, (2,)), "'w': it has no data"),
        (tensor("w", 7, (2,), message(7, b"\x01")), "'w': its data are 1 numbers, 2 expected"),
        (tensor("w", 7, (1 << 60,), message(7, b"\x01")), "'w': its data are 1 numbers"),
        (tensor("w", 7, (1,), message(7, b"\x81" * 12 + b"\x01")), "'w': its data are"),
        (tensor("w", 7, (1,), message(7, b"\x01\x81")), "'w': its data are"),
        (tensor("w", 6, (1,), number(5, 3)), "data in parts"),
        (tensor("w", 1, (1,), message(3, b"")), "data in parts"),
        (raw("w", W) + raw("w", W), "are called 'w'"),
        (raw("", W), "are called ''"),
        (b"\x2a\xff\xff\xff\xff\x7f", "a field ends at byte"),
        (b"\x2b", "unknown kind 3"),
        (b"\x28" + b"\xff" * 11, "more than ten bytes"),
        (message(5, message(8, b"x" * 70_000)), "a name of 70000 bytes"),
        (external("w", W, location="../w.bin"), "'w'.*'../w.bin', which is no file in the folder"),
        (external("w", W, location="a/../../w.bin"), "no file in the folder"),
        (external("w", W, location="/etc/passwd"), "'/etc/passwd', which is no file"),
        (external("w", W, offset=3), "no file in the folder"),
        (external("w", W, location="w.bin", offset=-8), "'w': 24 bytes at -8 of w.bin"),
        (external("w", W, location="w.bin", length=1), "'w': 1 bytes at 0 of w.bin, 24 expected"),
        (external("w", W, location="w.bin", offset="x"), "'w': invalid literal"),
    ],
    ids=range(24),
)
def test_damage_names_the_file_and_what_is_wrong(bad: bytes, message_: str, tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointCorrupt, match=rf"x\.onnx is a damaged model of ONNX: .*{message_}"
    ):
        opened(tmp_path, bad)


def test_data_that_a_model_names_and_that_are_not_there_name_the_array(tmp_path: Path) -> None:
    found = opened(tmp_path, external("w", W, location="none.bin"), external("b", W, location="b"))
    (tmp_path / "secret").write_bytes(bytes(100))
    (tmp_path / "in").mkdir()
    for name in ("w", "b"):
        with pytest.raises(CheckpointCorrupt, match=f"array '{name}'"):
            found[name][...]
    (tmp_path / "in" / "b").symlink_to(tmp_path / "secret")
    inner = opened(tmp_path / "in", external("b", W, location="b"))
    with pytest.raises(unickpt.UnickptError, match="'b'"):
        inner["b"][...]


def test_every_end_of_a_file_is_damage(tmp_path: Path) -> None:
    data = (foreign.folder("onnx") / "model.onnx").read_bytes()
    for end in range(60, len(data) - 30, 97):
        (tmp_path / "x.onnx").write_bytes(data[:end])
        with pytest.raises(CheckpointCorrupt, match=r"x\.onnx is a damaged model of ONNX"):
            unickpt.open(tmp_path / "x.onnx")
