"""A GPT of plain torch with the parameters of Megatron's `GPTModel`, as support/megatron_gpt.py
trains it: layer norms, rotary positions, SwiGLU, no biases."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import unickpt
from unickpt.adapters.torch import NamedOptimizer

LENGTH, VOCABULARY, SAMPLES = 8, 64, 4  # of a sequence; of words; sequences in each step


class Weight(nn.Module):
    """A matrix that is called `weight`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(rows, columns))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear_proj = Weight(hidden, hidden)
        self.linear_qkv = Weight(3 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, hidden = x.shape
        of = hidden // self.heads
        # For each head its query, key and value.
        qkv = self.linear_qkv(x).view(batch, length, self.heads, 3, of).unbind(3)
        q, k, v = (part.transpose(1, 2) for part in qkv)
        q, k = rotated(q), rotated(k)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.linear_proj(out.transpose(1, 2).reshape(batch, length, hidden))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """With rotary positions, whose halves turn together."""
    length, size = x.shape[-2:]
    steps = 10000 ** -(torch.arange(0, size, 2).float() / size)
    angles = torch.outer(torch.arange(length).float(), steps)
    angles = torch.cat([angles, angles], -1)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.linear_fc1 = Weight(2 * inner, hidden)
        self.linear_fc2 = Weight(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.linear_fc1(x).chunk(2, -1)
        return self.linear_fc2(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(hidden)
        self.self_attention = Attention(hidden, heads)
        self.pre_mlp_layernorm = nn.LayerNorm(hidden)
        self.mlp = Mlp(hidden, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        return x + self.mlp(self.pre_mlp_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, layers: int, hidden: int, inner: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hidden, inner, heads) for _ in range(layers))
        self.final_layernorm = nn.LayerNorm(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.final_layernorm(x)


class Embedding(nn.Module):
    def __init__(self, words: int, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(words, hidden)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.word_embeddings(words)


class SmallGpt(nn.Module):
    """Arguments: the sizes, as in Megatron's configuration."""

    def __init__(self, layers: int, hidden: int, heads: int, words: int) -> None:
        super().__init__()
        self.embedding = Embedding(words, hidden)
        self.decoder = Decoder(layers, hidden, hidden * 3 // 2, heads)
        self.output_layer = Weight(words, hidden)

    def loss(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self(tokens, labels)

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.output_layer(self.decoder(self.embedding(tokens)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(step: int, sample: int) -> dict[str, torch.Tensor]:
    """A sequence of a step."""
    generator = torch.Generator().manual_seed(step * SAMPLES + sample)
    words = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator)
    return {"tokens": words[:, :-1].contiguous(), "labels": words[:, 1:].contiguous()}


def run(folder: str, again: str, first: int, last: int) -> None:
    """A rank of FSDP2 that goes on with what a job of Megatron has saved. Saves what it has loaded,
    and prints its losses as a line of JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    model = SmallGpt(layers=4, hidden=16, heads=4, words=VOCABULARY)
    for part in (*model.decoder.layers, model):
        fully_shard(part, mesh=mesh)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim == 1]
    groups: Any = [{"params": matrices}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.01, weight_decay=0.01)
    state = {"model": model, "optim": NamedOptimizer(optimizer, model)}
    unickpt.load(folder, state, rules=unickpt.Rules.preset("megatron"))
    unickpt.save(again, state)
    losses = []
    for step in range(first, last + 1):
        total = 0.0
        for sample in range(rank, SAMPLES, ranks):
            loss = model.loss(**batch(step, sample))
            (loss * ranks / SAMPLES).backward()
            total += float(loss.detach()) / SAMPLES
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.tensor(total)
        dist.all_reduce(mean)
        losses.append(float(mean))
    print(json.dumps(losses), flush=True)
    dist.barrier()
    dist.destroy_process_group()
