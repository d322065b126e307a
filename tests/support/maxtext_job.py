"""A job of MaxText: its own train loop, with a tiny model, on CPUs.

    maxtext_job.py WAY FOLDER STEPS DIE [NAME=VALUE ...]

WAY is "ours" or "theirs" (Orbax). At step DIE the process, of several the last one, kills itself,
right after it has begun to save; -1 for never. The rest are settings of MaxText's configuration;
`dataset_type=grain` reads a file of tokens, which is written first. Prints a line `loss STEP HEX`
for each step. JAX_AT, JAX_WORLD and JAX_ID tell which of several processes this is.
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
GRAIN = {
    "grain_file_type": "arrayrecord",
    "tokenize_train_data": False,
    "tokenizer_type": "sentencepiece",
    "grain_worker_count": 0,
    "packing": False,
}


def main(way: str, folder: str, steps: str, die: str, *settings: str) -> None:
    logging.disable(logging.WARNING)
    if "JAX_AT" in os.environ:
        join(os.environ["JAX_AT"], int(os.environ["JAX_WORLD"]), int(os.environ["JAX_ID"]))
    if way == "ours":
        from unickpt.integrations import maxtext

        maxtext.install()
    from maxtext.common import checkpointing
    from maxtext.trainers.pre_train import train

    save = checkpointing.maybe_save_checkpoint

    def dying(manager: Any, state: Any, config: Any, data: Any, step: Any = None) -> None:
        save(manager, state, config, data, step)
        is_last = int(os.environ.get("JAX_ID", 0)) == int(os.environ.get("JAX_WORLD", 1)) - 1
        if is_last and step is not None and int(step) == int(die):
            sys.stdout.flush()
            os.kill(os.getpid(), signal.SIGKILL)

    checkpointing.maybe_save_checkpoint = dying
    with tempfile.TemporaryDirectory() as metrics:
        file = Path(metrics, "metrics.json")
        given = {**SETTINGS, "base_output_directory": folder, "steps": steps, "metrics_file": file}
        given |= dict(each.split("=", 1) for each in settings)
        if given["dataset_type"] == "grain":
            given = {**tokens(Path(folder, "tokens")), **given}
        argv = ["train", *(f"{name}={value}" for name, value in given.items())]
        train.main(argv)
        for line in file.read_text().splitlines() if file.exists() else ():
            found = json.loads(line)
            print("loss", int(found["step"]), float(found["learning/loss"]).hex())


def join(at: str, world: int, process: int) -> None:
    """Joins the other processes; MaxText finds `jax.distributed` initialised."""
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(at, world, process)


def tokens(path: Path) -> dict[str, Any]:
    """Settings to read a file of tokens with Grain; it is the same in each folder."""
    import maxtext
    from array_record.python.array_record_module import ArrayRecordWriter
    from maxtext.input_pipeline.protos import example_pb2

    own = path.with_name(f"tokens.{os.getpid()}")  # each process writes it
    own.parent.mkdir(parents=True, exist_ok=True)
    writer = ArrayRecordWriter(str(own), "group_size:1")
    for number in range(96):
        example = example_pb2.Example()
        values = [1 + (number * 7 + i * (1 + number % 5)) % 60 for i in range(16)]
        example.features.feature["text"].int64_list.value.extend(values)
        writer.write(example.SerializeToString())
    writer.close()
    own.rename(path)
    tokenizer = Path(str(maxtext.__file__)).parent / "assets" / "tokenizers" / "tokenizer.llama2"
    return {**GRAIN, "grain_train_files": path, "tokenizer_path": tokenizer}


if __name__ == "__main__":
    main(*sys.argv[1:])
