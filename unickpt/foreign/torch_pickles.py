"""Objects that torch.save wrote, as facts: tensors as ranges of a file, everything else as data.

Sources: torch/serialization.py, torch/_utils.py and torch/storage.py. Nothing of torch is imported,
and nothing that a pickle names is called.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.foreign import pickles
from unickpt.foreign.elements import FileRange
from unickpt.foreign.file_ranges import FileBox
from unickpt.foreign.files import Files
from unickpt.foreign.pickles import BadPickle, Constructors, Global
from unickpt.foreign.zip_files import STORED, ZipFile

_STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
_MOST_PICKLE = 1 << 30
_MOST_EXTENT = 1 << 62
_MOST_RANK = 32


@dataclass(frozen=True)
class Storage:
    """The memory of tensors, in the file.

    Arguments:
        key: its name in the file.
        dtype: the checkpoint's name of its dtype; None for bytes without one.
        count: its elements, or its bytes.
    """

    key: str
    dtype: str | None
    count: int


@dataclass(frozen=True, eq=False)  # by identity: a key of a dict must not be chosen by its hash
class Tensor:
    """A tensor as its pickle describes it.

    Arguments:
        storage: its memory.
        dtype: the checkpoint's name of its dtype.
        offset: of its first element in the storage, in elements.
        shape: its extents.
        strides: in elements.
    """

    storage: Storage
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the storage."""
        dtype = self.storage.dtype
        return self.storage.count * (1 if dtype is None else dtypes.from_name(dtype).itemsize)

    @property
    def identity(self) -> str:
        """Equal for tensors that are the same elements in the same order: ties."""
        return repr((self.storage.key, self.dtype, self.offset, self.shape, self.strides))


def dtype_of(found: Any) -> str:
    """The checkpoint's name of a torch dtype in a pickle.

    Raises:
        BadPickle: it is none, or unickpt lacks it.
    """
    name = found.name if isinstance(found, Global) else ""
    short = name.removeprefix("torch.")
    try:
        return dtypes.name_of(dtypes.from_name(short))
    except TypeError:
        raise BadPickle(f"{name or 'an object'} is not a dtype that unickpt supports") from None


def _sizes(found: Any) -> tuple[int, ...]:
    if not isinstance(found, tuple) or not all(
        type(n) is int and 0 <= n < _MOST_EXTENT for n in found
    ):
        raise BadPickle("sizes are not a tuple of numbers")
    return found


def _tensor(storage: Any, dtype: str | None, offset: Any, shape: Any, strides: Any) -> Tensor:
    if not isinstance(storage, Storage) or (dtype or storage.dtype) is None:
        raise BadPickle("a tensor has no storage")
    of_elements = dtype or storage.dtype
    assert of_elements is not None, "checked above"
    sizes, steps = _sizes(shape), _sizes(strides)
    if len(sizes) != len(steps) or len(sizes) > _MOST_RANK:
        raise BadPickle("the strides of a tensor do not fit its shape")
    return Tensor(storage, of_elements, _sizes((offset,))[0], sizes, steps)


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    if not isinstance(function, Global) or function.make is None:
        raise BadPickle("a tensor is made by a function that is not known")
    return function(args)


def _ordered(*args: Any) -> dict[Any, Any]:
    if not args:
        return {}
    pairs = args[0].items() if isinstance(args[0], dict) else args[0]
    return {pickles.key(k): v for k, v in pairs}


CONSTRUCTORS: Constructors = {
    **pickles.PLAIN,
    "torch._utils._rebuild_tensor_v2": lambda s, o, n, t, *rest: _tensor(s, None, o, n, t),
    "torch._utils._rebuild_tensor_v3": lambda s, o, n, t, grad, hooks, dtype, *rest: _tensor(
        s, dtype_of(dtype), o, n, t
    ),
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": _sizes,
    "torch.serialization._get_layout": lambda name: name,
    "collections.OrderedDict": _ordered,
    "collections.defaultdict": lambda *args: _ordered(*args[1:]),
    "builtins.set": lambda *args: list(*args),
    "__builtin__.set": lambda *args: list(*args),
}
"""What makes tensors and containers of torch's pickles."""


class TorchFile:
    """A file that torch.save wrote, or the part of a file that holds one.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        begin, length: the part of the file; by default all of it.
        constructors: of further classes; see `pickles.read`.

    Raises:
        CheckpointCorrupt: it is damaged, or was not written by torch.save.
        Failed: the storage failed.
    """

    def __init__(
        self,
        files: Files,
        name: str,
        begin: int = 0,
        length: int | None = None,
        constructors: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        self._zip = ZipFile(files, name, begin, length)
        pickle = next((m for m in self._zip.members if m.endswith("/data.pkl")), None)
        if pickle is None:
            raise self._zip.damaged("torch.save did not write it: it has no data.pkl")
        self._top = pickle.removesuffix("data.pkl")
        self.members = tuple(self._zip.members)
        """The names of what the zip file contains."""
        member = self._zip.members[pickle]
        if member.size > _MOST_PICKLE:
            raise self._zip.damaged(f"its data.pkl has {member.size} bytes, too many")
        self.pickle_size = member.size
        """Bytes of the pickle, to bound what follows from it."""
        self._big_endian = self._order() == b"big"
        self._offsets: dict[str, int] = {}
        try:
            known = {**CONSTRUCTORS, **(constructors or {})}
            self.value, _ = pickles.read(self._zip.read(member), known, storage)
            """What was saved: containers, plain values, `Tensor`s and `Opaque`s."""
        except BadPickle as error:
            raise self._zip.damaged(f"its data.pkl is damaged: {error}") from error

    def _order(self) -> bytes:
        member = self._zip.members.get(self._top + "byteorder")
        return b"little" if member is None or member.size > 10 else self._zip.read(member)

    def box(self, tensor: Tensor, box: Box | None = None) -> FileBox:
        """Where a tensor is in the file.

        Arguments:
            tensor: one of `value`.
            box: its place in an array of which it is a part; by default it is all of it.

        Raises:
            CheckpointCorrupt: its storage is missing, or too small.
        """
        key = tensor.storage.key
        if key not in self._offsets:
            member = self._zip.members.get(f"{self._top}data/{key}")
            if member is None or member.method != STORED:
                raise self._zip.damaged(f"the storage {key!r} is missing or compressed")
            if member.size < tensor.nbytes:
                raise self._zip.damaged(
                    f"the storage {key!r} has {member.size} bytes, {tensor.nbytes} expected"
                )
            self._offsets[key] = self._zip.offset(member)
        itemsize = dtypes.from_name(tensor.dtype).itemsize
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and (tensor.offset + last + 1) * itemsize > tensor.nbytes:
            raise self._zip.damaged(f"a tensor reaches beyond the storage {key!r}")
        return FileBox(
            box or Box.whole(tensor.shape),
            FileRange(self._zip.name, self._offsets[key], self._big_endian),
            tensor.offset,
            tensor.strides,
        )


def storage(found: Any) -> Storage:
    """A storage by its persistent id: `("storage", class, key, device, count, ...)`.

    Raises:
        BadPickle: it is malformed.
    """
    if not isinstance(found, tuple) or len(found) < 5 or found[0] != "storage":
        raise BadPickle("it refers to something other than a storage")
    kind, key, count = found[1], found[2], found[4]
    name = kind.name if isinstance(kind, Global) else ""
    if not isinstance(key, str) or type(count) is not int or not 0 <= count < _MOST_EXTENT:
        raise BadPickle("a storage is malformed")
    if name == "torch.storage.UntypedStorage":
        return Storage(key, None, count)
    dtype = _STORAGES.get(name.removeprefix("torch.").removesuffix("Storage"))
    if dtype is None:
        raise BadPickle(f"unknown storage {name}")
    return Storage(key, dtype, count)
