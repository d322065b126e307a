"""The examples of docs/experts.md do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import TESTS

import unickpt

PAGE = Path(TESTS).parent.joinpath("docs", "experts.md").read_text()
BLOCKS = dict(re.findall(r"```python\n# ([\w.]+)\n(.*?)```", PAGE, re.S))


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def state() -> dict[str, Any]:
    experts = {str(x): {"up": np.zeros(500)} for x in range(8)}
    return {
        "params": {"layers": {"0": {"experts": experts}}, "dense": np.zeros(9)},
        "opt_state": {"mu": {"layers": {"0": {"experts": {**experts}}}}},
    }


def run(name: str, **names: Any) -> dict[str, Any]:
    exec(BLOCKS[name], {"unickpt": unickpt}, names)
    return names


def steps_of(step: int, path: str = "ckpt/run") -> dict[str, int]:
    (found,) = unickpt.open(f"{path}/step_{step}").metadata["unickpt"]["experts"]["steps"].values()
    return dict(found)


def test_every_example_is_tried() -> None:
    assert PAGE.count("```python") == len(BLOCKS) == 6


def test_saving_and_loading(capsys: pytest.CaptureFixture[str]) -> None:
    def train(state: Any) -> None:
        for expert in state["params"]["layers"]["0"]["experts"].values():
            expert["up"] += 1

    run("save.py", state=state(), train=train)
    expected = {0: 2, 1: 2, 2: 3, 3: 3, 4: 4, 5: 4, 6: 5, 7: 5}
    assert steps_of(5) == {str(x): step for x, step in expected.items()}
    found = run("load")
    assert capsys.readouterr().out == "('**/experts/{x}/**', 0, 2)\n"
    experts = found["state"]["params"]["layers"]["0"]["experts"]
    assert {int(x): int(each["up"][0]) for x, each in experts.items()} == expected


def test_torch() -> None:
    torch = pytest.importorskip("torch")
    from unickpt.adapters.torch import NamedOptimizer

    model = torch.nn.Module()
    model.experts = torch.nn.ModuleList(torch.nn.Linear(20, 20) for _ in range(3))
    model.router = torch.nn.Linear(20, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1)
    before: dict[int, Any] = {}

    def train(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step)
        optimizer.step()
        slots = [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]
        before[step] = [[p.detach().clone() for p in model.parameters()], slots]

    train(1)
    names = run("torch", model=model, optimizer=optimizer, NamedOptimizer=NamedOptimizer)
    train(2)
    report = names["run"].save(2, {"model": model, "optim": names["named"]}).result()
    assert report.written_bytes < 0.5 * report.bytes
    assert steps_of(2, "ckpt/torch") == {"0": 2, "1": 1, "2": 1}
    train(3)
    names["run"].load({"model": model, "optim": names["named"]})
    slots = [optimizer.state[p]["exp_avg"] for p in model.parameters()]
    for at, (name, found) in enumerate(model.named_parameters()):
        step = 1 if "experts.1." in name or "experts.2." in name else 2
        assert torch.equal(found, before[step][0][at]), name
        assert torch.equal(slots[at], before[step][1][at]), name
        assert int(optimizer.state[found]["step"]) == step


def test_stacked() -> None:
    jax = pytest.importorskip("jax")
    from jax.sharding import NamedSharding, PartitionSpec

    names = run("stacked")
    mesh = jax.make_mesh((8,), ("expert",))
    split = NamedSharding(mesh, PartitionSpec("expert"))
    moe = {"up": np.ones((8, 30, 9)), "down": jax.device_put(np.ones((8, 30, 9)), split)}
    for step in (1, 2):
        report = names["run"].save(step, {"layers": {"moe": moe}}).result()
    assert report.reused_bytes == report.bytes / 2


def test_own_choice_and_tokens() -> None:
    names = run("choose")
    for step, seen in enumerate([[0] * 8, range(8), [9, 9, 2, 3, 4, 5, 6, 7], [9] * 8]):
        saved = {"params": {"layers": {"0": {"experts": {str(x): np.ones(9) for x in range(8)}}}}}
        tree = saved["params"]
        run("tokens", run=names["run"], step=step, state=tree, seen=seen)
    names["run"].wait()
    # In step 2 those that lacked most in step 1, and so on.
    expected = {0: 3, 1: 3, 2: 0, 3: 0, 4: 0, 5: 0, 6: 2, 7: 2}
    assert steps_of(3, "ckpt/busiest") == {str(x): step for x, step in expected.items()}
    assert 0 < unickpt.open("ckpt/busiest/step_3").metadata["unickpt"]["experts"]["plt"] < 1
