"""torchrun --nproc-per-node 2 examples/hf_trainer.py runs/gpt 100

A Trainer that saves into unickpt. Started again, on any number of processes, it goes on."""

import os
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import unickpt
from unickpt.integrations.transformers import UnickptMixin


class MyTrainer(UnickptMixin, Trainer):
    pass


folder, steps, world = sys.argv[1], int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", 1))
sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
no_dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # alike on any number of them
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(**sizes, **no_dropout))
arguments = TrainingArguments(
    folder,
    per_device_train_batch_size=8 // world,
    max_steps=steps,
    learning_rate=0.01,
    lr_scheduler_type="constant",
    save_steps=1,
    save_total_limit=3,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
texts = torch.randint(0, 32, (64, 8), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": text, "labels": text} for text in texts]
trainer = MyTrainer(model, arguments, train_dataset=data)
trainer.train(resume_from_checkpoint=unickpt.Checkpointer(folder).latest() is not None)
