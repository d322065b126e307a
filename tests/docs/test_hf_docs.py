"""The examples of docs/integrations/{transformers,accelerate}.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from support import TESTS
from typer.testing import CliRunner

import unickpt
from unickpt.cli.app import app

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.integration  # imports them
PAGES = Path(TESTS).parent / "docs" / "integrations"


def snippets(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (PAGES / page).read_text(), re.S)


def exported(page: str, source: Path, to: Path) -> None:
    """What the command of a page makes of another source."""
    (command,) = re.findall(r"```sh\nunickpt export (.*?)\n```", (PAGES / page).read_text())
    _, _, *options = command.split()
    result = CliRunner().invoke(app, ["export", str(source), str(to), *options])
    assert result.exit_code == 0, result.output


def names(folder: Path, **arguments: Any) -> dict[str, Any]:
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 8}
    config = transformers.GPT2Config(**sizes, loss_type="ForCausalLM")
    text = torch.arange(6)
    settings = transformers.TrainingArguments(
        str(folder),
        max_steps=2,
        report_to=[],
        use_cpu=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    return {
        "model": transformers.GPT2LMHeadModel(config),
        "arguments": settings,
        "data": [{"input_ids": text, "labels": text}] * 16,
        "root": folder / "run",
    }


def test_the_trainer(tmp_path: Path) -> None:
    by_mixin, by_callback = snippets("transformers.md")
    exec(by_mixin, names(tmp_path, save_steps=1))
    assert unickpt.Checkpointer(tmp_path).steps() == [1, 2]
    exported("transformers.md", tmp_path / "step_1", tmp_path / "back" / "checkpoint-1")
    own = transformers.Trainer(args=(made := names(tmp_path / "back"))["arguments"],
                               model=made["model"], train_dataset=made["data"])  # fmt: skip
    own.train(resume_from_checkpoint=True)
    assert own.state.global_step == 2
    exec(by_callback, names(tmp_path, save_strategy="no"))
    assert unickpt.Checkpointer(tmp_path / "run").steps() == [2]


def test_accelerate(tmp_path: Path) -> None:
    (snippet,) = snippets("accelerate.md")
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare(torch.nn.Linear(2, 3))
    exec(snippet, {"accelerator": accelerator, "path": tmp_path / "c"})
    stored = unickpt.load(tmp_path / "c")["models"][0]["weight"]
    assert (stored == model.weight.detach().numpy()).all()
    exported("accelerate.md", tmp_path / "c", tmp_path / "back")
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "back"))
    assert (stored == model.weight.detach().numpy()).all()
