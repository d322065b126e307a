"""unickpt.trees.renamed: containers that move as a whole are what they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given
from support.strategies import trees

import unickpt
from unickpt.trees import tree, tree_json
from unickpt.trees.renamed import renamed


@given(trees())
def test_a_tree_below_another_name_is_the_same_tree(value: Any) -> None:
    structure = tree_json.to_json(tree.flatten(value, tree_json.is_plain, lambda *_: None))
    node = tree_json.from_json(structure)
    old = [leaf.name for leaf in tree.leaves(node)]
    if not old or isinstance(node, tree.Leaf):
        return
    moved = renamed(node, {f"x/y/{name}": name for name in old}, [f"x/y/{name}" for name in old])
    assert tree_json.to_json(moved) == {"dict": [["x", {"dict": [["y", structure]]}]]}


class Pair(NamedTuple):
    first: Any
    rest: Any


def test_rules_keep_the_containers_that_they_move_whole(tmp_path: Path) -> None:
    state = {
        "opt": {"pair": Pair(np.ones(2), [1, (), {"n": 2.5}]), "history": [], 3: "text"},
        "params": {"a": np.zeros(3), "list": [np.ones(1), np.ones(2)]},
    }
    unickpt.save(tmp_path / "c", state)
    rules = unickpt.Rules.parse(
        "opt/{k...} <-> run/optimizer/{k...}\n"
        "params/a <-> run/a\n"
        "params/list/0 <-> first\n"
        "params/list/1 <-> run/list/1"
    )
    unickpt.convert(tmp_path / "c", tmp_path / "d", rules=rules)
    for found in (unickpt.load(tmp_path / "c", rules=rules), unickpt.load(tmp_path / "d")):
        optimizer = found["run"].pop("optimizer")
        assert type(optimizer["pair"]).__name__ == "Pair"
        assert optimizer["pair"].rest == [1, (), {"n": 2.5}]
        assert list(optimizer["pair"].first) == [1, 1]
        assert (optimizer["history"], optimizer[3]) == ([], "text")
        # Torn apart, a list is none any more.
        assert set(found) == {"run", "first"}
        assert set(found["run"]) == {"a", "list"}
        assert list(found["run"]["list"]) == ["1"]
