"""A Llama or Qwen of transformers as checkpoints of other systems, in their layouts: what engines
serve."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orbax.checkpoint as ocp
import torch
import torch.distributed.checkpoint as dcp

import unickpt
from unickpt import Rules

RANKS = 4
"""Of the job that wrote with ZeRO 3."""


def to_unickpt(model: Any, path: Path, work: Path) -> dict[str, Any]:
    """A training state."""
    unickpt.save(path, {"model": dict(model.state_dict()), "step": 7})
    return {}


def to_hf(model: Any, path: Path, work: Path) -> dict[str, Any]:
    model.save_pretrained(path)
    return {}


def to_orbax(model: Any, path: Path, work: Path) -> dict[str, Any]:
    """The Flax class's layout, by Orbax."""
    state = jax_state(model, work)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)
    return {"rules": "transformers-llama"}


def jax_state(model: Any, work: Path) -> Any:
    unickpt.save(work / "torch", dict(model.state_dict()))
    rules = Rules.preset("transformers-llama").inverse
    unickpt.convert(work / "torch", work / "jax", rules=rules)
    return unickpt.load(work / "jax")


def to_megatron(model: Any, path: Path, work: Path) -> dict[str, Any]:
    """Megatron-Core's torch_dist, by torch's DCP: layers stacked, queries, keys and values one
    matrix."""
    config, state = model.config, model.state_dict()
    groups, width = config.num_key_value_heads, config.head_dim
    repeats = config.num_attention_heads // groups
    layers = range(config.num_hidden_layers)

    def stacked(name: str) -> torch.Tensor:
        return torch.stack([state[f"model.layers.{layer}.{name}.weight"] for layer in layers])

    def grouped(name: str, heads: int) -> torch.Tensor:
        part = stacked(f"self_attn.{name}_proj")
        return part.view(len(layers), groups, heads * width, -1)

    qkv = torch.cat([grouped("q", repeats), grouped("k", 1), grouped("v", 1)], 2)
    saved = {
        "embedding.word_embeddings.weight": state["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": state["model.norm.weight"],
        "decoder.layers.self_attention.linear_qkv.weight": qkv.flatten(1, 2),
        "decoder.layers.self_attention.linear_proj.weight": stacked("self_attn.o_proj"),
        "decoder.layers.mlp.linear_fc1.weight": torch.cat(
            [stacked("mlp.gate_proj"), stacked("mlp.up_proj")], 1
        ),
        "decoder.layers.mlp.linear_fc2.weight": stacked("mlp.down_proj"),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": stacked("input_layernorm"),
        "decoder.layers.mlp.linear_fc1.layer_norm_weight": stacked("post_attention_layernorm"),
        "output_layer.weight": state["lm_head.weight"],
    }
    if "model.layers.0.self_attn.q_norm.weight" in state:
        for which in "qk":
            saved[f"decoder.layers.self_attention.{which}_layernorm.weight"] = stacked(
                f"self_attn.{which}_norm"
            )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that this is one process
        dcp.save(saved, checkpoint_id=path, no_dist=True)
    torch.save({"iteration": 3}, path / "common.pt")
    (path / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist"}))
    sizes = {"g": groups, "r": repeats, "d": width, "v": config.vocab_size}
    return {"rules": "megatron-llama", "sizes": sizes}


def to_zero_3(model: Any, path: Path, work: Path) -> dict[str, Any]:
    """The files of ZeRO 3: each parameter is cut into equal parts, padded, one for each rank."""
    path.mkdir()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    parts: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
    for parameter in model.parameters():
        length = -(-parameter.numel() // RANKS)
        flat = torch.zeros(length * RANKS)
        flat[: parameter.numel()] = parameter.detach().flatten().float()
        for rank, part in enumerate(flat.view(RANKS, length)):
            parts[rank].append(part)
    for rank in range(RANKS):
        states = {
            "module": {name: torch.empty(0) for name in shapes},
            "param_shapes": [shapes],
            "dp_world_size": RANKS,
            "mp_world_size": 1,
            "global_steps": 3,
            "ds_version": "0.19.8",
        }
        flat = torch.cat(parts[rank])
        optimizer = {
            "zero_stage": 3,
            "partition_count": RANKS,
            "fp32_flat_groups": [flat],
            "optimizer_state_dict": {
                "state": {0: {"exp_avg": flat * 2, "exp_avg_sq": flat * 3}},
                "param_groups": [{"lr": 0.1}],
            },
        }
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(states, path / f"{name}_model_states.pt")
        torch.save(
            {"optimizer_state_dict": optimizer, "ds_version": "0.19.8"},
            path / f"{name}_optim_states.pt",
        )
    return {"rules": "deepspeed"}


Save = Callable[[Any, Path, Path], dict[str, Any]]
SAVES: dict[str, Save] = {
    "unickpt": to_unickpt,
    "hf": to_hf,
    "orbax": to_orbax,
    "megatron": to_megatron,
    "zero 3": to_zero_3,
}
"""Each saves a model, and returns settings of `CheckpointLoader`."""
