"""SGLang's models, loaded by its model loaders: parameters from any checkpoint through rules beside
those that SGLang's own loader makes of a safetensors folder. No engine starts; see rank_job.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
import transformers
from support import TESTS

import unickpt
from unickpt import Rules

pytestmark = [pytest.mark.integration, pytest.mark.plugins, pytest.mark.timeout(600)]
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32}
SIZES |= {"vocab_size": 120, "num_key_value_heads": 2, "intermediate_size": 96}


def new_model(tied: bool) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)
    )


def loaded(tmp_path: Path, model: Path, size: int, **extra: Any) -> list[dict[str, Any]]:
    """What rank_job.py stores, for each rank."""
    plugin = tmp_path / "plugin" / "unickpt_for_sglang-0.dist-info"
    plugin.mkdir(parents=True, exist_ok=True)
    (plugin / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: unickpt-for-sglang\nVersion: 0\n"
    )
    entry = "[sglang.srt.plugins]\nunickpt_here = unickpt.integrations.sglang:register\n"
    (plugin / "entry_points.txt").write_text(entry)
    (tmp_path / "extra.json").write_text(json.dumps(extra))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(Path(TESTS).parent), str(plugin.parent)])
    job = Path(__file__).with_name("rank_job.py")
    results = [tmp_path / f"rank_{rank}.pt" for rank in range(size)]
    places = [model, tmp_path / "extra.json"]
    processes = [
        subprocess.Popen(
            [sys.executable, job, *map(str, [rank, size, port, *places, out])],
            env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, out in enumerate(results)
    ]
    outputs = [process.communicate(timeout=300)[0] for process in processes]
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output[-6000:]
    return [torch.load(out) for out in results]


def configuration(model: Any, folder: Path) -> Path:
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    return folder


@pytest.mark.parametrize(("size", "tied"), [(1, False), (2, False), (2, True)])
def test_parameters_from_a_checkpoint_of_jax_are_those_of_sglangs_loader(
    tmp_path: Path, size: int, tied: bool
) -> None:
    model = new_model(tied)
    model.save_pretrained(tmp_path / "hf")
    unickpt.save(tmp_path / "torch", dict(model.state_dict()))
    rules = Rules.preset("transformers-llama").inverse
    unickpt.convert(tmp_path / "torch", tmp_path / "jax", rules=rules)
    files = sorted((tmp_path / "jax").rglob("*"))
    settings = {"path": str(tmp_path / "jax"), "rules": "transformers-llama"}
    folder = configuration(model, tmp_path / "configuration")
    ours = loaded(tmp_path, folder, size, unickpt=settings)
    theirs = loaded(tmp_path, tmp_path / "hf", size)
    assert sorted((tmp_path / "jax").rglob("*")) == files
    for rank, expected in zip(ours, theirs, strict=True):
        assert (rank["loader"], expected["loader"]) == ("SGLangLoader", "DefaultModelLoader")
        assert rank["parameters"].keys() == expected["parameters"].keys()
        for name, tensor in expected["parameters"].items():
            assert torch.equal(rank["parameters"][name], tensor), name


def test_what_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    model = new_model(False)
    state = dict(model.state_dict())
    del state["model.layers.1.self_attn.k_proj.weight"]
    unickpt.save(tmp_path / "checkpoint", state)
    folder = configuration(model, tmp_path / "configuration")
    settings = {"path": str(tmp_path / "checkpoint")}
    (result,) = loaded(tmp_path, folder, 1, unickpt=settings)
    assert result["error"].startswith("LoadMismatch: ")
    assert "does not fill model.layers.1.self_attn.qkv_proj.weight of Llama" in result["error"]
