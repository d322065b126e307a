"""What a model's own `load_weights` copies to which parameter, recorded instead of executed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from unickpt.extend import Box
from unickpt.integrations.serving.fill_record import FillRecord, storage_key
from unickpt.types import LocalFragments

Tensor = torch.Tensor
_COPY = torch.ops.aten.copy_.default


class WeightCopy(NamedTuple):
    """A copy of a part of a checkpoint's array into a parameter.

    Arguments:
        name: of the array.
        shape: of the whole array.
        box: the part.
        tensor: a view of the parameter, in the shape of the box.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    tensor: Tensor


class LoadRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within this context, `load_weights` gets tensors without data: `source`.

    Views of them cost nothing. A copy of one into a parameter is recorded; `flush` reads all
    recorded parts at once. Any other operation on them, or on a parameter with a recorded copy,
    first reads what it needs, so its result is the usual one.

    Arguments:
        fill: fills the tensors of copies.
        read: reads an array whole.
        parameters: that are loaded.
    """

    def __init__(
        self,
        fill: Callable[[Sequence[WeightCopy]], None],
        read: Callable[[str], Tensor],
        parameters: Mapping[str, Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fill, self._read = fill, read
        self.filled = FillRecord(parameters)
        """What was written to the parameters, or is recorded."""
        self._sources: dict[int, tuple[str, Tensor]] = {}
        self._pending: dict[tuple[Any, ...], WeightCopy] = {}
        self._last_read: tuple[str, Tensor] | None = None
        self._copies: dict[tuple[Any, ...], WeightCopy] = {}
        self.computed: set[str] = set()
        """The names of arrays that were not only copied."""

    @property
    def copies(self) -> list[WeightCopy]:
        """All copies so far, without those to elements that another one replaced."""
        return list(self._copies.values())

    @property
    def is_pending(self) -> bool:
        """Whether copies are recorded that `flush` would execute."""
        return bool(self._pending)

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor without data that stands for an array."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sources[storage_key(tensor)] = name, tensor
        return tensor

    def flush(self) -> None:
        """Executes the recorded copies."""
        pending, self._pending = list(self._pending.values()), {}
        if pending:
            self._fill(pending)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_view(func):
            return func(*args, **kwargs)
        if func is _COPY and self._record(*args[:2]):
            self.filled.add(args[0])
            return args[0]
        self.filled.add_outputs(func, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(_overlap(c.tensor, tensor) for c in self._pending.values() for tensor in tensors):
            self.flush()
        if any(storage_key(tensor) in self._sources for tensor in tensors):
            args, kwargs = tree_map_only(Tensor, self._with_data, (args, kwargs))
        return func(*args, **kwargs)

    def _record(self, out: Tensor, source: Tensor) -> bool:
        """Records a copy, if it is one of a box."""
        entry = self._sources.get(storage_key(source))
        if entry is None or out.shape != source.shape or out.is_meta:
            return False
        name, whole = entry
        copy = None if source.dtype != whole.dtype else _copy_of(name, whole, source, out)
        if copy is None:
            return False
        key = out.data_ptr(), tuple(out.shape), out.stride()
        self._pending[key] = self._copies[key] = copy  # replaces one to the same elements
        return True

    def _with_data(self, tensor: Tensor) -> Tensor:
        entry = self._sources.get(storage_key(tensor))
        if entry is None:
            return tensor
        name, _ = entry
        self.computed.add(name)
        if self._last_read is None or self._last_read[0] != name:
            self._last_read = name, self._read(name)
        whole = self._last_read[1].untyped_storage()
        view = torch.empty(0, dtype=tensor.dtype)  # maybe not the stored one
        return view.set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())


def fragments_of(copies: Iterable[WeightCopy]) -> list[dict[str, Any]]:
    """Trees for `unickpt.load` that fill the tensors of copies: one, or more if elements of the
    checkpoint are copied to several places.

    Arguments:
        copies: of a model.
    """
    trees = list[dict[str, list[WeightCopy]]]()
    for copy in copies:
        for tree in trees:
            placed = tree.setdefault(copy.name, [])
            if all(copy.box.intersect(part.box) is None for part in placed):
                placed.append(copy)
                break
        else:
            trees.append({copy.name: [copy]})
    return [{name: _leaf(parts) for name, parts in tree.items() if parts} for tree in trees]


def _leaf(parts: Sequence[WeightCopy]) -> Any:
    first = parts[0]
    if len(parts) == 1 and first.box == Box.whole(first.shape):
        return first.tensor
    return LocalFragments(first.shape, [(copy.box, copy.tensor) for copy in parts])


def _copy_of(name: str, whole: Tensor, source: Tensor, out: Tensor) -> WeightCopy | None:
    """The copy of a view of an array; None if the view is no box of it, maybe with its axes
    permuted or without axes of one element."""
    if not source.numel():
        return None
    if source.shape == whole.shape and source.is_contiguous():  # most copies
        return WeightCopy(name, tuple(whole.shape), Box.whole(whole.shape), out.detach())
    axis_of = {stride: i for i, stride in enumerate(whole.stride()) if whole.shape[i] > 1}
    longer = [i for i, length in enumerate(source.shape) if length > 1]
    axes = {axis_of.get(source.stride()[i]): i for i in longer}
    if None in axes or len(axes) != len(longer):
        return None
    offset, start = source.storage_offset(), list[int]()
    for axis, length in enumerate(whole.shape):
        below = math.prod(whole.shape[axis + 1 :])
        start.append(offset // below % length)
    stop = [s + (source.shape[axes[a]] if a in axes else 1) for a, s in enumerate(start)]
    if any(end > length for end, length in zip(stop, whole.shape, strict=True)):
        return None
    order = [axes[axis] for axis in sorted(a for a in axes if a is not None)]
    short = [i for i in range(source.dim()) if i not in order]
    out = out.detach().permute(*order, *short).reshape([out.shape[i] for i in order])
    for axis in range(whole.dim()):
        if axis not in axes:
            out = out.unsqueeze(axis)
    return WeightCopy(name, tuple(whole.shape), Box(tuple(start), tuple(stop)), out)


def _overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory of two tensors may overlap."""
    if not (a.numel() and b.numel()) or a.device != b.device:
        return False
    (a_start, a_end), (b_start, b_end) = map(_span, (a, b))
    return a_start < b_end and b_start < a_end


def _span(tensor: Tensor) -> tuple[int, int]:
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * stride for length, stride in pairs)
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation returns views and changes nothing."""
    returns = func._schema.returns
    infos = [result.alias_info for result in returns]
    return bool(infos) and all(info is not None and not info.is_write for info in infos)
