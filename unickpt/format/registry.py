"""The registry of readable formats: what is at a location is asked of each, unickpt's own first."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Protocol, cast

from unickpt.format import ocdbt_reader
from unickpt.format.files import Files
from unickpt.format.reader import Reader
from unickpt.storage.errors import Failed, reading_failed
from unickpt.storage.locations import Location


class Format(Protocol):
    """A format of checkpoints."""

    def open(self, files: Files) -> Reader | None:
        """Opens the checkpoint that some files are; None if there is none of this format.

        Arguments:
            files: those at the location; listed once for all formats.

        Raises:
            CheckpointCorrupt: there is one, and it is damaged.
            StorageError: the storage failed.
        """


# Modules of `unickpt.backends`; a format comes before those whose files it uses.
_BUILT_IN = ("dcp", "safetensors", "torch_files", "npz")
_registered: list[Format] = []


def register(format: Format) -> None:
    """Adds a format, which is asked after unickpt's own and before those of other systems.

    Example:
        >>> class Npy:
        ...     def open(self, files): ...
        >>> npy = Npy()
        >>> register(npy)
        >>> unregister(npy)
    """
    _registered.append(format)


def unregister(format: Format) -> None:
    """Removes a format that was registered."""
    _registered.remove(format)


def open_reader(location: Location) -> Reader | None:
    """Opens what is at a location; None if no format recognises a checkpoint there. Raises as
    `Format.open`."""
    own = ocdbt_reader.open(location)
    if own is not None:
        return own
    files = Files(location)
    try:
        _ = files.here  # listed once for all of them
    except Failed as error:
        if error.status == "NOT_FOUND":  # such as a bucket that does not exist
            return None
        raise reading_failed(error, str(location)) from error
    for format in _formats():
        reader = format.open(files)
        if reader is not None:
            return reader
    return None


def _formats() -> Iterator[Format]:
    """Formats of other systems; a module is imported only if those before it know nothing."""
    yield from _registered
    for name in _BUILT_IN:
        yield cast(Format, importlib.import_module(f"unickpt.backends.{name}"))
