"""What `Rules.observe` makes of MaxText's `param_mapping`, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("maxtext.checkpoint_conversion.to_huggingface")

from benchmarks.zoo.__main__ import rows_of


@pytest.mark.filterwarnings("default")  # they are MaxText's, of other versions of JAX
@pytest.mark.parametrize("model", ["llama3.1-8b", "gemma3-4b", "gpt-oss-20b"])
def test_both_directions_are_rules_scanned_and_not(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZOO_MODELS", model)
    rows = [*rows_of("maxtext")]
    assert [row["result"] for row in rows] == ["rules"] * 4
    assert [row["wrong"] for row in rows] == [0] * 4
