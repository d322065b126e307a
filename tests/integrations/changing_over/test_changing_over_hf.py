"""Jobs of Hugging Face's Trainer and of accelerate change over after they were killed, and, killed
again, back by an export; the result is that of a job that nobody interrupted, and never knew us."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.forks import Forks
from support.processes import free_port

import unickpt

pytest.importorskip("transformers")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.integration, pytest.mark.trainers]

# Each does 8 steps; "killed" dies in the third, "ours" in the sixth if it is told so.
BEGIN = """
import json, os, signal, sys, time
mode, folder, out, rank, world, port = ARGS
os.environ["OMP_NUM_THREADS"] = "1"
if world > 1:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
import numpy as np, torch
torch.set_num_threads(1)
torch.manual_seed(0)
# The Trainer asks torch for "cpu:0" on several processes, which it does not know.
torch.serialization.register_package(
    0, lambda storage: None, lambda storage, at: storage if at.startswith("cpu") else None
)
def end(model):
    if rank == 0:
        np.savez(out, *[p.detach().numpy() for p in model.parameters()])
def die(committed=None):
    while committed is not None and not os.path.exists(committed):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
TRAINER = """
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
class Die(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        self.first = state.global_step
        assert state.global_step == {"ours": 2, "back": 4}.get(mode, 0), state.global_step
    def on_step_begin(self, args, state, control, **kwargs):
        if (mode, state.global_step) == ("killed", 2):
            die()
        if (mode, state.global_step) == ("ours", 5):
            die(f"{folder}/step_4/manifest.ocdbt")
Mine = Trainer
if mode == "ours":
    from unickpt.integrations.transformers import UnickptMixin
    class Mine(UnickptMixin, Trainer):
        pass
sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
model = GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM"))  # ties, and drops out
texts = torch.randint(0, 16, (32, 6), generator=torch.Generator().manual_seed(1))
arguments = TrainingArguments(
    folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=8,
    learning_rate=0.01, save_steps=2, logging_steps=1, report_to=[], use_cpu=True,
    disable_tqdm=True, dataloader_pin_memory=False,
    save_strategy="no" if mode == "whole" else "steps",
)
data = [{"input_ids": text, "labels": text} for text in texts]
trainer = Mine(model, arguments, train_dataset=data, callbacks=[Die()])
trainer.train(resume_from_checkpoint=mode in ("ours", "back"))
end(trainer.model)
logs = [each for each in trainer.state.log_history if "loss" in each]
print(json.dumps([(each["step"], each["loss"], each["grad_norm"]) for each in logs]))
"""
ACCELERATE = """
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
class Seen:
    losses = []
    def state_dict(self):
        return {"losses": self.losses, "last": torch.tensor(self.losses[-1:])}
    def load_state_dict(self, state):
        self.losses = list(state["losses"])
        assert state["last"].tolist() == [torch.tensor(self.losses[-1]).item()]
saved = {"back": 1, "ours": 1}.get(mode, 0)  # how many are there
names = ProjectConfiguration(folder, automatic_checkpoint_naming=True, iteration=saved)
accelerator = Accelerator(cpu=True, project_config=names)
def save():
    accelerator.save_state()
if mode == "ours":
    from unickpt.integrations.accelerate import load_state, save_state
    def save():
        save_state(accelerator)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(), torch.nn.Linear(6, 2))
ema, seen = torch.nn.Linear(2, 2), Seen()
optimizer = torch.optim.AdamW(
    [{"params": model[2].parameters(), "lr": 0.02}, {"params": model[0].parameters()}], lr=0.1
)
schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], 0.5)
own = torch.Generator()  # else iterating draws from the one of dropout
batches = torch.utils.data.DataLoader(torch.randn(16 * world, 4), 2, generator=own)
model, optimizer, schedule, batches = accelerator.prepare(model, optimizer, schedule, batches)
accelerator.register_for_checkpointing(seen, ema)
if mode == "ours":
    load_state(accelerator)
if mode == "back":
    accelerator.load_state()
first = len(seen.losses)
assert first == {"ours": 2, "back": 4}.get(mode, 0), first
for step, batch in enumerate(accelerator.skip_first_batches(batches, first), first + 1):
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
    seen.losses.append(accelerator.reduce(loss.detach(), "mean").item())
    torch.nn.init.constant_(ema.weight, seen.losses[-1])
    if (mode, step) in (("killed", 3), ("ours", 6)):
        die()
    if mode != "whole" and step % 2 == 0:
        save()
end(torch.nn.ModuleList([model, ema]))
print(json.dumps(seen.losses))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    imports = "unickpt.integrations.transformers", "unickpt.integrations.accelerate"
    forks = Forks(tmp_path_factory.mktemp("out"), *imports)
    yield forks
    forks.close()


def run(server: Forks, source: str, mode: str, folder: Path, world: int) -> tuple[list[int], str]:
    """The exit codes of a job's processes, and the last line of the first one."""
    port, out = free_port(), folder.parent / f"{mode}.npz"
    ranks = [
        server.start(BEGIN + source, mode, str(folder), str(out), rank, world, port)
        for rank in range(world)
    ]
    ended = server.wait_all(ranks)
    killed = -signal.SIGKILL in [each.code for each in ended]
    assert killed or not any(each.code for each in ended), [each.out for each in ended]
    return [each.code for each in ended], "" if killed else json.dumps(ended[0].last)


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("kind", ["trainer", "accelerate"])
def test_a_killed_job_changes_over_and_back(
    server: Forks, tmp_path: Path, kind: str, world: int
) -> None:
    source = {"trainer": TRAINER, "accelerate": ACCELERATE}[kind]
    saved, back = {
        "trainer": ("step_4", "checkpoint-4"),
        "accelerate": ("checkpoints/checkpoint_1", "checkpoints/checkpoint_0"),
    }[kind]
    _, expected = run(server, source, "whole", tmp_path / "whole", world)
    assert set(run(server, source, "killed", tmp_path / "run", world)[0]) == {-signal.SIGKILL}
    assert set(run(server, source, "ours", tmp_path / "run", world)[0]) == {-signal.SIGKILL}
    unickpt.convert(tmp_path / "run" / saved, tmp_path / "back" / back, to=kind)
    _, found = run(server, source, "back", tmp_path / "back", world)
    assert found == expected
    with np.load(tmp_path / "whole.npz") as whole, np.load(tmp_path / "back.npz") as ours:
        assert len(whole.files) > 3
        for name in whole.files:
            assert np.array_equal(ours[name], whole[name])
