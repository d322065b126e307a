"""Checkpointer and functions of unickpt.integrations.orbax.v1: do as Orbax's own, and load its."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import LoadMismatch

jax = pytest.importorskip("jax")
theirs = pytest.importorskip("orbax.checkpoint.experimental.v1")
import jax.numpy as jnp  # noqa: E402

from unickpt.integrations.orbax import v1 as ours  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
BOTH = pytest.mark.parametrize("ocp", [theirs, ours], ids=["orbax", "unickpt"])


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Orbax logs each step."""
    logger = logging.getLogger("absl")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


def tree(number: int) -> dict[str, Any]:
    return {"w": jnp.full((8, 2), number, jnp.bfloat16), "b": jnp.arange(4) + number}


def same(found: Any, wanted: Any) -> bool:
    return found.keys() == wanted.keys() and all(
        np.asarray(found[name]).tobytes() == np.asarray(wanted[name]).tobytes() for name in wanted
    )


class Counter:
    """An object that writes a file."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    async def save(self, directory: Any) -> Any:
        count = self.count  # as it is now

        async def write() -> None:
            folder = await directory.await_creation()
            await asyncio.to_thread((folder / "count.txt").write_text, str(count))

        return write()

    async def load(self, directory: Any) -> Any:
        async def read() -> None:
            self.count = int((directory / "count.txt").read_text())

        return read()


@BOTH
def test_a_run(ocp: Any, tmp_path: Path) -> None:
    policies = {
        "save_decision_policy": ocp.training.save_decision_policies.FixedIntervalPolicy(2),
        "preservation_policy": ocp.training.preservation_policies.LatestN(2),
    }
    with ocp.training.Checkpointer(tmp_path, custom_metadata={"v": 1}, **policies) as run:
        assert run.latest is None
        saved = [
            run.save(step, tree(step), metrics={"loss": step}, custom_metadata={"at": step})
            for step in range(1, 7)
        ]
        assert saved == [False, True, False, True, False, True]
        assert [each.step for each in run.checkpoints] == [4, 6]
        assert run.latest.step == 6
        assert run.latest.metrics == {"loss": 6}
        assert same(run.load(4, tree(0)), tree(4))
        assert same(run.load(run.latest), tree(6))
        assert run.metadata(4).custom_metadata == {"at": 4}
        assert run.metadata(4).metadata["w"].shape == (8, 2)
        assert run.root_metadata().custom_metadata == {"v": 1}
        with pytest.raises(ocp.training.errors.StepAlreadyExistsError, match="exists"):
            run.save(6, tree(0))
        assert run.save(6, tree(60), overwrite=True)
        assert same(run.load(), tree(60))
        response = run.save_async(7, tree(7), force=True)
        assert response.result() is True
        assert run.save_async(9, tree(9)) is None
        assert run.delete(6)
        assert not run.delete(6, missing_ok=True)
        with pytest.raises(FileNotFoundError):
            run.load(6)
        run.wait()
    # Each of both, Orbax's and ours, is loaded by ours.
    with ours.training.Checkpointer(tmp_path) as run:
        assert run.latest is not None
        assert run.latest.step == 7
        assert same(run.load(None, tree(0)), tree(7))


@BOTH
def test_checkpointables(ocp: Any, tmp_path: Path) -> None:
    with ocp.training.Checkpointer(tmp_path) as run:
        run.save_checkpointables(1, {"model": tree(1), "counter": Counter(7)})
    with ours.training.Checkpointer(tmp_path) as run:
        counter = Counter()
        found = run.load_checkpointables(None, {"model": tree(0), "counter": counter})
        assert same(found["model"], tree(1))
        assert found["counter"] is counter
        assert counter.count == 7
        assert sorted(run.load_checkpointables()) == ["counter", "model"]
        assert sorted(run.checkpointables_metadata().metadata) == ["counter", "model"]
        assert same(run.load(1, tree(0), checkpointable_name="model"), tree(1))
        with pytest.raises(LoadMismatch, match="no item 'state'; there are"):
            run.load()


@BOTH
def test_functions(ocp: Any, tmp_path: Path) -> None:
    path = tmp_path / "one"
    ocp.save(path, tree(1))
    if ocp is ours:  # in Orbax, pytest would see a coroutine that is never awaited
        with pytest.raises(unickpt.CheckpointExists):
            ocp.save(path, tree(2))
    ocp.save_async(path, tree(2), overwrite=True).result()
    assert same(ours.load(path, tree(0)), tree(2))
    assert same(ours.load(path), tree(2))
    several = tmp_path / "several"
    ocp.save_checkpointables(several, {"a": tree(1), "b": tree(2), "c": Counter(3)})
    counter = Counter()
    found = ours.load_checkpointables(several, {"b": tree(0), "c": counter})
    assert same(found["b"], tree(2))
    assert counter.count == 3
    assert same(ours.load(several, tree(0), checkpointable_name="a"), tree(1))


def numpy_shape(shape: tuple[int, ...], dtype: str) -> Any:
    """Orbax's abstract NumPy array, which it does not export yet."""
    from orbax.checkpoint.experimental.v1._src.serialization import numpy_leaf_handler

    return numpy_leaf_handler.NumpyShapeDtype(shape, np.dtype(dtype))


@BOTH
def test_abstract_leaves_of_each_kind(ocp: Any, tmp_path: Path) -> None:
    saved = {"w": np.arange(6, dtype=np.int16).reshape(2, 3), "n": 3, "s": "t", "x": 1.5}
    ocp.save(tmp_path / "c", saved)
    wanted = {"w": numpy_shape((2, 3), "int16"), "n": int, "s": str, "x": float}
    found = ocp.load(tmp_path / "c", wanted)
    assert type(found["w"]) is np.ndarray
    assert np.array_equal(found["w"], saved["w"])
    assert {k: found[k] for k in "nsx"} == {k: saved[k] for k in "nsx"}
    if ocp is ours:
        with pytest.raises(LoadMismatch, match="shape"):
            ocp.load(tmp_path / "c", {**wanted, "w": numpy_shape((3, 2), "int16")})
        with pytest.raises(LoadMismatch, match="kind"):
            ocp.load(tmp_path / "c", {**wanted, "w": int})


def test_a_failed_save_is_raised_by_its_response(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError("the disk is full")

    told: list[bool] = []
    with ours.training.Checkpointer(tmp_path) as run:
        monkeypatch.setattr("unickpt.saving.task.SaveTask.run", full)
        response = run.save_async(1, tree(1))
        assert response is not None
        response.on_complete(told.append)
        with pytest.raises(OSError, match="disk is full"):
            response.result()
        assert run.latest is None
        monkeypatch.undo()
        later = run.save_async(1, tree(1))
        assert later is not None
        later.on_complete(told.append)
        later.result()
        run.wait()
    assert told == [True]


def test_what_is_refused(tmp_path: Path) -> None:
    for name in ("context", "logger", "step_name_format"):
        with pytest.raises(TypeError, match=f"{name}="):
            ours.training.Checkpointer(tmp_path, **{name: object()})
    with ours.training.Checkpointer(tmp_path) as run:
        run.save(1, tree(1))
        with pytest.raises(ValueError, match="checkpointable_name='state'"):
            run.delete(1, checkpointable_name="state")  # type: ignore[arg-type]
        with pytest.raises(LoadMismatch, match="w"):
            run.load(1, {"w": tree(0)["w"], "extra": tree(0)["b"]})


def test_a_part_of_orbaxs_own_step(tmp_path: Path) -> None:
    with theirs.training.Checkpointer(tmp_path) as run:
        state = {"w": np.arange(6.0), "n": 3}
        response = run.save_checkpointables_async(
            1, {"ours": ours.UnickptCheckpointable(state), "theirs": tree(1)}
        )
        state["w"][:] = -1  # it was copied
        assert response.result()
        like = ours.UnickptCheckpointable({"w": np.zeros(6), "n": 0})
        found = run.load_checkpointables(1, {"ours": like, "theirs": tree(0)})
        assert same(found["theirs"], tree(1))
    assert like.state["n"] == 3
    assert like.state["w"].tolist() == list(range(6))
    path = tmp_path / "1" / "ours" / "unickpt"
    assert unickpt.load(path)["n"] == 3
    unickpt.verify(path)
