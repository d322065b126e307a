"""By what it is known that a tensor is the same as in the save before, and unchanged."""

from __future__ import annotations

from typing import Any

import torch

from unickpt.frameworks.protocol import Token

_SAMPLED = 64
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def token(leaf: Any) -> Token | None:
    """See `Adapter.token`."""
    if type(leaf) not in _PLAIN or leaf.is_inference():
        return None  # steps on DTensors are not counted
    storage = leaf.untyped_storage()
    memory = storage.data_ptr(), storage.nbytes()
    view = leaf.dtype, leaf.shape, leaf.stride(), leaf.storage_offset()
    return Token(storage, leaf._version, memory, view, _few_elements(leaf))


def _few_elements(tensor: torch.Tensor) -> bytes:
    """A sample, because changes through `.data` and NumPy are not counted; none of a device, which
    would have to be waited for."""
    if not tensor.is_cpu:
        return b""
    each = max(1, round(_SAMPLED ** (1 / max(1, tensor.ndim))))
    grid = tuple(slice(None, None, max(1, n // each)) for n in tensor.shape)
    few = tensor.detach().resolve_conj().resolve_neg()[grid].contiguous().reshape(-1)
    return bytes(few.view(torch.uint8).numpy().tobytes())
