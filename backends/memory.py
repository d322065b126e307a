"""memory:// : checkpoints in this process's memory, for tests and notebooks."""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorstore as ts

# Where a context keeps copies of manifests; separate from memory://, freed with the context.
MANIFESTS = "memory_key_value_store#manifests"


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context


def spec(url: str) -> dict[str, Any]:
    path = url.partition("://")[2].strip("/")
    return {"driver": "memory", "path": path and path + "/"}


def manifest(name: str) -> dict[str, Any]:
    """A place in a context for one manifest."""
    return {"driver": "memory", "memory_key_value_store": MANIFESTS, "path": name}
