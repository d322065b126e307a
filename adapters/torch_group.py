"""PyTorch: the ranks of torch.distributed as a process group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from unickpt.arrays.dtypes import Array
from unickpt.errors import ProcessFailed, SaveTimeout
from unickpt.frameworks.budget import node_name
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


def group() -> Group | None:
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return None
    return TorchGroup(dist.group.WORLD)


class TorchGroup(BoundedGroup):
    """All ranks of torch.distributed.

    Arguments:
        world: its process group.
        timeout_s: how long to wait for other ranks; None waits as long as torch does.
    """

    def __init__(self, world: Any, timeout_s: float | None = None) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self._world, self._timeout_s = world, timeout_s

    def within(self, timeout_s: float) -> TorchGroup:
        return TorchGroup(self._world, timeout_s)

    def next_attempt(self) -> str:
        if self._world not in _sessions:
            name, store = self._new_session(), _store()
            counters = None if store is None else _StoreCounters(store)
            _sessions[self._world] = JobSession.begin(name, self.count, counters, node_name)
        return _sessions[self._world].next_attempt()

    @property
    def session(self) -> JobSession | None:
        return _sessions.get(self._world)

    def agree(self, value: int) -> int:
        largest = torch.tensor(value, dtype=torch.int64, device=self._device())
        self._finish(dist.all_reduce(largest, dist.ReduceOp.MAX, async_op=True), DECIDE)
        return int(largest.item())

    def exchange(self, data: Array, sent: Sequence[int], received: Sequence[int]) -> Array:
        device = self._device()
        found = torch.empty(sum(received), dtype=torch.uint8, device=device)
        given = torch.from_numpy(data).to(device)
        parts = list(received), list(sent)
        self._finish(dist.all_to_all_single(found, given, *parts, async_op=True), LOAD)
        exchanged: Array = found.cpu().numpy()
        return exchanged

    def _new_session(self) -> str:
        """Rank 0 creates the session's name and writes it to the job's key-value store."""
        # Not by a collective: if a rank does not take part, the process group of the others becomes
        # unusable, and nothing reports which rank that was.
        store, name = _store(), new_session()
        if store is None:  # MPI has none
            return self._broadcast(name)
        if self.index == 0:
            for rank in range(1, self.count):
                store.set(_SESSION_KEY.format(rank), name)
            return name
        key = _SESSION_KEY.format(self.index)
        wait = () if self._timeout_s is None else (timedelta(seconds=self._timeout_s),)
        try:
            store.wait([key], *wait)
            name = str(store.get(key).decode())
            # Deleted, so that a later process group with this store never finds an older name.
            store.delete_key(key)
        except dist.DistNetworkError as error:
            raise ProcessFailed(f"rank 0 hosts the store, and may have ended: {error}") from error
        except RuntimeError as error:  # DistStoreError; some stores raise its base
            raise SaveTimeout(
                f"process {self.index} of {self.count} waited for process 0, which did not start "
                f"to save within {self._limit(SAVE)}; all ranks must {SAVE.duty}"
            ) from error
        return name

    def _broadcast(self, name: str) -> str:
        shared = torch.tensor(list(bytes.fromhex(name)), dtype=torch.uint8, device=self._device())
        self._finish(dist.broadcast(shared, src=0, async_op=True), SAVE)
        return bytes(shared.tolist()).hex()

    def _finish(self, work: Any, call: JointCall) -> None:
        """Waits for a collective that is part of a call.

        Raises:
            SaveTimeout: it takes longer than this group waits.
            ProcessFailed: another rank ended.
        """
        if self._timeout_s is None:
            work.wait()
            return
        if self._device() == "cpu":
            try:
                work.wait(timedelta(seconds=self._timeout_s))
                return
            except RuntimeError as error:
                if work.is_completed():
                    raise ProcessFailed(f"another rank has probably ended: {error}") from error
                raise self._late(call) from error
        # NCCL's `wait` does not block the host.
        deadline, pause = time.monotonic() + self._timeout_s, 50e-6
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise self._late(call)
            time.sleep(pause)
            pause = min(2 * pause, 5e-3)
        work.wait()

    def _late(self, call: JointCall) -> SaveTimeout:
        others = [rank for rank in range(self.count) if rank != self.index]
        shown = ", ".join(map(str, others[:8])) + ", ..." * (len(others) > 8)
        return SaveTimeout(
            f"process {self.index} of {self.count} waited for process{'es' * (len(others) > 1)} "
            f"{shown}, but not all of them took part within {self._limit(call)}; all ranks must "
            f"{call.duty}"
        )

    def _limit(self, call: JointCall) -> str:
        if self._timeout_s is None:
            return "the timeout of torch.distributed"
        return f"{self._timeout_s:g} s ({call.option})"

    def _device(self) -> str:
        backends = str(dist.get_backend_config(self._world)).split(",")  # e.g. cpu:gloo,cuda:nccl
        devices = [backend.partition(":")[0] for backend in backends]
        return "cpu" if "cpu" in devices else devices[0]


class _StoreCounters:
    """The job's key-value store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(key, amount))

    def announce(self, key: str) -> None:
        self._store.set(key, "")

    def wait(self, key: str, seconds: float) -> None:
        with suppress(RuntimeError):  # too late, or the store is gone: what follows reports that
            self._store.wait([key], timedelta(seconds=seconds))


_SESSION_KEY = "unickpt/session/{}"


def _store() -> Any:
    """The key-value store of the job; torch has no public name for it."""
    return dist.distributed_c10d._get_default_store()


# A session lasts as long as its process group; weak keys, so that a new group gets a new one.
_sessions: WeakKeyDictionary[Any, JobSession] = WeakKeyDictionary()
