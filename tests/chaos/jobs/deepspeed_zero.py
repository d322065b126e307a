"""DeepSpeed with `use_unickpt`, ZeRO 2."""

import deepspeed
import target
import torch

import unickpt
from unickpt.integrations.deepspeed import use_unickpt

target.join()
torch.manual_seed(0)
layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)
model = torch.nn.Sequential(*layers)
config = {
    "train_batch_size": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
    "steps_per_print": 10**9,
}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
if not target.OWN:
    saves = use_unickpt(engine, options=unickpt.SaveOptions(metrics=target.committed))
engine.load_checkpoint(target.FOLDER)
target.resumed(engine.global_steps)
while engine.global_steps < target.STEPS:
    data = torch.randn(8, 8, generator=torch.Generator().manual_seed(engine.global_steps))
    engine.backward(engine(data.chunk(target.WORLD)[target.RANK]).square().mean())
    engine.step()
    engine.save_checkpoint(target.FOLDER)
    if target.OWN:
        target.committed(engine.global_steps)
if not target.OWN:
    saves.wait()
target.ended(target.whole(engine.module))
target.leave()
