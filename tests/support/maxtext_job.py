"""A job of MaxText: its own train loop, with a tiny model, on CPUs.

    maxtext_job.py WAY FOLDER STEPS DIE [NAME=VALUE ...]

WAY is "ours" or "theirs" (Orbax). At step DIE the process kills itself, right after it has begun to
save; -1 for never. The rest are settings of MaxText's configuration. Prints a line `loss STEP HEX`
for each step.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

SETTINGS = {
    "run_name": "run",
    "dataset_type": "synthetic",
    "hardware": "cpu",
    "skip_jax_distributed_system": True,
    "enable_checkpointing": True,
    "checkpoint_period": 2,
    "learning_rate_schedule_steps": 20,
    "base_emb_dim": 16,
    "base_mlp_dim": 32,
    "base_num_decoder_layers": 2,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_target_length": 16,
    "per_device_batch_size": 1,
    "attention": "dot_product",
    "enable_goodput_recording": False,
    "enable_tensorboard": False,
    "log_config": False,
}


def main(way: str, folder: str, steps: str, die: str, *settings: str) -> None:
    logging.disable(logging.WARNING)
    if way == "ours":
        from unickpt.integrations import maxtext

        maxtext.install()
    from maxtext.common import checkpointing
    from maxtext.trainers.pre_train import train

    save = checkpointing.maybe_save_checkpoint

    def dying(manager: Any, state: Any, config: Any, data: Any, step: Any = None) -> None:
        save(manager, state, config, data, step)
        if step is not None and int(step) == int(die):
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointing.maybe_save_checkpoint = dying
    with tempfile.TemporaryDirectory() as metrics:
        file = Path(metrics, "metrics.json")
        given = {**SETTINGS, "base_output_directory": folder, "steps": steps, "metrics_file": file}
        given |= dict(each.split("=", 1) for each in settings)
        argv = ["train", *(f"{name}={value}" for name, value in given.items())]
        train.main(argv)
        for line in file.read_text().splitlines():
            found = json.loads(line)
            print("loss", int(found["step"]), float(found["learning/loss"]).hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
