"""litgpt 0.5.13: `convert_hf_checkpoint` and `convert_lit_checkpoint`, from files to files."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.scripts.convert_hf_checkpoint import convert_hf_checkpoint
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from litgpt.utils import save_config
from safetensors.torch import save_file

from benchmarks.zoo.conversion import Conversion

Function = Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]

NAMES = (
    "pythia-160m", "stablelm-base-alpha-3b", "stablelm-3b-4e1t", "stablecode-completion-alpha-3b",
    "stable-code-3b", "falcon-7b", "falcon-40b", "Falcon3-1B-Base", "open_llama_3b",
    "Llama-2-7b-hf", "Llama-3-8B", "Llama-3.1-8B", "Llama-3.2-1B",
    "Llama-3.1-Nemotron-70B-Instruct-HF", "CodeLlama-7b-hf", "LLaMA-2-7B-32K", "FreeWilly2",
    "Platypus-30B", "Camel-Platypus2-13B", "Stable-Platypus2-13B", "Mistral-7B-v0.1",
    "Mathstral-7B-v0.1", "Mixtral-8x7B-v0.1", "tiny-llama-1.1b", "micro-llama-300M",
    "Llama-2-7b-chat-hf-function-calling-v2", "SmolLM2-135M", "salamandra-2b",
    "R1-Distill-Llama-8B", "OLMo-1B-hf", "OLMo-2-1124-7B", "Gemma-2b", "CodeGemma-7b-it",
    "Gemma-2-2b", "Gemma-3-1b-it", "Gemma-3-4b-it", "phi-1_5", "phi-2",
    "Phi-3-mini-4k-instruct", "Phi-3.5-mini-instruct", "phi-4", "Phi-4-reasoning",
    "Phi-4-mini-instruct", "Qwen2.5-0.5B", "Qwen2.5-Coder-0.5B", "Qwen2.5-Math-1.5B", "QwQ-32B",
    "Qwen3-0.6B", "Qwen3-30B-A3B",
)  # fmt: skip
"""One model of each family, as litgpt calls them."""


def conversions() -> Iterator[Conversion]:
    """All of them, in both directions."""
    for name in NAMES:
        config = tiny(name)
        with torch.device("meta"):
            state = GPT(config).state_dict()
        lit = {key: tuple(x.shape) for key, x in state.items()}
        to_lit, to_hf = _to_lit(config), _to_hf(config)
        zeros = {key: torch.zeros(shape) for key, shape in lit.items()}
        try:
            hf = {key: tuple(x.shape) for key, x in to_hf(zeros).items()}
        except Exception:  # the runner says why
            hf = {}
        example = _of_torch(lit)
        yield Conversion(f"{name}/to-hf", to_hf, example, to_lit)
        if hf:
            yield Conversion(f"{name}/to-lit", to_lit, _of_torch(hf), to_hf)


def tiny(name: str) -> Config:
    """The configuration of a model, with as few and as different sizes as it allows."""
    full = Config.from_name(name)
    groups = full.n_query_groups
    heads = 6 if groups not in (1, full.n_head) else 3
    sizes: dict[str, Any] = {
        "n_layer": 3, "n_embd": 36 if full.head_size * full.n_head == full.n_embd else 30,
        "n_head": heads, "n_query_groups": heads if groups == full.n_head else min(groups, 2),
        "intermediate_size": 44, "padded_vocab_size": 53, "block_size": 8,
    }  # fmt: skip
    sizes["head_size"] = 36 // heads if sizes["n_embd"] == 36 else 8
    if full.n_expert:
        sizes |= {"n_expert": 5, "n_expert_per_token": 2}
    if full.moe_intermediate_size:
        sizes["moe_intermediate_size"] = 14
    if full.sliding_window_indices is not None:
        sizes["sliding_window_indices"] = full.sliding_window_indices[:3]
    if full.rope_indices is not None:
        sizes["rope_indices"] = full.rope_indices[:3]
    return Config.from_name(name, **sizes)


def _of_torch(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}


def _to_lit(config: Config) -> Function:
    def to_lit(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            path = Path(folder) / config.name
            path.mkdir()
            whole = {name: x.contiguous().clone() for name, x in state.items()}
            save_file(whole, str(path / "model.safetensors"))
            with mock.patch.object(Config, "from_name", return_value=config):
                convert_hf_checkpoint(path, model_name=config.name)
            return _loaded(path / "lit_model.pth")

    return to_lit


def _to_hf(config: Config) -> Function:
    def to_hf(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder, _quiet():
            path = Path(folder)
            torch.save(dict(state), path / "lit_model.pth")
            save_config(config, path)
            convert_lit_checkpoint(path, path / "out")
            return _loaded(path / "out" / "model.pth")

    return to_hf


def _loaded(path: Path) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in torch.load(path, weights_only=True).items()}


def _quiet() -> contextlib.AbstractContextManager[Any]:
    stack = contextlib.ExitStack()
    stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
    stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
    return stack
