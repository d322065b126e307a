"""Objects with `load_state_dict` whose state grew after they were saved fresh."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import unickpt


class Stateful:
    """An object that is its state."""

    def __init__(self, **state: Any) -> None:
        self.state: dict[str, Any] = state

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def resumed(path: Path, saved: Stateful, fresh: Stateful, **arguments: Any) -> dict[str, Any]:
    unickpt.save(path / "c", {"object": saved, "step": 3})
    unickpt.load(path / "c", {"object": fresh, "step": 0}, **arguments)
    return fresh.state


@pytest.mark.parametrize("arguments", [{}, {"unexpected": "skip"}])
@pytest.mark.parametrize(
    ("saved", "fresh"),
    [
        ({"losses": [3.0, 2.0], "best": 1.5}, {"losses": [], "best": None}),
        ({"losses": [3.0, 2.0, 1.0]}, {"losses": [4.0]}),
        ({"counts": {"cat": 3, 7: 4}}, {"counts": {}}),
        ({"counts": {"cat": 3, "dog": {"old": 1, "young": 2}}}, {"counts": {"cat": 0}}),
        ({"seen": (1, 2)}, {"seen": ()}),
        ({"best": {"step": 3, "of": [1, 2]}}, {"best": None}),
        ({"cat": 3, "dog": 4}, {}),
    ],
)
def test_containers_of_a_fresh_object_take_the_stored_members(
    saved: dict[str, Any], fresh: dict[str, Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    assert resumed(tmp_path, Stateful(**saved), Stateful(**fresh), **arguments) == saved


def test_empty_containers_take_stored_arrays_of_the_framework_of_their_object(
    tmp_path: Path,
) -> None:
    x = torch.arange(5, dtype=torch.bfloat16)
    saved = Stateful(w=x, history=[x + 1, x + 2], table={"a": x + 3}, last=x + 4, ids=x + 5)
    fresh = Stateful(w=x * 0, history=[], table={}, last=None, ids=x[:0])
    state = resumed(tmp_path, saved, fresh)
    assert all(map(torch.equal, state["history"], saved.state["history"]))
    for key in ("w", "last", "ids"):
        assert torch.equal(state[key], saved.state[key]), key
    assert torch.equal(state["table"]["a"], x + 3)

    array = np.arange(3)
    state = resumed(tmp_path / "n", Stateful(w=array, h=[array]), Stateful(w=array * 0, h=[]))
    assert type(state["h"][0]) is np.ndarray
    assert np.array_equal(state["h"][0], array)


def test_the_class_of_a_container_stays(tmp_path: Path) -> None:
    state = resumed(tmp_path, Stateful(c={"a": 1}), Stateful(c=OrderedDict()))
    assert type(state["c"]) is OrderedDict


@pytest.mark.parametrize(
    ("saved", "fresh", "name"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, "object/b"),  # attributes of another class
        ({"m": {"v": np.ones(2), "w": np.ones(2)}}, {"m": {"v": np.ones(2)}}, "object/m/w"),
    ],
)
def test_other_attributes_and_other_arrays_are_still_refused(
    saved: dict[str, Any], fresh: dict[str, Any], name: str, tmp_path: Path
) -> None:
    with pytest.raises(unickpt.LoadMismatch, match=rf"{name} +unexpected"):
        resumed(tmp_path, Stateful(**saved), Stateful(**fresh))


def test_what_a_load_leaves_out_does_not_grow(tmp_path: Path) -> None:
    saved, fresh = Stateful(losses=[1.0, 2.0]), Stateful(losses=[])
    assert resumed(tmp_path, saved, fresh, skip="object/**") == {"losses": []}


def test_containers_outside_of_objects_keep_their_length(tmp_path: Path) -> None:
    unickpt.save(tmp_path / "c", {"losses": [1.0, 2.0]})
    with pytest.raises(unickpt.LoadMismatch, match=r"losses/1 +unexpected"):
        unickpt.load(tmp_path / "c", {"losses": [0.0]})
