"""The folder of a node: the data files of each process by step and attempt, and sums of others'."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from unickpt.extend import system_calls

NODE_FILE = ".node"
_PART = re.compile(r"\d{5,}")
_SUM = re.compile(r"sum-[-\w]+")


class NodeFolder:
    """The folder of a node, which its processes share.

    Arguments:
        path: ends with `/`.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    def identity(self) -> str:
        """Identifies the node; the first process there writes it.

        Raises:
            Failed: it cannot be written or read.
        """
        path, draft = self.path + NODE_FILE, f"{self.path}{NODE_FILE}-{secrets.token_hex(8)}"
        with system_calls("write", path):
            os.makedirs(self.path, exist_ok=True)
            with open(draft, "w") as file:
                file.write(secrets.token_hex(8))
            with suppress(FileExistsError):
                os.link(draft, path)  # whole, or not at all
            os.unlink(draft)
            with open(path) as file:
                return file.read()

    def parts(self) -> dict[str, dict[str, list[int]]]:
        """By step and attempt, the processes whose data files are here."""
        return {
            step: {
                attempt: [int(name) for name in names if _PART.fullmatch(name)]
                for attempt, names in by_attempt.items()
            }
            for step, by_attempt in self._names().items()
        }

    def sums(self) -> dict[str, dict[str, list[str]]]:
        """The sums of other nodes' files, where there are some."""
        sums: dict[str, dict[str, list[str]]] = {}
        for step, by_attempt in self._names().items():
            for attempt, names in by_attempt.items():
                if chosen := [name for name in names if _SUM.fullmatch(name)]:
                    sums.setdefault(step, {})[attempt] = chosen
        return sums

    def _names(self) -> dict[str, dict[str, list[str]]]:
        return {
            step: {
                attempt: list(_folders(f"{self.path}{step}/processes/{attempt}/"))
                for attempt in _folders(f"{self.path}{step}/processes/")
            }
            for step in _folders(self.path)
        }

    def has(self, below: str) -> bool:
        """Whether there is a folder."""
        return os.path.isdir(self.path + below)

    def files(self, below: str) -> dict[str, int]:
        """The bytes of the files in a folder, by their paths there."""
        return files_below(self.path + below)

    def read(self, name: str) -> bytes:
        """What a file has. Raises Failed."""
        with system_calls("read", self.path + name), open(self.path + name, "rb") as file:
            return file.read()

    def remove(self, below: str) -> None:
        """Removes a folder; and those above it, if they are empty."""
        shutil.rmtree(self.path + below, ignore_errors=True)
        with suppress(OSError):
            while below := os.path.dirname(below.rstrip("/")):
                os.rmdir(self.path + below)

    @contextmanager
    def filled(self, below: str) -> Iterator[str]:
        """The path of a draft, which becomes the folder at the end, or goes on an error."""
        draft = f"{self.path}{below.rstrip('/')}.new"
        shutil.rmtree(draft, ignore_errors=True)
        try:
            with system_calls("write", draft):
                os.makedirs(draft)
                yield draft
                with suppress(FileNotFoundError):  # the step was removed meanwhile
                    os.rename(draft, self.path + below.rstrip("/"))
        except BaseException:
            shutil.rmtree(draft, ignore_errors=True)  # it may have filled the disk
            raise

    @contextmanager
    def claimed(self, below: str) -> Iterator[bool]:
        """Whether no other process of the node is at work in a folder; keeps them off until the
        end."""
        try:
            handle = os.open(self.path + below, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:  # it was removed
            yield False
            return
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                yield False
            else:
                yield True
        finally:
            os.close(handle)


def files_below(top: str) -> dict[str, int]:
    """The bytes of the files below a folder, by their paths there."""
    sizes = {}
    for folder, _, names in os.walk(top):
        for name in sorted(names):
            path = os.path.join(folder, name)
            with suppress(FileNotFoundError):  # the step is being removed
                sizes[os.path.relpath(path, top)] = os.stat(path).st_size
    return sizes


def _folders(path: str) -> Iterator[str]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(path) as entries:
        yield from sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
