"""Trees <-> named leaves: exact containers, names that never collide, clear refusals."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
from hypothesis import given
from support.strategies import plain, trees

from unickpt import UnsupportedLeaf
from unickpt.trees import tree, tree_json

Point = namedtuple("Point", ["x", "y"])


def flatten(obj: Any) -> Any:
    return tree.flatten(obj, tree_json.is_plain, lambda obj, name: None)


def same(a: Any, b: Any) -> bool:
    """Equality that tells True from 1, -0.0 from 0.0, and NaN from nothing but itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        pairs = list(zip(a.items(), b.items(), strict=True)) if len(a) == len(b) else []
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return repr(a) == repr(b)


@given(trees())
def test_a_tree_comes_back_the_same_with_and_without_like(obj: Any) -> None:
    node = flatten(obj)
    stored = {leaf.name: leaf.value for leaf in tree.leaves(node)}
    assert same(tree.rebuild(node, stored.__getitem__), obj)
    again = tree_json.from_json(tree_json.to_json(node))
    assert same(tree.rebuild(again, stored.__getitem__), obj)


@given(trees())
def test_no_two_leaves_share_a_name(obj: Any) -> None:
    names = [leaf.name for leaf in tree.leaves(flatten(obj))]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("obj", "names"),
    [
        ({"a.b": 1, "a": {"b": 2}}, {"a.b", "a/b"}),
        ({"a/b": 1, "a": {"b": 2}}, {"a%2Fb", "a/b"}),
        ({"a%2Fb": 1, "a/b": 2}, {"a%252Fb", "a%2Fb"}),
        ({1: 1, "1": 2}, {"1", "%31"}),
        ({"": 1, "%": 2, ".": 3, "..": 4, "__a": 5}, {"%", "%25", "%2E", "%2E%2E", "%5F_a"}),
        ({"l": [1, (2,)]}, {"l/0", "l/1/0"}),
        (5, {""}),
    ],
)
def test_names(obj: Any, names: set[str]) -> None:
    assert {leaf.name for leaf in tree.leaves(flatten(obj))} == names


@given(plain)
def test_plain_values_survive_json(value: Any) -> None:
    import json

    stored = json.loads(json.dumps(tree_json.value_to_json(value), allow_nan=False))
    assert same(tree_json.value_from_json(stored), value)


def test_containers_of_the_library_come_back_with_like() -> None:
    @dataclasses.dataclass(frozen=True)
    class State:
        step: int
        point: Point

    obj = {
        "ordered": OrderedDict(b=1, a=2),
        "default": defaultdict(list, {"k": 3}),
        "state": State(4, Point(5, 6)),
    }
    obj["ordered"]._metadata = "kept"
    node = flatten(obj)
    doubled = {leaf.name: leaf.value * 2 for leaf in tree.leaves(node)}
    got = tree.rebuild(node, doubled.__getitem__)
    assert got["state"] == State(8, Point(10, 12))
    assert list(got["ordered"].items()) == [("b", 2), ("a", 4)]
    assert got["ordered"]._metadata == "kept"
    assert got["default"].default_factory is list
    assert obj["state"].step == 4


def test_without_like_namedtuples_keep_their_fields_and_dataclasses_become_dicts() -> None:
    @dataclasses.dataclass
    class State:
        step: int

    node = flatten({"p": Point(1, 2), "s": State(3)})
    stored = {leaf.name: leaf.value for leaf in tree.leaves(node)}
    got = tree.rebuild(tree_json.from_json(tree_json.to_json(node)), stored.__getitem__)
    assert got["p"]._asdict() == {"x": 1, "y": 2}
    assert type(got["p"]).__name__ == "Point"
    assert got["s"] == {"step": 3}


def test_all_that_cannot_be_stored_is_named_at_once() -> None:
    with pytest.raises(UnsupportedLeaf) as caught:
        flatten({"a": {"f": print}, "b": [object()], "c": {None: 1}, "d": {True: 1}})
    message = str(caught.value)
    for part in ("'a/f'", "'b/0'", "'c': key None", "'d': key True", "plain value"):
        assert part in message


def test_cycles_and_bottomless_trees_are_refused() -> None:
    cycle: dict[str, Any] = {}
    cycle["again"] = [cycle]
    with pytest.raises(UnsupportedLeaf, match="'again/0': the dict contains itself"):
        flatten(cycle)
    deep: Any = 1
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(UnsupportedLeaf, match="nested deeper than 200 levels"):
        flatten(deep)


@pytest.mark.parametrize(
    ("structure", "reason"),
    [
        (7, "tree node"),
        ({"dict": [["a", "*"], ["a", "*"]]}, "occurs twice"),
        ({"dict": [["a"]]}, "not a pair"),
        ({"dict": [[None, "*"]]}, "must be str or int"),
        ({"list": 3}, "does not contain a list"),
        ({"set": []}, "unknown container"),
        ({"list": [], "tuple": []}, "fields"),
        ({"namedtuple": [["class", "*"]], "type": "T"}, "fields"),
        ({"namedtuple": [["a", "*"]], "type": "T(x=print())"}, "fields"),
    ],
)
def test_hostile_structures_are_refused(structure: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        tree_json.from_json(structure)


def test_trees_of_pipeline_stages_unite() -> None:
    ours = tree_json.to_json(flatten({"layers": {0: 1, 1: 2}, "step": 3}))
    theirs = tree_json.to_json(flatten({"layers": {2: 1, 3: 2}, "step": 3}))
    united = tree_json.from_json(tree_json.merge(ours, theirs))
    assert [leaf.name for leaf in tree.leaves(united)] == [
        "layers/0", "layers/1", "layers/2", "layers/3", "step",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="differ at 'layers'"):
        tree_json.merge(ours, tree_json.to_json(flatten({"layers": [1], "step": 3})))


def test_wrappers_of_one_type_unite_what_they_hold() -> None:
    one, other = ({"wrapper": {"dict": [[key, "*"]]}, "type": "Net"} for key in ("a", "b"))
    assert tree_json.merge(one, other) == {
        "wrapper": {"dict": [["a", "*"], ["b", "*"]]},
        "type": "Net",
    }
    for different in ({**other, "type": "Other"}, {"wrapper": "*", "type": "Net"}):
        with pytest.raises(ValueError, match="the trees differ at"):
            tree_json.merge(one, different)
