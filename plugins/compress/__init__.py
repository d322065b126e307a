"""`SaveOptions(compression="auto")`: arrays are compressed if that pays."""

from unickpt.plugins.compress.auto import Auto

__all__ = ["Auto"]
