"""Without the plug-in for shared reads, each process reads alone, or is told what it lacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import unickpt
from unickpt import LoadOptions, doors
from unickpt.errors import PluginError
from unickpt.frameworks import leaves
from unickpt.testing.thread_groups import Threads
from unickpt.types import Box, LocalFragments


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, in a program without the plug-in."""
    real = doors.find
    monkeypatch.setattr(doors, "find", lambda g, name: None if g == "reads" else real(g, name))
    unickpt.save(tmp_path / "c", {"w": np.arange(12.0).reshape(4, 3)})
    return tmp_path / "c"


def test_processes_of_a_node_read_alone(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(leaves.LocalTarget, "processes", 2)
    like = LocalFragments((4, 3), [(Box((1, 0), (3, 3)), np.zeros((2, 3)))])
    found = unickpt.load(saved, {"w": like})["w"]
    assert np.array_equal(found.fragments[0][1], np.arange(12.0).reshape(4, 3)[1:3])


def test_a_job_that_is_to_read_together_is_told_what_it_lacks(saved: Path) -> None:
    for raised in Threads(2).run(lambda i, o: fails(saved, o)):
        assert "lacks the plug-in 'exchange'" in raised
    alone = LoadOptions(exchange=True)
    assert unickpt.load(saved, options=alone)["w"].sum() == 66, "there is nobody to share with"


def fails(path: Path, options: LoadOptions) -> str:
    with pytest.raises(PluginError) as raised:
        unickpt.load(path, options=options)
    return str(raised.value)
