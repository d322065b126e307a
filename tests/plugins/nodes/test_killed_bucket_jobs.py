"""A job whose root is a bucket, killed: the next one does not wait for its leases."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import pytest
from support import s3_server
from support.forks import Forks

from unickpt import Checkpointer, SaveOptions
from unickpt.commit import lease
from unickpt.errors import SaveConflict
from unickpt.runs.step_folder import StepFolder

OPTIONS = SaveOptions(fsync=False, chunk_bytes=4096)
JOB = """
import sys, time
import numpy as np
import unickpt
root, node, place = ARGS
if place:
    from unickpt.frameworks import os_process_states
    os_process_states._place = lambda: place
run = unickpt.Checkpointer(root, node_local=node, options=unickpt.SaveOptions(fsync=False))
run.save(1, {"w": np.arange(1000)}, wait=True)
run.wait()
print("saved", flush=True)
time.sleep(600)
"""


@pytest.fixture
def root(moto: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    s3_server.use(moto, monkeypatch)
    bucket = f"killed-{secrets.token_hex(4)}"
    s3_server.make_bucket(moto, bucket)
    yield f"s3://{bucket}/run"
    s3_server.remove_bucket(moto, bucket)


def leases(root: str) -> list[StepFolder]:
    return [StepFolder(root), StepFolder(f"{root}/.nodes")]


def start(root: str, node: Path, forks: Forks, place: str = "") -> int:
    """A job that has saved a step; its process id.

    Arguments:
        root, node: its folders.
        forks: starts it.
        place: of its machine, if that is another one.
    """
    job = forks.start(JOB, root, str(node), place)
    while "saved" not in forks.said(job):
        assert forks.runs(job), forks.said(job)
        time.sleep(0.05)
    return job


def seconds_of_next(root: str, node: Path, job: int, forks: Forks) -> float:
    """How long the next job takes to save, after one is killed."""
    forks.kill(job)
    forks.wait(job)
    began = time.monotonic()
    with Checkpointer(root, node_local=node, options=OPTIONS) as run:
        run.save(2, {"w": [2.0]}, wait=True)
    assert Checkpointer(root).steps() == [1, 2]
    return time.monotonic() - began


@pytest.mark.integration
def test_the_leases_of_a_killed_job_are_taken_at_once(
    root: str, tmp_path: Path, forks: Forks
) -> None:
    job = start(root, tmp_path / "node", forks)
    for folder in leases(root):
        with pytest.raises(SaveConflict, match="another job saves here now"):
            folder.lease.take()
    seconds = seconds_of_next(root, tmp_path / "node", job, forks)
    assert seconds < lease._EXPIRES_S, "it does not wait until one expires"


@pytest.mark.slow
def test_the_leases_of_a_job_killed_on_another_machine_expire_together(
    root: str, tmp_path: Path, forks: Forks
) -> None:
    job = start(root, tmp_path / "node", forks, "elsewhere")
    seconds = seconds_of_next(root, tmp_path / "node", job, forks)
    assert lease._EXPIRES_S - 5 < seconds < 2 * lease._EXPIRES_S, "the second wait is shorter"
