"""Supplies the bytes of damaged and missing files while a checkpoint is read."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import tensorstore as ts

from unickpt.extend import Damaged, Location, storage_context
from unickpt.plugins.parity.groups import ParityFolder, folders_of, needed_files

_log = logging.getLogger("unickpt")


def restorers_at(location: Location, context: ts.Context) -> list[ParityRestorer]:
    """Restores the files of a checkpoint from their parity; empty if it has none.

    Raises:
        Failed: the storage failed.
    """
    folders = folders_of(location, context)
    return [ParityRestorer(location, folders)] if folders else []


class ParityRestorer:
    """A `Restorer`.

    Arguments:
        location: of the checkpoint.
        folders: of the checkpoint that have parity.
    """

    def __init__(self, location: Location, folders: list[ParityFolder]) -> None:
        self._location, self._folders = location, folders
        self._group_of = {
            group.name(path): (group, number)
            for folder in folders
            for group in folder.groups
            for number, (path, _, _) in enumerate(group.table.files)
        }
        self._reported, self._lock = set[str](), threading.Lock()

    def read(self, path: str, offset: int, length: int) -> bytes | None:
        """Some bytes of a file, if it is damaged."""
        if path not in self._group_of:
            return None
        group, number = self._group_of[path]
        state = group.state
        if number not in state.files:
            return None
        if not state.is_covered:
            raise Damaged(group.uncovered())
        if offset + length > group.table.files[number][1]:
            raise Damaged(f"{path} never had the bytes up to {offset + length}")
        self._report(path, state.files[number])
        return group.restore(state.files, offset, length)[number]

    def _report(self, path: str, reason: str) -> None:
        with self._lock:
            is_new = path not in self._reported
            self._reported.add(path)
        if is_new:
            _log.warning(
                "%s: the file %s is restored from parity while it is read: %s. "
                "`unickpt repair %s` rewrites it",
                *(self._location, path, reason, self._location),
            )

    def damage(self) -> Iterator[str]:
        """The damage that `verify` reports: of groups of which a file was damaged when it was read,
        and of parity files."""
        needed = needed_files(self._location, storage_context())
        for folder in self._folders:
            yield from folder.damage_texts(self._location, needed)
