"""Fine-tunes in PyTorch, sharded by FSDP2, what train_jax.py saved: straight from its checkpoint.

    torchrun --nproc-per-node 4 examples/finetune_torch.py runs/jax runs/torch

The model is transformers' LlamaForCausalLM. AdamW goes on with the moments that it had in JAX.
"""

import argparse
import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from text import BATCH, batch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import unickpt
from unickpt.adapters.torch import NamedOptimizer

RULES = unickpt.Rules.load(Path(__file__).with_name("llama.rules"))


def config_of(checkpoint: unickpt.Checkpoint) -> LlamaConfig:
    """The model's configuration, as the shapes of the stored arrays tell it."""
    layers, width, heads, head_dim = checkpoint["params/layers/attn/q/kernel"].shape
    return LlamaConfig(
        vocab_size=checkpoint["params/embed/embedding"].shape[0],
        hidden_size=width,
        intermediate_size=checkpoint["params/layers/mlp/up/kernel"].shape[2],
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=checkpoint["params/layers/attn/k/kernel"].shape[2],
        head_dim=head_dim,
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
    )


def make_model(config: LlamaConfig) -> Any:
    """A model whose parameters are sharded over all ranks, and not filled yet."""
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are in no checkpoint
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("load", help="the checkpoint of train_jax.py")
    parser.add_argument("save", help="where to save the tuned model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--further", type=int, default=0, help="steps after the save")
    parser.add_argument("--logits", help="where to write the logits of the first batch, as .npy")
    arguments = parser.parse_args()
    rank, ranks = dist.get_rank(), dist.get_world_size()

    model = make_model(config_of(unickpt.open(arguments.load)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model), "step": 0}
    tree = unickpt.load(arguments.load, tree, rules=RULES)

    if arguments.logits:
        with torch.no_grad():
            logits = model(torch.from_numpy(batch(0)[:, :-1]).long()).logits
        if rank == 0:
            np.save(arguments.logits, logits.numpy())

    last = tree["step"] + arguments.steps
    for step in range(tree["step"], last + arguments.further):
        if step == last:
            unickpt.save(arguments.save, {**tree, "step": step})
        rows = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
        tokens = torch.from_numpy(batch(step)[rows]).long()
        logits = model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step} loss {mean.item():.6f}", flush=True)
    if not arguments.further:
        unickpt.save(arguments.save, {**tree, "step": last})


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    dist.init_process_group("gloo")
    main()
    gc.collect()  # frees the model first: see "terminate called" in docs/troubleshooting.md
    dist.destroy_process_group()
