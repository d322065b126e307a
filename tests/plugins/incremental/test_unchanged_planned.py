"""Saves that are told what changed, of a tree that is known: they look at nothing else, either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.recognised import note_recognised
from support.strategies import examples

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.errors import StateChanged
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample
from unickpt.saving import saver

CHUNK = 16 << 10
LARGE = 160 << 10
"""Bytes of an array that is described by itself; smaller ones are copied all at once."""


def tree() -> dict[str, Any]:
    """Small and large arrays, of frameworks that count changes and that do not."""
    rng = np.random.default_rng(3)
    return {
        "frozen": {str(n): rng.random((5, n + 2)) for n in range(6)},
        "large": rng.random((LARGE // 512, 64)),
        "torch": {str(n): torch.randn(7, n + 1) for n in range(4)},
        "weights": torch.randn(LARGE // 512, 128),
        "rows": rng.random((40, 9)),
        "step": 0,
    }


@pytest.fixture(autouse=True)
def small_arrays_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if they were large."""
    monkeypatch.setattr(unchanged, "LEAST_BYTES", 0)


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """For each save, whether its tree was known."""
    saver._plans.cache_clear()
    yield note_recognised(monkeypatch)
    saver._plans.cache_clear()


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(np.array_equal(np.asarray(one), np.asarray(other)))


KNOWN: dict[str, Any] = {
    "nothing": None,
    "frozen": {"frozen/**": False},
    "large": {"frozen/*": False, "large": False},
    "rows": {"rows": "rows", "large": False},
    "tracked": "tracked",
    "some tracked": {"torch/**": "tracked", "weights": "tracked", "frozen/1": False},
}


@pytest.mark.integration  # takes seconds
@examples(25)
@given(
    told=st.lists(st.sampled_from(sorted(KNOWN)), min_size=3, max_size=8),
    staging=st.sampled_from(["auto", "copy", "lazy"]),
    seed=st.integers(0, 99),
)
def test_whatever_is_told_each_step_is_as_the_state_was(
    told: list[str], staging: Any, seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, state, rng = tmp_path_factory.mktemp("run"), tree(), np.random.default_rng(seed)
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False, staging=staging)
    with Checkpointer(root, keep_last=2, reuse=True, options=options) as run:
        for step, name in enumerate(told):
            known = KNOWN[name]
            rows = rng.random(40) < 0.2
            state["rows"][rows] += 1
            state["step"] = step
            state["torch"][str(rng.integers(4))].add_(1)
            if rng.random() < 0.5:
                state["weights"][int(rng.integers(300))].add_(1)
            if not step or name in ("nothing", "tracked", "frozen", "some tracked"):
                state["large"][int(rng.integers(300))] += 1
            if name in ("nothing", "tracked"):
                state["frozen"]["4"] += 1
            changed = known
            if isinstance(known, dict):
                changed = {key: rows if what == "rows" else what for key, what in known.items()}
            pending = run.save(step, state, changed=changed if step else None)
            pending.wait_staged()
            now = {**state, "frozen": {k: v.copy() for k, v in state["frozen"].items()}}
            pending.result()
            assert same(unickpt.load(root / f"step_{step}"), now)
            assert unickpt.verify(root / f"step_{step}").ok


@pytest.mark.parametrize("waits", [False, True])
def test_a_known_tree_is_not_described_anew(
    waits: bool, recognised: list[bool], tmp_path: Path
) -> None:
    state, known = tree(), {"frozen/**": False, "large": False}
    queue = saver.SaveQueue()
    for step in range(6):
        state["weights"].add_(1)
        state["torch"]["2"].add_(1)
        # `save` learns a tree that it sees again; the first two are saves of everything.
        told: dict[str, Any] = {"base": tmp_path / str(step - 1)} if step > 1 else {}
        told |= {"changed": known} if step else {}
        options = SaveOptions(chunk_bytes=CHUNK, fsync=False, **told)
        if waits:
            report = unickpt.save(tmp_path / str(step), state, options=options)
        else:
            report = queue.save(saver.SaveRequest(tmp_path / str(step), state, options)).result()
        assert same(unickpt.load(tmp_path / str(step)), state)
        if step > 1 and not waits:
            held = sum(array.nbytes for array in state["torch"].values())
            held += state["weights"].nbytes + state["rows"].nbytes
            # Those whose turn it is are hashed all the same.
            most = max(CHUNK, *(array.nbytes for array in state["frozen"].values()))
            assert report.staged_bytes <= held + 3 * most, "nothing of the rest is copied"
    assert recognised == [False, waits is False, True, True, True, True]


def test_a_save_that_is_told_something_teaches_as_much(
    recognised: list[bool], tmp_path: Path
) -> None:
    """As the first one of a job that goes on: what it left out is described alone later."""
    state, known = tree(), {"frozen/**": False, "large": False}
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False)
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        run.save(0, state)
    del recognised[:]
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        assert run.load(state)["step"] == 0
        for step in range(1, 7):
            state["torch"]["1"].add_(1)
            if step > 3:  # from here on nothing is said
                state["frozen"]["5"] += 1
                state["large"] += 1
            run.save(step, state, changed=known if step <= 3 else None).result()
            assert same(unickpt.load(tmp_path / f"step_{step}"), state)
    assert recognised == [False, True, True, True, True, True]


def test_a_wrong_word_is_noticed_of_a_known_tree(
    recognised: list[bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(unchanged, "TURNS", 1)  # every chunk is hashed
    monkeypatch.setattr(ArraySample, "differs", lambda *_: None)
    state = {str(n): np.zeros((4, 4)) + n for n in range(5)}
    options = SaveOptions(fsync=False)
    with Checkpointer(tmp_path, reuse=True, options=options) as run:
        run.save(0, state, wait=True)  # its plan is known once it has ended
        run.save(1, state, changed={"*": False}).result()
        for array in state.values():
            array += 1
        with pytest.raises(StateChanged, match="is said not to have changed"):
            run.save(2, state, changed={"*": False}).result()
        run.save(3, state).result()
        assert same(unickpt.load(tmp_path / "step_3"), state)
    assert recognised == [False, True, True, False], "what a save knew that failed is lost"


def test_what_a_save_says_comes_before_what_is_said_of_all(tmp_path: Path) -> None:
    state, said = {"a": np.zeros(9), "b": np.zeros(9)}, {"a": False, "b": False}
    with Checkpointer(tmp_path, reuse=True, options=SaveOptions(changed=said, fsync=False)) as run:
        run.save(0, state, wait=True)
        for step, changed in enumerate(({"a": True}, {"a": np.ones(9, bool)}, {"a": "tracked"}), 1):
            state["a"] += 1
            run.save(step, state, changed=changed, wait=True)
            assert same(unickpt.load(tmp_path / f"step_{step}"), state)
        run.save(4, state, changed="tracked", wait=True)  # of all of which nothing else is said
        for wrong, why in ((["a"], "must be"), ("all", "must be")):
            with pytest.raises((TypeError, ValueError), match=why):
                run.save(5, state, changed=wrong)  # type: ignore[arg-type]
