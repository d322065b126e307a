"""export and import: from the command line into other systems' formats, and back."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from support.processes import Processes
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

FAST = unickpt.SaveOptions(fsync=False)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


def save(path: Path) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    state = {f"layers.{n}.w": rng.random((100, 70), np.float32) for n in range(5)}
    unickpt.save(path, state, options=FAST)
    return state


def test_there_and_back(tmp_path: Path) -> None:
    save(tmp_path / "c")
    out = run("export", tmp_path / "c", tmp_path / "hf", "--to", "hf", "--max-shard-size", "60kB")
    assert "exported 5 arrays" in out
    assert "checked" in out
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) == 3
    assert "imported 5 arrays" in run("import", tmp_path / "hf", tmp_path / "d")
    run("diff", tmp_path / "c", tmp_path / "d")
    told = run("export", tmp_path / "c", tmp_path / "x.npz", "--to", "npz", "--no-verify", "--json")
    assert json.loads(told)["arrays"] == 5


def test_the_suffix_of_the_destination_chooses_the_format(tmp_path: Path) -> None:
    save(tmp_path / "c")
    run("convert", tmp_path / "c", tmp_path / "a.safetensors")
    run("export", tmp_path / "c", tmp_path / "b.npz")
    assert (tmp_path / "a.safetensors").is_file()
    assert (tmp_path / "b.npz").is_file()
    run("diff", tmp_path / "a.safetensors", tmp_path / "b.npz")
    for command, name, words in [
        ("convert", "x.gguf", "does not write .gguf files"),
        ("export", "x.gguf", "does not write .gguf files"),
        ("export", "x", "say with --to which format"),
        ("import", "x.pt", "does not fit unickpt's own format"),
    ]:
        assert words in run(command, tmp_path / "c", tmp_path / name, code=2)
        assert not (tmp_path / name).exists()


def test_mistakes_are_told(tmp_path: Path) -> None:
    save(tmp_path / "c")
    assert "universal" in run("export", "--help")
    for options, words in {
        ("--to", "tf"): "safetensors",
        ("--to", "npz", "--dtype", "bfloat16"): "dtype",
        ("--to", "hf", "--max-shard-size", "much"): "5GB",
        ("--to", "hf", "--dtype", "int8"): "floating-point",
        ("--to", "hf", "--config", "nowhere"): "'nowhere' is not a folder",
    }.items():
        assert words in run("export", tmp_path / "c", tmp_path / "x", *options, code=2)
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "y").touch()
    assert "exists" in run("export", tmp_path / "c", tmp_path / "x", "--to", "hf", code=2)


def test_under_torchrun_the_processes_share_the_work(processes: Processes, tmp_path: Path) -> None:
    save(tmp_path / "c")
    source = "import sys; from unickpt.cli.main import main; main()"
    for command in (
        ("export", tmp_path / "c", tmp_path / "st", "--to", "safetensors", "--json"),
        ("import", tmp_path / "st", tmp_path / "d", "--json"),
    ):
        first, second = processes.finish(processes.torch(2, source, *command))
        assert json.loads(first)["processes"] == 2
        assert second == ""
    assert unickpt.diff(tmp_path / "c", tmp_path / "d").same
