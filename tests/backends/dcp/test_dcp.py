"""torch's distributed checkpoints, as torch wrote them, and damaged ones."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import shutil
import sys
import tarfile
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, foreign, s3_server
from support.forks import Forks
from support.torch_versions import DCP_ALONE, needs_torch

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound
from unickpt.backends.dcp import reader as dcp
from unickpt.backends.dcp.chunks import decompressed
from unickpt.backends.dcp.metadata import Metadata
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.format import file_ranges
from unickpt.format.files import Files
from unickpt.storage.errors import Damaged
from unickpt.storage.paths import resolve
from unickpt.testing.readers import ReaderSuite
from unickpt.trees import tree

FIXTURES = Path(TESTS) / "fixtures" / "foreign"
CASES = ["dcp-fsdp1", "dcp-fsdp2-dp4", "dcp-hsdp", "dcp-safetensors-format"]
SHARDED = "optim/state/0.weight/exp_avg"  # of four chunks in dcp-fsdp2-dp4


def unpacked(case: str, folder: Path) -> Path:
    with tarfile.open(FIXTURES / case / "ckpt.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder / "ckpt"


def opened(path: Path | str) -> dcp.DcpReader:
    reader = dcp.open(Files(resolve(path)), {})
    assert isinstance(reader, dcp.DcpReader)
    return reader


def metadata_of_ours(path: Path | str) -> Metadata:
    """What we make of the metadata."""
    found = dcp.read_metadata(Files(resolve(path)))
    assert found is not None
    return found


def names_in(path: Path | str) -> dict[str, str]:
    """Our name of each of DCP's names: the keys of the saved state."""
    return {
        name: "/".join(map(tree.component, keys))
        for name, keys in metadata_of_ours(path).paths.items()
    }


def expected(case: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FIXTURES / case / "expected.json").read_text())
    return found


def check(path: Path | str, case: str) -> None:
    """Checks every bit of a checkpoint."""
    stored, facts, names = unickpt.open(path), expected(case), names_in(path)
    assert sorted(stored) == sorted(names.get(name, name) for name in facts["arrays"])
    with np.load(FIXTURES / case / "expected.npz") as arrays:
        for dcp_name, fact in facts["arrays"].items():
            name = names.get(dcp_name, dcp_name)
            assert (list(stored[name].shape), str(stored[name].dtype)) == (
                fact["shape"],
                fact["dtype"],
            )
            assert stored[name][...].tobytes() == arrays[dcp_name].tobytes(), name


# --- what torch wrote ---------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_torch_says(case: str, tmp_path: Path) -> None:
    check(unpacked(case, tmp_path), case)


@pytest.mark.parametrize("case", CASES)
def test_values_and_containers_of_values(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path)
    state, paths = unickpt.load(path), metadata_of_ours(path).paths
    for name, value in expected(case)["values"].items():
        found = state
        for key in paths[name]:
            found = found[key]
        assert value == (repr(found) if isinstance(found, (list, tuple)) else found)


def test_a_state_is_loaded_as_it_was_saved(tmp_path: Path) -> None:
    path = unpacked("dcp-fsdp2-dp4", tmp_path)
    like = {"model": {"0.weight": np.empty((37, 6), np.float32)}}
    found = unickpt.load(path, like, strict=False)["model"]["0.weight"]
    assert (found == unickpt.open(path)["model/0.weight"][...]).all()
    nested = unickpt.load(path)["nested"]["list"]
    assert isinstance(nested, list)
    assert nested[1]["two"] == unickpt.open(path).values["nested/list/1/two"]


def test_paths_that_dots_make_ambiguous_stay_apart(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {
        "a": {"b.c": torch.ones(2), "3": torch.ones(4)},
        "a/b": torch.ones(3),
        "list": [torch.zeros(1), {"x": torch.ones(1), "step": 5}],
    }
    path = save(state, tmp_path / "c")
    stored = unickpt.open(path)
    assert sorted(stored) == ["a%2Fb", "a/3", "a/b.c", "list/0", "list/1/x"]
    assert stored["a%2Fb"].shape == (3,)
    assert unickpt.load(path)["list"][1]["step"] == 5


@pytest.mark.parametrize("other", ["b", "c"])
def test_two_values_in_one_place_are_refused(other: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = save({"a": {"b": torch.ones(2), "c": {"d": 4}}, "x": torch.ones(3)}, tmp_path / "c")
    metadata = metadata_of(path)
    metadata.planner_data["x"] = ("a", other)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorrupt, match="has the same place in the saved state"):
        unickpt.open(path)


def test_compressed_data(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    check(unpacked("dcp-zstd", tmp_path), "dcp-zstd")


def test_compressed_data_is_read_once_and_values_too(
    tmp_path: Path, bytes_read: list[tuple[str, int]]
) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("zstandard")
    extension = pytest.importorskip("torch.distributed.checkpoint._extension").ZStandard()
    large = torch.arange(4 << 20, dtype=torch.float32).reshape(1024, 4096)
    state = {"w": large, "values": {"note": "x" * 5000, "inside": (torch.ones(3), 7)}}
    path = save(state, tmp_path / "c", _extensions=[extension])
    stored = unickpt.open(path)
    assert stored.values["values/note"] == "x" * 5000
    assert stored["values/inside/0"][1:].tolist() == [1, 1]
    del bytes_read[:]
    assert (stored["w"][...] == large.numpy()).all()  # larger than a chunk would be
    assert len(bytes_read) == 1


def test_compressed_data_without_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(UnsupportedFormat, match=r"model\..*stream\.zstd/1.*'unickpt\[zstd\]'"):
        unickpt.open(unpacked("dcp-zstd", tmp_path))


def test_damaged_compressed_data(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    path = unpacked("dcp-zstd", tmp_path)
    facts = metadata_of_ours(path).tensors["model.embed.weight"]
    blob = facts.chunks[0].blob
    data = bytearray((path / blob.file).read_bytes())
    data[blob.offset : blob.offset + 4] = bytes(4)
    (path / blob.file).write_bytes(data)
    with pytest.raises(CheckpointCorrupt, match=rf"model/embed\.weight.*{blob.file}.*zstd"):
        unickpt.open(path)["model/embed.weight"][...]


def test_a_small_stream_that_becomes_large_is_refused() -> None:
    zstandard = pytest.importorskip("zstandard")
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    with pytest.raises(Damaged, match="more than 1000 bytes"):
        decompressed(bomb, 1000, "x.distcp")


def test_transforms_that_are_not_known_are_refused(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    metadata = metadata_of(path)
    next(iter(metadata.storage_data.values())).transform_descriptors = ["stream.mine/1"]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(UnsupportedFormat, match=r"stored through.*stream\.mine/1"):
        unickpt.open(path)


def test_in_an_object_store(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "dcp")
    for case in ("dcp-hsdp", "dcp-safetensors-format"):
        path = unpacked(case, tmp_path / case)
        url = f"s3://dcp/{case}/"
        location = resolve(url)
        for file in path.iterdir():
            location.store(unickpt.storage.paths.context()).write(
                file.name, file.read_bytes()
            ).result()
        check(url, case)


# --- parts --------------------------------------------------------------------------------------


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The file and the number of bytes of each read."""
    seen: list[tuple[str, int]] = []
    real = Files.read_into

    def read_into(self: Files, file: str, offset: int, out: memoryview) -> None:
        seen.append((file, out.nbytes))
        real(self, file, offset, out)

    monkeypatch.setattr(Files, "read_into", read_into)
    return seen


def save(state: Any, path: Path, **options: Any) -> Path:
    torch_dcp = pytest.importorskip("torch.distributed.checkpoint")
    writer = torch_dcp.FileSystemWriter(path, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is only this process
        torch_dcp.save(state, storage_writer=writer, **DCP_ALONE)
    return path


def test_a_row_of_a_large_chunk_reads_little(
    tmp_path: Path, bytes_read: list[tuple[str, int]]
) -> None:
    torch = pytest.importorskip("torch")
    large = torch.arange(4 << 20, dtype=torch.float32).reshape(1024, 4096)
    path = save({"w": large, "other": large + 1}, tmp_path / "c")
    array = unickpt.open(path)["w"]
    assert sum(n for _, n in bytes_read) < 20_000
    del bytes_read[:]
    assert (array[1000:1001, :] == large[1000:1001].numpy()).all()
    assert sum(n for _, n in bytes_read) <= file_ranges.CHUNK_BYTES + 4096


def test_a_part_reads_only_the_chunks_that_it_meets(
    tmp_path: Path, bytes_read: list[tuple[str, int]]
) -> None:
    array = unickpt.open(unpacked("dcp-fsdp2-dp4", tmp_path))[SHARDED]
    del bytes_read[:]
    array[0:3]
    assert {file for file, _ in bytes_read} == {"__0_0.distcp"}
    assert sum(n for _, n in bytes_read) < 3000
    again = len(bytes_read)
    array[0:3]
    assert len(bytes_read) == again + 1  # where it is is known now


# --- what torch writes here ---------------------------------------------------------------------


def test_tensors_that_are_not_in_order(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    base = torch.arange(24, dtype=torch.bfloat16).reshape(4, 6)
    state = {"t": base.t(), "cut": base[:, 1:3], "wide": torch.ones(1).expand(3, 5)}
    stored = unickpt.open(save(state, tmp_path / "c"))
    for name, tensor in state.items():
        assert (stored[name][...].astype(np.float32) == tensor.float().numpy()).all()
    assert stored["t"][2:4, 1:].tolist() == base.t()[2:4, 1:].tolist()


def test_parts_of_a_tensor_that_is_not_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", 20)
    turned = torch.arange(35, dtype=torch.float32).reshape(5, 7).t()
    path = save({"t": turned}, tmp_path / "c")
    for row in range(7):
        assert unickpt.open(path)["t"][row].tolist() == turned[row].tolist()
    assert unickpt.open(path)["t"][2:6, 1:3].tolist() == turned[2:6, 1:3].tolist()


def test_every_dtype(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    names = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32"
    names += " float64 complex64 complex128 float8_e4m3fn float8_e5m2"
    bits = torch.arange(64, dtype=torch.uint8) % 2
    state = {name: bits.view(getattr(torch, name)) for name in names.split()}
    stored = unickpt.open(save(state, tmp_path / "c"))
    for name in state:
        assert stored[name].dtype == name
        assert stored[name][...].tobytes() == bits.numpy().tobytes()


def test_an_object_that_holds_tensors_is_a_container_of_its_attributes(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    path = save({"net": torch.nn.Linear(2, 3)._parameters, "module": [torch.nn.Linear(2, 3)]},
                tmp_path / "c")  # fmt: skip
    stored = unickpt.open(path)
    weights = [name for name in stored if name.startswith("module") and name.endswith("weight")]
    assert [stored[name].shape for name in weights] == [(3, 2)], list(stored)


def test_values_that_are_no_tensors(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    values = {
        "nan": float("nan"),
        "big": 1 << 80,
        "bytes": (b"\0\xff", b""),
        "set": {3},
        "pairs": ({"a": (1, None)},),
        "inside": (torch.arange(6).reshape(2, 3).t(), "x"),
        "path": Path("x"),
        "numpy": (np.arange(6).reshape(2, 3).T, np.float32(0.5), {np.int64(4): np.ones(2)}),
        "keys": ({(1, 2): 3},),
        "empty": (),
    }
    stored = unickpt.open(save(values, tmp_path / "c"))
    found = unickpt.load(tmp_path / "c")
    assert np.isnan(found["nan"])
    assert (found["big"], found["bytes"], found["set"]) == (1 << 80, (b"\0\xff", b""), [3])
    assert found["pairs"] == ({"a": (1, None)},)
    assert found["inside"][0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert stored["inside/0"][1:, 1].tolist() == [4, 5]
    assert found["path"] == "x"
    assert found["numpy"][0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found["numpy"][1], found["numpy"][2][4].tolist()) == (0.5, [1.0, 1.0])
    assert found["keys"] == ("<dict>",)
    assert found["empty"] == ()


@needs_torch("2.8", "DCP in files of safetensors")
def test_safetensors_after_other_values(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    filesystem = pytest.importorskip("torch.distributed.checkpoint.filesystem")
    array = torch.arange(12.0).reshape(3, 4)
    state = {"a": {"w": array}, "step": 7, "note": "hello"}
    kind = filesystem.SerializationFormat.SAFETENSORS
    stored = unickpt.open(save(state, tmp_path / "c", serialization_format=kind))
    assert stored["a/w"][1:].tolist() == array[1:].tolist()
    assert dict(stored.values) == {"step": 7, "note": "hello"}


def test_a_file_for_each_tensor(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    state = {f"layer {n}": torch.full((n, 3), n) for n in range(9)}
    path = save(state, tmp_path / "c", single_file_per_rank=False)
    assert len(list(path.glob("*.distcp"))) > 5
    stored = unickpt.open(path)
    assert {name: stored[name][...].tolist() for name in stored} == {
        name: tensor.tolist() for name, tensor in state.items()
    }


class TestSuite(ReaderSuite):
    has_digests = False
    has_checksums = True

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        torch = pytest.importorskip("torch")
        state: dict[str, Any] = {}
        for name, value in {**arrays, **values}.items():
            *above, last = name.split("/")
            level = state
            for key in above:
                level = level.setdefault(key, {})
            level[last] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        save(state, path)

    def damage(self, path: Path, name: str) -> None:
        foreign.damage_chunk_of_dcp(path, name.replace("/", "."))


# --- damage -------------------------------------------------------------------------------------


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = unpacked("dcp-fsdp2-dp4", tmp_path)
    (path / "__2_0.distcp").unlink()
    with pytest.raises(CheckpointCorrupt, match=r"file __2_0\.distcp, with data of .*, is missing"):
        unickpt.open(path)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    path = unpacked("dcp-fsdp2-dp4", tmp_path)
    file = path / "__3_0.distcp"
    file.write_bytes(file.read_bytes()[:-600])
    stored = unickpt.open(path)
    name = "optim/state/2.bias/exp_avg_sq"
    with pytest.raises(CheckpointCorrupt, match=rf"{name}.*__3_0\.distcp, which has fewer"):
        stored[name][...]
    with pytest.raises(CheckpointCorrupt, match=r"__3_0\.distcp"):
        unickpt.load(path)


def test_files_of_another_save_are_noticed(tmp_path: Path) -> None:
    path = unpacked("dcp-fsdp2-dp4", tmp_path / "a")
    other = unpacked("dcp-fsdp1", tmp_path / "b")
    shutil.copy(other / "__1_0.distcp", path / "__1_0.distcp")
    with pytest.raises(CheckpointCorrupt, match=r"__1_0\.distcp"):
        unickpt.load(path)
    safetensors = unpacked("dcp-safetensors-format", tmp_path / "c")
    shutil.copy(safetensors / "__1_0.distcp", safetensors / "__0_0.distcp")
    with pytest.raises(CheckpointCorrupt, match=r"__0_0\.distcp contains .* of one save"):
        unickpt.load(safetensors)


def test_exchanged_files_of_safetensors_are_noticed(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    (path / "__0_0.distcp").rename(path / "x")
    (path / "__1_0.distcp").rename(path / "__0_0.distcp")
    (path / "x").rename(path / "__1_0.distcp")
    with pytest.raises(CheckpointCorrupt, match=r"model/head\.weight.*begins at \[8, 0\]"):
        unickpt.open(path)["model/head.weight"][...]


def test_a_chunk_that_is_missing_is_a_gap(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    pytest.importorskip("torch")
    data = (path / ".metadata").read_bytes()

    def larger(chunk: Any) -> Any:
        return type(chunk)(chunk.offsets, (chunk.sizes[0] + 1, *chunk.sizes[1:]))

    changes: list[tuple[Callable[[Any], Any], str]] = [
        (lambda chunks: chunks.pop(), "no process holds"),
        (lambda chunks: chunks.append(larger(chunks[0])), "overlaps"),
        (lambda chunks: chunks.clear(), "no data of array"),
    ]
    for change, said in changes:
        metadata = pickle.loads(data)
        change(metadata.state_dict_metadata["model.embed.weight"].chunks)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises(CheckpointCorrupt, match=rf"model/embed\.weight.*{said}|{said}"):
            unickpt.open(path)


def metadata_of(path: Path) -> Any:
    """The metadata as torch's own objects."""
    pytest.importorskip("torch")
    return pickle.loads((path / ".metadata").read_bytes())


@pytest.mark.parametrize("file", ["../x", "/etc/passwd", "a//b", ""])
def test_no_file_elsewhere_is_opened(file: str, tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    metadata = metadata_of(path)
    next(iter(metadata.storage_data.values())).relative_path = file
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata is damaged.*file"):
        unickpt.open(path)


def test_any_flipped_byte_is_an_error_of_ours_or_harmless(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    data, rng = (path / ".metadata").read_bytes(), random.Random(5)
    for _ in range(400):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        (path / ".metadata").write_bytes(changed)
        with contextlib.suppress(UnickptError):
            for array in unickpt.open(path).values():
                if array.nbytes < 1 << 20:
                    array[...]


@pytest.mark.parametrize("case", ["dcp-hsdp", "dcp-safetensors-format"])
def test_any_flipped_byte_of_data_is_an_error_of_ours_or_harmless(
    case: str, tmp_path: Path
) -> None:
    path, rng = unpacked(case, tmp_path), random.Random(6)
    file = path / "__1_0.distcp"
    data = file.read_bytes()
    for _ in range(30):
        changed = bytearray(data)
        for _ in range(20):
            changed[rng.randrange(len(data))] = rng.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(UnickptError):
            stored = unickpt.open(path)
            for name in stored:
                with contextlib.suppress(UnickptError):
                    stored[name][...]


def test_values_that_refer_to_each_other_end_soon(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    bomb: list[Any] = []
    for _ in range(60):
        bomb = [bomb, bomb]
    path = save({"bomb": (bomb,), "step": 1}, tmp_path / "c")
    with pytest.raises(CheckpointCorrupt, match=r"bomb.*too often"):
        unickpt.open(path)


def test_chunks_that_are_shared_end_soon(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    metadata = metadata_of(path)
    facts = metadata.state_dict_metadata["model.embed.weight"]
    facts.chunks[0].sizes = (0, 6)
    facts.chunks[:] = facts.chunks[:1] * 1000
    metadata.state_dict_metadata = {f"w{n}": facts for n in range(5000)}
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointCorrupt, match="more chunks than its size allows"):
        unickpt.open(path)


def test_empty_chunks_need_no_data(tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    metadata = metadata_of(path)
    chunks = metadata.state_dict_metadata["model.layers.0.bias"].chunks
    chunks += [type(chunks[0])((8,), (0,)), type(chunks[0])((11,), (0,))]
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    check(path, "dcp-safetensors-format")


@pytest.mark.parametrize("planner", [None, 7, {"model.embed.weight": ("a", 1.5), 3: ()}])
def test_other_planners_store_other_data(planner: Any, tmp_path: Path) -> None:
    path = unpacked("dcp-safetensors-format", tmp_path)
    metadata = metadata_of(path)
    metadata.planner_data = planner
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert metadata_of_ours(path).paths in ({}, {"model.embed.weight": ()})
    check(path, "dcp-safetensors-format")


def test_other_pickles_are_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path)
    assert not Path("x").exists()
    (tmp_path / ".metadata").write_bytes(b"")
    with pytest.raises(CheckpointCorrupt, match=r"\.metadata is damaged"):
        unickpt.open(tmp_path)


ALONE = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
dist.init_process_group("gloo", init_method=f"file://{ARGS[0]}/meet", rank=0, world_size=1)
mesh, x = init_device_mesh("cpu", (1,)), torch.arange(12.0).reshape(4, 3)
whole = torch.Size((9, 3))
state = {"model": {
    "rows": distribute_tensor(x, mesh, [Shard(0)]),
    "same": distribute_tensor(x + 1, mesh, [Replicate()]),
    "part": DTensor.from_local(x, mesh, [Shard(0)], run_check=False, shape=whole, stride=(3, 1)),
    "plain": x + 2,
}, "step": 3}
planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
dcp.save(state, checkpoint_id=ARGS[0] + "/dcp", planner=planner)
torch.save(state, ARGS[0] + "/file.pt")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("name", ["dcp", "file.pt"])
def test_dtensors_within_objects_are_whole_arrays_or_called_parts(
    name: str, tmp_path: Path, forks: Forks
) -> None:
    (ended,) = forks.wait_all([forks.start(ALONE, str(tmp_path))])
    assert ended.code == 0, ended
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    found = unickpt.open(tmp_path / name)
    assert sorted(found) == [
        "model/part/_local_tensor", "model/plain", "model/rows", "model/same"
    ]  # fmt: skip
    assert np.array_equal(found["model/rows"][...], x)
    assert np.array_equal(found["model/same"][...], x + 1)
    assert unickpt.load(tmp_path / name)["model"]["part"]["shape_of_whole"] == [9, 3]
    told = "the other parts are not in the check" if name == "dcp" else "model/part/_local_tensor"
    with pytest.raises(unickpt.LoadMismatch, match=told):
        unickpt.load(tmp_path / name, {"model": {"part": np.zeros((9, 3), np.float32)}})
