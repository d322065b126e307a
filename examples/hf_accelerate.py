"""accelerate launch --cpu --num_processes 2 examples/hf_accelerate.py runs/net 100

save_state and load_state of unickpt. Started again, on any number of processes, it goes on."""

import os
import sys
from contextlib import suppress

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration

from unickpt.integrations.accelerate import load_state, save_state_async

folder, steps, world = sys.argv[1], int(sys.argv[2]), int(os.environ.get("WORLD_SIZE", 1))
names = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=3)
seeded = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7)
accelerator = Accelerator(cpu=True, project_config=names, dataloader_config=seeded)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
batches = torch.utils.data.DataLoader(data, 8 // world, shuffle=True)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
with suppress(FileNotFoundError):
    load_state(accelerator)
step = accelerator.save_iteration  # one is saved after each step
while step < steps:
    batches.set_epoch(step // len(batches))
    for batch in accelerator.skip_first_batches(batches, step % len(batches)):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        save_state_async(accelerator)  # its name is the next number
        step += 1
        accelerator.print(f"step {step} {accelerator.reduce(loss, 'mean'):.5f}", flush=True)
        if step == steps:
            break
accelerator.end_training()
