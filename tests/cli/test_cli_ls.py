"""ls of what has no checkpoint of its own directly below: files, and folders of models."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.file_writers import safetensors, torch_zip
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

WEIGHTS = safetensors({"w": np.ones(3, np.float32)})


def listed(path: Path) -> list[dict[str, Any]]:
    result = CliRunner().invoke(app, ["ls", str(path), "--json"])
    assert result.exit_code == 0, result.output
    rows: list[dict[str, Any]] = json.loads(result.stdout)["checkpoints"]
    return rows


def test_a_file_is_listed_alone(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(WEIGHTS)
    (tmp_path / "other.pt").write_bytes(torch_zip({"lr": 1.0}))
    [row] = listed(tmp_path / "model.safetensors")
    assert (row["name"], row["format"], row["arrays"]) == ("model.safetensors", "safetensors", 1)
    shown = CliRunner().invoke(app, ["ls", str(tmp_path / "model.safetensors")])
    assert "safetensors" in shown.stdout
    (tmp_path / "x.gz").write_bytes(gzip.compress(b"text"))
    [row] = listed(tmp_path / "x.gz")
    assert "gunzip" in row["error"]


def test_a_cache_of_the_hugging_face_hub_is_searched(tmp_path: Path) -> None:
    for name in ("models--org--a", "models--org--b"):
        blobs = tmp_path / "hub" / name / "blobs"
        snapshot = tmp_path / "hub" / name / "snapshots" / "0123abcd"
        blobs.mkdir(parents=True)
        snapshot.mkdir(parents=True)
        (blobs / "feed").write_bytes(WEIGHTS)
        (snapshot / "model.safetensors").symlink_to("../../blobs/feed")
    rows = listed(tmp_path / "hub")
    names = [f"models--org--{name}/snapshots/0123abcd" for name in "ab"]
    assert [row["name"] for row in rows] == names
    assert [row["format"] for row in rows] == ["safetensors"] * 2
    for row in rows:
        assert unickpt.open(row["path"])["w"].shape == (3,)
    [row] = listed(tmp_path / "hub" / "models--org--a")
    assert row["name"] == "snapshots/0123abcd"


def test_folders_of_runs_are_searched_if_a_folder_has_no_checkpoint(tmp_path: Path) -> None:
    for run in ("a", "b"):
        unickpt.save(tmp_path / "runs" / run / "step_1", {"w": np.ones(2)})
    (tmp_path / "runs" / "logs" / "2026").mkdir(parents=True)
    assert [row["name"] for row in listed(tmp_path / "runs")] == ["a/step_1", "b/step_1"]
    assert [row["name"] for row in listed(tmp_path)] == ["runs/a/step_1", "runs/b/step_1"]
    assert [row["name"] for row in listed(tmp_path / "runs" / "a")] == ["step_1"]


def test_a_bucket_is_no_checkpoint_and_its_folders_are_shown(
    moto: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "lists-folders")
    unickpt.save("s3://lists-folders/runs/step_1", {"w": np.ones(2)})
    result = CliRunner().invoke(app, ["ls", "s3://lists-folders"])
    assert result.output == "no checkpoints in s3://lists-folders; its folders are runs\n"
