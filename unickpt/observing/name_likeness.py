"""Likeness of names: which name of one side comes nearest to one of the other."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

_SAME = {
    "kernel": "weight", "scale": "weight", "gamma": "weight", "embedding": "weight", "w": "weight",
    "beta": "bias", "b": "bias", "attention": "attn", "self": "attn", "selfattention": "attn",
    "attn": "attn", "query": "q", "key": "k", "value": "v", "wq": "q", "wk": "k", "wv": "v",
    "out": "o", "output": "o", "wo": "o", "dense": "o", "norm": "norm", "ln": "norm",
    "layernorm": "norm", "rms": "norm", "rmsnorm": "norm", "ffn": "mlp", "feed": "mlp",
    "forward": "mlp", "feedforward": "mlp", "embed": "embed", "embeddings": "embed",
    "embedder": "embed", "wte": "embed", "token": "embed", "tok": "embed", "tokens": "embed",
    "h": "layer", "layers": "layer", "block": "layer", "blocks": "layer", "wi0": "gate",
    "w1": "gate", "wi1": "up", "w3": "up", "w2": "down", "experts": "expert", "lm": "head",
    "logits": "head", "mean": "running_mean", "var": "running_var", "input": "pre",
}  # fmt: skip
_SAID_BY_NONE = {"params", "model", "module", "proj", "layer", "transformer", "weight", "linear"}


def words(name: str) -> frozenset[str]:
    """The words of a name, in the spelling that most use; numbers are left out.

    Example:
        >>> sorted(words("params/layers_3/attention/query/kernel"))
        ['attn', 'layer', 'params', 'q', 'weight']
    """
    text = re.sub(r"([a-z])([A-Z])", r"\1_\2", name.replace("wi_0", "wi0").replace("wi_1", "wi1"))
    found = re.findall(r"[a-z]+\d?(?![a-z])|[a-z]+", text.lower())
    return frozenset(_SAME.get(word, _SAME.get(word.rstrip("0123456789"), word)) for word in found)


class Likeness:
    """How near names are, by the words that they share; rare words count more.

    Arguments:
        names: all of both sides.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._words: dict[str, frozenset[str]] = {name: words(name) for name in names}
        counts = Counter(word for each in self._words.values() for word in each)
        self._weights: Mapping[str, float] = {
            word: (0.2 if word in _SAID_BY_NONE else 1.0) / math.sqrt(count)
            for word, count in counts.items()
        }

    def of(self, one: str, other: str) -> float:
        """From 0 to 1."""
        a, b = self._words[one], self._words[other]
        total = sum(self._weights[word] for word in a | b)
        return sum(self._weights[word] for word in a & b) / total if total else 0.0

    def best(self, one: str, others: Sequence[str]) -> list[tuple[float, str]]:
        """Others, those that come nearest first."""
        return sorted(((self.of(one, other), other) for other in others), reverse=True)
