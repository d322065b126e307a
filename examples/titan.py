"""torchrun --nproc-per-node 4 examples/titan.py runs/llama 20, in a clone of torchtitan

Started again, on any number of ranks, it goes on."""

import gc
import sys

import torch
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.tools.logging import init_logger

from unickpt.integrations.torchtitan import CheckpointManager  # instead of torchtitan's


def train(folder, steps):
    init_logger()
    config = llama3_debugmodel()
    config.dump_folder, config.training.steps = folder, steps
    config.checkpoint = CheckpointManager.Config(
        enable=True,
        interval=2,
        keep_latest_k=3,
        async_mode="async_with_pinned_mem",
        last_save_model_only=False,
    )
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()


train(sys.argv[1], int(sys.argv[2]))
gc.collect()  # frees the model first: see "terminate called" in docs/troubleshooting.md
torch.distributed.destroy_process_group()
