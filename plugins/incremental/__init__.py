"""Saves that write only what changed since an earlier checkpoint (docs/reuse.md)."""

from unickpt.plugins.incremental.policy import Incremental

__all__ = ["Incremental"]
