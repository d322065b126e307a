"""Local files: paths and file:// URLs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt.errors import InvalidPath

_OURS = ("processes", "d", "manifest.ocdbt")


def spec_from_path(path: str) -> dict[str, Any]:
    absolute = os.path.abspath(os.path.expanduser(path))
    if os.path.exists(absolute) and not os.path.isdir(absolute):
        raise InvalidPath(f"{path!r} is a file; a checkpoint is a directory")
    return {"driver": "file", "path": absolute.rstrip("/") + "/"}


def spec_from_url(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidPath(f"{url!r}: a file URL has three slashes and an absolute path")
    return spec_from_path(unquote(parts.path))


def url(path: str) -> str:
    return Path(path).as_uri().rstrip("/") + "/"


def foreign(path: str) -> list[str]:
    try:
        names = os.listdir(path)
    except FileNotFoundError:
        return []
    return sorted(n for n in names if not n.startswith(_OURS))


def remove_empty_folders(path: str) -> None:
    for folder, _, _ in os.walk(path, topdown=False):
        with suppress(OSError):  # not empty
            os.rmdir(folder)
