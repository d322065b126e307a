"""The file `latest` of a DeepSpeed run, and jobs that are killed right before it is written."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forks import Forks

import unickpt

pytest.importorskip("torch")
from unickpt.integrations.deepspeed.latest import LatestFile, latest

# Saves one checkpoint as a DeepSpeed engine does, and may be killed before or after its commit.
SAVE = """
import os, signal
import numpy as np
from unickpt.integrations.deepspeed.latest import LatestFile
from unickpt.saving import saver
from unickpt.saving.background import SaveCallbacks, SaveRequest
from unickpt.options import SaveOptions
from unickpt.storage import paths

folder, tag, killed = ARGS
file = LatestFile(folder, tag)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def check():
    file.announce()
    if killed == "before":
        die()

def committed():
    if killed == "after":
        die()
    file.write()

callbacks = SaveCallbacks(prepare=file.prepare, check=check, committed=committed)
to = paths.resolve(f"{folder}/{tag}")
request = SaveRequest(to, {"w": np.ones(3)}, SaveOptions(), overwrite=True, callbacks=callbacks)
saver.begin(request).result()
"""


@pytest.fixture(scope="module")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    running = Forks(tmp_path_factory.mktemp("out"), "unickpt.integrations.deepspeed.latest")
    yield running
    running.close()


def save(forks: Forks, folder: Path, tag: str, killed: str = "") -> None:
    code = forks.wait(forks.start(SAVE, str(folder), tag, killed)).code
    assert code == (-9 if killed else 0)


def test_a_job_killed_between_the_commit_and_latest_loses_nothing(
    forks: Forks, tmp_path: Path
) -> None:
    assert latest(str(tmp_path)) is None
    save(forks, tmp_path, "step1", killed="before")
    assert latest(str(tmp_path)) is None
    save(forks, tmp_path, "step1", killed="after")
    assert not (tmp_path / "latest").exists()
    assert latest(str(tmp_path)) == "step1"
    save(forks, tmp_path, "step2")
    assert latest(str(tmp_path)) == (tmp_path / "latest").read_text() == "step2"
    save(forks, tmp_path, "step3", killed="after")
    assert (tmp_path / "latest").read_text() == "step2"
    assert latest(str(tmp_path)) == "step3"


def test_an_older_checkpoint_of_the_same_name_is_not_the_latest(
    forks: Forks, tmp_path: Path
) -> None:
    save(forks, tmp_path, "step1")
    save(forks, tmp_path, "step2")
    (tmp_path / "latest").write_text("step1")  # back to it
    assert latest(str(tmp_path)) == "step1"
    save(forks, tmp_path, "step2", killed="before")
    assert unickpt.open(tmp_path / "step2").index.attempt
    assert latest(str(tmp_path)) == "step1"


def test_who_changes_latest_by_hand_is_obeyed(forks: Forks, tmp_path: Path) -> None:
    for tag in ("step1", "step2"):
        save(forks, tmp_path, tag)
    save(forks, tmp_path, "step3", killed="after")
    (tmp_path / "latest").write_text("step1")
    assert latest(str(tmp_path)) == "step1"


def test_the_universal_one_is_preferred_if_asked(tmp_path: Path) -> None:
    for name, text in {"latest": "a", "latest_universal": "b\n", "latest.next": "{"}.items():
        (tmp_path / name).write_text(text)
    assert latest(str(tmp_path)) == "a"
    assert latest(str(tmp_path), universal=True) == "b"
    LatestFile(str(tmp_path), "c").write()
    assert (tmp_path / "latest").read_text() == "c"
