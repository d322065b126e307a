"""What `Rules.observe` makes of the converters of torchtune, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("torchao")
pytest.importorskip("blobfile")  # torchtune has it, and nothing of unickpt

from benchmarks.zoo.__main__ import rows_of


def test_all_but_one_model_are_rules() -> None:
    rows = [*rows_of("torchtune")]
    partly = [row["name"] for row in rows if row["result"] != "rules"]
    assert len(rows) == 36
    # Elements of its positions are in several places of one array.
    assert partly == ["llama3-2-vision/hf/tune-to", "llama3-2-vision/hf/to-tune"]
    assert not any(row["wrong"] for row in rows if row["result"] == "rules")
