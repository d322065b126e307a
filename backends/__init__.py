"""Where bytes live: a path or URL -> the TensorStore key-value store that holds a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import tensorstore as ts

from unickpt.backends import file, gcs, memory, ocdbt, s3
from unickpt.errors import InvalidPath

Path = str | os.PathLike[str]

_SCHEMES: Mapping[str, Callable[[str], dict[str, Any]]] = {
    "file": file.spec_from_url,
    "memory": memory.spec,
    "s3": s3.spec,
    "gs": gcs.spec,
}


@dataclass(frozen=True)
class Location:
    """A folder in some storage.

    Arguments:
        url: how a person writes it; ends with `/`.
        spec: the JSON of TensorStore's key-value store for it; its `path` ends with `/`.
    """

    url: str
    spec: Mapping[str, Any]

    def child(self, relative: str) -> Location:
        """A folder below this one; `relative` needs no escaping and has no leading slash."""
        tail = relative.strip("/") + "/"
        return Location(self.url + tail, {**self.spec, "path": self.spec["path"] + tail})

    @property
    def is_local(self) -> bool:
        return bool(self.spec["driver"] == "file")

    @property
    def is_remote(self) -> bool:
        """Whether each request crosses a network, so that many should be in flight."""
        return self.spec["driver"] not in ("file", "memory")

    def store(self, context: ts.Context) -> ts.KvStore:
        """The plain key-value store of this folder."""
        return ts.KvStore.open(dict(self.spec), context=context).result()

    def database(self, context: ts.Context) -> ts.KvStore:
        """The OCDBT database in this folder."""
        return ts.KvStore.open(ocdbt.spec(self.spec), context=context).result()

    def array_spec(self, prefix: str) -> dict[str, Any]:
        """The key-value store of one array inside this folder's database."""
        return {**ocdbt.spec(self.spec), "path": prefix + "/" if prefix else ""}

    def foreign_files(self) -> list[str]:
        """Names in this folder that no checkpoint puts there; only local folders are looked at."""
        return file.foreign(self.spec["path"]) if self.is_local else []

    def remove_empty_folders(self) -> None:
        """Removes the empty folders below this one; object stores have none."""
        if self.is_local:
            file.remove_empty_folders(self.spec["path"])

    def __str__(self) -> str:
        return str(self.spec["path"]).rstrip("/") if self.is_local else self.url.rstrip("/")


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    return ts.Context(
        {
            "file_io_sync": fsync,
            "file_io_mode": {"mode": "memmap"},
            "cache_pool": {"total_bytes_limit": 0},
        },
        parent=memory.root_context(),
    )


def resolve(path: Path) -> Location:
    """Finds the storage that a path or URL names.

    Arguments:
        path: a local path, or a URL with the scheme file, memory, s3 or gs.

    Raises:
        InvalidPath: for an empty path, an unknown scheme, or a malformed URL.
    """
    text = os.fspath(path)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidPath(f"{path!r} is no path; give a local path or a URL ({_known()})")
    scheme, separator, _ = text.partition("://")
    if not separator:
        spec = file.spec_from_path(text)
        return Location(file.url(spec["path"]), spec)
    make = _SCHEMES.get(scheme.lower())
    if make is None:
        raise InvalidPath(f"{text!r}: unknown scheme {scheme!r}; known are {_known()}")
    parts = urlsplit(text)
    if parts.query or parts.fragment:
        raise InvalidPath(f"{text!r}: a checkpoint's URL has no '?' or '#'")
    return Location(text.rstrip("/") + "/", make(text))


def _known() -> str:
    return ", ".join(f"{scheme}://" for scheme in _SCHEMES)
