"""torch 2.13: tests of torch.distributed.checkpoint of PyTorch, on CPUs with gloo.

`save`, `load`, `async_save`, `save_state_dict`, `load_state_dict`, `FileSystemWriter` and
`FileSystemReader` are those of unickpt.integrations.dcp, as if it were imported instead.
"""

from __future__ import annotations

from suites._dcp import FILES, prepare, redirect_classes, redirect_functions

__all__ = ["FILES", "REASONS", "prepare", "redirect"]

REASONS: dict[str, str] = {}


def redirect() -> None:
    redirect_classes()
    redirect_functions()
