"""NaN and infinity in a checkpoint, or the first step of a run with any."""

from unickpt.plugins.nonfinite.counting import NonfiniteArray, NonfiniteReport, find_nonfinite

__all__ = ["NonfiniteArray", "NonfiniteReport", "find_nonfinite"]
