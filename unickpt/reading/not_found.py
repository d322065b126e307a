"""Why no checkpoint can be opened at a path, and which path may be intended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from unickpt.arrays.names import natural
from unickpt.errors import CheckpointNotFound, StorageError, UnickptError
from unickpt.format.reader_registry import SeveralCheckpoints
from unickpt.quoting import shortened
from unickpt.reading.checkpoints_below import checkpoints_below, other_folders
from unickpt.storage import paths
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST

if TYPE_CHECKING:
    from unickpt.reading.checkpoints_below import Listed

_SHOWN = 8  # names, in a message
_MOST_TEXT = 400  # characters of names, which other systems may have chosen
_LIST = "`unickpt ls` lists the checkpoints below a directory"


def nothing_at(location: Location, open_reader: Callable[[Location], object]) -> str:
    """One sentence that says what a path holds instead of a checkpoint.

    Opens a few folders at most. It is called where nothing can be opened, and so must not fail
    itself.

    Arguments:
        location: where no format recognises a checkpoint.
        open_reader: opens the checkpoint at a location; returns None if there is none.
    """
    said = f"no checkpoint at {location}"
    try:
        below = [listed for listed in checkpoints_below(location.url) if listed.name != "."]
        names = sorted(location.names(paths.context()), key=natural)
        if not below:
            folders = other_folders(location.url)[-_SHOWN:]
            below = [listed for listed in folders if _opens(listed, open_reader)]
        if below:
            return f"{said}: it contains checkpoints but is not one itself {_of(location, below)}"
        return f"{said}: {_above(location) if not names else _names_text(names)}"
    except CheckpointNotFound:  # there is no such folder
        return f"{said}: {_above(location)}"
    except (SeveralCheckpoints, StorageError) as error:
        return f"{said}: {str(error).removeprefix(f'{location}: ')}"


def _of(location: Location, below: Sequence[Listed]) -> str:
    names = [listed.name for listed in below]
    hint = f"give the path of one, such as {below[-1].path!r}"
    if all(name.startswith("step_") for name in names):
        hint = (
            f"load the newest with unickpt.Checkpointer({str(location)!r}).load(), or give the "
            f"path of a step, such as {below[-1].path!r}"
        )
    return f"({_shown(names)}); {hint}"


def _opens(listed: Listed, open_reader: Callable[[Location], object]) -> bool:
    """Whether a folder is a checkpoint of another system, with members of its own or without."""
    if listed.name == ".":
        return False
    try:
        return open_reader(paths.resolve(listed.path)) is not None
    except SeveralCheckpoints:
        return True
    except UnickptError:
        return False


def _names_text(names: Sequence[str]) -> str:
    """The contents of a folder without a checkpoint."""
    if names == ["processes"]:
        return (
            "a save began there and has not been committed: it is still under way, or it was "
            "stopped. `unickpt watch` on the folder above shows saves under way; load an earlier "
            "step"
        )
    return f"it contains {_shown(names)}, but no checkpoint of a known format. {_LIST}"


def _above(location: Location) -> str:
    """The nearest folder above an empty path that is not empty."""
    if location.is_remote:  # its listings include all below a folder, at any depth
        return f"nothing is there. {_LIST}"
    what = "the folder is empty" if location.is_local and location.exists() else "nothing is there"
    folder = location.parent
    while folder is not None and (not folder.exists() or not folder.names(paths.context())):
        folder = folder.parent
    if folder is None:
        return f"{what}. {_LIST}"
    if folder.has_file(MANIFEST, paths.context()):
        return (
            f"it is inside of the checkpoint {folder}; open that, and take arrays from it by their "
            "names"
        )
    names = sorted(folder.names(paths.context()), key=natural)
    names = [name for name in names if not name.startswith(".")]  # such as lock files
    return f"{what}; {folder} has {_shown(names) if names else 'only hidden files'}. {_LIST}"


def _shown(names: Sequence[str]) -> str:
    shown_names = names if len(names) <= _SHOWN else [names[0], "...", *names[1 - _SHOWN :]]
    return shortened(", ".join(shown_names), _MOST_TEXT)
