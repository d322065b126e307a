"""What version 1 of Orbax returns: metadata of a checkpoint, and responses that wait."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Any, Generic, TypeVar

from unickpt.integrations.orbax.run import Info, Run, StepNotFoundError
from unickpt.saving.background import PendingSave

T = TypeVar("T")
STATES = ("state", "pytree")
"""The names of what is saved without one, in this version of Orbax and in earlier ones."""


@dataclass(frozen=True)
class CheckpointMetadata(Generic[T]):
    """A checkpoint that is no step of a run.

    Arguments:
        path: its folder.
        metadata: what is stored: a tree, or trees by name.
        init_timestamp_nsecs, commit_timestamp_nsecs: when it was saved, since 1970; None if that
            is not recorded.
        custom_metadata: as given to `save`.
    """

    path: Any
    _: KW_ONLY
    metadata: T
    init_timestamp_nsecs: int | None = None
    commit_timestamp_nsecs: int | None = None
    custom_metadata: Any = None


@dataclass(frozen=True)
class StepCheckpointMetadata:
    """A step, as `training.CheckpointMetadata`.

    Arguments:
        step: its number.
        path: its folder.
        metadata: None, or what is stored: a tree, or trees by name.
        custom_metadata: as given to `save`; only if metadata is not None.
    """

    step: int
    path: Any
    metadata: Any = None
    custom_metadata: Mapping[str, Any] | None = None
    info: Info | None = field(default=None, repr=False)

    @property
    def metrics(self) -> Any:
        return self.info and self.info.metrics

    @property
    def time(self) -> Any:
        return self.info and self.info.time

    @property
    def init_timestamp_nsecs(self) -> int | None:
        """When it was saved; the same as `commit_timestamp_nsecs`."""
        return self.commit_timestamp_nsecs

    @property
    def commit_timestamp_nsecs(self) -> int | None:
        return None if self.info is None else nanoseconds(self.info.time)


def nanoseconds(time: datetime) -> int:
    """A time as Orbax gives it, since 1970."""
    return round(time.timestamp() * 1e9)


def only_name(there: Collection[str], path: Any) -> str:
    """Of trees by name, the one that is loaded without a name.

    Raises:
        StepNotFoundError: there is none.
    """
    found = next((name for name in STATES if name in there), None)
    if found is None and len(there) == 1:
        (found,) = there
    if found is None:
        raise StepNotFoundError(
            f"{path} has no {STATES[0]!r}; there are {', '.join(there) or 'none'}: say which by "
            "checkpointable_name="
        )
    return found


class SaveResponse:
    """A save in the background.

    Arguments:
        pending: the save.
        run: of which it is a step; None for a checkpoint of its own.
        on_commit: called after the commit.
    """

    def __init__(
        self,
        pending: PendingSave,
        run: Run | None = None,
        on_commit: Callable[[], None] | None = None,
    ) -> None:
        self._pending, self._run = pending, run
        self._saved = None if run is None else True
        if on_commit is not None:
            self.on_complete(lambda _: on_commit())

    def result(self, timeout: float | None = None) -> bool | None:
        """Waits for the commit.

        Returns:
            True for a step, None for a checkpoint of its own, as Orbax does.

        Raises:
            SaveTimeout: it takes longer; the save continues.
            UnickptError: the save failed.
        """
        try:
            self._pending.result(timeout)
        finally:
            if self._run is not None:
                self._run.settle(self._pending)
        return self._saved

    def on_complete(self, callback: Callable[[Any], None]) -> None:
        """Calls a function with what `result` returns, after the commit; not if the save fails."""

        def ended() -> None:
            self._pending.result()  # its error is logged, and raised by whoever waits
            callback(self._saved)

        self._pending.add_done_callback(ended)


class Response(Generic[T]):
    """What a function returns that runs on a thread; its error is raised by `result`.

    Arguments:
        function: called at once.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        context = contextvars.copy_context()  # with Orbax's Context of the `with` block
        self._pool = ThreadPoolExecutor(1)
        self._future: Future[T] = self._pool.submit(context.run, function)
        self._pool.shutdown(wait=False)

    def result(self, timeout: float | None = None) -> T:
        """Waits for it.

        Raises:
            TimeoutError: it takes longer; it continues.
        """
        return self._future.result(timeout)

    def on_complete(self, callback: Callable[[T], None]) -> None:
        """Calls a function with the result; not if it fails."""

        def ended(future: Future[T]) -> None:
            if future.exception() is None:
                callback(future.result())

        self._future.add_done_callback(ended)
