"""Per-process values on more and on fewer processes: `PerProcess` and its `redistribute`.

The states are those of real data loaders, torch's StatefulDataLoader and Grain, and of generators.
That a data loader goes on exactly is said by its samples: with those before, they are the whole
dataset, none twice and none missing.
"""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from support.processes import Processes
from support.saving import in_job, save_in_job

import unickpt
from unickpt import LoadMismatch, LoadOptions, PerProcess, ProcessGroup, UnsupportedLeaf
from unickpt.frameworks.sections import StoredValue
from unickpt.types import PerProcessValues

SAMPLES, BATCH = 240, 5
EVERY = list(range(SAMPLES))

# torchdata 0.11 calls what torch 2.13 deprecates.
old_torch_call = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")


# --- helpers --------------------------------------------------------------------------------------


def save(path: Path, values: Sequence[Any]) -> None:
    """As many processes as there are values, each of which saves its own."""
    marked = [value if isinstance(value, PerProcess) else PerProcess(value) for value in values]
    outcomes = save_in_job(path, len(values), lambda i: {"data": {"state": marked[i]}})
    errors = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert not errors, errors


def load(path: Path, count: int, like: PerProcess | Callable[[int], PerProcess]) -> list[Any]:
    """What each of so many processes loads: the `PerProcess`, or the error."""

    def work(group: ProcessGroup) -> PerProcess:
        own = like if isinstance(like, PerProcess) else like(group.index)
        options = LoadOptions(group=group)
        loaded = unickpt.load(path, {"data": {"state": own}}, options=options)["data"]["state"]
        assert isinstance(loaded, PerProcess)
        return loaded

    return in_job(count, work)


def values_of(loaded: Sequence[Any]) -> list[Any]:
    errors = [outcome for outcome in loaded if not isinstance(outcome, PerProcess)]
    assert not errors, errors
    return [outcome.value for outcome in loaded]


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal in every type, in the order of keys and in every bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    if isinstance(a, dict):
        return same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def kinds(index: int) -> dict[Any, Any]:
    """A value of every kind, which differs by process."""
    rng = np.random.default_rng(index)
    return {
        "process": index,
        "nested": {"loader": {"epoch": 1, "done": [3 * index, {"at": 0.5}]}, "none yet": {}},
        "tuple": (index, ("a", None), [], ()),
        7: {"0": "a text as key", 0: "an int as key", -3: {index: index}},
        "bytes": bytes([0, 255, index]),
        "none": None,
        "plain": [True, -(2**80), math.inf, -0.0, "ü/%\udfff"],
        "random": random.Random(index).getstate(),
        "numpy": rng.bit_generator.state,  # has integers of 128 bits
        "arrays": [
            rng.standard_normal((3, 4)).astype(np.float32),
            np.asfortranarray(rng.integers(0, 99, (2, 3))),
            np.arange(index, dtype=np.int8),  # another shape on each process; none on the first
            np.array(index, np.uint64),
            rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        ],
    }


# --- more and fewer processes ---------------------------------------------------------------------


def test_as_many_processes_get_their_own(tmp_path: Path) -> None:
    saved = [kinds(i) for i in range(8)]
    save(tmp_path / "c", saved)

    def never(saved: Sequence[Any], index: int, count: int) -> Any:
        raise AssertionError("called, although the number of processes is the same")

    for like in (PerProcess(), PerProcess(redistribute=never)):
        loaded = load(tmp_path / "c", 8, like)
        assert same(values_of(loaded), saved)
        assert all(one.redistribute is like.redistribute for one in loaded)
    loaded = load(tmp_path / "c", 8, lambda i: PerProcess(kinds(i), never))
    assert same(values_of(loaded), saved)
    everything = unickpt.load(tmp_path / "c")["data"]["state"]
    assert isinstance(everything, PerProcessValues)
    assert same(list(everything.values), saved)


@pytest.mark.parametrize("count", [1, 4, 6, 12])
def test_without_redistribute_another_number_is_refused(count: int, tmp_path: Path) -> None:
    save(tmp_path / "c", [kinds(i) for i in range(8)])
    for error in load(tmp_path / "c", count, PerProcess()):
        assert isinstance(error, LoadMismatch), error
        for part in (
            "'data/state'",
            "saved by 8 processes",
            f"loaded by {count}.",
            "PerProcess(redistribute=",
        ):
            assert part in str(error)


@pytest.mark.parametrize("count", [1, 4, 6, 12])
def test_redistribute_says_who_gets_what(count: int, tmp_path: Path) -> None:
    saved = [kinds(i) for i in range(8)]
    save(tmp_path / "c", saved)
    calls: list[tuple[int, int, Sequence[Any]]] = []
    made = [object() for _ in range(count)]  # no kind that could be stored: given as it is

    def share_out(saved: Sequence[Any], index: int, count: int) -> Any:
        calls.append((index, count, list(saved)))
        return made[index]

    loaded = load(tmp_path / "c", count, lambda i: PerProcess(kinds(i), share_out))
    assert all(value is own for value, own in zip(values_of(loaded), made, strict=True))
    assert all(one.redistribute is share_out for one in loaded)
    calls.sort(key=lambda call: call[0])
    assert [call[:2] for call in calls] == [(index, count) for index in range(count)]
    for _, _, given in calls:
        assert same(given, saved)


def test_what_was_shared_out_is_saved_and_shared_out_again(tmp_path: Path) -> None:
    def deal(saved: Sequence[Any], index: int, count: int) -> Any:
        return [x for part in saved for x in part][index::count]

    save(tmp_path / "8", [[i, i + 8, i + 16] for i in range(8)])
    for before, after in [(8, 6), (6, 5), (5, 11), (11, 1)]:
        loaded = load(tmp_path / str(before), after, PerProcess(redistribute=deal))
        values_of(loaded)  # no errors
        save(tmp_path / str(after), loaded)
    (last,) = unickpt.load(tmp_path / "1")["data"]["state"].values
    assert sorted(last) == list(range(24))


def test_an_error_of_redistribute_is_the_error_of_that_process(tmp_path: Path) -> None:
    save(tmp_path / "c", [{"at": i} for i in range(8)])

    def share_out(saved: Sequence[Any], index: int, count: int) -> Any:
        if index == 2:
            raise ValueError("no shard for process 2")
        return saved[index]

    first, second, third, fourth = load(tmp_path / "c", 4, PerProcess(redistribute=share_out))
    assert isinstance(third, ValueError)
    assert str(third) == "no shard for process 2"
    assert values_of([first, second, fourth]) == [{"at": 0}, {"at": 1}, {"at": 3}]


def large(i: int) -> dict[str, Any]:
    """A value whose arrays, lists and bytes are stored in binary."""
    return {
        "array": np.arange(6000.0).reshape(3, 2000) + i,
        "bits": np.arange(9000).astype(ml_dtypes.bfloat16)[::2],
        "empty": np.zeros((0, 3)),
        "scalar": np.array(i, np.float32),
        "ints": [*range(-i, 3000)],
        "far": [(1 << 62) + i] * 2048,
        "too far": [1 << 63, i] * 1100,
        "floats": [0.5 + i] * 2500,
        "mixed": [1, 2.0] * 1100,
        "bools": [True, False] * 1100,
        "bytes": bytes([i]) * 9000,
        "nested": [[1, 2], (3, "x")],
    }


def test_large_values_are_kept_to_the_bit_in_binary(tmp_path: Path) -> None:
    saved = [large(i) for i in range(3)]
    save(tmp_path / "c", saved)
    entry = unickpt.open(tmp_path / "c").index.per_process["data/state"]
    assert entry.is_binary
    assert same(values_of(load(tmp_path / "c", 3, PerProcess())), saved)
    like = large(0)
    (found,) = values_of(load_one(tmp_path / "c", like))
    assert same(found, saved[0])
    assert found["array"] is like["array"]  # filled in place
    everything = unickpt.load(tmp_path / "c")["data"]["state"]
    assert same(list(everything.values), saved)


def test_large_values_take_the_bytes_that_they_need(tmp_path: Path) -> None:
    value = {"array": np.arange(6000.0), "ints": [*range(3000)], "bytes": b"x" * 9000}
    save(tmp_path / "c", [value])
    ((size, _),) = unickpt.open(tmp_path / "c").index.per_process["data/state"].blobs
    assert size < 6000 * 8 + 3000 * 2 + 9000 + 1000


def load_one(path: Path, like: Any) -> list[Any]:
    """What process 0 of 3 loads."""
    options = LoadOptions(group=ProcessGroup(0, 3, session="one"))
    tree = {"data": {"state": PerProcess(like)}}
    return [unickpt.load(path, tree, options=options)["data"]["state"]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"array": np.zeros((3, 1999))}, r"'array': stored float64\[3, 2000\], requested"),
        ({"bytes": "text"}, "'bytes': stored bytes, requested str"),
        ({"ints": [0] * 2999}, "'ints': stored a list of 3000 ints, requested a list of 2999 ints"),
        ({"ints": 3}, "'ints': stored a list of 3000 ints, requested int"),
        ({"ints": [0.5] * 3000}, "'ints': stored a list of 3000 ints, requested a list of 3000 f"),
        ({"ints": [1, 2]}, "differ in: ints, ints/0, ints/1"),
        ({"scalar": [1] * 3000}, "'scalar': stored ndarray, requested a list of 3000 ints"),
        ({"more": 1}, "differ in: more"),
    ],
)
def test_a_large_value_that_does_not_fit_is_named(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(tmp_path / "c", [large(i) for i in range(3)])
    with pytest.raises(LoadMismatch, match=reason):
        load_one(tmp_path / "c", large(0) | change)


def test_small_values_stay_as_older_versions_read_them(tmp_path: Path) -> None:
    save(tmp_path / "c", [{"key": np.arange(1900), "ints": [1] * 1000, "bytes": b"x" * 1000}] * 2)
    index = unickpt.open(tmp_path / "c").index
    assert not index.per_process["data/state"].is_binary


def test_redistribute_reads_what_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "c", [large(i) for i in range(6)])
    read = list[int]()
    verified = StoredValue._verified

    def counted(self: Any, start: int, length: int, digest: int) -> bytes:
        read.append(length)
        return verified(self, start, length, digest)

    monkeypatch.setattr(StoredValue, "_verified", counted)
    like = PerProcess(redistribute=lambda saved, index, count: saved[2 * index + 1]["scalar"])
    assert values_of(load(tmp_path / "c", 3, like)) == [1, 3, 5]
    assert len(read) == 6  # three heads, three values


def test_torch_generators_go_on(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")

    def generator(seed: int) -> Any:
        made = torch.Generator().manual_seed(seed)
        torch.rand(seed, generator=made)  # has been used
        return made

    def draws(state: Any) -> list[float]:
        made = torch.Generator()
        made.set_state(state)
        drawn: list[float] = torch.rand(3, generator=made).tolist()
        return drawn

    states = [generator(i).get_state() for i in range(8)]
    expected = [draws(state) for state in states]
    save(tmp_path / "c", [{"cpu": state} for state in states])

    own = values_of(
        load(tmp_path / "c", 8, lambda _: PerProcess({"cpu": generator(99).get_state()}))
    )
    assert all(isinstance(value["cpu"], torch.Tensor) for value in own)
    assert [draws(value["cpu"]) for value in own] == expected

    def take(saved: Sequence[Any], index: int, count: int) -> Any:
        state = saved[index * len(saved) // count]["cpu"]
        assert isinstance(state, np.ndarray)
        assert state.dtype == np.uint8
        return torch.from_numpy(state)

    for count, taken in [(4, [0, 2, 4, 6]), (6, [0, 1, 2, 4, 5, 6])]:
        others = values_of(load(tmp_path / "c", count, PerProcess(redistribute=take)))
        assert [draws(state) for state in others] == [expected[i] for i in taken]


# --- torch's StatefulDataLoader -------------------------------------------------------------------

ORDER = random.Random(5).sample(EVERY, SAMPLES)


class Stream:
    """An iterable dataset that keeps its own state: of each `world` samples the one of `rank`."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world, self.given = rank, world, 0

    def __iter__(self) -> Iterator[int]:
        for sample in ORDER[self.rank :: self.world][self.given :]:
            self.given += 1
            yield sample

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given = state["given"]


@pytest.fixture
def torchdata() -> Any:
    pytest.importorskip("torch")
    return pytest.importorskip("torchdata.stateful_dataloader")


def map_style(torchdata: Any, rank: int, world: int) -> Any:
    sampler = torchdata.sampler.StatefulDistributedSampler(
        EVERY, num_replicas=world, rank=rank, shuffle=True, seed=3
    )
    return torchdata.StatefulDataLoader(EVERY, batch_size=BATCH, sampler=sampler)


def iterable(torchdata: Any, rank: int, world: int) -> Any:
    import torch

    class Dataset(Stream, torch.utils.data.IterableDataset[int]):
        pass

    return torchdata.StatefulDataLoader(Dataset(rank, world), batch_size=BATCH)


def flat(batches: Any) -> list[int]:
    return [int(sample) for batch in batches for sample in batch]


@old_torch_call
@pytest.mark.parametrize("make", [map_style, iterable])
def test_stateful_dataloaders_go_on(
    make: Callable[[Any, int, int], Any], torchdata: Any, tmp_path: Path
) -> None:
    samples, rest, states = [], [], []
    for rank, batches in enumerate([0, 1, 7, 12]):  # of 12
        loader = make(torchdata, rank, 4)
        going = iter(loader)
        samples += flat(islice(going, batches))
        states.append(loader.state_dict())
        rest.append(flat(going))
    save(tmp_path / "c", states)
    for rank, state in enumerate(values_of(load(tmp_path / "c", 4, PerProcess()))):
        loader = make(torchdata, rank, 4)
        loader.load_state_dict(state)
        got = flat(loader)
        assert got == rest[rank]
        samples += got
    assert sorted(samples) == EVERY


@old_torch_call
def test_a_stateful_dataloader_goes_on_with_other_numbers_of_ranks(
    torchdata: Any, tmp_path: Path
) -> None:
    """All ranks take a global order in turns, so that the total seen says where to go on."""

    def go_on(saved: Sequence[Any], index: int, count: int) -> Any:
        start = saved[0]["start"] + sum(state["seen"] for state in saved)
        return {"start": start, "seen": 0, "loader": None}

    def train(rank: int, world: int, state: Any, batches: int | None) -> tuple[list[int], Any]:
        mine = ORDER[state["start"] :][rank::world]
        loader = torchdata.StatefulDataLoader(EVERY, batch_size=BATCH, sampler=mine)
        if state["loader"] is not None:
            loader.load_state_dict(state["loader"])
        seen = flat(islice(loader, batches))
        now = {"seen": state["seen"] + len(seen), "loader": loader.state_dict()}
        return seen, state | now

    states = [{"start": 0, "seen": 0, "loader": None}] * 4
    samples: list[int] = []
    for step, (world, batches) in enumerate([(4, 2), (4, 3), (2, 3), (2, 1), (3, 2), (5, None)]):
        if step:
            like = PerProcess(redistribute=go_on)
            states = values_of(load(tmp_path / str(step - 1), world, like))
        done = [train(rank, world, states[rank], batches) for rank in range(world)]
        for seen, _ in done:
            samples += seen
        if batches is not None:
            assert sorted(samples) == sorted(ORDER[: len(samples)])
        save(tmp_path / str(step), [state for _, state in done])
    assert sorted(samples) == EVERY


# --- Grain ----------------------------------------------------------------------------------------

Pipeline = Callable[[Any, int], Any]


@pytest.fixture
def grain() -> Any:
    return pytest.importorskip("grain")


def of_a_map_dataset(grain: Any, shard: int) -> Any:
    whole = grain.MapDataset.range(SAMPLES).seed(7).shuffle()
    return iter(whole[shard::4].batch(BATCH).to_iter_dataset())


def of_an_iter_dataset(grain: Any, shard: int) -> Any:
    """The filter leaves gaps: batches taken do not tell the state."""
    whole = grain.MapDataset.range(-SAMPLES, SAMPLES).seed(7).shuffle()
    return iter(whole[shard::4].to_iter_dataset().filter(lambda x: x >= 0).batch(BATCH))


def of_a_data_loader(grain: Any, shard: int) -> Any:
    sampler = grain.samplers.IndexSampler(
        SAMPLES, grain.sharding.ShardOptions(shard, 4), shuffle=True, num_epochs=1, seed=3
    )
    return iter(grain.DataLoader(data_source=EVERY, sampler=sampler, worker_count=0))


def of_samples(item: Any) -> list[int]:
    return [int(x) for x in np.atleast_1d(item)]


def taken(iterator: Any, items: int | None) -> list[int]:
    return [x for item in islice(iterator, items) for x in of_samples(item)]


PIPELINES: dict[Pipeline, type] = {
    of_a_map_dataset: dict,
    of_an_iter_dataset: dict,
    of_a_data_loader: bytes,
}


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_grain_iterators_go_on(pipeline: Pipeline, grain: Any, tmp_path: Path) -> None:
    samples, rest, states = [], [], []
    for shard, items in enumerate([0, 1, 7, 11]):
        iterator = pipeline(grain, shard)
        samples += taken(iterator, items)
        states.append(iterator.get_state())
        rest.append(taken(iterator, None))
    assert {type(state) for state in states} == {PIPELINES[pipeline]}
    save(tmp_path / "c", states)
    loaded = values_of(load(tmp_path / "c", 4, PerProcess()))
    assert same(loaded, states)
    for shard, state in enumerate(loaded):
        iterator = pipeline(grain, shard)
        iterator.set_state(state)
        got = taken(iterator, None)
        assert got == rest[shard]
        samples += got
    assert sorted(samples) == EVERY


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_grain_iterators_go_on_with_other_numbers_of_processes(
    pipeline: Pipeline, grain: Any, tmp_path: Path
) -> None:
    """The shards stay as they are, each with its iterator; the processes deal them out anew."""

    def deal(saved: Sequence[Any], index: int, count: int) -> Any:
        return [shard for held in saved for shard in held][index::count]

    def train(shards: Any, items: int | None) -> tuple[list[int], Any]:
        seen, now = [], []
        for held in shards:
            iterator = pipeline(grain, held["shard"])
            if held["state"] is not None:
                iterator.set_state(held["state"])
            seen += taken(iterator, items)
            now.append(held | {"state": iterator.get_state()})
        return seen, now

    states: list[Any] = [[{"shard": shard, "state": None}] for shard in range(4)]
    samples: list[int] = []
    for step, (count, items) in enumerate([(4, 3), (2, 2), (2, 1), (6, 3), (1, None)]):
        if step:
            like = PerProcess(redistribute=deal)
            states = values_of(load(tmp_path / str(step - 1), count, like))
        assert sorted(held["shard"] for shards in states for held in shards) == [0, 1, 2, 3]
        done = [train(shards, items) for shards in states]
        for seen, _ in done:
            assert seen or step == 3  # four shards do not go round six processes
            samples += seen
        save(tmp_path / str(step), [now for _, now in done])
    assert sorted(samples) == EVERY


# --- real processes -------------------------------------------------------------------------------

RANK = """
import json, sys
from itertools import islice
import torch, torch.distributed as dist, unickpt
from torchdata.stateful_dataloader import StatefulDataLoader

path, order, first = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3] == "first"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

def make(state):
    mine = order[state["start"]:][rank::world]
    loader = StatefulDataLoader(range(len(order)), batch_size=5, sampler=mine, num_workers=2)
    if state["loader"] is not None:
        loader.load_state_dict(state["loader"])
    return loader

def flat(batches):
    return [x for batch in batches for x in batch.tolist()]

def share_out(saved, index, count):
    return {
        "start": sum(s["seen"] for s in saved), "seen": 0, "loader": None,
        "rng": torch.from_numpy(saved[2 * index]["rng"]), "called": [len(saved), index, count],
    }

printed = {}
if first:
    torch.manual_seed(rank)
    state = {"start": 0, "seen": 0, "loader": None}
    loader = make(state)
    printed["before"] = flat(islice(loader, 3))
    state |= {"seen": 15, "loader": loader.state_dict(), "rng": torch.get_rng_state()}
    options = unickpt.SaveOptions(fsync=False, timeout_s=60)
    unickpt.save(path, {"data": unickpt.PerProcess(state)}, options=options)
    printed["drawn"] = torch.rand(3).tolist()
    like = unickpt.PerProcess()
else:
    try:
        unickpt.load(path, {"data": unickpt.PerProcess()})
    except unickpt.LoadMismatch as error:
        printed["refused"] = str(error)
    like = unickpt.PerProcess(redistribute=share_out)
torch.manual_seed(99)
state = unickpt.load(path, {"data": like})["data"].value
printed["called"] = state.get("called")
printed["after"] = flat(make(state))
torch.set_rng_state(torch.as_tensor(state["rng"]))
printed["drawn again"] = torch.rand(3).tolist()
print(json.dumps(printed))
dist.destroy_process_group()
"""


def test_torch_ranks_with_workers(processes: Processes, torchdata: Any, tmp_path: Path) -> None:
    def run(world: int, when: str) -> list[dict[str, Any]]:
        started = processes.torch(world, RANK, tmp_path / "c", json.dumps(ORDER), when)
        return [json.loads(out.splitlines()[-1]) for out in processes.finish(started)]

    four = run(4, "first")
    before = [x for rank in four for x in rank["before"]]
    assert sorted(before) == sorted(ORDER[:60])
    for number, rank in enumerate(four):
        assert rank["before"] + rank["after"] == ORDER[number::4]
        assert rank["drawn again"] == rank["drawn"]
    two = run(2, "second")
    for number, rank in enumerate(two):
        for part in ("'data'", "saved by 4 processes", "by 2.", "PerProcess(redistribute="):
            assert part in rank["refused"]
        assert rank["called"] == [4, number, 2]
        assert rank["after"] == ORDER[60:][number::2]
        assert rank["drawn again"] == four[2 * number]["drawn"]


def test_a_key_keeps_its_implementation(tmp_path: Path) -> None:
    key = jax.random.key(3, impl="rbg")
    unickpt.save(tmp_path / "c", {"rng": PerProcess({"key": key})})
    like = PerProcess({"key": jax.random.key(0, impl="rbg")})
    found = unickpt.load(tmp_path / "c", {"rng": like})["rng"].value["key"]
    assert found.dtype == key.dtype
    assert (jax.random.key_data(found) == jax.random.key_data(key)).all()
    other = PerProcess({"key": jax.random.key(0, impl="unsafe_rbg")})
    with pytest.raises(LoadMismatch, match=r"of a rbg key, requested .* of a unsafe_rbg key"):
        unickpt.load(tmp_path / "c", {"rng": other})


def test_a_mark_inside_a_mark_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedLeaf, match=r"'b': a PerProcess cannot be inside"):
        unickpt.save(tmp_path / "c", {"a": PerProcess({"b": PerProcess(3)})})


STATE = {"ema": {"torch.Tensor": np.ones(3), "dtype": "float32"}, "steps": [1, (2.0, None)]}


@pytest.mark.parametrize(
    "other",
    [
        {**STATE, "steps": [1, (2.5, None)]},
        {**STATE, "steps": [1, [2.0, None]]},
        {**STATE, "ema": {"torch.Tensor": np.arange(3.0), "dtype": "float32"}},
        {**STATE, "ema": {"torch.Tensor": np.ones(3, np.float32), "dtype": "float32"}},
        {"steps": STATE["steps"]},
    ],
)
def test_it_is_told_whether_all_processes_saved_the_same(other: Any) -> None:
    """As DeepSpeed's client_state and Keras's generators are compared, which hold arrays."""
    assert PerProcessValues((STATE, copy.deepcopy(STATE))).all_equal
    assert not PerProcessValues((STATE, other)).all_equal
    nan = {"loss": np.array([np.nan, 1.0])}
    assert PerProcessValues((nan, copy.deepcopy(nan))).all_equal
