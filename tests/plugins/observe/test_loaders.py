"""Loaders of engines that split parameters over ranks, and what their parameters must hold."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unickpt
from unickpt.errors import RuleError
from unickpt.plugins.observe.converters import to_numpy
from unickpt.plugins.observe.loaders import (
    RankLoad,
    expected_digests,
    observe_loader,
    rules_of_ranks,
)

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, VOCAB, EXPERTS = 8, 4, 2, 3, 12, 21, 4
SHAPES = {
    "embed.weight": (VOCAB, HIDDEN),
    "norm.weight": (HIDDEN,),
    "layers.0.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "layers.0.k_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.v_proj.weight": (KV_HEADS * HEAD, HIDDEN),
    "layers.0.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "layers.0.gate_proj.weight": (INNER, HIDDEN),
    "layers.0.up_proj.weight": (INNER, HIDDEN),
    **{f"layers.0.experts.{x}.down.weight": (HIDDEN, INNER) for x in range(EXPERTS)},
}


class Engine(torch.nn.Module):
    """One rank's model of an engine: fused, cut along heads, rows and columns, and padded."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.rank, self.size = rank, size
        kv = max(1, KV_HEADS // size)
        self.rows = {"q": HEADS // size * HEAD, "kv": kv * HEAD, "up": INNER // size}
        vocab = -(-VOCAB // (2 * size)) * 2
        shapes = {
            "embed": (vocab, HIDDEN),
            "norm": (HIDDEN,),
            "qkv": (self.rows["q"] + 2 * self.rows["kv"], HIDDEN),
            "o": (HIDDEN, self.rows["q"]),
            "gate_up": (2 * self.rows["up"], HIDDEN),
            "w2": (EXPERTS // size, HIDDEN, INNER),
        }
        for name, shape in shapes.items():
            setattr(self, name, torch.nn.Parameter(torch.randn(shape, dtype=dtype)))

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, x in weights:
            part = name.split(".")[-2]
            if part == "embed":
                rows = self.embed.shape[0]
                mine = x[self.rank * rows : (self.rank + 1) * rows]
                self.embed.data[: len(mine)].copy_(mine)
            elif part == "norm":
                self.norm.data.copy_(x)
            elif part in ("q_proj", "k_proj", "v_proj"):
                self._load_qkv(part[0], x)
            elif part == "o_proj":
                self.o.data.copy_(x.chunk(self.size, 1)[self.rank])
            elif part in ("gate_proj", "up_proj"):
                at = self.rows["up"] * (part == "up_proj")
                self.gate_up.data[at : at + self.rows["up"]].copy_(x.chunk(self.size)[self.rank])
            else:
                expert = int(name.split(".")[3]) - self.rank * len(self.w2)
                if 0 <= expert < len(self.w2):
                    self.w2.data[expert].copy_(x)

    def _load_qkv(self, part: str, x: Any) -> None:
        rows = self.rows["q" if part == "q" else "kv"]
        at = {"q": 0, "k": self.rows["q"], "v": self.rows["q"] + self.rows["kv"]}[part]
        shard = self.rank if part == "q" else self.rank * KV_HEADS // max(self.size, KV_HEADS)
        shard = shard if part == "q" or self.size > KV_HEADS else self.rank
        self.qkv.data[at : at + rows].copy_(x[shard * rows : (shard + 1) * rows])


def loads(size: int, dtype: torch.dtype = torch.float32) -> list[RankLoad]:
    found = []
    for rank in range(size):
        model = Engine(rank, size, dtype)
        one = observe_loader(model, model.load_weights, rank, size, example=SHAPES)
        found.append(pickle.loads(pickle.dumps(one)))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_every_parameter_of_every_rank_is_predicted(
    size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    observed = loads(size, dtype)
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(s).astype(np.float32) for name, s in SHAPES.items()}
    unickpt.save(tmp_path / "a", weights)
    expected = expected_digests(observed, tmp_path / "a")
    assert expected == expected_digests(observed, weights)
    found: dict[int, dict[str, str]] = {}
    for rank in range(size):
        model = Engine(rank, size, dtype)
        for parameter in model.parameters():
            parameter.data.zero_()
        model.load_weights((name, torch.from_numpy(x)) for name, x in weights.items())
        found[rank] = {
            name: hashlib.sha256(to_numpy(parameter).tobytes()).hexdigest()
            for name, parameter in model.named_parameters()
        }
    assert expected == found


def test_the_rank_is_an_axis_where_a_formula_fits() -> None:
    rules = rules_of_ranks(loads(2))
    assert rules.report is not None
    lines = [" ".join(line.split()) for line in rules.report.text.splitlines() if "<->" in line]
    assert lines == [
        "embed.weight [(a + b) c] <-> ranks/0/embed [a c], ranks/1/embed [(b + _) c] _=3? b=9?",
        "norm.weight [a] <-> ranks/0/norm [a] = ranks/1/norm [a]",
        "layers.0.q_proj.weight [(r a) b], layers.0.k_proj.weight [(r c) b], "
        "layers.0.v_proj.weight [(r d) b] <-> ranks/{r}/qkv [(a + c + d) b] c=3? d=3? r=2?",
        "layers.0.o_proj.weight [a (r b)] <-> ranks/{r}/o [a b] r=2?",
        "layers.0.gate_proj.weight [(r a) b], layers.0.up_proj.weight [(r c) b] <-> "
        "ranks/{r}/gate_up [(a + c) b] a=6? r=2?",
        "layers.0.experts.{2*r+x}.down.weight [a b] <-> ranks/{r}/w2 [x a b] r=2 x=2",
    ]


def test_what_several_ranks_have_of_one_array_is_no_rule() -> None:
    """A rule gives each element one counterpart; digests need none."""
    with pytest.raises(RuleError, match="'ranks/0/qkv' cannot be made by a rule: an element is"):
        rules_of_ranks(loads(4))
    rules = rules_of_ranks(loads(4), strict=False)
    assert rules.report is not None
    assert list(rules.report.refused) == [f"ranks/{r}/qkv" for r in range(4)]


def test_another_checkpoint_than_the_example() -> None:
    with pytest.raises(RuleError, match=r"'norm.weight' is missing in the checkpoint, and of"):
        expected_digests(loads(1), {"embed.weight": np.zeros((VOCAB, HIDDEN))})


def test_ranks_that_are_missing() -> None:
    with pytest.raises(RuleError, match=r"ranks \[0\] were observed of \[2\]"):
        rules_of_ranks(loads(2)[:1])
    with pytest.raises(RuleError, match="rank=2 is not one of size=2 ranks"):
        observe_loader({}, lambda model, weights: None, 2, 2, example={"w": (3,)})


def test_a_loader_that_looks_at_values() -> None:
    def load(model: Any, weights: Any) -> None:
        for name, x in weights:
            model[name][...] = x / abs(x).max()

    one = observe_loader(
        {"w": np.zeros((3, 4))}, load, 0, 1, example={"w": (3, 4)}, framework="numpy"
    )
    with pytest.raises(RuleError, match=r"'ranks/0/w' depends on values: element \["):
        rules_of_ranks([one])
