"""Checkpoints that are single files: a path names one, or a folder contains it beside others."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import file_writers, foreign, s3_server
from typer.testing import CliRunner

import unickpt
from unickpt import CheckpointCorrupt, CheckpointNotFound
from unickpt.cli.app import app
from unickpt.errors import InvalidPath, UnsupportedFormat
from unickpt.storage import paths
from unickpt.storage.paths import resolve


def safetensors(path: Path, value: float) -> None:
    path.write_bytes(file_writers.safetensors({"w": np.full(3, value, np.float32)}))


def torch_file(path: Path, value: float) -> None:
    path.write_bytes(file_writers.torch_zip({"w": np.full(3, value, np.float32)}))


def npz(path: Path, value: float) -> None:
    np.savez(path, w=np.full(3, value, np.float32))


WRITERS = {"safetensors": safetensors, "torch": torch_file, "npz": npz}


def value(path: Path | str) -> float:
    return float(unickpt.open(path)["w"][0])


# --- a path that names a file -------------------------------------------------------------------


@pytest.mark.parametrize("format", WRITERS)
@pytest.mark.parametrize("name", ["model.safetensors", "x.pt", "none", "a b%20#?.npz"])
def test_a_file_is_what_its_content_says(format: str, name: str, tmp_path: Path) -> None:
    WRITERS[format](tmp_path / f"x.{format}.npz", 2.0)
    file = tmp_path / name
    os.rename(tmp_path / f"x.{format}.npz", file)
    torch_file(tmp_path / "other.pt", 5.0)
    found = unickpt.open(file)
    assert found.reader.format == format
    assert found["w"][0] == 2.0
    assert pickle.loads(pickle.dumps(found))["w"][0] == 2.0
    assert value(f"{found.url}") == 2.0
    assert str(file) in repr(found)


def test_all_commands_take_a_file(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    safetensors(file, 2.0)
    assert unickpt.load(file)["w"][0] == 2.0
    assert unickpt.verify(file).ok
    unickpt.convert(file, tmp_path / "ours")
    assert unickpt.diff(tmp_path / "ours", file).same
    for command in ("inspect", "verify"):
        result = CliRunner().invoke(app, [command, str(file)])
        assert (result.exit_code, "safetensors" in result.output) == (0, True), result.output


def test_nothing_is_saved_into_a_file(tmp_path: Path) -> None:
    safetensors(tmp_path / "x", 2.0)
    for write in (lambda at: unickpt.save(at, {}), lambda at: unickpt.convert(tmp_path / "x", at)):
        for at in (tmp_path / "x", tmp_path / "x" / "y", f"file://{tmp_path}/x"):
            with pytest.raises(InvalidPath, match="is not a directory"):
                write(at)
    with pytest.raises(InvalidPath, match="is not a directory"):
        unickpt.open(tmp_path / "x" / "y")


def test_files_of_no_format_say_how_they_begin(tmp_path: Path) -> None:
    for content, told in [
        (b"", "it is empty"),
        (b"hello", "begins with b'hello'"),
        (b"\xff" * 600, "xff"),
    ]:
        (tmp_path / "x.pt").write_bytes(content)
        with pytest.raises(UnsupportedFormat, match=rf"x\.pt is a file.*{told}"):
            unickpt.open(tmp_path / "x.pt")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    safetensors(tmp_path / "x", 2.0)
    os.truncate(tmp_path / "x", 60)
    with pytest.raises(CheckpointCorrupt, match=str(tmp_path / "x")):
        unickpt.open(tmp_path / "x")
    with pytest.raises(CheckpointNotFound, match="no checkpoint at"):
        unickpt.open(tmp_path / "y.safetensors")


def test_an_index_names_its_files(tmp_path: Path) -> None:
    safetensors(tmp_path / "one.safetensors", 1.0)
    safetensors(tmp_path / "model.safetensors", 2.0)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "one.safetensors"}}))
    assert value(index) == 1.0
    assert value(tmp_path / "model.safetensors") == 2.0
    with pytest.raises(UnsupportedFormat, match=r"several checkpoints, model\.safetensors\.index"):
        unickpt.open(tmp_path)


def test_a_file_of_a_store_without_folders(moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "loose-files")
    for url in ("s3://loose-files/", "s3://loose-files/a/b/", "memory://loose-files/"):
        store = resolve(url, whole=True).store(paths.context())
        store.write("x y.st", file_writers.safetensors({"w": np.full(3, 2.0, np.float32)})).result()
        store.write("other.pt", b"unrelated").result()
        store.write("short", b"hi").result()
        found = unickpt.open(f"{url}x%20y.st" if url[:2] == "s3" else f"{url}x y.st")
        assert found["w"][0] == 2.0
        assert pickle.loads(pickle.dumps(found))["w"][0] == 2.0
        with pytest.raises(UnsupportedFormat, match="begins with b'hi'"):
            unickpt.open(f"{url}short")
        with pytest.raises(CheckpointNotFound, match="nothing is there"):
            unickpt.open(f"{url}none")


def test_few_bytes_are_read_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_writers.safetensors({"w": np.zeros(1 << 20)})
    (tmp_path / "x").write_bytes(data)
    reads = foreign.count_reads(monkeypatch)
    unickpt.open(tmp_path / "x")
    assert sum(count for _, count in reads) < 1000


# --- several files in a folder ------------------------------------------------------------------

TRAINER = ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth", "scaler.pt")


@pytest.mark.parametrize(
    ("weights", "others"),
    [
        ("model.safetensors", ("pytorch_model.bin", "model.fp16.safetensors", *TRAINER)),
        ("adapter_model.safetensors", ("optimizer.pt", "x.npz")),
        ("pytorch_model.bin", ("more.pt", *TRAINER)),
        ("mine.pt", TRAINER),
        ("mine.safetensors", ("optimizer.bin",)),
        ("optimizer.pt", ()),
    ],
)
def test_weights_come_before_what_a_trainer_keeps(
    weights: str, others: tuple[str, ...], tmp_path: Path
) -> None:
    for name in others:
        (npz if name.endswith(".npz") else torch_file)(tmp_path / name, 5.0)
        if name.endswith(".safetensors"):
            safetensors(tmp_path / name, 5.0)
    (safetensors if weights.endswith(".safetensors") else torch_file)(tmp_path / weights, 2.0)
    (tmp_path / "config.json").write_text("{}")
    assert value(tmp_path) == 2.0
    assert sorted(unickpt.open(tmp_path).reader.beside) == sorted(others)
    result = CliRunner().invoke(app, ["inspect", str(tmp_path)])
    assert all(name in " ".join(result.output.split()) for name in others)
    found = json.loads(CliRunner().invoke(app, ["inspect", "--json", str(tmp_path)]).stdout)
    assert sorted(found["beside"]) == sorted(others)


@pytest.mark.parametrize(
    "names",
    [
        ("a.pt", "b.pt"),
        ("a.pt", "b.safetensors"),
        ("a.npz", "b.pth"),
        ("a.npz", "b.npz"),
        ("optimizer.pt", "scheduler.pt"),
        ("model.safetensors", "adapter_model.safetensors"),
        tuple(f"{n}.pt" for n in range(1000)),
    ],
)
def test_what_is_ambiguous_lists_the_files(names: tuple[str, ...], tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(UnsupportedFormat, match="give the path of one") as caught:
        unickpt.open(tmp_path)
    assert all(name in str(caught.value) for name in sorted(names)[:3])
    assert any(str(tmp_path / name) in str(caught.value) for name in names)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["notes.pt", "x.npz", "model.safetensors", "y.ckpt"])
def test_a_run_with_a_file_beside_its_steps_is_not_that_file(name: str, tmp_path: Path) -> None:
    for step in (1, 2):
        unickpt.save(tmp_path / f"step_{step}", {"w": np.full(3, float(step))})
    format = {"npz": npz, "safetensors": safetensors}.get(name.rpartition(".")[2], torch_file)
    format(tmp_path / name, 5.0)
    for read in (unickpt.open, unickpt.load):
        with pytest.raises(UnsupportedFormat, match=rf"{name}, step_1, step_2; give the path of"):
            read(tmp_path)
    assert value(tmp_path / name) == 5.0
    assert value(tmp_path / "step_2") == 2.0
    assert unickpt.Checkpointer(tmp_path).steps() == [1, 2]


def test_a_run_in_a_store_without_folders_is_not_a_file_in_it() -> None:
    unickpt.save("memory://loose-run/step_1", {"w": np.ones(3)})
    store = resolve("memory://loose-run").store(paths.context())
    store.write("x.st.safetensors", file_writers.safetensors({"w": np.zeros(3)})).result()
    with pytest.raises(UnsupportedFormat, match="step_1"):
        unickpt.open("memory://loose-run")


def test_files_of_other_programs_are_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.bin").write_bytes(bytes(1000))
    (tmp_path / "checkpoint_7").write_bytes(b"text")
    shutil.copytree(tmp_path, tmp_path / "more.pt")
    with pytest.raises(CheckpointNotFound):
        unickpt.open(tmp_path)


def test_ls_lists_files_and_formats(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "step_1", {"w": np.ones(3)})
    torch_file(tmp_path / "notes.pt", 1.0)
    (tmp_path / "hf").mkdir()
    safetensors(tmp_path / "hf" / "model.safetensors", 2.0)
    torch_file(tmp_path / "hf" / "optimizer.pt", 2.0)
    (tmp_path / "two").mkdir()
    npz(tmp_path / "two" / "a.npz", 1.0)
    npz(tmp_path / "two" / "b.npz", 1.0)
    result = CliRunner().invoke(app, ["ls", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "several checkpoints" not in result.output
    found = json.loads(CliRunner().invoke(app, ["ls", "--json", str(tmp_path)]).stdout)
    assert {facts["name"]: facts["format"] for facts in found["checkpoints"]} == {
        "step_1": "unickpt", "notes.pt": "torch", "hf": "safetensors",
        "two/a.npz": "npz", "two/b.npz": "npz",
    }  # fmt: skip
    for facts in found["checkpoints"]:
        assert unickpt.open(facts["path"])["w"].shape == (3,)
