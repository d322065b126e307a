"""Steps in a folder of fsspec: copied there, back, and removed, each whole or not at all.

A step is there if its manifest is. It is written last, under another name first, because not every
storage writes a file at once; and removed first.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from unickpt.errors import (
    CheckpointCorrupt,
    MissingPackage,
    StorageError,
    UnickptError,
)
from unickpt.quoting import quoted
from unickpt.runs.attempt_folders import FOLDER
from unickpt.runs.step_folder import StepFolder
from unickpt.storage.local_folders import sync_folder
from unickpt.storage.ocdbt import MANIFEST
from unickpt.threads import Pool
from unickpt.tools.verification import verify

try:
    import fsspec
except ImportError as error:
    raise MissingPackage(
        "a second tier by fsspec needs fsspec: pip install 'unickpt[fsspec]'"
    ) from error

_log = logging.getLogger("unickpt")
_STEP = re.compile(r"step_(0|[1-9][0-9]{0,17})")
_MESSAGES = ("records", "notes", "borrowers")
"""Folders of an attempt that only its save needs."""
_BLOCK = 8 << 20
_AT_ONCE = 8
_NAME = re.compile(r"[A-Za-z0-9._-]+")


class StepsFolder:
    """The steps in a folder of fsspec.

    Arguments:
        url: as fsspec has them.
        options: for its file system.

    Raises:
        MissingPackage: what fsspec needs for this storage is not installed.
        ValueError: the URL or the options are invalid.
    """

    def __init__(self, url: str, options: Mapping[str, Any]) -> None:
        self.url = url
        try:
            self._fs, path = fsspec.core.url_to_fs(url, **options)
        except ImportError as error:
            raise MissingPackage(f"{url}: {error}") from error
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
            found = [int(m[1]) for m in map(_STEP.fullmatch, names) if m]
            return sorted(step for step in found if self._fs.isfile(f"{self._at(step)}/{MANIFEST}"))

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
        found = source.version(step)
        if found is None:
            return False
        if not found.attempt:
            raise CheckpointCorrupt(f"{source.path(step)}: its manifest is damaged; not copied")
        with self._doing(f"copy step {step}"):
            if self._manifest(step) == found.manifest:
                return True
            self.remove(step)  # another version, or what a job left that was killed
            try:
                files = self._send(step, Path(source.path(step)), found.attempt)
                if source.version(step) != found:
                    raise FileNotFoundError("the step was replaced")
                self._publish(step, found.manifest, files)
            except BaseException as error:
                with suppress(Exception):
                    self.remove(step)
                if isinstance(error, Exception) and source.version(step) != found:
                    return False
                raise
        _log.info("copied %s to %s", source.path(step), self.url)
        return True

    def get(self, step: int, to: Path) -> None:
        """Copies a step into a local folder, which holds no checkpoint before.

        Raises:
            CheckpointCorrupt: it is damaged; nothing remains.
            StorageError: a storage failed; nothing remains.
        """
        part = to.with_name(f".{to.name}.unickpt-download")
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
                report = verify(part)
                if not report.ok:
                    raise CheckpointCorrupt(
                        f"{self.url}: step {step} is damaged: {report.damage[0]}; restore an "
                        "earlier one: restore(step=...)"
                    )
                _sync(part)
                _appear(part, to)
        finally:
            shutil.rmtree(part, ignore_errors=True)

    def remove(self, step: int) -> None:
        """Removes a step, or what there is of it; first its manifest.

        Raises:
            StorageError: the storage failed.
        """
        at = self._at(step)
        with self._doing(f"remove step {step}"):
            self._fs.invalidate_cache()
            with suppress(FileNotFoundError):
                self._fs.rm_file(f"{at}/{MANIFEST}")
            self._fs.invalidate_cache()
            if self._fs.exists(at):
                with suppress(FileNotFoundError):
                    self._fs.rm(at, recursive=True)

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
        if not verify(source).ok:
            raise CheckpointCorrupt(f"{source} is damaged; not copied to {self.url}")
        top = source / "processes" / attempt
        local = [p for p in top.rglob("*") if p.is_file() and not _is_message(p.relative_to(top))]
        names = {path.relative_to(source).as_posix(): path for path in local}
        for folder in sorted({name.rpartition("/")[0] for name in names}):
            self._fs.makedirs(f"{self._at(step)}/{folder}", exist_ok=True)

        def send(name: str) -> None:
            there = f"{self._at(step)}/{name}"
            self._fs.put_file(str(names[name]), there)
            self._compare(names[name], there)

        with Pool(_AT_ONCE, thread_name_prefix="unickpt-mirror") as pool:
            list(pool.map(send, names))
        return {name: path.stat().st_size for name, path in names.items()}

    def _compare(self, local: Path, there: str) -> None:
        with open(local, "rb") as ours, self._fs.open(there, "rb") as theirs:
            while True:
                block = ours.read(_BLOCK)
                if theirs.read(_BLOCK) != block:
                    raise StorageError(f"{there} differs from {local} when it is read back")
                if not block:
                    return

    def _publish(self, step: int, manifest: bytes, files: Mapping[str, int]) -> None:
        """Makes the step appear, then looks whether it is still all there."""
        at = self._at(step)
        self._fs.pipe_file(f"{at}/{MANIFEST}.partial", manifest)
        if bytes(self._fs.cat_file(f"{at}/{MANIFEST}.partial")) != manifest:
            raise StorageError(f"{at}/{MANIFEST} differs when it is read back")
        self._fs.mv(f"{at}/{MANIFEST}.partial", f"{at}/{MANIFEST}")
        self._fs.invalidate_cache()
        if self._manifest(step) != manifest or self._sizes(step) != files:
            raise StorageError(f"{at}: another job changed it during the copy")

    def _sizes(self, step: int) -> dict[str, int]:
        """The sizes of a step's files but the manifest, by name."""
        found = self._fs.find(f"{self._at(step)}/processes", detail=True)
        start = len(self._at(step)) + 1
        return {name[start:]: int(told["size"]) for name, told in found.items()}

    def _fetch(self, step: int, to: Path) -> None:
        names = sorted(self._sizes(step))
        for name in names:
            if not all(_NAME.fullmatch(n) and n.strip(".") for n in name.split("/")):
                raise CheckpointCorrupt(f"{self.url}: step {step} has a file {quoted(name)}")
            to.joinpath(name).parent.mkdir(parents=True, exist_ok=True)

        def fetch(name: str) -> None:
            self._fs.get_file(f"{self._at(step)}/{name}", str(to / name))

        with Pool(_AT_ONCE, thread_name_prefix="unickpt-mirror") as pool:
            list(pool.map(fetch, names))

    @contextmanager
    def _doing(self, what: str) -> Iterator[None]:
        try:
            yield
        except UnickptError:
            raise
        except Exception as error:  # each file system has its own
            told = f"{type(error).__name__}: {error}"
            raise StorageError(f"{self.url}: cannot {what}: {told}") from error


def _is_message(name: Path) -> bool:
    return name.parts[0] in _MESSAGES


def _appear(part: Path, to: Path) -> None:
    """Puts a step into its place, in which a killed save or removal may have left attempts."""
    if to.is_symlink() or not to.is_dir():
        os.rename(part, to)
        return
    folder = to / FOLDER
    folder.mkdir(exist_ok=True)
    for attempt in (part / FOLDER).iterdir():
        shutil.rmtree(folder / attempt.name, ignore_errors=True)
        os.rename(attempt, folder / attempt.name)
    sync_folder(str(folder))
    sync_folder(str(to))
    os.rename(part / MANIFEST, to / MANIFEST)
    sync_folder(str(to))


def _sync(folder: Path) -> None:
    """Makes all files of a folder durable."""
    for at, _, names in os.walk(folder):
        for name in (*names, "."):
            handle = os.open(os.path.join(at, name), os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
