"""`Samples`: the samples of a map-style dataset, which data-parallel ranks take in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

import numpy as np

from unickpt.errors import LoadMismatch
from unickpt.plugins.data.ranks import Ranks
from unickpt.plugins.data.remaining_samples import Positions
from unickpt.plugins.data.resuming import Resumable, Saved

_NONE = object()


class Samples(Resumable):
    """The samples of a map-style dataset: ranks take turns on one order of all of them.

    A save stores the position of each rank, a few numbers; not a loader's own state. Another number
    of ranks takes turns on the remaining samples, so that the ranks' numbers of samples differ by
    at most one. Iterating gives the batches of one epoch, or of the rest of it.

    Arguments:
        make: makes a loader of these samples in this order: `make(indexes)`; any iterable of
            batches, with worker processes or without.
        length: the number of samples of the dataset.
        batch_size: how many samples a batch has; the last of an epoch may have fewer. None if each
            item that is drawn is a sample.
        ranks: which data-parallel rank this process is; by default each process is one.
        seed: shuffles each epoch in another way; None for the order of the dataset.

    Example:
        >>> def make(indexes):  # such as DataLoader(images, 2, sampler=indexes, num_workers=4)
        ...     return [indexes[i : i + 2] for i in range(0, len(indexes), 2)]
        >>> import unickpt
        >>> loader = Samples(make, 7, 2)
        >>> next(iter(loader))
        [0, 1]
        >>> _ = unickpt.save("memory://docs/samples", {"data": loader}, overwrite=True)
        >>> again = Samples(make, 7, 2)
        >>> _ = unickpt.load("memory://docs/samples", {"data": again})
        >>> list(again)
        [[2, 3], [4, 5], [6]]
    """

    kind = "Samples"

    def __init__(
        self,
        make: Callable[[list[int]], Iterable[Any]],
        length: int,
        batch_size: int | None,
        ranks: Ranks | None = None,
        *,
        seed: int | None = None,
    ) -> None:
        super().__init__(ranks)
        if length < 1 or (batch_size is not None and batch_size < 1):
            raise ValueError(f"there are no batches of {batch_size} of {length} samples")
        self._make, self._length, self._seed = make, length, seed
        self._batch = batch_size or 1
        self._positions, self._taken = Positions(), 0

    @property
    def epoch(self) -> int:
        """The epoch of the next batch of this rank."""
        return next(self._rank_positions()) // self._length

    def __iter__(self) -> Iterator[Any]:
        epoch, positions, start = self.epoch, self._positions, self._taken
        of_epoch = takewhile(lambda p: p // self._length == epoch, self._rank_positions())
        order = self._order(epoch)
        indexes = [int(order[position % self._length]) for position in of_epoch]
        batches = iter(self._make(indexes))
        for first in range(0, len(indexes), self._batch):
            with self._changing():
                if (self._positions, self._taken) != (positions, start + first):
                    raise RuntimeError("a state was loaded since, or another iterator drew batches")
                batch = next(batches, _NONE)
                if batch is _NONE:
                    raise RuntimeError(
                        f"`make` gave fewer batches of {self._batch} than its {len(indexes)} "
                        "samples have: it must neither drop the last batch nor sample again"
                    )
                self._taken = start + min(first + self._batch, len(indexes))
            yield batch

    def _rank_positions(self) -> Iterator[int]:
        return self._positions.of(self.ranks.rank, self.ranks.count, self._taken)

    def _order(self, epoch: int) -> Any:
        if self._seed is None:
            return range(self._length)
        # Raw bits, which NumPy promises to keep; its shuffles may change between versions.
        bits = np.random.Philox(key=[self._seed, epoch]).random_raw(self._length)
        return np.argsort(bits, kind="stable")

    def collect(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        facts = {"length": self._length, "seed": self._seed, "taken": self._taken}
        positions = {"start": self._positions.start, "left": list(self._positions.left)}
        return facts, {"positions": positions} if self.ranks.rank == 0 else {}

    def choose(self, saved: Saved) -> tuple[Positions, int]:
        for name, now in ("length", self._length), ("seed", self._seed):
            if saved.facts.get(name) != now:
                raise LoadMismatch(
                    f"saved were samples with {name}={saved.facts.get(name)}, now it is {now}: "
                    "the rest of one order is not the rest of another; give the same"
                )
        stored = saved.rank(0).values["positions"]
        positions = Positions(stored["start"], tuple(stored["left"]))
        if saved.count == self.ranks.count:
            return positions, saved.rank(self.ranks.rank).facts["taken"]
        return positions.after([saved.rank(r).facts["taken"] for r in range(saved.count)]), 0

    def resume(self, chosen: tuple[Positions, int]) -> None:
        self._positions, self._taken = chosen
