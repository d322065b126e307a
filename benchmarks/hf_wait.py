"""How long a training waits for the saving of Trainer and accelerate, and for unickpt in its place.

    python benchmarks/hf_wait.py                    # one process, a GPT-2 of 25 million parameters
    python benchmarks/hf_wait.py --width 128 --rounds 3

In each round both take a turn, in an order shuffled anew; a turn ends with its checkpoint complete
on the disk and removed. Medians of seconds. Round 0 warms up and is not counted.

Trainer: `_save_checkpoint`. accelerate: `save_state`; ours also as `save_state_async`.
all: until the checkpoint is complete and its files are flushed, which theirs leave to the system.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any


def main() -> None:
    """Runs the rounds and prints a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to save (default: a temporary folder)")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    times: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        turns = make_turns(options.width, Path(folder))
        for number in range(options.rounds + 1):
            for name in random.Random(number).sample(sorted(turns), len(turns)):
                seconds = turns[name](number)
                os.sync()
                if number:
                    times.setdefault(name, []).append(seconds)
    print(f"width {options.width}, {options.rounds} rounds, {os.cpu_count()} cores; medians")
    print(f"{'':24}{'waits':>10}{'all':>10}")
    for name in sorted(times):
        waits, everything = (statistics.median(c) for c in zip(*times[name], strict=True))
        print(f"{name:24}{waits:10.3f}{everything:10.3f}")


def make_turns(width: int, folder: Path) -> dict[str, Callable[[int], tuple[float, float]]]:
    """The contenders."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    import unickpt
    from unickpt.integrations import accelerate as ours
    from unickpt.integrations.transformers import UnickptMixin

    class MyTrainer(UnickptMixin, Trainer):  # type: ignore[misc, unused-ignore]
        pass

    config = GPT2Config(n_layer=6, n_head=8, n_embd=width, vocab_size=12_000, n_positions=64)
    text = torch.arange(16)
    data = [{"input_ids": text, "labels": text}] * 4

    def trained(kind: Any, name: str) -> Any:
        arguments = TrainingArguments(
            str(folder / name),
            max_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = kind(GPT2LMHeadModel(config), arguments, train_dataset=data)
        trainer.train()
        return trainer

    theirs, mine = trained(Trainer, "theirs"), trained(MyTrainer, "ours")
    run = unickpt.Checkpointer(folder / "run", keep_last=1)
    mine._checkpointer = run
    accelerator = theirs.accelerator

    def trainer_saves(trainer: Any) -> Callable[[int], tuple[float, float]]:
        def turn(number: int) -> tuple[float, float]:
            trainer.state.global_step = number + 1
            began = perf_counter()
            trainer._save_checkpoint(trainer.model, None)
            waits = perf_counter() - began
            if trainer is mine:
                run.wait()
            else:
                flush(folder / "theirs")
            everything = perf_counter() - began
            shutil.rmtree(folder / "theirs", ignore_errors=True)
            return waits, everything

        return turn

    def accelerate_saves(save: Callable[[str], Any]) -> Callable[[int], tuple[float, float]]:
        def turn(number: int) -> tuple[float, float]:
            path = str(folder / f"state_{number}")
            began = perf_counter()
            saved = save(path)
            waits = perf_counter() - began
            if isinstance(saved, unickpt.types.PendingSave):
                saved.result()
            elif not isinstance(saved, unickpt.types.SaveReport):
                flush(Path(path))
            everything = perf_counter() - began
            shutil.rmtree(path)
            return waits, everything

        return turn

    return {
        "Trainer": trainer_saves(theirs),
        "Trainer, unickpt": trainer_saves(mine),
        "accelerate": accelerate_saves(accelerator.save_state),
        "accelerate, unickpt": accelerate_saves(lambda p: ours.save_state(accelerator, p)),
        "accelerate, async": accelerate_saves(lambda p: ours.save_state_async(accelerator, p)),
    }


def flush(folder: Path) -> None:
    """Waits until the files in a folder are on the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


if __name__ == "__main__":
    main()
