"""`unickpt prune`: an existing run is thinned by the rules of the Checkpointer."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.forks import Forks
from support.run_folders import refuse, run_folder
from support.saving import damage
from typer.testing import CliRunner, Result

import unickpt
from unickpt import Checkpointer, SaveOptions, StorageError
from unickpt.cli.app import app
from unickpt.reading import checkpoint
from unickpt.runs import tier_copies
from unickpt.runs.pruning import PruneRun
from unickpt.runs.retention import Retention
from unickpt.runs.step_folder import StepFolder
from unickpt.tools.terminal import output

FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)
FROZEN = np.random.default_rng(1).random(20_000)


def state(step: int) -> dict[str, Any]:
    return {"frozen": FROZEN, "dense": np.full(50, step), "step": step}


def save(root: object, *steps: int, **arguments: Any) -> None:
    with Checkpointer(str(root), options=FAST, **arguments) as run:
        for step in steps:
            metrics = {"loss": float((step - 4) ** 2), "accuracy": step / 100}
            run.save(step, state(step), metrics=metrics, wait=True)
            run.wait()


def call(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["prune", *map(str, arguments)])


def steps_of(root: object) -> list[int]:
    return StepFolder(str(root)).committed()


def check(root: object, *steps: int) -> None:
    """The run has these steps, which are whole."""
    assert steps_of(root) == list(steps)
    for step in steps:
        assert unickpt.verify(f"{root}/step_{step}").ok
        loaded = unickpt.load(f"{root}/step_{step}")
        assert loaded["step"] == step
        assert loaded["frozen"].tobytes() == FROZEN.tobytes()


@pytest.fixture(params=["file", "memory", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with run_folder(request, tmp_path) as folder:
        yield folder


# --- rules ---------------------------------------------------------------------------------------


def test_a_run_is_thinned_and_says_why_each_step_stays(root: str) -> None:
    save(root, *range(1, 11))
    rules = ["--keep-last", 2, "--keep-every", 5, "--keep-best", 1, "--metric", "loss"]
    done = call(root, *rules, "--dry-run")
    assert done.exit_code == 0, done.output
    lines = [" ".join(line.split()) for line in done.output.splitlines()]
    assert "4 stays keep_best=1 by loss" in lines
    assert "5 stays keep_every=5" in lines
    assert "6 goes" in lines
    assert "10 stays the newest, keep_last=2, keep_every=5" in lines
    assert steps_of(root) == list(range(1, 11)), "a dry run removes nothing"
    done = call(root, *rules, "--yes")
    assert done.exit_code == 0, done.output
    assert "removed 6 steps: 1, 2, 3, 6, 7, 8" in done.output
    check(root, 4, 5, 9, 10)
    done = call(root, *rules, "--yes")
    assert done.exit_code == 0
    assert "nothing to remove" in done.output


def test_it_keeps_what_a_checkpointer_with_these_rules_keeps(tmp_path: Path) -> None:
    rules: list[dict[str, Any]] = [
        {"keep_last": 3},
        {"keep_every": 3},
        {"keep_last": 2, "keep_every": 4},
        {"keep_best": 2, "metric": "accuracy", "best": "max"},
        {"keep_best": 2, "metric": "loss", "keep_last": 1},
    ]
    for number, rule in enumerate(rules):
        save(tmp_path / f"a{number}", *range(1, 9), **rule)
        save(tmp_path / f"b{number}", *range(1, 9))
        flags = [part for name, value in rule.items()
                 for part in (f"--{name.replace('_', '-')}", value)]  # fmt: skip
        assert call(tmp_path / f"b{number}", *flags, "--yes").exit_code == 0
        assert steps_of(tmp_path / f"b{number}") == steps_of(tmp_path / f"a{number}"), rule


def test_rules_that_make_no_sense(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for flags, message in [
        ([], "(--keep-last 3 on the command line)"),
        (["--keep-last", "0"], "keep_last=0 must be an integer, at least 1"),
        (["--keep-best", "2"], "give both keep_best and metric"),
        (["--keep-best", "2", "--metric", "los"], "has metric='los', .*they have accuracy, loss"),
    ]:
        done = call(tmp_path, *flags, "--yes")
        assert done.exit_code == 2
        assert re.search(message, done.output), done.output
    assert steps_of(tmp_path) == [1, 2, 3]
    done = call(tmp_path / "step_1", "--keep-last", 1, "--yes")
    assert done.exit_code == 2
    assert "is a checkpoint, not a folder of steps" in done.output
    done = call(tmp_path / "none", "--keep-last", 1, "--yes")
    assert done.exit_code == 2
    assert "no step is committed in" in done.output


def test_a_step_whose_metrics_cannot_be_read_now_is_not_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 3, 4, 5, 6)
    real = checkpoint.open

    def fail(path: Any, *arguments: Any, **named: Any) -> Any:
        if str(path).endswith("step_4"):
            raise StorageError("the network is down")
        return real(path, *arguments, **named)

    flags = ["--keep-best", 1, "--metric", "loss", "--yes"]
    with monkeypatch.context() as patch:
        patch.setattr("unickpt.reading.checkpoint.open", fail)
        done = call(tmp_path, *flags)
        assert done.exit_code == 2
        assert "the network is down" in done.output
        with Checkpointer(tmp_path, keep_best=1, metric="loss", options=FAST) as run:
            run.save(7, state(7), metrics={"loss": 9.0})
    assert steps_of(tmp_path) == [3, 4, 5, 6, 7]
    assert call(tmp_path, *flags).exit_code == 0
    assert steps_of(tmp_path) == [4, 7]


# --- asking, and other jobs ----------------------------------------------------------------------


def test_a_person_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2, 3)
    done = call(tmp_path, "--keep-last", 1)
    assert done.exit_code == 1
    assert "nothing was removed: no terminal to ask on; pass --yes" in done.output
    monkeypatch.setattr(output, "is_interactive", lambda: True)
    for answer, steps in (("n", [1, 2, 3]), ("y", [3])):
        done = CliRunner().invoke(app, ["prune", str(tmp_path), "--keep-last", "1"], input=answer)
        assert done.exit_code == (answer == "n")
        assert "Remove 2 steps?" in done.output
        assert steps_of(tmp_path) == steps


def test_only_what_was_shown_is_removed(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    run = PruneRun(tmp_path, Retention(keep_last=1))
    plan = run.plan()
    save(tmp_path, 4, 5)
    assert run.remove(plan) == [1, 2]
    assert steps_of(tmp_path) == [3, 4, 5]


def test_a_step_that_was_replaced_after_the_plan_is_rated_by_its_new_metrics(
    tmp_path: Path,
) -> None:
    root, other = tmp_path / "run", tmp_path / "other"
    save(root, 1, 2, 3)
    run = PruneRun(root, Retention(keep_best=1, metric="loss"))
    plan = run.plan()
    assert plan.removed == [1, 2]
    with Checkpointer(other, options=FAST) as job:
        job.save(1, state(1), metrics={"loss": 0.0})
    shutil.rmtree(root / "step_1")
    shutil.copytree(other / "step_1", root / "step_1")
    assert run.remove(plan) == [2]
    assert steps_of(root) == [1, 3]


def test_not_while_a_job_saves_there(root: str) -> None:
    with Checkpointer(root, options=FAST) as run:
        for step in (1, 2, 3):
            run.save(step, state(step), wait=True)
        done = call(root, "--keep-last", 1, "--yes")
        assert done.exit_code == 2
        assert "a job saves here now" in done.output
        done = call(root, "--keep-last", 1, "--dry-run")
        assert done.exit_code == 0
        assert run.steps() == [1, 2, 3]
    assert call(root, "--keep-last", 1, "--yes").exit_code == 0
    check(root, 3)
    save(root, 4)  # the lease was given back


def test_json_for_programs(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    for flag in ("--dry-run", "--yes"):
        done = call(tmp_path, "--keep-last", 1, "--json", flag)
        assert json.loads(done.output) == {
            "root": str(tmp_path),
            "removed": [1, 2],
            "kept": [{"step": 3, "reasons": ["the newest", "keep_last=1"]}],
            "failed": [],
        }
    assert steps_of(tmp_path) == [3]


# --- steps that others need ----------------------------------------------------------------------


def test_a_base_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, 1, 2, 3, reuse=True)
    base = SaveOptions(fsync=False, chunk_bytes=4096, base=tmp_path / "step_2")
    unickpt.save(tmp_path / "best", state(2), options=base)
    done = call(tmp_path, "--keep-last", 1, "--yes")
    assert done.exit_code == 0, done.output
    assert "1 stays best, step_3 borrow from it" in " ".join(done.output.split())
    check(tmp_path, 1, 3)
    assert unickpt.verify(tmp_path / "best").ok


@pytest.mark.plugins
def test_steps_of_a_run_with_experts_are_retired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)

    def experts(step: int) -> dict[str, Any]:
        return {"experts": {str(x): np.full(3000, step * 10 + x, "f4") for x in range(4)}}

    rule = unickpt.Experts({"experts/{x}": 1})
    with Checkpointer(tmp_path, experts=rule, options=FAST) as run:
        for step in range(10):
            run.save(step, experts(step), wait=True)
    expected = unickpt.load(tmp_path / "step_9")["experts"]
    done = call(tmp_path, "--keep-last", 1, "--yes")
    assert done.exit_code == 0, done.output
    assert "8 goes but for what step_9 borrow" in " ".join(done.output.split())
    assert steps_of(tmp_path) == [9]
    names = [name for name in os.listdir(tmp_path) if name.startswith("step_")]
    assert sorted(names) == ["step_6", "step_7", "step_8", "step_9"]
    assert unickpt.verify(tmp_path / "step_9").ok
    found = unickpt.load(tmp_path / "step_9")["experts"]
    assert all(np.array_equal(found[x], expected[x]) for x in expected)


def test_both_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, local = tmp_path / "root", tmp_path / "local"
    save(root, 1, 2, 3, local=local)
    with monkeypatch.context() as patch:
        patch.setattr(tier_copies, "copy_version", refuse)
        run = Checkpointer(root, local=local, options=FAST)
        for step in (4, 5, 6):
            run.save(step, state(step)).result()
            with pytest.raises(PermissionError):
                run.wait()
        run.close()
    done = call(root, "--local", local, "--keep-last", 1, "--yes")
    assert done.exit_code == 0, done.output
    assert "3 stays the newest in the root" in " ".join(done.output.split())
    assert steps_of(root) == [3]
    assert steps_of(local)[-1] == 6
    with Checkpointer(root, local=local, options=FAST) as run:
        assert run.latest() == 6
        assert run.load()["step"] == 6
        run.save(7, state(7))
    check(root, 3, 6, 7)


def test_roles(tmp_path: Path) -> None:
    roots = [tmp_path / "actor", tmp_path / "critic"]
    roles = [part for root in roots for part in ("--roles", root)]
    for root, steps in zip(roots, ((1, 2, 3, 4), (1, 2, 3)), strict=True):
        save(root, *steps)
    done = call(roots[0], *roles, "--keep-last", 2, "--yes")
    assert done.exit_code == 0, done.output
    assert "4 stays another role may be saving it" in " ".join(done.output.split())
    assert steps_of(roots[0]) == [2, 3, 4]
    assert call(roots[1], *roles, "--keep-last", 2, "--yes").exit_code == 0
    assert steps_of(roots[1]) == [2, 3]


# --- failures ------------------------------------------------------------------------------------


def test_a_damaged_step_is_removed_like_others(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    damage(tmp_path / "step_1")
    assert call(tmp_path, "--keep-last", 1, "--yes").exit_code == 0
    check(tmp_path, 3)


def test_a_step_that_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, 2, 3)
    real = StepFolder.remove

    def remove(folder: StepFolder, step: int) -> None:
        if step == 1:
            raise StorageError("step 1 is stuck")
        real(folder, step)

    monkeypatch.setattr(StepFolder, "remove", remove)
    done = call(tmp_path, "--keep-last", 1, "--yes")
    assert done.exit_code == 2
    assert "1 step could not be removed: 1" in done.output
    check(tmp_path, 1, 3)


DYING = f"""
import os, sys
sys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]
from support.dying import die_at
from support.run_folders import refuse
from test_cli_prune import call

root, step, when = ARGS
os.link = refuse
die_at(step, when)
call(root, "--keep-last", 1, "--yes")
"""


@pytest.mark.parametrize(
    ("step", "when"),
    [
        ("runs.attempt_folders:remove_checkpoint", "before"),
        ("runs.attempt_folders:remove_checkpoint", "during"),
        ("runs.attempt_folders:remove_checkpoint", "after"),
        ("runs.attempt_folders:_remove_data", "before"),
        ("runs.attempt_folders:_remove_data", "after"),
    ],
)
def test_killed_in_the_middle(
    step: str, when: str, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", refuse)
    save(tmp_path, *range(1, 7), reuse=True)
    (ended,) = forks.wait_all([forks.start(DYING, str(tmp_path), step, when)])
    assert ended.code == -9, ended.out
    there = steps_of(tmp_path)
    assert {1, 6} <= set(there), "step 1 is the base of step 6"
    check(tmp_path, *there)
    assert call(tmp_path, "--keep-last", 1, "--yes").exit_code == 0
    check(tmp_path, 1, 6)
    with Checkpointer(tmp_path, options=FAST) as run:
        assert run.load()["step"] == 6
        run.save(7, state(7))
    names = sorted(name for name in os.listdir(tmp_path) if name.startswith("step_"))
    assert names == ["step_1", "step_6", "step_7"], "no remains are left"
