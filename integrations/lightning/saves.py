"""The saves of a Lightning job that are in flight: their paths, and operations that wait for them.

Lightning takes any file or folder of a checkpoint's name for a checkpoint, and removes the last one
as soon as `save_checkpoint` has returned. So a new checkpoint on a local disk gets its name when it
is complete, and nothing is removed before the saves that were begun before are committed.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from unickpt import SaveOptions
from unickpt.errors import CheckpointExists, SaveTimeout, StorageError, UnickptError
from unickpt.extend import (
    Failed,
    PathLike,
    SaveCallbacks,
    SaveQueue,
    SaveRequest,
    remove_checkpoint,
    resolve_path,
    send_event,
    storage_context,
    sync_folder,
)
from unickpt.types import RunEvent, SaveReport

_log = logging.getLogger("unickpt")
_PAUSE_S = 0.01
_CALLERS = 12  # between `Trainer.save_checkpoint` and the plugin, with a profiler and wrappers


@dataclass(frozen=True)
class SaveDestination:
    """Where a checkpoint is saved.

    Arguments:
        path: where it will be; see `_whole`.
        hidden: the folder next to it that has it until it is complete; None if it is saved at its
            path: in object storage, where no folder is seen before its manifest, or in place of a
            checkpoint, which stays readable until then.
    """

    path: str
    hidden: str | None

    @classmethod
    def at_path(cls, path: PathLike) -> SaveDestination:
        """The destination of a save to a path, which depends on the storage and on an existing
        file."""
        text = _whole(path)
        if "://" in text or (os.path.lexists(text) and not os.path.islink(text)):
            return cls(text, None)
        folder, name = os.path.split(text)
        with suppress(OSError):  # else the save raises the error
            os.makedirs(folder, exist_ok=True)  # at once, because Lightning may make links in it
        # With SLURM, Lightning looks for the text "hpc_ckpt_" anywhere in the names of a folder.
        return cls(text, os.path.join(folder, f".{name.replace('_', '__')}.saving"))


@dataclass
class _PendingStep:
    """A save in flight.

    Arguments:
        destination: of the checkpoint.
        rank, ranks: of this process, and how many save together.
        attempt: its name.
        to_remove: the checkpoints to remove when it is committed.
        over: whether it is committed, or has failed.
    """

    destination: SaveDestination
    rank: int
    ranks: int
    attempt: str = ""
    to_remove: list[str] = field(default_factory=list)
    over: bool = False

    def prepare(self, attempt: str) -> None:
        self.attempt = attempt

    def reveal(self, timeout_s: float, fsync: bool) -> None:
        """Gives the committed checkpoint its name, once no rank uses the hidden one.

        Raises:
            SaveTimeout: a rank has not seen the commit in time.
            StorageError: it could not be renamed.
        """
        hidden, path = self.destination.hidden, self.destination.path
        if hidden is None:
            return
        if self.rank:
            Path(self._seen(hidden, self.rank)).touch()
            return
        self._wait_seen(hidden, timeout_s)
        try:
            if os.path.islink(path):  # such as `save_last="link"` makes; its target stays
                os.unlink(path)
            os.rename(hidden, path)
            if fsync:
                sync_folder(os.path.dirname(hidden))
        except (OSError, Failed) as error:
            raise StorageError(
                f"{path}: committed, but it could not be given its name: {error}; it is at "
                f"{hidden}, from which it can be loaded and moved"
            ) from error

    def _seen(self, hidden: str, rank: int) -> str:
        return f"{hidden}.{self.attempt}-{rank}"

    def _wait_seen(self, hidden: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in range(1, self.ranks):
            seen = self._seen(hidden, rank)
            while not os.path.exists(seen):
                if time.monotonic() > deadline:
                    raise SaveTimeout(
                        f"{self.destination.path}: committed, but rank {rank} has not seen that "
                        f"within {timeout_s:g} s; it is at {hidden}, from which it can be loaded"
                    )
                time.sleep(_PAUSE_S)
            with suppress(FileNotFoundError):
                os.unlink(seen)


class Saves:
    """Begins saves, one written after the other, and removes checkpoints in their order."""

    _every: ClassVar[weakref.WeakSet[Saves]] = weakref.WeakSet()
    """The saves of all trainers of this process: one may load what another still saves."""

    def __init__(self) -> None:
        self._queue = SaveQueue()
        self._lock = threading.RLock()  # a signal handler of Lightning may save
        self._saves: list[_PendingStep] = []
        self._every.add(self)

    @classmethod
    def wait_for_all(cls) -> None:
        """Waits until nothing of this process is in flight; raises nothing."""
        for saves in tuple(cls._every):
            saves.wait()

    def destination(self, path: PathLike) -> SaveDestination:
        """Where to save; waits if a save or a removal of the same path is in flight."""
        for saves in tuple(self._every):
            if _whole(path) in saves.in_flight():
                saves.wait()
        return SaveDestination.at_path(path)

    def in_flight(self) -> set[str]:
        """The paths that are being saved or going to be removed."""
        with self._lock:
            unfinished = self._unfinished()
            return {n for save in unfinished for n in (save.destination.path, *save.to_remove)}

    def begin(
        self,
        tree: Any,
        destination: SaveDestination,
        options: SaveOptions,
        rank: int,
        ranks: int,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a save; returns when the state may change.

        Arguments:
            tree: to save.
            destination: the same on all ranks.
            options: with the processes that save together.
            rank, ranks: of this process, and how many save together.
            metadata: of the checkpoint.

        Raises:
            UnickptError: as `unickpt.save_async`; also the error of an earlier save.
        """
        save = _PendingStep(destination, rank, ranks)
        callbacks = SaveCallbacks(
            prepare=save.prepare,
            committed=lambda: self._committed(save, options),
            failed=lambda error: self._failed(save),
            ended=lambda: self._failed(save),  # if it never started
        )
        with self._lock:
            self._saves = [*self._unfinished(), save]
        location = destination.hidden or destination.path
        named = _with_path(options, destination.path)
        request = SaveRequest(
            location, tree, named, overwrite=True, metadata=lambda: metadata, callbacks=callbacks
        )
        self._queue.save(request)

    def remove(self, path: PathLike) -> None:
        """Removes a checkpoint, after the saves that are in flight; it stays if they fail."""
        with self._lock:
            unfinished = self._unfinished()
            if unfinished:
                unfinished[-1].to_remove.append(_whole(path))
                return
        remove(path)

    def wait(self) -> None:
        """Waits until nothing is in flight; raises nothing."""
        self._queue.wait()

    def close(self) -> None:
        """Waits until nothing is in flight.

        Raises:
            Exception: the error of a save or removal that was not raised before.
        """
        self.wait()
        self._queue.errors.raise_first()

    def _unfinished(self) -> list[_PendingStep]:
        return [save for save in self._saves if not save.over]

    # --- on the thread that saves -------------------------------------------------------------

    def _committed(self, save: _PendingStep, options: SaveOptions) -> None:
        try:
            save.reveal(options.timeout_s, options.fsync)
        except (OSError, UnickptError) as error:
            self._queue.errors.add(f"giving {save.destination.path} its name", error)
            self._failed(save)
            return
        for path in self._close(save):
            try:
                remove(path)
            except UnickptError as error:
                self._queue.errors.add(f"the removal of {path}", error)

    def _failed(self, save: _PendingStep) -> None:
        for path in self._close(save):
            _log.warning("%s is kept: the save after it failed", path)

    def _close(self, save: _PendingStep) -> list[str]:
        with self._lock:
            save.over, paths, save.to_remove = True, save.to_remove, []
        return paths


def must_wait(path: str) -> bool:
    """Whether Lightning would miss a checkpoint that is still being saved when it continues.

    So it would outside of training, since only the end of training waits for saves; and before
    SLURM restarts the job. The same holds with a `ModelCheckpoint` that makes links at once, or
    that checks which of its fixed names are taken. Plugins do not get the `Trainer`: it is found as
    their caller.
    """
    name = os.path.basename(path)
    if name.startswith("hpc_ckpt_"):
        return True
    trainer = _calling_trainer()
    if trainer is None:
        return False
    return trainer.state.status != "running" or any(
        callback.save_last == "link" or _counts_versions(callback, name)
        for callback in trainer.checkpoint_callbacks
        if hasattr(callback, "save_last")
    )


def check_last_can_be_saved(loaded: Mapping[str, Any]) -> None:
    """Checks, before a job resumes, that it can save where `save_last` will.

    Lightning reuses the name of the resumed run's last checkpoint, which may be a file that its own
    plugin wrote. Files are never overwritten, so the first save would end the job.

    Arguments:
        loaded: the checkpoint that the job resumes from.

    Raises:
        CheckpointExists: names the file.
    """
    trainer = _calling_trainer()
    if trainer is None or trainer.state.fn != "fit":
        return
    states = loaded.get("callbacks", {}).values()
    last = {s["last_model_path"]: s["dirpath"] for s in states if s.keys() >= _LAST}
    for callback in trainer.checkpoint_callbacks:
        folder = getattr(callback, "dirpath", None)
        if not getattr(callback, "save_last", None) or folder is None:
            continue
        for path, folder_then in last.items():
            is_resumed = os.path.realpath(folder) == os.path.realpath(folder_then)
            if is_resumed and os.path.isfile(path) and not os.path.islink(path):
                raise CheckpointExists(
                    f"{path} is a file that Lightning's own plugin wrote, and "
                    "ModelCheckpoint(save_last=True) would save there; files are never "
                    f"overwritten. Before training, move it, such as to {path}.old, and resume "
                    "from there, or give the ModelCheckpoint another dirpath"
                )


_LAST = frozenset(("last_model_path", "dirpath"))


def _calling_trainer() -> Any:
    frame: Any = sys._getframe(1)
    for _ in range(_CALLERS):
        caller = frame.f_locals.get("self")
        if hasattr(caller, "checkpoint_callbacks") and hasattr(caller, "state"):
            return caller
        frame = frame.f_back
        if frame is None:
            break
    return None


def _counts_versions(callback: Any, name: str) -> bool:
    """Whether a checkpoint is one of several that a callback keeps and would call the same."""
    if callback.filename is None or callback.monitor is None or callback.save_top_k in (0, 1):
        return False
    return "{" not in callback.filename and name.startswith(callback.filename)


def remove(path: PathLike) -> None:
    """Removes a checkpoint, or a file of Lightning's own; of a symbolic link only the link.

    Raises:
        UnickptError: it could not be removed.
    """
    text = os.fspath(path)
    if "://" not in text and (os.path.islink(text) or os.path.isfile(text)):
        try:
            os.unlink(text)
        except OSError as error:
            raise StorageError(f"{text}: it could not be removed: {error}") from error
        return
    location = resolve_path(path)
    if location.exists():
        remove_checkpoint(location, storage_context())


def _whole(path: PathLike) -> str:
    """The canonical path or URL of a checkpoint, independent of the working folder and of links."""
    text = os.fspath(path)
    if "://" in text:
        return text
    folder, name = os.path.split(os.path.abspath(text))
    return os.path.join(os.path.realpath(folder), name)  # a link in its own place is replaced


def _with_path(options: SaveOptions, path: str) -> SaveOptions:
    """Options whose `metrics` gets the final path of the checkpoint, not the hidden one."""
    metrics = options.metrics
    return options if metrics is None else replace(options, metrics=_FinalPath(metrics, path))


class _FinalPath:
    """Calls a receiver of metrics with the final path of a checkpoint."""

    def __init__(self, metrics: Callable[[SaveReport], None], path: str) -> None:
        self._metrics, self._path = metrics, path

    def __call__(self, report: SaveReport) -> None:
        self._metrics(replace(report, url=str(resolve_path(self._path))))

    def run_event(self, event: RunEvent) -> None:
        send_event(self._metrics, replace(event, url=str(resolve_path(self._path))))
