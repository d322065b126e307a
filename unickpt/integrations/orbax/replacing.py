"""A checkpoint that Orbax wrote and that a save with `force=True` replaces, in a local folder."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass

from unickpt.errors import UnickptError
from unickpt.frameworks.leaves import adapters
from unickpt.frameworks.process_group import current_group, within
from unickpt.integrations.orbax.steps import ORBAX
from unickpt.reading.checkpoint import open
from unickpt.saving.options import SaveOptions
from unickpt.storage.locations import Location
from unickpt.storage.paths import LocalLocation

_log = logging.getLogger("unickpt")
_ASIDE = ".replaced-by-unickpt"


@dataclass(frozen=True)
class Replaced:
    """What was moved aside, until the save is committed.

    Arguments:
        folder: of the save; empty if nothing was moved, or by another process.
    """

    folder: str = ""

    @classmethod
    def at(cls, location: Location, options: SaveOptions, *, force: bool) -> Replaced:
        """Moves a checkpoint of Orbax aside; all processes call this, and go on together."""
        if not force or not isinstance(location, LocalLocation):
            return cls()
        group = within(options.group or current_group(adapters()), options.timeout_s)
        theirs, folder = _is_orbax(location), str(location)
        if not group.agree(int(theirs)):  # also waits until all have looked
            return cls()
        moved = theirs and group.index == 0
        if moved:
            shutil.rmtree(folder + _ASIDE, ignore_errors=True)  # of a job that was killed
            os.rename(folder, folder + _ASIDE)
        group.agree(0)
        return cls(folder if moved else "")

    def committed(self) -> None:
        """Removes what was replaced."""
        if self.folder:
            shutil.rmtree(self.folder + _ASIDE, ignore_errors=True)

    def failed(self) -> None:
        """Puts it back, if nothing else is there."""
        if not self.folder:
            return
        try:
            os.rename(self.folder + _ASIDE, self.folder)
        except OSError as error:
            _log.warning("what Orbax saved is now at %s%s: %s", self.folder, _ASIDE, error)


def _is_orbax(location: Location) -> bool:
    try:
        return open(str(location)).reader.format == ORBAX
    except UnickptError:  # nothing, or nothing that can be read
        return False
