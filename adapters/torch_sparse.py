"""torch's sparse tensors (COO, CSR, CSC, BSR, BSC), stored as their indices and values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from unickpt.adapters.torch_distributed import TensorPart
from unickpt.adapters.torch_subclasses import check_context
from unickpt.errors import LoadMismatch
from unickpt.trees.tree import Expansion, Node, component, join

_COMPRESSED = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}


def expand_sparse(obj: torch.Tensor, name: str, stored: Mapping[str, Any] | None) -> Expansion:
    """A sparse tensor as the container of its parts; see `Adapter.expand`.

    A load fills new parts, of the stored sizes: how many elements are specified is data.
    """
    parts = _parts(obj)
    layout = str(obj.layout).removeprefix("torch.")
    shape, dense_dim = list(obj.shape), obj.dense_dim()
    context: dict[str, Any] = {"layout": layout, "shape": shape, "dense_dim": dense_dim}
    if obj.layout is torch.sparse_coo:
        context["coalesced"] = obj.is_coalesced()
    if stored is not None:
        names = {key: join(name, component(key)) for key in parts}
        parts = {key: _room(part, stored.get(names[key])) for key, part in parts.items()}

    def rebuild(loaded_parts: list[Any]) -> Any:
        *filled, loaded_context = loaded_parts
        new = _made(obj, [part.as_subclass(torch.Tensor) for part in filled], loaded_context, name)
        if obj.is_meta:
            if isinstance(obj, torch.nn.Parameter):
                return torch.nn.Parameter(new, requires_grad=obj.requires_grad)
            return new.requires_grad_(obj.requires_grad)
        with torch.no_grad():
            if obj.layout is not torch.sparse_coo:
                obj.resize_as_sparse_(new)
            obj.copy_(new)
        return obj

    def check(node: Node, value: Callable[[str], Any]) -> None:
        requested = {
            join(name, f"context/{key}"): context[key] for key in _OF_DATA & context.keys()
        }
        check_context(
            node, lambda key: requested.get(key, value(key)), name, f"the {layout} tensor"
        )

    children = (*map(TensorPart.wrap, parts.values()), context)
    return Expansion("object", (*parts, "context"), children, rebuild, layout, check)


_OF_DATA = {"coalesced"}


def _parts(obj: torch.Tensor) -> dict[str, torch.Tensor]:
    if obj.layout is torch.sparse_coo:
        with torch.no_grad():
            plain = obj.detach()
            return {"indices": plain._indices(), "values": plain._values()}
    names = (*_COMPRESSED[obj.layout], "values")
    plain = obj.detach()
    return {name: getattr(plain, name)() for name in names}


def _room(part: torch.Tensor, entry: Any) -> torch.Tensor:
    """Memory for a part of the stored shape, or of its own if none is stored."""
    shape = tuple(getattr(entry, "shape", part.shape))
    device = torch.device("cpu") if part.is_meta else part.device
    return torch.empty(shape, dtype=part.dtype, device=device)


def _made(
    obj: torch.Tensor, parts: list[torch.Tensor], context: Mapping[str, Any], name: str
) -> torch.Tensor:
    """A sparse tensor of parts that were loaded.

    Raises:
        LoadMismatch: they make none.
    """
    checked: Any = {"check_invariants": True}
    try:
        if obj.layout is torch.sparse_coo:
            indices, values = parts
            flag = bool(context["coalesced"]) or None
            return torch.sparse_coo_tensor(indices, values, obj.shape, is_coalesced=flag, **checked)
        compressed, plain, values = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, obj.shape, layout=obj.layout, **checked
        )
    except RuntimeError as error:
        raise LoadMismatch(
            f"{name!r}: the stored value is no {str(obj.layout).removeprefix('torch.')} tensor of "
            f"shape {list(obj.shape)}: {error}"
        ) from None
