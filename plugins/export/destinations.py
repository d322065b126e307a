"""Destinations of an export: local folders, where several processes write one file, and object
storage, which takes whole files.

A file that readers could take for a whole checkpoint appears atomically, or last.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cached_property

import tensorstore as ts

from unickpt.errors import (
    CheckpointCorrupt,
    CheckpointExists,
    CheckpointNotFound,
    InvalidPath,
    StorageError,
    UnsupportedFormat,
)
from unickpt.extend import (
    MANIFEST,
    Lease,
    LeaseUse,
    Location,
    PathLike,
    PlannedFile,
    closing_file,
    local_folders,
    open_reader,
    reading,
    refuse_checkpoint,
    resolve_path,
    restore_replaced,
    storage_context,
    system_calls,
)

_MOST_OBJECT = 5 << 30  # of one request to S3
# An object is in memory up to three times: its parts, these in one, and TensorStore's copy.
# That may take half of the budget.
_SHARE_OF_OBJECT = 6
_LOCK_S = 60.0  # for operations that take moments
_MOST_NAME_BYTES = 255  # of a file or folder, on all common file systems
_LEASE = ".exporting"
_WAIT = "wait for it, or choose another path. One that was killed is noticed within a minute"
Write = Callable[[int, memoryview], None]
"""Writes bytes at an offset of a file."""


class ExportDestination(ABC):
    """A place for the files of one attempt to export.

    Arguments:
        folder: of the files.
        file: the name of the only file, if the destination is a file in an existing folder.
        attempt: its name, the same on all processes.
        fsync: whether files must be durable.
    """

    whole_files: bool
    """Whether a file is written at once, by one process."""

    def __init__(self, folder: Location, file: str | None, attempt: str, fsync: bool) -> None:
        self.folder, self.file, self.fsync = folder, file, fsync
        above = folder if file is not None else folder.parent
        assert above is not None, "resolve_path refuses a whole bucket"
        name = file or folder.path.rstrip("/").rpartition("/")[2]
        self._beside = f".{name}.{attempt}"
        self.notes = above.child(f"{self._beside}.notes")
        """The messages between the processes."""
        self.name = str(folder) if file is None else folder.name_for_users(file)
        """For people."""
        self._lease: Lease | None = None  # where several exports could write the same files
        self.readable: PathLike = self.name
        """Where all that was written can be read before `commit`."""
        self.partial = ""
        """The path of a folder with the written files, which a failure removes."""

    @cached_property
    def context(self) -> ts.Context:
        return storage_context(fsync=self.fsync)

    @abstractmethod
    def most_bytes(self, budget_bytes: int) -> int:
        """The largest file that can be written.

        Arguments:
            budget_bytes: memory for it.
        """

    @abstractmethod
    def check(self, overwrite: bool) -> None:
        """Refuses a destination that is in use; called by one process before all others write.

        Arguments:
            overwrite: whether an existing checkpoint will be replaced.

        Raises:
            CheckpointExists: something is there that must stay.
            SaveConflict: another export writes there now.
        """

    def check_ours(self) -> None:
        """Checks that no other export took this one's place; called by the process that called
        `check`, before it writes the file that makes the others a checkpoint.

        Raises:
            SaveConflict: one has, because this one seemed to have ended.
        """
        if self._lease is not None:
            self._lease.check()

    @abstractmethod
    def opened(self, file: PlannedFile) -> AbstractContextManager[Write]:
        """Opens a file for writing; it is stored at the end of the `with` block."""

    @abstractmethod
    def read(self, file: str) -> bytes:
        """The written bytes of a file, empty if there are none; called before `commit`."""

    @abstractmethod
    def commit(self, files: Sequence[PlannedFile]) -> None:
        """Makes all files visible, if they are not; called by one process after all.

        Arguments:
            files: that were written.

        Raises:
            StorageError: some are gone; nothing was replaced.
        """

    @abstractmethod
    def discard(self) -> None:
        """Removes this process's files after an error."""

    @abstractmethod
    def discard_all(self) -> None:
        """Removes the remains; called by the last process that gives up."""

    def close(self) -> None:
        """Lets others write there; called by the process that called `check`."""
        if self._lease is not None:
            self._lease.give_back()

    def _refuse(self, what: str, overwrite: bool) -> CheckpointExists:
        do = "it is not replaced, because it is no checkpoint that unickpt can read; choose"
        if not overwrite:
            do = "pass overwrite=True (--overwrite on the command line) to replace it, or choose"
        return CheckpointExists(f"{self.name} {what}; {do} another path")

    def _is_checkpoint(self) -> bool:
        """Whether there is a checkpoint that may be replaced.

        Raises:
            CheckpointExists: others have chunks in it.
            UnsupportedFormat: it needs features that this unickpt does not know.
            StorageError: the storage failed.
        """
        with reading(self.name):
            refuse_checkpoint(self.folder, self.context, overwrite=True)
        try:
            return open_reader(self.folder) is not None
        except (CheckpointCorrupt, UnsupportedFormat):
            return True
        except CheckpointNotFound:  # such as a folder of several checkpoints
            return False


def destination(
    path: PathLike, suffixes: Sequence[str], attempt: str, fsync: bool
) -> ExportDestination:
    """The destination that a path or a URL names.

    Arguments:
        path: as users give it.
        suffixes: how it ends if it is a file.
        attempt: a new name, the same on all processes.
        fsync: whether files must be durable.

    Raises:
        InvalidPath: it names no place.
    """
    folder, file = path, None
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    if text.lower().endswith(tuple(suffixes)) and not os.path.isdir(text):
        above, _, file = text.rpartition("/")
        folder = above or ("/" if text.startswith("/") else ".")
    location = resolve_path(folder, whole=file is not None)
    kind = LocalDestination if location.is_local else ObjectDestination
    return kind(location, file, attempt, fsync)


class LocalDestination(ExportDestination):
    """A local folder or file, made next to its place and renamed at the end."""

    whole_files = False

    def __init__(self, folder: Location, file: str | None, attempt: str, fsync: bool) -> None:
        super().__init__(folder, file, attempt, fsync)
        top = os.path.realpath(folder.path)
        self._final = top if file is None else os.path.join(top, file)
        above, self._name = os.path.split(self._final)
        self.partial = self._work = os.path.join(above, f"{self._beside}.partial")
        self._old = os.path.join(above, f"{self._beside}.old")
        surplus = len(os.fsencode(os.path.basename(self._work))) - _MOST_NAME_BYTES
        if surplus > 0:
            most = len(os.fsencode(self._name)) - surplus
            raise InvalidPath(
                f"{self._final}: the name is too long for an export, which is first written "
                f"next to its place under a longer name; give it at most {most} bytes"
            )
        self.readable = self._work if file is None else os.path.join(self._work, file)
        self._overwrite = self._committed = False
        self._missing = local_folders.count_missing(above)
        self._above = above

    def most_bytes(self, budget_bytes: int) -> int:
        return 1 << 62

    def check(self, overwrite: bool) -> None:
        self._overwrite = overwrite
        if os.path.isdir(self._above):
            with local_folders.locked(self._above, f".{self._name}", _LOCK_S):
                restore_replaced(self._above, self._name)
        if self.file is not None:
            if os.path.lexists(self._final) and not (overwrite and os.path.isfile(self._final)):
                raise self._refuse("exists", overwrite)
        elif self._in_use and not (overwrite and self._is_checkpoint()):
            raise self._refuse("exists", overwrite)

    @property
    def _in_use(self) -> bool:
        is_empty = os.path.isdir(self._final) and not os.listdir(self._final)
        return os.path.lexists(self._final) and not is_empty

    @contextmanager
    def opened(self, file: PlannedFile) -> Iterator[Write]:
        path = os.path.join(self._work, file.name)
        local_folders.make(os.path.dirname(path))
        with system_calls():
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

        def write(offset: int, data: memoryview) -> None:
            with system_calls("write", path):
                while data:
                    count = os.pwrite(handle, data, offset)
                    offset, data = offset + count, data[count:]

        with closing_file(handle, path):
            yield write
            with system_calls("write", path):
                # Each process sets the full size only.
                if os.fstat(handle).st_size < file.size:
                    os.ftruncate(handle, file.size)
            if self.fsync:
                with system_calls("flush", path):
                    os.fsync(handle)

    def read(self, file: str) -> bytes:
        with system_calls(), open(os.path.join(self._work, file), "rb") as stream:
            return stream.read()

    def commit(self, files: Sequence[PlannedFile]) -> None:
        if not files:
            local_folders.make(self._work)
        if self.fsync:
            for folder, _, _ in os.walk(self._work):
                local_folders.sync_folder(folder)
        with local_folders.locked(self._above, f".{self._name}", _LOCK_S):
            exists = os.path.lexists(self._final) if self.file else self._in_use
            if exists and not self._overwrite:
                raise self._refuse("appeared while this export ran: another was faster", False)
            self._check_written(files)
            if self.file is not None:
                with system_calls():
                    os.replace(os.path.join(self._work, self.file), self._final)
            else:
                self._replace_folder()
            self._committed = True
            if self.fsync:
                local_folders.sync(self._above, self._final, self._missing + 1)
        local_folders.remove(self._work)  # with the checkpoint that it was exchanged for
        local_folders.remove(self._old)

    def _check_written(self, files: Sequence[PlannedFile]) -> None:
        """Checks the files again: under this lock, `clean` removes files that seem abandoned."""
        for file in files:
            path = os.path.join(self._work, file.name)
            if not os.path.isfile(path) or os.path.getsize(path) != file.size:
                raise StorageError(
                    f"{self.name}: {file.name} was removed or changed while it was exported; "
                    "nothing was replaced, export again"
                )

    def _replace_folder(self) -> None:
        if self._in_use and local_folders.exchange(self._work, self._final):
            return
        with system_calls():
            if self._in_use:
                os.rename(self._final, self._old)
            os.rename(self._work, self._final)

    def discard(self) -> None:
        """Others may still write; see `discard_all`."""

    def discard_all(self) -> None:
        if self._committed:
            return  # the replaced one may be needed, if it cannot be made durable
        local_folders.remove(self._work)
        with suppress(OSError):
            if not os.path.lexists(self._final) and os.path.lexists(self._old):
                os.rename(self._old, self._final)
        local_folders.remove_made(self._above, self._missing)


class ObjectDestination(ExportDestination):
    """A prefix of object storage: files that make a checkpoint complete come last."""

    whole_files = True

    def __init__(self, folder: Location, file: str | None, attempt: str, fsync: bool) -> None:
        super().__init__(folder, file, attempt, fsync)
        self._written: list[str] = []
        above = self.notes.parent
        assert above is not None, "notes are in a folder"
        name = self._beside.removesuffix(f".{attempt}")
        template = f"another export to {self.name} is under way {{who}}; {_WAIT}"
        in_process = template.replace("{who}", "in this process")
        use = LeaseUse(f"{name}{_LEASE}", in_process, template.replace("{who}", "({who})"))
        self._lease = Lease(above, use)

    def most_bytes(self, budget_bytes: int) -> int:
        return min(_MOST_OBJECT, max(1, budget_bytes // _SHARE_OF_OBJECT))

    def check(self, overwrite: bool) -> None:
        assert self._lease is not None
        self._lease.take()
        if self.file is not None:
            if self.folder.has_file(self.file, self.context) and not overwrite:
                raise self._refuse("exists", overwrite)
            return
        keys = [key.decode() for key in self.folder.store(self.context).list().result()]
        if keys and not (overwrite and self._is_checkpoint()):
            raise self._refuse(f"holds files ({', '.join(sorted(keys)[:3])}, ...)", overwrite)
        # First the files that readers look for, so that they never see a part.
        for key in sorted(keys, key=_tells, reverse=True):
            self.folder.remove_file(key, self.context)

    @contextmanager
    def opened(self, file: PlannedFile) -> Iterator[Write]:
        buffer = bytearray(file.size)

        def write(offset: int, data: memoryview) -> None:
            buffer[offset : offset + len(data)] = data

        yield write
        self._written.append(file.name)
        self.folder.store(self.context).write(file.name, bytes(buffer)).result()

    def read(self, file: str) -> bytes:
        result = self.folder.store(self.context).read(file).result()
        return bytes(result.value or b"")

    def commit(self, files: Sequence[PlannedFile]) -> None:
        """The last file is there already."""

    def discard(self) -> None:
        self.check_ours()
        for name in sorted(self._written, key=_tells, reverse=True):
            self.folder.remove_file(name, self.context)

    def discard_all(self) -> None:
        """Each process has removed its own."""


def _tells(key: str) -> bool:
    """Whether readers may begin with this file, rather than data."""
    name = key.rpartition("/")[2]
    return name[:1] in (".", "_") or name.endswith(".json") or name == MANIFEST
