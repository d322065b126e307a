"""TensorStore contexts, which all databases of one save or one opened checkpoint share."""

from __future__ import annotations

from functools import cache
from typing import Any

import tensorstore as ts

from unickpt.backends import gcs, s3
from unickpt.storage import ocdbt


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    return ts.Context(
        {
            "file_io_sync": fsync,
            "file_io_locking": {"mode": "none"},  # only manifests are: `local_locks.locked`
            "cache_pool": {"total_bytes_limit": 0},
            ocdbt.NODE_CACHE: {"total_bytes_limit": ocdbt.NODE_CACHE_BYTES},
            MANIFESTS: {},
            **s3.CREDENTIALS,
            "gcs_request_retries": gcs.retries(),
            "s3_request_retries": s3.retries(),
        },
        parent=root_context(),
    )


# Where a context keeps copies of manifests; separate from memory://, freed with the context.
MANIFESTS = "memory_key_value_store#manifests"


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context


def manifest(name: str) -> dict[str, Any]:
    """A place in a context for one manifest."""
    return {"driver": "memory", "memory_key_value_store": MANIFESTS, "path": name}
