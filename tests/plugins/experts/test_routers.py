"""Counts of tokens by hooks in torch and by what Flax sows, for the choice of experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.processes import Processes

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions

torch = pytest.importorskip("torch")

from unickpt.adapters.torch import NamedOptimizer, RouterTokens  # noqa: E402

OPTIONS = SaveOptions(fsync=False)


class Layer(torch.nn.Module):
    """A mixture of experts as in Mixtral: the router returns logits."""

    def __init__(self, width: int, count: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.gate = torch.nn.Linear(width, count, bias=False)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(count))
        self.seen = torch.zeros(count, dtype=torch.int64)

    def forward(self, x: Any) -> Any:
        weights, chosen = self.gate(x).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, at = torch.where(chosen == number)
            if self.training and torch._C._current_graph_task_id() == -1:
                self.seen[number] += len(rows)
            out = out.index_add(0, rows, expert(x[rows]) * weights[rows, at, None])
        return out


class Model(torch.nn.Module):
    def __init__(self, layers: int = 2, checkpoints: bool = False) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(8, 4, 2) for _ in range(layers))
        self.checkpoints = checkpoints

    def forward(self, x: Any) -> Any:
        from torch.utils.checkpoint import checkpoint

        for layer in self.layers:
            x = x + (checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x))
        return x


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_hook_counts_what_the_layers_do(checkpoints: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Model(checkpoints=checkpoints)
    optimizer = torch.optim.AdamW(model.parameters())
    counter = RouterTokens(model, "layers.*.gate", top_k=2)
    keys = {"**/layers/{l}/experts/{x}/**": 1}
    tree = {"model": model, "optimizer": NamedOptimizer(optimizer, model)}
    with Checkpointer(
        tmp_path, experts=Experts(keys, choose="most_lost", plt_budget=None), options=OPTIONS
    ) as run:
        for step in range(1, 7):
            model(torch.randn(50, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.eval()(torch.randn(50, 8))  # which trains nobody
                model.train()
            tokens = counter.tokens()
            assert tokens == {
                f"layers.{n}.experts": layer.seen.tolist() for n, layer in enumerate(model.layers)
            }
            assert sum(tokens["layers.0.experts"]) == 100 * step
            before = None if step == 1 else unickpt.open(run.path(step - 1)).metadata["unickpt"]
            run.save(step, tree, tokens=tokens, wait=True)
            found = unickpt.open(run.path(step)).metadata["unickpt"]["experts"]
            assert found["layers"]["layers.1.experts"]["key"] == "**/layers/1/experts/{x}/**"
            if before is not None:
                for layer in range(2):
                    lost = before["experts"]["layers"][f"layers.{layer}.experts"]["lost"]
                    of = found["steps"][f"**/layers/{layer}/experts/{{x}}/**"]
                    (new,) = [x for x, at in of.items() if at == step]
                    assert not lost or lost[new] == max(lost.values())
    counts = counter.tokens()
    counter.remove()
    model(torch.randn(50, 8))
    assert counter.tokens() == counts
    again = RouterTokens(model, "**/gate", top_k=2)
    again.resume(unickpt.open(tmp_path / "step_6").metadata)
    assert again.tokens() == counts
    model(torch.randn(50, 8))
    assert sum(again.tokens()["layers.0.experts"]) == 700


def test_what_routers_return() -> None:
    class Router(torch.nn.Module):
        def __init__(self, output: Any) -> None:
            super().__init__()
            self.output = output

        def forward(self) -> Any:
            return self.output

    def counted(output: Any, **how: Any) -> list[float]:
        model = torch.nn.ModuleDict({"router": Router(output)})
        counter = RouterTokens(model, "router", count=3, **how)
        model["router"]()
        (found,) = counter.tokens().values()
        return found

    scores, numbers = torch.tensor([[0.1, 0.9, 0.3], [0.7, 0.2, 0.6]]), torch.tensor([[1], [2]])
    assert counted(numbers) == [0, 1, 1]
    assert counted((scores, numbers, None)) == [0, 1, 1]
    assert counted(scores, top_k=1) == [1, 1, 0]
    assert counted({"a": scores}, chosen=lambda found: found["a"].argmin(-1)) == [1, 1, 0]
    for output in (scores, (numbers, numbers), (scores, scores)):
        with pytest.raises(ValueError, match="the router 'router' returns"):
            counted(output)
    with pytest.raises(ValueError, match=r"no module matches 'gate'; there are router"):
        RouterTokens(torch.nn.ModuleDict({"router": Router(1)}), "gate")
    with pytest.raises(ValueError, match="give count="):
        RouterTokens(torch.nn.ModuleDict({"router": Router(1)}), "router")


def test_mixtral_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MixtralConfig(
        vocab_size=50, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.MixtralForCausalLM(config).train()
    counter = RouterTokens(model, "**.gate", top_k=2)
    model(torch.arange(30)[None]).logits.sum().backward()
    tokens = counter.tokens()
    assert [*tokens] == [f"model.layers.{n}.block_sparse_moe.experts" for n in range(2)]
    assert all(sum(counts) == 60 for counts in tokens.values())


RANKS = """
import json, sys
import torch, torch.distributed as dist
from unickpt.adapters.torch import RouterTokens
dist.init_process_group("gloo")
model = torch.nn.ModuleDict({"gate": torch.nn.Linear(4, 3)})
counter = RouterTokens(model, "gate", top_k=1)
with torch.no_grad():
    model["gate"].weight.zero_()
    model["gate"].bias.copy_(torch.eye(3)[dist.get_rank()])
model["gate"](torch.ones(5 + dist.get_rank(), 4))
counter.resume({"unickpt": {"experts": {"layers": {"experts": {"seen": {"2": 7.0}}}}}})
print(json.dumps([counter.tokens(), counter.tokens(dist.group.WORLD)]))
dist.destroy_process_group()
"""


def test_counts_of_all_ranks(processes: Processes) -> None:
    out = processes.finish(processes.torch(2, RANKS))
    told = [json.loads(text.splitlines()[-1]) for text in out]
    assert [one["experts"] for one, _ in told] == [[5, 0, 7], [0, 6, 7]]
    assert all(both["experts"] == [5, 6, 7] for _, both in told)


# --- Flax -----------------------------------------------------------------------------------------


@pytest.mark.integration  # imports Flax
def test_what_flax_sows(tmp_path: Path) -> None:
    jax = pytest.importorskip("jax")
    linen = pytest.importorskip("flax.linen")
    import jax.numpy as jnp

    from unickpt.adapters.jax import RouterTokens as Sown

    class Mixture(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            logits = linen.Dense(4, name="gate")(x)
            _, chosen = jax.lax.top_k(logits, 2)
            self.sow("intermediates", "chosen", chosen)
            up = self.param("up", linen.initializers.normal(), (4, 8, 8))
            return x + jnp.einsum("td,tkdf->tf", x, up[chosen])

    class Net(linen.Module):
        @linen.compact
        def __call__(self, x: Any) -> Any:
            for layer in range(2):
                x = Mixture(name=f"layers_{layer}")(x)
            return x

    net, x = Net(), jnp.ones((10, 8))
    params = net.init(jax.random.key(0), x)["params"]
    counter = Sown("**/chosen", 4, experts="up")

    @jax.jit
    def step(params: Any, x: Any) -> Any:
        return net.apply({"params": params}, x, mutable="intermediates")

    expected = {"layers_0/up": np.zeros(4), "layers_1/up": np.zeros(4)}
    keys = {"params/layers_{l}/up": (0, 1)}
    experts = Experts(keys, choose="most_lost", plt_budget=None)
    with Checkpointer(tmp_path, experts=experts, options=OPTIONS) as run:
        for number in range(1, 5):
            x = jax.random.normal(jax.random.key(number), (10, 8))
            _, sown = step(params, x)
            counter.add(sown["intermediates"])
            for layer in range(2):
                (chosen,) = sown["intermediates"][f"layers_{layer}"]["chosen"]
                expected[f"layers_{layer}/up"] += np.bincount(chosen.reshape(-1), minlength=4)
            tokens = counter.tokens()
            assert {layer: list(counts) for layer, counts in expected.items()} == tokens
            named = {f"params/{layer}": counts for layer, counts in tokens.items()}
            run.save(number, {"params": params}, tokens=named, wait=True)
            found = unickpt.open(run.path(number)).metadata["unickpt"]["experts"]
            assert found["layers"]["params/layers_1/up"]["key"] == "params/layers_1/up"
    with pytest.raises(ValueError, match="nothing that was sown matches"):
        counter.add({"other": jnp.ones(3)})
    with pytest.raises(ValueError, match="numbers of experts are integers"):
        counter.add({"a": {"chosen": (jnp.ones(3),)}})
    counts = Sown("chosen", 3, counted=True)
    counts.add({"chosen": (jnp.array([1, 2, 3]), jnp.array([1, 0, 0]))})
    assert counts.tokens() == {"experts": [2, 2, 3]}


def test_what_nnx_sows() -> None:
    pytest.importorskip("jax")
    nnx = pytest.importorskip("flax.nnx")
    import jax.numpy as jnp

    from unickpt.adapters.jax import RouterTokens as Sown

    class Mixture(nnx.Module):
        def __call__(self, x: Any) -> Any:
            self.sow(nnx.Intermediate, "chosen", jnp.array([[0, 1], [1, 2]]))
            return x

    class Net(nnx.Module):
        def __init__(self) -> None:
            self.moe = Mixture()

        def __call__(self, x: Any) -> Any:
            return self.moe(self.moe(x))

    net, counter = Net(), Sown("**/chosen", 3)
    _, sown = nnx.capture(nnx.Intermediate)(Net.__call__)(net, jnp.ones(3))
    counter.add(sown)
    assert counter.tokens() == {"moe/experts": [2, 4, 2]}
