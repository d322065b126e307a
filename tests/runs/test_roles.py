"""Roles of one job that save by themselves: which steps count, what is kept, and what goes on."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.saving import damage, in_agreeing_job, numbers, same
from support.strategies import examples

import unickpt
from unickpt import (
    CheckpointCorrupt,
    Checkpointer,
    CheckpointNotFound,
    SaveConflict,
    SaveEvery,
    SaveOptions,
    StorageError,
)
from unickpt.errors import LaterStepsExist
from unickpt.runs import roles as roles_module
from unickpt.runs.step_folder import StepFolder

FAST = SaveOptions(fsync=False, timeout_s=20, chunk_bytes=4096)


def of(run: Path, role: str, among: Sequence[str] = ("actor", "critic"), **more: Any) -> Any:
    folders = [run / each for each in among]
    return Checkpointer(run / role, roles=folders, **{"options": FAST, **more})


def there(run: Path, role: str) -> list[int]:
    return StepFolder(run / role).committed()


def save(checkpointer: Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, numbers(step), wait=True)
        checkpointer.wait()


# --- which steps count ----------------------------------------------------------------------------


def test_a_step_counts_once_all_roles_have_it(tmp_path: Path) -> None:
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        assert actor.latest() is critic.latest() is None
        save(actor, 10, 20)
        assert actor.steps() == critic.steps() == []
        save(critic, 10)
        assert actor.steps() == critic.steps() == [10]
        save(critic, 20)
        assert actor.latest() == critic.latest() == 20
        save(critic, 30)
        for role in (actor, critic):
            assert same(role.load(), numbers(20))
            assert role.loaded_step == 20
        with pytest.raises(CheckpointNotFound) as caught:
            critic.load(step=30)
    message = str(caught.value)
    assert "step 30 is not in all of " in message
    assert str(tmp_path / "actor") in message
    assert message.endswith(": 10, 20")
    assert same(unickpt.load(tmp_path / "critic/step_30"), numbers(30))


def test_three_roles(tmp_path: Path) -> None:
    among = ("actor", "critic", "reward")
    with (
        of(tmp_path, "actor", among) as actor,
        of(tmp_path, "critic", among) as critic,
        of(tmp_path, "reward", among[::-1]) as reward,
    ):
        save(actor, 1, 2, 3)
        save(critic, 1, 3)
        save(reward, 1, 2)
        assert actor.steps() == critic.steps() == reward.steps() == [1]
        save(reward, 3)
        assert actor.steps() == critic.steps() == reward.steps() == [1, 3]


def test_a_role_alone_is_as_without_roles(tmp_path: Path) -> None:
    with of(tmp_path, "actor", ("actor",)) as actor:
        save(actor, 1, 2)
        assert actor.steps() == [1, 2]


# --- what is kept ---------------------------------------------------------------------------------


def test_what_all_have_is_kept_while_one_is_behind(tmp_path: Path) -> None:
    """By its own rule alone, the actor would keep step 40 only, which the critic lacks."""
    with of(tmp_path, "actor", keep_last=1) as actor, of(tmp_path, "critic", keep_last=1) as critic:
        for role in (actor, critic):
            save(role, 10)
        save(actor, 20, 30, 40)
        assert there(tmp_path, "actor") == [10, 20, 30, 40]
        save(critic, 20)
        assert there(tmp_path, "critic") == [20]
        save(critic, 30)
        save(actor, 50)
        assert there(tmp_path, "actor") == [30, 40, 50]
        save(critic, 40, 50)
        save(actor, 60)
        assert (there(tmp_path, "actor"), there(tmp_path, "critic")) == ([50, 60], [50])
        assert actor.steps() == [50]


def test_both_keep_the_same_steps_by_all_rules(tmp_path: Path) -> None:
    rules = {"keep_last": 2, "keep_every": 30, "keep_best": 1, "metric": "loss"}
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: 4.0, 50: 5.0, 60: 6.0, 70: 7.0, 80: 8.0}
    with of(tmp_path, "actor", **rules) as actor, of(tmp_path, "critic", **rules) as critic:
        for step, loss in losses.items():
            for role in (actor, critic):
                role.save(step, numbers(step), metrics={"loss": loss}, wait=True).result()
                role.wait()
        actor.save(90, numbers(90), metrics={"loss": 9.0}, wait=True)
        actor.wait()
    expected = [20, 30, 60, 70, 80]
    assert there(tmp_path, "critic") == expected
    assert there(tmp_path, "actor") == [*expected, 90]


def test_a_step_that_one_role_could_not_save_is_removed_once_a_later_one_counts(
    tmp_path: Path,
) -> None:
    with of(tmp_path, "actor", keep_last=3) as actor, of(tmp_path, "critic", keep_last=3) as critic:
        save(actor, 10, 20)
        save(critic, 10)
        with pytest.raises(unickpt.UnsupportedLeaf):
            critic.save(20, {"bad": object()})
        assert there(tmp_path, "actor") == [10, 20]
        save(critic, 30)
        save(actor, 30)
        assert actor.steps() == [10, 30]
        assert there(tmp_path, "actor") == [10, 30]


def test_without_rules_nothing_is_removed(tmp_path: Path) -> None:
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        save(actor, 10, 20, 30)
        save(critic, 10, 30)
        save(actor, 40)
    assert there(tmp_path, "actor") == [10, 20, 30, 40]


# --- after a job that died ------------------------------------------------------------------------


def torn(run: Path) -> None:
    """Both roles have step 10; then the job died, when the actor alone had step 20."""
    with of(run, "actor") as actor, of(run, "critic") as critic:
        save(actor, 10, 20)
        save(critic, 10)


def test_a_restarted_job_goes_on_from_the_newest_step_of_all(tmp_path: Path) -> None:
    torn(tmp_path)
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        for role in (actor, critic):
            assert same(role.load(), numbers(10))
        assert there(tmp_path, "actor") == [10, 20], "a load removes nothing"
        actor.save(20, numbers(21), wait=True)
        critic.save(20, numbers(22), wait=True)
        assert actor.steps() == critic.steps() == [10, 20]
        assert same(actor.load(), numbers(21))
        assert same(critic.load(), numbers(22))


def test_a_role_that_starts_late_does_not_count_what_it_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The critic has saved step 20 again before the actor has started, whose step 20 is older."""
    torn(tmp_path)
    with of(tmp_path, "critic", keep_last=1) as critic:
        with caplog.at_level(logging.WARNING, "unickpt"):
            critic.load()
            critic.save(20, numbers(22), wait=True)
            critic.wait()
        assert critic.steps() == [10], "the actor's step 20 is of the job that died"
        assert there(tmp_path, "critic") == [10, 20], "step 10 is all there is"
        with of(tmp_path, "actor", keep_last=1) as actor:
            assert actor.steps() == [10]
            assert same(actor.load(), numbers(10))
            actor.save(20, numbers(21), wait=True)
            # Nothing tells the actor that the critic's new step 20 is of a job that still runs.
            assert actor.steps() == critic.steps() == [10]
            save(actor, 30)
            save(critic, 30)
            assert actor.steps() == critic.steps() == [30]
            actor.wait()
    assert there(tmp_path, "critic") == [30]
    assert "removing nothing; 1 step of the others" in caplog.text


def test_a_step_of_a_role_that_went_on_alone_is_no_step_of_all(tmp_path: Path) -> None:
    """The critic is started again while the actor goes on."""
    with of(tmp_path, "actor", keep_last=2) as actor:
        with of(tmp_path, "critic", keep_last=2) as critic:
            save(actor, 10, 20)
            save(critic, 10)
        with of(tmp_path, "critic", keep_last=2) as critic:
            assert same(critic.load(), numbers(10))
            save(actor, 30)
            save(critic, 20, 30)
            assert actor.steps() == critic.steps() == [10, 30]


def test_what_was_set_apart_must_be_readable(tmp_path: Path) -> None:
    torn(tmp_path)
    with of(tmp_path, "critic") as critic:
        save(critic, 20)
    note = tmp_path / "critic" / roles_module.NAME
    note.write_bytes(note.read_bytes()[:-3])
    with pytest.raises(StorageError, match="which steps belong together"):
        of(tmp_path, "actor")


def test_going_back_in_all_roles(tmp_path: Path) -> None:
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        for role in (actor, critic):
            save(role, 10, 20, 30)
        for role in (actor, critic):
            role.load(step=10)
            with pytest.raises(LaterStepsExist, match=r"call drop_later_steps\(10\) in each role"):
                role.save(20, numbers(20), wait=True)
        assert actor.drop_later_steps() == [20, 30]
        actor.save(20, numbers(21), wait=True)
        assert actor.steps() == critic.steps() == [10], "the critic's step 20 is another one"
        assert critic.drop_later_steps() == [20, 30]
        critic.save(20, numbers(22), wait=True)
        assert actor.steps() == critic.steps() == [10], "the actor had saved its own before"
        for role in (actor, critic):
            save(role, 30)
        assert actor.steps() == critic.steps() == [10, 30]


def test_roles_of_several_processes_remove_alike(tmp_path: Path) -> None:
    torn(tmp_path)

    def work(group: Any) -> Any:
        with of(tmp_path, "actor", options=SaveOptions(group=group, fsync=False)) as actor:
            found = actor.load()
            actor.save(20, numbers(21), wait=True)
            return same(found, numbers(10)), actor.steps()

    assert in_agreeing_job(3, work) == [(True, [10])] * 3
    assert same(unickpt.load(tmp_path / "actor/step_20"), numbers(21))
    silent = SaveOptions(group=unickpt.ProcessGroup(0, 2, "s"))
    with (
        of(tmp_path, "actor", options=silent) as actor,
        pytest.raises(ValueError, match=r"ProcessGroup\(\.\.\., agree=\)"),
    ):
        actor.save(40, numbers(4))


@dataclass
class Role:
    """A role of the model below: what it has open, and of which course its state is."""

    name: str
    open: Any = None
    step: int = 0
    course: list[int] = field(default_factory=list)


actions = st.lists(
    st.sampled_from(["actor starts", "critic starts", "actor saves", "critic saves", "job dies"]),
    max_size=25,
)


@pytest.mark.integration
@examples(40)
@given(actions, st.sampled_from([None, 1, 2]))
def test_parts_of_one_step_are_always_of_one_course(work: list[str], keep_last: int | None) -> None:
    """However roles start, save and die: what counts was saved by the same jobs in both."""
    folder = Path(tempfile.mkdtemp())
    roles, job, newest = [Role("actor"), Role("critic")], 0, 0
    try:
        for action in [*work, "job dies"]:
            name, _, what = action.partition(" ")
            role = next((r for r in roles if r.name == name), None)
            if role is None:
                job += 1
                for each in roles:
                    if each.open is not None:
                        each.open.close()
                        each.open = None
            elif what == "starts" and role.open is None:
                role.open = of(folder, role.name, keep_last=keep_last)
                role.step, role.course = role.open.latest() or 0, [job]
                if role.step:
                    role.course = [*role.open.load()["course"].tolist(), job]
            elif what == "saves" and role.open is not None:
                role.step += 1
                tree = {"course": np.array(role.course)}
                role.open.save(role.step, tree, wait=True)
                role.open.wait()
            newest = check(folder, newest)
    finally:
        for role in roles:
            if role.open is not None:
                role.open.close()
        shutil.rmtree(folder)


def check(folder: Path, before: int) -> int:
    """The newest step of all, which is never an older one than before."""
    with of(folder, "actor") as actor, of(folder, "critic") as critic:
        assert actor.steps() == critic.steps()
        for step in actor.steps():
            parts = [unickpt.load(folder / role / f"step_{step}") for role in ("actor", "critic")]
            assert parts[0]["course"].tolist() == parts[1]["course"].tolist(), step
        newest = actor.latest() or 0
    assert newest >= before
    return newest


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"after": 10}, "after=10 cannot be combined with roles="),
        ({"local": "memory://tier"}, "local='memory://tier' cannot"),
        ({"save_every": SaveEvery(seconds=60)}, "save_every_s=60 cannot.*on all ranks of the job"),
        ({"save_every_s": 60}, "save_every_s=60 cannot"),
        ({"save_every": SaveEvery(steps=1, when_busy="skip")}, "when_busy='skip' cannot"),
        ({"preemption": True}, "preemption=True cannot"),
        ({"roles": ["run/critic"]}, "must have the folders of all roles, also this one's"),
        ({"roles": "run/critic"}, "must be a list of the folders of all roles"),
    ],
)
def test_what_each_role_would_decide_differently_is_refused(
    arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    folders = {"roles": [tmp_path / "actor", tmp_path / "critic"]}
    with pytest.raises(ValueError, match=words):
        Checkpointer(tmp_path / "actor", **{**folders, **arguments})


def test_a_role_does_not_fall_back_by_itself(tmp_path: Path) -> None:
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        for role in (actor, critic):
            save(role, 10, 20)
        damage(tmp_path / "actor" / "step_20")
        with pytest.raises(ValueError, match="load the same older step in all roles"):
            actor.load(fallback=True)
        with pytest.raises(CheckpointCorrupt, match="the next older step is 10"):
            actor.load()
        assert [same(role.load(step=10), numbers(10)) for role in (actor, critic)] == [True, True]


def test_roles_have_leases_of_their_own(tmp_path: Path) -> None:
    with of(tmp_path, "actor") as actor, of(tmp_path, "critic") as critic:
        save(actor, 10)
        save(critic, 10)
        with of(tmp_path, "actor") as other, pytest.raises(SaveConflict):
            save(other, 20)
