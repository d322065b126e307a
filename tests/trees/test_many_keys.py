"""The names of very many keys, in little time."""

from __future__ import annotations

from support.counts import lines_run

from unickpt.trees import tree


def test_keys_of_both_types_take_little_time() -> None:
    keys = [tuple(range(n)) + tuple(f"a{i}" for i in range(n)) for n in (100, 2000)]
    work = [lines_run(lambda k=k: tree.child_names("dict", k, "")) for k in keys]
    assert work[1] < 30 * work[0], work
    assert tree.child_names("dict", (1, "1", "2", -1, "-1"), "") == [
        "1", "%31", "2", "-1", "%2D1",
    ]  # fmt: skip
