"""safetensors: files and Hugging Face folders, as others write them and as an enemy would."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import foreign, s3_server

import unickpt
from unickpt import Checkpoint, CheckpointCorrupt, UnickptError
from unickpt.backends.safetensors import reader as safetensors
from unickpt.errors import UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve
from unickpt.types import Box, LocalFragments

CASES = ["hf-sharded", "hf-single", "st-dtypes", "dcp-hf-sharded", "dcp-hf-consolidated"]
NAMES = {"float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}


def packed(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def encoded(arrays: Mapping[str, np.ndarray], metadata: Any = None) -> bytes:
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, array in arrays.items():
        end = len(data) + array.nbytes
        facts = {"dtype": NAMES[array.dtype.name], "shape": list(array.shape)}
        header[name] = {**facts, "data_offsets": [len(data), end]}
        data += array.tobytes()
    return packed(header, data)


def opened(path: Path | str) -> Checkpoint:
    found = foreign.opened(path, safetensors)
    assert found is not None
    return found


def folder(path: Path, **files: bytes) -> Path:
    path.mkdir(exist_ok=True)
    for name, data in files.items():
        (path / f"{name}.safetensors").write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("rows", "second", "read_rows"),
    [(512, 2048, 1024), (512, 520, 1024), (9, 600, 18), (9, 99, 108)],
)
def test_parts_of_an_array_are_read_without_what_is_between_unless_that_is_little(
    tmp_path: Path, rows: int, second: int, read_rows: int
) -> None:
    data = np.random.default_rng(3).random((4096, 256), np.float32)
    path = folder(tmp_path / "c", model=encoded({"w": data}))
    boxes = [Box((first, 0), (first + rows, 256)) for first in (0, second)]
    parts = [(box, np.zeros(box.shape, np.float32)) for box in boxes]
    like = {"w": LocalFragments(data.shape, parts)}
    _, report = unickpt.load(path, like, return_report=True)
    for box, filled in parts:
        assert filled.tobytes() == data[box.slices].tobytes()
    assert report.read_bytes == read_rows * data[0].nbytes


@pytest.mark.parametrize("case", CASES)
def test_what_others_wrote_reads_bit_for_bit(case: str) -> None:
    found = opened(foreign.folder(case))
    assert foreign.differences(case, found) == []


def test_metadata_of_the_files_are_kept() -> None:
    assert opened(foreign.folder("st-dtypes")).index.metadata["note"] == "mine"


@pytest.mark.parametrize("case", ["hf-sharded", "dcp-hf-sharded"])
def test_all_of_it_from_s3(case: str, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, f"safetensors-{case}")
    url = f"s3://safetensors-{case}/a"
    store = resolve(url).store(paths.context())
    for file in foreign.folder(case).iterdir():
        store.write(file.name, file.read_bytes()).result()
    assert foreign.differences(case, opened(url)) == []
    name = next(n for n in sorted(f.name for f in foreign.folder(case).iterdir()) if "00002" in n)
    data = (foreign.folder(case) / name).read_bytes()
    store.write(name, data[:-8]).result()  # the storage tells no sizes
    found = opened(url)
    with pytest.raises(CheckpointCorrupt, match="array '"):
        read_all(found)


def test_load_and_convert(tmp_path: Path) -> None:
    path = foreign.folder("dcp-hf-sharded")
    with foreign.registered(safetensors):
        found = unickpt.load(path)
        assert found["head.weight"].shape == (16, 4)
        unickpt.convert(path, tmp_path / "own")
        assert foreign.differences("dcp-hf-sharded", unickpt.open(tmp_path / "own")) == []
        assert not unickpt.diff(path, tmp_path / "own").differences
        assert unickpt.verify(path).unverified


def test_a_part_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    big = np.arange(4_000_000, dtype=np.int64).reshape(2000, 2000)
    path = folder(tmp_path / "c", model=encoded({"a": big, "b": np.ones(3)}))
    reads = foreign.count_reads(monkeypatch)
    found = opened(path)
    assert sum(count for _, count in reads) < 1000
    assert np.array_equal(found["a"][5:6], big[5:6])
    assert sum(count for _, count in reads) < 5 << 20


def test_names_with_slashes_stay_single_names(tmp_path: Path) -> None:
    found = opened(folder(tmp_path / "c", model=encoded({"a/b": np.ones(2), "__x": np.ones(3)})))
    assert sorted(found) == ["%5F_x", "a%2Fb"]
    assert sorted(found.index.tree["dict"]) == [["__x", "*"], ["a/b", "*"]]


# --- damage -------------------------------------------------------------------------------------


def read_all(found: Checkpoint) -> None:
    for name in found:
        found[name][...]


def test_a_missing_file_names_the_file(tmp_path: Path) -> None:
    for case, file in [
        ("hf-sharded", "model-00002-of-00004.safetensors"),
        ("dcp-hf-sharded", "shard-00002-model-00001-of-00002.safetensors"),
    ]:
        path = shutil.copytree(foreign.folder(case), tmp_path / case)
        (path / file).unlink()
        with pytest.raises(CheckpointCorrupt, match=r"model-00002|'embed.weight'|layers.0"):
            opened(path)


def test_truncation_names_the_file(tmp_path: Path) -> None:
    data = encoded({"a": np.ones(5), "b": np.ones(3)})
    for count in range(len(data)):
        with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
            opened(folder(tmp_path / "c", model=data[:count]))
    with pytest.raises(CheckpointCorrupt, match=r"model\.safetensors"):
        opened(folder(tmp_path / "c", model=data + b"x"))


F = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    "header",
    [
        b"", b"{", b"[]", b"1", b"\xff\xff", b"[" * 100_000, b'{"a": 1}', b'{"a": {}}',
        json.dumps({"a": F})[:-1].encode() + b', "a": ' + json.dumps(F).encode() + b"}",
        {"a": F, "b": F}, {"a": {**F, "data_offsets": [4, 12]}}, {"a": {**F, "shape": [3]}},
        {"a": {**F, "shape": [-2]}}, {"a": {**F, "shape": 2}}, {"a": {**F, "shape": [2.0]}},
        {"a": {**F, "shape": [True, 2]}}, {"a": {**F, "data_offsets": [0]}},
        {"a": {**F, "data_offsets": [8, 0]}}, {"a": {**F, "data_offsets": "08"}},
        {"a": {**F, "shape": [1 << 62] * 100_000}}, {"a": {**F, "shape": [1] * 33 + [2]}},
        {"a": {**F, "dtype": ["F32"]}}, {"a": F, "__metadata__": 1},
        {"a": F, "__metadata__": {"x": 1}}, {"\ud800": F},
        {"a": F, "__metadata__": {"DCP_SHARDING_INFO": "{"}},
        {"a": F, "__metadata__": {"DCP_SHARDING_INFO": '{"a": 1}'}},
        {"a": F, "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [0, 0]}}'}},
        {"a": F, "__metadata__": {"DCP_SHARDING_INFO": '{"a": {"saved_offsets": [1]}}'}},
    ],
)  # fmt: skip
def test_a_bad_header_is_an_error(header: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointCorrupt, match=r"model|'a'"):
        opened(folder(tmp_path / "c", model=packed(header, bytes(8))))


def test_every_dtype_of_eight_bits(tmp_path: Path) -> None:
    kinds = {"F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
    kinds |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
    for code, dtype in kinds.items():
        facts = {"dtype": code, "shape": [2, 4], "data_offsets": [0, 8]}
        found = opened(folder(tmp_path / code, model=packed({"a": facts}, bytes(range(8)))))
        assert (str(found["a"].dtype), found["a"][...].tobytes()) == (dtype, bytes(range(8)))


def test_four_bits_are_read_as_torch_packs_them(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    raw = torch.arange(21, dtype=torch.uint8).reshape(3, 7) * 11
    path = folder(tmp_path / "c") / "model.safetensors"
    save_file({"w": raw.view(torch.float4_e2m1fn_x2), "beside": torch.ones(3)}, path)
    found = opened(path.parent)
    whole = np.stack((raw.numpy() & 15, raw.numpy() >> 4), axis=2).reshape(3, 14)
    assert (str(found["w"].dtype), found["w"].shape) == ("float4_e2m1fn", (3, 14))
    assert np.array_equal(found["w"][...].view(np.uint8), whole)
    for begin in range(14):
        for end in range(begin, 15):
            assert np.array_equal(found["w"][1:, begin:end].view(np.uint8), whole[1:, begin:end])
    unickpt.convert(path.parent, tmp_path / "ours")
    assert unickpt.diff(path.parent, tmp_path / "ours").same


def test_an_odd_number_of_four_bits(tmp_path: Path) -> None:
    facts = {"dtype": "F4", "shape": [3], "data_offsets": [0, 2]}
    found = opened(folder(tmp_path / "c", model=packed({"a": facts}, b"\x21\x03")))
    assert found["a"][...].view(np.uint8).tolist() == [1, 2, 3]


def test_a_dtype_of_the_future_refuses_only_its_tensor(tmp_path: Path) -> None:
    header = {"a": {**F, "dtype": "F6_E2M3"}, "b": {**F, "data_offsets": [8, 16]}}
    path = folder(tmp_path / "c", model=packed(header, bytes(8) + struct.pack("<2f", 1, 2)))
    assert unickpt.load(path, only=["b"])["b"].tolist() == [1, 2]
    for read in (unickpt.load, lambda p: unickpt.open(p)["a"][...], unickpt.verify):
        with pytest.raises(UnsupportedFormat, match=r"'a' has the dtype 'F6_E2M3', which .*only="):
            read(path)
    with pytest.raises(UnsupportedFormat, match="'a' has the dtype 'F6_E2M3'"):
        unickpt.convert(path, tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_changed_headers_are_another_checkpoint_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(encoded({"a": np.ones((2, 2)), "b": np.zeros(3, np.float32)}, {"x": "y"}))
    for at, byte in changes:
        data[at % (len(data) - 44)] = byte
    path = folder(tmp_path_factory.mktemp("c"), model=bytes(data))
    with contextlib.suppress(UnickptError):
        read_all(opened(path))


def test_mixed_files_are_refused(tmp_path: Path) -> None:
    one, other = encoded({"a": np.ones(3)}), encoded({"a": np.zeros(3), "b": np.ones(1)})
    path = folder(tmp_path / "c", one=one, two=other)
    with pytest.raises(CheckpointCorrupt, match=r"'a' is in one\.safetensors and in two"):
        opened(path)


def write_index(path: Path, weight_map: Any) -> None:
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_the_index_says_which_file_counts(tmp_path: Path) -> None:
    one, other = encoded({"a": np.ones(3)}), encoded({"a": np.zeros(3), "b": np.ones(1)})
    path = folder(tmp_path / "c", one=one, two=other)
    write_index(path, {"a": "one.safetensors", "b": "two.safetensors"})
    assert np.array_equal(opened(path)["a"][...], np.ones(3))
    write_index(path, {"a": "two.safetensors", "b": "two.safetensors"})
    assert np.array_equal(opened(path)["a"][...], np.zeros(3))
    write_index(path, {"a": "two.safetensors"})
    assert sorted(opened(path)) == ["a", "b"]


@pytest.mark.parametrize(
    "weight_map",
    [None, [], 1, {"a": 1}, {"a": "../one.safetensors"}, {"a": "/etc/passwd"}, {"a": ""},
     {"a": "three.safetensors"}, {"c": "one.safetensors"}],
)  # fmt: skip
def test_a_bad_index_is_an_error(weight_map: Any, tmp_path: Path) -> None:
    path = folder(tmp_path / "c", one=encoded({"a": np.ones(3)}))
    write_index(path, weight_map)
    with pytest.raises(CheckpointCorrupt, match=r"index|three"):
        opened(path)


def test_pieces_that_leave_a_hole_name_the_array(tmp_path: Path) -> None:
    def piece(start: int, count: int) -> bytes:
        info = json.dumps({"a": {"saved_offsets": [start]}})
        return encoded({"a": np.arange(start, start + count)}, {"DCP_SHARDING_INFO": info})

    path = folder(tmp_path / "c", one=piece(0, 3), two=piece(3, 2))
    assert np.array_equal(opened(path)["a"][...], np.arange(5))
    for start, count in ((4, 2), (2, 3), (0, 3)):
        folder(path, two=piece(start, count))
        with pytest.raises(CheckpointCorrupt, match="'a'"):
            opened(path)
    folder(path, one=piece(0, 0), two=piece(0, 0))
    assert opened(path)["a"].shape == (0,)


def test_other_folders_are_not_safetensors(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    assert foreign.opened(tmp_path, safetensors) is None
    assert foreign.opened(tmp_path / "none", safetensors) is None
