"""file:// : folders of a local file system."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote, urlsplit

from unickpt.errors import InvalidPath
from unickpt.storage import paths, schemes


def spec(url: str) -> dict[str, Any]:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidPath(f"{url!r}: a file URL has three slashes and an absolute path")
    return paths.spec_of(unquote(parts.path))


# No locks of TensorStore's: only the manifest needs one; see `locations.manifest_locked`.
_RESOURCES = {"file_io_locking": {"mode": "none"}}
SCHEME = schemes.Scheme("file", spec, _RESOURCES, paths.LocalLocation)
