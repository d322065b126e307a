"""Containers of `like` keep their class; all leaves that cannot be stored are named together."""

from __future__ import annotations

import io
from collections import Counter, OrderedDict, defaultdict
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import unickpt
from unickpt import PerProcess, UnsupportedLeaf
from unickpt.trees import hints


class Layers(list[Any]):
    def __init__(self, name: str, items: Any) -> None:
        super().__init__(items)
        self.name = name


class Range(tuple[Any, ...]):
    unit: str

    def __new__(cls, low: Any, high: Any) -> Range:
        made = super().__new__(cls, (low, high))
        made.unit = "m"
        return made


class Table(dict[str, Any]):
    pass


class Point(NamedTuple):
    x: Any
    y: Any


class Near(Point):
    pass


def containers(n: int) -> dict[str, Any]:
    return {
        "layers": Layers("mine", [np.full(2, float(n)), n]),
        "range": Range(n, np.full(3, float(n))),
        "size": torch.Size([n, n]),
        "table": Table(x=n),
        "counter": Counter(a=n),
        "default": defaultdict(list, a=[n]),
        "ordered": OrderedDict(b=n, a=n),
        "point": Near(n, n),
    }


@pytest.mark.parametrize("wrap", [lambda x: x, PerProcess], ids=["plain", "by process"])
def test_containers_of_like_keep_their_class_and_attributes(wrap: Any) -> None:
    unickpt.save("memory://classes", {"c": wrap(containers(1))}, overwrite=True)
    loaded = unickpt.load("memory://classes", {"c": wrap(containers(0))})["c"]
    loaded = loaded.value if isinstance(loaded, PerProcess) else loaded
    for name, expected in containers(1).items():
        assert type(loaded[name]) is type(expected), name
    assert loaded["layers"].name == "mine"
    assert loaded["layers"][0].tolist() == [1, 1]
    assert loaded["range"].unit == "m"
    assert loaded["range"][1].tolist() == [1, 1, 1]
    assert loaded["size"].numel() == 1
    assert loaded["default"]["new"] == []


def test_all_leaves_that_cannot_be_stored_are_named_together() -> None:
    @jax.tree_util.register_pytree_with_keys_class
    class Twice:
        def tree_flatten_with_keys(self) -> tuple[Any, None]:
            return ((jax.tree_util.GetAttrKey("x"), 1), (jax.tree_util.GetAttrKey("x"), 2)), None

        @classmethod
        def tree_unflatten(cls, _: None, children: Any) -> Twice:
            return cls()

    state = {
        "fine": np.ones(2),
        "set": {1},
        "key": {None: 1},
        "dtype": np.array(["a"]),
        "twice": Twice(),
        "below": [{"abstract": jax.ShapeDtypeStruct((2,), jnp.float32)}],  # type: ignore[no-untyped-call]
        "dimensions": torch.ones((1,) * 33),
    }
    with pytest.raises(UnsupportedLeaf) as caught:
        unickpt.save("memory://bad", state)
    lines = str(caught.value).splitlines()[1:]
    named = {line.split("'")[1] for line in lines}
    assert named == {"set", "key", "dtype", "twice", "below/0/abstract", "dimensions"}
    assert len(lines) == len(named)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (jnp.ones(2, jnp.uint4), r"store x.astype\(numpy.uint8\), and call .astype\('uint4'\)"),
        (
            np.ones(2, ml_dtypes.uint2),
            r"and call .astype\('uint2'\) after the load",
        ),
        (np.zeros(2, jax.dtypes.float0), "has no values: leave it out, or store None in its place"),
        (np.zeros(2, "V3"), r"store x.view\(numpy.uint8\)"),
        (np.zeros(2, [("a", "f4")]), "store each of its fields as an array"),
        (io.StringIO("x"), r"store x.getvalue\(\)"),
    ],
    ids=range(6),
)
def test_an_error_says_what_to_store_instead(value: Any, words: str) -> None:
    with pytest.raises(UnsupportedLeaf, match=f"'x': .*{words}"):
        unickpt.save("memory://bad", {"x": value})


def test_a_configuration_of_omegaconf_is_stored_as_a_container() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    for config in (omegaconf.OmegaConf.create({"a": 1}), omegaconf.OmegaConf.create([1])):
        with pytest.raises(UnsupportedLeaf, match=r"OmegaConf.to_container\(x, resolve=True\)"):
            unickpt.save("memory://bad", {"config": config})
    assert "state_dict()" in hints.hint(SimpleNamespace())
