"""vLLM itself, on CPUs: tokens of an engine that loads any checkpoint and follows versions, beside
those of an engine that loads the same weights with vLLM's own loader."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import load_reports
import pytest

pytest.importorskip("vllm")

import torch
import transformers
from support import TESTS
from support.served_checkpoints import SAVES

import unickpt
from unickpt import Rules, SaveOptions
from unickpt.plugins.weights import Publisher

pytestmark = [
    pytest.mark.integration,
    pytest.mark.plugins,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # those of vLLM and what it imports
]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"vocab_size": 128, "num_key_value_heads": 2, "intermediate_size": 96}
MOE = {"moe_intermediate_size": 48, "num_experts": 4, "num_experts_per_tok": 2}


def new_model(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "moe":
        config = transformers.Qwen3MoeConfig(**SIZES, **MOE)
        return transformers.Qwen3MoeForCausalLM(config)
    sizes = SIZES | ({"intermediate_size": 9216} if kind == "large" else {})
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=kind == "tied")
    return transformers.LlamaForCausalLM(config)


def save_configuration(model: Any, folder: Path) -> str:
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    return str(folder)


def change(model: Any, every: int) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            elements = parameter.view(-1)[::every]
            elements.add_(torch.randn_like(elements) * 0.05)


def engine(tmp_path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs engine_job.py."""
    plugin = tmp_path / "plugin" / "unickpt_for_vllm-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text("Metadata-Version: 2.1\nName: unickpt-for-vllm\nVersion: 0\n")
    entry = "[vllm.general_plugins]\nunickpt_here = unickpt.integrations.vllm:register\n"
    entry += "unickpt_reports = load_reports:register\n"
    (plugin / "entry_points.txt").write_text(entry)
    reports = tmp_path / "reports"
    reports.mkdir(exist_ok=True)
    files = tmp_path / "settings.json", tmp_path / "results.json"
    files[0].write_text(json.dumps(settings))
    job = Path(__file__).with_name("engine_job.py")
    paths = os.pathsep.join([str(Path(TESTS).parent), str(plugin.parent), str(job.parent)])
    done = subprocess.run(
        [sys.executable, str(job), *map(str, files)],
        env={**os.environ, "PYTHONPATH": paths, load_reports.VARIABLE: str(reports)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-8000:]
    result: list[dict[str, Any]] = json.loads(files[1].read_text())
    return result


def tokens_of(model: Any) -> list[list[int]]:
    """The tokens of transformers."""
    prompts = torch.tensor([[1, 2, 3, i] for i in range(4)])
    with torch.no_grad():
        for _ in range(12):
            following = model(prompts).logits[:, -1].argmax(-1, keepdim=True)
            prompts = torch.cat([prompts, following], 1)
    return prompts[:, 4:].tolist()  # type: ignore[no-any-return]


def tokens_of_vllm(tmp_path: Path, model: Any, name: str) -> Any:
    """The tokens of vLLM's own loader."""
    model.save_pretrained(tmp_path / name)
    return engine(tmp_path, {"engine": {"model": str(tmp_path / name)}})[0]["tokens"]


def settings_of(tmp_path: Path, model: Any, size: int, **loader: Any) -> dict[str, Any]:
    return {
        "model": save_configuration(model, tmp_path / "configuration"),
        "load_format": "unickpt",
        "model_loader_extra_config": loader,
        "weight_transfer_config": {"backend": "unickpt"},
        "tensor_parallel_size": size,
    }


@pytest.mark.parametrize(("kind", "size"), [("llama", 1), ("llama", 2), ("tied", 1), ("large", 2)])
def test_an_engine_follows_versions_or_keeps_the_old_one(
    tmp_path: Path, kind: str, size: int
) -> None:
    model = new_model(kind)
    unickpt.save(tmp_path / "checkpoint", {"model": dict(model.state_dict()), "step": 7})
    root, expected = str(tmp_path / "weights"), [tokens_of(model)]
    options = SaveOptions(chunk_bytes=1 << (16 if kind == "large" else 12))
    with Publisher(root, options=options) as publisher:
        for version, every in enumerate([1, 50, 50]):
            change(model, every)
            publisher.publish(version, model).result()
            expected.append(tokens_of(model))
    assert tokens_of_vllm(tmp_path, model, "newest") == expected[3]
    fails: list[Any] = [{"version": 9}]
    if size > 1:
        fails = [[{"version": 2}, {"version": 9}], [{"version": 9}, {"version": 2}]]
    updates = [{"version": 0}, {"version": 1}, *fails, {"version": 2}, {"version": 1}]
    settings = settings_of(tmp_path, model, size, path=str(tmp_path / "checkpoint"), under="model")
    before, *seen = engine(tmp_path, {"engine": settings, "root": root, "updates": updates})
    assert before["tokens"] == expected[0]
    live = [0, 1, *[1] * len(fails), 2, 1]
    assert [state["tokens"] for state in seen] == [expected[1 + version] for version in live]
    assert len({str(state["tokens"]) for state in seen}) == 3
    for state, version in zip(seen, live, strict=True):
        assert [rank["version"] for rank in state["ranks"]] == [version] * size
        assert [rank["differing"] for rank in state["ranks"]] == [[]] * size
        assert state["weight_version"] == str(version)
    errors = [state["error"] for state in seen]
    assert [error is not None for error in errors] == [
        False,
        False,
        *[True] * len(fails),
        False,
        False,
    ]
    assert all("version 9 is not in" in error for error in errors[2 : 2 + len(fails)])


@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_serves_a_checkpoint_of_jax_through_rules(tmp_path: Path, size: int) -> None:
    model = new_model("llama")
    unickpt.save(tmp_path / "torch", dict(model.state_dict()))
    rules = Rules.preset("transformers-llama").inverse
    unickpt.convert(tmp_path / "torch", tmp_path / "jax", rules=rules)
    assert "model/layers/0/mlp/down_proj/kernel" in unickpt.open(tmp_path / "jax")
    files = [*tmp_path.rglob("*")]
    settings = settings_of(
        tmp_path, model, size, path=str(tmp_path / "jax"), rules="transformers-llama"
    )
    (state,) = engine(tmp_path, {"engine": settings})
    assert state["tokens"] == tokens_of(model)
    assert {f for f in tmp_path.rglob("*") if "jax" in f.parts} == {
        f for f in files if "jax" in f.parts
    }


@pytest.mark.parametrize("system", ["orbax", "megatron", "zero 3"])
def test_an_engine_serves_other_systems_and_each_rank_reads_its_slice(
    tmp_path: Path, system: str
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 2304, "vocab_size": 150}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | sizes))
    (tmp_path / "work").mkdir()
    loader = SAVES[system](model, tmp_path / "stored", tmp_path / "work")
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "stored").rglob("*")}
    settings = settings_of(tmp_path, model, 2, path=str(tmp_path / "stored"), **loader)
    (state,) = engine(tmp_path, {"engine": settings})
    assert state["tokens"] == tokens_of(model)
    assert {f: f.stat().st_mtime_ns for f in (tmp_path / "stored").rglob("*")} == files
    ranks = [load_reports.total(file) for file in (tmp_path / "reports").iterdir()]
    filled, read = ([rank[which] for rank in ranks] for which in ("filled", "read"))
    arrays = [*model.parameters()]
    whole = sum(array.nbytes for array in arrays)
    assert sum(filled) == whole + sum(array.nbytes for array in arrays if array.dim() == 1)
    assert min(filled) < max(filled), "vLLM gives the first rank more of the vocabulary"
    if system == "orbax":  # it compresses each array as one chunk here, which one rank reads
        assert sum(read) == whole
    else:
        assert read == filled


def test_an_engine_of_experts_is_served_but_cannot_follow_on_cpus(tmp_path: Path) -> None:
    model = new_model("moe")
    model.save_pretrained(tmp_path / "model")
    settings = settings_of(tmp_path, model, 2, path=str(tmp_path / "model"))
    train = {"engine": settings, "root": str(tmp_path / "weights")}
    (state,) = engine(tmp_path, train)
    assert state["tokens"] == tokens_of(model)
    assert "vLLM repacks or computes model.layers.0.mlp.experts.0" in state["error"]


def test_a_trainer_sends_versions(tmp_path: Path) -> None:
    model = new_model("llama")
    model.save_pretrained(tmp_path / "model")
    settings = settings_of(tmp_path, model, 1, path=str(tmp_path / "model"))
    train = {"engine": settings, "trains": str(tmp_path / "model"), "root": str(tmp_path / "w")}
    before, first, second = engine(tmp_path, train)
    expected = [tokens_of(model)]
    for version in range(2):
        unickpt.load(tmp_path / "w" / f"step_{version}", dict(model.state_dict()))
        expected.append(tokens_of(model))
    assert [before["tokens"], first["tokens"], second["tokens"]] == expected
    assert [first["weight_version"], second["weight_version"]] == ["0", "1"]
