"""A Trainer with PublishWeights: an engine follows its weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import unickpt
from unickpt.plugins.weights import Follower, Publisher

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytestmark = [pytest.mark.integration, pytest.mark.plugins]  # imports them

from unickpt.integrations.transformers import PublishWeights  # noqa: E402


def new_model() -> Any:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


class Watch(transformers.TrainerCallback):  # type: ignore[misc]
    """Keeps the weights at the start, and after each step."""

    def __init__(self) -> None:
        self.weights: dict[int, Mapping[str, Any]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        weights = kwargs["model"].state_dict()
        self.weights[state.global_step] = {name: each.clone() for name, each in weights.items()}

    on_step_end = on_train_begin


def train(tmp_path: Path, publisher: Publisher, every: int = 1, **arguments: Any) -> Any:
    text, watch = torch.arange(6), Watch()
    settings = transformers.TrainingArguments(
        str(tmp_path / "trainer"), max_steps=5, report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False, learning_rate=0.1,
        **{"save_strategy": "no", **arguments},
    )  # fmt: skip
    trainer = transformers.Trainer(
        new_model(),
        settings,
        train_dataset=[{"input_ids": text, "labels": text}] * 64,
        callbacks=[watch, PublishWeights(publisher, every=every)],
    )
    return trainer, watch.weights


def check(root: Path, version: int, expected: Mapping[str, Any]) -> None:
    served = new_model()
    with Follower(root, served) as follower:
        follower.rollback(version)
        assert follower.check().ok
    weights = served.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(("every", "versions"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4, 5])])
def test_versions_are_steps(tmp_path: Path, every: int, versions: list[int]) -> None:
    with Publisher(tmp_path / "weights") as publisher:
        trainer, weights = train(tmp_path, publisher, every)
        trainer.train()
        assert publisher.versions() == versions
    for version in versions:
        check(tmp_path / "weights", version, weights[version])


def test_a_run_that_starts_again_publishes_higher_versions(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    for resumes in (None, tmp_path / "trainer" / "checkpoint-3"):
        with Publisher(root) as publisher:
            trainer, weights = train(tmp_path, publisher, save_strategy="steps", save_steps=3)
            trainer.train(resume_from_checkpoint=resumes and str(resumes))
    assert unickpt.Checkpointer(root).steps() == [*range(9)]
    steps = [unickpt.open(root / f"step_{v}").metadata["step"] for v in (5, 6, 7, 8)]
    assert steps == [5, 3, 4, 5]
    check(root, 6, weights[3])
    check(root, 8, weights[5])


def test_what_cannot_be_published_is_refused(tmp_path: Path) -> None:
    with Publisher(tmp_path / "weights") as publisher:
        with pytest.raises(ValueError, match="every=0"):
            PublishWeights(publisher, every=0)
        trainer, _ = train(tmp_path, publisher)
        trainer.model.transformer.wte.weight.ds_tensor = "of ZeRO 3"
        with pytest.raises(ValueError, match="use ZeRO 2, or FSDP2"):
            trainer.train()
        assert publisher.versions() == []
