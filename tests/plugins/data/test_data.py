"""`unickpt.data` on jobs whose processes are threads; test_resharding.py has real ones."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.saving import in_job, save_in_job

import unickpt
from unickpt import LoadMismatch, LoadOptions, PerProcess
from unickpt.data import Buffer, Ranks, Samples, Sections, Shards
from unickpt.frameworks.sections import StoredValue

EVERY = list(range(60))


class Counting:
    """A loader with `state_dict`; each epoch gives the same."""

    def __init__(self, numbers: Sequence[int], size: int = 0) -> None:
        self.numbers, self.given = numbers, 0
        self.ballast = np.arange(size // 8)

    def __iter__(self) -> Iterator[int]:
        while self.given < len(self.numbers):
            self.given += 1
            yield self.numbers[self.given - 1]
        self.given = 0

    def state_dict(self) -> dict[str, Any]:
        return {"given": self.given, "ballast": self.ballast}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.given, self.ballast = state["given"], state["ballast"]


def make(shard: int, count: int) -> Counting:
    return Counting(EVERY[shard::count])


def turns(ranks: Ranks, batch: int | None = 1) -> Samples:
    size = batch or 1
    return Samples(
        lambda order: [order[i : i + size] for i in range(0, len(order), size)],
        len(EVERY),
        batch,
        ranks,
        seed=4,
    )


def raised(outcomes: Sequence[Any]) -> list[Any]:
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)


def save(path: Path, states: Sequence[Any]) -> None:
    raised(save_in_job(path, len(states), lambda i: {"data": states[i]}))


def load(path: Path | str, states: Sequence[Any]) -> list[Any]:
    """Each process loads into its state; the errors."""

    def work(group: Any) -> None:
        unickpt.load(path, {"data": states[group.index]}, options=LoadOptions(group=group))

    return in_job(len(states), work)


def everyone(count: int, kind: Callable[[Ranks], Any]) -> list[Any]:
    return [kind(Ranks(rank, count)) for rank in range(count)]


def shards(ranks: Ranks) -> Shards:
    return Shards(make, 12, ranks)


# --- other numbers of ranks -----------------------------------------------------------------------


@pytest.mark.parametrize("kind", [shards, turns])
@settings(max_examples=12)
@given(data=st.data())
def test_every_sample_comes_once_whatever_the_numbers(
    kind: Callable[[Ranks], Any], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("run")
    drawn, found = list[int](), list[Any]()
    numbers = data.draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    for job, count in enumerate(numbers):
        found = everyone(count, kind)
        if job:
            raised(load(folder / str(job - 1), found))
        for each in found:  # some are further than others
            for batch in islice(each, data.draw(st.integers(0, 3))):
                drawn += batch if isinstance(batch, list) else [batch]
        save(folder / str(job), found)
    for each in found:
        for batch in each:
            drawn += batch if isinstance(batch, list) else [batch]
    assert sorted(drawn) == EVERY


@settings(max_examples=15)
@given(
    st.lists(st.lists(st.integers(0, 90), max_size=5), min_size=1, max_size=6), st.integers(1, 7)
)
def test_buffers_are_divided_anew(lengths: list[list[int]], after: int) -> None:
    path = "memory://data/buffers"
    before = [Buffer(ranks=Ranks(r, len(lengths))) for r in range(len(lengths))]
    for rank, (buffer, own) in enumerate(zip(before, lengths, strict=True)):
        buffer.extend(np.full(n, 100 * rank + i, np.int32) for i, n in enumerate(own))
    raised(save_in_job(path, len(before), lambda i: {"data": before[i]}, overwrite=True))
    found = everyone(after, lambda ranks: Buffer(ranks=ranks))
    raised(load(path, found))
    if after == len(before):
        assert [[*map(len, b)] for b in found] == lengths
    there = sorted((len(x), *x[:1].tolist()) for each in found for x in each)
    assert there == sorted((len(x), *x[:1].tolist()) for each in before for x in each)
    if after != len(before):
        assert max(map(len, found)) - min(map(len, found)) <= 1


def test_samples_of_every_kind_come_back_from_a_buffer(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    samples: list[Any] = [
        [[1, 2, 3], [4]],
        [np.arange(3, dtype=np.uint16), np.arange(0, dtype=np.uint16)],
        [torch.arange(4), torch.arange(2)],
        [np.zeros(2, np.int32), np.zeros(2, np.int64)],
        ["text", None, {"tokens": torch.ones(2, dtype=torch.bfloat16), "at": 3}],
        [[1 << 70], []],
        [],
    ]
    before = [Buffer(own, Ranks(i, len(samples))) for i, own in enumerate(samples)]
    save(tmp_path / "c", before)
    found = everyone(len(samples), lambda ranks: Buffer(ranks=ranks))
    raised(load(tmp_path / "c", found))
    for own, buffer in zip(samples, found, strict=True):
        assert [*map(type, buffer)] == [*map(type, own)]
        assert repr(list(buffer)) == repr(own)
    with pytest.raises(IndexError):
        found[-1].popleft()


def test_epochs_go_on(tmp_path: Path) -> None:
    for number, kind in enumerate((shards, turns)):
        whole = kind(Ranks())
        order = [[*whole], [*whole], [*whole]]
        again, second = kind(Ranks()), kind(Ranks())
        assert [*again] == order[0]
        assert [*islice(again, 7)] == order[1][:7]
        save(tmp_path / str(number), [again])
        raised(load(tmp_path / str(number), [second]))
        assert [*second] == order[1][7:]
        assert [*second] == order[2]
        assert (order[0] == order[1]) == (kind is shards)  # Samples shuffles each anew


def test_ranks_in_other_epochs_draw_every_sample_once(tmp_path: Path) -> None:
    """Of 7 ranks, some have 9 of 60 samples and some 8: their epochs end at other steps."""
    before = everyone(7, turns)
    drawn = list[int]()
    for each in before:
        batches = (batch for _ in range(2) for batch in each)
        drawn += [i for batch in islice(batches, 9) for i in batch]
    save(tmp_path / "c", before)
    after = everyone(4, turns)
    raised(load(tmp_path / "c", after))
    while len(drawn) < 120:
        for each in after:
            drawn += [i for batch in each for i in batch]
    assert sorted(drawn)[:120:2] == EVERY == sorted(drawn)[1:120:2]


# --- one copy, and what is read -------------------------------------------------------------------


def test_one_process_of_each_rank_saves(tmp_path: Path) -> None:
    def state(process: int, count: int, kind: Any) -> Any:
        return kind(Ranks(process // 2, count, writes=process % 2 == 1))

    for number, kind in enumerate((shards, turns)):
        path = tmp_path / str(number)
        before = [state(i, 3, kind) for i in range(6)]
        drawn = [[*islice(each, 2)] for each in before]
        save(path, before)
        entry = unickpt.open(path).index.per_process["data"]
        assert [size > 0 for size, _ in entry.blobs] == [False, True] * 3
        same = [state(i, 3, kind) for i in range(6)]
        fewer = [state(i, 2, kind) for i in range(4)]
        for after in (same, fewer):
            raised(load(path, after))
            rest = [[*each] for each in after]
            assert rest[::2] == rest[1::2]
            every = [repr(batch) for own in drawn[::2] + rest[::2] for batch in own]
            assert sorted(every) == sorted(map(repr, kind(Ranks())))
        assert unickpt.verify(path).ok
        values = unickpt.load(path)["data"].values
        assert [value is None for value in values] == [True, False] * 3


@pytest.mark.parametrize("after", [1, 6, 8, 12])
def test_a_process_reads_what_it_needs(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = [Shards(lambda s, n: Counting(EVERY[s::n], 1 << 16), 24, Ranks(r, 8)) for r in range(8)]
    buffers = everyone(8, lambda ranks: Buffer(ranks=ranks))
    for each, buffer in zip(large, buffers, strict=True):
        next(iter(each))
        list(islice(each, 3))
        buffer.extend(np.arange(1000) for _ in range(200))
    raised(save_in_job(tmp_path, 8, lambda i: {"s": large[i], "b": buffers[i]}))
    index = unickpt.open(tmp_path).index
    stored = sum(size for entry in index.per_process.values() for size, _ in entry.blobs)
    read, lock = [0], threading.Lock()
    verified = StoredValue._verified

    def counted(self: Any, start: int, length: int, digest: int) -> bytes:
        with lock:
            read[0] += length
        return verified(self, start, length, digest)

    monkeypatch.setattr(StoredValue, "_verified", counted)
    found = everyone(
        after,
        lambda r: {
            "s": Shards(lambda s, n: Counting(EVERY[s::n], 1 << 16), 24, r),
            "b": Buffer(ranks=r),
        },
    )

    def work(group: Any) -> None:
        unickpt.load(tmp_path, found[group.index], options=LoadOptions(group=group))

    raised(in_job(after, work))
    assert sum(len(each["b"]) for each in found) == 1600
    assert stored <= 1.001 * read[0]
    assert read[0] <= 1.2 * stored, read[0] / stored


def test_a_process_of_the_same_number_reads_its_own_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, everyone(8, shards))
    values, lock = set[int](), threading.Lock()
    verified = StoredValue._verified

    def noted(self: Any, *arguments: int) -> bytes:
        with lock:
            values.add(id(self))
        return verified(self, *arguments)

    monkeypatch.setattr(StoredValue, "_verified", noted)
    like = {"data": shards(Ranks(3, 8))}
    group = unickpt.ProcessGroup(3, 8, session="x")
    unickpt.load(tmp_path, like, options=LoadOptions(group=group))
    assert len(values) == 2  # its own, and the first's head, which says how many ranks saved


# --- before the step that saves -------------------------------------------------------------------


def test_prefetch_collects_before_the_save(tmp_path: Path) -> None:
    collected = list[str]()

    class Slow(Counting):
        def state_dict(self) -> dict[str, Any]:
            collected.append(threading.current_thread().name)
            return super().state_dict()

    loader = Shards(lambda s, n: Slow(EVERY[s::n]), 2, Ranks())
    batches = iter(loader)
    next(batches)
    loader.prefetch(1)
    loader.prefetch(1)
    save(tmp_path / "1", [loader])
    assert collected == ["unickpt-data"]
    next(batches)  # what was collected is of the step before
    save(tmp_path / "2", [loader])
    assert len(collected) == 3
    assert collected[-1] != "unickpt-data"
    loader.prefetch(2)
    next(batches)  # one batch too late: collected anew
    save(tmp_path / "3", [loader])
    for step, drawn in ("1", 1), ("2", 2), ("3", 3):
        again = Shards(make, 2, Ranks())
        raised(load(tmp_path / step, [again]))
        assert len([*again]) == 60 - drawn


def test_an_error_while_collecting_is_raised_by_the_save(tmp_path: Path) -> None:
    class Broken(Counting):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("the workers are gone")

    loader = Shards(lambda s, n: Broken(EVERY[s::n]), 2, Ranks())
    next(iter(loader))
    loader.prefetch(1)
    with pytest.raises(ValueError, match="the workers are gone"):
        unickpt.save(tmp_path, {"data": loader})


# --- what is refused ------------------------------------------------------------------------------


def refused(path: Path, state: Any) -> str:
    (error,) = load(path, [state])
    assert isinstance(error, LoadMismatch), error
    assert f"{path}: per-process leaf 'data': " in str(error).replace("file://", "")
    return str(error)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    save(tmp_path / "s", everyone(3, shards))
    save(tmp_path / "t", everyone(3, turns))
    assert "12 shards, and there are 6 now" in refused(tmp_path / "s", Shards(make, 6, Ranks()))
    other = Samples(lambda order: order, 59, 1, Ranks(), seed=4)
    assert "length=60, now it is 59" in refused(tmp_path / "t", other)
    other = Samples(lambda order: order, 60, 1, Ranks(), seed=5)
    assert "seed=4, now it is 5" in refused(tmp_path / "t", other)
    text = refused(tmp_path / "s", Buffer(ranks=Ranks()))
    assert "process 0 saved of unickpt.data.Shards, which unickpt.data.Buffer cannot" in text


def test_missing_ranks_are_named(tmp_path: Path) -> None:
    lost = [shards(Ranks(0, 3)), shards(Ranks(2, 3)), shards(Ranks(1, 3, writes=False))]
    save(tmp_path / "c", lost)
    text = refused(tmp_path / "c", shards(Ranks()))
    assert "of 3 data-parallel ranks, these saved no state of the loader: 1. " in text
    twice = [shards(Ranks(0, 3)), shards(Ranks(2, 3)), shards(Ranks(2, 3))]
    save(tmp_path / "d", twice)
    text = refused(tmp_path / "d", shards(Ranks()))
    assert "rank 1 of 3 saved no state of the loader, and another rank did twice" in text


def test_if_nobody_saves_the_save_fails(tmp_path: Path) -> None:
    states = [shards(Ranks(0, 1, writes=False))] * 2
    for error in save_in_job(tmp_path, 2, lambda i: {"data": states[i]}):
        assert "no process has a value for the PerProcess leaf 'data'" in str(error)


def test_fewer_shards_than_ranks_and_no_such_rank() -> None:
    with pytest.raises(ValueError, match="4 shards cannot be dealt to 6 data-parallel ranks"):
        Shards(make, 4, Ranks(0, 6))
    with pytest.raises(ValueError, match="no rank 6 of 6"):
        Ranks(6, 6)
    with pytest.raises(ValueError, match="no batches of 0 of 60 samples"):
        Samples(lambda order: order, 60, 0)


def test_a_loader_without_a_state_is_named(tmp_path: Path) -> None:
    loader = Shards(lambda s, n: EVERY[s::n], 2, Ranks())
    next(iter(loader))
    with pytest.raises(TypeError, match="shard 0: a list has neither state_dict"):
        unickpt.save(tmp_path, {"data": loader})


def test_a_loader_that_drops_samples_is_named() -> None:
    samples = Samples(lambda order: [order[:5]], 60, 5, Ranks())
    with pytest.raises(RuntimeError, match="fewer batches of 5 than its 60 samples have"):
        list(samples)


def test_an_iterator_from_before_a_load_is_refused(tmp_path: Path) -> None:
    samples = turns(Ranks())
    save(tmp_path, [samples])
    batches = iter(samples)
    next(batches)
    raised(load(tmp_path, [samples]))
    with pytest.raises(RuntimeError, match="a state was loaded since"):
        next(batches)


# --- other things ---------------------------------------------------------------------------------


def test_states_of_plain_per_process_leaves_are_shards(tmp_path: Path) -> None:
    """A run that began without `unickpt.data`: the state of each process is a shard."""
    before = [make(i, 4) for i in range(4)]
    drawn = [x for each in before for x in islice(each, 3)]
    save(tmp_path, [PerProcess(each.state_dict()) for each in before])
    after = everyone(2, lambda ranks: Shards(make, 4, ranks))
    raised(load(tmp_path, after))
    assert sorted(drawn + [x for each in after for x in each]) == EVERY
    text = refused(tmp_path, Shards(make, 12, Ranks()))
    assert "each is a shard: give Shards(make, 4) instead of 12" in text


def test_what_was_converted_or_copied_goes_on(tmp_path: Path) -> None:
    ranks = [Ranks(i // 2, 2, writes=i % 2 == 0) for i in range(4)]
    before = [shards(each) for each in ranks]
    drawn = [x for each in before[::2] for x in islice(each, 4)]
    save(tmp_path / "c", before)
    unickpt.copy(tmp_path / "c", tmp_path / "copied")

    def convert(group: Any) -> None:
        unickpt.convert(
            tmp_path / "c", tmp_path / "converted", options=unickpt.SaveOptions(group=group)
        )

    raised(in_job(4, convert))
    for path in ("copied", "converted"):
        after = everyone(3, shards)
        raised(load(tmp_path / path, after))
        assert sorted(drawn + [x for each in after for x in each]) == EVERY


def test_sections_of_a_loader_of_ones_own(tmp_path: Path) -> None:
    states = [PerProcess(Sections({"rank": i}, {"a": [i], "b": np.arange(i)})) for i in range(3)]
    save(tmp_path, states)

    def take(saved: Sequence[Any], index: int, count: int) -> Any:
        assert [each.facts["rank"] for each in saved] == [0, 1, 2]
        return saved[2].values["b"].tolist() + saved[index].values["a"]

    for count in (1, 3):
        found = list[Any]()

        def work(group: Any, found: list[Any] = found) -> None:
            like = {"data": PerProcess(Sections({}, {}), take)}
            options = LoadOptions(group=group)
            found.append(unickpt.load(tmp_path, like, options=options)["data"].value)

        raised(in_job(count, work))
        assert sorted(found) == [[0, 1, i] for i in range(count)]
    values = unickpt.load(tmp_path)["data"].values
    assert [dict(each.facts) for each in values] == [{"rank": i} for i in range(3)]
    with pytest.raises(unickpt.UnsupportedLeaf, match="facts of Sections must be JSON"):
        unickpt.save(tmp_path / "c", {"data": PerProcess(Sections({"x": (1,)}, {}))})


def test_ranks_of_meshes() -> None:
    names = {"mesh_dim_names": ("pp", "dp", "tp")}
    found = [
        Ranks.of_mesh(
            SimpleNamespace(**names, shape=(2, 3, 2), get_coordinate=lambda a=at: [*a]), "dp"
        )
        for at in np.ndindex(2, 3, 2)
    ]
    assert [ranks.rank for ranks in found] == [0, 0, 1, 1, 2, 2] * 2
    assert [ranks.writes for ranks in found] == [True, False] * 3 + [False] * 6
    with pytest.raises(ValueError, match="the mesh has no axis"):
        Ranks.of_mesh(SimpleNamespace(**names), "data")


def test_ranks_of_a_jax_mesh() -> None:
    def mesh(process: int, grid: Any) -> Any:
        devices = np.empty(np.shape(grid), object)
        for at, owner in np.ndenumerate(np.array(grid)):
            devices[at] = SimpleNamespace(process_index=int(owner))
        local = [d for d in devices.flat if d.process_index == process]
        return SimpleNamespace(axis_names=("data", "model"), devices=devices, local_devices=local)

    grid = [[0, 0], [1, 1], [2, 3], [2, 3]]  # processes 2 and 3 have the same samples
    found = [Ranks.of_mesh(mesh(p, grid), "data") for p in range(4)]
    assert found == [Ranks(0, 3), Ranks(1, 3), Ranks(2, 3), Ranks(2, 3, writes=False)]
    with pytest.raises(ValueError, match="some samples in common, but not all"):
        Ranks.of_mesh(mesh(0, [[0, 1], [0, 2], [2, 1]]), "data")


def test_a_plain_save_does_not_import_it(tmp_path: Path) -> None:
    source = (
        "import sys, numpy, unickpt\n"
        "unickpt.save(sys.argv[1], {'w': numpy.zeros(3), 'r': unickpt.PerProcess(1)})\n"
        "assert not [m for m in sys.modules if m.startswith('unickpt.data')]\n"
    )
    subprocess.run([sys.executable, "-c", source, str(tmp_path / "c")], check=True)
