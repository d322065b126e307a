"""Why a torch tensor cannot be stored, and what to store instead."""

from __future__ import annotations

from typing import Any

import torch

from unickpt.adapters.torch_distributed import TO_NUMPY


def refusal(leaf: Any) -> str:
    """What to say of a tensor of an unknown kind."""
    if torch.nn.parameter.is_lazy(leaf):
        return "an uninitialized (lazy) parameter has no shape; run the module once"
    if leaf.is_nested or leaf.layout != torch.strided:
        kind = "nested" if leaf.is_nested else str(leaf.layout).removeprefix("torch.")
        return f"a {kind} tensor cannot be stored; save the dense tensors it is made of"
    if leaf.is_quantized:
        return (
            f"a quantized tensor ({leaf.dtype}) cannot be stored; save its int_repr(), scale and "
            "zero point"
        )
    names = ", ".join(str(d).removeprefix("torch.") for d in TO_NUMPY)
    return f"dtype {leaf.dtype} has no framework-neutral form; supported are {names}"
