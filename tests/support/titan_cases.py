"""What the ranks of test_torchtitan.py do together, with torchtitan's trainer.

    titan_cases.py ASSETS FOLDER URL

Every rank runs all cases, one after the other, each with trainings of a few steps. The truth is a
training that was never interrupted. URL is an empty place in object storage.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

# isort: split
from support import titan_job

# isort: split
import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager

import unickpt
from unickpt.integrations.torchtitan import CheckpointManager
from unickpt.storage import paths

ASSETS, FOLDER, URL = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
Case = Callable[[str], None]
CASES: list[Case] = []


def case(function: Case) -> Case:
    CASES.append(function)
    return function


# --- helpers --------------------------------------------------------------------------------------


def trained(
    dump_folder: str, steps: int, loader: str = "own", manager: str = "ours", **settings: Any
) -> Any:
    """A trainer that has trained to a step, or from the last one in its folder on."""
    given = {
        "loader": loader,
        "manager": manager,
        "training": {"steps": steps},
        "checkpoint": settings,
    }
    with quiet():
        trainer = titan_job.made_config(ASSETS, dump_folder, given).build()
        try:
            trainer.train()
        finally:
            trainer.close()
    return trainer


@contextmanager
def quiet() -> Iterator[None]:
    """The trainer sleeps for two seconds at its end."""
    with mock.patch("time.sleep"):
        yield


def state(trainer: Any) -> dict[str, torch.Tensor]:
    """All arrays of a trainer, whole."""
    found = {f"model/{n}": p for n, p in trainer.model_parts[0].state_dict().items()}
    slots = trainer.optimizers.state_dict()
    found |= {f"optimizer/{n}": v for n, v in slots.items() if isinstance(v, torch.Tensor)}
    return {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in found.items()}


def assert_same(found: Any, wanted: Any) -> None:
    assert found.step == wanted.step
    assert found.losses.items() <= wanted.losses.items(), (found.losses, wanted.losses)
    mine, theirs = state(found), state(wanted)
    assert mine.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.equal(mine[name], value), name


def steps_in(folder: str) -> list[int]:
    dist.barrier()
    with unickpt.Checkpointer(f"{folder}/checkpoint") as found:
        return found.steps()


@contextmanager
def raises(kind: type[Exception], *words: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)


# --- cases ----------------------------------------------------------------------------------------

whole: Any = None
"""A training of six steps that nobody interrupted."""


@case
def goes_on_bit_for_bit(folder: str) -> None:
    """With torchtitan's own loader of data, too."""
    global whole
    whole = trained(f"{folder}/whole", 6)
    assert list(whole.losses) == [1, 2, 3, 4, 5, 6]
    for mode in ("disabled", "async", "async_with_pinned_mem"):
        trained(f"{folder}/{mode}", 4, async_mode=mode)
        found = trained(f"{folder}/{mode}", 6, async_mode=mode)
        assert list(found.losses) == [5, 6]
        assert_same(found, whole)
        assert steps_in(f"{folder}/{mode}") == [2, 4, 6]
    texts = trained(f"{folder}/texts", 6, "hf")
    trained(f"{folder}/parts", 4, "hf")
    assert_same(trained(f"{folder}/parts", 6, "hf"), texts)
    assert texts.losses != whole.losses


@case
def by_an_override(folder: str) -> None:
    found = trained(folder, 2, manager="override")
    assert type(found.checkpointer) is CheckpointManager
    assert steps_in(folder) == [2]


@case
def local_tier_and_reuse(folder: str) -> None:
    fast = f"{folder}/fast"
    trained(folder, 4, local=fast, reuse=True, async_mode="async")
    found = trained(folder, 6, local=fast, reuse=True, async_mode="async")
    assert_same(found, whole)
    assert steps_in(folder) == [2, 4, 6]


@case
def policies(folder: str) -> None:
    trained(f"{folder}/first", 5, interval=3, enable_first_step_checkpoint=True)
    assert steps_in(f"{folder}/first") == [1, 3, 5]
    trained(f"{folder}/few", 9, keep_latest_k=2)
    assert steps_in(f"{folder}/few") == [8, 9]
    trained(f"{folder}/off", 2, enable=False)
    assert not os.path.exists(f"{folder}/off/checkpoint")
    found = trained(f"{folder}/first", 6, load_only=True)
    assert list(found.losses) == [6]
    assert steps_in(f"{folder}/first") == [1, 3, 5]


@case
def goes_back(folder: str) -> None:
    trained(folder, 6)
    with raises(FileNotFoundError, "--checkpoint.load_step=3", "2, 4, 6"):
        trained(folder, 6, load_step=3)
    found = trained(folder, 5, load_step=2)
    assert list(found.losses) == [3, 4, 5]
    assert found.losses.items() <= whole.losses.items()
    assert steps_in(folder) == [2, 4, 5]


@case
def excluded(folder: str) -> None:
    trained(folder, 2)
    with raises(ValueError, "exclude_from_loading", "'loss'", "dataloader"):
        trained(folder, 3, exclude_from_loading=["loss"])
    found = trained(folder, 3, exclude_from_loading=["dataloader"], load_only=True)
    assert found.dataloader.samples == 8
    found = trained(folder, 3, exclude_from_loading=["lr_scheduler", "train_state"], load_only=True)
    assert list(found.losses) == [1, 2, 3]
    assert found.dataloader.samples == 40


@case
def only_the_model_at_the_end(folder: str) -> None:
    done = trained(folder, 5, last_save_model_only=True, export_dtype="bfloat16")
    assert steps_in(folder) == [2, 4, 5]
    stored = unickpt.load(f"{folder}/checkpoint/step_5")
    assert set(stored) == {"model"}
    for name, value in done.model_parts[0].state_dict().items():
        whole = value.full_tensor().detach().to(torch.bfloat16)
        assert torch.equal(
            torch.from_numpy(stored["model"][name].view("int16")), whole.view(torch.int16)
        )
    with raises(unickpt.LoadMismatch, "step_5", "only the model", "load_step=4"):
        trained(folder, 6)
    begun = trained(
        f"{folder}/new", 1, initial_load_path=f"{folder}/checkpoint/step_5", load_only=True
    )
    assert list(begun.losses) == [1]
    assert begun.losses[1] < done.losses[1]
    again = trained(folder, 6, load_step=4)
    assert_same(again, globals()["whole"])


@case
def a_seed(folder: str) -> None:
    with quiet():
        trainer = titan_job.made_config(ASSETS, folder, {"loader": "own"}).build()
        trainer.checkpointer.save(0, last_step=True)
        trainer.close()
    assert_same(trained(folder, 6), whole)
    assert steps_in(folder) == [0, 2, 4, 6]


@case
def what_torchtitan_saved(folder: str) -> None:
    theirs = f"{folder}/run"
    trained(theirs, 4, manager="theirs")
    found = trained(
        f"{folder}/other",
        6,
        initial_load_path=f"{theirs}/checkpoint/step-4",
        initial_load_model_only=False,
    )
    assert_same(found, whole)
    found = trained(theirs, 6)  # in the same folder
    assert list(found.losses) == [5, 6]
    assert_same(found, whole)
    assert steps_in(theirs) == [6]
    assert list(trained(theirs, 7).losses) == [7]
    model = trained(f"{folder}/model", 1, initial_load_path=f"{theirs}/checkpoint/step-4")
    assert list(model.losses) == [1]
    assert model.losses[1] < whole.losses[1]


@case
def back_to_torchtitan(folder: str) -> None:
    """An export, from which torchtitan's own manager goes on."""
    trained(f"{folder}/ours", 4)
    step, run = f"{folder}/ours/checkpoint/step_4", f"{folder}/theirs"
    rules = unickpt.Rules.preset("torchtitan")
    unickpt.convert(step, f"{run}/checkpoint/step-4", to="dcp", rules=rules)
    found = trained(run, 6, manager="theirs")
    assert list(found.losses) == [5, 6]
    assert_same(found, whole)
    assert not unickpt.diff(f"{run}/checkpoint/step-4", step, rules=rules.inverse).differences


@case
def object_storage(folder: str) -> None:
    """Remote folders and files for transformers, which torchtitan's own manager refuses."""
    hf = {"folder": f"{URL}/run", "last_save_in_hf": True, "last_save_model_only": True}
    done = trained(folder, 5, **hf)
    there = unickpt.open(f"{URL}/run/step-5")
    assert "model.layers.0.self_attn.q_proj.weight" in there
    assert not any(name.startswith("step-5.") for name in names_in(f"{URL}/run"))
    # Ended, so a restart goes on from the last full step, and ends again.
    again = trained(folder, 5, **hf)
    assert list(again.losses) == [5]
    hf = {"initial_load_path": f"{URL}/run/step-5", "initial_load_in_hf": True}
    loaded = titan_job.made_config(ASSETS, f"{folder}/new", {"checkpoint": hf}).build()
    assert loaded.checkpointer.load()
    mine, theirs = state(loaded), state(done)
    assert all(torch.equal(mine[n], v) for n, v in theirs.items() if n.startswith("model/"))
    loaded.close()


@case
def files_for_transformers(folder: str) -> None:
    trained(folder, 3, last_save_in_hf=True, last_save_model_only=True, export_dtype="bfloat16")
    dist.barrier()
    at = Path(folder, "checkpoint", "step-3")
    assert {"model.safetensors", "tokenizer.json"} <= {file.name for file in at.iterdir()}
    assert not list(at.parent.glob("step-3.*"))
    found = unickpt.open(at)
    assert {str(found[name].dtype) for name in found} == {"bfloat16"}
    assert steps_in(folder) == [2]


@case
def stages_of_a_pipeline(folder: str) -> None:
    """Only saved and loaded: the pipeline itself needs a newer torch."""
    given = {
        "parallelism": {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "1F1B"},
        "dataloader": {"num_workers": 1},  # whose seeds differ between stages
    }
    made = titan_job.made_config(ASSETS, folder, given).build()
    next(iter(made.dataloader))
    made.step = 2
    assert made.checkpointer.save(2)
    made.close()
    stored = unickpt.load(f"{folder}/checkpoint/step_2")
    assert {"tok_embeddings.weight", "lm_head.weight"} <= stored["model"].keys()
    other = titan_job.made_config(ASSETS, folder, given).build()
    with torch.no_grad():
        for parameter in other.model_parts[0].parameters():
            parameter.zero_()
    assert other.checkpointer.load()
    other.close()
    assert other.step == 2
    mine, theirs = state(other), state(made)
    assert theirs
    assert all(torch.equal(mine[name], value) for name, value in theirs.items())


@case
def refused(folder: str) -> None:
    make = CheckpointManager.Config
    path = {"initial_load_path": "/x", "initial_load_in_hf": True}
    with raises(ValueError, "initial_load_in_hf_quantized"):
        make(**path, initial_load_in_hf_quantized=True)
    with raises(ValueError, "Invalid async_mode='fork'"):
        make(async_mode="fork")
    with raises(ValueError, "last_save_in_hf requires last_save_model_only"):
        make(last_save_in_hf=True, last_save_model_only=False)
    with raises(ValueError, "at least 2"):
        make(keep_latest_k=1)
    with raises(ValueError, "initial_load_path must be an absolute path"):
        make(initial_load_path="x")
    assert make(last_save_in_hf=True, folder="s3://bucket/run").folder == "s3://bucket/run"
    for setting in ("last_save_in_hf", "initial_load_in_hf"):
        with raises(ValueError, setting, "sd_adapter"):
            make(enable=True, **{setting: True}).build(
                dataloader=None, model_parts=[], optimizers=[], lr_schedulers=None, states={},
                sd_adapter=None,
            )  # fmt: skip
    assert issubclass(CheckpointManager, BaseCheckpointManager)
    parsed = tyro.cli(make, args=["--async-mode", "async", "--local", "/dev/shm/x", "--enable"])
    assert (parsed.async_mode, parsed.local, parsed.enable) == ("async", "/dev/shm/x", True)


def names_in(url: str) -> set[str]:

    dist.barrier()
    return paths.resolve(url).names(paths.context())


def main() -> None:
    faulthandler.dump_traceback_later(500, exit=True)
    only = os.environ.get("CASE")
    for function in CASES:
        if only and function.__name__ not in only.split(","):
            continue
        try:
            function(f"{FOLDER}/{function.__name__}")
        except BaseException:
            traceback.print_exc()
            print(f"in {function.__name__}", file=sys.stderr, flush=True)
            os._exit(1)
        print("done", function.__name__, flush=True)
    print(len(CASES), "cases", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
