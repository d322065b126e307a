"""The paths and URLs that users give, and the location that each names."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from unickpt.errors import InvalidPath, StorageError
from unickpt.storage import local_folders, ocdbt, schemes
from unickpt.storage.local_folders import LOCK_SUFFIX
from unickpt.storage.locations import Location
from unickpt.storage.ocdbt import MANIFEST, RETIRED
from unickpt.storage.regular_files import LocalKvStore, RegularFiles, system_calls
from unickpt.storage.tensorstore_calls import KvStore

_OURS = ("processes", RETIRED, MANIFEST)


@dataclass(frozen=True)
class LocalLocation(Location):
    """A folder in a local file system; its files may be of any kind, and links lead anywhere."""

    is_local = True
    is_remote = False

    @cached_property
    def path(self) -> str:
        """The absolute path; ends with `/`."""
        return str(self.spec["path"])

    def name_for_users(self, name: str) -> str:
        return f"{self}/{name}"

    @property
    def parent(self) -> Location | None:
        is_top = os.path.dirname(self.path.rstrip("/")) in ("", "/")
        return None if is_top else super().parent

    def store(self, context: ts.Context) -> KvStore:
        opened = LocalKvStore.open(dict(self.spec), context)
        opened.files = RegularFiles(self.path)
        return opened

    def exists(self) -> bool:
        return os.path.isdir(self.path)

    def names(self, context: ts.Context) -> set[str]:
        return set(local_folders.names(self.path))

    def folders(self, context: ts.Context) -> list[str]:
        if self.link is not None:  # it may lead anywhere
            return []
        return [e.name for e in local_folders.entries(self.path) if e.is_dir(follow_symlinks=False)]

    def files(self, context: ts.Context) -> list[str]:
        return [
            e.name for e in local_folders.entries(self.path) if e.is_file(follow_symlinks=False)
        ]

    def has_file(self, name: str, context: ts.Context) -> bool:
        return os.path.isfile(os.path.join(self.path, name))

    def remove(self, context: ts.Context) -> None:
        local_folders.remove(self.path)

    def remove_file(self, name: str, context: ts.Context) -> None:
        # Only if no folder between them is a symbolic link.
        top, between = os.path.realpath(self.path), os.path.dirname(name)
        above = os.path.join(top, between) if between else top
        if os.path.realpath(above) == above:
            with system_calls(), suppress(FileNotFoundError):
                os.unlink(os.path.join(self.path, name))

    def regular_files(self) -> RegularFiles:
        return RegularFiles(self.path)

    def foreign_files(self) -> list[str]:
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StorageError(f"{self.path}: cannot be read: {error.strerror}") from error
        return sorted(
            n for n in names if not n.endswith(LOCK_SUFFIX) and n not in _OURS and n[0] != "."
        )

    @property
    def link(self) -> str | None:
        try:
            return os.readlink(self.path.rstrip("/"))
        except OSError:
            return None

    def make(self, *, durable: bool = False) -> None:
        local_folders.make(self.path, durable=durable)

    def sync(self, top: Location, made: int = 1) -> None:
        local_folders.sync(self.path, top.path, made)

    def __str__(self) -> str:
        return self.path.rstrip("/")


def spec_of(path: str, *, or_file: bool = True) -> dict[str, Any]:
    """The JSON of TensorStore's key-value store for a local path, of a folder or of a file.

    Raises:
        InvalidPath: it cannot be that of a folder, or of a file if it may be one.
    """
    absolute = "/" + os.path.abspath(os.path.expanduser(path)).strip("/")
    if "\\" in absolute or f"{LOCK_SUFFIX}/" in f"{absolute}/":
        raise InvalidPath(
            f"{path!r}: TensorStore accepts no '\\' in a path and no name that ends in "
            f"'{LOCK_SUFFIX}'"
        )
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} is not valid Unicode") from None
    existing = absolute
    while not _is_directory(existing, path, or_file=or_file and existing == absolute):
        existing = os.path.dirname(existing)
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}


def _is_directory(existing: str, path: str, *, or_file: bool = False) -> bool:
    """Whether a directory exists; one system call, because another process may remove it."""
    try:
        mode = os.stat(existing).st_mode
        if stat.S_ISDIR(mode) or (or_file and stat.S_ISREG(mode)):
            return True
    except OSError as error:  # other errors show when the path is used
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidPath(f"{path!r}: {error.strerror}; give a shorter one") from None
        if not os.path.islink(existing):
            return False
    where = repr(path) if existing == path else f"{path!r}: {existing!r}"
    raise InvalidPath(f"{where} is not a directory; a checkpoint needs its own directory")


PathLike = str | os.PathLike[str]


def resolve(path: PathLike | Location, *, whole: bool = False, or_file: bool = False) -> Location:
    """Finds the storage that a path or URL names.

    Arguments:
        path: a local path, or a URL with a scheme of `schemes`: file, memory, s3, gs; or the
            location found for one.
        whole: also accept a whole bucket or memory://; a checkpoint needs a folder in it.
        or_file: also accept a file, as other systems' checkpoints may be.

    Raises:
        InvalidPath: for an empty path, an unknown scheme, or a malformed URL.
    """
    if isinstance(path, Location):
        return path
    text = _text(path)
    name, separator, _ = text.partition("://")
    if not separator:
        _check_slashes(text)
        spec = spec_of(text, or_file=or_file)
        _check_spec(spec, text)
        return LocalLocation(Path(spec["path"]).as_uri().rstrip("/") + "/", spec)
    scheme = schemes.find(name)
    if scheme is None:
        raise InvalidPath(
            f"{text!r}: unknown scheme {name!r}; known are {_known_schemes()}{_meant(name)}"
        )
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidPath(f"{text!r} is not a valid URL: {error}") from None
    if parts.query or parts.fragment:
        raise InvalidPath(f"{text!r}: a checkpoint's URL has no '?' or '#'")
    url = text if text.endswith("://") else text.rstrip("/") + "/"
    location = scheme.location(url, scheme.spec(text))
    _check_spec(location.spec, text)
    if location.is_local and not or_file:
        _is_directory(location.path.rstrip("/") or "/", text)
    if not location.spec["path"] and not whole:
        raise InvalidPath(f"{text!r}: add the checkpoint's path, such as {url}run/1")
    return location


def absolute(path: PathLike, *, or_file: bool = False) -> str:
    """A path or URL that names the same storage after the program changes its working directory.

    Arguments, errors: as for `resolve`.
    """
    return str(resolve(path, or_file=or_file))


def _text(path: PathLike) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidPath(
            f"the path is of type {type(path).__name__}; pass the path first, as a str or a Path"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidPath(
            f"{path!r} is not a path; give a local path or a URL ({_known_schemes()})"
        )
    return str.__str__(text)  # of a member of an enumeration of strings, its text


def _check_slashes(text: str) -> None:
    """Refuses a local path that is probably intended as a URL."""
    name, single, path = text.partition(":/")
    if single and schemes.find(name) is not None:
        meant = f"{name}://{'/' if name.lower() == 'file' else ''}{path}"
        raise InvalidPath(f"{text!r}: a URL has two slashes after its scheme: {meant}")


def _check_spec(spec: Mapping[str, Any], text: str) -> None:
    """Checks that TensorStore accepts a location."""
    try:
        ts.KvStore.Spec(dict(spec))
    except ValueError as error:
        raise InvalidPath(f"{text!r}: {error}") from None


def _meant(name: str) -> str:
    """The scheme here for a storage that has another name elsewhere."""
    scheme = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}.get(name.lower())
    return f"; did you mean {scheme}://?" if scheme else ""


def _known_schemes() -> str:
    return ", ".join(f"{name}://" for name in schemes.names())


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    resources = {
        "file_io_sync": fsync,
        "cache_pool": {"total_bytes_limit": 0},
        ocdbt.NODE_CACHE: {"total_bytes_limit": ocdbt.NODE_CACHE_BYTES},
        ocdbt.MANIFESTS: {},
    }
    for provided in schemes.resources():
        resources |= provided() if callable(provided) else provided
    return ts.Context(resources, parent=root_context())


def for_small_objects(context: ts.Context) -> ts.Context:
    """A context like another one, but with more requests at the same time, of small objects."""
    return ts.Context(schemes.small_objects(), parent=context)


def is_durable(context: ts.Context) -> bool:
    """Whether data written with a context is flushed to the disk."""
    return bool(context["file_io_sync"].to_json())


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context
