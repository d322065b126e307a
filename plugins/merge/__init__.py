"""Merges several checkpoints into one (docs/merge.md)."""

from unickpt.plugins.merge.merging import merge
from unickpt.plugins.merge.sources import preview

__all__ = ["merge", "preview"]
