"""What a program says that lacks the plug-in, or finds in an index what the plug-in never wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Checkpointer, SaveOptions, doors
from unickpt.commit.merge import MergePolicies, merge_all
from unickpt.commit.messages import CHUNK_DTYPE, Record
from unickpt.errors import CheckpointCorrupt, CoverageError, PluginError, UnsupportedFormat
from unickpt.format.index import Index
from unickpt.plugins.incremental.full_rewrites import Growth


def patched(folder: Path) -> Path:
    """A checkpoint with a patch."""
    options = SaveOptions(reuse="patch", chunk_bytes=32 << 10, fsync=False)
    w = np.arange(64 * 2048, dtype="float32").reshape(64, 2048)
    unickpt.save(folder / "1", {"w": w}, options=options)
    w[3, 4] = -1
    more = SaveOptions(
        base=folder / "1", reuse="patch", chunk_bytes=32 << 10, fsync=False, kept_cost=0
    )
    assert unickpt.save(folder / "2", {"w": w}, options=more).patched_chunks == 1
    assert np.array_equal(unickpt.load(folder / "2")["w"], w)
    return folder / "2"


def lack(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    """Has the program lack all plug-ins of a group."""
    real = doors.find
    monkeypatch.setattr(doors, "find", lambda g, name: None if g == group else real(g, name))


def test_patches_are_not_read_without_what_applies_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = patched(tmp_path)
    lack(monkeypatch, "values")
    with pytest.raises(UnsupportedFormat, match="1 chunks of array 'w' are stored as patches"):
        unickpt.load(path)
    assert unickpt.open(path).index.arrays["w"].composed == 1


def test_a_base_needs_the_plug_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = patched(tmp_path)
    lack(monkeypatch, "references")
    unickpt.save(tmp_path / "plain", {"w": np.ones(3)})
    for options in {"base": path}, {"changed": "tracked"}:
        with pytest.raises(PluginError, match="lacks the plug-in 'incremental'"):
            SaveOptions(**options)
    with pytest.raises(PluginError, match="lacks the plug-in 'incremental'"):
        Checkpointer(tmp_path / "run", reuse=True)
    with pytest.raises(PluginError, match="lacks the plug-in 'since'"):
        unickpt.load(tmp_path / "plain", {"w": np.ones(3)}, since=tmp_path / "plain")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("stored", [[1, 2], "x", 3, [1, 2, 3, 4, -1], [1, 2, 3, 4, 5.0]])
def test_growth_that_was_never_written_is_damage(stored: Any) -> None:
    with pytest.raises(CheckpointCorrupt, match="the growth"):
        Growth.of({"incremental": {"growth": stored}})
    with pytest.raises(CheckpointCorrupt, match="the growth"):
        Growth.of({"incremental": stored if stored != "x" else [stored]})


def test_no_growth_is_none() -> None:
    assert Growth.of({}) is None
    assert Growth.of({"incremental": {"reused": 3}}) is None
    assert Growth.of({"incremental": {"growth": [1, 2, 3, 4, 5]}}) == Growth(1, 2, 3, 4, 5)


def test_a_note_that_process_0_cannot_merge_is_refused_by_name() -> None:
    chunks = np.zeros(0, CHUNK_DTYPE)
    records = [(0, Record(7, chunks)), (1, Record(7, chunks, notes={"other": 1}))]
    with pytest.raises(CoverageError, match="process 1 saves with 'other', and process 0 does not"):
        merge_all(records, {7: Index({"dict": []}, {}, processes=2)}, lambda _: (), MergePolicies())
