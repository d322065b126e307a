"""The preset of Orbax: a flax TrainState, as Orbax stores it, goes on in torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import unickpt
from unickpt import Rules

pytestmark = pytest.mark.integration

jax = pytest.importorskip("jax")
torch = pytest.importorskip("torch")
nn = pytest.importorskip("flax.linen")
optax = pytest.importorskip("optax")
ocp = pytest.importorskip("orbax.checkpoint")
train_state = pytest.importorskip("flax.training.train_state")

X = np.linspace(-1, 1, 20, dtype=np.float32).reshape(4, 5)


class Flax(nn.Module):  # type: ignore[misc, name-defined]
    @nn.compact
    def __call__(self, x: Any) -> Any:
        x = nn.LayerNorm(name="norm")(nn.Dense(7, name="up")(x))
        return nn.Dense(3, name="down")(x)


def fresh() -> tuple[Any, Any]:
    """A module of torch and its optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.up, model.norm = torch.nn.Linear(5, 7), torch.nn.LayerNorm(7, eps=1e-6)
    model.down = torch.nn.Linear(7, 3)
    return model, torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def train(state: Any, steps: int) -> tuple[Any, list[float]]:
    def loss(params: Any) -> Any:
        return (state.apply_fn({"params": params}, X) ** 2).mean()

    losses = []
    for _ in range(steps):
        value, gradient = jax.value_and_grad(loss)(state.params)
        state = state.apply_gradients(grads=gradient)
        losses.append(float(value))
    return state, losses


def test_losses_go_on_in_torch(tmp_path: Path) -> None:
    from unickpt.adapters.torch import NamedOptimizer

    net = Flax()
    params = net.init(jax.random.key(0), X)["params"]
    tx = optax.adamw(1e-2, weight_decay=0.1)
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=tx)
    state, _ = train(state, 5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(tmp_path / "c", state)
    _, expected = train(state, 5)

    model, optimizer = fresh()
    tree = {"model": model, "optim": NamedOptimizer(optimizer, model)}
    unickpt.load(tmp_path / "c", tree, rules=Rules.preset("orbax"))
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = (model(torch.from_numpy(X)) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses == pytest.approx(expected, rel=2e-5)
    assert int(optimizer.state[model.up.weight]["step"]) == 10
