"""JAX: the processes of jax.distributed as a process group."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from unickpt.arrays.dtypes import Array
from unickpt.errors import ProcessFailed, SaveTimeout
from unickpt.frameworks.host_memory import node_name
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
_SESSION_KEY = "unickpt/session"
# Bytes that a process sends to all others at once, and the minimum of it to each.
_SLICES, _LEAST_SLICE = 32 << 20, 64 << 10


def group() -> Group | None:
    # In this order, JAX does not start its backends without need.
    if not jax.distributed.is_initialized() or jax.process_count() == 1:
        return None
    return JaxGroup()


class JaxGroup(BoundedGroup):
    """All processes of jax.distributed.

    They agree through its key-value store: a computation would wait for the devices, could not be
    cancelled, and does not report which process is missing.

    Arguments:
        timeout_s: how long to wait for other processes.
    """

    def __init__(self, timeout_s: float = _A_DAY_S) -> None:
        self.index, self.count = jax.process_index(), jax.process_count()
        self._timeout_s = timeout_s

    def within(self, timeout_s: float) -> JaxGroup:
        return JaxGroup(timeout_s)

    def next_attempt(self) -> str:
        client = _client()
        conversation = _conversation(client)
        if conversation.session is None:
            if self.index == 0:
                name = new_session()
                client.key_value_set(_SESSION_KEY, name)
            else:
                with self._waiting("for process 0, which did not start to save", SAVE):
                    name = client.blocking_key_value_get(_SESSION_KEY, self._timeout_ms)
            can_count = hasattr(client, "key_value_increment")  # older versions of jaxlib cannot
            counters = _KeyValueCounters(client) if can_count else None
            conversation.session = JobSession.begin(name, self.count, counters, node_name)
        return conversation.session.next_attempt()

    @property
    def session(self) -> JobSession | None:
        return _conversation(_client()).session

    def agree(self, value: int) -> int:
        return self._agree(value, DECIDE)

    def _agree(self, value: int, call: JointCall) -> int:
        client = _client()
        number = next(_conversation(client).agreements)
        place = f"unickpt/agree/{number}"
        client.key_value_set(f"{place}/{self.index}", str(value))
        with self._waiting("for the others, but not all of them took part", call):
            client.wait_at_barrier(place, self._timeout_ms)
        if self.index > 0:
            with self._waiting("for process 0, which did not send what was agreed", call):
                return int(client.blocking_key_value_get(f"{place}/largest", self._timeout_ms))
        largest = max(int(found) for _, found in client.key_value_dir_get(f"{place}/"))
        client.key_value_set(f"{place}/largest", str(largest))
        if number:
            client.key_value_delete(f"unickpt/agree/{number - 1}")  # all have read it
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
            raise SaveTimeout(
                f"process {self.index} of {self.count} waited {what} within {self._timeout_s:g} s "
                f"({call.option}); all processes must {call.duty}. jax.distributed says: {error}"
            ) from error

    def exchange(self, data: Array, sent: Sequence[int], received: Sequence[int]) -> Array:
        # One shape, so that XLA compiles once; repeated until the longest part is sent.
        extent = max(_LEAST_SLICE, _SLICES // self.count)
        times = self._agree(-(-max(*sent, *received) // extent), LOAD)
        starts, ends = ([0, *itertools.accumulate(sizes)] for sizes in (sent, received))
        found = np.empty(sum(received), np.uint8)
        for begin in range(0, times * extent, extent):
            slices = np.zeros((1, self.count, extent), np.uint8)
            for process, n in enumerate(sent):
                part = data[starts[process] : starts[process] + n][begin : begin + extent]
                slices[0, process, : len(part)] = part
            swapped = _swap(slices)
            for process, n in enumerate(received):
                part = found[ends[process] : ends[process] + n][begin : begin + extent]
                part[:] = swapped[process, : len(part)]
        return found


def _swap(slices: Array) -> Array:
    """Sends a slice to each process; returns the slices from each process."""
    by_process = {device.process_index: device for device in reversed(jax.devices())}
    devices = [by_process[process] for process in sorted(by_process)]
    mesh = jax.sharding.Mesh(np.asarray(devices), ("process",))
    spec: Any = jax.sharding.PartitionSpec
    ours, theirs = NamedSharding(mesh, spec("process")), NamedSharding(mesh, spec(None, "process"))
    mine = jax.device_put(slices, devices[jax.process_index()])
    shape = (len(devices), *slices.shape[1:])
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
    """The state of the communication through one client of jax.distributed."""

    session: JobSession | None = None
    agreements: Iterator[int] = field(default_factory=itertools.count)


@lru_cache(maxsize=1)
def _conversation(client: Any) -> _Conversation:
    return _Conversation()


def _client() -> Any:
    """The client of the job's key-value store; JAX has no public name for it."""
    from jax._src import distributed

    return distributed.global_state.client
