"""Objects of common classes in pickles, as plain facts: NumPy's arrays and scalars, and containers.

Sources: numpy/_core/src/multiarray/methods.c (`array_reduce`), numpy/_core/numeric.py, and the
`__reduce__` of Python's own classes. Nothing is called: an object is read from its pickle alone.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

import numpy as np

from unickpt.backends._files.headers import is_size
from unickpt.backends._files.pickles import BadPickle, FileBytes, Global, PickledObject
from unickpt.backends._files.torch_tensors import Tensor, TorchStorage, of_dtype
from unickpt.extend import DType, dtype_from_name, dtype_name, is_plain, quoted

_MOST_RANK = 64  # NumPy's own limit
_DTYPE = re.compile(r"[biufcSU][0-9]{1,9}")
_NONE = object()  # the value None; a plain None means that an object is not known
_ORDERS = {"<": False, "|": False, ">": True}


def decoded(obj: PickledObject) -> Any:
    """An object of a known class as a container, plain value or `Tensor`.

    Returns:
        A container, whose items are as in the pickle; a plain value; or a `Tensor` for an array.
        The object itself if its class is not known, or its content has no plain form, such as an
        array of objects.

    Raises:
        BadPickle: an array has more or fewer bytes than its shape takes.
    """
    decode = _KNOWN.get(obj.name)
    made = None if decode is None or obj.named else decode(obj)
    if made is _NONE:
        return None
    return obj if made is None else made


def key_of(key: Any) -> Any:
    """A key of a dict; a text or an integer of NumPy's as one of Python's. Raises as `decoded`."""
    made = decoded(key) if isinstance(key, PickledObject) else key
    return made if type(made) in (str, int) else key


# --- NumPy --------------------------------------------------------------------------------------


def _reconstructed(obj: PickledObject) -> Any:
    """An array by `_reconstruct(numpy.ndarray, ...)` and its state."""
    kind, state = obj.args[0] if obj.args else None, obj.state
    if not isinstance(kind, Global) or kind.name != "numpy.ndarray":
        return None  # a class that is derived from it
    if not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, dtype, fortran, data = state
    return _array(obj, data, dtype, shape, bool(fortran))


def _from_buffer(obj: PickledObject) -> Any:
    """An array by `_frombuffer(bytes, dtype, shape, order)`."""
    if len(obj.args) != 4 or obj.args[3] not in ("C", "F"):
        return None
    data, dtype, shape, order = obj.args
    return _array(obj, data, dtype, shape, order == "F")


def _array(obj: PickledObject, data: Any, kind: Any, shape: Any, fortran: bool) -> Tensor | None:
    dtype, big_endian = _dtype(kind)
    try:
        name = None if dtype is None else dtype_name(dtype)
    except TypeError:  # such as texts
        name = None
    if isinstance(data, str):  # of Python 2
        try:
            data = data.encode("latin-1")
        except UnicodeEncodeError as error:
            raise BadPickle(f"a NumPy array has a text instead of bytes: {error}") from error
    if dtype is None or name is None or not isinstance(data, bytes | FileBytes):
        return None
    is_shape = isinstance(shape, tuple) and len(shape) <= _MOST_RANK and all(map(is_size, shape))
    if not is_shape or math.prod(shape) * dtype.itemsize != len(data):
        raise BadPickle(f"a NumPy array of shape {quoted(shape)} has {len(data)} bytes")
    steps = [math.prod(shape[:d] if fortran else shape[d + 1 :]) for d in range(len(shape))]
    memory = TorchStorage(f"numpy at {obj.at}", name, math.prod(shape), data, big_endian)
    return Tensor(memory, name, 0, shape, tuple(steps))


def _of_jax(obj: PickledObject) -> Any:
    """An array of JAX: how NumPy makes it of arguments and a state."""
    if len(obj.args) < 3 or not isinstance(obj.args[0], Global):
        return None
    function, args, state = obj.args[:3]
    is_array = _KNOWN.get(function.name) is _reconstructed and isinstance(args, tuple)
    return _reconstructed(PickledObject(function, args, state, at=obj.at)) if is_array else None


def _scalar(obj: PickledObject) -> Any:
    """A scalar by `scalar(dtype, bytes)`: a plain value; an array if it is complex."""
    if len(obj.args) != 2:
        return None
    kind, data = obj.args
    dtype, big_endian = _dtype(kind)
    if dtype is None or not isinstance(data, bytes):
        return None
    if len(data) != dtype.itemsize:
        raise BadPickle(f"a NumPy scalar of {dtype.itemsize} bytes has {len(data)}")
    if dtype.kind == "c":
        return _array(obj, data, kind, (), False)
    if dtype.kind == "U":
        try:
            return data.decode("utf-32-be" if big_endian else "utf-32-le").rstrip("\0")
        except UnicodeDecodeError as error:
            raise BadPickle(f"a NumPy text is damaged: {error}") from error
    if dtype.kind == "S":
        return data.rstrip(b"\0")
    value = np.frombuffer(data, dtype.newbyteorder(">") if big_endian else dtype)[0].item()
    return value if is_plain(value) else None  # wider floats are not


def _dtype(obj: Any) -> tuple[DType | None, bool]:
    """A dtype in this machine's byte order, and whether it is stored in the other; None for dtypes
    of objects, of fields and so on."""
    unknown = None, False
    if not isinstance(obj, PickledObject) or obj.name != "numpy.dtype" or not obj.args:
        return unknown
    name, state = obj.args[0], obj.state
    if not isinstance(state, tuple) or len(state) < 5 or any(x is not None for x in state[2:5]):
        return unknown
    if state[1] not in _ORDERS:
        return unknown
    try:
        if isinstance(name, Global) and name.name.startswith("ml_dtypes."):
            return dtype_from_name(name.name.removeprefix("ml_dtypes.")), _ORDERS[state[1]]
        if isinstance(name, str) and _DTYPE.fullmatch(name):
            return np.dtype(name), _ORDERS[state[1]]
    except (TypeError, ValueError):
        pass
    return unknown


# --- torch --------------------------------------------------------------------------------------


def _dtensor(obj: PickledObject) -> Any:
    """A DTensor that was pickled as an object: its array, if this process held all of it; else its
    part, below a name that says so, and the shape of the whole."""
    try:
        rebuild, kind, arguments, (_, state) = obj.args
        shape, local = arguments[2], state["_local_tensor"]
    except (ValueError, TypeError, LookupError):
        return None
    names = [made.name for made in (rebuild, kind) if isinstance(made, Global)]
    is_one = names[:1] == ["torch._utils._rebuild_wrapper_subclass"] and names[-1] in _DTENSORS
    if not is_one or not isinstance(shape, tuple) or not isinstance(local, Tensor):
        return None
    if local.shape == shape:
        return local
    return {LOCAL: local, "shape_of_whole": list(shape)}


def _from_numpy(obj: PickledObject) -> Any:
    """A tensor that torch saves as an array of NumPy: `(array, dtype, device, grad)`."""
    if len(obj.args) < 2 or not isinstance(obj.args[1], Global):
        return None
    array, dtype = obj.args[:2]
    data = decoded(array) if isinstance(array, PickledObject) else None
    return of_dtype(data, dtype) if isinstance(data, Tensor) else None


LOCAL = "_local_tensor"
"""The name of the only part of a DTensor that is stored."""
_DTENSORS = ("torch.distributed.tensor.DTensor", "torch.distributed._tensor.api.DTensor")


# --- Python -------------------------------------------------------------------------------------


def _complex(obj: PickledObject) -> Tensor | None:
    if [type(x) for x in obj.args] != [float, float]:
        return None
    data = np.array([complex(*obj.args)]).tobytes()
    memory = TorchStorage(f"complex at {obj.at}", "complex128", 1, data)
    return Tensor(memory, "complex128", 0, (), ())


def _record(obj: PickledObject) -> Any:
    """Objects that are nothing but named values."""
    return obj.state if isinstance(obj.state, dict) else None


def _omegaconf(key: str) -> Callable[[PickledObject], Any]:
    """The content of a container or node of OmegaConf; interpolations (`${a}`) stay texts."""

    def decode(obj: PickledObject) -> Any:
        if not isinstance(obj.state, dict) or key not in obj.state:
            return None
        content = obj.state[key]
        return _NONE if content is None else content

    return decode


def _sequence(obj: PickledObject) -> Any:
    items = obj.args[0] if obj.args else ()
    return [*items, *obj.appended] if isinstance(items, (list, tuple)) else None


def _made_of_dict(obj: PickledObject) -> Any:
    items = obj.args[0] if obj.args else {}
    return items if isinstance(items, dict) and not obj.items else None


def _path(kind: Callable[..., Any]) -> Callable[[PickledObject], Any]:
    def decode(obj: PickledObject) -> Any:
        is_path = all(type(part) is str for part in obj.args)
        return str(kind(*obj.args)) if is_path else None

    return decode


_KNOWN: Mapping[str, Callable[[PickledObject], Any]] = {
    **{f"numpy.{core}.multiarray._reconstruct": _reconstructed for core in ("core", "_core")},
    **{f"numpy.{core}.multiarray.scalar": _scalar for core in ("core", "_core")},
    **{f"numpy.{core}.numeric._frombuffer": _from_buffer for core in ("core", "_core")},
    **dict.fromkeys(
        (
            "jax._src.array._reconstruct_array",
            "jax._src.device_array.reconstruct_device_array",  # before 0.4
            "jax.interpreters.xla.reconstruct_device_array",
        ),
        _of_jax,
    ),
    **dict.fromkeys(("argparse.Namespace", "types.SimpleNamespace"), _record),
    **dict.fromkeys(("collections.deque", "builtins.frozenset"), _sequence),
    "__builtin__.frozenset": _sequence,
    **dict.fromkeys(("collections.Counter", "flax.core.frozen_dict.FrozenDict"), _made_of_dict),
    **{
        f"omegaconf.{kind}": _omegaconf("_content")
        for kind in ("dictconfig.DictConfig", "listconfig.ListConfig", "base.UnionNode")
    },
    **{
        f"omegaconf.nodes.{kind}Node": _omegaconf("_val")
        for kind in ("Any", "String", "Integer", "Float", "Boolean", "Bytes", "Path", "Enum")
    },
    "torch._tensor._rebuild_from_type_v2": _dtensor,
    "torch._utils._rebuild_device_tensor_from_numpy": _from_numpy,
    "torch._utils._rebuild_xla_tensor": _from_numpy,
    **dict.fromkeys(("builtins.complex", "__builtin__.complex"), _complex),
    **{
        f"{module}.{pure}{kind.__name__.removeprefix('Pure')}": _path(kind)
        for module in ("pathlib", "pathlib._local")  # the latter of Python 3.13
        for pure in ("", "Pure")
        for kind in (PurePosixPath, PureWindowsPath)
    },
}
