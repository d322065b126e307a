"""The Hugging Face files that the Trainer writes next to a step, and its own checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from unickpt import Checkpointer
from unickpt.errors import CheckpointExists

EXPORT = ".unickpt-step"
"""A file in a folder of HF files that names their step. Folders without it are left alone."""


def export(trainer: Any, run: Checkpointer, step: int) -> None:
    """Writes the model as HF files, all or none."""
    folder = Path(trainer.args.output_dir)
    target, new = folder / f"checkpoint-{step}", folder / f".checkpoint-{step}"
    if trainer.args.should_save:
        if target.exists() and not (target / EXPORT).exists():
            raise CheckpointExists(
                f"{target} was not saved by this integration; remove it, or use another output_dir"
            )
        shutil.rmtree(new, ignore_errors=True)
    agreed(0)  # no process writes before it is removed
    trainer.save_model(str(new), _internal_call=True)
    agreed(0)
    if trainer.args.should_save:
        (new / EXPORT).write_text(f"{step}\n")
        shutil.rmtree(target, ignore_errors=True)
        new.rename(target)
    remove_exports(trainer, run)


def remove_exports(trainer: Any, run: Checkpointer) -> None:
    """Removes the HF files of steps that were removed."""
    steps = run.steps()
    if not (trainer.args.should_save and trainer._hf_files and steps):
        return
    for step, folder in folders(trainer.args.output_dir):
        # Those that are being saved are newer than all that are committed.
        if step < steps[-1] and step not in steps and (folder / EXPORT).exists():
            shutil.rmtree(folder, ignore_errors=True)


def folders(output_dir: str) -> Iterator[tuple[int, Path]]:
    """The folders that are called as the Trainer calls its checkpoints, each with its step."""
    for folder in Path(output_dir).glob("checkpoint-*"):
        step = folder.name.rpartition("-")[2]
        if step.isdigit():
            yield int(step), folder


def step_of(run: Checkpointer, path: str) -> str:
    """The path of a step that is requested by the Trainer's name for it, such as by a program that
    builds it from a number; any other path unchanged."""
    name, folder = os.path.basename(path.rstrip("/")), os.path.dirname(path.rstrip("/"))
    number = name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")
    if number == name or not number.isdecimal() or os.path.isfile(f"{path}/{TRAINER_STATE_NAME}"):
        return path
    step = run.path(int(number))
    is_here = os.path.realpath(folder) == os.path.realpath(os.path.dirname(step))
    return step if is_here and int(number) in run.steps() else path


def foreign(output_dir: str) -> str:
    """The newest checkpoint that the Trainer itself saved.

    Raises:
        ValueError: there is none.
    """
    entries = [entry for entry in folders(output_dir) if (entry[1] / TRAINER_STATE_NAME).is_file()]
    if not entries:
        raise ValueError(
            f"No valid checkpoint found in output directory ({output_dir}), and "
            "resume_from_checkpoint=True requires one"
        )
    return str(max(entries)[1])


def agreed(value: Any) -> Any:
    """The value of process 0; all call this."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]
