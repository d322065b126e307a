"""Tensors and storages in torch's pickles, as facts: how torch's functions rebuild tensors.

A tensor of one memory is a `Tensor`. One that consists of several is a dict of these and of its
`context`, with the names under which unickpt's own format stores it.

Sources: torch/_utils.py, torch/_tensor.py and torch/storage.py. Nothing of torch is imported, and
nothing that a pickle names is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from unickpt.backends._files import pickles
from unickpt.backends._files.elements import LazyElements
from unickpt.backends._files.headers import is_size, sizes
from unickpt.backends._files.pickles import (
    BadPickle,
    Constructors,
    FileBytes,
    Global,
    NotSupported,
    OutsideData,
    PickledObject,
)
from unickpt.extend import Elements, dtype_from_name, dtype_name, quoted

STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
# The parts of quantized tensors; none of torch's other files has them.
_QUANTIZED = {"QInt8": "int8", "QUInt8": "uint8", "QInt32": "int32"}
_PACKED = ("QUInt4x2", "QUInt2x4")  # several elements in a byte
# The bytes of an element of dtypes that unickpt lacks; their elements are read as unsigned
# integers.
_RAW = {
    1: {"bits8", "bits1x8", "bits2x4", "bits4x2", "float4_e2m1fn_x2",
        *(f"{sign}int{n}" for sign in ("", "u") for n in range(1, 8))},
    2: {"bits16"},
    4: {"complex32"},
}  # fmt: skip
_COMPLEX = ("complex64", "complex128")
_LAZY = {"conj": _COMPLEX, "neg": (*_COMPLEX, "float16", "float32", "float64")}
_MOST_SIZES = 1 << 62  # of a torch.Size, which a user can have saved


@dataclass(frozen=True)
class TorchStorage(OutsideData):
    """The memory of tensors, in the file.

    Arguments:
        key: its name in the file.
        dtype: the checkpoint's name of its dtype; None for bytes without one.
        count: its elements, or its bytes.
        data: its bytes, if the pickle itself contains them; or where these are in its file.
        big_endian: the byte order of these.
    """

    key: str
    dtype: str | None
    count: int
    data: bytes | FileBytes | None = None
    big_endian: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.count * (1 if self.dtype is None else dtype_from_name(self.dtype).itemsize)


@dataclass(frozen=True, eq=False)  # by identity: a key of a dict must not be chosen by its hash
class Tensor:
    """A tensor as its pickle describes it.

    Arguments:
        storage: its memory.
        dtype: the checkpoint's name of its dtype.
        offset: of its first element in the storage, in elements.
        shape: its extents.
        strides: in elements.
        lazy: the operations that torch left for when the elements are read, "conj", "neg" or both.
    """

    storage: TorchStorage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    lazy: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        return self.storage.nbytes

    @property
    def reach(self) -> int:
        """Bytes of the storage up to its last element; 0 if it has none."""
        if 0 in self.shape:
            return 0
        last = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (self.offset + last + 1) * dtype_from_name(self.dtype).itemsize

    @property
    def identity(self) -> str:
        """Equal for tensors that are the same elements in the same order: ties."""
        same = (self.dtype, self.offset, self.shape, self.strides, self.lazy)
        return repr((self.storage.key, *same))

    def meant(self, stored: Elements) -> Elements:
        """Its elements, out of those that are stored for it."""
        if not self.lazy:
            return stored
        return LazyElements(stored, "conj" in self.lazy, "neg" in self.lazy)


def dtype_of(torch_dtype: Any) -> str:
    """The checkpoint's name of a torch dtype in a pickle.

    Raises:
        BadPickle: it is none, or unickpt lacks it.
    """
    name = torch_dtype.name if isinstance(torch_dtype, Global) else ""
    short = name.removeprefix("torch.")
    try:
        return dtype_name(dtype_from_name(short))
    except TypeError:
        raise NotSupported(f"{name or 'an object'} is not a dtype that unickpt supports") from None


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, strides: Any, *extra: Any) -> Tensor:
    """Before torch 0.4 there is nothing more; later a flag for gradients, hooks, and lazy
    operations."""
    return _tensor(storage, None, offset, shape, strides, *extra[2:])


def _rebuild_tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any,
    *extra: Any,
) -> Any:  # fmt: skip
    """A tensor whose storage has no dtype of its own. Of a dtype that unickpt lacks: its elements
    as unsigned integers, and the name of the dtype."""
    name = dtype.name.removeprefix("torch.") if isinstance(dtype, Global) else ""
    width = next((width for width, names in _RAW.items() if name in names), None)
    if width is None:
        return _tensor(storage, dtype_of(dtype), offset, shape, strides, *extra)
    if any(extra):
        raise NotSupported(f"a tensor of {name} is special in an unknown way: {quoted(extra)}")
    raw = _tensor(storage, f"uint{8 * width}", offset, shape, strides)
    return {"data": raw, "context": {"dtype": name}}


def _tensor(
    storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any, lazy: Any = None
) -> Tensor:
    if not isinstance(storage, TorchStorage) or (dtype or storage.dtype) is None:
        raise BadPickle("a tensor has no storage")
    of_elements = dtype or storage.dtype
    assert of_elements is not None, "checked above"
    if not isinstance(shape, tuple) or not isinstance(strides, tuple) or not is_size(offset):
        raise BadPickle("the shape, strides or offset of a tensor are none")
    extents, steps = sizes(shape), sizes(strides)
    if len(extents) != len(steps):
        raise BadPickle("the strides of a tensor do not fit its shape")
    todo = _lazy(lazy, of_elements)
    return Tensor(storage, of_elements, offset, extents, steps, todo)


def _lazy(flags: Any, dtype: str) -> tuple[str, ...]:
    """The lazy operations, as the pickle of a tensor records them: `{"conj": True}`."""
    if flags is None:
        return ()
    if not isinstance(flags, dict):
        raise BadPickle("the attributes of a tensor are no dict")
    set_flags = [what for what, is_so in flags.items() if is_so]
    if any(dtype not in _LAZY.get(what, ()) for what in set_flags):
        raise NotSupported(f"a tensor of {dtype} is special in an unknown way: {quoted(set_flags)}")
    return tuple(sorted(set_flags))


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of a class of its own; not made if only its class knows its parts."""
    if not isinstance(function, Global) or function.make is None:
        return NotImplemented
    return function(args)


def _rebuild_parameter(data: Any = None, *extra: Any) -> Any:
    return data


def _class_of_tensor(data: Any = None, *extra: Any) -> Any:
    """`Parameter(data)` and `Variable(data)`, as torch before 0.4 pickled them."""
    return data if isinstance(data, Tensor) else NotImplemented


def _rebuild_sparse_tensor(layout: Any, parts: Any) -> Any:
    """A sparse tensor; see `unickpt.adapters.torch_sparse`."""
    name = layout.removeprefix("torch.") if isinstance(layout, str) else ""
    keys = _SPARSE.get(name)
    if keys is None or not isinstance(parts, tuple) or len(parts) <= len(keys):
        raise NotSupported(f"a sparse tensor has the layout {quoted(layout)}")
    arrays, (shape, *coalesced) = parts[: len(keys)], parts[len(keys) :]
    if not all(isinstance(array, Tensor) for array in arrays):
        raise NotSupported(f"a {name} tensor consists of something other than tensors")
    batch = len(arrays[0].shape) - 1 if name != "sparse_coo" else 0
    block = 2 if name in ("sparse_bsr", "sparse_bsc") else 0
    dense_dim = max(0, len(arrays[-1].shape) - 1 - batch - block)
    context = {"layout": name, "shape": list(sizes(shape)), "dense_dim": dense_dim}
    if name == "sparse_coo":
        context["coalesced"] = bool(coalesced[0]) if coalesced else False
    return {**dict(zip(keys, arrays, strict=True)), "context": context}


_SPARSE = {
    "sparse_coo": ("indices", "values"),
    **dict.fromkeys(("sparse_csr", "sparse_bsr"), ("crow_indices", "col_indices", "values")),
    **dict.fromkeys(("sparse_csc", "sparse_bsc"), ("ccol_indices", "row_indices", "values")),
}


def _rebuild_qtensor(
    storage: Any, offset: Any, shape: Any, strides: Any, quantizer: Any, *extra: Any
) -> Any:
    """A quantized tensor: its integers, and how they stand for floats."""
    if not isinstance(storage, TorchStorage) or not isinstance(quantizer, tuple):
        raise BadPickle("a quantized tensor has no storage or no quantizer")
    scheme = quantizer[0] if quantizer else None
    name = scheme.name.removeprefix("torch.") if isinstance(scheme, Global) else ""
    keys = _QUANTIZERS.get(name, ())
    if len(keys) != len(quantizer) - 1:
        raise NotSupported(f"a tensor is quantized in an unknown way: {quoted(name)}")
    facts = dict(zip(keys, quantizer[1:], strict=True))
    arrays = {key: fact for key, fact in facts.items() if isinstance(fact, Tensor)}
    context = {"scheme": name, **{k: fact for k, fact in facts.items() if k not in arrays}}
    if storage.dtype is not None:
        integers = _tensor(storage, None, offset, shape, strides)
        return {"int_repr": integers, **arrays, "context": context}
    if offset != 0:
        raise NotSupported("a tensor of packed integers is a part of another")
    context |= {"shape": list(sizes(shape)), "strides": list(sizes(strides))}
    packed = Tensor(storage, "uint8", 0, (storage.count,), (1,))
    return {"packed": packed, **arrays, "context": context}


_BY_CHANNEL = ("scales", "zero_points", "axis")
_QUANTIZERS = {
    "per_tensor_affine": ("scale", "zero_point"),
    "per_channel_affine": _BY_CHANNEL,
    "per_channel_affine_float_qparams": _BY_CHANNEL,
}


def _rebuild_nested_tensor(*parts: Any) -> Any:
    return dict(zip(("buffer", "sizes", "strides", "storage_offsets"), parts, strict=True))


def _rebuild_device_tensor(data: Any, dtype: Any, *extra: Any) -> Any:
    """A tensor of a device that torch saves as another of the CPU, which can have another dtype."""
    if isinstance(data, Tensor) and isinstance(dtype, Global):
        return of_dtype(data, dtype)
    return NotImplemented


def of_dtype(data: Tensor, dtype: Global) -> Any:
    """A tensor that is converted to a dtype when it is read: itself if it has it."""
    name = dtype_of(dtype)
    return data if data.dtype == name else {"data": data, "context": {"dtype": name}}


def _load_from_bytes(*args: Any) -> Any:
    """The memory of a tensor that pickle wrote instead of torch.save."""
    raise NotSupported(
        "it has tensors that were pickled without torch.save: if you trust it, load it with "
        "pickle, and save the result with torch.save"
    )


def _ordered(*args: Any) -> dict[Any, Any]:
    if not args:
        return {}
    pairs = args[0].items() if isinstance(args[0], dict) else args[0]
    return {pickles.key(k): v for k, v in pairs}


_UTILS = "torch._utils._rebuild_"
CONSTRUCTORS: Constructors = {
    **pickles.PLAIN,
    _UTILS + "tensor": _rebuild_tensor,
    _UTILS + "tensor_v2": _rebuild_tensor,
    _UTILS + "tensor_v3": _rebuild_tensor_v3,
    _UTILS + "parameter": _rebuild_parameter,
    _UTILS + "parameter_with_state": _rebuild_parameter,
    _UTILS + "sparse_tensor": _rebuild_sparse_tensor,
    _UTILS + "qtensor": _rebuild_qtensor,
    _UTILS + "nested_tensor": _rebuild_nested_tensor,
    _UTILS + "device_tensor_from_cpu_tensor": _rebuild_device_tensor,
    "torch._tensor._rebuild_from_type": _rebuild_from_type,
    "torch.storage._load_from_bytes": _load_from_bytes,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.tensor._rebuild_from_type": _rebuild_from_type,  # of torch 1.7 and 1.8
    "torch.nn.parameter.Parameter": _class_of_tensor,
    "torch.autograd.variable.Variable": _class_of_tensor,
    "torch.Size": partial(sizes, most=_MOST_SIZES),
    "torch.serialization._get_layout": lambda name: name,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *args: _ordered(*args[1:]),
    "builtins.set": lambda *args: list(*args),
    "__builtin__.set": lambda *args: list(*args),
}
"""The constructors of tensors and containers in torch's pickles."""


def storage(persistent_id: Any) -> TorchStorage:
    """A storage by its persistent id: `("storage", class, key, device, count, ...)`.

    Raises:
        BadPickle: it is malformed.
    """
    is_tuple = isinstance(persistent_id, tuple) and len(persistent_id) >= 5
    if not is_tuple or persistent_id[0] != "storage":
        raise BadPickle("it refers to something other than a storage")
    if len(persistent_id) > 5 and persistent_id[5] is not None:
        raise NotSupported(
            "a storage is a part of another, as in files of torch before 0.4; load it with torch, "
            "and save clones of its tensors"
        )
    kind, key, count = persistent_id[1], persistent_id[2], persistent_id[4]
    name = kind.name if isinstance(kind, Global) else ""
    if not isinstance(key, str) or not is_size(count):
        raise BadPickle("a storage is malformed")
    short = name.removeprefix("torch.").removesuffix("Storage")
    if name == "torch.storage.UntypedStorage" or short in _PACKED:
        return TorchStorage(key, None, count)
    dtype = STORAGES.get(short) or _QUANTIZED.get(short)
    if dtype is None:
        raise NotSupported(f"it has a storage of the unknown class {quoted(name)}")
    return TorchStorage(key, dtype, count)


_CONTAINERS = (dict, list, tuple, set, frozenset, PickledObject)


def holds_tensors(obj: PickledObject, without: set[int], spend: Callable[[int], None]) -> bool:
    """Whether an object has tensors in it, however deep.

    Arguments:
        obj: the object.
        without: identities of objects known to hold none; new ones are added.
        spend: called with the number of values that are visited; raises if they are too many.
    """
    seen, pending = set[int](), [obj]
    while pending:
        item: Any = pending.pop()
        if isinstance(item, Tensor | TorchStorage):
            return True
        if isinstance(item, _CONTAINERS) and id(item) not in seen and id(item) not in without:
            seen.add(id(item))
            inner = _inside(item)
            spend(len(inner))
            pending += inner
    without |= seen
    return False


def _inside(container: Any) -> list[Any]:
    """The parts of a container or an object."""
    if isinstance(container, PickledObject):
        made = container
        return [made.args, made.named, made.state, made.appended, made.items]
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)
