"""Tensors that consist of tensors (`__tensor_flatten__`), as torchao's: stored as these, by name.

`{"w": Float8Tensor}` is stored as the arrays `w/qdata` and `w/scale`, and `w/context`, plain values
with all else that torch needs to put the tensor together. Nothing is pickled, and no class is ever
looked up by its name: a tensor of the same class in `like` is filled.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist

from unickpt.adapters.torch_distributed import (
    LocalShard,
    PlacedTensor,
    TensorPart,
    is_dtensor,
    local_shard_of,
    with_parts,
)
from unickpt.arrays.box import Box
from unickpt.arrays.layout import Layout, Mesh
from unickpt.errors import LoadMismatch, UnsupportedLeaf
from unickpt.quoting import quoted
from unickpt.trees.tree import Expansion, Node, join, leaves

_CONTEXT = "context"
# How a tensor dimension continues in a part: the part's dimension, and how many elements it has
# there for each of the tensor's.
_Follows = tuple[int, Fraction]


def expand_subclass(obj: Any, name: str) -> Expansion:
    """One level of a tensor that consists of tensors.

    Arguments:
        obj: the tensor, a DTensor of such tensors, or a part of one that is such a tensor.
        name: its name in the tree.

    Raises:
        UnsupportedLeaf: its context has more than plain values, or it is a DTensor, and its parts
            cannot be cut like it.
    """
    whole = _placed_tensor(obj)
    local = whole.local
    kind = type(local).__name__
    flatten: Any = local
    attributes, context = flatten.__tensor_flatten__()
    parts = {attribute: getattr(local, attribute) for attribute in attributes}
    for attribute, part in parts.items():
        _check_part(local, attribute, part, name)
    keys = _keys(list(parts), name, kind)
    plain_context = _plain_context(whole, context, name)
    children = _alone(parts) if whole.shard is None else _spread(whole, parts, plain_context, name)
    abstract = any(part.is_meta for part in parts.values())
    if abstract and _has_meta_device(context):
        raise UnsupportedLeaf(
            f"{name!r}: the context of this {kind} names the meta device, so it cannot be made "
            "from it; pass one with memory"
        )

    def rebuild(filled_parts: list[Any]) -> Any:
        if not abstract:
            if not local.is_inference():
                torch.autograd.graph.increment_version(local)
            return local if type(obj) is PlacedTensor else obj
        inner = dict(
            zip(attributes, (_plain_part(part) for part in filled_parts[:-1]), strict=True)
        )
        return _made(obj, local, inner, context)

    def check(node: Node, value: Callable[[str], Any]) -> None:
        check_context(node, value, name, f"a {kind}")

    return Expansion(
        "object", (*keys, _CONTEXT), (*children.values(), plain_context), rebuild, kind, check
    )


def _placed_tensor(obj: Any) -> PlacedTensor:
    if is_dtensor(obj):
        kind = obj.device_mesh.device_type
        return PlacedTensor(obj._local_tensor, tuple(obj.shape), local_shard_of(obj), kind)
    return obj if type(obj) is PlacedTensor else PlacedTensor(obj, tuple(map(int, obj.shape)))


def check_context(node: Node, value: Callable[[str], Any], name: str, kind: str) -> None:
    """Checks that the stored tensor has the same context as the requested one.

    Arguments:
        node: the tensor's, with the context last.
        value: see `Node.check`.
        name: of the tensor.
        kind: of the requested tensor, for the message.

    Raises:
        LoadMismatch: names all that differs.
    """
    rows = [(leaf.name, value(leaf.name), leaf.value) for leaf in leaves(node.children[-1])]
    wrong = [
        f"{path.removeprefix(join(name, ''))} is {quoted(stored)}, requested is {quoted(requested)}"
        for path, stored, requested in rows
        if type(stored) is not type(requested) or stored != requested
    ]
    if wrong:
        raise LoadMismatch(
            f"{name!r}: the stored value does not fit {kind} of `like`: stored {'; '.join(wrong)}. "
            "Make the tensor of `like` in the same way as the stored one; or load without it, "
            "which gives the arrays and values as they are stored"
        )


def _check_part(tensor: torch.Tensor, attribute: str, part: Any, name: str) -> None:
    kind = type(tensor).__name__
    if not isinstance(part, torch.Tensor):
        raise UnsupportedLeaf(
            f"{name!r}: a {kind} names {attribute!r} as one of its tensors, but it is "
            f"{quoted(part)}"
        )
    again = getattr(tensor, attribute)
    if part is not again and _memories(part) != _memories(again):
        raise UnsupportedLeaf(
            f"{name!r}: a {kind} computes {attribute!r} at each call, so that a load would fill "
            "a copy; save the tensors that it keeps"
        )


def _memories(tensor: Any) -> list[int]:
    """The identity of the memory of a tensor, and of those that it consists of."""
    if not with_parts(tensor):
        local = tensor._local_tensor if is_dtensor(tensor) else tensor
        return [local.untyped_storage()._cdata]
    names = tensor.__tensor_flatten__()[0]
    return [identity for name in names for identity in _memories(getattr(tensor, name))]


def _keys(attributes: list[str], name: str, kind: str) -> tuple[str, ...]:
    """The names of parts: the attributes' without leading underscores."""
    keys = tuple(attribute.lstrip("_") or attribute for attribute in attributes)
    if len({*keys, _CONTEXT}) == len(keys) + 1:
        return keys
    if _CONTEXT in attributes:
        raise UnsupportedLeaf(f"{name!r}: a {kind} has a part with the reserved name {_CONTEXT!r}")
    return tuple(attributes)


def _alone(parts: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Parts of a tensor that is not distributed."""
    return {
        attribute: part if with_parts(part) or is_dtensor(part) else TensorPart.wrap(part)
        for attribute, part in parts.items()
    }


def _plain_part(part: Any) -> torch.Tensor:
    """A part as it is filled."""
    plain: torch.Tensor = part.as_subclass(torch.Tensor) if type(part) is TensorPart else part
    return plain


def _made(obj: Any, local: torch.Tensor, inner: dict[str, torch.Tensor], context: Any) -> Any:
    """A tensor, like one on the meta device, of parts that are filled."""
    make: Any = type(local)
    tensor = make.__tensor_unflatten__(inner, context, local.shape, local.stride())
    if type(obj) is PlacedTensor:
        return tensor
    if is_dtensor(obj):
        tensor = type(obj.detach())(tensor, obj._spec, requires_grad=False)
    if isinstance(obj, torch.nn.Parameter):
        return torch.nn.Parameter(tensor, requires_grad=obj.requires_grad)
    return tensor.requires_grad_() if obj.requires_grad else tensor


# --- the context --------------------------------------------------------------------------------

_NAMED = (torch.dtype, torch.layout, torch.memory_format)
_PLAIN = (bool, int, float, str, bytes, type(None))


class _Unstorable(Exception):
    """A value of a context cannot be stored."""


def _plain_context(tensor: PlacedTensor, context: Any, name: str) -> dict[str, Any]:
    """A context as plain values, with the class, the shape and the dtype of the whole tensor."""
    local, whole = tuple(tensor.local.shape), tensor.shape
    kind = type(tensor.local).__name__

    def mapping(value: dict[Any, Any], path: str) -> dict[Any, Any]:
        # Without devices: where a tensor lies is no matter.
        entries = {k: x for k, x in value.items() if not isinstance(x, torch.device)}
        return {key: plain(x, join(path, str(key))) for key, x in entries.items()}

    def plain(value: Any, path: str) -> Any:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, enum.Enum):
            return value.name
        if isinstance(value, _NAMED):
            return str(value).removeprefix("torch.")
        if isinstance(value, torch.device):
            return None
        if isinstance(value, torch.SymInt):
            return int(value)
        fields = _fields_of(value)
        if fields is not None:
            entries = {"class": type(value).__name__, **fields}
            return mapping(entries, path)
        if isinstance(value, list | tuple):
            # A shape of this rank's part is that of the whole tensor.
            elements = whole if tuple(value) == local else value
            return [plain(x, join(path, str(n))) for n, x in enumerate(elements)]
        if isinstance(value, dict) and all(type(key) in (str, int) for key in value):
            return mapping(value, path)
        raise _Unstorable(f"{path} is of type {type(value).__name__}: {quoted(value)}")

    head = {"class": kind, "outer_shape": whole, "outer_dtype": tensor.local.dtype}
    values = context if isinstance(context, dict) else _fields_of(context)
    if values is None or any(type(key) is not str or key in head for key in values):
        values = {} if context is None else {"values": context}
    try:
        return mapping({**head, **values}, "")
    except _Unstorable as error:
        raise UnsupportedLeaf(
            f"{name!r}: of the context of a {kind}, {error}. Only numbers, texts, dtypes, "
            "shapes, members of enumerations, and containers and dataclasses of these are stored; "
            "save its component tensors, or the plain tensor that it represents"
        ) from None


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a named tuple or a dataclass; None for anything else."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def _has_meta_device(value: Any) -> bool:
    if isinstance(value, torch.device):
        return value.type == "meta"
    inner = value if isinstance(value, dict) else _fields_of(value)
    if inner is not None:
        return any(map(_has_meta_device, inner.values()))
    return isinstance(value, list | tuple) and any(map(_has_meta_device, value))


# --- parts of DTensors --------------------------------------------------------------------------


def _spread(
    tensor: PlacedTensor,
    parts: Mapping[str, torch.Tensor],
    plain_context: Mapping[str, Any],
    name: str,
) -> dict[str, Any]:
    """The parts of this rank's part of a tensor, as parts of the whole.

    Raises:
        UnsupportedLeaf: some cannot be cut as the tensor is.
    """
    local, shard = tensor.local, tensor.shard
    assert shard is not None, "it is distributed"
    if shard.box is None or shard.box.shape != tuple(local.shape):
        raise UnsupportedLeaf(
            f"{name!r}: this rank should hold {shard.box} of shape {list(tensor.shape)}, but its "
            f"local tensor has shape {list(local.shape)}"
        )
    sizes = dict(zip(shard.layout.mesh.axes, shard.layout.mesh.shape, strict=True))
    cut = [d for d, axes in enumerate(shard.layout.dims) if any(sizes[a] > 1 for a in axes)]
    follows = {d: _follows(local, parts, d, repr(plain_context), name) for d in cut}
    placed = dict[str, Any]()
    for attribute, part in parts.items():
        of_part = {d: by_attribute[attribute] for d, by_attribute in follows.items()}
        placed[attribute] = _placed(part, tensor, of_part, join(name, attribute))
    return placed


def _placed(
    part: torch.Tensor, tensor: PlacedTensor, follows: Mapping[int, _Follows | None], name: str
) -> TensorPart | PlacedTensor:
    """A part with its place in the whole.

    Arguments:
        part: of this rank.
        tensor: that it is a part of.
        follows: how each dimension of the tensor that is cut continues in the part.
        name: of the part.
    """
    shard, outer = tensor.shard, tensor.shape
    assert shard is not None, "it is distributed"
    assert shard.box is not None, "this rank has a part"
    whole, start, stop = list(part.shape), [0] * part.ndim, list(part.shape)
    dims: list[tuple[str, ...]] = [()] * part.ndim
    for d, continuation in follows.items():
        if continuation is None:
            continue
        e, ratio = continuation
        ends = outer[d] * ratio, shard.box.start[d] * ratio, shard.box.stop[d] * ratio
        if dims[e] or any(end.denominator > 1 for end in ends):
            raise UnsupportedLeaf(
                f"{name!r}: this rank has {shard.box} of shape {list(outer)}, whose dimension "
                f"{d} is {_ratio_text(ratio)} of dimension {e} of the part of shape "
                f"{list(part.shape)}: the shards do not begin and end at block boundaries. "
                "Shard in multiples of the blocks, or along another dimension"
            )
        whole[e], start[e], stop[e] = map(int, ends)
        dims[e] = shard.layout.dims[d]
    layout, coordinates = _layout(
        shard.layout, dims, [d for d, continuation in follows.items() if continuation is None]
    )
    box = Box(tuple(start), tuple(stop))
    if layout.box(whole, coordinates) != box:
        raise UnsupportedLeaf(
            f"{name!r}: {box} of shape {whole} on this rank is not what {layout} gives it, because "
            f"dimensions of {list(outer)} are cut unevenly. Shard into equal parts"
        )
    place = LocalShard(layout, box, layout.replicas(coordinates))
    if with_parts(part):
        return PlacedTensor(part, tuple(whole), place, tensor.kind)
    return TensorPart.wrap(part, tuple(whole), place, tensor.kind)


def _ratio_text(ratio: Fraction) -> str:
    return f"{ratio.numerator} elements for {ratio.denominator}"


def _layout(
    outer: Layout, dims: list[tuple[str, ...]], same: list[int]
) -> tuple[Layout, tuple[int, ...]]:
    """How a part is laid out, and where this rank is.

    Arguments:
        outer: layout of the DTensor.
        dims: the axes that cut each dimension of the part.
        same: dimensions of the DTensor along which all ranks should have the same of the part. Each
            describes its own, so that the commit compares them.
    """
    mesh, (coordinates,) = outer.mesh, outer.mesh.coordinates(dist.get_rank())
    same_axes = {axis for d in same for axis in outer.dims[d]}
    selection = tuple(
        n if a in same_axes else slice(None) for a, n in zip(mesh.axes, coordinates, strict=True)
    )
    mesh_dims = [m for m, axis in enumerate(mesh.axes) if axis not in same_axes]
    processes = tuple(map(int, mesh.grid[selection].ravel()))
    inner = Mesh(
        tuple(mesh.axes[m] for m in mesh_dims), tuple(mesh.shape[m] for m in mesh_dims), processes
    )
    return Layout(inner, tuple(dims)), tuple(coordinates[m] for m in mesh_dims)


_follows_cache: dict[Any, dict[str, _Follows | None]] = {}
_MOST_CACHED = 4096


def _follows(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], dim: int, context_text: str, name: str
) -> dict[str, _Follows | None]:
    """How a dimension of a tensor continues in its parts: found by slicing it, because only its
    class knows (some parts are transposed, flat, or the same for all slices).

    Raises:
        UnsupportedLeaf: that cannot be found.
    """
    shapes = tuple((attribute, part.shape) for attribute, part in parts.items())
    key = type(local), local.shape, shapes, dim, context_text
    if key not in _follows_cache:
        if len(_follows_cache) >= _MOST_CACHED:
            _follows_cache.clear()
        _follows_cache[key] = _follows_by_slicing(local, parts, dim, name)
    return _follows_cache[key]


def _follows_by_slicing(
    local: torch.Tensor, parts: Mapping[str, torch.Tensor], dim: int, name: str
) -> dict[str, _Follows | None]:
    kind, size = type(local).__name__, local.shape[dim]
    if size == 0:
        raise UnsupportedLeaf(
            f"{name!r}: this rank has nothing of the {kind}, so it does not know the shapes of its "
            "parts; shard it over fewer ranks"
        )
    for count, sliced in _slices(local, dim):
        try:
            follows = {
                attribute: _followed(part, getattr(sliced, attribute), count, size)
                for attribute, part in parts.items()
            }
        except (AttributeError, ValueError):
            continue
        return follows
    raise UnsupportedLeaf(
        f"{name!r}: a {kind} of shape {list(local.shape)} cannot be sliced along dimension {dim}, "
        "so how its parts are cut is not known; save full_tensor(), or shard another dimension"
    )


def _slices(tensor: Any, dim: int) -> Iterator[tuple[int, torch.Tensor]]:
    """Slices of a tensor that its class can make, with their sizes; the largest first."""
    size = tensor.shape[dim]
    for count in (*(size // n for n in range(2, size + 1) if size % n == 0), 0):
        for is_split in (False, True):
            try:
                with torch.no_grad():
                    sliced = (
                        tensor.split(count, dim)[0] if is_split else tensor.narrow(dim, 0, count)
                    )
            except Exception:  # a class may raise any exception for unsupported operations
                continue
            if type(sliced) is type(tensor) and sliced.shape[dim] == count:
                yield count, sliced


def _followed(part: torch.Tensor, sliced: torch.Tensor, count: int, size: int) -> _Follows | None:
    """How a dimension continues in a part: of its `size` elements, a slice has `count`.

    Raises:
        ValueError: in more than one dimension, or not proportionally.
    """
    if part.ndim != sliced.ndim:
        raise ValueError("another number of dimensions")
    changed = [e for e in range(part.ndim) if part.shape[e] != sliced.shape[e]]
    if not changed:
        return None
    (e,) = changed
    if sliced.shape[e] * size != part.shape[e] * count:
        raise ValueError("not proportional")
    return e, Fraction(part.shape[e], size)
