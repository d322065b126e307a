"""torchvision without its operators: PyPI's wheel is for another build of torch, and what is
wanted of it here is only that it imports.
"""

from __future__ import annotations

import functools
from typing import Any

OPERATORS = (
    "nms", "qnms", "roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d",
    "_roi_align_backward", "_roi_pool_backward", "_ps_roi_align_backward", "_ps_roi_pool_backward",
    "_deform_conv2d_backward",
)  # fmt: skip
"""Of torchvision, whose Python asks for them when it is imported."""


@functools.cache
def defined() -> Any:
    """Defines the operators, once; call it before anything imports torchvision."""
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for each in OPERATORS:
        library.define(f"{each}(Tensor x) -> Tensor")
    return library  # they are gone when it is
