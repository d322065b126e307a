"""Folders and files that trainers write: which open, and which say what to open instead."""

from __future__ import annotations

import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
from support.file_writers import safetensors, torch_zip

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound
from unickpt.backends._files.file_choice import SeveralCheckpoints
from unickpt.errors import UnsupportedFormat


def flax_file(name: str, array: np.ndarray) -> bytes:
    """A map of one array, as flax.serialization writes it."""
    dims = bytes([0x90 + array.ndim, *array.shape])
    data = array.tobytes()
    inner = b"\x93" + dims + bytes([0xA0 + len(array.dtype.name)]) + array.dtype.name.encode()
    inner += b"\xc4" + bytes([len(data)]) + data
    leaf = b"\xc8" + struct.pack(">H", len(inner)) + b"\x01" + inner
    level = b"\x81" + bytes([0xA0 + len("kernel")]) + b"kernel" + leaf
    return b"\x81" + bytes([0xA0 + len(name)]) + name.encode() + level


def sharded_flax(folder: Path) -> dict[str, np.ndarray]:
    arrays = {f"l{n}": np.full((2, 2), n, "f4") for n in range(2)}
    where = {}
    for n, (name, array) in enumerate(arrays.items()):
        file = f"flax_model-{n + 1:05}-of-00002.msgpack"
        (folder / file).write_bytes(flax_file(name, array))
        where[f"{name}/kernel"] = file
    (folder / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": where}))
    return {f"{name}/kernel": array for name, array in arrays.items()}


def test_flax_in_several_files(tmp_path: Path) -> None:
    arrays = sharded_flax(tmp_path)
    for path in (tmp_path, tmp_path / "flax_model.msgpack.index.json"):
        found = unickpt.open(path)
        assert list(found) == list(arrays)
        assert all(np.array_equal(found[n][...], array) for n, array in arrays.items())


def test_a_missing_file_of_flax_is_named(tmp_path: Path) -> None:
    sharded_flax(tmp_path)
    (tmp_path / "flax_model-00002-of-00002.msgpack").unlink()
    with pytest.raises(CheckpointCorrupt, match="flax_model-00002-of-00002"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("name", ["l0", "l0/kernel/x", "l0/bias", "", "l0/kernel/"])
def test_an_index_of_flax_that_names_what_is_not_there(name: str, tmp_path: Path) -> None:
    sharded_flax(tmp_path)
    where = {name: "flax_model-00001-of-00002.msgpack"}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointCorrupt, match="does not contain it"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["<f4", ">f4"])
def test_a_single_array_of_numpy(order: str, dtype: str, tmp_path: Path) -> None:
    array = np.asarray(np.arange(12).reshape(3, 4), dtype, order=order)  # type: ignore[call-overload]
    np.save(tmp_path / "w.npy", array)
    for path in (tmp_path, tmp_path / "w.npy"):
        found = unickpt.open(path)
        assert (found.reader.format, list(found)) == ("npy", ["w"])
        assert np.array_equal(found["w"][1:, 2], array[1:, 2])


def test_a_single_array_that_is_damaged_or_of_objects(tmp_path: Path) -> None:
    file = tmp_path / "w.npy"
    np.save(file, np.ones(5))
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointCorrupt, match="168 expected"):
        unickpt.open(file)
    np.save(file, np.array([{}], object))
    with pytest.raises(UnsupportedFormat, match="dtype"):
        unickpt.open(file)


def test_a_single_array_beside_a_checkpoint_is_no_other_one(tmp_path: Path) -> None:
    np.save(tmp_path / "losses.npy", np.ones(5))
    (tmp_path / "x.pt").write_bytes(torch_zip({"lr": 1.0}))
    assert unickpt.open(tmp_path).reader.format == "torch"


def test_pth_tar_of_torchs_examples(tmp_path: Path) -> None:
    (tmp_path / "model_best.pth.tar").write_bytes(torch_zip({"epoch": 3}))
    assert unickpt.load(tmp_path) == {"epoch": 3}


def test_flax_with_a_prefix(tmp_path: Path) -> None:
    for step in (2, 4):
        (tmp_path / f"ck_{step}").write_bytes(flax_file("l", np.ones(2, "f4")))
    with pytest.raises(SeveralCheckpoints, match="ck_2, ck_4"):
        unickpt.open(tmp_path)
    (tmp_path / "ck_2").unlink()
    assert list(unickpt.open(tmp_path)) == ["l/kernel"]


@pytest.mark.parametrize("names", [("checkpoint-2", "checkpoint-10"), ("unet", "vae")])
def test_a_folder_of_checkpoints_of_others_names_them(
    names: tuple[str, str], tmp_path: Path
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(safetensors({"w": np.ones(2, "f4")}))
    (tmp_path / "model_index.json").write_text("{}")
    with pytest.raises(CheckpointNotFound, match=rf"\({', '.join(names)}\).*{names[1]}'"):
        unickpt.open(tmp_path)


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "adapter_model.bin"])
def test_a_folder_of_an_adapter(name: str, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    data = safetensors({"w": np.ones(2, "f4")}) if "safe" in name else torch_zip({"w": 1})
    (tmp_path / name).write_bytes(data)
    assert "w" in unickpt.load(tmp_path)


@pytest.mark.parametrize(
    "name", ["model.ckpt-1.data-00000-of-00001", "saved_model.pb", "ckpt-3.index"]
)
def test_tensorflow_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\x08\x01\x12")
    for path in (tmp_path, tmp_path / name):
        with pytest.raises(UnsupportedFormat, match=r"TensorFlow.*numpy\.savez"):
            unickpt.open(path)


def test_a_tar_file_of_torch_says_what_to_do(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "old.pth", "w") as archive:
        for name in ("sys_info", "pickle", "tensors", "storages"):
            archive.addfile(tarfile.TarInfo(name))
    with pytest.raises(UnsupportedFormat, match=r"tar file.*load it with torch, and save it again"):
        unickpt.open(tmp_path)
