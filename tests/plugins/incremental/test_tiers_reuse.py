"""Two tiers whose steps share chunks: only what is new is sent, and each copy can be read."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS, s3_server
from support.processes import Processes
from support.run_folders import refuse
from support.saving import damage, files, same

import unickpt
from unickpt import Checkpointer, SaveConflict, SaveOptions
from unickpt.commit import version
from unickpt.format import held_files
from unickpt.runs import save_leftovers, tier_copies
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.storage import paths

CHUNK = 4096
OPTIONS = SaveOptions(chunk_bytes=CHUNK, fsync=False, timeout_s=20)
ROWS = 96
"""Each row of `state` is a chunk."""


def sent_at_once(step: int, sent: Any, base_files: Any) -> Any:
    return sent.run(base_files)


def state() -> dict[str, Any]:
    return {"w": np.random.default_rng(1).random((ROWS, CHUNK // 8)), "step": 0}


def changed(before: dict[str, Any], step: int, *rows: int) -> dict[str, Any]:
    weights = before["w"].copy()
    weights[list(rows)] += 1
    return {"w": weights, "step": step}


class Run:
    """A run with two tiers.

    Arguments:
        root, local: the folders.
        links: whether the root's storage has links.
    """

    def __init__(self, root: str, local: Path, links: bool) -> None:
        self.root, self.local, self.links = root, local, links

    def open(self, **arguments: Any) -> Checkpointer:
        return Checkpointer(
            self.root, local=self.local, **{"reuse": True, "options": OPTIONS, **arguments}
        )

    def path(self, step: int) -> str:
        return f"{self.root}/step_{step}"

    def check(self, step: int, expected: Any) -> None:
        """What the root holds is what was saved, and is the version that the local tier had."""
        report = unickpt.verify(self.path(step))
        assert report.ok, report.damage
        assert same(unickpt.load(self.path(step)), expected)

    def bases(self, step: int) -> list[str]:
        return [base.name for base in unickpt.open(self.path(step)).index.bases]

    def sent(self, step: int) -> int:
        """The bytes of a step in the root that no other step has."""
        if not self.links:
            location = paths.resolve(self.path(step))
            store = location.store(paths.context())
            return sum(
                len(store.read(key.decode()).result().value) for key in store.list().result()
            )
        return sum(
            os.path.getsize(path)
            for path in (Path(self.path(step)) / name for name in files(Path(self.path(step))))
            if os.stat(path).st_nlink == 1 or step == 0
        )


@pytest.fixture(params=["links", "no links", "memory"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    local = tmp_path / "local"
    if request.param == "links":
        yield Run(str(tmp_path / "root"), local, True)
        return
    with pytest.MonkeyPatch.context() as patch:
        root = f"memory://{secrets.token_hex(6)}"
        if request.param == "no links":
            root = str(tmp_path / "root")
            real = os.link
            patch.setattr(
                os, "link", lambda a, b: refuse() if str(b).startswith(root) else real(a, b)
            )
        elif request.param == "s3":
            endpoint, bucket = request.getfixturevalue("moto"), f"tiers-{secrets.token_hex(4)}"
            s3_server.use(endpoint, patch)
            s3_server.make_bucket(endpoint, bucket)
            root = f"s3://{bucket}/run"
        yield Run(root, local, False)


@pytest.mark.parametrize("run", ["links", "no links", "memory", "s3"], indirect=True)
def test_only_what_changed_is_sent(run: Run) -> None:
    now = state()
    with run.open() as steps:
        for step in range(4):
            now = changed(now, step, *range(step * 2))
            steps.save(step, now)
            steps.wait()
            assert run.bases(step) == ([] if step == 0 or run.links else ["step_0"])
            run.check(step, now)
            assert unickpt.open(run.path(step)).index.reused == (
                now["w"].nbytes - 2 * CHUNK * step
            ) * (step > 0)
            if step:
                assert run.sent(step) < 2 * step * CHUNK + 12_000
            there, here = StepFolder(run.root).version(step), StepFolder(run.local).version(step)
            assert there is not None
            assert here is not None
            assert there.name == here.name
        assert steps.steps() == [0, 1, 2, 3]
    shutil.rmtree(run.local)
    run.check(3, now)
    if not run.links:
        unickpt.copy(run.path(3), run.local / "whole")
        paths.resolve(run.path(0)).remove(paths.context())
        assert same(unickpt.load(run.local / "whole"), now)


def test_equal_chunks_in_other_files_are_not_taken_for_shared_ones(run: Run) -> None:
    """A chunk that changed, and changed back, has its old digest, but is in a file of its own."""
    now = state()
    with run.open() as steps:
        for step, rows in enumerate([[], [3], [], []]):
            expected = changed(now, step, *rows)
            steps.save(step, expected)
            steps.wait()
            run.check(step, expected)
    index = unickpt.open(run.path(3)).index
    assert index.borrowed == (0 if run.links else ROWS - 1)


def test_requests_and_bytes_of_a_step_of_which_one_percent_changed(
    moto: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3_server.use(moto, monkeypatch)
    s3_server.make_bucket(moto, "percent")
    run, now = Run("s3://percent/run", tmp_path / "local", False), state()
    put, got = list[int](), list[int]()
    with run.open() as steps:
        for step in range(2):
            now = changed(now, step, 5)  # of 96
            with s3_server.requests() as seen:
                steps.save(step, now)
                steps.wait()
            put.append(sum(request.nbytes for request in seen if request.method == "PUT"))
            reads = [r for r in seen if r.method == "GET" and "/d/" in r.key]
            assert all(read.range_bytes is not None for read in reads)
            got.append(sum(read.range_bytes or 0 for read in reads))
    assert put[0] > now["w"].nbytes
    assert put[1] < 0.035 * now["w"].nbytes, put
    assert got[0] >= now["w"].nbytes
    assert 0 < got[1] < 0.035 * now["w"].nbytes, f"{got}: chunks that were not sent are not read"
    run.check(1, now)


def test_retention_in_the_root_keeps_a_base_as_long_as_it_is_needed(run: Run) -> None:
    now = state()
    with run.open(keep_last=1) as steps:
        for step in range(8):
            now = changed(now, step, *range(step * 15, step * 15 + 15) if step < 6 else [])
            steps.save(step, now)
            steps.wait()
            there = StepFolder(run.root).committed()
            for kept in there:
                assert unickpt.verify(run.path(kept)).ok
            run.check(step, now)
            assert run.links or len(there) <= 2
            if step == 3 and not run.links:
                assert there == [0, 3]
                with pytest.raises(SaveConflict, match="has chunks of step_3"):
                    steps.delete(0)
                assert steps.steps() == [0, 3]
        # Of step 0, less than half was in use at step 4, which is whole.
        assert there == ([7] if run.links else [4, 7])
        steps.delete(7)
        assert steps.steps() == ([] if run.links else [4])


def test_a_run_goes_back_and_on(run: Run) -> None:
    states = {0: state()}
    with run.open() as steps:
        for step in range(4):
            states[step] = changed(states[max(0, step - 1)], step, step)
            steps.save(step, states[step])
        assert steps.drop_later_steps(1) == [2, 3]
        steps.load()
        for step in (2, 3):
            states[step] = changed(states[step - 1], step, 50 + step)
            steps.save(step, states[step])
        steps.wait()
        for step, expected in states.items():
            run.check(step, expected)
        assert steps.drop_later_steps(0) == [1, 2, 3]
        assert StepFolder(run.root).committed() == [0]
        steps.load()
        steps.save(1, states[1])
        steps.wait()
        run.check(1, states[1])
        steps.save(1, states[2], overwrite=True)
        steps.wait()
        run.check(1, states[2])
    assert run.bases(1) == [], "a step that replaces another one is sent whole"
    with run.open(reuse=False) as steps:
        steps.save(2, states[2])
        steps.wait()
    assert run.bases(2) == []
    run.check(2, states[2])


@pytest.mark.parametrize("reuse", [True, "compare"])
@pytest.mark.parametrize("what", ["is cut", "vanishes", "changes"])
def test_a_base_that_is_damaged(run: Run, what: str, reuse: Any) -> None:
    if not os.path.isabs(run.root):
        pytest.skip("objects are not damaged by hand")
    now = state()
    with run.open(reuse=reuse) as steps:
        steps.save(0, now)
        steps.wait()
        folder = Path(run.path(0))
        largest = max((folder / name for name in files(folder)), key=os.path.getsize)
        if what == "is cut":
            os.truncate(largest, 10_000)
        elif what == "vanishes":
            largest.unlink()
        else:
            damage(folder)
        steps.save(1, changed(now, 1, 9))
        steps.wait()
    report = unickpt.verify(run.path(1))
    # As with every other reuse of digests alone, damage is inherited; `verify` finds it.
    assert report.ok == (what != "changes" or reuse == "compare")
    if report.ok:
        shutil.rmtree(folder)
        run.check(1, changed(now, 1, 9))
    else:
        assert [found.array for found in report.damage] == ["w"]


def test_a_base_that_somebody_removes_meanwhile(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    now = state()
    real = held_files.held_by

    def vanishing(*arguments: Any) -> Any:
        found = real(*arguments)
        paths.resolve(run.path(0)).remove(paths.context())
        return found

    with run.open() as steps:
        steps.save(0, now)
        steps.wait()
        with monkeypatch.context() as patch:
            patch.setattr(held_files, "held_by", vanishing)
            steps.save(1, changed(now, 1, 9))
            steps.wait()
    assert StepFolder(run.root).committed() == [1]
    run.check(1, changed(now, 1, 9))
    assert run.bases(1) == []


def test_a_base_is_not_cleaned_up_while_it_is_chosen(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the choice of a base and the mark in it, nothing but its use protects it."""
    now = state()
    real, waits, goes_on = held_files.held_by, threading.Event(), threading.Event()

    def slow(*arguments: Any) -> Any:
        found = real(*arguments)
        waits.set()
        assert goes_on.wait(30)
        return found

    with run.open(keep=Retention(keep=lambda step: step == 3)) as steps:
        steps.save(0, now)
        steps.wait()
        with monkeypatch.context() as patch:
            patch.setattr(held_files, "held_by", slow)
            steps.save(1, changed(now, 1, 9))
            assert waits.wait(30)
            cleaning = steps._cleaning
            with monkeypatch.context() as inner:
                inner.setattr(steps._steps, "expendable", lambda *steps: [0])
                cleaning.clean()
            assert StepFolder(run.root).committed() == [0]
            goes_on.set()
            steps.wait()
        run.check(1, changed(now, 1, 9))


def test_a_version_that_others_borrow_from_is_not_replaced(run: Run) -> None:
    if run.links:
        pytest.skip("nothing is borrowed there")
    now = state()
    with run.open() as steps:
        for step in range(2):
            steps.save(step, changed(now, step, step))
        steps.wait()
        whole = StepFolder(run.root).version(0)
        other = StepFolder(run.local / "other")
        unickpt.save(other.path(0), now, options=OPTIONS)
        found = other.version(0)
        assert found is not None
        arguments = other, 0, found, whole, None, OPTIONS
        with pytest.raises(SaveConflict, match="has chunks of step_1; remove these"):
            tier_copies.copy_version(steps._steps.root, *arguments, sent_at_once)
    run.check(0, changed(now, 0, 0))
    run.check(1, changed(now, 1, 1))


@pytest.mark.parametrize("damaged", [0, 1])
def test_a_damaged_copy_is_made_again_and_its_borrowers_stay(run: Run, damaged: int) -> None:
    now = state()
    with run.open() as steps:
        for step in range(2):
            steps.save(step, changed(now, step, step))
            steps.wait()
            shutil.copytree(run.local / f"step_{step}", run.local / f"kept_{step}")
    store = paths.resolve(run.path(damaged)).store(paths.context())
    for key in map(bytes.decode, store.list().result()):
        if "/root/" in key:
            store.write(key, b"damaged").result()
    for step in range(2):  # as if the local tier had room for all
        shutil.rmtree(run.local / f"step_{step}", ignore_errors=True)
        os.rename(run.local / f"kept_{step}", run.local / f"step_{step}")
        for copied in (run.local / f"step_{step}").glob("processes/*/notes/copied"):
            copied.unlink()
    with run.open() as steps:
        steps.save(2, changed(now, 2, 2))
        steps.wait()
        for step in range(3):
            run.check(step, changed(now, step, step))


def test_steps_that_borrow_in_the_local_tier_are_whole_in_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    run, now = Run(str(tmp_path / "root"), tmp_path / "local", False), state()
    with run.open(keep_last=1) as steps:
        for step in range(3):
            steps.save(step, changed(now, step, step))
            steps.wait()
            assert steps.steps()[-1] == step
            run.check(step, changed(now, step, step))
            assert run.bases(step) == []
    assert StepFolder(run.root).committed() == [2]
    with run.open(keep_last=1) as steps:
        assert steps.steps() == [2]
        steps.save(3, now)


def test_both_tiers_have_one_version(run: Run) -> None:
    now = state()
    with run.open() as steps:
        for step in range(2):
            steps.save(step, changed(now, step, step))
    found = version.version_at(paths.resolve(run.path(1)))
    assert found is not None
    assert bool(found.copied) != run.links
    assert found.name == (found.copied or found.digest)
    with Checkpointer(run.root, options=OPTIONS) as other:  # without the local tier
        assert same(other.load(), changed(now, 1, 1))
        other.save(2, now, wait=True)
    with run.open() as steps:
        assert steps.steps() == [0, 1, 2]
        assert steps._steps.holders(1)[0] is steps._steps.local
        steps.save(3, changed(now, 3, 3))
    run.check(3, changed(now, 3, 3))


def test_what_an_interrupted_copy_leaves_is_known(run: Run) -> None:
    """`unickpt clean` removes only what looks in every part like the output of a save or a copy."""
    now = state()
    with run.open() as steps:
        for step in range(2):
            steps.save(step, changed(now, step, step))
            steps.wait()
    for folder in (run.root, str(run.local)):
        location = paths.resolve(f"{folder}/step_1")
        location.store(paths.context()).write("manifest.ocdbt", None).result()
        found = list(save_leftovers.search(paths.resolve(folder), paths.context()))
        assert [(each.name, each.kind) for each in found if each.kind != save_leftovers.LOCK] == [
            ("step_1", save_leftovers.UNFINISHED)
        ]


# --- crashes --------------------------------------------------------------------------------------

JOB = f"""
import os, sys
sys.path[:0] = [{TESTS!r}, {os.path.dirname(__file__)!r}]
import unickpt
from support.dying import die_at
from unickpt.runs import tier_copies
from support.run_folders import refuse
from test_tiers_reuse import OPTIONS, changed, state

root, local, links, step, when = sys.argv[1:]
link = os.link
if not int(links):
    os.link = lambda a, b: refuse() if str(b).startswith(root) else link(a, b)
with unickpt.Checkpointer(root, local=local, reuse=True, options=OPTIONS) as steps:
    steps.save(0, state())
    steps.wait()
    copy_from = tier_copies.copy_version
    tier_copies.copy_version = lambda *arguments: (die_at(step, when), copy_from(*arguments))[1]
    steps.save(1, changed(state(), 1, 1))
"""
MOMENTS = [
    ("tools.copying.VersionCopy:_link", "after"),
    ("tools.copying:_copy_values", "during"),
    ("tools.copying:copy_files", "after"),
    ("tools.copying.VersionCopy:_manifest", "after"),
    ("tools.copying:check_copy", "after"),
    ("commit.borrowers:mark", "after"),
    ("commit.root.Root:replace", "before"),
    ("commit.root.Root:replace", "after"),
]


@pytest.mark.parametrize("run", ["links", "no links"], indirect=True)
def test_a_job_killed_while_it_copies_what_is_new(
    run: Run, processes: Processes, tmp_path: Path
) -> None:
    now, place = state(), Path(run.root)
    runs = [Run(f"{place}/{n}", tmp_path / f"local{n}", run.links) for n in range(len(MOMENTS))]
    jobs = [
        processes.forked(JOB, each.root, each.local, int(run.links), *moment)
        for each, moment in zip(runs, MOMENTS, strict=True)
    ]
    for each, job, moment in zip(runs, jobs, MOMENTS, strict=True):
        _, errors = job.communicate(timeout=100)
        assert job.returncode == -9, f"{moment}: {errors}"
        for step in StepFolder(each.root).committed():
            each.check(step, changed(now, step, *[1] * step))
        with each.open() as steps:
            assert steps.steps() == [0, 1]
            assert same(steps.load(), changed(now, 1, 1))
            steps.save(2, changed(now, 2, 2))
        for step, expected in enumerate([now, changed(now, 1, 1), changed(now, 2, 2)]):
            each.check(step, expected)
        assert each.bases(2) == ([] if run.links else ["step_0"]), moment
        for step in range(3):
            assert len(os.listdir(Path(each.path(step)) / "processes")) == 1, moment
