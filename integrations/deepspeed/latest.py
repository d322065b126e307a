"""Which checkpoint of a folder is the latest: the file `latest`, as DeepSpeed has it.

It cannot be written together with the commit of the checkpoint that it names. So right before the
commit, `latest.next` records the name that `latest` will get. If the job is killed between the
commit and `latest`, the next job finds the committed checkpoint this way.
"""

from __future__ import annotations

import json
from contextlib import suppress

import unickpt
from unickpt.errors import CheckpointNotFound
from unickpt.extend import Files, absolute_path, resolve_path, storage_context

LATEST, LATEST_UNIVERSAL, _NEXT = "latest", "latest_universal", "latest.next"


class LatestFile:
    """The file `latest` of a folder, for one save; its functions are callbacks of that.

    Arguments:
        folder: a local path or a URL.
        tag: the checkpoint below it that is saved.
    """

    def __init__(self, folder: str, tag: str) -> None:
        self._folder, self._tag, self._attempt = absolute_path(folder), tag, ""

    def prepare(self, attempt: str) -> None:
        """The save begins to write."""
        self._attempt = attempt

    def announce(self) -> None:
        """Right before the commit, on the coordinator.

        Raises:
            StorageError: the folder cannot be written.
        """
        announcement = {"tag": self._tag, "attempt": self._attempt}
        self._write(_NEXT, json.dumps({**announcement, "instead_of": _named(self._folder)}))

    def write(self) -> None:
        """After the commit, on the coordinator."""
        self._write(LATEST, self._tag)  # from now on the announcement has no effect
        self._write(_NEXT, None)  # also when the caller names an earlier one

    def _write(self, name: str, text: str | None) -> None:
        # On local disks in one step, as on others.
        store = resolve_path(self._folder).store(storage_context())
        store.write(name, None if text is None else text.encode()).result()


def latest(folder: str, universal: bool = False) -> str | None:
    """The name of the latest checkpoint below a folder.

    Arguments:
        folder: a local path or a URL.
        universal: prefer the checkpoint that `latest_universal` names.

    Returns:
        None if nothing names one.

    Raises:
        StorageError: the folder cannot be read.

    Example:
        >>> latest("memory://runs/none")
    """
    if universal and (named := _named(folder, LATEST_UNIVERSAL)) is not None:
        return named
    named, announced = _named(folder), _named(folder, _NEXT)
    if announced is not None:
        with suppress(ValueError):  # not ours
            announcement = json.loads(announced)
            path = f"{folder.rstrip('/')}/{announcement['tag']}"
            if announcement["instead_of"] == named and _is_of(path, announcement["attempt"]):
                return str(announcement["tag"])
    return named


def _named(folder: str, name: str = LATEST) -> str | None:
    files = Files(resolve_path(folder))
    return files.text(name).strip() if files.exists(name) else None


def _is_of(path: str, attempt: str) -> bool:
    """Whether a checkpoint was committed by an attempt to save it."""
    try:
        return unickpt.open(path).index.attempt == attempt
    except CheckpointNotFound:  # it was not committed
        return False
