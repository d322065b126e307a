"""What is observed of vLLM's loaders, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm")

from benchmarks.zoo.__main__ import rows_of

pytestmark = pytest.mark.filterwarnings("ignore")  # those of vLLM and what it imports


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3MoeForCausalLM"])
def test_each_size_is_rules_and_its_digests_are_as_predicted(architecture: str) -> None:
    rows = [*rows_of("vllm", f"{architecture}/")]
    assert [row["result"] for row in rows] == ["rules"] * 3
    for row in rows:
        equal, _, every = row["sha256"].partition(" of ")
        assert equal == every != "0"
        assert row["wrong"] == 0
