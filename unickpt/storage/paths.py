"""The paths and URLs that users give, and the location that each names."""

from __future__ import annotations

import os
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from unickpt.errors import InvalidPath
from unickpt.storage import local_locations, schemes
from unickpt.storage.locations import Location

Path = str | os.PathLike[str]


def resolve(path: Path, *, whole: bool = False, or_file: bool = False) -> Location:
    """Finds the storage that a path or URL names.

    Arguments:
        path: a local path, or a URL with a scheme of `schemes`: file, memory, s3, gs.
        whole: also accept a whole bucket or memory://; a checkpoint needs a folder in it.
        or_file: also accept a file, as other systems' checkpoints may be.

    Raises:
        InvalidPath: for an empty path, an unknown scheme, or a malformed URL.
    """
    text = _text(path)
    name, separator, _ = text.partition("://")
    if not separator:
        _check_slashes(text)
        local = local_locations.at_path(text)
        _check(text, local.spec)
        return local if or_file else _folder(local, text)
    scheme = schemes.find(name)
    if scheme is None:
        raise InvalidPath(f"{text!r}: unknown scheme {name!r}; known are {_known()}{_meant(name)}")
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidPath(f"{text!r} is not a valid URL: {error}") from None
    if parts.query or parts.fragment:
        raise InvalidPath(f"{text!r}: a checkpoint's URL has no '?' or '#'")
    url = text if text.endswith("://") else text.rstrip("/") + "/"
    location = scheme.location(url, scheme.spec(text))
    _check(text, location.spec)
    if not location.spec["path"] and not whole:
        raise InvalidPath(f"{text!r}: add the checkpoint's path, such as {url}run/1")
    return location if or_file else _folder(location, text)


def _folder(location: Location, text: str) -> Location:
    location.check_folder(text)
    return location


def _text(path: Path) -> str:
    try:
        text = os.fspath(path)
    except TypeError:
        raise InvalidPath(
            f"the path is of type {type(path).__name__}; pass the path first, as a str or a Path"
        ) from None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidPath(f"{path!r} is not a path; give a local path or a URL ({_known()})")
    return text


def _check_slashes(text: str) -> None:
    """Refuses a local path that was probably meant as a URL."""
    name, single, rest = text.partition(":/")
    if single and schemes.find(name) is not None:
        meant = f"{name}://{'/' if name.lower() == 'file' else ''}{rest}"
        raise InvalidPath(f"{text!r}: a URL has two slashes after its scheme: {meant}")


def _check(text: str, spec: Any) -> None:
    try:
        ts.KvStore.Spec(dict(spec))
    except ValueError as error:
        raise InvalidPath(f"{text!r}: {error}") from None


def _meant(name: str) -> str:
    """Which scheme a storage has here that is called otherwise elsewhere."""
    own = {"gcs": "gs", "s3a": "s3", "s3n": "s3"}.get(name.lower())
    return f"; did you mean {own}://?" if own else ""


def _known() -> str:
    return ", ".join(f"{name}://" for name in schemes.names())
