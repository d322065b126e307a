"""What killed exports leave beside local destinations, in hidden files and folders.

`.<name>.<attempt>.partial` is what was written, or what it was exchanged for; `.old` is the
checkpoint that was there, where names cannot be exchanged at once; `.notes` is what processes told
each other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from unickpt.storage import local_folders
from unickpt.storage.errors import system_calls

_NAME = re.compile(r"\.(?P<of>.+)\.[^.]+-\d{6,}\.(?P<kind>partial|old|notes)", re.DOTALL)
_OLD = "old"


def find(folder: str) -> Iterator[tuple[str, str]]:
    """The names of what exports have left in a folder, or still write, each with the name of a
    checkpoint that it is and that is missing, so that it has to be put back; else with "".

    Arguments:
        folder: its path.
    """
    there = set(local_folders.names(folder))
    for name in sorted(there):
        match = _NAME.fullmatch(name)
        if match is not None and not os.path.islink(os.path.join(folder, name)):
            is_needed = match["kind"] == _OLD and match["of"] not in there
            yield name, match["of"] if is_needed else ""


def restore(folder: str, of: str) -> None:
    """Puts back the checkpoint that a killed export had moved away, and removes others that were
    replaced. No export to it may be about to commit.

    Arguments:
        folder: its path.
        of: the name of the checkpoint.
    """
    for name, _ in find(folder):
        match, at = _NAME.fullmatch(name), os.path.join(folder, name)
        if match is None or (match["of"], match["kind"]) != (of, _OLD):
            continue
        if os.path.lexists(os.path.join(folder, of)):
            local_folders.remove(at)
            continue
        with system_calls():
            os.rename(at, os.path.join(folder, of))
        local_folders.sync_folder(folder)
