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
from unickpt.errors import SaveConflict
from unickpt.runs.step_folder import StepFolder

OPTIONS = SaveOptions(fsync=False, chunk_bytes=4096)
JOB = """
import sys, time
import numpy as np
import unickpt
root, node, place = ARGS
if place:
    from unickpt.frameworks import process_states
    process_states._place = lambda: place
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


@pytest.mark.integration
def test_the_leases_of_a_killed_job_are_taken_at_once(
    root: str, tmp_path: Path, forks: Forks
) -> None:
    job = forks.start(JOB, root, str(tmp_path / "node"), "")
    while "saved" not in forks.said(job):
        assert forks.runs(job), forks.said(job)
        time.sleep(0.05)
    for folder in leases(root):
        with pytest.raises(SaveConflict, match="another job saves here now"):
            folder.lease.take()
    forks.kill(job)
    forks.wait(job)
    began = time.monotonic()
    with Checkpointer(root, node_local=tmp_path / "node", options=OPTIONS) as run:
        run.save(2, {"w": [2.0]}, wait=True)
    assert Checkpointer(root).steps() == [1, 2]
    assert time.monotonic() - began < 15


@pytest.mark.slow
def test_the_leases_of_a_job_killed_on_another_machine_expire_together(
    root: str, tmp_path: Path, forks: Forks
) -> None:
    job = forks.start(JOB, root, str(tmp_path / "node"), "elsewhere")
    while "saved" not in forks.said(job):
        assert forks.runs(job), forks.said(job)
        time.sleep(0.05)
    forks.kill(job)
    forks.wait(job)
    began = time.monotonic()
    with Checkpointer(root, node_local=tmp_path / "node", options=OPTIONS) as run:
        run.save(2, {"w": [2.0]}, wait=True)
    print(time.monotonic() - began)
    assert 35 < time.monotonic() - began < 65
