"""What `Rules.observe` makes of the converters of litgpt, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("litgpt")

from benchmarks.zoo.__main__ import rows_of


@pytest.mark.parametrize("model", ["pythia-160m", "Mixtral-8x7B-v0.1", "Gemma-3-1b-it", "phi-4"])
def test_both_directions_are_rules(model: str) -> None:
    rows = [*rows_of("litgpt", f"{model}/")]
    assert [row["result"] for row in rows] == ["rules", "rules"]
    assert [row["wrong"] for row in rows] == [0, 0]
