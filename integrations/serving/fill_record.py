"""Which elements of a model's parameters were written while it was loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, cast

import torch

_Write = tuple[int, tuple[int, ...], tuple[int, ...]]


class FillRecord:
    """Records what is written to parameters.

    Arguments:
        parameters: by their names. One that gets other memory later counts as written.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        self._parameters = dict(parameters)
        self._storages = {name: storage_key(p) for name, p in self._parameters.items()}
        self._writes: dict[int, set[_Write]] = {key: set() for key in self._storages.values()}

    def add(self, tensor: torch.Tensor) -> None:
        """Records that a tensor was written."""
        writes = self._writes.get(storage_key(tensor))
        if writes is not None:
            writes.add((int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride()))

    def add_outputs(self, operation: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
        """Records what an operation of torch writes."""
        for position, argument in enumerate(operation._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[position] if position < len(args) else kwargs.get(argument.name)
            for tensor in value if isinstance(value, list | tuple) else [value]:
                if isinstance(tensor, torch.Tensor):
                    self.add(tensor)

    def incomplete(self) -> list[str]:
        """The parameters of which elements were not written."""
        return [
            name
            for name, parameter in self._parameters.items()
            if storage_key(parameter) == self._storages[name] and not self._is_filled(parameter)
        ]

    def _is_filled(self, parameter: torch.Tensor) -> bool:
        if parameter.numel() == 0:
            return True
        writes = self._writes[storage_key(parameter)]
        start, end = parameter.storage_offset(), parameter.storage_offset() + parameter.numel()
        if parameter.is_contiguous():
            for first, last in sorted(_run(write) for write in writes if _is_run(write)):
                if first > start:
                    break
                start = max(start, last)
            if start >= end:
                return True
        # An element of memory each: rare, as parts of a parameter usually are consecutive.
        size = parameter.untyped_storage().nbytes() // parameter.element_size()
        written = torch.zeros(size, dtype=torch.bool)
        for offset, shape, stride in writes:
            written.as_strided(shape, stride, offset).fill_(True)
        view = written.as_strided(parameter.shape, parameter.stride(), parameter.storage_offset())
        return bool(view.all())


def storage_key(tensor: torch.Tensor) -> int:
    """Tells the memory of a tensor from all other memory."""
    return cast(int, tensor.untyped_storage()._cdata)


def _is_run(write: _Write) -> bool:
    """Whether the elements of a write are consecutive."""
    _, shape, stride = write
    expected = 1
    for step, length in sorted(zip(stride, shape, strict=True)):
        if length == 1:
            continue
        if step != expected:
            return False
        expected *= length
    return True


def _run(write: _Write) -> tuple[int, int]:
    offset, shape, _ = write
    return offset, offset + math.prod(shape)
