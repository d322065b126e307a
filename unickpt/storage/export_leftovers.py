"""Leftovers of killed exports next to local destinations, and how checkpoints are restored."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from unickpt.storage import local_folders
from unickpt.storage.regular_files import system_calls

# Killed exports leave next to local destinations: their output, or the checkpoint with which it was
# exchanged; the former checkpoint, where names cannot be exchanged; and messages between processes.
_LEFT = re.compile(r"\.(?P<of>.+)\.[^.]+-\d{6,}\.(?P<kind>partial|old|notes)", re.DOTALL)
_OLD = "old"


def left_in(folder: str) -> Iterator[tuple[str, str, bool]]:
    """The names of folders and files that exports have left, or still write, in a folder; each with
    the name of its destination, and whether it is the checkpoint that is missing there.

    Arguments:
        folder: its path.
    """
    names = set(local_folders.names(folder))
    for name in sorted(names):
        match = _LEFT.fullmatch(name)
        if match is not None and not os.path.islink(os.path.join(folder, name)):
            yield name, match["of"], match["kind"] == _OLD and match["of"] not in names


def restore(folder: str, name: str) -> None:
    """Restores the checkpoint that a killed export had moved away, and removes others that were
    replaced. No export to it may be about to commit.

    Arguments:
        folder: its path.
        name: of the checkpoint.
    """
    for leftover, destination_of, is_missing in left_in(folder):
        path = os.path.join(folder, leftover)
        if destination_of != name or not leftover.endswith(f".{_OLD}"):
            continue
        if not is_missing or os.path.lexists(os.path.join(folder, name)):
            local_folders.remove(path)
            continue
        with system_calls():
            os.rename(path, os.path.join(folder, name))
        local_folders.sync_folder(folder)
