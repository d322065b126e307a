"""Parity files: lost and damaged data files are restored bit for bit (docs/parity.md)."""

from unickpt.plugins.parity.saving import Parity

__all__ = ["Parity"]
