"""Uploads the steps of the nodes to the root, each process the files of its node; its manifest,
without which it is no checkpoint, comes last, from process 0."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal

from unickpt.errors import CheckpointCorrupt, SaveTimeout, StorageError, UnickptError
from unickpt.extend import (
    ADDED_FOLDER,
    IN_ROOT,
    Failed,
    MemoryWindow,
    PartialCopy,
    TierCopying,
    Version,
    copy_files,
    first_few,
    leaving_out,
    open_own,
    step_before,
    storage_context,
    version_at,
    writing,
)
from unickpt.plugins.nodes.job import Nodes
from unickpt.plugins.nodes.node_parity import NodeParity
from unickpt.plugins.nodes.other_sources import other_sources
from unickpt.plugins.nodes.part_check import PartCheck
from unickpt.plugins.nodes.peer_copies import PeerCopies

_log = logging.getLogger("unickpt")
_AT_ONCE = 4  # files that a process uploads


class NodeCopying(TierCopying):
    """Uploads steps in the background, on each process the files of its node, and removes files
    that are no longer needed from the folder of the node.

    Arguments:
        nodes: of the job.
        arguments: as for `TierCopying`.
    """

    by_all, survives_at_commit = True, "the end of all processes"

    def __init__(self, nodes: Nodes, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._nodes, self._is_coordinator = nodes, nodes.group.index == 0
        self._uploads, self._is_closing = nodes.uploads, False
        self._done: dict[str, str | Literal[False]] = {}
        """By the attempt of a step, the choice with which it was uploaded."""
        self._counted, self._due = set[str](), set[str]()
        self._damaged = list[tuple[str, BaseException]]()
        """Errors of steps with damaged files, to be raised later."""
        rate = nodes.chosen.upload_bytes_per_s
        on_node = sum(member.node == nodes.node for member in nodes.members)
        self._rate = None if rate is None else rate / on_node
        peers = nodes, self._local, self._rate
        self._on_peers: list[PeerCopies | NodeParity] = []
        if nodes.chosen.replicas:
            self._on_peers.append(PeerCopies(*peers))
        if nodes.parity is not None:
            self._on_peers.append(NodeParity(*peers, nodes.parity))
        for protection in self._on_peers:
            protection.start()

    def start(self) -> None:
        for protection in self._on_peers:
            protection.start()
        super().start()

    def wait(self) -> None:
        for protection in self._on_peers:
            protection.wait()
        super().wait()
        while self._damaged:
            super().keep_error(*self._damaged.pop(0))

    def keep_error(self, what: str, error: BaseException) -> None:
        """Also: a damaged step stops no training; its error is raised where the run is waited
        for."""
        if isinstance(error, CheckpointCorrupt):
            _log.error("%s failed: %s", what, error)
            self._damaged.append((what, error))
        else:
            super().keep_error(what, error)

    def wait_for_turn(self) -> None:
        """Also for the protection of the step before: no later one is committed without it."""
        for protection in self._on_peers:
            protection.start()  # this process may not have heard of the commit yet
            protection.wait()
        if self._is_coordinator:
            super().wait_for_turn()

    def survives(self, step: int) -> str:
        name, version = f"step_{step}", self._local.version(step)
        if version is None or super().survives(step) == IN_ROOT:
            return super().survives(step)
        if count := self._uploads.lost_nodes(name, version.attempt):
            return "the loss of a node" if count == 1 else f"the loss of {count} nodes"
        return self.survives_at_commit

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

    def in_flight(self) -> list[int]:
        """Also the steps on the nodes: an upload that was interrupted is resumed."""
        return [*super().in_flight(), *self._local.committed()]

    def chosen(self, steps: Sequence[int]) -> list[int]:
        """Every n-th of the steps that may be uploaded; when the run is closed, also the last."""
        chosen = []
        for step in self._local.committed():  # also those that no rule keeps
            version = self._local.version(step)
            if version is not None and version.name not in self._counted:
                self._counted.add(version.name)
                is_due = len(self._counted) % self._nodes.chosen.upload_every == 0
                if is_due and step in steps:
                    self._due.add(version.name)
                else:
                    self._uploads.decide(f"step_{step}", version.attempt, due=False)
            if version is not None and version.name in self._due and step in steps:
                chosen.append(step)  # again after each save, until it is in the root
        return sorted({*chosen, *steps[-1:]}) if self._is_closing else chosen

    def close(self) -> None:
        self._is_closing = True
        self.start()
        self.wait()
        self._nodes.close()

    def _copy_step(self, step: int) -> None:
        super()._copy_step(step)
        version = self._local.version(step)
        name = f"step_{step}"
        if version is not None and self._uploads.due_choice(name, version.attempt) is None:
            self._uploads.decide(name, version.attempt, due=False)  # the root has it

    def send(self, step: int, sent: Any, base_files: Any) -> tuple[bytes, tuple[Any, ...]]:
        """Uploads the files of this node, waits for the other nodes, and copies the rest."""
        name, attempt, choice = f"step_{step}", sent.version.attempt, ""
        if (part := self._partial_copy(step, sent)) is not None:
            choice = self._uploads.choose(name, attempt, _by_process(part.left_out))
        self._uploads.decide(name, attempt, due=True, choice=choice)
        self._upload(name, sent.version, choice)
        self._wait_for_parts(name, sent.version, choice)
        copy_files(sent.origin, sent.destination, attempt, sent.budget_bytes)
        if part is None:
            return sent.version.manifest, ()
        return sent.rewritten(part.index, part.changed, storage_context()), part.index.bases

    def _partial_copy(self, step: int, sent: Any) -> PartialCopy | None:
        """The copy of a step that borrows units from an earlier one; None if it has all."""
        before = step_before(self._root, step) if self._nodes.filters else None
        if before is None or sent.reader is None:
            return None
        try:
            base = open_own(self._root.location_of(before))
            if base is None or base.index.attempt not in self._steps.own_attempts:
                return None
            for feature in self._nodes.filters:
                if (selection := feature.copy_filter(sent.reader, base)) is not None:
                    return leaving_out(sent.reader, base, selection)
        except UnickptError as error:
            _log.warning("step %d is uploaded whole: %s", step, error)
        return None

    def _upload(self, step: str, version: Version, choice: str) -> None:
        """Uploads the files that no earlier node of the job has; first those of this process."""
        processes = [
            process
            for process, members in self._nodes.holders(step, version).items()
            if members[0].node == self._nodes.node
        ]
        processes.sort(key=lambda process: (process != self._nodes.group.index, process))
        folder, attempt = self._nodes.folder, version.attempt
        for process in processes:
            is_missing = process in self._uploads.missing(step, attempt, choice)
            if not is_missing or self._uploads.damage(step, attempt):
                continue
            part = f"{step}/processes/{attempt}/{process:05d}/"
            with folder.claimed(part) as is_ours:
                if is_ours or not folder.has(part):  # it may be gone, and have a copy
                    self._send_part(step, version, process, choice)

    def _send_part(self, step: str, version: Version, process: int, choice: str) -> None:
        """Uploads the files of a process, and notes that. They are compared with the digests of
        what is in them, and not read back: S3 checks the SHA-256 of each request, and a local file
        gets its name when it is whole.

        Raises:
            CheckpointCorrupt: one is damaged, and nothing else has it. This is noted.
        """
        fsync, folder, attempt = self.options.fsync, self._nodes.folder, version.attempt
        part = f"{step}/processes/{attempt}/{process:05d}/"
        reader = open_own(self._nodes.location.child(step))
        if reader is None or reader.manifest_digest != version.digest:
            return  # it was removed, or saved again
        check = PartCheck(reader, process, part.removeprefix(f"{step}/"))
        # Files that are left out, and with them the parity of all.
        without = self._uploads.left_out(step, attempt, choice, process)
        context, target = storage_context(fsync=fsync), self._root.location.child(part)
        store, made = target.store(context), {""}
        existing = {key.decode(errors="replace") for key in store.list().result()}
        window, sizes = MemoryWindow(self.options.working_bytes, _AT_ONCE), folder.files(part)
        for name in sorted({*sizes, *check.names}):
            made.add(os.path.dirname(name))
            is_left_out = without and (name in without or name.startswith(f"{ADDED_FOLDER}/"))
            if name in existing or is_left_out:
                continue
            began = time.monotonic()
            window.make_room(sizes.get(name, 0))
            data = self._sound_file(step, version, process, name, check)
            window.add(len(data), store.write(name, data).result)
            if self._rate is not None:
                time.sleep(max(0.0, len(data) / self._rate - (time.monotonic() - began)))
        window.drain()
        for name in sorted(made) if fsync else ():
            (target.child(name) if name else target).sync(self._root.location)
        self._uploads.note_upload(step, attempt, process, choice)

    def _sound_file(
        self, step: str, version: Version, process: int, name: str, check: PartCheck
    ) -> bytes:
        """The bytes of a file, of this node or, if it is damaged, of what else has it. Raises as
        `_send_part`."""
        path = f"{step}/processes/{version.attempt}/{process:05d}/{name}"
        data, damage = b"", "it is gone"
        with suppress(Failed):
            data = self._nodes.folder.read(path)
            if not (damage := check.damage(name, data)):
                return data
        for source in other_sources(self._nodes, step, version):
            with suppress(StorageError, OSError, LookupError, ValueError):
                data = source.fetch(process, name)
                if not check.damage(name, data):
                    place = source.places[process]
                    _log.warning("%s is damaged here (%s); %s has it", path, damage, place)
                    return data
        if version_at(self._nodes.location.child(step)) != version:
            raise Failed(f"{step} was removed while it was uploaded")
        text = (
            f"{step} is not uploaded: process {process} has a damaged file ({damage}), and no "
            f"other node a copy or sum of it: {self._nodes.folder.path}{path}"
        )
        self._uploads.note_damage(step, version.attempt, process, text)
        raise CheckpointCorrupt(text)

    def _wait_for_parts(self, step: str, version: Version, choice: str) -> None:
        """Waits until all nodes have uploaded a step.

        Raises:
            SaveTimeout: for too long, nothing came.
            CheckpointCorrupt: as `_missing`.
        """
        missing = self._missing(step, version, choice)
        deadline = time.monotonic() + self.options.timeout_s
        while missing:
            time.sleep(self._uploads.pause_s)
            before, missing = missing, self._missing(step, version, choice)
            if missing != before:
                deadline = time.monotonic() + self.options.timeout_s
            elif time.monotonic() > deadline:
                raise SaveTimeout(
                    f"{step}: for {self.options.timeout_s:g} s no files of processes "
                    f"{first_few(missing)} came from their nodes; the step stays on the nodes"
                )

    def _missing(self, step: str, version: Version, choice: str) -> list[int]:
        """The processes whose files a node has, and has not uploaded; only the root has others.

        Raises:
            CheckpointCorrupt: a file of one is damaged.
        """
        if damage := self._uploads.damage(step, version.attempt):
            raise CheckpointCorrupt(damage)
        holders = self._nodes.holders(step, version)
        missing = self._uploads.missing(step, version.attempt, choice)
        return [process for process in missing if process in holders]

    def _upload_all(self) -> None:
        """Uploads what is due of all committed steps; waits until process 0 has decided that."""
        steps = self._local.committed()
        for step in steps:
            name, is_last = f"step_{step}", self._is_closing and step == steps[-1]
            version = self._local.version(step)
            if version is None:
                continue
            done, choice = self._done.get(version.attempt), None
            if done is None or is_last:
                choice = self._choice(step, name, version, is_last=is_last)
            else:  # decided anew, if it failed
                choice = self._uploads.due_choice(name, version.attempt)
            if choice is None or choice == done:
                continue
            if choice is not False:
                try:
                    self._upload(name, version, choice)
                except Exception as error:
                    self.failed(step, f"uploading {name} to {self._root.location}", error)
                    continue
            self._done[version.attempt] = choice

    def _choice(
        self, step: int, name: str, version: Version, *, is_last: bool
    ) -> str | Literal[False]:
        """What process 0 decides about a step: false if it is not uploaded, or gone before that.

        Arguments:
            step, name, version: of the step.
            is_last: whether it is uploaded when the run is closed, whatever was decided before.
        """
        if is_last and not self._nodes.filters:
            return ""
        deadline = time.monotonic() + self.options.timeout_s
        while True:
            choice = self._uploads.due_choice(name, version.attempt)
            if isinstance(choice, str) or (choice is False and not is_last):
                return choice
            if time.monotonic() > deadline or self._local.version(step) != version:
                return False
            in_root = self._root.version(step)
            if in_root is not None and in_root.name == version.name:
                return False
            time.sleep(self._uploads.pause_s)

    def _remove_stale(self) -> None:
        """Removes the data of steps that are gone, and of saves that were never committed."""
        if not self._nodes.sees_root():
            return
        stale = {
            name: {attempt for attempt in attempts if not self._may_be_saving(attempt)}
            for name, attempts in self._nodes.folder.parts().items()
        }
        # Read after that: these saves have ended, and are committed by now or never.
        for name, ended in stale.items():
            version = version_at(self._nodes.location.child(name)) if ended else None
            ended.discard("" if version is None else version.attempt)
        if not self._nodes.sees_root():  # nor did the reads, or another job has begun
            return
        for name, ended in stale.items():
            for attempt in sorted(ended):
                self._nodes.folder.remove(f"{name}/processes/{attempt}")

    def _may_be_saving(self, attempt: str) -> bool:
        """Whether a save that is not committed may be in progress."""
        if attempt in self._steps.attempts_in_progress:
            return True
        # Another process of this node may have begun a save that this one has not.
        return self._nodes.is_of_job(attempt) and attempt not in self._steps.own_attempts


def _by_process(paths: Iterable[str]) -> dict[int, list[str]]:
    """Data files by the processes that wrote them, by their paths in their folders."""
    by_process: dict[int, list[str]] = {}
    for path in sorted(paths):
        _, _, process, name = path.split("/", 3)
        by_process.setdefault(int(process), []).append(name)
    return by_process
