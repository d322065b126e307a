"""A checkpoint with a damaged marker is an error: it is not taken for another, nor for a part."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.file_writers import safetensors, torch_zip
from support.foreign import unpacked

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound
from unickpt.errors import UnickptError

MARKERS = [
    ("mc-tensors", "metadata.json"),
    ("mc-tensors", ".metadata"),
    ("ox-v0", "_METADATA"),
    ("ox-v1", "state/_METADATA"),
    ("bcp-ddp", "global_step_2/model/.metadata"),
    ("bcp-ddp", "global_step_2/optimizer/.metadata"),
    ("ds-losses", "latest"),
]


@pytest.mark.parametrize(("case", "marker"), MARKERS)
def test_a_damaged_marker_is_an_error_that_names_it(case: str, marker: str, tmp_path: Path) -> None:
    file = unpacked(case, tmp_path) / marker
    data = file.read_bytes()
    for damaged in (b"", data[: len(data) // 2], b"{}", b"[1]", b"\xff" * 50):
        file.write_bytes(damaged)
        with pytest.raises(CheckpointCorrupt, match=file.name.replace(".", r"\.")):
            unickpt.open(tmp_path / "ckpt")


@pytest.mark.parametrize(("case", "marker"), MARKERS[:-1])  # there need not be a `latest`
def test_a_missing_marker_is_an_error_that_names_it(case: str, marker: str, tmp_path: Path) -> None:
    file = unpacked(case, tmp_path) / marker
    file.unlink()
    with pytest.raises(CheckpointCorrupt, match=file.name.replace(".", r"\.")):
        unickpt.open(tmp_path / "ckpt")


def test_other_json_beside_a_dcp_checkpoint_does_not_make_it_megatrons(tmp_path: Path) -> None:
    (unpacked("dcp-zstd", tmp_path) / "metadata.json").write_text('{"author": "me"}')
    assert unickpt.open(tmp_path / "ckpt").reader.format == "dcp"


@pytest.mark.parametrize("beside", ["config.pt", "common.pt"])
def test_dcp_without_its_metadata_is_not_the_file_beside_it(beside: str, tmp_path: Path) -> None:
    folder = unpacked("dcp-zstd", tmp_path)
    (folder / ".metadata").unlink()
    (folder / beside).write_bytes(torch_zip({"lr": 1.0}))
    with pytest.raises(CheckpointNotFound, match=r"no \.metadata, which is written last"):
        unickpt.open(folder)


def test_latest_must_lead_to_its_checkpoint_where_another_one_would_be_taken(
    tmp_path: Path,
) -> None:
    folder = unpacked("ds-losses", tmp_path)
    (folder / "latest").write_text("global_step9")
    with pytest.raises(CheckpointCorrupt, match=r"'global_step9'.*Give the path"):
        unickpt.open(folder)


@pytest.mark.parametrize("data", [b"", b"<html>", b"version https://git-lfs.github.com/spec/v1\n"])
def test_damaged_weights_are_not_replaced_by_what_is_beside_them(
    data: bytes, tmp_path: Path
) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(data)
    (tmp_path / "training_args.bin").write_bytes(torch_zip({"lr": 1.0}))
    (tmp_path / "other.safetensors").write_bytes(safetensors({"w": np.ones(2, "f4")}))
    with pytest.raises(UnickptError, match=r"pytorch_model\.bin"):
        unickpt.open(tmp_path)
