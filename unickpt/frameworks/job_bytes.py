"""The bytes of each group of replicas of a job: known to all processes from an earlier save.

A process sees only the arrays that it holds. The records of a save have the bytes of all groups;
process 0 announces them with the commit. Later saves of the same tree balance with them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated

import msgspec
import numpy as np
import xxhash
from numpy.typing import NDArray

Replicas = tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)], ...]
"""Processes that hold the same data, ascending; none for data that is assumed to be on all."""
GroupBytes = tuple[Replicas, Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]]
"""A group of replicas, and the bytes of the arrays that exactly these processes hold."""

_UNEVEN = 0.01  # of the mean bytes of a process


@dataclass(frozen=True)
class JobBytes:
    """The bytes of each group of replicas of a job, without parts that take turns.

    Arguments:
        processes: how many the job has.
        groups: the groups, each once.
    """

    processes: int
    groups: tuple[GroupBytes, ...]

    @classmethod
    def from_records(
        cls, records: Iterable[tuple[int, Sequence[GroupBytes]]], processes: int
    ) -> JobBytes:
        """Joins the bytes that each process reports for the groups in which it is the first.

        Arguments:
            records: processes, and their groups.
            processes: how many the job has.
        """
        groups = {
            replicas: nbytes
            for process, process_groups in records
            for replicas, nbytes in process_groups
            if (replicas or (0,))[0] == process and (replicas or (0,))[-1] < processes
        }
        return cls(processes, tuple(sorted(groups.items())))

    @classmethod
    def decode(cls, data: bytes) -> JobBytes:
        """Decodes what `encoded` is; raises ValueError if it is not."""
        return msgspec.msgpack.decode(data, type=cls)

    @cached_property
    def encoded(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @cached_property
    def digest(self) -> str:
        """xxh3-64 of `encoded`: equal on all processes that know the same."""
        return f"{xxhash.xxh3_64_intdigest(self.encoded):016x}"

    @cached_property
    def _by_group(self) -> Mapping[Replicas, int]:
        return dict(self.groups)

    @property
    def is_uneven(self) -> bool:
        """Whether some replicas have more to write besides the data that they share than others.

        Only then does it matter: without these numbers, replicas write equal parts.
        """
        expected = self.expected()
        least = _UNEVEN * sum(nbytes for _, nbytes in self.groups) / self.processes
        for replicas, _ in self.groups:
            if len(replicas) != 1:
                without = (replicas,) if replicas else ()
                loads = expected.beside(replicas or tuple(range(self.processes)), without)
                if max(loads.values()) - min(loads.values()) > least:
                    return True
        return False

    def describes(self, group_bytes: Mapping[Replicas, int]) -> bool:
        """Whether these are the bytes of a job in which a process holds these groups."""
        return all(
            self._by_group.get(group) == nbytes for group, nbytes in group_bytes.items() if group
        )

    def expected(
        self, alone: Mapping[int, int] | None = None, most_writers: int | None = None
    ) -> ExpectedBytes:
        """The bytes that each process will write.

        Arguments:
            alone: by process, bytes that it writes besides these groups.
            most_writers: how many replicas of a group write it.
        """
        return ExpectedBytes(self, alone or {}, most_writers)


class ExpectedBytes:
    """The bytes of each process, if each group fills up its processes with the fewest bytes.

    Small groups go first, because larger ones can balance them. Only integers are computed, so that
    all processes get the same.

    Arguments:
        job, alone, most_writers: see `JobBytes.expected`.
    """

    def __init__(self, job: JobBytes, alone: Mapping[int, int], most_writers: int | None) -> None:
        self._loads = np.zeros(job.processes, np.int64)
        self._parts: dict[Replicas, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
        for process, nbytes in alone.items():
            self._loads[process] += nbytes
        for replicas, nbytes in sorted(job.groups, key=lambda group: (len(group[0]), group[0])):
            if len(replicas) == 1:
                self._loads[replicas[0]] += nbytes
            elif replicas:
                members = np.array(writers_of(replicas, most_writers), np.int64)
                part = _fill(self._loads[members], nbytes)
                self._loads[members] += part
                self._parts[replicas] = members, part

    def beside(self, replicas: Replicas, without: Iterable[Replicas]) -> dict[int, int]:
        """The expected bytes of some processes, without those of some groups."""
        processes = np.array(replicas, np.int64)
        loads = self._loads[processes]
        for group in without:
            if group in self._parts:
                members, part = self._parts[group]
                rows = np.minimum(np.searchsorted(members, processes), len(members) - 1)
                loads -= np.where(members[rows] == processes, part[rows], 0)
        return dict(zip(replicas, loads.tolist(), strict=True))


def writers_of(replicas: Replicas, most: int | None) -> Replicas:
    """The replicas that write: all, or so many, spread evenly over them and so over the nodes."""
    if most is None or len(replicas) <= most:
        return replicas
    return tuple(replicas[number * len(replicas) // most] for number in range(most))


def _fill(loads: NDArray[np.int64], nbytes: int) -> NDArray[np.int64]:
    """The bytes that each process gets if the lowest are filled up to a common level. The remainder
    of a division is left out, so that equal loads stay equal."""
    ascending = np.sort(loads)
    sums, count = np.cumsum(ascending), len(ascending)
    needed = ascending[1:] * np.arange(1, count) - sums[:-1]
    lowest = 1 + int(np.count_nonzero(needed < nbytes))
    level = (nbytes + int(sums[lowest - 1])) // lowest
    return np.maximum(level - loads, 0)
