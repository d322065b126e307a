"""Follower: the inference engine's side."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from unickpt import Checkpoint, CheckpointNotFound, LoadMismatch, Rules, UnickptError
from unickpt.errors import CheckpointReplaced, UnsupportedFormat
from unickpt.extend import (
    LoadRequest,
    OcdbtReader,
    PathLike,
    StepFolder,
    Version,
    View,
    flatten_state,
    leaves_of_tree,
    opened_checkpoint,
    plan_load,
    rebuild_tree,
    resolve_path,
)
from unickpt.plugins.weights.leases import FollowerLease
from unickpt.plugins.weights.live_arrays import finish_in_place, flip
from unickpt.plugins.weights.proof import WeightsCheck, live_sha256, stored_sha256
from unickpt.plugins.weights.publisher import RULES_METADATA, plain_state
from unickpt.plugins.weights.staging import LiveState, StagedUpdate, Stager
from unickpt.plugins.weights.swapping import with_spares

_log = logging.getLogger("unickpt")
# An update starts again if the version that it reads is removed or replaced meanwhile.
_TRIES = 5
# Earlier states of chunks take at most one byte of host memory for so many of the weights. With
# scattered changes of 1 %, a publisher's defaults need up to a third of a byte.
_UNDO_SHARE = 2
Pause = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class UpdateReport:
    """What an update did.

    Arguments:
        version: that is live now.
        previous: that was live before; None if none was.
        chunks: how many stored chunks differed.
        whole_chunks: how many were read whole; of the others only patches.
        read_bytes: of chunks and patches that were read.
        staged_bytes: of the changes, beside the live weights.
        read_s: seconds for which threads waited for chunks and patches, together.
        stage_s: seconds until all was staged and verified; the old version was live.
        wait_s: seconds from then until `pause` was entered.
        pause_s: seconds of the flip.
        resume_s: seconds from then until `pause` was left.
    """

    version: int
    previous: int | None
    chunks: int
    whole_chunks: int
    read_bytes: int
    staged_bytes: int
    read_s: float
    stage_s: float
    wait_s: float
    pause_s: float
    resume_s: float


class Follower:
    """Keeps the arrays of an inference engine at the newest version that a `Publisher` published.

    `update` reads only what differs from the live version, stages it in separate memory, compares
    it with its digests, and then changes the live arrays in one short step: all or none. If
    anything fails, the old version stays live, and the error is raised. Each process of an engine
    has its own Follower for its part of the weights. Its methods may be called from any thread.

    Arguments:
        root: as for the publisher.
        like: the live arrays: a torch module, or a tree of torch tensors and NumPy arrays, which
            are changed in place, or of JAX arrays, which are replaced in `weights`. The published
            state may have more.
        rules: from the published names and layouts to those of `like`; by default the publisher's.
        rank: of this process in the engine, shown in its lease.
        keep_copies: keep stored chunks in host memory of which `like` has only a part, as with
            tensor parallelism; without it, they are read whole when they change.
        swap: shortens the flip, with memory for a second copy of the arrays that change: "pages"
            exchanges the pages of host memory on Linux, so addresses stay, but nothing may use the
            weights in the flip, and no device or process may share their memory; True gives torch
            tensors other memory, for an engine that does not keep their addresses. By default,
            and where it is impossible, changes are copied.
        lease_s: a publisher removes versions that this follower reads only if it has not been heard
            of for so long.

    Raises:
        InvalidPath: the root is not a storage.

    Example:
        >>> import numpy as np
        >>> from unickpt.plugins.weights import Follower, Publisher
        >>> with Publisher("memory://docs/follower") as publisher:
        ...     for version in range(3):
        ...         _ = publisher.publish(version, {"w": np.full(3, version)}).result()
        >>> with Follower("memory://docs/follower", {"w": np.zeros(3, int)}) as follower:
        ...     follower.update(), follower.version, follower.rollback(1).version, follower.weights
        (True, 2, 1, {'w': array([1, 1, 1])})
    """

    def __init__(
        self,
        root: PathLike,
        like: Any,
        *,
        rules: Rules | None = None,
        rank: int | None = None,
        keep_copies: bool = False,
        swap: bool | Literal["pages"] = False,
        lease_s: float = 60.0,
    ) -> None:
        if lease_s <= 0:
            raise ValueError(f"lease_s={lease_s!r} must be more than 0")
        if not (isinstance(swap, bool) or swap == "pages"):
            raise ValueError(f"swap={swap!r} must be True, False or 'pages'")
        self._steps = StepFolder(root)
        self._tree, self._module = plain_state(like), like
        self._rules, self._keep_copies, self._swap = rules, keep_copies, swap
        self._lease = FollowerLease(resolve_path(root), lease_s, rank)
        self._lock, self._is_busy = threading.RLock(), False
        self._version: int | None = None
        self._identity: Version | None = None
        self._newest_seen = -1
        self._state, self._leaves = LiveState(), dict[str, _EngineLeaf]()
        self._is_closed = self._has_warned = False
        self.last_update: UpdateReport | None = None
        """What the last update or rollback did."""

    @property
    def version(self) -> int | None:
        """The version that is live; None before the first."""
        return self._version

    @property
    def _is_module(self) -> bool:
        return callable(getattr(self._module, "named_parameters", None))

    @property
    def weights(self) -> Any:
        """The live tree: `like`, with new JAX arrays."""
        return self._module

    def versions(self) -> list[int]:
        """The versions that exist, ascending.

        Raises:
            StorageError: the storage failed.
        """
        return self._steps.steady()

    def update(self, *, pause: Pause = nullcontext) -> bool:
        """Makes the newest version live, if it is newer; call it as often as you like.

        After `rollback`, only versions count that did not exist then.

        Arguments:
            pause: returns a context manager within which the engine does not use the weights;
                entered only for the flip; it calls no method of this Follower. An error of its
                end is raised after the flip.

        Returns:
            Whether another version is live now.

        Raises:
            CheckpointCorrupt: the version is damaged; the old one stays live.
            LoadMismatch, RuleError: it does not fit `like`.
            UnickptError: as `unickpt.load`; the old version stays live.
        """
        with self._exclusive():
            state = self._state
            for attempt in range(_TRIES):
                newest = max(self.versions(), default=-1)
                is_replaced = newest == self._version and self._is_replaced(newest)
                if newest <= self._newest_seen and not is_replaced:
                    self._warn(newest)
                    return False
                try:
                    self._make_live(newest, pause)
                except CheckpointNotFound:  # it was removed or replaced meanwhile
                    is_flipped = self._state is not state  # then the end of `pause` raised it
                    if is_flipped or attempt == _TRIES - 1:
                        raise
                    continue
                return True
            raise AssertionError("the last try returns or raises")

    def rollback(self, version: int, *, pause: Pause = nullcontext) -> Self:
        """Makes a version live that still exists.

        Arguments:
            version: its number.
            pause: as for `update`.

        Raises:
            CheckpointNotFound: it does not exist; the live version stays.
            UnickptError: as `update`.
        """
        with self._exclusive():
            existing = self.versions()
            if version not in existing:
                shown = ", ".join(map(str, existing[-10:])) or "none"
                raise CheckpointNotFound(
                    f"version {version} is not in {self._steps.location}; there are: {shown}. "
                    f"Version {self._version} stays live"
                )
            self._make_live(version, pause)
            self._newest_seen = existing[-1]
        return self

    def check(self) -> WeightsCheck:
        """Compares the sha256 of every live array with that of the live version in the storage.

        Raises:
            ValueError: no version is live.
            CheckpointNotFound: it was removed, or replaced.
            UnickptError: as `update`.
        """
        with self._exclusive():
            if self._version is None:
                raise ValueError("no version is live yet; call update() first")
            checkpoint = opened_checkpoint(self._steps.path(self._version))
            if self._is_replaced(self._version):
                raise CheckpointReplaced(
                    f"{checkpoint.location}: version {self._version} was replaced since it is live "
                    "here; call update()"
                )
            self._renew_tree()
            view, request = self._plan(checkpoint, self._tree)
            return WeightsCheck(self._version, stored_sha256(view, request), live_sha256(request))

    def close(self) -> None:
        """Gives up the lease; the live version stays in the arrays."""
        with self._exclusive(closes=True):
            if not self._is_closed:
                self._is_closed = True
                self._lease.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Follower({str(self._steps.location)!r}, version {self._version})"

    @contextmanager
    def _exclusive(self, *, closes: bool = False) -> Iterator[None]:
        """One method at a time; other threads wait. `pause` or a handler of a signal may call one
        within another, whose staged changes would then belong to another version."""
        with self._lock:
            if self._is_closed and not closes:
                raise ValueError(f"the Follower of {self._steps.location} is closed")
            if self._is_busy:
                raise UnickptError(
                    f"this Follower of {self._steps.location} is busy: its methods cannot be "
                    "called within an update, such as by pause=, nor by a handler of a signal. "
                    "Call them when it has returned"
                )
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def _is_replaced(self, version: int) -> bool:
        """Whether the live version's number denotes another one by now."""
        current = self._steps.version(version)
        return current is not None and current != self._identity

    def _warn(self, newest: int) -> None:
        """Warns of versions that are missing."""
        if newest < 0 and self._version is None and not self._has_warned:
            self._has_warned = True
            _log.warning("%s: no version is published there yet", self._steps.location)
        if self._version is not None and newest < self._version:
            _log.warning(
                "%s: version %s is live here, but the newest there is %s",
                self._steps.location,
                self._version,
                newest if newest >= 0 else "none",
            )

    def _plan(self, checkpoint: Checkpoint, tree: Any) -> tuple[View, LoadRequest]:
        if not isinstance(checkpoint.reader, OcdbtReader):
            raise UnsupportedFormat(
                f"{checkpoint.location} is of the format {checkpoint.reader.format!r}; a Follower "
                "reads what a Publisher, or a Checkpointer, wrote"
            )
        rules, text = self._rules, checkpoint.metadata.get(RULES_METADATA)
        if rules is None and isinstance(text, str):
            rules = Rules.parse(text, name="the publisher's rules")
        try:
            return plan_load(checkpoint, tree, rules)
        except LoadMismatch as error:
            raise LoadMismatch(
                f"{error}\nOf what is advised here, a Follower takes rules="
            ) from None

    def _make_live(self, version: int, pause: Pause) -> None:
        """Makes a version live, or leaves the old one.

        Raises:
            CheckpointNotFound: it does not exist, or was removed or replaced meanwhile.
        """
        started = time.perf_counter()
        self._lease.hold([self._version, version])
        try:
            identity = self._steps.version(version)
            checkpoint = opened_checkpoint(self._steps.path(version), once=True)
            staged, request, view = self._staged(checkpoint)
            if self._steps.version(version) != identity:
                raise CheckpointReplaced(f"{checkpoint.location} was replaced during the update")
            times, is_flipped = [time.perf_counter()], False
            try:
                with pause():
                    times.append(time.perf_counter())
                    flip(staged.changes, _threads())
                    is_flipped = True
                    times.append(time.perf_counter())
            finally:
                if is_flipped:  # even if the end of the pause fails
                    self._flipped(staged, request, view)
                    previous, self._version = self._version, version
                    self._state, self._identity = staged.state, identity
                    self._leaves = _leaves(self._tree)
                    self._newest_seen = max(self._newest_seen, version)
            times.append(time.perf_counter())
            if not is_flipped:
                raise UnickptError(
                    f"{checkpoint.location}: changing the weights failed, and pause= suppressed "
                    f"the error; version {self._version} stays live"
                )
            self.last_update = UpdateReport(
                version,
                previous,
                *staged.chunks,
                read_bytes=staged.read_bytes,
                staged_bytes=staged.staged_bytes,
                read_s=staged.read_s,
                stage_s=times[0] - started,
                wait_s=times[1] - times[0],
                pause_s=times[2] - times[1],
                resume_s=times[3] - times[2],
            )
        finally:
            self._lease.hold([self._version])

    def _staged(self, checkpoint: Checkpoint) -> tuple[StagedUpdate, LoadRequest, View]:
        self._renew_tree()
        replaced = {
            n for n, leaf in _leaves(self._tree).items() if not leaf.is_at(self._leaves.get(n))
        }
        tree, spared = with_spares(self._tree) if self._swap is True else (self._tree, {})
        view, request = self._plan(checkpoint, tree)
        nbytes = sum(entry.nbytes for entry in checkpoint.index.arrays.values())
        stager = Stager(
            view,
            request,
            self._state,
            replaced=replaced,
            keep_copies=self._keep_copies,
            most_undo=nbytes // _UNDO_SHARE,
            threads=_threads(),
            spared=spared,
            pages=self._swap == "pages",
        )
        return stager.stage(), request, view

    def _renew_tree(self) -> None:
        """Takes the tensors that a module has now, such as after `load_state_dict(assign=True)`."""
        if self._is_module:
            self._tree = plain_state(self._module)

    def _flipped(self, staged: StagedUpdate, request: LoadRequest, view: View) -> None:
        """Records new leaves, after the flip."""
        finish_in_place(staged.leaves)
        if all(staged.values[name] is request.leaves[name] for name in request.targets):
            return
        plain = view.index.values
        values = {**staged.values, **{n: plain[n] for n in request.leaves if n in plain}}
        self._tree = rebuild_tree(request.node, values.__getitem__)
        if not self._is_module:
            self._module = self._tree


class _EngineLeaf(NamedTuple):
    """A live leaf; of a torch tensor, also the memory, which may become another."""

    value: Any
    memory: Any

    def is_at(self, other: _EngineLeaf | None) -> bool:
        """Whether the other is in the same memory."""
        if other is None or self.memory != other.memory:
            return False
        return self.memory is not None or self.value is other.value


def _leaves(tree: Any) -> dict[str, _EngineLeaf]:
    leaves = leaves_of_tree(flatten_state(tree))
    return {leaf.name: _EngineLeaf(leaf.value, _memory(leaf.value)) for leaf in leaves}


def _memory(leaf: Any) -> Any:
    with suppress(AttributeError, RuntimeError):  # such as a sparse tensor
        address = leaf.data_ptr()
        return (address, leaf.shape, leaf.stride(), leaf.dtype) if address else None
    return None


def _threads() -> int:
    return max(1, min(4, os.cpu_count() or 1))
