"""A Trainer with UnickptMixin, or with a UnickptCallback."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from support.processes import Processes

import unickpt

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.trainers,
    pytest.mark.filterwarnings("ignore:.*mtime may not be reliable.*:UserWarning"),
]

from transformers import (  # noqa: E402
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from unickpt.integrations.transformers import UnickptCallback, UnickptMixin  # noqa: E402

EXAMPLE = Path(TESTS).parent.joinpath("examples", "hf_trainer.py").read_text()
RANKS = EXAMPLE + "\nfor each in trainer.state.log_history[:-1]:\n    print(json.dumps(each))\n"
RANKS = RANKS.replace("import os\n", "import json\nimport os\n", 1)

# accelerate makes no FSDP2 on the CPU; torch does.
SHARDED = RANKS.replace(
    "    pass\n",
    """    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        from accelerate import DistributedType, FullyShardedDataParallelPlugin
        state = self.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"],
        )
        self.is_fsdp_enabled = True
""",
    1,
)


class MyTrainer(UnickptMixin, Trainer):  # type: ignore[misc, unused-ignore]
    pass


class Stop(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Ends a training in the middle."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


def make(folder: Path, kind: Any = MyTrainer, stop: int = 10**6, **arguments: Any) -> Any:
    """A Trainer of 3 epochs of 4 steps, with dropout."""
    own = {name: arguments.pop(name) for name in ("checkpointer", "hf_files") if name in arguments}
    callbacks = [Stop(stop), *arguments.pop("callbacks", [])]
    torch.manual_seed(0)
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    model = GPT2LMHeadModel(GPT2Config(**sizes, loss_type="ForCausalLM"))
    texts = torch.randint(0, 16, (16, 6), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": text, "labels": text} for text in texts]
    settings = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
        "learning_rate": 0.01,
        "save_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    args = TrainingArguments(str(folder), **(settings | arguments))
    data_of = {"train_dataset": data, "eval_dataset": data[:4]}
    return kind(model, args, callbacks=callbacks, **data_of, **own)


def losses(trainer: Any) -> list[tuple[int, float, float]]:
    logs = [each for each in trainer.state.log_history if "loss" in each]
    return [(each["step"], each["loss"], each["grad_norm"]) for each in logs]


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.model.parameters(), other.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A training that nothing interrupts, by the Trainer alone."""
    trainer = make(tmp_path_factory.mktemp("whole"), Trainer, save_strategy="no")
    trainer.train()
    return trainer


@pytest.mark.parametrize("stop", [6, 8], ids=["within an epoch", "between epochs"])
def test_a_training_goes_on_as_if_it_had_not_stopped(tmp_path: Path, whole: Any, stop: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, stop=stop).train()
    trainer = make(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(whole)
    assert same(trainer, whole)
    assert trainer.state.total_flos == whole.state.total_flos
    assert unickpt.Checkpointer(tmp_path).steps() == list(range(1, 13))
    for step in (1, 12):
        unickpt.verify(tmp_path / f"step_{step}")


def test_a_callback_saves_into_a_run_of_its_own(tmp_path: Path, whole: Any) -> None:
    def train(stop: int) -> Any:
        run = unickpt.Checkpointer("memory://hf/callback", save_every=3, keep_last=2)
        callback = UnickptCallback(run, save_epochs=1)
        arguments = {"callbacks": [callback], "save_strategy": "no", "stop": stop}
        trainer = make(tmp_path / "unused", Trainer, **arguments)
        try:
            callback.train(trainer)
        finally:
            run.close()
        return trainer, run

    with pytest.raises(KeyboardInterrupt):
        train(7)
    trainer, run = train(10**6)
    assert losses(trainer) == losses(whole)
    assert same(trainer, whole)
    assert run.steps() == [9, 12]
    assert not list((tmp_path / "unused").glob("checkpoint-*"))


def test_a_callback_needs_its_own_call(tmp_path: Path) -> None:
    callback = UnickptCallback(unickpt.Checkpointer("memory://hf/alone"))
    with pytest.raises(ValueError, match=r"callback\.train"):
        make(tmp_path, Trainer, callbacks=[callback], save_strategy="no").train()
    with pytest.raises(ValueError, match="save_strategy='steps'"):
        callback.train(make(tmp_path, Trainer, callbacks=[callback]))
    with pytest.raises(ValueError, match="lacks this callback"):
        callback.train(make(tmp_path, Trainer, save_strategy="no"))


@pytest.mark.parametrize("limit", [1, 3])
def test_the_limit_spares_the_best_step_which_is_loaded_at_the_end(
    tmp_path: Path, limit: int
) -> None:
    kept: list[list[int]] = []

    class Best(MyTrainer):
        """The loss of the evaluation after step 4 is the best."""

        def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
            step = self.state.global_step
            if step == 4:
                self.best = [p.clone() for p in self.model.parameters()]
            return {"eval_loss": abs(step - 4.0)}

        def _save_checkpoint(self, *args: Any) -> None:
            super()._save_checkpoint(*args)
            self._checkpointer.wait()
            kept.append(self._checkpointer.steps())

    arguments = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    trainer = make(tmp_path, Best, save_total_limit=limit, **arguments)
    trainer.train()
    expected = {1: [[1], [2], [3], [4], [4, 5], [4, 6]], 3: [[1, 2, 3], [2, 3, 4], [3, 4, 5]]}
    assert kept[: len(expected[1])] == expected[1] if limit == 1 else True
    assert kept[-1] == ([4, 12] if limit == 1 else [4, 11, 12])
    if limit == 3:
        assert kept[2:5] == expected[3]
    assert trainer.state.best_model_checkpoint.endswith("step_4")
    for found, best in zip(trainer.model.parameters(), trainer.best, strict=True):
        assert torch.equal(found, best)


def test_hf_files_are_written_beside_it_and_removed_with_their_steps(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-1").mkdir()  # of somebody else
    arguments = {"hf_files": True, "save_steps": 4, "save_total_limit": 2}
    trainer = make(tmp_path, **arguments)
    trainer.train()
    names = sorted(each.name for each in tmp_path.iterdir() if each.name.startswith("checkpoint"))
    assert names == ["checkpoint-1", "checkpoint-12", "checkpoint-8"]
    model = GPT2LMHeadModel.from_pretrained(tmp_path / "checkpoint-12")
    for found, expected in zip(model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(found, expected)
    stored = unickpt.load(tmp_path / "step_12", only="model/**")["model"]
    assert (stored["transformer.wte.weight"] == model.transformer.wte.weight.detach().numpy()).all()
    (tmp_path / "checkpoint-16").mkdir()
    more = make(tmp_path, num_train_epochs=4, **arguments)
    with pytest.raises(unickpt.CheckpointExists, match="checkpoint-16"):
        more.train(resume_from_checkpoint=True)


def test_a_resume_that_would_go_wrong_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No valid checkpoint found in output directory"):
        make(tmp_path).train(resume_from_checkpoint=True)
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, stop=3).train()
    with pytest.raises(unickpt.CheckpointExists, match="resume_from_checkpoint=True"):
        make(tmp_path).train()
    for name in ("step_2", "checkpoint-2"):  # the Trainer's name of it
        with pytest.raises(unickpt.errors.LaterStepsExist, match="drop_later_steps"):
            make(tmp_path).train(resume_from_checkpoint=str(tmp_path / name))
    with pytest.raises(unickpt.LoadMismatch, match=r"4 samples .* 8 now"):
        make(tmp_path, per_device_train_batch_size=4).train(resume_from_checkpoint=True)
    unickpt.save(tmp_path / "other", {"w": torch.ones(2)})
    with pytest.raises(unickpt.LoadMismatch, match="no state of a Trainer"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "other"))
    with pytest.raises(unickpt.CheckpointNotFound, match=r"find a valid checkpoint at .*9"):
        make(tmp_path).train(resume_from_checkpoint=str(tmp_path / "step_9"))


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        ("save_only_model", {"save_only_model": True}),
        ("save_on_each_node", {"save_on_each_node": True}),
        ("auto_find_batch_size", {"auto_find_batch_size": True}),
        ("save_total_limit", {"save_total_limit": 2, "checkpointer": "memory://hf/given"}),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tmp_path: Path, named: str, arguments: dict[str, Any]
) -> None:
    if "checkpointer" in arguments:
        arguments = arguments | {"checkpointer": unickpt.Checkpointer(arguments["checkpointer"])}
    with pytest.raises(ValueError, match=f"not supported: {named}"):
        make(tmp_path, **arguments)


@pytest.mark.parametrize("source", [RANKS, SHARDED], ids=["ddp", "fsdp2"])
def test_a_killed_job_goes_on_with_another_number_of_ranks(
    processes: Processes, tmp_path: Path, source: str
) -> None:
    assert len(EXAMPLE.splitlines()) <= 40
    folder = tmp_path / "run"
    job = processes.torch(2, source, folder, 10**6)
    newest: Callable[[], int | None] = unickpt.Checkpointer(folder).latest
    while (newest() or 0) < 5:
        assert all(process.poll() is None for process in job), job[0].communicate()
        time.sleep(0.05)
    for process in job:
        process.send_signal(signal.SIGKILL)
    for process in job:
        process.wait()
    last = newest() or 0
    # Read back and compared: one whole checkpoint of what was sharded.
    unickpt.convert(folder / f"step_{last}", tmp_path / "back", to="trainer")
    reference = processes.start(RANKS, tmp_path / "reference", last + 4)
    found = logged(processes.finish([processes.start(RANKS, folder, last + 4)])[0])
    expected = logged(processes.finish([reference])[0])
    assert list(found) == list(range(1, last + 5))
    for step, loss in found.items():  # ranks add gradients in another order
        assert loss == pytest.approx(expected[step], rel=0.02), step


def logged(output: str) -> dict[int, float]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"')]
    return {each["step"]: each["loss"] for each in lines if "loss" in each}
