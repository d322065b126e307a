"""A second tier in any storage that fsspec reaches: Azure, HDFS, the Hugging Face Hub, ...

    from unickpt.integrations.fsspec import MirroredCheckpointer
    MirroredCheckpointer("runs/llama", "abfs://container/llama", keep_last=2, mirror_keep_last=9)

TensorStore cannot read and write there, so steps are committed in local files first, and copied in
the background. docs/integrations/fsspec.md has the promises.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from unickpt.commit.version import Version
from unickpt.errors import CheckpointNotFound, LaterStepsExist, UnickptError
from unickpt.integrations.fsspec.folder import StepsFolder
from unickpt.runs.checkpointer import Checkpointer
from unickpt.runs.removal import barrier, on_process_0
from unickpt.runs.retention import Retention
from unickpt.saving.background import PendingSave
from unickpt.storage import paths
from unickpt.threads import SerialExecutor

__all__ = ["MirroredCheckpointer"]


class MirroredCheckpointer(Checkpointer):
    """A `unickpt.Checkpointer` whose steps are also copied to another storage, by fsspec.

    Process 0 copies each step after its commit, in the background. A copy is read back and compared
    before its manifest appears, so a step is there whole, or it is not. A step is not removed from
    `root` before it was copied. Steps that an earlier job did not copy are copied after the first
    save. Errors of a copy are raised by the next `save`, `wait` or `close`, else the program exits
    with status 1; the copy is tried again after the next save.

    One job at a time may use a mirror.

    Arguments:
        root: a local path, for the steps; all processes share it.
        mirror: a URL of fsspec, such as "abfs://container/run", "hdfs://host/run" or
            "hf://datasets/me/run".
        mirror_keep_last, mirror_keep_every: which steps remain in the mirror; by default all. As
            for `Checkpointer`, the newest always does.
        storage_options: for fsspec's file system, such as `{"account_name": ...}`.
        arguments: as for `Checkpointer`; except `after`, instead of which there is
            `drop_later_steps`, `local`, which `root` is here, and `experts`, whose steps need each
            other.

    Raises:
        ValueError: the arguments are invalid.
        MissingPackage: fsspec, or its package for this storage, is not installed.

    Example:
        >>> import numpy as np, tempfile
        >>> state = {"w": np.zeros(3)}
        >>> with MirroredCheckpointer(tempfile.mkdtemp(), "memory://mirrored/run") as ckpt:
        ...     if ckpt.restore() is not None or ckpt.latest() is not None:
        ...         state = ckpt.load(state)
        ...     _ = ckpt.save(10, state)
        >>> with MirroredCheckpointer(tempfile.mkdtemp(), "memory://mirrored/run") as ckpt:
        ...     ckpt.restore()  # on another machine
        10
    """

    def __init__(
        self,
        root: paths.PathLike,
        mirror: str,
        *,
        mirror_keep_last: int | None = None,
        mirror_keep_every: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        for name in ("after", "local", "experts"):
            if arguments.get(name) is not None:
                raise ValueError(f"{name}= is not supported with a mirror")
        if not paths.resolve(root).is_local:
            raise ValueError(f"root={str(root)!r} must be a local path; its steps are copied")
        self._there = StepsFolder(mirror, storage_options or {})
        if self._there.is_at(Path(paths.resolve(root).spec["path"])):
            raise ValueError(f"mirror={mirror!r} is the folder of root=; give another one")
        self._there_keeps = Retention(mirror_keep_last, mirror_keep_every)
        self._settled: dict[int, Version] = {}
        """The versions of steps that are copied, or that the mirror need not have."""
        here = Retention.of(arguments.pop("keep_last", None), arguments.pop("keep", None))
        if not here.keeps_all:
            here = replace(here, keep=self._keep(here.keep))
        super().__init__(root, keep=here, **arguments)
        failed = partial(self._queue.errors.add, f"copying steps to {self._there}")
        self._copies = SerialExecutor("unickpt-mirror", failed)

    def save(self, step: int, tree: Any, **arguments: Any) -> PendingSave:
        """As `Checkpointer.save`; the step is copied after its commit."""
        waits = arguments.pop("wait", False)
        pending = super().save(step, tree, **arguments)
        if self._group().index == 0:
            # Now, so that whoever waits for the save waits for its copy.
            self._copies.add(partial(self._copy_after, pending))
        if waits:
            pending.result()
        return pending

    def restore(self, step: int | None = None) -> int | None:
        """Downloads a step from the mirror, if `root` lacks it; `load` loads it then.

        All processes of a job call this; process 0 downloads, and the others wait for it. The step
        is checked against its digests before it appears in `root`.

        Arguments:
            step: its number; by default the newest in the mirror, if that is newer than all in
                `root`.

        Returns:
            The step that was downloaded, on all processes; None if nothing was.

        Raises:
            CheckpointNotFound: the mirror does not have the step.
            CheckpointCorrupt: it is damaged there; nothing appeared in `root`.
            StorageError: a storage failed.
        """
        group = self._group()
        found: list[int] = []
        root = self._tiers.root

        def download() -> None:
            there = self._there.steps()
            wanted = max(there, default=-1) if step is None else step
            if step is not None and step not in there:
                have = ", ".join(map(str, there[-10:])) or "none"
                raise CheckpointNotFound(f"step {step} is not in {self._there}; it has: {have}")
            here = root.committed()
            if (
                wanted >= 0
                and wanted not in here
                and (step is not None or wanted > max(here, default=-1))
            ):
                self._there.get(wanted, Path(root.path(wanted)))
                found.append(wanted)

        on_process_0(group, root.location, f"download a step from {self._there}", download)
        got = found[0] if found else -1
        if group.count > 1:
            got = group.agree(got + 1) - 1
        return got if got >= 0 else None

    def drop_later_steps(self, step: int | None = None) -> list[int]:
        """As `Checkpointer.drop_later_steps`; in the mirror, too."""
        removed = super().drop_later_steps(step)
        kept = self.loaded_step if step is None else step
        assert kept is not None
        self._remove_there(lambda there: there > kept)
        return removed

    def delete(self, step: int) -> None:
        """As `Checkpointer.delete`; in the mirror, too."""
        super().delete(step)
        self._remove_there(lambda there: there == step)

    def wait(self) -> None:
        """As `Checkpointer.wait`, and until all steps are copied."""
        self._drain()
        super().wait()

    def _drain(self) -> None:
        super()._drain()
        self._copies.wait()

    # --- on process 0 --------------------------------------------------------------------------

    def _copy_after(self, pending: PendingSave) -> None:
        pending._ended.wait()
        self._copy()

    def _copy(self) -> None:
        """Copies what the mirror lacks, then removes there what no rule keeps."""
        root, there = self._tiers.root, self._there.steps()
        here = root.committed()
        if not here:
            return
        if later := [step for step in there if step > here[-1]]:
            raise LaterStepsExist(
                f"{self._there} has later steps than {here[-1]}: {', '.join(map(str, later))}; "
                f"call drop_later_steps({here[-1]}) to remove them, or restore() before saving"
            )
        spare = self._there_keeps.expendable({step: {} for step in {*here, *there}})
        failures: list[Exception] = []
        for step in here:
            found = root.version(step)  # it may be replaced while it is copied
            if found is None or self._settled.get(step) == found:
                continue
            try:
                if step in spare or self._there.put(step, root):
                    self._settled[step] = found
            except UnickptError as error:  # others may succeed
                failures.append(error)
        if failures:
            raise failures[0]
        for step in set(spare) & set(there):
            self._there.remove(step)

    def _keep(self, keep: Callable[[int], bool] | None) -> Callable[[int], bool]:
        def stays(step: int) -> bool:
            found = self._tiers.root.version(step)
            return found != self._settled.get(step) or (keep is not None and keep(step))

        return stays

    def _remove_there(self, which: Callable[[int], bool]) -> None:
        def remove() -> None:
            for step in sorted(filter(which, self._there.steps()), reverse=True):
                self._there.remove(step)

        group = self._group()
        on_process_0(group, self._tiers.root.location, f"remove steps in {self._there}", remove)
        barrier(group)
