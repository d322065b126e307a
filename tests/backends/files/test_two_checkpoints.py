"""Folders in which another system saved over a checkpoint of unickpt."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app
from unickpt.integrations import dcp

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A checkpoint of ours, over which torch's DCP saved."""
    unickpt.save(tmp_path / "c", {"w": torch.full((9,), 1.0), "n": 1})
    torch_dcp.save({"w": torch.full((9,), 2.0), "n": 2}, checkpoint_id=tmp_path / "c", no_dist=True)
    return tmp_path / "c"


READS: dict[str, Callable[[Path], Any]] = {
    "open": unickpt.open,
    "load": unickpt.load,
    "verify": unickpt.verify,
    "convert": lambda path: unickpt.convert(path, path.parent / "converted"),
    "the drop-in of DCP": lambda path: dcp.load({"w": torch.zeros(9), "n": 0}, checkpoint_id=path),
}


@pytest.mark.parametrize("read", READS)
def test_a_folder_with_two_checkpoints_is_refused_and_both_are_named(read: str, path: Path) -> None:
    message = r"two checkpoints: one of the format 'unickpt' \(manifest.ocdbt\), and one of the "
    with pytest.raises(
        unickpt.errors.HintError, match=message + r"format 'dcp' \(.metadata\).*hints="
    ):
        READS[read](path)


def test_a_save_that_was_killed_before_it_removed_what_it_replaced_counts(tmp_path: Path) -> None:
    path = tmp_path / "c"
    torch_dcp.save({"n": 1}, checkpoint_id=path, no_dist=True)
    left = {file.name: file.read_bytes() for file in path.iterdir()}
    dcp.save({"n": 2}, checkpoint_id=path, no_dist=True)
    assert not (path / ".metadata").exists()
    for name, content in left.items():  # as if it had been killed after the commit
        (path / name).write_bytes(content)
    assert unickpt.load(path)["n"] == 2
    dcp.save({"n": 3}, checkpoint_id=path, no_dist=True)
    assert not {*left} & {file.name for file in path.iterdir()}
    torch_dcp.save({"n": 4}, checkpoint_id=path, no_dist=True)
    with pytest.raises(unickpt.errors.HintError, match="two checkpoints"):
        unickpt.load(path)


def test_a_run_names_both_checkpoints_of_a_step(tmp_path: Path) -> None:
    with unickpt.Checkpointer(tmp_path) as run:
        run.save(1, {"n": 1}, wait=True)
        torch_dcp.save({"n": 2}, checkpoint_id=run.path(1), no_dist=True)
        with pytest.raises(unickpt.errors.HintError, match="two checkpoints"):
            run.load()


def test_a_hint_says_which_one_is_meant(path: Path) -> None:
    for format, n in (("unickpt", 1), ("dcp", 2)):
        opened = unickpt.open(path, hints={"format": format})
        state = unickpt.load(opened, {"w": torch.zeros(9), "n": 0})
        assert state["n"] == n
        assert torch.equal(state["w"], torch.full((9,), float(n)))
        assert unickpt.verify(opened).ok


def test_the_command_line_takes_the_hint(path: Path) -> None:
    refused = CliRunner().invoke(app, ["inspect", str(path)])
    assert refused.exit_code
    assert "two checkpoints" in " ".join(refused.output.split())
    shown = CliRunner().invoke(app, ["inspect", str(path), "--hint", "format=dcp", "--json"])
    assert json.loads(shown.output)


def test_deepspeeds_latest_counts_and_other_files_do_not(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"n": np.arange(3)})
    for name in ("config.json", "latest", ".metadata"):  # none of them is a checkpoint
        (tmp_path / "c" / name).write_text("tag")
    torch.save({"a": torch.ones(2)}, tmp_path / "c" / "scheduler.pt")
    assert np.array_equal(unickpt.load(tmp_path / "c")["n"], np.arange(3))


def test_a_hint_of_another_format_is_refused(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"n": 1})
    with pytest.raises(
        unickpt.errors.HintError, match="of the format 'unickpt', and the hint says 'dcp'"
    ):
        unickpt.open(tmp_path / "c", hints={"format": "dcp"})
    np.savez(tmp_path / "x.npz", a=np.ones(2))
    assert unickpt.open(tmp_path / "x.npz", hints={"format": "npz"})["a"].shape == (2,)


def test_a_save_over_a_checkpoint_of_dcp_is_refused(tmp_path: Path) -> None:
    torch_dcp.save({"w": torch.ones(9)}, checkpoint_id=tmp_path / "c", no_dist=True)
    for overwrite in (False, True):
        with pytest.raises(unickpt.CheckpointExists, match=r"holds other files \(__0_0.distcp"):
            unickpt.save(tmp_path / "c", {"w": torch.ones(9)}, overwrite=overwrite)
