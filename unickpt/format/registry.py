"""The registry of readable formats: what is at a location is asked of each, unickpt's own first."""

from __future__ import annotations

from typing import Protocol

from unickpt.format import ocdbt_reader
from unickpt.format.reader import Reader
from unickpt.storage.locations import Location


class Format(Protocol):
    """A format of checkpoints."""

    def open(self, location: Location) -> Reader | None:
        """Opens the checkpoint at a location; None if there is none of this format.

        Raises:
            CheckpointCorrupt: there is one, and it is damaged.
            StorageError: the storage failed.
        """


_formats: list[Format] = [ocdbt_reader]


def register(format: Format) -> None:
    """Adds a format, which is asked after those that are registered already.

    Example:
        >>> class Npy:
        ...     def open(self, location): ...
        >>> npy = Npy()
        >>> register(npy)
        >>> unregister(npy)
    """
    _formats.append(format)


def unregister(format: Format) -> None:
    """Removes a format that was registered."""
    _formats.remove(format)


def open_reader(location: Location) -> Reader | None:
    """Opens what is at a location; None if no format recognises a checkpoint there. Raises as
    `Format.open`."""
    for format in _formats:
        reader = format.open(location)
        if reader is not None:
            return reader
    return None
