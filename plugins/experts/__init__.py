"""Saves that write only some experts of a mixture of experts at a time (docs/experts.md)."""

from unickpt.plugins.experts.experts import Experts

__all__ = ["Experts"]
