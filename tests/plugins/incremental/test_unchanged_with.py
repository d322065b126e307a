"""`changed=` with what else a save may do: tiers, experts, roles, object storage, kills."""

from __future__ import annotations

import os
import secrets
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import s3_server
from support.processes import Processes
from support.run_folders import refuse
from support.saving import same

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample
from unickpt.storage.regular_files import RegularFiles

CHUNK = 4096


@pytest.fixture(autouse=True)
def nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the program says; and small arrays count as if they were large."""
    monkeypatch.setattr(unchanged, "LEAST_BYTES", 0)
    monkeypatch.setattr(unchanged, "_due", lambda *_: ())
    monkeypatch.setattr(ArraySample, "differs", lambda *_: None)


EVERYTHING = {"**": True}
"""Said of the first save of a run, so that the second one knows what the first one saw."""


def options(**more: Any) -> SaveOptions:
    return SaveOptions(**{"chunk_bytes": CHUNK, "fsync": False, "timeout_s": 30, **more})


def tree(seed: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {"frozen": rng.random((64, 64)), "w": rng.random((512, 64)), "b": np.zeros(9)}


def train(state: dict[str, Any], step: int) -> Any:
    """Changes a row, and `b`; returns the rows."""
    rows = np.zeros(512, bool)
    rows[step * 7 % 512] = True
    state["w"][rows] += 1
    state["b"] += 1
    return rows


def is_stored(path: Path | str, state: Any) -> None:
    assert same(unickpt.load(path), state)
    report = unickpt.verify(path)
    assert report.ok, report.damage


# --- storage --------------------------------------------------------------------------------------


def test_with_a_local_tier(tmp_path: Path) -> None:
    """What is taken in the first tier is not sent again, and each copy is as the state was."""
    state, root = tree(), tmp_path / "root"
    with Checkpointer(root, local=tmp_path / "local", reuse=True, options=options()) as run:
        for step in range(4):
            rows = train(state, step)
            told = EVERYTHING if step == 0 else {"frozen": False, "w": rows}
            report = run.save(step, state, changed=told).result()
            if step:
                assert report.staged_bytes <= CHUNK + state["b"].nbytes
            run.wait()
            for tier in ("local", "root"):
                is_stored(tmp_path / tier / f"step_{step}", state)


def test_what_the_local_tier_lost_is_looked_at(tmp_path: Path) -> None:
    """A machine that was replaced goes on from the copies: nothing local is known of them."""
    state, root = tree(), tmp_path / "root"
    with Checkpointer(root, local=tmp_path / "local", reuse=True, options=options()) as run:
        run.save(0, state)
    with Checkpointer(root, local=tmp_path / "other", reuse=True, options=options()) as run:
        found = run.load()
        rows = train(found, 1)
        run.save(1, found, changed={"frozen": False, "w": rows}).result()
        run.wait()
    for tier in ("other", "root"):
        is_stored(tmp_path / tier / "step_1", found)


@pytest.mark.parametrize("reuse", [True, "patch"])
def test_in_object_storage(
    reuse: Any, moto: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bucket = f"changed-{secrets.token_hex(4)}"
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, bucket)
    state, run_url = tree(), f"s3://{bucket}/run"
    with Checkpointer(run_url, reuse=reuse, options=options()) as run:
        for step in range(5):
            rows = train(state, step)
            told = EVERYTHING if step == 0 else {"frozen": False, "w": rows}
            report = run.save(step, state, changed=told).result()
            if step:
                assert report.reused_bytes >= state["frozen"].nbytes
                assert report.staged_bytes <= CHUNK + state["b"].nbytes
                if reuse == "patch":
                    assert report.patched_chunks == 1
                    assert report.written_bytes < CHUNK
            is_stored(f"{run_url}/step_{step}", state)


def test_chunks_whose_files_can_no_longer_be_linked_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They go while the others are written: what was to be taken is read and written instead."""
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        real, links = RegularFiles.link, list[str]()

        def link(self: RegularFiles, path: str, destination: str, *, fsync: bool) -> bool:
            links.append(path)
            return len(links) == 1 and real(self, path, destination, fsync=fsync)

        monkeypatch.setattr(RegularFiles, "link", link)
        rows = train(state, 1)
        report = run.save(1, state, changed={"frozen": False, "w": rows}).result()
        assert len(links) > 1
        assert report.reused_bytes == 0
        assert report.written_bytes == report.bytes
    is_stored(tmp_path / "step_1", state)


@pytest.mark.integration  # takes seconds
@pytest.mark.parametrize("links", [True, False])
def test_long_chains_of_patches(
    links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also across a full save, and with old steps removed: what is taken keeps what it needs."""
    if not links:
        monkeypatch.setattr(os, "link", refuse)
    state, rng, patched = tree(), np.random.default_rng(0), 0
    with Checkpointer(tmp_path, reuse="patch", keep_last=2, options=options()) as run:
        for step in range(30):
            rows = np.zeros(512, bool)
            rows[rng.integers(0, 512, 3)] = True
            state["w"][rows, ::9] += 1
            told = {"frozen": False, "w": rows, "b": False} if step else EVERYTHING
            report = run.save(step, state, changed=told, wait=True).result()
            patched += report.patched_chunks
            run.wait()
            for kept in run.steps() if step % 5 == 4 else ():
                assert unickpt.verify(tmp_path / f"step_{kept}").ok
            is_stored(tmp_path / f"step_{step}", state)
    assert patched > 30


# --- which chunks ---------------------------------------------------------------------------------


def experts(step: int) -> dict[str, Any]:
    def numbers(*shape: int) -> Any:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + step * 1e6

    made = {str(x): {"up": numbers(30, 40) + x} for x in range(4)}
    return {"dense": numbers(40, 30), "frozen": numbers(50, 50) * 0, "experts": made}


@pytest.mark.plugins
@pytest.mark.parametrize("storage", ["file", "memory"])
def test_with_experts_in_turn(storage: str, tmp_path: Path) -> None:
    """The expert whose turn it is is saved though it is said that it did not change, as of the
    last call that is true, but of its last turn it is not."""
    root = str(tmp_path) if storage == "file" else f"memory://{secrets.token_hex(6)}"
    key = "experts/{x}/**"
    with Checkpointer(
        root, reuse=True, experts=unickpt.Experts({key: 1}), options=options()
    ) as run:
        for step in range(8):
            state = experts(step)
            told = {"frozen": False} if step else EVERYTHING
            report = run.save(step, state, changed=told, wait=True).result()
            at = f"{root}/step_{step}"
            found = unickpt.load(at)
            of = unickpt.open(at).metadata["unickpt"]["experts"]["steps"][key]
            for x, saved in of.items():
                expected = experts(int(saved))["experts"][x]
                assert same(found["experts"][x], expected), (step, x)
            dense = ("dense", "frozen")
            assert same({n: found[n] for n in dense}, {n: state[n] for n in dense})
            assert unickpt.verify(at).ok
            if step:
                assert report.written_bytes < report.bytes / 2 or storage == "memory"


@pytest.mark.plugins
def test_experts_that_are_said_not_to_have_changed(tmp_path: Path) -> None:
    """An expert that changes between its turns must not be taken of the step before because it did
    not change since: its newest state is another one than what that step has."""
    key, state = "experts/{x}/**", experts(0)
    with Checkpointer(
        tmp_path, reuse=True, experts=unickpt.Experts({key: 1}), options=options()
    ) as run:
        run.save(0, state, changed=EVERYTHING, wait=True)
        for step in range(1, 10):
            told: dict[str, Any] = {"dense": False, "frozen": False}
            if step == 2:
                state = experts(2) | {n: state[n] for n in ("dense", "frozen")}
            else:
                told["experts/**"] = False
            run.save(step, state, changed=told, wait=True)
        at = tmp_path / "step_9"
        of = unickpt.open(at).metadata["unickpt"]["experts"]["steps"][key]
        assert all(int(saved) >= 2 for saved in of.values()), "each had its turn since"
        for x, expert in unickpt.load(at)["experts"].items():
            assert same(expert, state["experts"][x]), x


def test_quantised_arrays_are_looked_at(tmp_path: Path) -> None:
    state = tree() | {"q": np.random.default_rng(0).random((64, 64), np.float32)}
    made = options(quantize={"q": "uint8"})
    with Checkpointer(tmp_path, reuse="patch", options=made) as run:
        for step in range(4):
            rows = train(state, step)
            told = {"frozen": False, "w": rows, "q": False} if step else EVERYTHING
            run.save(step, state, changed=told, wait=True)
            found = unickpt.load(tmp_path / f"step_{step}")
            assert same({n: found[n] for n in tree()}, {n: state[n] for n in tree()})
            assert np.abs(found["q"] - state["q"]).max() < 0.01
            assert unickpt.verify(tmp_path / f"step_{step}").ok


# --- roles, jobs ----------------------------------------------------------------------------------


def test_with_roles(tmp_path: Path) -> None:
    """What changed is said role by role; a step that one role lacks does not count, and going back
    to the one before looks at everything."""
    folders, states = [tmp_path / "actor", tmp_path / "critic"], [tree(1), tree(2)]
    runs = [Checkpointer(f, roles=folders, reuse=True, options=options()) for f in folders]
    for step in range(3):
        for run, state in zip(runs, states, strict=True):
            rows = train(state, step)
            told = {"frozen": False, "w": rows} if step else EVERYTHING
            run.save(step, state, changed=told, wait=True)
            run.wait()
    for folder, state in zip(folders, states, strict=True):
        is_stored(folder / "step_2", state)
    rows = train(states[0], 3)
    runs[0].save(
        3, states[0], changed={"frozen": False, "w": rows}, wait=True
    )  # the critic did not
    for run in runs:
        run.close()
    runs = [Checkpointer(f, roles=folders, reuse=True, options=options()) for f in folders]
    found = [run.load() for run in runs]
    assert [run.loaded_step for run in runs] == [2, 2]
    for run, folder, state in zip(runs, folders, found, strict=True):
        run.drop_later_steps()
        rows = train(state, 4)
        run.save(4, state, changed={"frozen": False, "w": rows}, wait=True)
        is_stored(folder / "step_4", state)
    for run in runs:
        run.close()


JOB = """
import os, sys, time
import numpy as np
import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample
unchanged.LEAST_BYTES = 0
unchanged._due = lambda *_: ()
ArraySample.differs = lambda *_: None
options = SaveOptions(chunk_bytes=4096, fsync=False)
rng = np.random.default_rng(5)
state = {"frozen": rng.random((64, 64)), "w": rng.random((512, 64)), "step": 0}
with Checkpointer(sys.argv[1], reuse=True, keep_last=3, options=options) as run:
    first = 0
    if run.latest() is not None:
        state = run.load()
        first = state["step"] + 1
    for step in range(first, 100000):
        rows = np.zeros(512, bool)
        rows[step % 512] = True
        state["w"][rows] += step
        state["step"] = step
        run.save(step, state, changed={"frozen": False, "w": rows} if step else {"**": True})
        print(step, flush=True)
"""


def test_after_kill_9_each_step_is_what_the_job_had(processes: Processes, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    frozen, first = rng.random((64, 64)), rng.random((512, 64))
    for number in range(3):
        job = processes.forked(JOB, tmp_path / "run")
        for _ in range(20):
            assert job.stdout.readline()
        time.sleep(0.2 * number)
        os.kill(job.pid, signal.SIGKILL)
        job.wait()
        with Checkpointer(tmp_path / "run") as run:
            steps = run.steps()
        assert steps
        for step in steps:
            expected: dict[str, Any] = {"frozen": frozen, "w": first.copy(), "step": step}
            for at in range(step + 1):
                expected["w"][at % 512] += at
            is_stored(tmp_path / "run" / f"step_{step}", expected)


def test_a_second_job_looks_at_what_another_one_saved(tmp_path: Path) -> None:
    """What is said is about the last call of this Checkpointer, not what others saved since."""
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as first:
        first.save(0, state, wait=True)
        first.release()
        with Checkpointer(tmp_path, reuse=True, options=options()) as second:
            other = second.load()
            other["frozen"] += 1
            second.save(1, other, wait=True)
        rows = train(state, 2)
        first.save(2, state, changed={"frozen": False, "w": rows}, wait=True)
    is_stored(tmp_path / "step_1", other)
    is_stored(tmp_path / "step_2", state)


@pytest.mark.parametrize("back", ["drop", "overwrite"])
def test_after_going_back(back: str, tmp_path: Path) -> None:
    states = list[Any]()
    state = tree()
    with Checkpointer(tmp_path, reuse=True, options=options()) as run:
        for step in range(4):
            rows = train(state, step)
            run.save(
                step, state, changed={"frozen": False, "w": rows} if step else EVERYTHING, wait=True
            )
            states.append({name: each.copy() for name, each in state.items()})
        if back == "drop":
            state = run.load(step=1)
            run.drop_later_steps()
        state["frozen"] = state["frozen"] + 1
        rows = train(state, 9)
        told = {"w": rows} | ({"frozen": False} if back == "drop" else {})
        again = 2 if back == "drop" else 3
        run.save(again, state, changed=told, wait=True, overwrite=back == "overwrite")
        is_stored(tmp_path / f"step_{again}", state)
        rows = train(state, 10)
        run.save(again + 1, state, changed={"frozen": False, "w": rows}, wait=True)
        is_stored(tmp_path / f"step_{again + 1}", state)
        is_stored(tmp_path / "step_1", states[1])
