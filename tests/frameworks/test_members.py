"""Groups that are a part of a job: who is in them, what they are called, who is on their node."""

from __future__ import annotations

from typing import Any

import pytest

from unickpt import LoadOptions, ProcessGroup, SaveOptions
from unickpt.arrays.layout import Mesh
from unickpt.errors import ProcessFailed, UnsupportedLeaf
from unickpt.frameworks.members import Members, explained, legend, named
from unickpt.frameworks.process_group import (
    BoundedGroup,
    NodeCount,
    launched_together,
    processes_on_node,
)

RANKS = Members((3, 0, 5), 8, "rank", "torch.distributed")
ONE = Members((4,), 8, "process", "jax.distributed")


class Part(BoundedGroup):
    """A group of ranks of a job of eight."""

    def __init__(self, index: int, *ranks: int) -> None:
        self.index, self.count = index, len(ranks)
        self.members = Members(ranks, 8, "rank", "torch.distributed")

    def within(self, timeout_s: float) -> Any:
        return self

    def next_attempt(self) -> str:
        return "s-000000"


def test_what_processes_are_called() -> None:
    assert named(None, [2]) == "process 2"
    assert named(None, [0, 2]) == "processes 0, 2"
    assert named(RANKS, [0]) == "rank 3"
    assert named(RANKS, [2, 1]) == "ranks 5, 0"
    assert named(Members((7, 8), 9, "process", "jax.distributed"), [0, 1]) == "processes 7, 8"
    assert str(RANKS) == "ranks 3, 0, 5 of torch.distributed"
    assert str(ONE) == "process 4 of jax.distributed"
    many = Members(tuple(range(1, 5000)), 5000, "rank", "torch.distributed")
    assert str(many) == "ranks 1, 2, 3, 4, 5, 6, 7, 8, ... of torch.distributed"


def test_a_mesh_is_counted_by_positions_in_the_group() -> None:
    mesh = Mesh(("a", "b"), (2, 2), (5, 3, 3, 0))
    assert RANKS.mesh(mesh) == Mesh(("a", "b"), (2, 2), (2, 0, 0, 1))
    RANKS.check("a DTensor", mesh.processes)
    with pytest.raises(TypeError) as caught:
        RANKS.check("a DTensor", (1, 5, 3, 1, 7))
    message = str(caught.value)
    assert message.startswith("a DTensor on ranks 1, 3, 5, 7 cannot be saved by ranks 3, 0, 5 of ")
    assert "ranks 1, 7 are missing; let all that hold it save it" in message


def test_an_error_that_names_processes_says_which_these_are() -> None:
    told = " (the processes of this group are, in order, ranks 3, 0, 5 of torch.distributed)"
    assert legend(RANKS) == told
    for error in (ProcessFailed("process 2 failed"), UnsupportedLeaf("'w' differs by process")):
        before = str(error)
        assert str(explained(error, RANKS)) == before + told
        assert str(explained(error, RANKS)) == before + told, "once"
    assert str(explained(UnsupportedLeaf("'w': sparse"), RANKS)) == "'w': sparse"
    assert str(explained(ProcessFailed("process 2 failed"), None)) == "process 2 failed"
    assert str(explained(ValueError("a process"), RANKS)) == "a process"


@pytest.mark.parametrize(
    ("ranks", "index", "environment", "expected"),
    [
        ((0, 2, 3, 5), 1, {"RANK": "2", "LOCAL_RANK": "2"}, 3),
        ((0, 2, 3, 5), 3, {"RANK": "5", "LOCAL_RANK": "1"}, 1),
        ((5, 6), 0, {"RANK": "5", "LOCAL_RANK": "1"}, 2),
        ((1,), 0, {"RANK": "1", "LOCAL_RANK": "1"}, 1),
        ((0, 2), 1, {"RANK": "2"}, 1),  # nothing says where the node's ranks begin
        ((0, 2), 1, {"RANK": "3", "LOCAL_RANK": "3"}, 1),  # of another job
        ((0, 2), 1, {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "4"}, 1),
    ],
)
def test_who_of_a_group_is_on_this_node(
    ranks: tuple[int, ...],
    index: int,
    environment: dict[str, str],
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two nodes of four, as torchrun numbers them."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"LOCAL_WORLD_SIZE": "4", "WORLD_SIZE": "8", **environment}.items():
        monkeypatch.setenv(name, value)
    assert launched_together(Part(index, *ranks)) == expected
    assert launched_together(None) == 4
    assert launched_together(ProcessGroup(0, 2, "s")) == 4


def test_memory_is_shared_with_the_other_roles_of_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    part = Part(0, 2, 3, 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert processes_on_node(part) == 3, "at most, as nothing is known"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert processes_on_node(part) == 4
    options = SaveOptions(group=part, budget_bytes=1000)
    assert options.working_bytes == 250


class Gone:
    """A store that ends with its process, after all have arrived but one."""

    def __init__(self) -> None:
        self.values: dict[str, int] = {}
        self.ended = False

    def add(self, key: str, amount: int) -> int:
        if self.ended:
            raise RuntimeError("connection closed")
        self.values[key] = self.values.get(key, 0) + amount
        return self.values[key]

    def announce(self, key: str) -> None: ...

    def wait(self, key: str, seconds: float) -> None: ...


def test_without_the_store_all_processes_may_be_here() -> None:
    store = Gone()
    count = NodeCount(store, 5, "s", "node")
    count.arrive()
    assert count.at_most() == 5
    store.ended = True
    assert count.at_most() == 5


@pytest.mark.parametrize("options", [SaveOptions, LoadOptions])
@pytest.mark.parametrize("group", [3, "actor", [0, 2, 3], (), {0: 1}, object()])
def test_what_is_no_group_is_refused(options: Any, group: Any) -> None:
    with pytest.raises(TypeError) as caught:
        options(group=group)
    message = str(caught.value)
    assert message.startswith(f"group is of type {type(group).__name__}; omit it under")
    assert "dist.new_group([0, 2, 3])" in message
    assert "list of jax devices" in message
    assert "unickpt.ProcessGroup(index, count, session)" in message
