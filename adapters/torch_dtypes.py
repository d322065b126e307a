"""torch's dtypes and their NumPy forms."""

from __future__ import annotations

import torch

from unickpt.arrays import dtypes

TO_NUMPY: dict[torch.dtype, dtypes.DType] = {
    getattr(torch, name): dtypes.from_name(name)
    for name in dtypes.supported()
    if isinstance(getattr(torch, name, None), torch.dtype)
    and not name.startswith(("int4", "int2", "float4"))  # shells without operations
}
