"""torch 2.13: tests of torch.distributed.checkpoint of PyTorch, on CPUs with gloo.

torch's own functions and planners, with `FileSystemWriter` and `FileSystemReader` of
unickpt.integrations.dcp.
"""

from __future__ import annotations

from suites._dcp import FILES, OVERWRITE, prepare, redirect_classes

__all__ = ["FILES", "REASONS", "prepare", "redirect"]

REASONS: dict[str, str] = OVERWRITE


def redirect() -> None:
    redirect_classes()
