"""TensorStore contexts, which all databases of one save or one opened checkpoint share."""

from __future__ import annotations

from functools import cache

import tensorstore as ts

from unickpt.storage import ocdbt, schemes


def context(*, fsync: bool = True) -> ts.Context:
    """A TensorStore context for one save or one opened checkpoint; all its databases share it."""
    return ts.Context(
        {
            "file_io_sync": fsync,
            "cache_pool": {"total_bytes_limit": 0},
            ocdbt.NODE_CACHE: {"total_bytes_limit": ocdbt.NODE_CACHE_BYTES},
            ocdbt.MANIFESTS: {},
            **schemes.resources(),
        },
        parent=root_context(),
    )


def is_durable(context: ts.Context) -> bool:
    """Whether what is written with a context is flushed to the disk."""
    return bool(context["file_io_sync"].to_json())


@cache
def root_context() -> ts.Context:
    """The parent of all contexts; TensorStore keeps memory:// in it."""
    context = ts.Context({"memory_key_value_store": {}})
    context["memory_key_value_store"]
    return context
