"""Runs of Orbax's own managers with our handler: which steps stay, what rules restore, what fails,
and jobs that are killed."""

from __future__ import annotations

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import Processes
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

jax = pytest.importorskip("jax")
ocp = pytest.importorskip("orbax.checkpoint")
pytest.importorskip("optax")
from orbax.checkpoint import v1  # noqa: E402

from unickpt.integrations.orbax import Handler, registry, v1_registry  # noqa: E402

pytestmark = [
    pytest.mark.integration,  # imports Orbax
    pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning"),
]
EXAMPLE = Path(TESTS).parent.joinpath("examples", "orbax_run.py").read_text()
IN_ORBAX = EXAMPLE.replace(", handler_registry=registry()", "")


def steps(run: Path) -> list[int]:
    return sorted(int(path.name) for path in run.iterdir() if path.name.isdecimal())


def is_ours(run: Path, step: int) -> bool:
    return (run / str(step) / "default" / "UNICKPT.txt").exists()


def test_orbax_keeps_the_best_steps_whoever_saved_them(tmp_path: Path) -> None:
    options = ocp.CheckpointManagerOptions(max_to_keep=3, best_fn=lambda metrics: metrics["top"])
    chosen: list[dict[str, Any]] = [{}, {"handler_registry": registry()}]
    for step, top in enumerate((0.1, 0.5, 0.4, 0.2, 0.9, 0.3)):
        with ocp.CheckpointManager(tmp_path, options=options, **chosen[step % 2]) as manager:
            args = ocp.args.StandardSave({"w": np.full(2, step)})
            manager.save(step, args=args, metrics={"top": top})
    assert steps(tmp_path) == [1, 2, 4]
    assert [is_ours(tmp_path, step) for step in (1, 2, 4)] == [True, False, False]
    with ocp.CheckpointManager(tmp_path, options=options, **chosen[1]) as manager:
        assert manager.best_step() == 4
        like = ocp.args.StandardRestore({"w": np.zeros(2, int)})
        assert [manager.restore(step, args=like)["w"][0] for step in (1, 2, 4)] == [1, 2, 4]
        assert manager.metrics(1) == {"top": 0.5}


def test_a_run_of_another_layout_restores_by_rules(tmp_path: Path) -> None:
    with ocp.CheckpointManager(tmp_path) as manager:
        old = {"dense": {"kernel": np.arange(6.0).reshape(2, 3)}}
        manager.save(1, args=ocp.args.StandardSave(old))
    rules = unickpt.Rules.parse("dense/kernel [i o] <-> linear/weight [o i]")
    made = registry(handler=Handler(rules=rules))
    with ocp.CheckpointManager(tmp_path, handler_registry=made) as manager:
        like = {"linear": {"weight": np.zeros((3, 2))}}
        found = manager.restore(1, args=ocp.args.StandardRestore(like))
        assert np.array_equal(found["linear"]["weight"], old["dense"]["kernel"].T)


def test_an_iterator_of_grain_stays_orbaxs_item(tmp_path: Path) -> None:
    grain = pytest.importorskip("grain.python")

    def loader() -> Any:
        sampler = grain.IndexSampler(9, grain.NoSharding(), shuffle=True, seed=1, num_epochs=1)
        return iter(grain.DataLoader(data_source=range(9), sampler=sampler, worker_count=0))

    data, again = loader(), loader()
    next(data)
    args = ocp.args.Composite(
        state=ocp.args.StandardSave({"w": np.ones(2)}), data=grain.PyGrainCheckpointSave(data)
    )
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(3, args=args)
        manager.wait_until_finished()
        manager.restore(3, args=ocp.args.Composite(data=grain.PyGrainCheckpointRestore(again)))
    assert next(again) == next(data)
    assert unickpt.load(tmp_path / "3" / "state")["w"].tolist() == [1, 1]


def test_a_save_that_fails_is_raised_and_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    args = ocp.args.StandardSave({"w": np.ones(4)})
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        manager.save(1, args=args)
        manager.wait_until_finished()
        monkeypatch.setattr("unickpt.commit.root.Root.replace", full)
        manager.save(2, args=args)
        with pytest.raises(OSError, match="No space left"):
            manager.wait_until_finished()
        monkeypatch.undo()
    with ocp.CheckpointManager(tmp_path, handler_registry=registry()) as manager:
        assert manager.all_steps() == [1]
        manager.save(2, args=args)
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2]


def test_a_step_with_one_item_opens_as_that_item_and_one_with_several_names_it(
    tmp_path: Path,
) -> None:
    tree, options = {"w": np.ones(2)}, ocp.CheckpointManagerOptions(best_fn=len)
    args = ocp.args.StandardSave(tree)
    one, two, three = (tmp_path / name for name in ("one", "two", "three"))
    with ocp.CheckpointManager(one, options=options, handler_registry=registry()) as manager:
        manager.save(1, args=args, metrics={"loss": 0.5})
    both = ocp.args.Composite(state=args, data=ocp.args.JsonSave({"seen": 1}))
    with ocp.CheckpointManager(two, handler_registry=registry()) as manager:
        manager.save(1, args=both)
    context = v1.Context()
    context.checkpointables.registry = v1_registry()
    with context:
        v1.save(three, tree)
    for path in (one / "1", three):
        assert unickpt.load(path)["w"].tolist() == [1, 1]
        assert unickpt.verify(path).ok
    listed = [CliRunner().invoke(app, ["ls", str(path)]).output for path in (one, two)]
    assert "unickpt" in listed[0]
    assert "1/state  unickpt" in listed[1]
    with pytest.raises(unickpt.CheckpointNotFound, match=r"several items.*two/1/state'"):
        unickpt.load(two / "1")


# --- jobs ----------------------------------------------------------------------------------------


@pytest.mark.trainers
def test_a_job_that_is_killed_continues_with_other_processes(
    processes: Processes, tmp_path: Path
) -> None:
    assert len(EXAMPLE.splitlines()) <= 45
    run = tmp_path / "run"
    last = kill(processes.jax(2, 2, EXAMPLE, run, 10**6), run)
    found = losses(processes.finish(processes.jax(1, 4, EXAMPLE, run, last + 3))[0])
    assert list(found) == [last + 1, last + 2, last + 3]
    wanted = losses(processes.finish(processes.jax(1, 4, EXAMPLE, tmp_path / "a", last + 3))[0])
    assert found == pytest.approx({step: wanted[step] for step in found}, rel=1e-5)
    assert steps(run) == [last + 1, last + 2, last + 3]
    assert all(unickpt.verify(run / str(step) / "default").ok for step in steps(run))


@pytest.mark.trainers
def test_a_job_continues_from_the_last_step_of_orbax(processes: Processes, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert IN_ORBAX != EXAMPLE
    first = losses(processes.finish(processes.jax(1, 2, IN_ORBAX, run, 4))[0])
    assert list(first) == [1, 2, 3, 4]
    found = losses(processes.finish(processes.jax(2, 2, EXAMPLE, run, 6))[0])
    wanted = losses(processes.finish(processes.jax(1, 4, EXAMPLE, tmp_path / "alone", 6))[0])
    assert found == pytest.approx({step: wanted[step] for step in (5, 6)}, rel=1e-5)
    assert steps(run) == [4, 5, 6]
    assert [is_ours(run, step) for step in (4, 5, 6)] == [False, True, True]


def kill(job: list[subprocess.Popen[str]], run: Path) -> int:
    """Ends a job as the power does, some steps after its beginning; the last step it has saved."""
    while not run.is_dir() or max(steps(run), default=0) < 5:
        assert all(process.poll() is None for process in job)
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()
    return steps(run)[-1]


def losses(output: str) -> dict[int, float]:
    return {int(s): float(x) for s, x in re.findall(r"^step (\d+) loss (\S+)$", output, re.M)}
