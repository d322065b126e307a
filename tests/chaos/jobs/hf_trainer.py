"""Hugging Face Trainer, on one process or several with DDP."""

import os

import target
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import unickpt
from unickpt.integrations.transformers import UnickptMixin


class Chaos(UnickptMixin, Trainer):
    pass


class Began(TrainerCallback):
    def on_train_begin(self, args, state, control, **_):
        target.resumed(state.global_step)

    def on_save(self, args, state, control, **_):
        if target.OWN:
            target.committed(state.global_step)


torch.manual_seed(0)
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "n_positions": 16}
model = GPT2LMHeadModel(GPT2Config(**sizes))
arguments = TrainingArguments(
    target.FOLDER,
    per_device_train_batch_size=4,
    max_steps=target.STEPS,
    save_steps=1,
    save_total_limit=target.KEPT if target.OWN else None,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
texts = torch.randint(0, 64, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": text, "labels": text} for text in texts]
os.makedirs(target.FOLDER, exist_ok=True)
common = {"args": arguments, "train_dataset": data, "callbacks": [Began()]}
options = unickpt.SaveOptions(metrics=target.committed)
run = unickpt.Checkpointer(target.FOLDER, keep_last=target.KEPT, options=options)
if target.OWN:
    Trainer(model, **common).train(
        resume_from_checkpoint=get_last_checkpoint(target.FOLDER) is not None
    )
else:
    Chaos(model, checkpointer=run, **common).train(resume_from_checkpoint=run.latest() is not None)
target.ended(target.whole(model))
