"""Turns of experts are spread over layers and processes: every save is of all as much."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import TESTS
from support.processes import Processes

import unickpt
from unickpt import Checkpointer, Experts, SaveOptions
from unickpt.plugins.experts.expert_choice import ExpertRecord, choose
from unickpt.plugins.experts.keys import ExpertKeys
from unickpt.plugins.experts.turn_order import orders

TEXT = "layers/{l}/experts/{x}/*"


def saves(
    keys: ExpertKeys, by: Any, steps: dict[str, dict[int, int]], count: int
) -> list[dict[str, set[int]]]:
    """The experts that each of some saves writes; the order may be found anew before any."""
    found = []
    for step in range(1, count + 1):
        order = orders(steps, keys, by)
        chosen = {
            text: choose(key[0], text, ExpertRecord(steps), step, None, order[text])
            for text in steps
            if (key := keys.key_of(text))
        }
        steps = {text: {**of, **chosen[text]} for text, of in steps.items()}
        found.append({text: set(of) for text, of in chosen.items()})
    return found


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 8), st.integers(1, 4), st.integers(1, 9), st.data())
def test_each_process_writes_as_many_experts_as_any_other(
    processes: int, each: int, layers: int, data: st.DataObject
) -> None:
    experts = processes * each
    k = data.draw(st.integers(1, experts))
    keys = ExpertKeys({TEXT: k})
    texts = [TEXT.replace("{l}", str(layer)) for layer in range(layers)]
    owner = data.draw(
        st.sampled_from([lambda x: x // each, lambda x: x % processes])  # blocks, or in turn
    )
    by = {text: {x: {owner(x): 5} for x in range(experts)} for text in texts}
    steps = {text: dict.fromkeys(range(experts), 0) for text in texts}
    cycle = math.ceil(experts / k)
    found = saves(keys, by, steps, 3 * cycle)
    for chosen in found:
        assert all(len(some) == k for some in chosen.values())
        written = Counter(dict.fromkeys(range(processes), 0))
        for some in chosen.values():
            written.update(owner(x) for x in some)
        assert max(written.values()) - min(written.values()) <= 1, written
    for first in range(len(found) - cycle + 1):
        for text in texts:
            last = set().union(*(chosen[text] for chosen in found[first : first + cycle]))
            assert last == set(range(experts)), "each has its turn"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.integers(1, 20), st.data())
def test_each_expert_has_its_turn_whoever_has_it(
    owners: list[int], k: int, data: st.DataObject
) -> None:
    """Also if the processes change meanwhile."""
    keys, experts = ExpertKeys({"{x}/*": k}), range(len(owners))
    steps = {"{x}/*": {x: data.draw(st.integers(-3, 0)) for x in experts}}
    cycle = math.ceil(len(owners) / min(k, len(owners)))
    last = steps["{x}/*"]
    for _ in range(3):
        owners = data.draw(st.permutations(owners))
        by = {"{x}/*": {x: {owners[x]: 1} for x in experts}}
        found = saves(keys, by, {"{x}/*": last}, cycle)
        assert set().union(*(chosen["{x}/*"] for chosen in found)) == set(experts)
        # The run goes on: all of these are earlier steps.
        last = {x: max(n for n, c in enumerate(found) if x in c["{x}/*"]) - cycle for x in last}


def test_stages_of_a_pipeline_begin_by_themselves() -> None:
    keys = ExpertKeys({TEXT: 1})
    texts = [TEXT.replace("{l}", str(layer)) for layer in (0, 1, 2, 10)]
    by = {t: {x: {x + 4 * (n >= 2): 1} for x in range(4)} for n, t in enumerate(texts)}
    steps = {text: dict.fromkeys(range(4), 0) for text in texts}
    (chosen,) = saves(keys, by, steps, 1)
    assert [chosen[text] for text in texts] == [{0}, {1}, {0}, {1}]


def state(step: int, layers: int = 3, experts: int = 4) -> dict[str, Any]:
    def numbers(*shape: int) -> Any:
        return np.arange(np.prod(shape), dtype=np.float64).reshape(shape) + step * 1e6

    of = {
        str(layer): {
            "experts": {str(x): {"up": numbers(30, 40) + x} for x in range(experts)},
            "moe": {"up": numbers(experts, 20, 9) - layer},
        }
        for layer in range(layers)
    }
    return {"params": {"layers": of}, "mu": {"layers": of}, "dense": numbers(500)}


def test_layers_take_turns_by_themselves(tmp_path: Path) -> None:
    keys = {"**/layers/{l}/experts/{x}/*": 1, "**/layers/{l}/moe/up": (0, 1)}
    options = SaveOptions(chunk_bytes=4096, fsync=False)
    with Checkpointer(tmp_path, experts=Experts(keys), options=options) as run:
        for step in range(5):
            run.save(step, state(step), tokens={"params/layers/1/experts": [step] * 4}, wait=True)
            found = unickpt.open(tmp_path / f"step_{step}").metadata["unickpt"]["experts"]
            if step:
                for key in ("**/layers/{}/experts/{{x}}/*", "**/layers/{}/moe/up"):
                    new = [
                        [
                            int(x)
                            for x, of in found["steps"][key.format(layer)].items()
                            if of == step
                        ]
                        for layer in range(3)
                    ]
                    # The stacked arrays of a layer are of the same experts as its others.
                    assert new == [[(step - 1 + layer) % 4] for layer in range(3)]
            loaded = unickpt.load(tmp_path / f"step_{step}")
            for layer, parts in loaded["params"]["layers"].items():
                of = found["steps"][f"**/layers/{layer}/experts/{{x}}/*"]
                for x, n in of.items():
                    expected = state(n)["params"]["layers"][layer]["experts"][x]["up"]
                    assert np.array_equal(parts["experts"][x]["up"], expected)
                    both = loaded["mu"]["layers"][layer]["experts"][x]["up"]
                    assert np.array_equal(both, expected), "slots are of the same step"
                for x, n in found["steps"][f"**/layers/{layer}/moe/up"].items():
                    expected = state(n)["params"]["layers"][layer]["moe"]["up"][int(x)]
                    assert np.array_equal(parts["moe"]["up"][int(x)], expected)
    assert found["layers"]["params/layers/1/experts"]["key"] == "**/layers/1/experts/{x}/*"
    _, report = unickpt.load(tmp_path / "step_4", return_report=True)
    assert ("**/layers/0/experts/{x}/*", 0, 1) in report.older_experts


@pytest.mark.parametrize("text", ["{x}/{l}/w", "{l}/{l}/{x}"])
def test_a_layer_is_named_once_before_the_expert(text: str) -> None:
    with pytest.raises(ValueError, match=r"may have \{l\} once"):
        Experts({text: 1})


# --- as much on every rank ------------------------------------------------------------------------

RANKS = f"""
import sys
sys.path[:0] = [{TESTS!r}, {str(Path(__file__).parent)!r}]
import torch.distributed as dist
from test_expert_turns import ranks
dist.init_process_group("gloo")
ranks(*sys.argv[1:])
dist.destroy_process_group()
"""


LAYERS = {4: 64, 1: 512}
"""How many, and the rows of their experts."""


def ranks(root: str, how: str, dense: str, k: str, layers: str) -> None:
    """What each of 8 ranks does, which have 2 of 16 experts of each layer."""
    count = int(layers)
    rows = LAYERS[count]
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh, rank = init_device_mesh("cpu", (8,), mesh_dim_names=("ep",)), dist.get_rank()

    def tree(step: int) -> dict[str, Any]:
        layers: dict[str, Any] = {}
        for layer in range(count):
            value = torch.full((2, rows, 256), step * 1000.0 + layer * 100 + rank)
            value[1] += 50
            if how == "stacked":
                layers[str(layer)] = {"up": DTensor.from_local(value, mesh, [Shard(0)])}
            else:
                box = unickpt.types.Box((0, 0), (rows, 256))
                layers[str(layer)] = {
                    "experts": {
                        str(2 * rank + x): unickpt.types.LocalFragments(
                            (rows, 256), [(box, value[x])]
                        )
                        for x in range(2)
                    }
                }
        # 8 MiB that are no expert; a single layer has 16 experts of 0.5 MiB.
        weights = {str(n): torch.full((512, 1024), step * 1.0) for n in range(4)}
        if dense == "DTensor":
            weights = {n: DTensor.from_local(w, mesh, [Replicate()]) for n, w in weights.items()}
        return {"layers": layers, "dense": weights}

    key = "layers/{l}/up" if how == "stacked" else "layers/{l}/experts/{x}"
    value: Any = (0, int(k)) if how == "stacked" else int(k)
    options = SaveOptions(fsync=False, timeout_s=60, chunk_bytes=128 << 10)
    told = []
    with Checkpointer(root, experts=Experts({key: value}), options=options) as run:
        for step in range(1, 6):
            pending = run.save(step, tree(step))
            if step in (2, 4):
                pending.result()  # others are not waited for
            told.append(pending)
        found = [pending.result() for pending in told]
    print(json.dumps([[r.written_bytes, r.busiest_bytes, r.mean_bytes] for r in found]))


@pytest.mark.parametrize(
    ("how", "dense", "k", "layers"),
    [
        pytest.param("stacked", "DTensor", 4, 4, marks=pytest.mark.slow),
        ("apart", "plain", 2, 4),
        # By their turns, 4 or 2 of 8 ranks write an expert: the others write more of what is none.
        ("stacked", "DTensor", 4, 1),
        pytest.param("apart", "DTensor", 2, 1, marks=pytest.mark.slow),
    ],
)
def test_ranks_write_as_much_each(
    how: str, dense: str, k: int, layers: int, processes: Processes, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    out = processes.finish(processes.torch(8, RANKS, tmp_path / "run", how, dense, k, layers))
    told = [json.loads(text.splitlines()[-1]) for text in out]
    for save in range(5):
        written = [of[save][0] for of in told]
        print(save, written, max(written) / sum(written) * 8)
        if save:
            assert sum(written) == 4 * 512 * 1024 * 4 + layers * k * LAYERS[layers] * 256 * 4
        assert max(written) <= 1.1 * sum(written) / 8
        assert told[0][save][1:] == [max(written), sum(written) / 8]
    for step in range(1, 6):
        path = tmp_path / "run" / f"step_{step}"
        steps = unickpt.open(path).metadata["unickpt"]["experts"]["steps"]
        found = unickpt.load(path)
        for layer in range(layers):
            text = f"layers/{layer}/" + ("up" if how == "stacked" else "experts/{x}")
            values = found["layers"][str(layer)]
            for x, of in steps[text].items():
                value = values["up"][int(x)] if how == "stacked" else values["experts"][x]
                rank, second = divmod(int(x), 2)
                assert (value == of * 1000 + layer * 100 + rank + 50 * second).all()
        assert unickpt.verify(path).ok
