"""Saves that write only what changed since an earlier checkpoint (docs/reuse.md)."""

from unickpt.plugins.incremental.reference_policy import Incremental

__all__ = ["Incremental"]
