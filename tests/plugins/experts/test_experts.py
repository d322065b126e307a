"""Saves of some experts at a time, in one process."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.saving import same
from support.strategies import examples

import unickpt
from unickpt import Checkpointer, Experts, LoadMismatch, SaveOptions, StorageError, UnsupportedLeaf
from unickpt.plugins.experts.expert_choice import ExpertFacts

OPTIONS = SaveOptions(chunk_bytes=4096, fsync=False)
SMALL = {"chunk_bytes": 4096}
KEY = "**/experts/{x}/**"
PARTIAL = {KEY: 2, "**/moe/up": (0, 1)}
ROUTED, STACKED = 5, 3


def state_of(step: int, routed: int = ROUTED, stacked: int = STACKED) -> dict[str, Any]:
    """Arrays of which each element is of this step alone."""

    def numbers(*shape: int) -> Any:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + step * 1e6

    experts = {str(x): {"up": numbers(30, 40) + x, "b": numbers(3) + x} for x in range(routed)}
    moments = {str(x): {"up": numbers(30, 40) - x, "b": numbers(3) - x} for x in range(routed)}
    up = numbers(stacked, 100, 40)
    return {
        "dense": numbers(50, 50),
        "layers": {"0": {"experts": experts, "router": numbers(7)}, "1": {"moe": {"up": up}}},
        "opt": {"mu": {"0": {"experts": moments}, "1": {"moe": {"up": -up}}}, "count": step},
    }


def recorded(path: Path) -> dict[str, dict[int, int]]:
    """The step of each expert by key, as a checkpoint records it."""
    steps = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
    return {key: {int(x): step for x, step in of.items()} for key, of in steps.items()}


def flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    return {n: v for key, each in tree.items() for n, v in flat(each, f"{name}/{key}").items()}


def check(path: Path, states: Mapping[int, Any]) -> dict[str, dict[int, int]]:
    """Every expert is as in the step that the checkpoint names, and all else as in its own step."""
    steps = recorded(path)
    found, own = flat(unickpt.load(path)), int(path.name.removeprefix("step_"))
    expected = flat(states[own])
    for name in expected:
        for x, of in steps.get(KEY, {}).items():
            if f"/experts/{x}/" in name:
                expected[name] = flat(states[of])[name]
        if name.endswith("moe/up"):
            rows = [flat(states[of])[name][x] for x, of in sorted(steps["**/moe/up"].items())]
            expected[name] = np.stack(rows)
    assert same(found, expected)
    report = unickpt.verify(path)
    assert report.ok, report.damage
    return steps


def test_experts_take_turns(tmp_path: Path) -> None:
    states = {step: state_of(step) for step in range(8)}
    turns = []
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        for step, state in states.items():
            report = run.save(step, state).result()
            steps = check(tmp_path / f"step_{step}", states)
            turns.append({k: sorted(x for x in of if of[x] == step) for k, of in steps.items()})
            if step:
                written = 2 * 2 * (30 * 40 + 3) * 8 + 2 * 100 * 40 * 8 + (2500 + 7) * 8
                small = 2 * 3 * 3 * 8  # of the other experts; copied out of the B-tree
                assert report.written_bytes == written + small
                assert report.staged_bytes == written, "the others must not be copied"
                assert report.written_bytes + report.reused_bytes == report.bytes
    assert turns[0] == {KEY: [0, 1, 2, 3, 4], "**/moe/up": [0, 1, 2]}
    assert [turn[KEY] for turn in turns[1:7]] == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4], [0, 1]]
    assert [turn["**/moe/up"] for turn in turns[1:5]] == [[0], [1], [2], [0]]
    for step in range(7):
        shutil.rmtree(tmp_path / f"step_{step}")
    check(tmp_path / "step_7", states)


def test_turns_go_on_after_a_restart(tmp_path: Path) -> None:
    states = {step: state_of(step) for step in range(9)}
    for step in range(0, 9, 3):
        with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS, keep_last=1) as run:
            if step:
                run.load()
            for number in range(step, step + 3):
                run.save(number, states[number], wait=True)
    steps = check(tmp_path / "step_8", states)
    assert steps[KEY] == {0: 8, 1: 6, 2: 7, 3: 7, 4: 8}


@pytest.mark.integration  # takes seconds
@examples(12)
@given(data=st.data())
def test_each_expert_is_as_in_its_recorded_step(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("experts")
    counts = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    partial = {KEY: data.draw(st.integers(1, 7)), "**/moe/up": (0, data.draw(st.integers(1, 5)))}
    states: dict[int, Any] = {}
    step = 0
    for _ in range(data.draw(st.integers(1, 3))):
        reuse = data.draw(st.sampled_from([False, True, "compare"]))
        options = SaveOptions(
            chunk_bytes=data.draw(st.sampled_from([4096, 4096, 1 << 20])),
            staging=data.draw(st.sampled_from(["auto", "copy", "lazy"])),
            fsync=False,
        )
        keep = data.draw(st.sampled_from([None, 1]))
        with Checkpointer(
            folder, experts=Experts(partial), options=options, reuse=reuse, keep_last=keep
        ) as run:
            if step and data.draw(st.booleans()):
                step = data.draw(st.sampled_from(run.steps()))
                run.load(step=step)
                run.drop_later_steps()
            elif step:
                step = run.latest() or 0
            for _ in range(data.draw(st.integers(1, 5))):
                step += 1
                states[step] = state_of(step, *counts)
                run.save(step, states[step], wait=data.draw(st.booleans()))
            run.wait()
            for saved in run.steps():
                check(folder / f"step_{saved}", states)
    shutil.rmtree(folder)


def test_own_choice(tmp_path: Path) -> None:
    seen: list[ExpertFacts] = []

    def choose(facts: ExpertFacts) -> list[int]:
        seen.append(facts)
        return [4, 4, 0]

    states = {step: state_of(step) for step in range(3)}
    with Checkpointer(tmp_path, experts=Experts({KEY: 3}, choose=choose), options=OPTIONS) as run:
        for step, state in states.items():
            run.save(step, state, wait=True)
    assert recorded(tmp_path / "step_2") == {KEY: {0: 2, 1: 0, 2: 0, 3: 0, 4: 2}}
    assert seen[1] == ExpertFacts(KEY, (0, 1, 2, 3, 4), 3, {0: 1, 1: 0, 2: 0, 3: 0, 4: 1}, {})
    check_steps = recorded(tmp_path / "step_2")
    assert same(
        flat(unickpt.load(tmp_path / "step_2")["layers"]["0"]["experts"]),
        flat(
            {
                str(x): states[of]["layers"]["0"]["experts"][str(x)]
                for x, of in check_steps[KEY].items()
            }
        ),
    )


def test_a_wrong_choice_fails_the_save(tmp_path: Path) -> None:
    with Checkpointer(
        tmp_path, experts=Experts({KEY: 1}, choose=lambda _: [9]), options=OPTIONS
    ) as run:
        run.save(0, state_of(0), wait=True)
        with pytest.raises(UnsupportedLeaf, match="choose: 9 is not the number of an expert"):
            run.save(1, state_of(1))
        assert run.steps() == [0]
        run.save(2, state_of(2), wait=True)  # of all
    assert set(recorded(tmp_path / "step_2")[KEY].values()) == {2}


# --- what else may be ---------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["removed", "replaced", "moved chunks"])
def test_a_base_that_is_gone_fails_the_save_and_the_next_is_full(what: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.save(0, state_of(0), wait=True)
        run.save(1, state_of(1), wait=True)
        if what == "removed":
            shutil.rmtree(tmp_path / "step_1")
        elif what == "replaced":
            unickpt.save(tmp_path / "step_1", state_of(7), overwrite=True)
        else:
            for file in (tmp_path / "step_1" / "processes").rglob("d/*"):
                file.unlink()
        with pytest.raises(StorageError, match="Nothing was saved; the next save writes all"):
            run.save(2, state_of(2)).result()
        assert not (tmp_path / "step_2").exists()
        run.save(3, state_of(3), wait=True)
        check(tmp_path / "step_3", {3: state_of(3)})
        report = run.save(4, state_of(4)).result()
        assert report.reused_bytes > 0
        check(tmp_path / "step_4", {3: state_of(3), 4: state_of(4)})


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK])
def test_without_links_other_experts_are_borrowed(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "link", link)
    states = {step: state_of(step) for step in range(4)}
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        for step, state in states.items():
            run.save(step, state, wait=True)
            check(tmp_path / f"step_{step}", states)
    assert unickpt.open(tmp_path / "step_1").index.bases[0].name == "step_0"


OTHERWISE = SaveOptions(chunk_bytes=4096, fsync=False, compression="zstd")
"""Compressed, so that no chunk can be shared."""


def test_what_cannot_be_shared_is_copied(tmp_path: Path) -> None:
    states = {step: state_of(step) for step in range(2)}
    for step, options in enumerate([OPTIONS, OTHERWISE]):
        with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=options) as run:
            if step:
                run.load()
            report = run.save(step, states[step]).result()
            assert report.written_bytes == report.bytes
    assert set(check(tmp_path / "step_1", states)[KEY].values()) == {0, 1}


def test_a_damaged_chunk_is_not_copied(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with Checkpointer(root, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.save(0, state_of(0), wait=True)
    with Checkpointer(root, experts=Experts(PARTIAL), options=OTHERWISE) as run:
        run.load()
        needle = state_of(0)["layers"]["0"]["experts"]["4"]["up"].tobytes()[-96:]
        for file in (root / "step_0").rglob("d/*"):
            file.write_bytes(file.read_bytes().replace(needle, needle[:-1] + b"\x00"))
        with pytest.raises(StorageError, match=r"experts/4/up.*does not match its digest"):
            run.save(1, state_of(1)).result()
        assert run.steps() == [0]


def test_each_expert_has_files_of_its_own(tmp_path: Path) -> None:
    """So nothing of a file is kept in vain, and nothing is copied as time goes by."""

    def disk_bytes(path: Path) -> int:
        return sum(f.stat().st_size for f in path.rglob("*") if f.is_file())

    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS, keep_last=1) as run:
        first = 0
        for step in range(25):
            report = run.save(step, state_of(step)).result()
            run.wait()
            first = first or disk_bytes(tmp_path)
            assert disk_bytes(tmp_path) < 1.15 * first
            assert step == 0 or report.written_bytes < 0.6 * report.bytes


def test_a_step_of_a_run_without_experts_is_no_base(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, options=OPTIONS) as run:
        run.save(0, state_of(0), wait=True)
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.load()
        run.save(1, state_of(1), wait=True)
        assert set(recorded(tmp_path / "step_1")[KEY].values()) == {1}
        run.save(2, state_of(2), wait=True)
    states = {1: state_of(1), 2: state_of(2)}
    check(tmp_path / "step_2", states)
    # Other experts, and other keys: everything is written.
    for step, (keys, state) in enumerate(
        [(PARTIAL, state_of(3, routed=6)), ({"layers/0/experts/{x}/*": 1}, state_of(4, 6))], 3
    ):
        with Checkpointer(tmp_path, experts=Experts(keys), options=OPTIONS) as run:
            run.load()
            run.save(step, state, wait=True)
            steps = recorded(tmp_path / f"step_{step}")
            assert all(set(of.values()) == {step} for of in steps.values())
            assert run.save(10 * step, state).result().reused_bytes > 0
            run.drop_later_steps(step)


@pytest.mark.parametrize(
    "changed", [{"chunk_bytes": 1 << 20}, {"chunk_bytes": 700}, {"compression": "zstd"}]
)
def test_other_chunks_are_copied(changed: Any, tmp_path: Path) -> None:
    states = {step: state_of(step) for step in range(6)}
    for first, options in ((0, SMALL), (2, changed), (4, SMALL)):
        made = SaveOptions(fsync=False, **options)
        with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=made, keep_last=1) as run:
            if first:
                run.load()
            for step in (first, first + 1):
                report = run.save(step, states[step]).result()
                if step == first:
                    assert report.written_bytes > 0.9 * report.bytes
                else:
                    assert report.written_bytes < 0.7 * report.bytes
                check(tmp_path / f"step_{step}", states)
    assert recorded(tmp_path / "step_5")[KEY] == {0: 3, 1: 4, 2: 4, 3: 5, 4: 5}


def test_removing_the_newest_step_makes_the_next_full(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        for step in range(3):
            run.save(step, state_of(step), wait=True)
        run.delete(2)
        run.save(3, state_of(3), wait=True)
        check(tmp_path / "step_3", {3: state_of(3)})
        run.save(4, state_of(4), wait=True)
        run.load(step=3)
        assert run.drop_later_steps() == [4]
        run.save(5, state_of(5), wait=True)
        check(tmp_path / "step_5", {3: state_of(3), 5: state_of(5)})
        assert set(recorded(tmp_path / "step_5")[KEY].values()) == {3, 5}


def test_overwriting_the_newest_step(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, experts=Experts({KEY: 2}), options=OPTIONS) as run:
        run.save(1, state_of(0), wait=True)
        run.save(1, state_of(1), wait=True, overwrite=True)
    found = unickpt.load(tmp_path / "step_1")["layers"]["0"]["experts"]
    for x in range(ROUTED):
        state = state_of(1 if x < 2 else 0)["layers"]["0"]["experts"][str(x)]
        assert same(found[str(x)], state)


def test_a_stale_local_step_is_no_base(tmp_path: Path) -> None:
    """The run goes on from the version in the root, which another job has saved since."""
    local, root = tmp_path / "local", tmp_path / "root"
    with Checkpointer(root, local=local, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.save(1, state_of(1), wait=True)
        run.wait()
    with Checkpointer(root, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.save(1, state_of(7), wait=True, overwrite=True)
    with Checkpointer(root, local=local, experts=Experts(PARTIAL), options=OPTIONS) as run:
        assert run.load()["opt"]["count"] == 7
        run.save(2, state_of(2), wait=True)
    check(local / "step_2", {2: state_of(2)})


def test_two_tiers(tmp_path: Path) -> None:
    states = {step: state_of(step) for step in range(5)}
    local, root = tmp_path / "local", tmp_path / "root"
    with Checkpointer(root, local=local, experts=Experts(PARTIAL), options=OPTIONS) as run:
        for step in range(4):
            run.save(step, states[step])
        run.wait()
    shutil.rmtree(local)
    for step in range(3):
        shutil.rmtree(root / f"step_{step}")
    check(root / "step_3", states)
    with Checkpointer(root, local=local, experts=Experts(PARTIAL), options=OPTIONS) as run:
        run.load()
        run.save(4, states[4], wait=True)  # the local tier has no base
        check(local / "step_4", {4: states[4]})


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("partial", "message"),
    [
        ({}, "not empty"),
        ({"a": 2}, "must have {x} once"),
        ({"{x}/{x}": 2}, "must have {x} once"),
        ({"{x}": 0}, "at least 1"),
        ({"{x}": True}, "at least 1"),
        ({"{x}": (0, 2)}, "no axis can be given"),
        ({"a": (0, 2, 3)}, "a pair"),
        ({"a": (-1, 2)}, "the axis -1 is neither"),
        ({"a*/{x}": 2}, "whole components"),
    ],
)
def test_keys_that_are_not_valid(partial: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, experts=Experts(partial))


def test_what_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose=3 must be a function"):
        Experts(PARTIAL, choose=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="create the Checkpointer with experts="):
        Checkpointer(tmp_path).save(0, {"a": 1}, tokens={"a": [1]})
    with pytest.raises(ValueError, match="plt_budget=2"):
        Checkpointer(tmp_path, experts=Experts(PARTIAL, plt_budget=2))
    run = Checkpointer(tmp_path, experts=Experts({"**": (0, 1), "a/{x}": 1}))
    with pytest.raises(UnsupportedLeaf, match="several keys of `experts` match it"):
        run.save(0, {"a": {"0": np.zeros(3)}})
    run = Checkpointer(tmp_path, experts=Experts({"**": (0, 1)}))
    with pytest.raises(UnsupportedLeaf, match="3 experts are stacked in 'a', but 4 in 'b'"):
        run.save(0, {"a": np.zeros(3), "b": np.zeros(4)})


# --- loading --------------------------------------------------------------------------------------


def test_load_tells_which_experts_are_older(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Checkpointer(tmp_path, experts=Experts(PARTIAL), options=OPTIONS) as run:
        for step in range(2):
            run.save(step, state_of(step), wait=True)
        with caplog.at_level(logging.INFO, "unickpt"):
            _, report = run.load(return_report=True)
        older = ((KEY, 2, 0), (KEY, 3, 0), (KEY, 4, 0), ("**/moe/up", 1, 0), ("**/moe/up", 2, 0))
        assert report.older_experts == older
        assert "older experts 5" in str(report)
        assert "**/experts/{2..4}/**  of step 0" in str(report)
        assert str(report) in caplog.text
        with pytest.raises(LoadMismatch, match=r"strict_experts=True.*of step 0"):
            run.load(strict_experts=True)
        with pytest.raises(LoadMismatch, match=r"2 of '.*' of step 0"):
            unickpt.load(tmp_path / "step_1", strict_experts=True)
        _, report = run.load(step=0, strict_experts=True, return_report=True)
        assert report.older_experts == ()


@pytest.mark.parametrize(
    "record", [5, {"steps": 1}, {"steps": {"a": {"1": -1}}}, {"steps": {"a": {"x": 1}}}]
)
def test_a_malformed_record_is_refused(record: Any, tmp_path: Path) -> None:
    unickpt.save(tmp_path / "a", {}, metadata={"unickpt": {"step": 1, "experts": record}})
    with pytest.raises(unickpt.CheckpointCorrupt, match="records of its experts is malformed"):
        unickpt.load(tmp_path / "a")


def test_experts_have_patches(tmp_path: Path) -> None:
    """Of an expert whose turn it is, what differs from its last turn is written; the others keep
    their patches. Each is as in the step that the checkpoint names."""
    rng, key, states = np.random.default_rng(3), "experts/{x}/up", list[dict[str, Any]]()
    weights = {str(x): rng.integers(0, 1 << 16, (64, 64)).astype(np.uint16) for x in range(4)}
    made, patched = SaveOptions(chunk_bytes=4096, fsync=False), 0
    with Checkpointer(tmp_path, reuse="patch", experts=Experts({key: 1}), options=made) as run:
        for step in range(16):
            for each in weights.values():
                each.reshape(-1)[rng.integers(0, each.size, 20)] ^= 1
            states.append({x: each.copy() for x, each in weights.items()})
            tree = {"experts": {x: {"up": each} for x, each in weights.items()}}
            report = run.save(step, tree, wait=True).result()
            patched += report.patched_chunks
            if report.patched_chunks and step:
                assert report.written_bytes < 2 * 64 * 64 / 4
            at = tmp_path / f"step_{step}"
            of = unickpt.open(at).metadata["unickpt"]["experts"]["steps"][key]
            found = unickpt.load(at)["experts"]
            for x, saved in of.items():
                assert np.array_equal(found[x]["up"], states[int(saved)][x]), (step, x)
            assert unickpt.verify(at).ok
    assert patched >= 8


def test_a_save_that_is_no_step_refuses_experts(tmp_path: Path) -> None:
    options = SaveOptions(fsync=False, features=[Experts({"experts/{x}/w": 1})])
    with pytest.raises(unickpt.UnsupportedLeaf, match=r"give Experts to a Checkpointer"):
        unickpt.save(tmp_path / "a", {"w": np.ones(3)}, options=options)
    with pytest.raises(ValueError, match="experts"):
        Checkpointer(tmp_path / "run", experts=Experts({"experts/{x}/w": 1}), options=options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partial": {"{x}/**": 1}, "experts": Experts({"{x}/**": 1})}, "not both"),
        ({"experts": {"{x}/**": 1}}, "must be Experts"),
    ],
)
def test_a_run_takes_experts_once(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpointer(tmp_path, **arguments)
