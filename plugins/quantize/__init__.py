"""Arrays of floats stored with fewer bits than they have (docs/quantize.md)."""

from unickpt.plugins.quantize.codec import CODEC, Quantize
from unickpt.plugins.quantize.restores import Restores

__all__ = ["CODEC", "Quantize", "Restores"]
