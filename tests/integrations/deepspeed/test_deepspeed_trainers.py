"""DeepSpeed inside of the Trainer of Hugging Face, of accelerate and of Lightning: real ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS
from support.processes import free_port

import unickpt

pytestmark = pytest.mark.integration
pytest.importorskip("deepspeed")
pytest.importorskip("transformers")
pytest.importorskip("lightning")
pytest.importorskip("peft")

Run = Callable[..., Any]
TRAINERS = ("hf", "in_accelerate", "in_lightning")  # scenarios


@pytest.fixture(scope="module")
def ranks() -> Iterator[Run]:
    """Runs a scenario of `support.deepspeed_trainers` on some ranks; returns what rank 0 does."""
    paths = [str(TESTS), str(Path(TESTS).parent), os.environ.get("PYTHONPATH", "")]
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "support.deepspeed_trainers"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    ) as server:  # fmt: skip
        yield lambda *arguments, fails=False: _run(server, *arguments, fails=fails)
        server.kill()


def _run(server: Any, count: int, name: str, *arguments: Any, fails: bool) -> Any:
    plain = [str(each) if isinstance(each, Path) else each for each in arguments]
    request = {
        "ranks": count, "name": name, "arguments": plain, "port": free_port(), "timeout_s": 200,
    }  # fmt: skip
    print(json.dumps(request), file=server.stdin, flush=True)
    found = json.loads(server.stdout.readline())
    errors = [said["error"] for said in found if isinstance(said, dict) and "error" in said]
    assert not errors, "\n".join(errors)
    assert fails == all("ended with" in said for said in found), found
    return found[0]


@pytest.fixture(scope="module")
def killed(ranks: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The folder of a run on two ranks that was killed, as it was then; and that of one which
    nobody interrupted, with its losses."""
    made: dict[Any, Any] = {}

    def of(trainer: str, stage: int, *more: Any) -> tuple[Path, Path, dict[str, str]]:
        if (trainer, stage) not in made:
            folder, whole = tmp_path_factory.mktemp("killed"), tmp_path_factory.mktemp("whole")
            losses = ranks(2, trainer, whole, stage, None, False, None, *more)
            ranks(2, trainer, folder, stage, 4, False, None, *more, fails=True)
            made[trainer, stage] = folder, whole, losses
        return made[trainer, stage]

    return of


def arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    opened = unickpt.open(path)
    return {name: np.asarray(opened[name][...]) for name in opened}


def of_engine(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Weights, masters, and the optimizer's state."""
    slots = ("module/", "fp32/", "exp_avg/", "exp_avg_sq/", "step/")
    return {name: x for name, x in arrays(path).items() if name.startswith(slots)}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert len(found) > 5
    for name, x in expected.items():
        assert found[name].tobytes() == x.tobytes(), name
        assert found[name].dtype == x.dtype
        assert found[name].shape == x.shape


def checkpoint_of(trainer: str, folder: Path, step: int) -> Path:
    names = {"hf": f"step_{step}", "in_lightning": f"step={step}.ckpt"}
    return folder / names.get(trainer, f"checkpoints/checkpoint_{step - 1}")


# --- all three trainers ---------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_killed_job_goes_on_bit_for_bit(
    ranks: Run, killed: Callable[..., Any], tmp_path: Path, trainer: str, stage: int
) -> None:
    dropout = [0.1] if trainer == "hf" and stage == 2 else []  # by the generators' states
    folder, whole, losses = killed(trainer, stage, *dropout)
    run, again = tmp_path / "run", tmp_path / "again"
    shutil.copytree(folder, run)
    found = ranks(2, trainer, run, stage, None, True, again, *dropout)
    first = min(map(int, found))
    assert 2 < first <= 5
    assert found == {step: loss for step, loss in losses.items() if int(step) >= first}
    loaded, last = (checkpoint_of(trainer, run, step) for step in (first - 1, 6))
    assert_same(of_engine(again / "again"), of_engine(loaded))
    assert_same(of_engine(last), of_engine(checkpoint_of(trainer, whole, 6)))
    for path in (loaded, last):
        unickpt.verify(path)


@pytest.mark.parametrize(("stage", "count"), [(1, 3), (3, 1)])
@pytest.mark.parametrize("trainer", TRAINERS)
def test_a_killed_job_goes_on_with_another_number_of_ranks(
    ranks: Run, killed: Callable[..., Any], tmp_path: Path, trainer: str, stage: int, count: int
) -> None:
    folder, _, losses = killed(trainer, stage)
    run, again = tmp_path / "run", tmp_path / "again"
    shutil.copytree(folder, run)
    found = ranks(count, trainer, run, stage, None, True, again)
    first = min(map(int, found))
    assert_same(of_engine(again / "again"), of_engine(checkpoint_of(trainer, run, first - 1)))
    for step, loss in found.items():  # sums have another order
        expected = float.fromhex(losses[step])
        assert float.fromhex(loss) == pytest.approx(expected, rel=1e-3), step


def test_a_checkpoint_is_loaded_without_deepspeed(killed: Callable[..., Any]) -> None:
    rules = unickpt.Rules.preset("deepspeed")
    for trainer in TRAINERS:
        _, whole, _ = killed(trainer, 3)
        path = checkpoint_of(trainer, whole, 6)
        masters = {n[5:]: x for n, x in arrays(path).items() if n.startswith("fp32/")}
        found = unickpt.load(path, rules=rules)["model"]
        assert_same(found, masters)
        into = {"model": {name: np.zeros_like(x) for name, x in masters.items()}}
        unickpt.load(path, into, rules=rules, unexpected="skip")
        assert_same(into["model"], masters)


# --- the Trainer ----------------------------------------------------------------------------------


def test_a_callback_saves_the_steps_of_a_trainer_as_it_is(ranks: Run, tmp_path: Path) -> None:
    losses = ranks(2, "hf_callback", tmp_path / "whole", 2, None)
    ranks(2, "hf_callback", tmp_path / "run", 2, 4, fails=True)
    found = ranks(2, "hf_callback", tmp_path / "run", 2, None)
    assert found == {step: losses[step] for step in found}
    assert min(found) in ("3", "5")
    assert unickpt.Checkpointer(tmp_path / "run").steps() == [2, 4, 6]
    for step in (2, 6):
        one, other = (tmp_path / name / f"step_{step}" for name in ("run", "whole"))
        assert_same(of_engine(one), of_engine(other))


@pytest.mark.parametrize("stage", [2, 3])
def test_the_best_step_is_loaded_at_the_end(ranks: Run, tmp_path: Path, stage: int) -> None:
    best = ranks(2, "hf_best", tmp_path / "run", stage, tmp_path / "again")
    assert Path(best).name == "step_2"
    found, expected = of_engine(tmp_path / "again" / "again"), of_engine(Path(best))
    weights = ("module/", "fp32/")
    for name in (each for each in expected if each.startswith(weights)):
        assert found[name].tobytes() == expected[name].tobytes(), name


def test_what_the_trainer_itself_saved_is_gone_on_from(
    ranks: Run, killed: Callable[..., Any], tmp_path: Path
) -> None:
    _, _, losses = killed("hf", 1)
    ranks(2, "hf", tmp_path, 1, 4, False, None, 0.0, True, fails=True)
    found = ranks(2, "hf", tmp_path, 1, None, True, None)
    assert found == {step: losses[step] for step in ("5", "6")}
    assert unickpt.Checkpointer(tmp_path).steps() == [5, 6]


@pytest.mark.parametrize("stage", [2, 3])
def test_adapters_are_saved_without_the_model_that_they_adapt(
    ranks: Run, tmp_path: Path, stage: int
) -> None:
    run, full, whole = tmp_path / "run", tmp_path / "full", tmp_path / "whole"
    losses = ranks(2, "lora", whole, stage, None, False, full)
    ranks(2, "lora", run, stage, 4, False, None, fails=True)
    found = ranks(2, "lora", run, stage, None, True, None)
    assert found == {step: losses[step] for step in found}
    assert "6" in found
    assert "1" not in found
    assert_same(of_engine(run / "step_6"), of_engine(whole / "step_6"))
    everything = size(full / "all")
    assert everything > 10e6
    for step in range(1, 7):
        assert size(whole / f"step_{step}") <= 0.02 * everything
    names = set(of_engine(full / "all")) - set(of_engine(run / "step_6"))
    assert names
    assert not [name for name in names if "lora_" in name]


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


# --- accelerate and Lightning ---------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["in_accelerate", "in_lightning"])
def test_what_they_themselves_saved_is_gone_on_from(
    ranks: Run, killed: Callable[..., Any], tmp_path: Path, trainer: str
) -> None:
    _, _, losses = killed(trainer, 1)
    ranks(2, trainer, tmp_path, 1, 4, False, None, True, fails=True)
    found = ranks(2, trainer, tmp_path, 1, None, True, None)
    assert found == {step: losses[step] for step in ("5", "6")}
    unickpt.verify(checkpoint_of(trainer, tmp_path, 6))


def test_lightning_validates_what_was_trained(ranks: Run, killed: Callable[..., Any]) -> None:
    _, whole, _ = killed("in_lightning", 3)
    path = checkpoint_of("in_lightning", whole, 6)
    found, stored = ranks(2, "lightning_validates", path), arrays(path)
    for name, weights in found.items():
        np.testing.assert_array_equal(np.float32(weights), stored[f"module/{name}"], name)
    assert len(found) > 5


def test_a_save_replaces_what_accelerate_saved_and_takes_deepspeeds_arguments(
    ranks: Run, tmp_path: Path
) -> None:
    theirs, left, (unprepared, missing, other) = ranks(2, "in_place_of_accelerates", tmp_path / "a")
    assert {"latest", "pytorch_model", "zero_to_fp32.py"} <= set(theirs)
    assert left == []
    assert "0 models are prepared with DeepSpeed" in unprepared
    assert "has weights that are not stored: frozen" in missing
    assert "max_shard_size: not supported" in other


# --- what is refused ------------------------------------------------------------------------------


def test_what_is_refused_says_what_to_do(
    ranks: Run, killed: Callable[..., Any], tmp_path: Path
) -> None:
    folder, *_ = killed("hf", 1)
    said = ranks(2, "hf_refused", tmp_path, "hf_files")
    assert "hf_files=True with ZeRO 3: set stage3_gather_16bit_weights_on_model_save" in said
    said = ranks(2, "hf_refused", folder, "with")
    assert "was saved with DeepSpeed, and this job trains without it" in said
    ranks(2, "hf_refused", tmp_path, "prepare")
    said = ranks(2, "hf_refused", tmp_path, "without")
    assert "was saved without DeepSpeed, and this job trains with it" in said
