"""`Shards`: a fixed number of shards of the data, each with a loader of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from unickpt.errors import LoadMismatch
from unickpt.extend import Sections
from unickpt.plugins.data.ranks import Ranks
from unickpt.plugins.data.resuming import Resumable, Saved, is_empty

Make = Callable[[int, int], Any]


class Shards(Resumable):
    """A fixed number of shards of the data, dealt to the data-parallel ranks.

    Each shard has a loader, which `make` makes, and its state. A rank has every `ranks.count`-th
    shard, and draws from the one with the fewest batches so far. Another number of ranks deals the
    shards again, and each reads only the states of its own. Iterating gives the batches of one
    epoch, or of the rest of it.

    Arguments:
        make: makes the loader of a shard: `make(shard, count)`. It is of torchdata, torchtitan or
            Hugging Face `datasets` (`state_dict` and `load_state_dict`), or of Grain, a dataset, a
            `DataLoader` or an iterator (`get_state` and `set_state`), or anything with these.
        count: the number of shards, for good; best a multiple of all numbers of ranks to come, so
            that all ranks have as many: 24 for 8, 6 and 12.
        ranks: which data-parallel rank this process is; by default each process is one.

    Raises:
        ValueError: there are fewer shards than ranks.

    Example:
        >>> class Loader:  # such as StatefulDataLoader(numbers[shard::count], batch_size=8)
        ...     def __init__(self, numbers):
        ...         self.left = list(numbers)
        ...     def __iter__(self):
        ...         while self.left:
        ...             yield self.left.pop(0)
        ...     def state_dict(self):
        ...         return {"left": self.left}
        ...     def load_state_dict(self, state):
        ...         self.left = state["left"]
        >>> import unickpt
        >>> loader = Shards(lambda shard, count: Loader(range(shard, 8, count)), 4)
        >>> batches = iter(loader)
        >>> [next(batches) for _ in range(3)]
        [0, 1, 2]
        >>> _ = unickpt.save("memory://docs/shards", {"data": loader}, overwrite=True)
        >>> again = Shards(lambda shard, count: Loader(range(shard, 8, count)), 4)
        >>> _ = unickpt.load("memory://docs/shards", {"data": again})
        >>> list(again)
        [3, 4, 5, 6, 7]
    """

    kind = "Shards"

    def __init__(self, make: Make, count: int, ranks: Ranks | None = None) -> None:
        super().__init__(ranks)
        if count < self.ranks.count:
            raise ValueError(
                f"{count} shards cannot be dealt to {self.ranks.count} data-parallel ranks: give "
                "at least as many shards as ranks, best a multiple"
            )
        self.count = count
        numbers = range(self.ranks.rank, count, self.ranks.count)
        self._shards = {number: _Shard(make, number, count) for number in numbers}

    def __iter__(self) -> Iterator[Any]:
        shards = self._shards.values()
        epoch = min(shard.epoch for shard in shards)
        while current_shards := [shard for shard in shards if shard.epoch == epoch]:
            shard = min(current_shards, key=lambda shard: (shard.taken, shard.number))
            with self._changing():
                batches = shard.draw()
            yield from batches

    def collect(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        return {"shards": self.count}, {str(n): shard.state() for n, shard in self._shards.items()}

    def choose(self, saved: Saved) -> dict[int, Any]:
        count = saved.facts.get("shards")
        if count != self.count:
            raise LoadMismatch(
                f"saved were {count} shards, and there are {self.count} now; their number cannot "
                f"change: give Shards(make, {count})"
            )
        return {n: saved.find(str(n), n % saved.count) for n in self._shards}

    def resume(self, chosen: Mapping[int, Any]) -> None:
        for number, state in chosen.items():
            self._shards[number].go_on(state)

    def _redistribute(self, saved: Sequence[Any], index: int, count: int) -> Any:
        first = next(p for p in range(len(saved)) if not is_empty(saved, p))
        if isinstance(saved[first], Sections):
            return super()._redistribute(saved, index, count)
        if len(saved) != self.count:  # each process saved `PerProcess(loader.state_dict())`
            raise LoadMismatch(
                f"{len(saved)} processes saved the state of a loader each, so each is a shard: "
                f"give Shards(make, {len(saved)}) instead of {self.count}"
            )
        return {number: {"state": saved[number]} for number in self._shards}


class _Shard:
    """One shard, whose loader is made for its first batch.

    Arguments:
        make: as of `Shards`.
        number: of the shard.
        count: of all shards.
    """

    def __init__(self, make: Make, number: int, count: int) -> None:
        self._make, self.number, self._count = make, number, count
        self.epoch = self.taken = 0
        self._loader: Any = None
        self._batches: Iterator[Any] | None = None
        self._state: Any = None
        self._fresh: Mapping[str, Any] = {}

    def draw(self) -> Sequence[Any]:
        """The next batch; none at the end of the epoch."""
        if self._batches is None:
            self._batches = self._open()
        for batch in self._batches:
            self.taken += 1
            return (batch,)
        self.epoch, self.taken = self.epoch + 1, 0
        self._batches, self._state, self._fresh = None, None, {}
        return ()

    def _open(self) -> Iterator[Any]:
        if self._loader is None:
            self._loader = self._make(self.number, self._count)
        loader = self._loader
        # So torch's samplers shuffle each epoch in another way, and datasets of Hugging Face begin
        # at their beginning, not where they were loaded.
        inner = (getattr(loader, name, None) for name in ("dataset", "sampler"))
        for component in (loader, *inner):
            if hasattr(component, "set_epoch"):
                component.set_epoch(self.epoch)
        if self._state is None:
            return iter(loader)
        if hasattr(loader, "load_state_dict"):
            loader.load_state_dict(self._state)
            batches: Iterator[Any] = iter(loader)
            if _workers(self._state):
                self._fresh = copy.deepcopy(_workers(loader.state_dict()))
            return batches
        stateful: Any = iter(loader)
        stateful.set_state(self._state)
        return iter(stateful)

    def state(self) -> dict[str, Any]:
        """Its position."""
        loader: Any = self._loader
        if self._batches is None:
            state = self._state  # as loaded, or None at the start of an epoch
        elif hasattr(loader, "state_dict"):
            state = self._repaired(loader.state_dict())
        elif hasattr(self._batches, "get_state"):
            state = self._batches.get_state()
        else:
            raise TypeError(
                f"shard {self.number}: a {type(loader).__name__} has neither state_dict "
                "(torchdata, datasets, torchtitan) nor an iterator with get_state (Grain); of a "
                "map-style dataset, use unickpt.data.Samples"
            )
        return {"epoch": self.epoch, "taken": self.taken, "state": state}

    def _repaired(self, state: Any) -> Any:
        """torchdata's state; workers that gave no batch since the load have their loaded state.

        A worker may say that it is at its beginning until then, as with a dataset of Hugging Face
        (datasets 3.6): its samples would be drawn twice.
        """
        workers, loaded = _workers(state), _workers(self._state)
        still = {k for k, fresh in self._fresh.items() if workers.get(k) == fresh and k in loaded}
        if not still:
            return state
        workers = {**workers, **{k: loaded[k] for k in still}}
        return {**state, "_snapshot": {**state["_snapshot"], "_worker_snapshots": workers}}

    def go_on(self, saved: Mapping[str, Any]) -> None:
        """Resumes from a result of `state`."""
        self.epoch, self.taken = saved.get("epoch", 0), saved.get("taken", 0)
        self._loader = self._batches = None
        self._state, self._fresh = saved["state"], {}


def _workers(state: Any) -> Mapping[str, Any]:
    """The states of the worker processes in one of torchdata's StatefulDataLoader."""
    snapshot = state.get("_snapshot") if isinstance(state, Mapping) else None
    workers = snapshot.get("_worker_snapshots") if isinstance(snapshot, Mapping) else None
    return workers if isinstance(workers, Mapping) else {}
