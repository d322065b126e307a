"""The registry of other systems' formats; each is tried on a location."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Protocol, cast

import xxhash

from unickpt import doors, errors
from unickpt.format.files import Files
from unickpt.format.index import REPLACED
from unickpt.format.reader_protocol import Reader
from unickpt.quoting import first_few, quoted
from unickpt.storage import paths
from unickpt.storage.errors import Failed, reading, reading_failed
from unickpt.storage.locations import Location, is_object
from unickpt.storage.ocdbt import MANIFEST


class Format(Protocol):
    """A format of checkpoints."""

    HINTS: Collection[str]
    """The names of the hints that it takes: facts that its files do not contain."""

    def open(self, files: Files, hints: Mapping[str, Any]) -> Reader | None:
        """Opens the checkpoint that the files form; None if there is none of this format.

        Arguments:
            files: the files at the location, or the single file; listed once for all formats.
            hints: the user's facts about the checkpoint; empty, or some of `HINTS`.

        Raises:
            CheckpointCorrupt: there is one, and it is damaged.
            StorageError: the storage failed.
        """


class SeveralCheckpoints(errors.UnsupportedFormat):
    """A location holds several checkpoints, and none has priority: `paths`, by name."""

    paths: Mapping[str, str] = {}


_registered: list[Format] = []


def register(format: Format) -> None:
    """Adds a format, which is tried after unickpt's own and before those of other systems. A
    package brings one for all programs by an entry point: see `unickpt.doors`.

    Example:
        >>> class Npy:
        ...     HINTS = ()
        ...     def open(self, files, hints): ...
        >>> npy = Npy()
        >>> register(npy)
        >>> unregister(npy)
    """
    _registered.append(format)


def unregister(format: Format) -> None:
    """Removes a format that was registered."""
    _registered.remove(format)


def format_named(name: str) -> Any:
    """The target of a format's door, of unickpt or of another package. For a trainer's integration,
    which stores the content of the trainer's own files and needs the format's other functions.

    Arguments:
        name: of its entry point, such as "deepspeed".

    Raises:
        PluginError: there is none, or it cannot be imported.

    Example:
        >>> sorted(format_named("npz").HINTS)
        []
    """
    return doors.need("formats", name)


def open_foreign(location: Location, hints: Mapping[str, Any]) -> Reader | None:
    """Opens another system's checkpoint at a location; None if no format recognises it.

    Raises:
        HintError: the format there does not take one of the hints.
        UnsupportedFormat: it is a file of an unknown format.
        UnickptError: as `Format.open`.
    """
    files = Files(location)
    try:
        _ = files.here  # listed once for all of them
        reader = _first(files, hints)
        if reader is None and not location.is_local and is_object(location, paths.context()):
            return open_file(location, hints)
        if reader is None and (refusal := _refusal(files)) is not None:
            raise refusal
    except Failed as error:
        if error.status == "NOT_FOUND":  # such as a bucket that does not exist
            return None
        raise reading_failed(error, str(location)) from error
    return reader


def check_alone(reader: Reader, marker: str) -> None:
    """Checks that no other system has saved into the folder of a checkpoint of ours.

    Arguments:
        reader: our checkpoint.
        marker: a file in its folder that may be of another one.

    Raises:
        HintError: one has, so that nothing says which checkpoint is meant.
    """
    if _has_replaced(reader, marker):
        return
    try:
        other = _first(Files(reader.location), {})
    except (errors.UnickptError, Failed):
        return  # not a checkpoint, or not a complete one
    if other is not None:
        raise errors.HintError(
            f"{reader.location} holds two checkpoints: one of the format {reader.format!r} "
            f"({MANIFEST}), and one of the format {other.format!r} ({marker}). Say which one "
            f'you mean: unickpt.open(path, hints={{"format": {other.format!r}}}), or '
            f"--hint format={other.format} on the command line; or remove the files of the other"
        )


def _has_replaced(reader: Reader, marker: str) -> bool:
    """Whether our save replaced a marker's checkpoint, and was killed before removing it."""
    replaced = reader.index.metadata.get(REPLACED)
    if not isinstance(replaced, Mapping) or marker not in replaced:
        return False
    try:
        with open(os.path.join(str(reader.location), marker), "rb") as file:
            return bool(replaced[marker] == xxhash.xxh3_64_hexdigest(file.read()))
    except OSError:
        return False


def open_file(location: Location, hints: Mapping[str, Any]) -> Reader:
    """Opens a single file, whose content shows its format. Raises as `open_foreign`."""
    files = Files(location, is_file=True)
    with reading(location):
        reader = _first(files, hints)
        if reader is not None:
            return reader
        refusal = _refusal(files)
        if refusal is not None:
            raise refusal
        head = files.head(files.here[0])
    begins = f"it begins with {head[:16]!r}" if head else "it is empty"
    raise errors.UnsupportedFormat(f"{location} is a file, and of no format that is read: {begins}")


def _first(files: Files, hints: Mapping[str, Any]) -> Reader | None:
    """The reader of the first format that recognises a checkpoint in files.

    Raises:
        PluginError: none recognises the files, and another package's cannot be imported.
    """
    failed = list[errors.PluginError]()
    for format in _formats(files, failed):
        accepted = {name: hints[name] for name in format.HINTS if name in hints}
        try:
            reader = format.open(files, accepted)
        except SeveralCheckpoints:
            raise
        except (errors.CheckpointCorrupt, errors.UnsupportedFormat) as error:
            refusal = _refusal(files, error)
            if refusal is None:
                raise
            raise refusal from error
        if reader is not None:
            check_hints(reader, hints, format.HINTS)
            return reader
    if failed and files.here:
        raise failed[0]
    return None


def _refusal(
    files: Files, error: errors.UnickptError | None = None
) -> errors.UnsupportedFormat | None:
    """The explanations of formats for files that none reads; of other packages only if there are
    files, and no format claimed them.

    Arguments:
        files: at the location.
        error: of the format that claimed them.

    Raises:
        Failed: the storage failed.
    """
    package_doors = doors.other_packages("refusals") if error is None and files.here else {}
    for door in (*doors.ours("refusals").values(), *package_doors.values()):
        refusal = cast("errors.UnsupportedFormat | None", door.open().refusal(files, error))
        if refusal is not None:
            return refusal
    return None


def check_hints(reader: Reader, hints: Mapping[str, Any], allowed: Collection[str] = ()) -> None:
    """Checks that a format takes all hints. Raises HintError."""
    unknown = [name for name in hints if name not in allowed]
    if unknown:
        import difflib  # here, so that importing unickpt stays fast

        takes = f"the hints {', '.join(allowed)}" if allowed else "no hints"
        near = difflib.get_close_matches(unknown[0], allowed, 1)
        raise errors.HintError(
            f"{reader.location} is of the format {reader.format!r}, which takes {takes}; leave out "
            f"{first_few(list(map(quoted, unknown)))}"
            f"{f' (did you mean {near[0]!r}?)' if near else ''}"
        )


def _formats(files: Files, failed: list[errors.PluginError]) -> Iterator[Format]:
    """Formats of other systems; imports a module only if no earlier format recognises the files.

    Arguments:
        files: if not even a folder exists, no other package is tried.
        failed: gets the errors of those that cannot be imported.
    """
    yield from _registered
    for door in doors.ours("formats").values():
        yield cast(Format, door.open())
    if not (files.here or files.location.exists()):
        return
    for door in doors.other_packages("formats").values():
        try:
            yield cast(Format, door.open())
        except errors.PluginError as error:
            failed.append(error)
