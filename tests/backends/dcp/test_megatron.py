"""Megatron-Core's torch_dist checkpoints, as Megatron wrote them, and damaged ones."""

from __future__ import annotations

import contextlib
import json
import pickle
import random
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import foreign, s3_server
from support.foreign import unpacked
from support.torch_versions import DCP_ALONE

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound, LoadMismatch
from unickpt.errors import UnickptError, UnsupportedFormat
from unickpt.format import file_ranges
from unickpt.storage.paths import context, resolve
from unickpt.testing.readers import ReaderSuite

CASES = [
    "mc-tensors",
    "mc-optim-tp2-pp2",
    "mc-distopt-dp",
    "mc-distopt-full",
    "mc13-flat",
]
# Tensors in common.pt, which Megatron's list of tensors does not have.
COMMON = ("schedule/tensor", "optimizer/optimizer/state/common_step", "optimizer/param_state/")


def differences(case: str, path: Path | str) -> list[str]:
    found = foreign.differences(case, unickpt.open(path))
    return [name for name in found if not name.startswith(COMMON)]


# --- what Megatron wrote ------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_every_bit_is_as_megatron_says(case: str, tmp_path: Path) -> None:
    path = unpacked(case, tmp_path)
    assert differences(case, path) == []
    assert unickpt.open(path).reader.format == "megatron"


def test_sharded_objects_and_common_values(tmp_path: Path) -> None:
    path = unpacked("mc-tensors", tmp_path)
    state = unickpt.load(path)
    for rank in range(4):
        found = state["rng_state"][f"shard_{rank // 2}.{rank % 2}_2.2"]
        assert found == {"rank": rank, "numpy": [1, 2.5, "x"]}
    assert state["iteration"] == 7
    assert state["args"] == {"hidden": 3, "names": ["a", "b"]}
    assert state["schedule"]["list"] == [1, {"two": 2}]
    assert state["schedule"][3] == "int key"
    assert state["schedule"]["tensor"].tolist() == [0, 1, 2]


def test_what_later_versions_keep_in_an_object(tmp_path: Path) -> None:
    state = unickpt.load(unpacked("mc19-common", tmp_path))
    assert state.pop("schedule")["tensor"].tolist() == [0, 1, 2]
    weight = state.pop("decoder.weight")
    assert weight.astype("f4").tobytes() == np.arange(35, dtype="f4").tobytes()
    assert state == {
        "rng_state": {"shard_0.0_1.1": [{"rank": 0}]},
        "iteration": 7,
        "args": {"hidden": 3, "names": ["a", "b"]},
    }


def test_extra_state_is_shown_on_request(tmp_path: Path) -> None:
    path = unpacked("mc-optim-tp2-pp2", tmp_path)
    assert not any("_extra_state" in name for name in unickpt.open(path).index.names)
    shown = unickpt.open(path, hints={"extra_state": True}).index.names
    assert sum("_extra_state/shard_" in name for name in shown) == 8


def test_a_run_is_opened_at_its_latest_iteration(tmp_path: Path) -> None:
    for number, case in ((5, "mc13-flat"), (10, "mc-tensors")):
        unpacked(case, tmp_path).rename(tmp_path / f"iter_{number:07}")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("10\n")
    assert differences("mc-tensors", tmp_path) == []
    assert differences("mc13-flat", tmp_path / "iter_0000005") == []
    (tmp_path / "iter_0000010").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert differences("mc-tensors", tmp_path) == []


def test_in_an_object_store(tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "megatron")
    store = resolve("s3://megatron/run/").store(context())
    for file in unpacked("mc13-flat", tmp_path).iterdir():
        store.write(f"iter_0000002/{file.name}", file.read_bytes()).result()
    store.write("latest_checkpointed_iteration.txt", b"2").result()
    assert differences("mc13-flat", "s3://megatron/run/") == []
    assert differences("mc13-flat", "s3://megatron/run/iter_0000002/") == []


# --- parts --------------------------------------------------------------------------------------


def test_a_part_of_a_flattened_array_reads_only_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    array = unickpt.open(unpacked("mc13-flat", tmp_path))["w"]
    whole = array[...]
    monkeypatch.setattr(file_ranges, "CHUNK_BYTES", 16)
    array = unickpt.open(tmp_path / "ckpt")["w"]
    _ = array[6:7]
    reads = foreign.count_reads(monkeypatch)
    # Rows 6 to 12 are 30 elements in two files, the first 7 of them from rank 1.
    assert array[6:7].tobytes() == whole[6:7].tobytes()
    assert {file for file, _ in reads} == {"__1_0.distcp"}
    assert sum(count for _, count in reads) == 5 * 4
    _ = array[8:9]
    assert {file for file, _ in reads[2:]} == {"__3_1.distcp"}


def test_onto_another_mesh_and_through_convert(tmp_path: Path) -> None:
    path = unpacked("mc13-flat", tmp_path)
    unickpt.convert(path, tmp_path / "own")
    assert foreign.differences("mc13-flat", unickpt.open(tmp_path / "own")) == []


# --- what no file says --------------------------------------------------------------------------


def test_buckets_are_flat_arrays_and_the_error_says_how_to_get_parameters(tmp_path: Path) -> None:
    path = unpacked("mc-distopt-dp", tmp_path)
    buckets = [array for name, array in unickpt.open(path).items() if "bucket_idx_0" in name]
    assert len(buckets) == 6
    assert {len(array.shape) for array in buckets} == {1}
    like = {"optimizer.state.exp_avg.output_layer.weight": np.empty((16, 8), np.float32)}
    with pytest.raises(LoadMismatch, match=r"dp_reshardable.*no file says which parameter.*fully"):
        unickpt.load(path, like)
    like = {"output_layer.weight": np.empty((16, 8), np.float32)}
    with pytest.raises(LoadMismatch) as raised:
        unickpt.load(path, like)
    assert "dp_reshardable" not in str(raised.value).splitlines()[1]  # nothing is missing


@pytest.mark.parametrize("backend", ["zarr", "fsdp_dtensor"])
def test_other_formats_of_megatron_are_refused_by_name(backend: str, tmp_path: Path) -> None:
    path = unpacked("mc13-flat", tmp_path)
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": backend}))
    with pytest.raises(UnsupportedFormat, match=f"{backend}.*--ckpt-format torch_dist"):
        unickpt.open(path)


def test_files_per_rank_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "iter_0000003" / "mp_rank_00"
    folder.mkdir(parents=True)
    (folder / "model_optim_rng.pt").write_bytes(b"x")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    with pytest.raises(UnsupportedFormat, match=r"iter_0000003.*file for each rank"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("text", ["", "../x", "-1", "9" * 200, "٣", "iter_1"])
def test_other_trackers_are_not_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}', "[" * 90_000, "7"])
def test_other_files_of_that_name_are_not_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "metadata.json").write_text(text)
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path)


# --- the suite ----------------------------------------------------------------------------------


class TestSuite(ReaderSuite):
    has_digests = False
    has_checksums = True

    def write(
        self, path: Path, arrays: Mapping[str, np.ndarray], values: Mapping[str, Any]
    ) -> None:
        torch = pytest.importorskip("torch")
        torch_dcp = pytest.importorskip("torch.distributed.checkpoint")
        state = {name: torch.from_numpy(array) for name, array in arrays.items()}
        planner = torch_dcp.DefaultSavePlanner(flatten_state_dict=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is only this process
            torch_dcp.save(state, checkpoint_id=path, planner=planner, **DCP_ALONE)
        torch.save(dict(values), path / "common.pt")
        marker = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        (path / "metadata.json").write_text(json.dumps(marker))

    def damage(self, path: Path, name: str) -> None:
        foreign.damage_chunk_of_dcp(path, name)


# --- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("common.pt", r"common\.pt"),
        (".metadata", r"torch_dist checkpoint, but there is no \.metadata"),
        ("__1_0.distcp", r"file __1_0\.distcp, with data of 'w', is missing"),
    ],
)
def test_a_missing_file_is_named(file: str, message: str, tmp_path: Path) -> None:
    path = unpacked("mc13-flat", tmp_path)
    (path / file).unlink()
    with pytest.raises(CheckpointCorrupt, match=message):
        unickpt.open(path)


def test_files_of_another_save_are_noticed(tmp_path: Path) -> None:
    path, other = unpacked("mc13-flat", tmp_path / "a"), unpacked("mc-tensors", tmp_path / "b")
    (other / "__1_0.distcp").rename(path / "__1_0.distcp")
    with pytest.raises(CheckpointCorrupt, match=r"'w'.*__1_0\.distcp"):
        unickpt.open(path)["w"][...]


def change(path: Path, by: Callable[[Any], Any]) -> None:
    """Changes the metadata through torch's own objects."""
    pytest.importorskip("torch")

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            if module.startswith("megatron"):
                return type(name, (), {"__module__": module})
            return super().find_class(module, name)

    with (path / ".metadata").open("rb") as file:
        metadata = Unpickler(file).load()
    del metadata.all_local_plans
    by(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def without_last_chunk(metadata: Any) -> None:
    metadata.state_dict_metadata["w"].chunks.pop()


def without_a_box(metadata: Any) -> None:
    chunks = metadata.state_dict_metadata["w"].chunks
    chunks[:] = [chunk for chunk in chunks if chunk.offsets[0] == 0]


def shifted(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata["w"].chunks[0]
    chunk.sizes = type(chunk.sizes)((1, 1, 8))


def other_shape(metadata: Any) -> None:
    metadata.mcore_data["w"]["nd_reformulated_orig_global_shape"] = (12, 6)


def undivided(metadata: Any) -> None:
    metadata.mcore_data["w"]["nd_reformulated_orig_global_shape"] = (15, 4)


def no_shape(metadata: Any) -> None:
    metadata.mcore_data["w"]["nd_reformulated_orig_global_shape"] = "twelve"


@pytest.mark.parametrize(
    ("by", "message"),
    [
        (without_last_chunk, r"'w': elements 7 to 30 of \[6:12, 0:5\] are missing"),
        (without_a_box, r"'w'.*no process holds \[6:12, 0:5\]"),
        (shifted, r"'w': elements 7 to 8 of \[0:6, 0:5\] are stored twice"),
        (other_shape, r"'w' of shape \[12, 6\] is stored flattened as \[2, 1, 30\]"),
        (undivided, r"'w' of shape \[15, 4\] is stored flattened"),
        (no_shape, r"the shape of 'w' in mcore_data"),
    ],
)
def test_flattened_arrays_that_do_not_fit(
    by: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    path = unpacked("mc13-flat", tmp_path)
    change(path, lambda metadata: None)
    assert differences("mc13-flat", path) == []
    change_again = pickle.loads((path / ".metadata").read_bytes())
    by(change_again)
    (path / ".metadata").write_bytes(pickle.dumps(change_again))
    with pytest.raises(CheckpointCorrupt, match=message):
        unickpt.open(path)


@pytest.mark.parametrize("file", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
def test_any_changed_byte_is_an_error_of_ours_or_harmless(file: str, tmp_path: Path) -> None:
    path, rng = unpacked("mc13-flat", tmp_path), random.Random(9)
    data = (path / file).read_bytes()
    for _ in range(60):
        changed = bytearray(data)
        changed[rng.randrange(len(data))] = rng.randrange(256)
        (path / file).write_bytes(changed)
        with contextlib.suppress(UnickptError):
            for array in unickpt.open(path).values():
                if array.nbytes < 1 << 20:
                    array[...]
