"""accelerate's loop with `save_state_async`, on one process or several with DDP."""

import os
from contextlib import suppress

import target
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

import unickpt
from unickpt.integrations.accelerate import load_state, save_state_async

names = ProjectConfiguration(
    target.FOLDER, automatic_checkpoint_naming=True, total_limit=target.KEPT
)
accelerator = Accelerator(cpu=True, project_config=names)
torch.manual_seed(0)
layers = torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
model = torch.nn.Sequential(*layers)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
with suppress(FileNotFoundError):
    if not target.OWN:
        load_state(accelerator)
    elif saved := sorted(os.listdir(os.path.join(target.FOLDER, "checkpoints"))):
        names.iteration = int(saved[-1].rpartition("_")[2]) + 1
        accelerator.load_state()
# The first is checkpoint_0.
options = unickpt.SaveOptions(metrics=lambda report: target.committed(report, 1))
target.resumed(accelerator.save_iteration)
for step in range(accelerator.save_iteration, target.STEPS):
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    accelerator.backward(model(data.chunk(target.WORLD)[target.RANK]).square().mean())
    optimizer.step()
    if target.OWN:
        accelerator.save_state()
        target.committed(step + 1)
    else:
        saving = save_state_async(accelerator, options=options)
        if step + 1 == target.STEPS:
            saving.result()
target.ended(target.whole(model))
accelerator.end_training()
