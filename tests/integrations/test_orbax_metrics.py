"""Metrics that are not finite, and forged ones, in unickpt.integrations.orbax."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.forging import forge_index, index_of

import unickpt

pytest.importorskip("jax")
from unickpt.integrations import orbax as ours


def test_a_training_that_diverges_is_saved_as_with_orbax(tmp_path: Path) -> None:
    scores = {1: 0.5, 2: float("nan"), 3: float("-inf"), 4: 0.25}
    options = ours.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda m: m["score"])
    with ours.CheckpointManager(tmp_path, options=options) as first:
        for step, score in scores.items():
            first.save(step, args=ours.args.StandardSave({"w": 1}), metrics={"score": score})
            assert repr(first.metrics(step)["score"]) == repr(score)
            first.wait_until_finished()
            with ours.CheckpointManager(tmp_path, options=options) as again:
                assert repr(again.metrics(step)["score"]) == repr(score)  # as it was stored
                assert again.best_step() == 1
        assert first.all_steps() == [1, 4]


@pytest.mark.parametrize("metrics", ["text", {"a": [1, "b"]}, '{"score": NaN}', None])
def test_other_metrics_come_back_as_they_were(tmp_path: Path, metrics: Any) -> None:
    with ours.CheckpointManager(tmp_path) as first:
        first.save(1, args=ours.args.StandardSave({"w": 1}), metrics=metrics)
    with ours.CheckpointManager(tmp_path) as again:
        assert again.metrics(1) == metrics


@pytest.mark.parametrize(
    ("forged", "text"),
    [
        ({"metadata": {"metrics": "{"}}, "its metrics are no JSON"),
        ({"metadata": {"metrics": "[" * 100_000}}, "its metrics are no JSON"),
        ({"created": "yesterday"}, "the time of its save"),
    ],
)
def test_forged_facts_of_a_step_are_an_error(
    tmp_path: Path, forged: dict[str, Any], text: str
) -> None:
    index, table = index_of(**forged)
    forge_index(tmp_path / "step_1", index, table)
    with (
        ours.CheckpointManager(tmp_path) as found,
        pytest.raises(unickpt.CheckpointCorrupt, match=text),
    ):
        found.metadata(1)
