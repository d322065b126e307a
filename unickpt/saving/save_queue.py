"""The saves in flight: one after another, in order."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from unickpt.errors import ForkedProcess
from unickpt.reuse.partial_save import PartialSave
from unickpt.saving.background_errors import BackgroundErrors
from unickpt.saving.options import SaveOptions
from unickpt.saving.pending import PendingSave, SaveCallbacks
from unickpt.saving.save_job import SaveJob
from unickpt.saving.staging.host_area import HostArea
from unickpt.saving.staging.kept_state import Staging
from unickpt.saving.staging.plan_cache import PlanCache, SameTree
from unickpt.storage import paths
from unickpt.threads import collection_paused
from unickpt.trees import tree

_MOST = 2  # saves in flight: one is written while the next is staged


@dataclass(frozen=True)
class SaveRequest:
    """What to save in the background.

    Arguments:
        path, tree, options, overwrite: as for `save_async`.
        metadata: returns the metadata; an error fails the save.
        owners: what the optimizers own whose steps wait for staging.
        callbacks: of this save.
        find_base: see `SaveJob`.
        partial: returns which experts need not be written; an error fails the save.
    """

    path: paths.Path
    tree: Any
    options: SaveOptions
    overwrite: bool = False
    metadata: Callable[[], Mapping[str, Any] | None] = lambda: None
    owners: set[Hashable] | None = None
    callbacks: SaveCallbacks = field(default_factory=SaveCallbacks)
    find_base: Callable[[], paths.Path | None] = lambda: None
    partial: Callable[[], PartialSave | None] = lambda: None


class SaveQueue:
    """Runs saves one after another, in order, with at most two in flight."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._beginning = threading.RLock()  # `SaveOptions.metrics` may save on another thread
        self._area, self._plans = HostArea(), PlanCache(_MOST)
        self._pending: list[PendingSave] = []
        self.errors = BackgroundErrors()

    def save(self, request: SaveRequest) -> PendingSave:
        """Starts a save, as `save_async`.

        Raises:
            Exception: also the error of an earlier save, if it was not raised before.
        """
        self._check_process(f"{request.path}: ")
        with self._beginning, ExitStack() as undo:
            undo.callback(request.callbacks.ended)
            pending = self._begin(request)
            undo.pop_all()
            pending.stage()
        return pending

    def _begin(self, request: SaveRequest) -> PendingSave:
        while len(unended := [p for p in self._pending if not p._ended.is_set()]) >= _MOST:
            unended[0]._ended.wait()
        job = SaveJob(request.path, request.overwrite, request.options, request.find_base)
        with job.failing(refused=True):  # so that the other processes are notified
            self.errors.raise_unless_refused()
        with job.failing():
            request.callbacks.begin()
            metadata, partial = request.metadata(), request.partial()
        with collection_paused():
            found = self._describe(job, request.tree, metadata, partial)
        # Early, if that costs the caller no time; and again when it is this save's turn.
        if not job.location.is_remote and job.location.exists():
            with job.failing():
                job.check_destination()
        previous = self._pending[-1] if self._pending else None
        waited_s = 0.0 if previous is None else previous._staging.wait_complete()
        with job.failing(), collection_paused():
            same = found if isinstance(found, SameTree) else None
            staging = Staging(job, self._area, request.owners, waited_s, same)
            if isinstance(found, tree.Node):
                staging.cached = self._plans.learn(found, job, staging.sources, staging.methods)
            job.keep(staging.sources, staging.working_bytes)
            pending = PendingSave(job, staging, previous, request.callbacks, self.errors)
            pending.begin()
        self._pending = [*(p for p in self._pending if not p._finished.is_set()), pending]
        return pending

    def _describe(
        self,
        job: SaveJob,
        root: Any,
        metadata: Mapping[str, Any] | None,
        partial: PartialSave | None,
    ) -> SameTree | tree.Node | tree.Leaf | None:
        """Describes a tree; returns what is known of it, else its structure."""
        if partial is not None:  # what is saved of it differs each time
            job.describe(root, metadata, partial)
            return None
        return self._plans.describe(job, root, metadata)

    def fence(self) -> None:
        """Waits until the state of all saves may change; their errors are reported elsewhere."""
        for pending in self._pending:
            pending._staging.wait_fence()

    def wait_ended(self) -> None:
        """Waits until all saves are committed, or have failed; raises nothing."""
        for pending in self._pending:
            pending._ended.wait()

    def wait(self) -> None:
        """Waits for all saves; raises none of their errors.

        Raises:
            ForkedProcess: they are saves of the parent process.
        """
        self._check_process("")
        while unfinished := self.unfinished():  # meanwhile another thread may begin one
            unfinished[0]._over.wait()

    def unfinished(self) -> list[PendingSave]:
        return [pending for pending in self._pending if not pending.done()]

    def _check_process(self, what: str) -> None:
        """Refuses to work in a forked process, where no thread of the parent exists."""
        if os.getpid() != self._process:
            raise ForkedProcess(
                f"{what}this Checkpointer belongs to the parent process; create one in a process "
                'that is started by "spawn"'
            )
