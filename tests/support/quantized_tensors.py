"""Tensors that consist of tensors, of our own: as TransformerEngine's, which need CUDA."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

import torch

aten = torch.ops.aten


class Kind(enum.Enum):
    """An enumeration of neither numbers nor texts, as TransformerEngine's `DType`."""

    E4M3 = (4, 3)
    E5M2 = (5, 2)


@dataclass(frozen=True)
class Recipe:
    """What a quantizer is to do."""

    block: int
    amax: float = 448.0


class Float8(torch.Tensor):
    """Bytes, and the inverse scale of each block of rows, or one of all.

    Arguments:
        data: uint8 [rows, columns].
        scale_inv: float32 [rows / block, 1], or [] of all.
        kind: what the bytes are.
        recipe: how they were made.
        dtype: what it looks like.
    """

    def __new__(
        cls,
        data: torch.Tensor,
        scale_inv: torch.Tensor,
        kind: Kind = Kind.E4M3,
        recipe: Any = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> Float8:
        make: Any = torch.Tensor
        made: Float8 = make._make_wrapper_subclass(cls, data.shape, dtype=dtype, device=data.device)
        made._data, made._scale_inv = data, scale_inv
        made._kind, made._recipe = kind, recipe
        return made

    _data: torch.Tensor
    _scale_inv: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, Any]]:
        return ["_data", "_scale_inv"], {"fp8_dtype": self._kind, "recipe": self._recipe}

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: dict[str, Any], size: Any, stride: Any
    ) -> Float8:
        return cls(inner["_data"], inner["_scale_inv"], context["fp8_dtype"], context["recipe"])

    def like(self, data: torch.Tensor, scale_inv: torch.Tensor) -> Float8:
        """Another one that was made in the same way."""
        return type(self)(data, scale_inv, self._kind, self._recipe, self.dtype)

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        self, *rest = arguments
        if function is aten.copy_.default:
            (other,) = rest
            self._data.copy_(other._data)
            self._scale_inv.copy_(other._scale_inv)
            return self
        if function in (aten.detach.default, aten.alias.default, aten.clone.default):
            return self.like(function(self._data), function(self._scale_inv))
        if function is aten.view.default and tuple(rest[0]) == tuple(self.shape):
            return self.like(self._data, self._scale_inv)
        if function is aten._to_copy.default:
            there = {"device": (options or {}).get("device")}
            return self.like(self._data.to(**there), self._scale_inv.to(**there))
        if function is aten.slice.Tensor:
            return self._sliced(*rest)
        raise NotImplementedError(f"{function} of {cls.__name__}")

    def _sliced(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Float8:
        stop = self.shape[dim] if stop is None else min(stop, self.shape[dim])
        data, scales = aten.slice(self._data, dim, start, stop), self._scale_inv
        if dim == 0 and scales.ndim:
            block = self.shape[0] // scales.shape[0]
            if start % block or stop % block:
                raise ValueError(f"[{start}, {stop}) is no whole number of blocks of {block} rows")
            scales = scales[start // block : stop // block]
        return self.like(data, scales)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Float8({list(self.shape)})"


class Pair(torch.Tensor):
    """Two tensors of any kind as one: tensors within tensors."""

    def __new__(cls, first: torch.Tensor, second: torch.Tensor) -> Pair:
        make: Any = torch.Tensor
        made: Pair = make._make_wrapper_subclass(
            cls, first.shape, dtype=first.dtype, device=first.device
        )
        made.first, made.second = first, second
        return made

    first: torch.Tensor
    second: torch.Tensor

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["first", "second"], None

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: None, size: Any, stride: Any
    ) -> Pair:
        return Pair(inner["first"], inner["second"])

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, arguments: tuple[Any, ...] = (), options: Any = None
    ) -> Any:
        self, *rest = arguments
        if function is aten.copy_.default:
            self.first.copy_(rest[0].first)
            self.second.copy_(rest[0].second)
            return self
        return cls(
            function(self.first, *rest, **(options or {})),
            function(self.second, *rest, **(options or {})),
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Pair({self.first}, {self.second})"


def float8(rows: int, columns: int, block: int = 0, seed: int = 0) -> Float8:
    """Random ones, with a scale for each block of rows, or one of all."""
    random = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (rows, columns), dtype=torch.uint8, generator=random)
    shape = (rows // block, 1) if block else ()
    scales = torch.rand(shape, generator=random)
    return Float8(data, scales, recipe=Recipe(block))


def bits(tensor: torch.Tensor) -> dict[str, bytes]:
    """The bits of all tensors that one consists of, by name."""
    if not hasattr(type(tensor), "__tensor_flatten__"):
        flat = tensor.detach().contiguous().reshape(-1)
        return {"": flat.view(torch.uint8).numpy().tobytes()}
    names = tensor.__tensor_flatten__()[0]  # type: ignore[attr-defined]
    found = {name: bits(getattr(tensor, name)) for name in names}
    return {f"{name}.{at}": raw for name, inner in found.items() for at, raw in inner.items()}
