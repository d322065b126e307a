"""Saves of some experts at a time into storage without links: from the steps that wrote them."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.forks import Forks
from support.run_folders import run_folder
from support.saving import in_job, same

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions, StorageError
from unickpt.format.ocdbt_reader import OcdbtReader
from unickpt.format.reader_protocol import Request
from unickpt.runs.step_folder import StepFolder
from unickpt.saving.task import SaveTask
from unickpt.storage import paths

OPTIONS = SaveOptions(chunk_bytes=4096, fsync=False, timeout_s=20)
EXPERTS = 8
KEY, STACKED = "experts/{x}/**", "moe/up"
PARTIAL: dict[str, Any] = {KEY: 1, STACKED: (0, 1)}


@pytest.fixture(params=["memory", "s3", "no links"])
def run(request: pytest.FixtureRequest, tmp_path: Any) -> Iterator[str]:
    with run_folder(request, tmp_path) as folder:
        yield folder


def state(step: int) -> dict[str, Any]:
    def numbers(*shape: int) -> Any:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + step * 1e6

    experts = {str(x): {"up": numbers(30, 40) + x, "b": numbers(3) + x} for x in range(EXPERTS)}
    return {"dense": numbers(40, 30), "experts": experts, "moe": {"up": numbers(EXPERTS, 30, 20)}}


def steps_of(path: str) -> dict[str, dict[int, int]]:
    """The step of each expert of each key, as the checkpoint names it."""
    steps = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
    return {key: {int(x): n for x, n in found.items()} for key, found in steps.items()}


def check(path: str, step: int) -> dict[str, dict[int, int]]:
    """Each expert is as in the step that the checkpoint names, all else as in its own step."""
    of = steps_of(path)
    expected = state(step)
    expected["experts"] = {str(x): state(n)["experts"][str(x)] for x, n in of[KEY].items()}
    expected["moe"]["up"] = np.stack(
        [state(of[STACKED][x])["moe"]["up"][x] for x in range(EXPERTS)]
    )
    found = unickpt.load(path)
    assert same({"dense": found["dense"]}, {"dense": expected["dense"]})
    assert same(found["moe"], expected["moe"])
    for x, expert in expected["experts"].items():
        assert same(found["experts"][x], expert), x
    report = unickpt.verify(path)
    assert report.ok, report.damage
    return of


@pytest.mark.parametrize(
    "run", ["memory", pytest.param("s3", marks=pytest.mark.slow), "no links"], indirect=True
)
def test_experts_are_borrowed_from_the_steps_that_wrote_them(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[str]()
    real = OcdbtReader.read

    def listed(reader: OcdbtReader, requests: Sequence[Request]) -> Sequence[int]:
        read.extend(request.entry.name for request in requests)
        return real(reader, requests)

    monkeypatch.setattr(OcdbtReader, "read", listed)
    with Checkpointer(run, experts=Experts(PARTIAL), keep_last=1, options=OPTIONS) as steps:
        written = list[list[int]]()
        for step in range(12):
            read.clear()
            report = steps.save(step, state(step)).result()
            assert not read, "nothing is copied"
            steps.wait()
            path = f"{run}/step_{step}"
            # A whole look takes hundreds of requests.
            of = (
                steps_of(path)
                if run.startswith("s3") and step not in (1, 11)
                else check(path, step)
            )
            assert of[STACKED] == of[KEY]
            written.append([x for x, n in of[KEY].items() if n == step])
            bases = {base.name for base in unickpt.open(path).index.bases}
            assert bases == {f"step_{n}" for n in of[KEY].values() if n != step}
            assert report.written_bytes + report.reused_bytes == report.bytes
            nbytes = 40 * 30 * 8 + len(written[-1]) * (30 * 40 + 3 + 30 * 20) * 8
            assert report.written_bytes == nbytes
        assert written == [[*range(8)], *[[(step - 1) % 8] for step in range(1, 12)]]
        assert steps.steps() == [11]
    folders = [f"step_{step}" for step in range(4, 12)]
    left = paths.resolve(run).folders(paths.context())
    assert sorted(left) == sorted(folders), "those that have experts of the newest step"
    with Checkpointer(run, keep_last=1, experts=Experts(PARTIAL), options=OPTIONS) as steps:
        assert steps.load()["dense"][0, 0] == 11e6
        steps.save(12, state(12), wait=True)
        check(f"{run}/step_12", 12)
        steps.wait()
        check(f"{run}/step_12", 12)
        steps.delete(12)
        steps.save(5, state(5), wait=True)  # of another run, where there is still something
        check(f"{run}/step_5", 5)
    with Checkpointer(run, keep_last=1, experts=Experts(PARTIAL), options=OPTIONS) as steps:
        steps.save(6, state(6), wait=True)
        steps.wait()
        check(f"{run}/step_6", 6)
    left = paths.resolve(run).folders(paths.context())
    assert sorted(left) == ["step_6"], "nobody needs the others any more"


def test_experts_of_too_many_steps_are_written_anew() -> None:
    """A reader opens all of them."""
    run = f"memory://{secrets.token_hex(6)}"
    with Checkpointer(run, experts=Experts({"{x}": 1}), keep_last=1, options=OPTIONS) as steps:
        written = []
        for step in range(36):
            tree = {str(x): np.full(1000, step * 100.0 + x) for x in range(20)}
            written.append(steps.save(step, tree).result().written_bytes // 8000)
            of = unickpt.open(f"{run}/step_{step}").metadata["unickpt"]["experts"]["steps"]["{x}"]
            found = unickpt.load(f"{run}/step_{step}")
            assert all((found[x] == n * 100 + int(x)).all() for x, n in of.items())
            assert len(unickpt.open(f"{run}/step_{step}").index.bases) < 16
    assert written == [20, *[1] * 15, 20, *[1] * 15, 20, 1, 1, 1]


def test_a_run_goes_on_and_back(run: str) -> None:
    for first in (0, 3):
        with Checkpointer(run, experts=Experts(PARTIAL), options=OPTIONS) as steps:
            if first:
                steps.load()
            for step in range(first, first + 3):
                steps.save(step, state(step), wait=True)
    assert [check(f"{run}/step_{step}", step)[KEY][0] for step in range(6)] == [0, 1, 1, 1, 1, 1]
    with Checkpointer(run, experts=Experts(PARTIAL), options=OPTIONS) as steps:
        steps.load(step=2)
        steps.drop_later_steps()
        steps.save(3, state(30), wait=True)
    of = unickpt.open(f"{run}/step_3").metadata["unickpt"]["experts"]["steps"][KEY]
    assert [int(x) for x, n in of.items() if n == 3] == [2]
    found = unickpt.load(f"{run}/step_3")["experts"]
    for x, n in of.items():
        assert same(found[x], state(30 if n == 3 else n)["experts"][x])


def test_a_base_that_is_gone_stops_the_save_and_the_next_one_is_whole(
    run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(run, experts=Experts(PARTIAL), options=OPTIONS) as steps:
        for step in range(2):
            steps.save(step, state(step), wait=True)
        real = SaveTask._publish

        def publish(*arguments: Any) -> None:  # what it borrows was taken
            paths.resolve(f"{run}/step_0").remove(paths.context())
            real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(SaveTask, "_publish", publish)
            with pytest.raises(StorageError, match="step_0, which is missing"):
                steps.save(2, state(2), wait=True)
        assert StepFolder(run).committed() == [1]
        steps.save(3, state(3), wait=True)
        assert set(check(f"{run}/step_3", 3)[KEY].values()) == {3}


def test_several_processes_borrow_alike(run: str) -> None:
    def work(group: unickpt.ProcessGroup) -> None:
        made = SaveOptions(chunk_bytes=4096, fsync=False, group=group, timeout_s=20)
        with Checkpointer(run, experts=Experts(PARTIAL), options=made) as steps:
            for step in range(4):
                steps.save(step, state(step), wait=True)

    assert in_job(2, work) == [None, None]
    for step in range(4):
        of = check(f"{run}/step_{step}", step)
        assert sum(n == step for n in of[KEY].values()) == (1 if step else EXPERTS)


def test_copies_of_partial_steps_send_what_is_new(tmp_path: Any) -> None:
    root = f"memory://{secrets.token_hex(6)}"
    bases = list[list[str]]()
    with Checkpointer(root, local=tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as steps:
        for step in range(6):
            steps.save(step, state(step))
            steps.wait()
            of = check(f"{root}/step_{step}", step)
            assert sum(n == step for n in of[KEY].values()) == (1 if step else EXPERTS)
            bases.append([base.name for base in unickpt.open(f"{root}/step_{step}").index.bases])
    assert bases == [[], *[["step_0"]] * 3, [], ["step_4"]]


# --- processes that die ---------------------------------------------------------------------------

DYING = f"""
import os, sys
sys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]
import unickpt
from support.dying import die_at
from support.run_folders import refuse
from test_experts_borrowed import OPTIONS, PARTIAL, state

root, first, many, step, when = ARGS
os.link = refuse
with unickpt.Checkpointer(
    root, experts=unickpt.Experts(PARTIAL), keep_last=1, options=OPTIONS
) as run:
    if first:
        run.load()
    for number in range(first, first + many):
        if number == 3:
            die_at(step, when)
        run.save(number, state(number), wait=True)
        run.wait()
"""


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("format.borrowed:retire", "before"),
        ("format.borrowed:retire", "during"),
        ("format.borrowed:retire", "after"),
        ("runs.attempt_folders:remove_retired", "before"),
        ("runs.attempt_folders:remove_retired", "during"),
        ("runs.attempt_folders:remove_retired", "after"),
    ],
)
def test_killed_while_a_step_is_retired(step: str, when: str, forks: Forks, tmp_path: Path) -> None:
    root = str(tmp_path / "run")
    many = 12  # the experts of step 0 have all had their turn
    (ended,) = forks.wait_all([forks.start(DYING, root, 0, many, step, when)])
    assert ended.code == -9, ended.out
    run = Checkpointer(root)
    newest = run.latest()
    assert newest is not None
    for each in run.steps():
        check(run.path(each), each)
    run.close()
    (ended,) = forks.wait_all([forks.start(DYING, root, newest + 1, 10, "", "")])
    assert ended.code == 0, ended.out
    check(f"{root}/step_{newest + 10}", newest + 10)
    names = sorted(os.listdir(root))
    assert [n for n in names if n.startswith("step_")] == sorted(
        f"step_{n}" for n in range(newest + 3, newest + 11)
    ), "nothing else is left"
