"""Files of some kilobytes that ask for many gigabytes, of which each array alone is justified."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.hostile_pickles import write_torch_file

import unickpt
from unickpt.backends.orbax import metadata
from unickpt.errors import CheckpointCorrupt

EACH, COUNT = 60 << 20, 64  # bytes of an array, and arrays


def repeated_elements(path: Path) -> Path:
    stored = torch.arange(COUNT, dtype=torch.uint8)
    torch.save({f"w{n}": stored[n : n + 1].expand(EACH) for n in range(COUNT)}, path)
    return path


def views_of_one_storage(path: Path) -> Path:
    stored = torch.zeros(4 << 20, dtype=torch.uint8)
    torch.save({f"w{n}": stored[n:] for n in range(1000)}, path)
    return path


def missing_chunks(path: Path) -> Path:
    metadata = {}
    for n in range(COUNT):
        (path / f"w{n}").mkdir(parents=True)
        zarray = {
            "zarr_format": 2, "shape": [EACH], "chunks": [1 << 20], "dtype": "|u1", "order": "C",
            "fill_value": 0, "filters": None, "compressor": None,
        }  # fmt: skip
        (path / f"w{n}" / ".zarray").write_text(json.dumps(zarray))
        metadata[f"('w{n}',)"] = {
            "key_metadata": [{"key": f"w{n}", "key_type": 2}],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
    about = {"tree_metadata": metadata, "use_zarr3": False, "use_ocdbt": False}
    about["store_array_data_equal_to_fill_value"] = False
    (path / "_METADATA").write_text(json.dumps(about))
    return path


@pytest.mark.parametrize("make", [repeated_elements, views_of_one_storage, missing_chunks])
def test_what_is_asked_in_all_must_be_stored(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    path = make(tmp_path / "x")
    opened = unickpt.open(path)  # lists its names in any case
    assert opened["w1"].shape == opened.index.arrays["w1"].shape
    stored = r"arrays would take \d{10} bytes, but only \d+ bytes are stored .* 'w.*`only`"
    for use in (
        lambda: unickpt.load(path),
        lambda: unickpt.convert(path, tmp_path / "copy"),
        lambda: unickpt.diff(path, path),
        lambda: unickpt.merge([path, path], tmp_path / "copy"),
    ):
        with pytest.raises(CheckpointCorrupt, match=stored):
            use()
    assert not (tmp_path / "copy").exists()
    assert stored_damage(path)
    few = unickpt.load(path, only=["w1", "w2"])
    assert list(few) == ["w1", "w2"]
    assert np.array_equal(few["w2"][:5], opened["w2"][:5])
    mine = unickpt.load(path, {"w1": np.ones_like(few["w1"])}, strict=False)
    assert np.array_equal(mine["w1"], few["w1"])


def stored_damage(path: Path) -> bool:
    (damage,) = unickpt.verify(path).damage
    return "would take" in damage.reason


def test_texts_and_integers_count_each_time(tmp_path: Path) -> None:
    def many(value: bytes, count: int) -> bytes:
        return b"\x80\x02" + value + b"q\x00](" + b"h\x00" * count + b"eX\x01\x00\x00\x00a\x86."

    text = b"X" + (1 << 20).to_bytes(4, "little") + b"x" * (1 << 20)
    number = b"\x8b" + (1 << 20).to_bytes(4, "little") + b"\x01" * (1 << 20)
    for value in (text, number, text.replace(b"X", b"B", 1)):
        write_torch_file(tmp_path / "few", many(value, 20))
        assert len(unickpt.open(tmp_path / "few").values) == 21
        write_torch_file(tmp_path / "many", many(value, 100_000))
        with pytest.raises(CheckpointCorrupt, match="its values are too long for its size"):
            unickpt.open(tmp_path / "many")


def test_meshes_share_their_devices(tmp_path: Path) -> None:
    def of(shapes: list[object]) -> bytes:
        told = {
            base64.b64encode(f"w{n}".encode()).decode(): json.dumps(
                {"sharding_type": "NamedSharding", "shape": shape, "axis_names": ["a"],
                 "partition_spec": ["a"]}
            )
            for n, shape in enumerate(shapes)
        }  # fmt: skip
        return json.dumps(told).encode()

    found = metadata.shardings(of([[4096]] * 1000), "x")
    layouts = [metadata.layout(each, 1, "x") for each in found.values()]
    assert len({id(each.mesh.processes) for each in layouts if each}) == 1
    hostile: list[list[object]] = [
        [[1 << 20], [1 << 19]], [[1 << 30]], [[2] * 1000], [[float("inf")]], [[-1]], [["x"]],
    ]  # fmt: skip
    for shapes in hostile:
        with pytest.raises(CheckpointCorrupt, match="x is damaged"):
            metadata.shardings(of(shapes), "x")
