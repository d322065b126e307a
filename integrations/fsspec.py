"""A second tier in any storage that fsspec reaches: Azure, HDFS, the Hugging Face Hub, ...

    from unickpt.integrations.fsspec import MirroredCheckpointer
    MirroredCheckpointer("runs/llama", "abfs://container/llama", keep_last=2, mirror_keep_last=9)

TensorStore cannot read and write there, so steps are committed in local files first, and copied in
the background. docs/integrations/fsspec.md has the promises.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import unickpt
from unickpt import Checkpointer, Retention, errors
from unickpt.extend import (
    MANIFEST,
    PathLike,
    Pool,
    SerialExecutor,
    StepFolder,
    Version,
    barrier,
    job_group,
    on_process_0,
    quoted,
    refuse_unknown,
    resolve_path,
    storage_context,
    sync_folder,
    take_retention,
)
from unickpt.types import PendingSave

try:
    import fsspec
except ImportError as error:
    raise errors.MissingPackage(
        "a second tier by fsspec needs fsspec: pip install 'unickpt[fsspec]'"
    ) from error

__all__ = ["MirroredCheckpointer"]

_log = logging.getLogger("unickpt")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_MESSAGES = ("records", "notes", "borrowers")
"""Folders of an attempt that only its save needs."""
_BLOCK = 8 << 20
_AT_ONCE = 8
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class MirroredCheckpointer(Checkpointer):
    """A `unickpt.Checkpointer` whose steps are also copied to another storage, by fsspec.

    Process 0 copies each step after its commit, in the background. A copy is read back and compared
    before its manifest appears, so a step is there whole or not at all. A step is not removed from
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
        arguments: as for `Checkpointer`; except `after`, which `drop_later_steps` replaces,
            `local`, which `root` is here, and `experts`, whose steps need each other.

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
        root: PathLike,
        mirror: str,
        *,
        mirror_keep_last: int | None = None,
        mirror_keep_every: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        for name in ("after", "local", "experts", "partial"):
            if arguments.get(name) is not None:
                raise ValueError(f"{name}= is not supported with a mirror")
        if not resolve_path(root).is_local:
            raise ValueError(f"root={str(root)!r} must be a local path; its steps are copied")
        self._mirror = StepsFolder(mirror, storage_options or {})
        if self._mirror.is_at(Path(resolve_path(root).path)):
            raise ValueError(f"mirror={mirror!r} is the folder of root=; give another one")
        self._root_folder = StepFolder(root)
        self._mirror_retention = Retention(mirror_keep_last, mirror_keep_every)
        self._settled: dict[int, Version] = {}
        """The versions of steps that are copied, or that the mirror need not have."""
        retention = take_retention(arguments)
        if not retention.keeps_all:
            retention = replace(retention, keep=self._keep(retention.keep))
        super().__init__(root, keep=retention, **arguments)
        failed = partial(self._queue.errors.add, f"copying steps to {self._mirror}")
        self._copies = SerialExecutor("unickpt-mirror", failed)

    def save(self, step: int, tree: Any, **arguments: Any) -> PendingSave:
        """As `Checkpointer.save`; the step is copied after its commit."""
        waits = arguments.pop("wait", False)
        pending = super().save(step, tree, **arguments)
        if job_group(self._options.group, self._options.timeout_s).index == 0:
            # Now, so that a wait for the save includes its copy.
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
        group = job_group(self._options.group, self._options.timeout_s)
        downloaded_steps: list[int] = []
        root = self._root_folder

        def download() -> None:
            mirror_steps = self._mirror.steps()
            target = max(mirror_steps, default=-1) if step is None else step
            if step is not None and step not in mirror_steps:
                have = ", ".join(map(str, mirror_steps[-10:])) or "none"
                raise errors.CheckpointNotFound(
                    f"step {step} is not in {self._mirror}; it has: {have}"
                )
            local_steps = root.committed()
            if (
                target >= 0
                and target not in local_steps
                and (step is not None or target > max(local_steps, default=-1))
            ):
                self._mirror.get(target, Path(root.path(target)))
                downloaded_steps.append(target)

        on_process_0(group, root.location, f"download a step from {self._mirror}", download)
        restored_step = downloaded_steps[0] if downloaded_steps else -1
        if group.count > 1:
            restored_step = group.agree(restored_step + 1) - 1
        return restored_step if restored_step >= 0 else None

    def drop_later_steps(self, step: int | None = None) -> list[int]:
        """As `Checkpointer.drop_later_steps`; in the mirror, too."""
        removed = super().drop_later_steps(step)
        last_step = self.loaded_step if step is None else step
        assert last_step is not None
        self._remove_mirrored(lambda mirror_step: mirror_step > last_step)
        return removed

    def delete(self, step: int) -> None:
        """As `Checkpointer.delete`; in the mirror, too."""
        super().delete(step)
        self._remove_mirrored(lambda mirror_step: mirror_step == step)

    def wait(self) -> None:
        """As `Checkpointer.wait`, and until all steps are copied."""
        self._drain()
        super().wait()

    def _drain(self) -> None:
        super()._drain()
        self._copies.wait()

    # --- on process 0 --------------------------------------------------------------------------

    def _copy_after(self, pending: PendingSave) -> None:
        """Copies steps that the mirror lacks, then removes steps there that no rule keeps."""
        pending.wait_ended()
        root, mirror_steps = self._root_folder, self._mirror.steps()
        local_steps = root.committed()
        if not local_steps:
            return
        newest = local_steps[-1]
        if later := [step for step in mirror_steps if step > newest]:
            raise errors.LaterStepsExist(
                f"{self._mirror} has later steps than {newest}: {', '.join(map(str, later))}; "
                f"call drop_later_steps({newest}) to remove them, or restore() before saving"
            )
        spare = self._mirror_retention.expendable(
            {step: {} for step in {*local_steps, *mirror_steps}}
        )
        failures: list[Exception] = []
        for step in local_steps:
            version = root.version(step)  # it may be replaced while it is copied
            if version is None or self._settled.get(step) == version:
                continue
            try:
                if step in spare or self._mirror.put(step, root):
                    self._settled[step] = version
            except errors.UnickptError as error:  # others may succeed
                failures.append(error)
        if failures:
            raise failures[0]
        for step in set(spare) & set(mirror_steps):
            try:
                self._mirror.remove(step)
            except errors.UnsupportedFormat as error:
                _log.warning("cleaning up: %s", error)

    def _keep(self, keep: Callable[[int], bool] | None) -> Callable[[int], bool]:
        def stays(step: int) -> bool:
            version = self._root_folder.version(step)
            return version != self._settled.get(step) or (keep is not None and keep(step))

        return stays

    def _remove_mirrored(self, which: Callable[[int], bool]) -> None:
        def remove() -> None:
            for step in sorted(filter(which, self._mirror.steps()), reverse=True):
                self._mirror.remove(step)

        group = job_group(self._options.group, self._options.timeout_s)
        on_process_0(group, self._root_folder.location, f"remove steps in {self._mirror}", remove)
        barrier(group)


class StepsFolder:
    """Steps in a folder of fsspec: copied there, back, and removed, each whole or not at all.

    A step is there if its manifest is. It is written last, under another name first, because not
    every storage writes a file at once; and removed first.

    Arguments:
        url: of fsspec.
        options: for its file system.

    Raises:
        MissingPackage: fsspec's package for this storage is not installed.
        ValueError: the URL or the options are invalid.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        try:
            self._fs, path = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise errors.MissingPackage(f"{url}: {error}") from error
        self._path = path.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def is_at(self, folder: Path) -> bool:
        """Whether this is a local folder."""
        names = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        return "file" in names and Path(self._path).resolve() == folder.resolve()

    def steps(self) -> list[int]:
        """The steps that are there, whole; ascending.

        Raises:
            StorageError: the storage failed.
        """
        with self._doing("list"):
            self._fs.invalidate_cache()
            try:
                listed = self._fs.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            names = [entry.rstrip("/").rpartition("/")[2] for entry in listed]
            steps = sorted(int(m[1]) for m in map(_STEP.fullmatch, names) if m)
            return [step for step in steps if self._fs.isfile(f"{self._at(step)}/{MANIFEST}")]

    def put(self, step: int, source: StepFolder) -> bool:
        """Copies a step of local files, unless it is there.

        Arguments:
            step: its number.
            source: the folder of local steps.

        Returns:
            Whether it is there now; false if it was removed or replaced meanwhile.

        Raises:
            CheckpointCorrupt: it is damaged, here or after it was copied; it is not there.
            StorageError: a storage failed; it is not there.
        """
        version = source.version(step)
        if version is None:
            return False
        if not version.attempt:
            where = source.path(step)
            raise errors.CheckpointCorrupt(f"{where}: its manifest is damaged; not copied")
        with self._doing(f"copy step {step}"):
            if self._manifest(step) == version.manifest:
                return True
            self.remove(step)  # another version, or the remains of a killed job
            try:
                files = self._send(step, Path(source.path(step)), version.attempt)
                if source.version(step) != version:
                    raise FileNotFoundError("the step was replaced")
                self._publish(step, version.manifest, files)
            except BaseException as error:
                with suppress(Exception):
                    self.remove(step)
                if isinstance(error, Exception) and source.version(step) != version:
                    return False
                raise
        _log.info("copied %s to %s", source.path(step), self.url)
        return True

    def get(self, step: int, destination: Path) -> None:
        """Copies a step into a local folder, which holds no checkpoint before.

        Raises:
            CheckpointCorrupt: it is damaged; nothing remains.
            StorageError: a storage failed; nothing remains.
        """
        part = destination.with_name(f".{destination.name}.unickpt-download")
        if part.is_symlink():
            part.unlink()
        shutil.rmtree(part, ignore_errors=True)
        try:
            with self._doing(f"download step {step}"):
                manifest = self._manifest(step)
                if manifest is None:
                    raise FileNotFoundError(f"{self._at(step)}/{MANIFEST}")
                self._fetch(step, part)
                part.joinpath(MANIFEST).write_bytes(manifest)
                report = unickpt.verify(part)
                if not report.ok:
                    raise errors.CheckpointCorrupt(
                        f"{self.url}: step {step} is damaged: {report.damage[0]}; restore an "
                        "earlier one: restore(step=...)"
                    )
                for folder, _, names in os.walk(part):
                    for name in (*names, "."):
                        sync_folder(os.path.join(folder, name))  # and so are files
                _appear(part, destination)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Removes a step, or its remains; first its manifest.

        Raises:
            UnsupportedFormat: it needs features that this unickpt does not know; nothing was
                removed.
            StorageError: the storage failed.
        """
        folder = self._at(step)
        with self._doing(f"remove step {step}"):
            self._fs.invalidate_cache()
            self._refuse_unknown(step)
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{folder}/{MANIFEST}")
            self._fs.invalidate_cache()
            if self._fs.exists(folder):
                with suppress(FileNotFoundError):
                    self._fs.rm(folder, recursive=True)

    # --- helpers -------------------------------------------------------------------------------

    def _at(self, step: int) -> str:
        return f"{self._path}/step_{step}"

    def _manifest(self, step: int) -> bytes | None:
        try:
            return bytes(self._fs.cat_file(f"{self._at(step)}/{MANIFEST}"))
        except FileNotFoundError:
            return None

    def _send(self, step: int, source: Path, attempt: str) -> dict[str, int]:
        """Copies the files of an attempt, and reads them back; returns their sizes by name."""
        if not unickpt.verify(source).ok:
            raise errors.CheckpointCorrupt(f"{source} is damaged; not copied to {self.url}")
        top = source / "processes" / attempt
        local = (path for path in top.rglob("*") if path.relative_to(top).parts[0] not in _MESSAGES)
        names = {path.relative_to(source).as_posix(): path for path in local if path.is_file()}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            self._fs.makedirs(f"{self._at(step)}/{folder}", exist_ok=True)

        def send(name: str) -> None:
            remote_path = f"{self._at(step)}/{name}"
            self._fs.put_file(str(names[name]), remote_path)
            self._compare(names[name], remote_path)

        with Pool(_AT_ONCE, "unickpt-mirror") as pool:
            list(pool.map(send, names))
        return {name: path.stat().st_size for name, path in names.items()}

    def _compare(self, local: Path, remote_path: str) -> None:
        with open(local, "rb") as ours, self._fs.open(remote_path, "rb") as theirs:
            while True:
                block = ours.read(_BLOCK)
                if theirs.read(_BLOCK) != block:
                    what = f"{remote_path} differs from {local} when it is read back"
                    raise errors.StorageError(what)
                if not block:
                    return

    def _publish(self, step: int, manifest: bytes, files: Mapping[str, int]) -> None:
        """Makes the step appear, then checks that it is still complete."""
        folder = self._at(step)
        self._fs.pipe_file(f"{folder}/{MANIFEST}.partial", manifest)
        if bytes(self._fs.cat_file(f"{folder}/{MANIFEST}.partial")) != manifest:
            raise errors.StorageError(f"{folder}/{MANIFEST} differs when it is read back")
        self._fs.mv(f"{folder}/{MANIFEST}.partial", f"{folder}/{MANIFEST}")
        self._fs.invalidate_cache()
        if self._manifest(step) != manifest or self._sizes(step) != files:
            raise errors.StorageError(f"{folder}: another job changed it during the copy")

    def _sizes(self, step: int) -> dict[str, int]:
        """The sizes of a step's files except the manifest, by name."""
        files = self._fs.find(f"{self._at(step)}/processes", detail=True)
        start = len(self._at(step)) + 1
        return {name[start:]: int(facts["size"]) for name, facts in files.items()}

    def _refuse_unknown(self, step: int) -> None:
        manifest = self._manifest(step)
        if manifest is None:
            return
        with tempfile.TemporaryDirectory() as folder, suppress(errors.CheckpointCorrupt):
            self._fetch(step, Path(folder), lambda name: name.split("/")[2:3] == ["root"])
            Path(folder, MANIFEST).write_bytes(manifest)
            try:
                refuse_unknown(resolve_path(folder), storage_context())
            except errors.UnsupportedFormat as error:
                raise errors.UnsupportedFormat(str(error).replace(folder, self._at(step))) from None

    def _fetch(
        self, step: int, destination: Path, which: Callable[[str], bool] = lambda name: True
    ) -> None:
        names = sorted(filter(which, self._sizes(step)))
        for name in names:
            if not all(_NAME.fullmatch(n) and n.strip(".") for n in name.split("/")):
                raise errors.CheckpointCorrupt(f"{self.url}: step {step} has a file {quoted(name)}")
            destination.joinpath(name).parent.mkdir(parents=True, exist_ok=True)

        def fetch(name: str) -> None:
            self._fs.get_file(f"{self._at(step)}/{name}", str(destination / name))

        with Pool(_AT_ONCE, "unickpt-mirror") as pool:
            list(pool.map(fetch, names))

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except errors.UnickptError:
            raise
        except Exception as error:  # each file system has its own
            reason = f"{type(error).__name__}: {error}"
            raise errors.StorageError(f"{self.url}: cannot {what}: {reason}") from error


def _appear(part: Path, destination: Path) -> None:
    """Puts a step into its place, where a killed save or removal may have left attempts."""
    if destination.is_symlink() or not destination.is_dir():
        os.rename(part, destination)
        return
    folder = destination / "processes"
    folder.mkdir(exist_ok=True)
    for attempt in (part / "processes").iterdir():
        shutil.rmtree(folder / attempt.name, ignore_errors=True)
        os.rename(attempt, folder / attempt.name)
    sync_folder(str(folder))
    sync_folder(str(destination))
    os.rename(part / MANIFEST, destination / MANIFEST)
    sync_folder(str(destination))
