"""Shared by all loaders: collecting their state, and resuming from a saved one."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any, ClassVar

from unickpt import PerProcess
from unickpt.errors import LoadMismatch
from unickpt.extend import (
    NOTHING_HERE,
    EncodedValue,
    Sections,
    adapters,
    encode_per_process,
    first_few,
    settle_future,
)
from unickpt.plugins.data.ranks import Ranks


class Saved:
    """The saved states of a job's ranks; each is read on request.

    Arguments:
        values: of each process: `Sections`, or None where another one has the same rank.
        kind: of the loader.

    Raises:
        LoadMismatch: it is another loader's, or ranks are missing.
    """

    def __init__(self, values: Sequence[Any], kind: str) -> None:
        self._values, self._kind = values, kind
        processes = [p for p in range(len(values)) if not is_empty(values, p)]
        if not processes:
            raise LoadMismatch("no process saved a state of the loader")
        first = self._sections_of(processes[0])
        self.count: int = _fact(first, "ranks", int)
        self._processes = (
            dict(enumerate(processes)) if len(processes) == self.count else self._by_rank(processes)
        )
        self.facts = first.facts
        missing = [rank for rank in range(self.count) if rank not in self._processes]
        if missing:
            raise LoadMismatch(
                f"of {self.count} data-parallel ranks, these saved no state of the loader: "
                f"{first_few(missing)}. Of the processes of each rank, one must have Ranks.writes"
            )

    def rank(self, rank: int) -> Sections:
        """The saved state of a rank."""
        sections = self._sections_of(self._processes[rank])
        if _fact(sections, "rank", int) != rank:  # the ranks do not ascend with the processes
            processes = list(self._processes.values())
            self._processes = self._by_rank(processes)
            if rank not in self._processes:
                raise LoadMismatch(
                    f"data-parallel rank {rank} of {self.count} saved no state of the loader, and "
                    "another rank did twice: give each process its own Ranks"
                )
            sections = self._sections_of(self._processes[rank])
        return sections

    def find(self, key: str, first: int) -> Any:
        """The section of a key, of the rank that saved it.

        Arguments:
            key: of the section.
            first: the rank to ask first.

        Raises:
            LoadMismatch: none did.
        """
        for rank in (first, *(r for r in range(self.count) if r != first)):
            values = self.rank(rank).values
            if key in values:
                return values[key]
        raise LoadMismatch(f"none of the {self.count} data-parallel ranks saved shard {key}")

    def _by_rank(self, processes: Sequence[int]) -> dict[int, int]:
        process_by_rank: dict[int, int] = {}
        for process in processes:
            process_by_rank.setdefault(_fact(self._sections_of(process), "rank", int), process)
        return process_by_rank

    def _sections_of(self, process: int) -> Sections:
        value: Any = self._values[process]
        kind = value.facts.get("loader") if isinstance(value, Sections) else None
        if not isinstance(value, Sections) or kind != self._kind:
            description = f"of unickpt.data.{kind}" if kind else "no state of unickpt.data"
            raise LoadMismatch(
                f"process {process} saved {description}, which unickpt.data.{self._kind} cannot "
                "take; load it with the class that saved it"
            )
        return value


def is_empty(values: Sequence[Any], process: int) -> bool:
    """Whether a process saved nothing of its own; reads nothing of a stored value."""
    test = getattr(values, "is_empty", None)
    return bool(test(process)) if test is not None else values[process] is None


def _fact(value: Sections, name: str, kind: type) -> Any:
    fact = value.facts.get(name)
    if type(fact) is not kind:
        raise LoadMismatch(f"the loader's state is malformed: its {name!r} is {fact!r}")
    return fact


class Resumable(ABC):
    """A loader whose state is saved and loaded as a leaf of a tree.

    Arguments:
        ranks: which data-parallel rank this process is; by default each process is one.
    """

    kind: ClassVar[str]

    def __init__(self, ranks: Ranks | None) -> None:
        self.ranks = Ranks.of_job() if ranks is None else ranks
        self._ahead: tuple[int, Future[EncodedValue]] | None = None
        """The step whose state a thread collects, and the result."""

    @abstractmethod
    def collect(self) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
        """The facts and the sections of the current state."""

    @abstractmethod
    def choose(self, saved: Saved) -> Any:
        """The part of the saved states that `resume` needs; changes nothing.

        Raises:
            LoadMismatch: it is of other data.
        """

    @abstractmethod
    def resume(self, chosen: Any) -> None:
        """Resumes from the result of `choose`."""

    def prefetch(self, step: int) -> None:
        """Collects the state of a step that will save, while the step computes.

        Call it once the batch of the step is drawn, on all ranks; the save of the step then finds
        the state's bytes. If more is drawn before the save, the state is collected again.

        Arguments:
            step: the step that saves. Only the first call for a step does something.

        Example:
            >>> from unickpt.data import Samples
            >>> loader = Samples(lambda indexes: [[i] for i in indexes], 3, 1)
            >>> for step, batch in enumerate(loader):
            ...     if step % 2 == 1:  # such as `checkpointer.should_save(step)`
            ...         loader.prefetch(step)
        """
        if self.ranks.writes and (self._ahead is None or self._ahead[0] != step):
            self._ahead = step, Future()
            arguments = self._ahead[1], lambda: encode_per_process(self._sections(), adapters())
            name = "unickpt-data"
            threading.Thread(target=settle_future, args=arguments, name=name, daemon=True).start()

    def state_dict(self) -> PerProcess:
        """The state, as the leaf that is saved."""
        ahead = self._ahead
        if not self.ranks.writes:
            value: Any = NOTHING_HERE
        else:
            value = self._sections() if ahead is None else ahead[1].result()
        return PerProcess(value, self._redistribute)

    def load_state_dict(self, loaded: PerProcess) -> None:
        """Takes the loaded state of the leaf of `state_dict`."""
        with self._changing():
            self.resume(loaded.value)

    def _redistribute(self, saved: Sequence[Any], index: int, count: int) -> Any:
        return self.choose(Saved(saved, self.kind))

    def _sections(self) -> Sections:
        facts, sections = self.collect()
        about = {"loader": self.kind, "rank": self.ranks.rank, "ranks": self.ranks.count}
        return Sections({**about, **facts}, sections)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Around a change of the state: waits for the thread that collects it; drops its result."""
        if self._ahead is not None:
            wait([self._ahead[1]])
            self._ahead = None
        yield
