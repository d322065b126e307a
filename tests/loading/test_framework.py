"""Loads without `like` that return arrays of a framework."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

import unickpt


@pytest.fixture
def path(tmp_path: Path) -> Path:
    tree = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": [np.arange(3).astype(ml_dtypes.bfloat16)],
        "step": 7,
    }
    unickpt.save(tmp_path / "c", {**tree, "tied": tree["w"]})
    return tmp_path / "c"


def test_a_load_without_like_returns_tensors(path: Path) -> None:
    tree = unickpt.load(path, framework="torch")
    assert tree["step"] == 7
    assert torch.equal(tree["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tree["b"][0], torch.arange(3, dtype=torch.bfloat16))
    assert tree["tied"] is tree["w"]
    assert not tree["w"].requires_grad


def test_a_module_takes_what_was_loaded_without_it(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    unickpt.save(tmp_path / "c", {"model": model.state_dict(), "size": 3})
    tree = unickpt.load(tmp_path / "c", framework="torch")
    other = torch.nn.Linear(2, tree["size"])
    other.load_state_dict(tree["model"])
    assert torch.equal(other.weight, model.weight)


def test_a_load_without_like_returns_arrays_of_jax(path: Path, tmp_path: Path) -> None:
    tree = unickpt.load(path, framework="jax")
    assert isinstance(tree["w"], jax.Array)
    assert isinstance(tree["b"][0], jax.Array)
    assert tree["b"][0].dtype == jnp.bfloat16
    key = jax.random.key(3)
    unickpt.save(tmp_path / "key", {"key": key})
    loaded = unickpt.load(tmp_path / "key", framework="jax")["key"]
    assert loaded.dtype == key.dtype
    assert (jax.random.key_data(loaded) == jax.random.key_data(key)).all()


def test_selections_rules_and_a_checkpointer_take_a_framework(path: Path, tmp_path: Path) -> None:
    tree = unickpt.load(path, framework="torch", only="b/*")
    assert torch.equal(tree["b"][0], torch.arange(3, dtype=torch.bfloat16))
    rules = unickpt.Rules.parse("w [i o] <-> v [o i]")
    tree = unickpt.load(path, framework="torch", rules=rules, only="v", strict=False)
    assert torch.equal(tree["v"], torch.arange(6.0).reshape(2, 3).T)
    with unickpt.Checkpointer(tmp_path / "run") as run:
        run.save(1, {"x": torch.ones(2)})
        run.wait()
        assert torch.equal(run.load(framework="torch")["x"], torch.ones(2))


def test_a_dtype_that_torch_lacks_stays_numpy(tmp_path: Path) -> None:
    x = np.zeros(3, ml_dtypes.int4)
    unickpt.save(tmp_path / "c", {"x": x, "y": np.ones(2)})
    tree = unickpt.load(tmp_path / "c", framework="torch")
    assert type(tree["x"]) is np.ndarray
    assert type(tree["y"]) is torch.Tensor


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"framework": "tf"}, 'framework=.tf. is none of "numpy", "torch" and "jax"'),
        ({"framework": "torch", "like": {"w": np.ones(1)}}, "leave out one of the two"),
    ],
)
def test_other_frameworks_and_those_of_like_are_refused(
    arguments: dict[str, Any], message: str, path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        unickpt.load(path, **arguments)
