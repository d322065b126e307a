"""The registry of storage schemes: the meaning of the first part of a URL, such as s3://.

To add a storage that TensorStore has a driver for, register a scheme before its first use:

    def spec(url: str) -> dict[str, Any]:
        bucket, path = schemes.bucket_and_path(url)
        return {"driver": "s3", "bucket": bucket, "path": path, "endpoint": "https://minio:9000"}

    schemes.register(schemes.Scheme("minio", spec, s3.resources))  # of unickpt.backends
    unickpt.save("minio://bucket/run/1", state)

A package brings a scheme for all programs by an entry point in the group `unickpt.schemes`, which
leads to a `Scheme`, as unickpt's own do: see `unickpt.doors`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt import doors
from unickpt.errors import InvalidPath, PluginError
from unickpt.storage import tensorstore_calls
from unickpt.storage.locations import Location

Resources = Mapping[str, Any] | Callable[[], Mapping[str, Any]]
_registered: dict[str, Scheme] = {}
_used = {"file"}  # the schemes of the locations of this process


@dataclass(frozen=True)
class Scheme:
    """A storage scheme.

    Arguments:
        name: the part before `://`, in lower case.
        spec: URL -> the JSON of TensorStore's key-value store; its `path` ends with `/`, or is
            empty for a whole bucket. Raises InvalidPath for a malformed URL.
        resources: the resources that these stores share within a TensorStore context, by the names
            that `spec` references; or a function that returns them, called for each new context.
        location: the class of its locations; `LocalLocation` if its driver is `file`.
        credentials: names, for messages about refused requests, their credentials.
        is_internal: whether only unickpt makes its URLs, so that `names` does not list it.
        small_objects: what replaces some of `resources` where many small objects are read at the
            same time.
    """

    name: str
    spec: Callable[[str], dict[str, Any]]
    resources: Resources = field(default_factory=dict)
    location: type[Location] = Location
    credentials: Callable[[], str] | None = None
    is_internal: bool = False
    small_objects: Mapping[str, Any] = field(default_factory=dict)


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
    scheme = _find(name.lower())
    if scheme is not None and scheme.name not in _used:
        _used.add(scheme.name)
        resources.cache_clear()
    return scheme


def names() -> list[str]:
    """The names of all schemes; those of unickpt first."""
    registered = [name for name, scheme in _registered.items() if not scheme.is_internal]
    return list(
        dict.fromkeys([*doors.ours("schemes"), *registered, *doors.other_packages("schemes")])
    )


@cache  # called by every save and every load
def resources() -> Sequence[Resources]:
    """The resources of the schemes that this process uses."""
    return [scheme.resources for scheme in _used_schemes()]


def small_objects() -> dict[str, Any]:
    """The resources for many small objects of all schemes that this process uses."""
    merged = dict[str, Any]()
    for scheme in _used_schemes():
        merged |= scheme.small_objects
    return merged


def _credentials() -> str:
    """The credentials that the schemes of this process use, for messages."""
    texts = (scheme.credentials() for scheme in _used_schemes() if scheme.credentials)
    return "; ".join(texts)


tensorstore_calls.describe_credentials(_credentials)


def _used_schemes() -> list[Scheme]:
    return [scheme for name in sorted(_used) if (scheme := _find(name)) is not None]


def _find(name: str) -> Scheme | None:
    """The scheme of a name; imports its module on first use, if it comes from an entry point."""
    if name not in _registered:
        door = doors.find("schemes", name)
        if door is None:
            return None
        scheme = door.open()
        if not isinstance(scheme, Scheme) or scheme.name != name:
            raise PluginError(f"{door} leads to {scheme!r}, not to a Scheme of its name")
        register(scheme)
    return _registered[name]


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
    if any(ord(character) < ord(" ") for character in path):
        raise InvalidPath(f"{url!r}: the path contains a control character, as a line's end")
    return parts.netloc, path and path + "/"
