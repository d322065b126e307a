"""Lost tokens: counted, recorded, kept within the budget; against a plain computation."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from unickpt import Checkpointer, Experts, SaveOptions, UnsupportedLeaf, open
from unickpt.cli.app import app
from unickpt.plugins.experts.expert_choice import ExpertRecord, TokenCounts

OPTIONS = SaveOptions(fsync=False)
KEY = "layers/*/experts/{x}/w"
EXPERTS, LAYERS = 4, ("layers/0/experts", "layers/1/experts")


def state(step: int) -> dict[str, Any]:
    experts = {str(x): {"w": np.full(600, step)} for x in range(EXPERTS)}
    return {"layers": {"0": {"experts": experts}, "1": {"experts": experts}}}


class Tokens:
    """What each expert of each layer has seen, and the plain computation of what was lost."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.seen = {layer: [0] * EXPERTS for layer in LAYERS}
        self.at: dict[int, dict[str, list[int]]] = {}
        """By step, the counts when it was saved, or when the run restarted from it."""
        self.lost = dict.fromkeys(LAYERS, 0)

    def train(self) -> None:
        for counts in self.seen.values():
            for x in range(EXPERTS):
                counts[x] += self.rng.randrange(100)

    def of(self, step: int) -> dict[str, list[int]]:
        self.at[step] = {layer: list(counts) for layer, counts in self.seen.items()}
        return self.at[step]


def record_of(path: Path) -> Any:
    return open(path).metadata["unickpt"]["experts"]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), k=st.integers(1, 4))
def test_the_proportion_of_lost_tokens(
    seed: int, k: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root, tokens = tmp_path_factory.mktemp("plt"), Tokens(seed)
    rng = random.Random(seed)
    since = [0] * EXPERTS  # the step from which each expert's tokens count as not yet lost
    lost = dict.fromkeys(LAYERS, 0)
    step = 0
    for job in range(3):
        with Checkpointer(root, experts=Experts({KEY: k}, plt_budget=None), options=OPTIONS) as run:
            if job:
                run.load()
                for layer in LAYERS:
                    now = tokens.at[step][layer]
                    lost[layer] += sum(now[x] - tokens.at[since[x]][layer][x] for x in range(4))
                tokens.seen = {layer: list(counts) for layer, counts in tokens.at[step].items()}
                since = [step] * EXPERTS
            for _ in range(rng.randrange(1, 5)):
                step += 1
                tokens.train()
                run.save(step, state(step), metrics={"loss": 1}, tokens=tokens.of(step), wait=True)
                metadata = open(root / f"step_{step}").metadata["unickpt"]
                assert metadata["metrics"] == {"loss": 1.0}
                found = metadata["experts"]
                for x in range(EXPERTS):
                    if found["steps"][KEY][str(x)] == step:
                        since[x] = step
                parts = []
                for layer in LAYERS:
                    missing = sum(
                        tokens.at[step][layer][x] - tokens.at[since[x]][layer][x] for x in range(4)
                    )
                    parts.append((lost[layer] + missing) / (sum(tokens.at[step][layer]) or 1))
                    assert found["layers"][layer]["lost_before"] == lost[layer]
                assert found["plt"] == pytest.approx(sum(parts) / len(parts))
            run.drop_later_steps(step)


def test_k_doubles_when_another_restart_would_exceed_the_budget(tmp_path: Path) -> None:
    tokens, step, saved, plts = Tokens(1), 0, [], []
    for job in range(5):
        with Checkpointer(
            tmp_path, experts=Experts({KEY: 1}, plt_budget=0.2), options=OPTIONS
        ) as run:
            if job:
                run.load()
            for _ in range(4):
                step += 1
                tokens.train()
                run.save(step, state(step), tokens=tokens.of(step), wait=True)
            found = record_of(tmp_path / f"step_{step}")
            saved.append(sum(of == step for of in found["steps"][KEY].values()))
            plts.append(found["plt"])
    assert saved[0] == 1
    assert saved[-1] == EXPERTS, "at last all experts are saved"
    assert sorted(saved) == saved
    assert plts[-1] < 0.25


def record(lost: float, before: float = 0.0, doublings: int = 0) -> ExpertRecord:
    counts = TokenCounts({0: 500.0, 1: 500.0}, {0: lost}, before)
    return ExpertRecord({"k": {0: 1, 1: 1}}, {"l": counts}, doublings, {"l": "k"})


@pytest.mark.parametrize(
    ("lost", "before", "budget", "doublings"),
    [
        (10, 0, 0.0375, 0),  # 1 % is lost, 2 % would be
        (20, 0, 0.0375, 1),
        (10, 20, 0.0375, 1),
        (0, 900, 0.0375, 0),  # a restart loses nothing
        (500, 0, None, 0),
    ],
)
def test_the_budget(lost: float, before: float, budget: float | None, doublings: int) -> None:
    after = record(lost, before).restarted(budget)
    assert after.doublings == doublings
    assert after.lost_tokens == (lost + before) / 1000
    assert after.layers["l"].lost == {}


def test_choose_gets_the_lost_tokens(tmp_path: Path) -> None:
    def most_lost(facts: Any) -> list[int]:
        return sorted(facts.lost, key=facts.lost.__getitem__)[-facts.k :] or [0]

    with Checkpointer(
        tmp_path, experts=Experts({KEY: 1}, choose=most_lost), options=OPTIONS
    ) as run:
        for step, counts in enumerate(
            [(0, 0, 0, 0), (5, 30, 3, 1), (9, 30, 40, 2), (9, 30, 41, 9)]
        ):
            run.save(step, state(step), tokens={KEY: counts}, wait=True)
    # The choice knows the counts as of the step before.
    assert record_of(tmp_path / "step_3")["steps"][KEY] == {"0": 1, "1": 2, "2": 3, "3": 0}


def test_counts_among_the_metrics(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, partial={KEY: 1}, plt_budget=None, options=OPTIONS) as run:
        for step in range(3):
            counts = {f"tokens/{KEY}/{x}": 10 * step for x in range(EXPERTS)}
            run.save(step, state(step), metrics={"loss": step, **counts}, wait=True)
        with pytest.raises(UnsupportedLeaf, match="must be tokens/<layer>/<number of an expert>"):
            run.save(3, state(3), metrics={f"tokens/{KEY}/": 1})
    assert open(tmp_path / "step_2").metadata["unickpt"]["metrics"] == {"loss": 2.0}
    # Experts 2 and 3 are of step 0, expert 0 is of step 1.
    assert record_of(tmp_path / "step_2")["plt"] == (10 + 20 + 20) / 80


def test_the_counts_outlive_a_failed_save(tmp_path: Path) -> None:
    """All experts are written then, but what was lost before remains lost."""
    for job in range(2):
        with Checkpointer(
            tmp_path, experts=Experts({KEY: 1}, plt_budget=0.1), options=OPTIONS
        ) as run:
            if job:
                run.load()
            for step in range(3 * job, 3 * job + 3):
                tokens = {KEY: dict.fromkeys(range(EXPERTS), 10 * step)}
                if step == 4:
                    with pytest.raises(UnsupportedLeaf):
                        run.save(step, state(step) | {"bad": object()}, tokens=tokens)
                run.save(step, state(step), tokens=tokens, wait=True)
    found = record_of(tmp_path / "step_5")
    # Of step 2: expert 0 as of step 1, and 2 and 3 as of step 0.
    assert found["layers"][KEY]["lost_before"] == 10 + 20 + 20
    assert found["doublings"] == 1
    assert found["steps"][KEY] == {"0": 5, "1": 5, "2": 4, "3": 4}


def test_counts_may_be_missing_now_and_then(tmp_path: Path) -> None:
    with Checkpointer(tmp_path, experts=Experts({KEY: 1}), options=OPTIONS) as run:
        for step, counts in enumerate([(1, 1), (5, 5), None, (9, 9)]):
            run.save(step, state(step), tokens=counts and {KEY: counts}, wait=True)
    layer = record_of(tmp_path / "step_3")["layers"][KEY]
    # 0 was saved in step 1, 1 in step 2, without a count: too much is better than too little.
    assert layer == {
        "key": KEY,
        "seen": {"0": 9.0, "1": 9.0},
        "lost": {"0": 4.0, "1": 4.0},
        "lost_before": 0.0,
    }


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ({"layers/0/experts": {"a": 1}}, "'a' is not the number of an expert"),
        ({"layers/0": [1]}, "is neither a key of `experts`"),
        ({"layers/0/experts": ["many"]}, "must be a number"),
        ({"layers/0/experts": {1: -1}}, "but counts tokens"),
        ({"layers/0/experts": [float("nan")]}, "but counts tokens"),
        ({"layers/0/experts": {1: 3}}, "had seen 5 before"),
        ([1], "tokens"),
    ],
)
def test_counts_that_are_not_valid(tokens: Any, message: str, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, experts=Experts({KEY: 1}), options=OPTIONS) as run:
        run.save(0, state(0), tokens={"layers/0/experts": {1: 5}}, wait=True)
        with pytest.raises(UnsupportedLeaf, match=message):
            run.save(1, state(1), tokens=tokens)
        run.save(2, state(2), wait=True)


def test_inspect_shows_it(tmp_path: Path) -> None:
    tokens = Tokens(3)
    with Checkpointer(tmp_path, experts=Experts({KEY: 1}), options=OPTIONS) as run:
        for step in range(3):
            tokens.train()
            run.save(step, state(step), tokens=tokens.of(step), wait=True)
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "step_2")], env={"COLUMNS": "200"})
    assert shown.exit_code == 0, shown.output
    text = " ".join(shown.output.split())
    assert (
        f"experts: {KEY}: 4 experts, 3 as of an earlier step: 0 of step 1; 2, 3 of step 0" in text
    )
    plt = record_of(tmp_path / "step_2")["plt"]
    assert f"lost: {plt:.3%} of all tokens" in text
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "step_0")], env={"COLUMNS": "200"})
    assert "4 experts, all of this step" in " ".join(shown.output.split())
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path / "step_2"), "--json"])
    found = json.loads(shown.output)["metadata"]["unickpt"]["experts"]
    assert found == record_of(tmp_path / "step_2")
