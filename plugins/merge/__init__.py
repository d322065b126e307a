"""One checkpoint made of several (docs/merge.md)."""

from unickpt.plugins.merge.merging import merge
from unickpt.plugins.merge.sources import preview

__all__ = ["merge", "preview"]
