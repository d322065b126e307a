"""Folders made for a checkpoint are as durable as it is: their names are flushed."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import in_job

import unickpt
from unickpt import Checkpointer, SaveOptions

STATE = {"w": np.arange(5)}


def run(path: Path) -> None:
    with Checkpointer(path / "a/b/root", local=path / "c/d/local") as checkpointer:
        checkpointer.save(1, STATE, wait=True)


def several(path: Path) -> None:
    def save(group: unickpt.ProcessGroup) -> Any:
        return unickpt.save(path / "j/k/x", STATE, options=SaveOptions(group=group, timeout_s=20))

    in_job(3, save)


WAYS: dict[str, Callable[[Path], object]] = {
    "save": lambda path: unickpt.save(path / "new/deep/x", STATE),
    "processes": several,
    "run": run,
    "file": lambda path: unickpt.convert(path / "c", path / "e/f/m.safetensors", to="safetensors"),
    "folder": lambda path: unickpt.convert(path / "c", path / "g/h/hf", to="hf"),
    "convert": lambda path: unickpt.convert(path / "c", path / "l/m/n"),
    "copy": lambda path: unickpt.copy(path / "c", path / "o/p/q"),
}


def flushed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The files and folders that are flushed from now on."""
    found, fsync = set[str](), os.fsync

    def flushing(handle: int) -> None:
        found.add(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", flushing)
    return found


@pytest.mark.plugins
@pytest.mark.parametrize("way", WAYS)
def test_the_folder_above_each_new_folder_is_flushed(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unickpt.save(tmp_path / "c", STATE)
    there = {Path(folder) for folder, _, _ in os.walk(tmp_path)}
    found = flushed(monkeypatch)
    WAYS[way](tmp_path)
    new = {Path(folder) for folder, _, _ in os.walk(tmp_path)} - there
    assert len(new) > 2 - (way == "file")
    assert [path for path in sorted(new) if str(path.parent) not in found] == []


def test_without_fsync_nothing_is_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = flushed(monkeypatch)
    unickpt.save(tmp_path / "new/deep/x", STATE, options=SaveOptions(fsync=False))
    assert found == set()
