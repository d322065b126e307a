"""What `Rules.observe` makes of the converters of tunix, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("qwix")
pytest.importorskip("metrax")

from benchmarks.zoo.__main__ import rows_of


@pytest.mark.filterwarnings("default")  # they are Tunix's, of other versions of JAX
@pytest.mark.parametrize("model", ["qwen3-moe", "gemma3", "qwen2"])
def test_both_loaders_are_rules(model: str) -> None:
    rows = [*rows_of("tunix", f"{model}/")]
    assert [row["result"] for row in rows] == ["rules", "rules"]
    assert [row["wrong"] for row in rows] == [0, 0]
