"""The processes of a job, as reported by a framework or a user, and their agreements."""

from __future__ import annotations

import itertools
import os
import re
import sys
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from unickpt.errors import ProcessFailed

if TYPE_CHECKING:
    from unickpt.frameworks.job_bytes import JobBytes
    from unickpt.frameworks.members import Members
    from unickpt.frameworks.os_process_states import Identity

Bytes = NDArray[np.uint8]
_PATIENCE_S = 1.0
_LAUNCHERS = (
    ("LOCAL_WORLD_SIZE", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_COMM_WORLD_SIZE"),
    ("MPI_LOCALNRANKS", "PMI_SIZE"),
)
# Variables of launchers: the index of this process, and the number of processes.
_LAUNCHED = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
_OF_SLURM_JOB = "SLURM_NTASKS"  # also set in the job's script, with the index 0


class Group(Protocol):
    """The processes that save together. Process 0 is the coordinator.

    Frameworks' adapters provide one; `ProcessGroup` is for everything else.
    """

    index: int
    count: int

    def next_attempt(self) -> str:
        """A name for the next attempt, the same on all processes and never used before.

        Called once at the start of every save, by every process, on the calling thread.

        Raises:
            SaveTimeout: the other processes did not call it in time (see `BoundedGroup`).
        """

    def agree(self, value: int) -> int:
        """The maximum of the values that all processes pass, at the same point.

        Arguments:
            value: at least 0, and less than 2 to the power of 62.

        Raises:
            SaveTimeout: the other processes did not call it in time (see `BoundedGroup`).
        """

    def exchange(self, data: Bytes, sent: Sequence[int], received: Sequence[int]) -> Bytes:
        """Sends a part of this process's bytes to each process, as MPI's `Alltoallv`.

        Called by all processes at the same point, on the calling thread.

        Arguments:
            data: the parts for all processes, in the order of the processes.
            sent: how many bytes each process gets.
            received: how many bytes come from each process.

        Returns:
            The parts from all processes, in the order of the processes.

        Raises:
            RuntimeError: a process has ended.
            SaveTimeout: the other processes did not call it in time (see `BoundedGroup`).
        """


class JointCall(NamedTuple):
    """For messages: a call that all processes must make.

    Arguments:
        option: the option that limits how long a process waits for the others.
        duty: what all processes must do.
    """

    option: str
    duty: str


SAVE = JointCall("SaveOptions.timeout_s", "call save")
DECIDE = JointCall("SaveOptions.timeout_s", "call the Checkpointer at the same steps")
LOAD = JointCall("LoadOptions.timeout_s", "call load in the same way, and one may have ended")


class BoundedGroup(ABC):
    """A group with a time limit on waiting, such as those of the adapters.

    User-defined groups need not have one; unickpt cannot limit how long they wait.
    """

    index: int
    count: int
    members: Members | None = None
    """The members of the framework's job that form this group; None for the whole job."""

    @abstractmethod
    def within(self, timeout_s: float) -> Group:
        """The same group, whose methods raise `SaveTimeout` after `timeout_s`."""

    @property
    def session(self) -> JobSession | None:
        """The agreements of its processes, from the first save on."""
        return None

    def on_node(self) -> int:
        """How many processes share the memory of this node; an upper bound until it is known."""
        nodes = None if self.session is None else self.session.nodes
        return self.count if nodes is None else nodes.at_most()


def within(group: Group, timeout_s: float) -> Group:
    """The group with a time limit, if it supports one (see `BoundedGroup`)."""
    return group.within(timeout_s) if isinstance(group, BoundedGroup) else group


def members_of(group: Group) -> Members | None:
    """The processes of a framework's job in a group; None for a whole job."""
    return group.members if isinstance(group, BoundedGroup) else None


def session_of(group: Group) -> JobSession | None:
    """The agreements of the processes of a group; None if it is of another class."""
    if isinstance(group, ProcessGroup):
        return group._session
    return group.session if isinstance(group, BoundedGroup) else None


@contextmanager
def loaded_together(group: Group, where: str) -> Iterator[None]:
    """A load that fails on all ranks if it fails on one; at its end they wait for each other.

    Arguments:
        group: its ranks.
        where: the checkpoint, for the error.

    Raises:
        ProcessFailed: it failed on another rank, whose own error says why.
    """
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
    failed = group.agree(0 if error is None else group.index + 1)
    if error is not None:
        raise error
    if failed:
        from unickpt.frameworks.members import named

        members, index = members_of(group), failed - 1
        other = f"rank {index}" if members is None else named(members, [index])
        raise ProcessFailed(
            f"{where}: {other} could not load it, and its error says why; this is another rank. "
            "Load again, on all ranks, before the next step"
        )


_SESSION = r"[\w.-]+"


class ProcessGroup:
    """A group of processes that were started by other means (MPI, a scheduler, ssh).

    Arguments:
        index: index of this process, 0 to `count - 1`.
        count: number of processes.
        session: a string that all processes of this run share and that no other run uses, such as
            the scheduler's job id with its restart count.
        agree: returns, on every process, the maximum of the values that all of them pass, as MPI's
            `allreduce(value, MAX)`. Needed only for joint decisions: `Checkpointer`'s saving by
            time, preemption, and falling back to an older step.
        exchange: sends a part of each process's bytes to each process, as MPI's `Alltoallv`; see
            `Group.exchange`. Needed only for `LoadOptions(exchange=True)`, and to merge by SLERP,
            TIES or a search.
        local_count: how many of the processes are on this node and share `budget_bytes`; by default
            as torchrun says, else all of them.

    Example:
        >>> group = ProcessGroup(0, 4, session="job-8231-restart-2")
        >>> group.next_attempt()
        'job-8231-restart-2-000000'
    """

    def __init__(
        self,
        index: int,
        count: int,
        session: str,
        agree: Callable[[int], int] | None = None,
        exchange: Callable[[Bytes, Sequence[int], Sequence[int]], Bytes] | None = None,
        local_count: int | None = None,
    ) -> None:
        if not all(map(_is_integer, (index, count))):
            raise ValueError(f"index={index!r} and count={count!r} must be integers")
        if not 0 <= index < count:
            raise ValueError(f"process index {index} is out of range for {count} processes")
        if not isinstance(session, str):
            raise ValueError(f"session={session!r} must be a str, not {type(session).__name__}")
        if not re.fullmatch(_SESSION, session):
            raise ValueError(f"session {session!r} must consist of letters, digits, '-', '_', '.'")
        if local_count is not None and not (_is_integer(local_count) and 1 <= local_count <= count):
            raise ValueError(f"local_count={local_count!r} must be from 1 to {count}")
        self.index, self.count, self._session = index, count, JobSession(session)
        self._local_count = local_count
        self._agree, self._exchange = agree, exchange

    def next_attempt(self) -> str:
        return self._session.next_attempt()

    def on_node(self) -> int:
        """How many of the processes share the memory of this node, at most."""
        return self.count if self._local_count is None else self._local_count

    def agree(self, value: int) -> int:
        if self.count == 1:
            return value
        if self._agree is None:
            raise ValueError(
                "the processes must agree on this: give ProcessGroup(..., agree=) a function that "
                "returns the maximum of their values, such as MPI's allreduce(value, MAX)"
            )
        return self._agree(value)

    def exchange(self, data: Bytes, sent: Sequence[int], received: Sequence[int]) -> Bytes:
        if self._exchange is None:
            raise ValueError(
                "LoadOptions(exchange=True) needs communication, and so do merges by SLERP, "
                "TIES or a search: give ProcessGroup(..., exchange=) a function that does what "
                "MPI's Alltoallv does"
            )
        return self._exchange(data, sent, received)


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral)


def new_session() -> str:
    """A session name that is unique."""
    return os.urandom(8).hex()


def alone() -> ProcessGroup:
    """A job of one process. Each has its own session, so that it never mistakes the leftovers of an
    earlier one for its own."""
    return ProcessGroup(0, 1, new_session())


def all_gather_bytes(group: Group, data: bytes) -> list[bytes]:
    """The bytes of every process; called by all of them at the same point.

    Raises: as `Group.exchange`.
    """
    if group.count == 1:
        return [data]
    size = np.array([len(data)], np.int64).view(np.uint8)
    counts = [len(size)] * group.count
    sizes = group.exchange(np.tile(size, group.count), counts, counts).view(np.int64).tolist()
    copies = np.tile(np.frombuffer(data, np.uint8), group.count)
    gathered = group.exchange(copies, [len(data)] * group.count, sizes).tobytes()
    ends = itertools.accumulate(sizes)
    return [gathered[end - size : end] for end, size in zip(ends, sizes, strict=True)]


# --- the processes of this node ------------------------------------------------------------------


class Counters(Protocol):
    """The key-value store of a job."""

    def add(self, key: str, amount: int) -> int:
        """Adds to a counter, which begins at 0; returns its new value."""

    def announce(self, key: str) -> None:
        """Ends `wait` on all processes."""

    def wait(self, key: str, seconds: float) -> None:
        """Waits until a key is announced, or until the timeout; raises nothing."""


def launched_on_node(count: int | None = None) -> int | None:
    """How many processes the launcher started on this node, as torchrun and MPI say.

    Arguments:
        count: number of processes of the job; 1 for a process that is alone among those of the
            launcher; None for any.

    Returns:
        None if that is not known, or if it is said of another job.
    """
    for node_variable, world_variable in _LAUNCHERS:
        if local := _number(node_variable):
            world = _number(world_variable)
            if count is None or (local <= world and count in (1, world)):
                return local
    return None


def _number(name: str) -> int:
    """An environment variable that is a number; 0 if it is not."""
    text = os.environ.get(name, "")
    return int(text) if text.isascii() and text.isdigit() else 0


class NodeCount:
    """Counts the processes of a job on this node, by its key-value store.

    Arguments:
        counters: the store.
        count: number of processes of the job.
        session: a name that the job uses for nothing else.
        node: the name of this node.
    """

    def __init__(self, counters: Counters, count: int, session: str, node: str) -> None:
        self._counters, self._count = counters, count
        self._all = f"unickpt/nodes/{session}"
        self._here = f"{self._all}/{node}"
        self._ready = f"{self._all}/ready"
        self._exact = 0

    def arrive(self) -> None:
        """Counts this process; waits a moment for the others, which are about to arrive."""
        self._counters.add(self._here, 1)
        if self._counters.add(self._all, 1) == self._count:
            self._counters.announce(self._ready)
        else:
            self._counters.wait(self._ready, _PATIENCE_S)

    def at_most(self) -> int:
        """The number of processes on this node; those that have not arrived count as well."""
        if self._exact:
            return self._exact
        try:
            arrived = self._counters.add(self._all, 0)
            # In this order: a process that arrives meanwhile counts twice rather than never.
            local_count = self._counters.add(self._here, 0)
        except RuntimeError:  # the store ended with the process that had it
            return self._count
        if arrived == self._count:
            self._exact = local_count
        return local_count + self._count - arrived


def launched_index() -> int:
    """The number of this process among those of its launcher; -1 if that is not known."""
    return next((_number(index) for index, _ in _LAUNCHED if index in os.environ), -1)


def launched_together(group: Group | None) -> int:
    """How many processes of a group the launcher started on this node; 1 if unknown.

    Arguments:
        group: the processes; None for those of the launcher.
    """
    members = None if group is None else members_of(group)
    if group is None or members is None:
        return launched_on_node() or 1
    local, first = _number("LOCAL_WORLD_SIZE"), _number("RANK") - _number("LOCAL_RANK")
    # As torchrun numbers them: the processes of a node have consecutive numbers.
    has_ranks = {"RANK", "LOCAL_RANK"} <= os.environ.keys()
    rank_and_world = _number("RANK"), _number("WORLD_SIZE")
    if not has_ranks or rank_and_world != (members.numbers[group.index], members.job_count):
        return 1
    return sum(first <= number < first + local for number in members.numbers)


def processes_on_node(group: Group) -> int:
    """How many processes share the memory of this node; an upper bound if not known exactly."""
    launched = launched_on_node(_job_count(group))
    if launched is not None:
        return launched
    if isinstance(group, BoundedGroup | ProcessGroup):
        return group.on_node()
    return group.count


def _job_count(group: Group) -> int:
    """How many processes the job of a group has."""
    members = members_of(group)
    return group.count if members is None else members.job_count


@dataclass
class JobSession:
    """The agreements of a job's processes before their first save.

    Arguments:
        name: a name that the job uses for nothing else.
        nodes: counts the processes on this node; None if the launcher says how many there are, or
            if they cannot be counted.
        peers: the identities of other processes, as far as this one has seen them.
        jobs: the bytes of the trees that were saved last, the newest first; alike on all processes.
    """

    name: str
    nodes: NodeCount | None = None
    peers: dict[int, Identity] = field(default_factory=dict)
    jobs: tuple[JobBytes, ...] = ()
    _attempts: Iterator[int] = field(default_factory=itertools.count)

    @classmethod
    def begin(
        cls, name: str, group: Group, counters: Counters | None, node: Callable[[], str]
    ) -> JobSession:
        """Begins a session; called by all processes of a group at once.

        Arguments:
            name: as for the class.
            group: the processes.
            counters: their key-value store, if they have one that counts.
            node: returns the name of this node.
        """
        if counters is None or launched_on_node(_job_count(group)) is not None:
            return cls(name)
        nodes = NodeCount(counters, group.count, name, node())
        nodes.arrive()
        return cls(name, nodes)

    def next_attempt(self) -> str:
        return f"{self.name}-{next(self._attempts):06d}"


# --- the job of this process ---------------------------------------------------------------------


class Framework(Protocol):
    """The part of an adapter that reports the job of this process."""

    @property
    def group_of(self) -> Callable[[Any], Group | None] | None: ...


def group_named(option: object, adapters: Sequence[Framework]) -> Group:
    """The processes that `SaveOptions.group` or `LoadOptions.group` names.

    Raises:
        TypeError: it names none.
        ValueError: this process is not one of them.
    """
    if hasattr(option, "next_attempt"):
        group: Group = option  # type: ignore[assignment]
        return group
    if groups := groups_of(option, adapters):
        return groups[0]
    raise TypeError(
        f"group is of type {type(option).__name__}; omit it under torch.distributed and "
        "jax.distributed, where all processes save together. For some of them pass a process group "
        "of torch.distributed (dist.new_group([0, 2, 3]), or mesh.get_group()), or a jax Mesh or a "
        "list of jax devices; elsewhere unickpt.ProcessGroup(index, count, session)"
    )


def current_group(adapters: Sequence[Framework]) -> Group:
    """The job of this process, as its frameworks report it.

    Raises:
        ValueError: two frameworks each report a job.
    """
    return _one_of(groups_of(None, adapters))


def _one_of(groups: Sequence[Group]) -> Group:
    """The only group, or that of a single process; raises as `current_group`."""
    if len(groups) > 1:
        raise ValueError(
            "jax.distributed and torch.distributed are both initialised; say which processes save "
            "together: options=SaveOptions(group=unickpt.ProcessGroup(index, count, session))"
        )
    return groups[0] if groups else alone()


def saving_group(adapters: Sequence[Framework]) -> Group:
    """As `current_group`, for a save: warns if the processes of a job would save separately."""
    global _apart
    groups = groups_of(None, adapters)
    _apart = "" if groups else _launched_apart()
    if _apart:
        _warn_once(_apart)
    return _one_of(groups)


_apart = ""


def saved_apart() -> str:
    """For errors: why the processes of a launcher disturb each other, after a space; else empty."""
    return f". {_apart}" if _apart else ""


@cache
def _warn_once(text: str) -> None:
    warnings.warn(text, RuntimeWarning, stacklevel=3)


def _launched_apart() -> str:
    """Text for a process that a launcher started with others but that is in no job; else empty."""
    for index, count in _LAUNCHED:
        is_script = count == _OF_SLURM_JOB and _number(index) == 0
        if index in os.environ and _number(count) > 1 and not is_script:
            return _apart_text(index, count)
    return ""


_CALLS = {
    "torch": "torch.distributed.init_process_group()",
    "jax": "jax.distributed.initialize()",
}


def _apart_text(index: str, count: str) -> str:
    imported = [name for name in _CALLS if sys.modules.get(name) is not None] or list(_CALLS)
    missing = " and ".join(f"{name}.distributed" for name in imported)
    calls = " or ".join(_CALLS[name] for name in imported)
    return (
        f"{count} is {os.environ[count]}, but {missing} "
        f"{'is' if len(imported) == 1 else 'are'} not initialised: each process saves alone, this "
        f"one with {index}={os.environ[index]}. Call {calls} before, on all processes. Without "
        'them, pass options=SaveOptions(group=unickpt.ProcessGroup(int(os.environ["'
        f'{index}"]), int(os.environ["{count}"]), session)), where session is a name that is new '
        "for each run. A process that shall save alone has ProcessGroup(0, 1, session)"
    )


def groups_of(obj: object, adapters: Sequence[Framework]) -> list[Group]:
    """The groups that an object names, one for each framework that knows it; for None the jobs of
    this process."""
    finders = [adapter.group_of for adapter in adapters if adapter.group_of is not None]
    return [group for find in finders if (group := find(obj)) is not None]
