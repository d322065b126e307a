"""Cases for rules: what is stored, and what rules should make of it, as lines of comments."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from unickpt.trees import tree, tree_json

_LEAF = re.compile(r"(.+?)(?: ((?:b?float|u?int)\d+|bool))? (?:\[([\d ]*)\]|= (-?\d+))$")


@dataclass(frozen=True)
class Case:
    """A rule file, and the leaves of both sides by name: (dtype, shape), or a plain value."""

    text: str
    stored: dict[str, Any]
    makes: dict[str, Any]
    inexact: bool


def read_case(text: str) -> Case:
    """Reads the lines `# stored: name dtype [shape], name = value` and `# makes: ...`."""
    sides: dict[str, dict[str, Any]] = {"stored": {}, "makes": {}}
    for line in text.splitlines():
        if not line.startswith(("# stored", "# makes")):
            continue
        side, _, leaves = line.removeprefix("# ").partition(": ")
        for leaf_text in leaves.split(", "):
            match = _LEAF.match(leaf_text)
            assert match, line
            name, dtype, shape, value = match.groups()
            leaf = int(value) if shape is None else (dtype or "float32", _shape(shape))
            sides[side][name] = leaf
    return Case(text, sides["stored"], sides["makes"], "# inexact" in text)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def leaf(fact: Any, rng: np.random.Generator) -> Any:
    """A leaf as a case tells it; arrays hold random numbers that every dtype can hold."""
    if not isinstance(fact, tuple):
        return fact
    dtype, shape = np.dtype(getattr(ml_dtypes, fact[0], fact[0])), fact[1]
    return rng.integers(1, 100, shape).astype(dtype) if shape else np.asarray(7, dtype)


def flat_tree(leaves: dict[str, Any]) -> Any:
    """Nested dicts out of names."""
    return tree.rebuild(tree_json.from_names(leaves), leaves.__getitem__)


def flat_names(nested: Any, prefix: str = "") -> dict[str, Any]:
    """Names of nested dicts' leaves."""
    if not isinstance(nested, dict):
        return {prefix: nested}
    found: dict[str, Any] = {}
    for key, child in nested.items():
        found |= flat_names(child, f"{prefix}/{key}" if prefix else key)
    return found
