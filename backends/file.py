"""Local files: paths and file:// URLs, and operations on folders."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt.errors import InvalidPath
from unickpt.storage.local_folders import LOCK_SUFFIX, is_directory


def spec_from_path(path: str) -> dict[str, Any]:
    absolute = "/" + os.path.abspath(os.path.expanduser(path)).strip("/")
    parts = absolute.split("/")
    if "\\" in absolute or any(part.endswith(LOCK_SUFFIX) for part in parts):
        raise InvalidPath(
            f"{path!r}: TensorStore accepts no '\\' in a path and no name that ends in "
            f"'{LOCK_SUFFIX}'"
        )
    try:
        absolute.encode()
    except UnicodeEncodeError:
        raise InvalidPath(f"{path!r} is not valid Unicode") from None
    existing = absolute
    while not is_directory(existing, path):
        existing = os.path.dirname(existing)
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}


def spec_from_url(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidPath(f"{url!r}: a file URL has three slashes and an absolute path")
    return spec_from_path(unquote(parts.path))


def url(path: str) -> str:
    return Path(path).as_uri().rstrip("/") + "/"
