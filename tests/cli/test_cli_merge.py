"""merge: from the command line, alone and under torchrun."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support import foreign
from support.processes import Processes
from support.quantized import codes_of
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

FAST = unickpt.SaveOptions(fsync=False)


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    assert result.exit_code == code, (result.output, result.exception)
    return result.output


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    with unickpt.Checkpointer(tmp_path / "run", options=FAST) as saver:
        for n in range(3):
            state = {"w": np.full((40, 30), n * n, np.float32), "n": np.int64(n), "lr": 0.1 * n}
            saver.save(10 * n + 10, state, metrics={"loss": 1 / (n + 1)})
    return [tmp_path / "run" / f"step_{step}" for step in (10, 20, 30)]


def test_a_merge_and_what_it_says(paths: list[Path], tmp_path: Path) -> None:
    assert "'n'" in run("merge", *paths, tmp_path / "m", code=2)
    told = run("merge", *paths, tmp_path / "m", "--integers", "last")
    assert "merged 3 checkpoints: 2 arrays" in told
    assert "and checked" in told
    assert "warning: 1 taken from the last source: n" in told
    assert (unickpt.load(tmp_path / "m")["w"] == np.float32(5 / 3)).all()
    assert "already holds" in run("merge", *paths, tmp_path / "m", "--integers", "last", code=2)
    more = ("--how", "weighted", "--weight", 1, "--weight", 2, "--integers", "last", "--overwrite")
    told = json.loads(run("merge", *paths[:2], tmp_path / "m", *more, "--json"))
    assert [source["weight"] for source in told["sources"]] == [1, 2]
    assert told["method"] == "weighted"
    assert told["notes"][0] == "the weights sum to 3, not to 1"
    assert (unickpt.load(tmp_path / "m")["w"] == 2).all()


def test_the_last_steps_of_a_run_with_parameters(paths: list[Path], tmp_path: Path) -> None:
    more = ("--last", 2, "--integers", "last", "--how", "metric")
    run("merge", tmp_path / "run", tmp_path / "m", *more, "--with", "metric=loss")
    assert np.allclose(unickpt.load(tmp_path / "m")["w"], 1 * 0.4 + 4 * 0.6)
    told = run("merge", tmp_path / "run", tmp_path / "n", *more, "--with", "metric=acc", code=2)
    assert "recorded: loss" in told


def test_a_merge_with_fewer_bits(paths: list[Path], tmp_path: Path) -> None:
    more = ("--integers", "last", "--quantize", "w=int4")
    assert "1 array with fewer bits" in run("merge", *paths, tmp_path / "m", *more)
    assert codes_of(unickpt.open(tmp_path / "m").index.arrays["w"]) == "int4"


def test_hints_are_for_every_source(tmp_path: Path) -> None:
    source, name = foreign.folder("gguf-quantized"), "Q4_0"
    hint = ("--hint", "dequantize=float32")
    run("merge", source, source, tmp_path / "m", *hint)
    expected = unickpt.open(source, hints={"dequantize": "float32"})[name][...]
    found = unickpt.open(tmp_path / "m")[name][...]
    assert (found.dtype, found.tobytes()) == (np.float32, expected.tobytes())
    told = run("merge", source, source, tmp_path / "n", "--hint", "tp=2", code=2)
    assert "leave out 'tp'" in told
    told = run("merge", tmp_path, tmp_path / "n", "--last", 2, "--hint", "tp=2", code=2)
    assert "not for the steps of a run" in told


def test_a_dry_run_writes_nothing(paths: list[Path], tmp_path: Path) -> None:
    more = ("--how", "ties", "--with", "density=0.5", "--integers", "last", "--dry-run")
    told = run("merge", *paths[1:], tmp_path / "m", "--base", paths[0], *more)
    assert "base  file://" in told
    assert "step 30" in told
    assert "1 array merged by Ties(density=0.5, scale=1.0), 1 taken" in told
    found = json.loads(
        run("merge", *paths[1:], tmp_path / "m", "--base", paths[0], *more, "--json")
    )
    assert (found["method"], found["merged"], found["from_last"]) == ("ties", ["w"], ["n"])
    assert found["values_differ"] == ["lr"]
    assert not (tmp_path / "m").exists()


def test_mistakes_are_told(paths: list[Path], tmp_path: Path) -> None:
    for words, arguments in {
        "then the destination": (paths[0],),
        "is no method": (*paths, tmp_path / "m", "--how", "median"),
        "its parameters are density, scale": (*paths, "m", "--how", "ties", "--with", "x=1"),
        "such as density=0.3": (*paths, tmp_path / "m", "--with", "density"),
        "needs base=": (*paths, tmp_path / "m", "--how", "dare"),
        "folder of a run": (*paths, tmp_path / "m", "--last", 3),
        "must be a number from 0 to 1": (*paths, "m", "--how", "ema", "--with", "decay=2"),
        "compression": (*paths, tmp_path / "m", "--compression", "rar"),
        "such as opt/**=uint8": (*paths, tmp_path / "m", "--quantize", "w"),
        "not one of uint8": (*paths, tmp_path / "m", "--quantize", "w=int5"),
    }.items():
        assert words in run("merge", *arguments, code=2), words
    assert "ties" in run("merge", "--help")


def test_under_torchrun_the_processes_share_the_work(
    processes: Processes, paths: list[Path], tmp_path: Path
) -> None:
    source = "import sys; from unickpt.cli.main import main; main()"
    command = ("merge", *paths, tmp_path / "m", "--integers", "last", "--json")
    first, second = processes.finish(processes.torch(2, source, *command))
    assert json.loads(first)["processes"] == 2
    assert second == ""
    assert (unickpt.load(tmp_path / "m")["w"] == np.float32(5 / 3)).all()
