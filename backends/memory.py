"""memory:// : checkpoints in this process's memory, for tests and notebooks."""

from __future__ import annotations

from typing import Any

from unickpt.storage import schemes


def spec(url: str) -> dict[str, Any]:
    path = url.partition("://")[2].strip("/")
    return {"driver": "memory", "path": path and path + "/"}


SCHEME = schemes.Scheme("memory", spec)
