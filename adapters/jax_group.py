"""JAX: the processes of jax.distributed, or those of some devices, as a process group."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from unickpt.adapters.jax_settings import unchecked
from unickpt.arrays.dtypes import Array
from unickpt.errors import ProcessFailed, SaveTimeout
from unickpt.frameworks.members import Members, named
from unickpt.frameworks.memory_limits import node_name
from unickpt.frameworks.process_group import (
    DECIDE,
    LOAD,
    SAVE,
    BoundedGroup,
    Group,
    JobSession,
    JointCall,
    new_session,
)

_A_DAY_S = 86400.0
# Bytes that a process sends to all others at once, and the minimum of it to each.
_SLICES, _LEAST_SLICE = 32 << 20, 64 << 10


def group_of(obj: Any) -> Group | None:
    if obj is None:
        # In this order, JAX does not start its backends without need.
        is_job = jax.distributed.is_initialized() and jax.process_count() > 1
        return JaxGroup() if is_job else None
    if isinstance(obj, jax.sharding.Mesh):
        obj = obj.devices
    if not isinstance(obj, list | tuple | np.ndarray):
        return None
    devices = list(obj.flat if isinstance(obj, np.ndarray) else obj)
    if not devices or not all(isinstance(device, jax.Device) for device in devices):
        return None
    part = _GroupPart(devices)
    if jax.process_index() not in part.members.positions:
        raise ValueError(
            f"process {jax.process_index()} has none of the {len(devices)} devices, which are of "
            f"{part.members}; only these save and load with them"
        )
    if len(part.members.numbers) > 1 and not jax.distributed.is_initialized():
        raise ValueError(
            f"the devices are of {part.members}, which agree through its key-value store; call "
            "jax.distributed.initialize() before"
        )
    return JaxGroup(part=part)


class _GroupPart:
    """Some devices, and their processes.

    Arguments:
        devices: in any order.
    """

    def __init__(self, devices: Sequence[Any]) -> None:
        ordered = sorted(set(devices), key=lambda device: (device.process_index, device.id))
        first = {int(device.process_index): device for device in reversed(ordered)}
        processes = tuple(sorted(first))
        self.members = _members(processes, jax.process_count())
        self.devices = [first[process] for process in processes]
        """One of each process."""
        self._ids = [device.id for device in ordered]

    @cached_property
    def name(self) -> str:
        """The same on all of its processes, and of no other devices."""
        return hashlib.blake2b(json.dumps(self._ids).encode(), digest_size=8).hexdigest()


@lru_cache(maxsize=64)
def _members(processes: tuple[int, ...], job_count: int) -> Members:
    return Members(processes, job_count, "process", "jax.distributed")


def only_this_process() -> Members:
    return _members((jax.process_index(),), jax.process_count())


class JaxGroup(BoundedGroup):
    """Processes of jax.distributed.

    They agree through its key-value store: a computation would wait for the devices, could not be
    cancelled, and does not report which process is missing.

    Arguments:
        timeout_s: how long to wait for other processes.
        part: devices whose processes these are; None for all.
    """

    def __init__(self, timeout_s: float = _A_DAY_S, part: _GroupPart | None = None) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        if part is not None:
            self.index, self.count = part.members.positions[self.index], len(part.devices)
            self.members = None if self.count == jax.process_count() else part.members
        self._timeout_s, self._part = timeout_s, part

    def __repr__(self) -> str:
        return f"JaxGroup({self.members or 'all processes'})"

    def within(self, timeout_s: float) -> JaxGroup:
        return JaxGroup(timeout_s, self._part)

    def next_attempt(self) -> str:
        conversation = self._conversation
        if conversation.session is None:
            conversation.session = self._new_session()
        return conversation.session.next_attempt()

    def _new_session(self) -> JobSession:
        if self.count == 1:
            return JobSession(new_session())
        client, key = _client(), f"{self._place}/session"
        if self.index == 0:
            name = new_session()
            client.key_value_set(key, name)
        else:
            first = f"for {named(self.members, [0])}, which did not start to save"
            with self._waiting(first, SAVE):
                name = client.blocking_key_value_get(key, self._timeout_ms)
        can_count = hasattr(client, "key_value_increment")  # older versions of jaxlib cannot
        counters = _KeyValueCounters(client) if can_count else None
        return JobSession.begin(name, self, counters, node_name)

    @property
    def session(self) -> JobSession | None:
        return self._conversation.session

    @property
    def _place(self) -> str:
        """Where its keys are in the key-value store."""
        return "unickpt" if self._part is None else f"unickpt/of/{self._part.name}"

    @property
    def _conversation(self) -> _Conversation:
        conversations = _conversations(_client())
        return conversations.setdefault(self._place, _Conversation())

    def agree(self, value: int) -> int:
        return self._agree(value, DECIDE)

    def _agree(self, value: int, call: JointCall) -> int:
        if self.count == 1:
            return value
        client = _client()
        number = next(self._conversation.agreements)
        place = f"{self._place}/agree/{number}"
        client.key_value_set(f"{place}/{self.index}", str(value))
        participants = () if self.members is None else (list(self.members.numbers),)
        with self._waiting("for the others, but not all of them took part", call):
            client.wait_at_barrier(place, self._timeout_ms, *participants)
        if self.index > 0:
            first = f"for {named(self.members, [0])}, which did not send the agreed value"
            with self._waiting(first, call):
                return int(client.blocking_key_value_get(f"{place}/largest", self._timeout_ms))
        largest = max(int(vote) for _, vote in client.key_value_dir_get(f"{place}/"))
        client.key_value_set(f"{place}/largest", str(largest))
        if number:
            before = f"{self._place}/agree/{number - 1}"
            client.key_value_delete(before)  # all have read it
        return largest

    @property
    def _timeout_ms(self) -> int:
        return max(1, int(self._timeout_s * 1000))

    @contextmanager
    def _waiting(self, what: str, call: JointCall) -> Iterator[None]:
        try:
            yield
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise ProcessFailed(f"another process has probably ended: {error}") from error
            me, part = f"process {self.index} of {self.count}", ""
            if self.members is not None:
                me = f"{named(self.members, [self.index])} in the group of {self.members}"
                part = " of the group"
            raise SaveTimeout(
                f"{me} waited {what} within {self._timeout_s:g} s ({call.option}); all processes"
                f"{part} must {call.duty}. jax.distributed says: {error}"
            ) from error

    def exchange(self, data: Array, sent: Sequence[int], received: Sequence[int]) -> Array:
        # Two shapes, so that XLA compiles twice at most: most messages are short, and a long one
        # repeats the large shape until its longest part is sent.
        longest = self._agree(max(*sent, *received), LOAD)
        short = longest <= _LEAST_SLICE
        extent = _LEAST_SLICE if short else max(_LEAST_SLICE, _SLICES // self.count)
        times = -(-longest // extent)
        starts, ends = ([0, *itertools.accumulate(sizes)] for sizes in (sent, received))
        output = np.empty(sum(received), np.uint8)
        devices = (self._part or _GroupPart(jax.devices())).devices
        for begin in range(0, times * extent, extent):
            slices = np.zeros((1, self.count, extent), np.uint8)
            for process, n in enumerate(sent):
                part = data[starts[process] : starts[process] + n][begin : begin + extent]
                slices[0, process, : len(part)] = part
            swapped = _swap(slices, devices, self.index)
            for process, n in enumerate(received):
                part = output[ends[process] : ends[process] + n][begin : begin + extent]
                part[:] = swapped[process, : len(part)]
        return output


def _swap(slices: Array, devices: Sequence[Any], index: int) -> Array:
    """Sends a slice to each process; returns the slices from each process.

    Arguments:
        slices: for each process one.
        devices: one of each process.
        index: of this process among them.
    """
    mesh = jax.sharding.Mesh(np.asarray(devices), ("process",))
    spec: Any = jax.sharding.PartitionSpec
    ours, theirs = NamedSharding(mesh, spec("process")), NamedSharding(mesh, spec(None, "process"))
    shape = (len(devices), *slices.shape[1:])
    with unchecked():
        mine = jax.device_put(slices, devices[index])
        every = jax.make_array_from_single_device_arrays(shape, ours, [mine])
        swapped = _resharder(theirs)(every)
        return np.asarray(swapped.addressable_shards[0].data)[:, 0]


@lru_cache(maxsize=4)
def _resharder(sharding: Sharding) -> Callable[[Any], Any]:
    return jax.jit(lambda x: x, out_shardings=sharding)


class _KeyValueCounters:
    """The job's key-value store."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def add(self, key: str, amount: int) -> int:
        return int(self._client.key_value_increment(key, amount))

    def announce(self, key: str) -> None:
        self._client.key_value_set(key, "ready")

    def wait(self, key: str, seconds: float) -> None:
        with suppress(jax.errors.JaxRuntimeError):  # too late: those that miss count as well
            self._client.blocking_key_value_get(key, int(seconds * 1000))


@dataclass
class _Conversation:
    """The state of the communication of a group through one client of jax.distributed."""

    session: JobSession | None = None
    agreements: Iterator[int] = field(default_factory=itertools.count)


@lru_cache(maxsize=1)
def _conversations(client: Any) -> dict[str, _Conversation]:
    """By the place of a group's keys; there is one client at a time."""
    return {}


def _client() -> Any:
    """The client of the job's key-value store; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
