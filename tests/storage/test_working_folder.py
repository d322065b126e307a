"""A relative path names one folder, also after the program changes its working directory."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.saving import same

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.runs import save_leftovers

FAST = SaveOptions(fsync=False, timeout_s=20)


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The working directory at the beginning, and another one with a run of the same name."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    with Checkpointer(second / "run", options=FAST) as other:
        for step in (10, 20):
            other.save(step, state(step))
    monkeypatch.chdir(first)
    return first, second


def state(step: int) -> dict[str, Any]:
    return {"w": np.arange(2000) + step, "frozen": np.arange(3000.0), "step": step}


def steps_in(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.plugins
def test_a_run_stays_in_its_folder(folders: tuple[Path, Path]) -> None:
    first, second = folders
    arguments: dict[str, Any] = {"keep_last": 2, "reuse": True, "options": FAST}
    with Checkpointer("run", local="fast", **arguments) as run:
        run.save(1, state(1))
        os.chdir(second)
        for step in (2, 3, 4):
            run.save(step, state(step))
        run.wait()
        assert run.steps() == [3, 4]
        assert run.path(4) == str(first / "run" / "step_4")
        assert same(run.load(), state(4))
        run.delete(4)
        assert run.steps() == [3]
        assert run.drop_later_steps(3) == []
    assert steps_in(first / "run") == [".unickpt.lock", "step_3"]
    assert steps_in(second) == ["run"]
    assert Checkpointer(second / "run").steps() == [10, 20]


def test_roles_stay_in_their_folders(folders: tuple[Path, Path]) -> None:
    first, second = folders
    roots = ["actor", "critic"]
    actor, critic = (Checkpointer(root, roles=roots, options=FAST) for root in roots)
    os.chdir(second)
    with actor, critic:
        for role in (actor, critic):
            role.save(1, state(1), wait=True)
        assert actor.steps() == critic.steps() == [1]
    assert steps_in(first) == ["actor", "critic"]


def test_an_opened_checkpoint_is_read_from_where_it_was_opened(folders: tuple[Path, Path]) -> None:
    unickpt.save("a", state(1), options=FAST)
    opened = unickpt.open("a")
    array = opened["w"]
    os.chdir(folders[1])
    assert same(unickpt.load(opened), state(1))
    assert np.array_equal(array[:], state(1)["w"])
    assert unickpt.verify(opened).ok


@pytest.mark.plugins
@pytest.mark.parametrize("to", ["npz", "safetensors", "hf", "torch", "dcp", "orbax"])
def test_another_systems_files_are_read_from_where_they_were_opened(
    to: str, folders: tuple[Path, Path]
) -> None:
    tree = {"a": np.arange(6.0, dtype=np.float32), "b": np.ones((2, 3), np.float32)}
    unickpt.save("source", tree, options=FAST)
    name = {"npz": "a.npz", "safetensors": "a.safetensors", "torch": "a.pt"}.get(to, "exported")
    unickpt.convert("source", name, to=to)
    opened = unickpt.open(name)
    os.chdir(folders[1])
    assert {n: np.array_equal(opened[n][:], tree[n]) for n in opened} == {"a": True, "b": True}


@pytest.mark.plugins
def test_a_save_in_the_background_goes_where_it_was_called(folders: tuple[Path, Path]) -> None:
    first, second = folders
    options = SaveOptions(fsync=False, base="a", reuse="digest")
    unickpt.save("a", state(1), options=FAST)
    pending = unickpt.save_async("b", state(2), options=options)
    os.chdir(second)
    report = pending.result()
    assert pending.url == report.url == (first / "b").as_uri() + "/"
    assert report.reused_bytes == state(1)["frozen"].nbytes
    report = unickpt.save("c", state(3), options=options)
    assert report.reused_bytes == state(1)["frozen"].nbytes, "the options name the same base"
    assert steps_in(second) == ["c", "run"]


@pytest.mark.plugins
def test_a_watch_stays_in_its_folder(folders: tuple[Path, Path]) -> None:
    from unickpt.plugins.watch.watching import Watch

    unickpt.save("run/step_1", state(1), options=FAST)
    watch = Watch("run")
    os.chdir(folders[1])
    assert [found.name for found in watch.look().committed] == ["step_1"]


@pytest.mark.plugins
def test_a_home_folder_is_one_place(folders: tuple[Path, Path], monkeypatch: Any) -> None:
    monkeypatch.setenv("HOME", str(folders[0]))
    with Checkpointer("~/home", local="~/fast", options=FAST) as run:
        run.save(1, state(1))
        run.wait()
        assert run.path(1) == str(folders[0] / "home" / "step_1")
    options = SaveOptions(fsync=False, base="~/home/step_1")
    assert unickpt.save("~/home/b", state(1), options=options).reused_bytes > 0
    assert same(unickpt.load("~/home/b"), state(1))
    assert save_leftovers.find("~/home").orphans == ()
    assert steps_in(folders[0]) == ["fast", "home"]


@pytest.mark.plugins
@pytest.mark.integration  # takes seconds
def test_torch_distributed_saves_where_it_was_told(folders: tuple[Path, Path]) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    import torch

    from unickpt.integrations.dcp import StorageReader, StorageWriter

    first, second = folders
    writer, reader = StorageWriter("a", options=FAST), StorageReader("a")
    os.chdir(second)
    tensor = torch.arange(4.0)
    with warnings.catch_warnings(action="ignore"):  # that there are no other ranks
        dcp.save({"w": tensor}, storage_writer=writer)
        read = {"w": torch.zeros(4)}
        dcp.load(read, storage_reader=reader)
    assert torch.equal(read["w"], tensor)
    assert steps_in(first) == ["a"]
