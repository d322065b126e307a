"""What `Rules.observe` makes of the converters of torchtitan, in its own environment."""

from __future__ import annotations

import pytest

pytest.importorskip("torchtitan")
pytest.importorskip("fla")

from benchmarks.zoo.__main__ import rows_of


def test_all_adapters_are_rules_in_both_directions() -> None:
    rows = [*rows_of("torchtitan")]
    assert len(rows) == 30
    assert {row["result"] for row in rows} == {"rules"}
    assert not any(row["wrong"] for row in rows)
