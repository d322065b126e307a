"""A flip that exchanges pages changes all elements at their addresses, or none."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from unickpt import SaveOptions
from unickpt.plugins.weights import Follower, Publisher, live_arrays, page_swap
from unickpt.types import Box, LocalFragments

pytestmark = pytest.mark.plugins
OPTIONS = SaveOptions(chunk_bytes=1 << 19, fsync=False)
SHAPE = (1030, 1025)  # of 2 MiB in 16 bits, which ends within a page


class Trainer:
    """Publishes versions of which a few elements change, or all."""

    def __init__(self, root: Path) -> None:
        self.rng = np.random.default_rng(0)
        self.state = {"w": self.rng.integers(0, 9999, SHAPE, np.int16), "small": np.arange(9)}
        self.publisher = Publisher(root, options=OPTIONS)

    def publish(self, version: int, every: int = 97) -> None:
        self.state["w"].reshape(-1)[version % every :: every] += 1
        self.state["small"][version % 9] += 1
        self.publisher.publish(version, self.state).result()


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[Trainer]:
    made = Trainer(tmp_path / "run")
    with made.publisher:
        yield made


def numpy_array() -> tuple[Any, Any]:
    live = np.zeros(SHAPE, np.int16)
    return live, live


def tensor() -> tuple[Any, Any]:
    live = torch.zeros(SHAPE, dtype=torch.int16)
    return live, live


def transposed() -> tuple[Any, Any]:
    live = torch.zeros(SHAPE[::-1], dtype=torch.int16).T
    return live, live


def fragments() -> tuple[Any, Any]:
    """The rows of two ranks in one parameter, in another order, and some within another one."""
    fused, half = torch.zeros(1030, 1025, dtype=torch.int16), 515
    parts = [(0, half, fused[half:]), (half, 1030, fused[:half])]
    tree = LocalFragments(SHAPE, [(Box((a, 0), (b, 1025)), part) for a, b, part in parts])
    return tree, lambda: torch.cat([fused[half:], fused[:half]])


def columns() -> tuple[Any, Any]:
    """Memory with gaps, which stay."""
    wide = np.full((1030, 2000), 7, np.int16)

    def read() -> Any:
        assert (wide[:, 1025:] == 7).all()
        return wide[:, :1025]

    return wide[:, :1025], read


def shared() -> tuple[Any, Any]:
    """Memory that another process may have, too."""
    live = np.frombuffer(mmap.mmap(-1, 2 * 1030 * 1025), np.int16).reshape(SHAPE)
    return live, live


def two_mappings() -> tuple[Any, Any]:
    memory = mmap.mmap(-1, 4 << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK, 0, 1 << 20)
    live = np.frombuffer(memory, np.int16)[: 1030 * 1025].reshape(SHAPE)
    return live, live


@pytest.mark.parametrize(
    ("make", "moves"),
    [
        (numpy_array, True),
        (tensor, True),
        (transposed, True),
        (fragments, True),
        (columns, False),
        (shared, False),
        (two_mappings, True),
    ],
)
def test_arrays_of_all_kinds_change_at_their_addresses(
    make: Callable[[], tuple[Any, Any]], moves: bool, trainer: Trainer, tmp_path: Path
) -> None:
    live, expected = make()
    read = expected if callable(expected) else lambda: expected
    small = np.zeros(9, int)
    assert page_swap._can_move()
    pages = page_swap.PagesChange.apply
    calls = list[int]()

    def counted(change: Any) -> None:
        calls.append(1)
        pages(change)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page_swap.PagesChange, "apply", counted)
        with Follower(tmp_path / "run", {"w": live, "small": small}, swap="pages") as follower:
            for version, every in enumerate([1, 97, 97, 3]):
                trainer.publish(version, every)
                assert follower.update()
                assert np.array_equal(np.asarray(read()), trainer.state["w"])
                assert np.array_equal(small, trainer.state["small"])
                assert follower.check().ok
            assert follower.last_update is not None
            if moves:
                assert follower.last_update.staged_bytes >= 2 * 1030 * 1025
            assert len(calls) == (4 if moves else 0)


def test_pages_of_each_mapping_are_moved_for_themselves() -> None:
    array, _ = two_mappings()
    halves = [array[:500], array[500:]]  # consecutive memory is one region
    ((region,), (mapping,)) = map(page_swap._regions, (halves, [np.zeros(9 << 20)]))
    assert (len(region.parts), len(mapping.parts)) == (2, 1)
    assert sum(part.stop - part.start for part in region.parts) == array.nbytes // 4096 * 4096


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_a_failure_after_pages_were_exchanged_is_undone(
    error: type[BaseException], trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = {"w": np.zeros(SHAPE, np.int16), "small": np.zeros(9, int)}
    with Follower(tmp_path / "run", live, swap="pages") as follower:
        trainer.publish(0)
        follower.update()
        old = {name: array.copy() for name, array in live.items()}
        trainer.publish(1)
        seen = list[bool]()

        def failing(change: Any) -> None:
            seen.append(bool((live["w"] == trainer.state["w"]).all()))
            raise error("provoked")

        with monkeypatch.context() as patch:
            patch.setattr(live_arrays.ElementsChange, "apply", failing)
            patch.setattr("unickpt.plugins.weights.follower._threads", lambda: 1)
            with pytest.raises(error, match="provoked"):
                follower.update()
        assert seen == [True]
        assert all(np.array_equal(live[name], old[name]) for name in live)
        assert follower.version == 0
        assert follower.update()
        assert all(np.array_equal(live[name], trainer.state[name]) for name in live)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_pages_that_the_system_does_not_move_are_moved_back(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    live = [np.full(3 << 20, i, np.uint8) for i in range(2)]
    regions = page_swap._regions(live)
    assert len(regions) == 2
    for region in regions:
        region.copy()
        region.staged[...] = 9
    move, calls = page_swap._move, list[int]()

    def refusing(*arguments: int) -> None:
        calls.append(1)
        if len(calls) == number:
            raise OSError("provoked")
        move(*arguments)

    monkeypatch.setattr(page_swap, "_move", refusing)
    with pytest.raises(OSError, match="provoked"):
        live_arrays.flip([page_swap.PagesChange(regions, live)])
    assert [set(array.tolist()) for array in live] == [{0}, {1}]
    assert all((region.staged == 9).all() for region in regions)
    monkeypatch.undo()
    live_arrays.flip([page_swap.PagesChange(regions, live)])
    assert [set(array.tolist()) for array in live] == [{9}, {9}]


def test_memory_that_cannot_be_copied_is_changed_in_place(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(region: Any) -> None:
        raise OSError(12, "Cannot allocate memory")

    live = {"w": np.zeros(SHAPE, np.int16)}
    with Follower(tmp_path / "run", live, swap="pages") as follower:
        trainer.publish(0)
        assert page_swap._can_move()
        monkeypatch.setattr(page_swap._PageRange, "copy", refusing)
        assert follower.update()
        assert np.array_equal(live["w"], trainer.state["w"])


def test_other_values_of_swap_are_refused(tmp_path: Path) -> None:
    swap: Any = "page"
    with pytest.raises(ValueError, match="swap='page' must be True, False or 'pages'"):
        Follower(tmp_path, {}, swap=swap)
