"""The registry of storage schemes: what the first part of a URL, such as s3:// , stands for.

To add a storage that TensorStore has a driver for, register a scheme before its first use:

    def spec(url: str) -> dict[str, Any]:
        bucket, path = schemes.bucket_and_path(url)
        return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": "https://minio:9000"}

    schemes.register(schemes.Scheme("minio", spec))
    unickpt.save("minio://bucket/run/1", state)

The schemes of unickpt itself, one module each in `unickpt.backends`, register themselves likewise.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt.errors import InvalidPath
from unickpt.storage.locations import Location

_BUILT_IN = ("file", "memory", "s3", "gs")
_registered: dict[str, Scheme] = {}


@dataclass(frozen=True)
class Scheme:
    """A storage scheme.

    Arguments:
        name: what stands before `://`, in lower case.
        spec: URL -> the JSON of TensorStore's key-value store; its `path` ends with `/`, or is
            empty for a whole bucket. Raises InvalidPath for a malformed URL.
        resources: what these stores share within a TensorStore context, by the names that `spec`
            refers to.
        location: the class of its locations; `LocalLocation` if its driver is `file`.
    """

    name: str
    spec: Callable[[str], dict[str, Any]]
    resources: Mapping[str, Any] = field(default_factory=dict)
    location: type[Location] = Location


def register(scheme: Scheme) -> None:
    """Makes a scheme known to this process.

    Raises:
        ValueError: its name is not that of a scheme, or is taken.
    """
    if not re.fullmatch(r"[a-z][a-z0-9+.-]*", scheme.name):
        raise ValueError(f"{scheme.name!r} is not the name of a URL scheme, such as 's3'")
    if _registered.setdefault(scheme.name, scheme) != scheme:
        raise ValueError(f"the storage scheme {scheme.name!r} is already registered")
    resources.cache_clear()


def find(name: str) -> Scheme | None:
    """The scheme of a name, in upper or lower case; None if there is none."""
    return _schemes().get(name.lower())


def names() -> list[str]:
    """The names of all schemes; those of unickpt first."""
    others = (name for name in _schemes() if name not in _BUILT_IN)
    return [*_BUILT_IN, *others]


@cache  # every save and every load asks
def resources() -> Mapping[str, Any]:
    """The resources of all schemes."""
    return {name: each for scheme in _schemes().values() for name, each in scheme.resources.items()}


def _schemes() -> Mapping[str, Scheme]:
    for name in _BUILT_IN:
        if name not in _registered:
            importlib.import_module(f"unickpt.backends.{name}")
    return _registered


def bucket_and_path(url: str) -> tuple[str, str]:
    """Splits `scheme://bucket/path`; the path ends with a slash, or is empty.

    Raises:
        InvalidPath: it has no bucket, or an unusable path.
    """
    parts = urlsplit(url)
    path = unquote(parts.path).strip("/")
    if not parts.netloc:
        raise InvalidPath(
            f"{url!r}: give a bucket and a path, such as {parts.scheme}://bucket/run/1"
        )
    if path and any(part in ("", ".", "..") for part in path.split("/")):
        raise InvalidPath(f"{url!r}: the path contains an empty name, '.' or '..'")
    return parts.netloc, path and path + "/"
