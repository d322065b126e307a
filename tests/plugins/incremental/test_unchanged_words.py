"""What a program says of its arrays (`SaveOptions.changed`): right and wrong, and of which save."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.processes import Processes
from support.saving import same
from support.strategies import examples

import unickpt
from unickpt import Checkpointer, SaveOptions
from unickpt.adapters import jax as jax_adapter
from unickpt.errors import StateChanged
from unickpt.plugins.incremental import unchanged
from unickpt.plugins.incremental.change_samples import ArraySample

CHUNK = 16 << 10
OPTIONS = SaveOptions(chunk_bytes=CHUNK, fsync=False)


def state_of(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "frozen": rng.random((300, 64)),
        "rows": rng.random((400, 64)),
        "torch": torch.from_numpy(rng.random((200, 64))),
        "small": rng.random(50),
        "step": 0,
    }


def copied(state: dict[str, Any]) -> dict[str, Any]:
    return {
        name: np.asarray(value).copy() if hasattr(value, "shape") else value
        for name, value in state.items()
    }


# --- which save they are about --------------------------------------------------------------------

RAISING: dict[str, dict[str, Any]] = {
    "tokens without experts": {"tokens": {"x": [1]}},
    "a wrong type": {"changed": {"rows": 3}},
    "a negative step": {"step": -1},
    "metadata": {"metadata": {"x": object()}},
    "no such array": {"changed": {"nosuch": False}},
    "the step exists": {"step": 1},
    "a later step exists": {"step": 0},
    "a metric": {"metrics": {"x": "y"}},
}


@pytest.fixture
def nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the program says."""
    monkeypatch.setattr(unchanged, "_due", lambda *_: ())
    monkeypatch.setattr(ArraySample, "differs", lambda *_: None)


def started(root: Path, state: dict[str, Any]) -> Checkpointer:
    """A run that has saved steps 0 and 1; the words of the next save are about step 1."""
    run = Checkpointer(root, reuse=True, options=OPTIONS)
    for step in range(2):
        run.save(step, state, changed={"**": True}, wait=True)
    return run


@pytest.mark.parametrize("mistake", RAISING)
def test_after_a_call_that_raised_nothing_is_skipped(
    mistake: str, nothing_is_checked: None, tmp_path: Path
) -> None:
    state = state_of()
    with started(tmp_path, state) as run:
        state["rows"][7] = 5
        arguments = {"step": 2, "changed": {"rows": np.arange(400) == 7}} | RAISING[mistake]
        step = arguments.pop("step")
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever it is
            run.save(step, state, **arguments).result()
        no_rows = np.zeros(400, bool)
        run.save(3, state, changed={"rows": no_rows, "frozen": False}, wait=True)
        assert same(run.load(step=3), state)


@pytest.mark.parametrize("deleted", [False, True])
def test_a_loaded_step_that_another_job_replaces_is_not_the_base(
    deleted: bool, nothing_is_checked: None, tmp_path: Path
) -> None:
    started(tmp_path, state_of()).close()
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        state = run.load(step=1)
        with Checkpointer(tmp_path, options=OPTIONS) as other:
            if deleted:
                other.delete(1)
            other.save(1, state_of(seed=1), overwrite=True, wait=True)
        run.save(2, state, changed={"frozen": False, "rows": False}, wait=True)
        assert same(run.load(step=2), state)


def test_a_step_that_was_loaded_to_look_at_is_not_the_base(
    nothing_is_checked: None, tmp_path: Path
) -> None:
    older, newer = state_of(1), state_of(2)
    with Checkpointer(tmp_path, options=OPTIONS) as run:
        run.save(1, older)
        run.save(2, newer)
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        state = run.load()
        run.load(step=1)
        for step in (3, 4):
            run.save(step, state, changed={"frozen": False, "rows": False}, wait=True)
            assert same(unickpt.load(run.path(step)), newer)
        run.load(step=1)
        run.load(step=4)
        run.save(5, older, changed={"frozen": False, "rows": False}, wait=True)
        assert same(run.load(step=5), older)


@pytest.mark.parametrize("how", ["delete", "drop"])
def test_after_a_step_is_removed_saves_go_on(how: str, tmp_path: Path) -> None:
    state = state_of()
    with started(tmp_path, state) as run:
        if how == "delete":
            run.delete(1)
        else:
            run.drop_later_steps(0)
        for step in (1, 2):
            report = run.save(step, state, changed={"frozen": False}).result()
            assert same(unickpt.load(run.path(step)), state)
        assert report.reused_bytes >= state["frozen"].nbytes


def test_without_a_base_nothing_is_skipped(tmp_path: Path) -> None:
    """A save may be in flight, and is not the base of the next one."""
    state, options = state_of(), SaveOptions(chunk_bytes=CHUNK, fsync=False, changed={"**": False})
    pending = [
        unickpt.save_async(tmp_path / str(number), state, options=options) for number in range(3)
    ]
    for number, save in enumerate(pending):
        assert save.result().reused_bytes == 0
        assert same(unickpt.load(tmp_path / str(number)), state)


# --- right words, and wrong ones ------------------------------------------------------------------

ACTIONS = ["rows", "frozen", "torch", "load", "delete", "raise", "overwrite", "nothing said", "two"]


@pytest.mark.integration
@examples(20)
@given(
    actions=st.lists(st.sampled_from(ACTIONS), min_size=4, max_size=10),
    reuse=st.sampled_from([True, "patch", "compare"]),
    compression=st.sampled_from([None, "zstd", "auto"]),
    seed=st.integers(0, 99),
)
def test_right_words_never_fail_and_lose_nothing(
    actions: list[str], reuse: Any, compression: Any, seed: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    root, state, rng = tmp_path_factory.mktemp("run"), state_of(seed), np.random.default_rng(seed)
    options = SaveOptions(chunk_bytes=CHUNK, fsync=False, compression=compression)
    expected: dict[int, dict[str, Any]] = {}
    with Checkpointer(root, reuse=reuse, options=options) as run:
        step = 0
        for action in actions:
            rows = rng.random(400) < 0.01
            state["rows"][rows] += 1
            state["small"] += 1
            said: Any = {"frozen": False, "torch": False, "rows": rows, "small": True}
            if action in ("frozen", "torch"):
                state[action][int(rng.integers(200))] += 1
                said[action] = True
            elif action == "load" and step:
                run.wait()
                loaded = run.load(step=int(rng.choice(run.steps())))
                if rng.random() < 0.5:  # or only to look at
                    state = {
                        n: torch.from_numpy(v) if n == "torch" else v for n, v in loaded.items()
                    }
                    said = {"frozen": False, "torch": False, "rows": False}
            elif action == "delete" and step:
                run.wait()
                run.delete(max(run.steps()))
            elif action == "raise":
                with pytest.raises(unickpt.UnsupportedLeaf):
                    run.save(step, {**state, "bad": object()}, changed=said)
                said = {"frozen": False, "torch": False, "rows": False}
            elif action == "nothing said":
                state["frozen"][3] += 1
                said = None
            elif action == "two":
                said["frozen"] = rng.random(300) < 0.5
                state["frozen"][said["frozen"]] -= 1
            again = action == "overwrite" and step - 1 in run.steps()
            step -= again
            run.save(step, state, changed=said, overwrite=again)
            expected[step] = copied(state)
            step += 1
        run.wait()
        for number in run.steps():
            assert same(unickpt.load(run.path(number)), expected[number]), number
            assert unickpt.verify(run.path(number)).ok


class Shared:
    """JAX's array, and the memory of torch behind it."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.tensor = torch.tensor(values, dtype=torch.float32)
        self.array = jnp.from_dlpack(self.tensor)

    def change(self, row: int) -> None:
        self.tensor[row, 11] += 1


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax_adapter, "_on_cpu", lambda sharding: False)


@pytest.mark.parametrize("said", ["False", "rows"])
@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("kind", ["numpy", "torch", "jax", "accelerator"])
def test_a_wrong_word_is_an_error_within_all_turns(
    kind: str, waits: bool, said: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """Of one element, which no sample need have; and the checkpoints before keep what they had."""
    if kind == "accelerator":
        request.getfixturevalue("accelerator")
    rng = np.random.default_rng(0)
    values = rng.random((1000, 64))
    change: Callable[[int], Any]
    if kind in ("jax", "accelerator"):
        shared = Shared(values)
        array, change = shared.array, shared.change
    else:
        array = values if kind == "numpy" else torch.from_numpy(values)
        change = lambda row: array.__setitem__((row, 11), -1)  # noqa: E731
    state, rows = {"w": array, "b": np.zeros(9)}, np.zeros(1000, bool)
    with Checkpointer(tmp_path, reuse=True, keep_last=2, options=OPTIONS) as run:
        for step in range(2):
            run.save(step, state, changed={"w": False}, wait=True)
        change(int(rng.integers(1000)))
        error, saves = None, 0
        while error is None and saves < unchanged.TURNS:
            saves += 1
            word = False if said == "False" else rows
            try:
                run.save(step + saves, state, changed={"w": word}, wait=waits).result()
            except StateChanged as raised:
                error = raised
        assert error is not None
        assert re.search(r"'w' \[.*said not to have changed.*hashes everything", str(error))
        run.save(90, state, changed={"w": False}, wait=True)
        assert np.array_equal(run.load(step=90)["w"], np.asarray(array))


@pytest.mark.integration
@examples(4)
@given(seed=st.integers(0, 999), reuse=st.sampled_from([True, "patch"]))
def test_whatever_is_said_no_change_is_missing_for_longer_than_all_turns(
    seed: int, reuse: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Words that are wrong now and then, about single elements, with loads and removals between."""
    root, state, rng = tmp_path_factory.mktemp("run"), state_of(seed), np.random.default_rng(seed)
    names, missing = ("frozen", "rows", "torch"), 0
    with Checkpointer(root, reuse=reuse, keep_last=3, options=OPTIONS) as run:
        for step in range(50):
            said: dict[str, Any] = dict.fromkeys(names, False)
            if rng.random() < 0.3:
                said["rows"] = rng.random(400) < 0.5
            if rng.random() < 0.2:  # a change of which nothing is said, or perhaps that it is none
                state[str(rng.choice(names))][int(rng.integers(200)), int(rng.integers(64))] += 1
            event = rng.random()
            if step and event < 0.03:
                run.load()
            elif step and event < 0.06:
                run.delete(max(run.steps()))
            try:
                run.save(step, state, changed=said, wait=True)
            except StateChanged:
                missing = 0
                continue
            is_whole = same(unickpt.load(run.path(step)), state)
            missing = 0 if is_whole else missing + 1
            assert missing < unchanged.TURNS
            assert unickpt.verify(run.path(step)).ok


@pytest.mark.parametrize("kind", ["numpy", "accelerator"])
def test_a_sample_of_each_array_is_compared_in_each_save(
    kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An adapter beside frozen weights that are much larger, which is said not to change either."""
    if kind == "accelerator":
        request.getfixturevalue("accelerator")
    monkeypatch.setattr(unchanged, "_due", lambda *_: ())
    state: dict[str, Any] = {f"frozen/{n}": np.zeros((900, 64)) for n in range(9)}
    state["adapter"] = np.zeros((300, 64))
    if kind == "accelerator":
        state = {name: jnp.asarray(array) for name, array in state.items()}
    with Checkpointer(tmp_path, reuse=True, options=SaveOptions(fsync=False)) as run:
        for step in range(3):
            run.save(step, state, changed={"**": False}, wait=True)
        state["adapter"] = state["adapter"] + 1
        with pytest.raises(StateChanged, match="'adapter'"):
            run.save(3, state, changed={"**": False})
        assert run.steps() == [0, 1, 2]


def test_arrays_that_become_others_are_saved(tmp_path: Path) -> None:
    """Of another shape, dtype or layout: what was said is not about them."""
    state: dict[str, Any] = {"w": np.zeros((300, 64)), "v": np.zeros((300, 64))}
    with Checkpointer(tmp_path, reuse=True, options=OPTIONS) as run:
        for step, other in enumerate(
            [{}, {}, {"w": np.ones((400, 64))}, {"w": np.ones((400, 64), np.float32)}, {"v": None}]
        ):
            state |= other
            run.save(step, state, changed={"w": False, "**": False}, wait=True)
            assert same(unickpt.load(run.path(step)), state)


JOB = """
import sys
import torch, torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
import unickpt
from unickpt.plugins.incremental import unchanged

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(3)
w = distribute_tensor(torch.randn(2000, 64), mesh, [Shard(0)])
plain = torch.randn(900, 64)
options = unickpt.SaveOptions(chunk_bytes=16384, fsync=False, timeout_s=60)
state, errors = {"w": w, "plain": plain}, []
with unickpt.Checkpointer(sys.argv[1], reuse=True, options=options) as run:
    for step in range(2 * unchanged.TURNS):
        if step == 3 and dist.get_rank() == 1:
            w.to_local()[555, 7] += 1  # nobody says so
        try:
            run.save(step, state, changed={"**": False}).result()
        except unickpt.UnickptError as error:
            errors.append((step, type(error).__name__))
full = w.full_tensor()
if dist.get_rank() == 0:
    assert run.steps()[-1] == 2 * unchanged.TURNS - 1, run.steps()
    found = unickpt.load(run.path(run.steps()[-1]))
    assert torch.equal(torch.as_tensor(found["w"]), full)
    assert torch.equal(torch.as_tensor(found["plain"]), plain)
(first, name), = errors
assert 3 <= first < 3 + unchanged.TURNS, errors
assert name == ("StateChanged" if dist.get_rank() else "ProcessFailed"), errors
dist.destroy_process_group()
"""


def test_a_wrong_word_of_one_process_fails_the_save_of_all(
    processes: Processes, tmp_path: Path
) -> None:
    """And later ones hold what each process has."""
    processes.finish(processes.torch(2, JOB, tmp_path / "run"))
