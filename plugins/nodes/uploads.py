"""Uploads the steps of the nodes to the root, each process the files of its node; its manifest,
without which it is no checkpoint, comes last, from process 0."""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from unickpt.errors import SaveTimeout
from unickpt.extend import (
    Location,
    TierCopying,
    Version,
    copy_files,
    first_few,
    storage_context,
    system_calls,
    version_at,
    writing,
)
from unickpt.plugins.nodes.membership import parts_in

if TYPE_CHECKING:
    from unickpt.plugins.nodes.tier import Nodes

_log = logging.getLogger("unickpt")
_PAUSE_S, _PAUSE_REMOTE_S = 0.05, 1.0
_YES, _NO = b"yes", b"no"


class Uploads:
    """Notes about uploads, and the upload of files.

    Per step and attempt, the notes say how many processes saved it (`parts`), whether it is to be
    uploaded (`due`), and whose files are in the root.

    Arguments:
        control: the folder for notes.
        folder: of this node; ends with `/`.
        root: the folder of the run.
    """

    def __init__(self, control: Location, folder: str, root: Location) -> None:
        self._notes = control.child("uploads").store(storage_context(fsync=False))
        self._folder, self._root = folder, root
        self._counts: dict[str, int] = {}
        self.pause_s = _PAUSE_REMOTE_S if control.is_remote else _PAUSE_S

    def part_count(self, step: str, attempt: str) -> int | None:
        """How many processes saved a step; None if that is not known."""
        name = f"{step}.{attempt}.parts"
        if name not in self._counts:
            value = self._notes.read(name).result()
            if value.state != "value" or not value.value.isdigit():
                return None
            self._counts[name] = int(value.value)
        return self._counts[name]

    def set_part_count(self, step: str, attempt: str, count: int) -> None:
        """Records how many processes save a step."""
        self._notes.write(f"{step}.{attempt}.parts", b"%d" % count).result()

    def decide(self, step: str, attempt: str, *, due: bool) -> None:
        """Records whether a step is to be uploaded."""
        self._notes.write(f"{step}.{attempt}.due", _YES if due else _NO).result()

    def is_due(self, step: str, attempt: str) -> bool | None:
        """Whether a step is to be uploaded; None if that is not decided."""
        read = self._notes.read(f"{step}.{attempt}.due").result()
        return read.value == _YES if read.state == "value" else None

    def missing(self, step: str, attempt: str) -> list[int]:
        """The processes whose files of a step are not in the root yet."""
        prefix, count = f"{step}.{attempt}.", self.part_count(step, attempt)
        names = {key.decode(errors="replace") for key in self._notes.list().result()}
        return [n for n in range(count or 0) if f"{prefix}{n:05d}" not in names]

    def forget(self, step: str) -> None:
        """Removes the notes about a step."""
        for key in self._notes.list().result():
            if key.decode(errors="replace").startswith(f"{step}."):
                self._notes.write(key.decode(errors="replace"), None).result()

    def upload(
        self, step: str, attempt: str, first: int, bytes_per_s: float | None, *, fsync: bool
    ) -> int:
        """Uploads the files of a step that this node has and the root lacks; returns their bytes.

        Processes of a node share the work: each takes the files of one process at a time.

        Arguments:
            step, attempt: of the step.
            first: the process whose files come first.
            bytes_per_s: the most that this process uploads in a second.
            fsync: whether the files must survive a power failure.
        """
        numbers = parts_in(self._folder).get(step, {}).get(attempt, ())
        sent = 0
        for process in sorted(numbers, key=lambda number: (number != first, number)):
            if process not in self.missing(step, attempt):
                continue
            part = f"{step}/processes/{attempt}/{process:05d}/"
            with _claimed(self._folder + part) as is_ours:
                if is_ours:
                    sent += self._send(part, bytes_per_s, fsync)
                    self._notes.write(f"{step}.{attempt}.{process:05d}", b"").result()
        return sent

    def _send(self, part: str, bytes_per_s: float | None, fsync: bool) -> int:
        """Uploads the files of a process. What S3 stores has the SHA-256 that the request has, and
        files are renamed when they are whole, so that what is there need not be read back."""
        context, target = storage_context(fsync=fsync), self._root.child(part)
        store, sent = target.store(context), 0
        existing = {key.decode(errors="replace") for key in store.list().result()}
        folders = {""}
        for name in _files(self._folder + part):
            folders.add(os.path.dirname(name))
            if name in existing:
                continue
            began = time.monotonic()
            path = self._folder + part + name
            with system_calls("read", path), open(path, "rb") as file:
                data = file.read()
            store.write(name, data).result()
            sent += len(data)
            if bytes_per_s is not None:
                time.sleep(max(0.0, len(data) / bytes_per_s - (time.monotonic() - began)))
        if fsync:
            for folder in sorted(folders):
                target.child(folder).sync(self._root) if folder else target.sync(self._root)
        return sent


def _files(top: str) -> Iterator[str]:
    """The files below a folder, by their paths there."""
    for folder, _, names in os.walk(top):
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


@contextmanager
def _claimed(folder: str) -> Iterator[bool]:
    """Whether no other process of the node is at work in a folder; keeps them off until the end."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
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


class NodeCopying(TierCopying):
    """Uploads steps in the background, on each process the files of its node, and removes files
    that are no longer needed from the folder of the node.

    Arguments:
        nodes: of the job.
        others: as for `TierCopying`.
    """

    by_all = True

    def __init__(self, nodes: Nodes, *others: Any) -> None:
        super().__init__(*others)
        self._nodes, self._is_coordinator = nodes, nodes.group.index == 0
        self._uploads, self._is_closing = nodes.uploads, False
        self._done, self._counted = set[str](), set[str]()
        rate = nodes.chosen.upload_bytes_per_s
        self._rate = None if rate is None else rate / max(1, _on_node(nodes))

    def follow(self, step: int, attempt: str, *, overwrite: bool) -> Any:
        lineage = super().follow(step, attempt, overwrite=overwrite)
        with writing(self._local.location):
            count = self._nodes.group.count
            self._uploads.set_part_count(f"step_{step}", attempt, count)
        return lineage

    def copy(self) -> None:
        self._remove_stale()
        if self._is_coordinator:
            super().copy()
        else:
            self._upload_all()
        self._remove_stale()

    def chosen(self, steps: Sequence[int]) -> list[int]:
        """Every n-th of the steps that may be uploaded; when the run is closed, also the last."""
        chosen = []
        for step in steps:
            version = self._local.version(step)
            if version is None or version.name in self._counted:
                continue
            self._counted.add(version.name)
            if len(self._counted) % self._nodes.chosen.upload_every == 0:
                chosen.append(step)
            else:
                self._uploads.decide(f"step_{step}", version.attempt, due=False)
        return sorted({*chosen, *steps[-1:]}) if self._is_closing else chosen

    def close(self) -> None:
        self._is_closing = True
        self.start()
        self.wait()
        self._nodes.close()

    def send(self, step: int, sent: Any, base_files: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Uploads the files of this node, waits for the other nodes, and copies the rest."""
        name, attempt = f"step_{step}", sent.version.attempt
        self._uploads.decide(name, attempt, due=True)
        self._upload(name, attempt)
        self._wait_for_parts(name, attempt)
        copy_files(sent.origin, sent.destination, attempt, sent.budget_bytes)
        return sent.version.manifest, ()

    def _upload(self, step: str, attempt: str) -> None:
        first, fsync = self._nodes.group.index, self.options.fsync
        self._uploads.upload(step, attempt, first, self._rate, fsync=fsync)

    def _wait_for_parts(self, step: str, attempt: str) -> None:
        """Waits until all nodes have uploaded a step.

        Raises:
            SaveTimeout: for too long, nothing came.
        """
        missing = self._uploads.missing(step, attempt)
        deadline = time.monotonic() + self.options.timeout_s
        while missing:
            time.sleep(self._uploads.pause_s)
            before, missing = missing, self._uploads.missing(step, attempt)
            if missing != before:
                deadline = time.monotonic() + self.options.timeout_s
            elif time.monotonic() > deadline:
                raise SaveTimeout(
                    f"{step}: for {self.options.timeout_s:g} s no files of processes "
                    f"{first_few(missing)} came from their nodes; the step stays on the nodes"
                )

    def _upload_all(self) -> None:
        """Uploads what is due of all committed steps; waits until process 0 has decided that."""
        steps = self._local.committed()
        for step in steps:
            name, is_last = f"step_{step}", self._is_closing and step == steps[-1]
            version = self._local.version(step)
            if version is None or (version.attempt in self._done and not is_last):
                continue
            if is_last or self._is_due_on_node(step, name, version):
                try:
                    self._upload(name, version.attempt)
                except Exception as error:
                    self._errors.add(f"uploading {name} to {self._root.location}", error)
                    continue
            self._done.add(version.attempt)

    def _is_due_on_node(self, step: int, name: str, version: Version) -> bool:
        """What process 0 decides about a step; false if the step is gone before that."""
        deadline = time.monotonic() + self.options.timeout_s
        while (due := self._uploads.is_due(name, version.attempt)) is None:
            if time.monotonic() > deadline or self._local.version(step) != version:
                return False
            time.sleep(self._uploads.pause_s)
        return due

    def _remove_stale(self) -> None:
        """Removes the data of steps that are gone, and of saves that were never committed."""
        if self._steps.own_attempts:  # before the first save, process 0 has removed them
            self._nodes.steps.lost.clear()
        committed = {}
        for name in parts_in(self._nodes.folder):
            version = version_at(self._nodes.location.child(name))
            committed[name] = "" if version is None else version.attempt
        for name, attempts in parts_in(self._nodes.folder).items():
            for attempt in attempts:
                if attempt == committed.get(name) or self._may_be_saving(attempt):
                    continue
                folder = f"{self._nodes.folder}{name}/"
                shutil.rmtree(f"{folder}processes/{attempt}", ignore_errors=True)
                with suppress(OSError):
                    os.rmdir(f"{folder}processes")
                    os.rmdir(folder)

    def _may_be_saving(self, attempt: str) -> bool:
        """Whether a save that is not committed may be in progress."""
        is_of_job = attempt.rpartition("-")[0] == self._nodes.session
        return is_of_job and attempt not in self._steps.own_attempts


def _on_node(nodes: Nodes) -> int:
    """How many processes share this node's folder."""
    return sum(member.node == nodes.node for member in nodes.members)
