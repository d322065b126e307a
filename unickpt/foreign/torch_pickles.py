"""Objects that torch.save wrote, as facts: tensors as ranges of a file, everything else as data.

Sources: torch/serialization.py, torch/_utils.py and torch/storage.py. Nothing of torch is imported,
and nothing that a pickle names is called.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from unickpt.arrays import dtypes
from unickpt.arrays.box import Box
from unickpt.errors import CheckpointCorrupt
from unickpt.foreign import pickle_objects, pickle_writer, pickles
from unickpt.foreign.elements import Elements, FileRange, InMemoryElements, Lazy
from unickpt.foreign.file_ranges import FileBox
from unickpt.foreign.files import Files
from unickpt.foreign.headers import is_size, sizes
from unickpt.foreign.loose_files import is_legacy
from unickpt.foreign.pickle_objects import BadPickle, EndsEarly, Global, PickledObject
from unickpt.foreign.pickles import Constructors
from unickpt.foreign.zip_files import STORED, ZipFile
from unickpt.quoting import quoted
from unickpt.storage.errors import Damaged
from unickpt.trees import tree

STORAGES = {
    "Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16",
    "Long": "int64", "Int": "int32", "Short": "int16", "Char": "int8", "Byte": "uint8",
    "Bool": "bool", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}  # fmt: skip
# What quantized tensors are made of; none of torch's other files has them.
_QUANTIZED = {
    "QInt8": "int8", "QUInt8": "uint8", "QInt32": "int32", "QUInt4x2": "uint8", "QUInt2x4": "uint8",
}  # fmt: skip
_COMPLEX = ("complex64", "complex128")
_LAZY = {"conj": _COMPLEX, "neg": (*_COMPLEX, "float16", "float32", "float64")}
_MOST_PICKLE = 1 << 30
_MOST_SIZES = 1 << 62  # of a torch.Size, which a user can have saved
_PROTOCOL = 1001  # of files before torch 1.6
_WINDOW = 64 << 10
_KEPT = 1 << 20  # bytes of a pickle that may be needed again


@dataclass(frozen=True)
class TorchStorage:
    """The memory of tensors, in the file.

    Arguments:
        key: its name in the file.
        dtype: the checkpoint's name of its dtype; None for bytes without one.
        count: its elements, or its bytes.
        data: its bytes, if the pickle itself contains them.
        big_endian: the byte order of these.
    """

    key: str
    dtype: str | None
    count: int
    data: bytes | None = None
    big_endian: bool = False

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.count * (1 if self.dtype is None else dtypes.from_name(self.dtype).itemsize)


@dataclass(frozen=True, eq=False)  # by identity: a key of a dict must not be chosen by its hash
class Tensor:
    """A tensor as its pickle describes it.

    Arguments:
        storage: its memory.
        dtype: the checkpoint's name of its dtype.
        offset: of its first element in the storage, in elements.
        shape: its extents.
        strides: in elements.
        lazy: what torch left to be done when the elements are read, "conj", "neg" or both.
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
    def identity(self) -> str:
        """Equal for tensors that are the same elements in the same order: ties."""
        same = (self.dtype, self.offset, self.shape, self.strides, self.lazy)
        return repr((self.storage.key, *same))

    def meant(self, stored: Elements) -> Elements:
        """Its elements, out of those that are stored for it."""
        if not self.lazy:
            return stored
        return Lazy(stored, "conj" in self.lazy, "neg" in self.lazy)


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


def _of_storage(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any = None, *rest: Any
) -> Tensor:
    """`_rebuild_tensor_v2`: after `grad` there are hooks, and what is lazy."""
    return _tensor(storage, None, offset, shape, strides, *rest[1:])


def _of_dtype(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any,
    *rest: Any,
) -> Any:  # fmt: skip
    """`_rebuild_tensor_v3`; not made if unickpt lacks the dtype."""
    try:
        known = dtype_of(dtype)
    except BadPickle:
        return NotImplemented
    return _tensor(storage, known, offset, shape, strides, *rest)


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


def _lazy(found: Any, dtype: str) -> tuple[str, ...]:
    """What torch left to be done, as the pickle of a tensor says it: `{"conj": True}`."""
    if found is None:
        return ()
    if not isinstance(found, dict):
        raise BadPickle("what is special about a tensor is no dict")
    told = [what for what, is_so in found.items() if is_so]
    if any(dtype not in _LAZY.get(what, ()) for what in told):
        raise BadPickle(f"a tensor of {dtype} is special in an unknown way: {quoted(told)}")
    return tuple(sorted(told))


def _rebuild_from_type(function: Any, kind: Any, args: Any, state: Any) -> Any:
    """A tensor of a class of its own; not made if it is more than the tensor."""
    if not isinstance(function, Global) or function.make is None:
        return NotImplemented
    return function(args)


def _ordered(*args: Any) -> dict[Any, Any]:
    if not args:
        return {}
    pairs = args[0].items() if isinstance(args[0], dict) else args[0]
    return {pickles.key(k): v for k, v in pairs}


CONSTRUCTORS: Constructors = {
    **pickles.PLAIN,
    "torch._utils._rebuild_tensor_v2": _of_storage,
    "torch._utils._rebuild_tensor_v3": _of_dtype,
    "torch._utils._rebuild_parameter": lambda data, *rest: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *rest: data,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
    "torch.Size": partial(sizes, most=_MOST_SIZES),
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
        UnsupportedFormat: torch before 0.2 wrote it.
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
        self._known = {**CONSTRUCTORS, **(constructors or {})}
        self._source: _Zip | LegacyFile
        if length is None and is_legacy(files.head(name)):
            self._source = LegacyFile(files, name, self._known)
            self.members: tuple[str, ...] = ()
        else:
            archive = ZipFile(files, name, begin, length)
            self._source = _Zip(archive, self._known)
            self.members = tuple(archive.members)
        self.damaged = self._source.damaged
        """The error for a damaged file."""
        self.value = self._source.value
        """What was saved: containers, plain values, `Tensor`s and `PickledObject`s."""
        self.pickle_size = self._source.pickle_size
        """Bytes of the pickle, to bound what follows from it."""
        self._name = name
        self._described: dict[int, PickledObject] | None = None

    def opaque(self, found: PickledObject | Global, most: int) -> tree.Opaque:
        """An object of `value` that only its class can read, as it was saved.

        Arguments:
            found: it, without tensors.
            most: how many bytes it may have.

        Raises:
            CheckpointCorrupt: it is too large, or has a name that no class has.
        """
        facts: Any = found
        try:
            if isinstance(found, PickledObject):
                if self._described is None:
                    self._described = pickles.described(*self._source.pickle(), _as_stored)
                facts = self._described[found.at]
            return tree.Opaque(found.name, pickle_writer.dumps(facts, most))
        except (ValueError, TypeError, KeyError) as error:
            raise self.damaged(f"{found!r} is malformed: {error}") from error

    def box(self, tensor: Tensor, box: Box | None = None) -> FileBox:
        """Where a tensor is in the file.

        Arguments:
            tensor: one of `value`.
            box: its place in an array of which it is a part; by default it is all of it.

        Raises:
            CheckpointCorrupt: its storage is missing, or too small.
        """
        place = box or Box.whole(tensor.shape)
        held = tensor.storage
        if held.data is not None:
            return FileBox(place, InMemoryElements(held.data, held.big_endian), 0, tensor.strides)
        begin = self._source.offset(held)
        itemsize = dtypes.from_name(tensor.dtype).itemsize
        last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if 0 not in tensor.shape and (tensor.offset + last + 1) * itemsize > tensor.nbytes:
            raise self.damaged(f"a tensor reaches beyond the storage {tensor.storage.key!r}")
        stored = FileRange(self._name, begin, self._source.big_endian)
        return FileBox(place, tensor.meant(stored), tensor.offset, tensor.strides)


class _Zip:
    """What torch.save has written since torch 1.6.

    Arguments:
        archive: the zip file.
        known: constructors; see `pickles.read`.
    """

    def __init__(self, archive: ZipFile, known: Constructors) -> None:
        self._zip, self.damaged = archive, archive.damaged
        pickle = next((m for m in archive.members if m.endswith("/data.pkl")), None)
        if pickle is None:
            raise self.damaged("torch.save did not write it: it has no data.pkl")
        self._top = pickle.removesuffix("data.pkl")
        self._pickle = archive.members[pickle]
        self.pickle_size = self._pickle.size
        if self.pickle_size > _MOST_PICKLE:
            raise self.damaged(f"its data.pkl has {self.pickle_size} bytes, too many")
        self.big_endian = self._order() == b"big"
        self._offsets: dict[str, int] = {}
        try:
            self.value, _ = pickles.read(archive.read(self._pickle), known, storage)
        except BadPickle as error:
            raise self.damaged(f"its data.pkl is damaged: {error}") from error

    def pickle(self) -> tuple[bytes, int]:
        """The bytes that contain the pickle, and where it begins in them."""
        return self._zip.read(self._pickle), 0

    def _order(self) -> bytes:
        member = self._zip.members.get(self._top + "byteorder")
        return b"little" if member is None or member.size > 10 else self._zip.read(member)

    def offset(self, of: TorchStorage) -> int:
        """Where a storage begins in the file."""
        if of.key not in self._offsets:
            member = self._zip.members.get(f"{self._top}data/{of.key}")
            if member is None or member.method != STORED:
                raise self.damaged(f"the storage {of.key!r} is missing or compressed")
            if member.size < of.nbytes:
                raise self.damaged(
                    f"the storage {of.key!r} has {member.size} bytes, {of.nbytes} expected"
                )
            self._offsets[of.key] = self._zip.offset(member)
            self._zip.summed(member, self._offsets[of.key])
        return self._offsets[of.key]


def storage(found: Any) -> TorchStorage:
    """A storage by its persistent id: `("storage", class, key, device, count, ...)`.

    Raises:
        BadPickle: it is malformed.
    """
    if not isinstance(found, tuple) or len(found) < 5 or found[0] != "storage":
        raise BadPickle("it refers to something other than a storage")
    if len(found) > 5 and found[5] is not None:
        raise BadPickle("a storage is a part of another, as in files of torch before 0.4")
    kind, key, count = found[1], found[2], found[4]
    name = kind.name if isinstance(kind, Global) else ""
    if not isinstance(key, str) or not is_size(count):
        raise BadPickle("a storage is malformed")
    if name == "torch.storage.UntypedStorage":
        return TorchStorage(key, None, count)
    short = name.removeprefix("torch.").removesuffix("Storage")
    dtype = STORAGES.get(short) or _QUANTIZED.get(short)
    if dtype is None:
        raise BadPickle(f"unknown storage {name}")
    return TorchStorage(key, dtype, count)


def _is_module(found: Any) -> bool:
    """Whether a persistent id of an old file is a class of a module, with its source code."""
    return isinstance(found, tuple) and found[:1] == ("module",) and len(found) > 1


def _as_stored(found: Any) -> Any:
    return found[1] if _is_module(found) else pickle_objects.PersistentId(found)


class LegacyFile:
    """What torch.save wrote before torch 1.6: pickles one after the other, then the storages.

    Arguments:
        files: of the checkpoint.
        name: of the file.
        known: constructors; see `pickles.read`.

    Raises:
        CheckpointCorrupt: it is damaged.
        Failed: the storage failed.
    """

    def __init__(self, files: Files, name: str, known: Constructors) -> None:
        self._files, self._name = files, name
        self._data = b""
        self._storages: dict[str, TorchStorage] = {}
        _, at = self._read(0, known)
        protocol, at = self._read(at, known)
        system, self._begin = self._read(at, known)
        if protocol != _PROTOCOL or not isinstance(system, dict):
            raise self.damaged(f"its protocol is {quoted(protocol)}, {_PROTOCOL} expected")
        self.big_endian = system.get("little_endian") is False
        self.value, self._end = self._read(self._begin, known)
        keys, at = self._read(self._end, known)
        self.pickle_size = self._end - self._begin
        self._offsets = self._places(keys, at)
        self._data = self._data[: self._end] if self.pickle_size < _KEPT else b""

    def damaged(self, reason: str) -> CheckpointCorrupt:
        """The error for a damaged file."""
        return CheckpointCorrupt(f"{self._files.location}: {self._name}: {reason}")

    def pickle(self) -> tuple[bytes, int]:
        """The bytes that contain the pickle of the value, and where it begins in them."""
        data = self._data or self._files.read(self._name, 0, self._end)
        return data, self._begin

    def _read(self, at: int, known: Constructors) -> tuple[Any, int]:
        """A pickle, whose length no one tells: more is read until it ends."""
        while True:
            try:
                if at < len(self._data):
                    return pickles.read(self._data, known, self._storage, at)
            except EndsEarly as error:
                if len(self._data) >= _MOST_PICKLE:
                    raise self.damaged(f"a pickle is damaged: {error}") from error
            except BadPickle as error:
                raise self.damaged(f"a pickle is damaged: {error}") from error
            self._read_more()

    def _read_more(self) -> None:
        """Doubles what was read of the file."""
        count, size = max(_WINDOW, len(self._data)), self._files.size(self._name)
        at = len(self._data)
        if size is not None:
            count = min(count, size - at)
        while count:
            try:
                self._data += self._files.read(self._name, at, count)
                return
            except Damaged:  # the storage did not tell the size, and it has less
                count //= 2
        raise self.damaged(f"it ends at byte {at}, within a pickle")

    def _storage(self, found: Any) -> Any:
        if _is_module(found):
            return found[1]
        made = storage(found)
        if self._storages.setdefault(made.key, made).nbytes != made.nbytes:
            raise BadPickle(f"the storage {quoted(made.key)} has two sizes")
        return made

    def _places(self, keys: Any, at: int) -> dict[str, int]:
        """Where the storages begin, after the number of their elements."""
        places = dict[str, int]()
        for key in keys if isinstance(keys, list) else [None]:
            if not isinstance(key, str) or key not in self._storages or key in places:
                raise self.damaged(f"{quoted(key)} is not one of its storages")
            places[key] = at + 8
            at += 8 + self._storages[key].nbytes
        return places

    def offset(self, of: TorchStorage) -> int:
        """Where a storage begins in the file; costs one small read."""
        begin = self._offsets.get(of.key)
        if begin is None:
            raise self.damaged(f"the storage {quoted(of.key)} is missing")
        order = ">q" if self.big_endian else "<q"
        (count,) = struct.unpack(order, self._files.read(self._name, begin - 8, 8))
        if count != of.count:
            raise self.damaged(
                f"the storage {quoted(of.key)} has {count} elements, {of.count} expected"
            )
        return begin


_CONTAINERS = (dict, list, tuple, set, frozenset, PickledObject)


def holds_tensors(found: PickledObject, without: set[int], spend: Callable[[int], None]) -> bool:
    """Whether an object has tensors in it, however deep.

    Arguments:
        found: the object.
        without: identities of what is known to hold none; those that are found are added.
        spend: called with the number of values that are looked at; raises if they are too many.
    """
    seen, rest = set[int](), [found]
    while rest:
        item: Any = rest.pop()
        if isinstance(item, Tensor | TorchStorage):
            return True
        if isinstance(item, _CONTAINERS) and id(item) not in seen and id(item) not in without:
            seen.add(id(item))
            inner = _inside(item)
            spend(len(inner))
            rest += inner
    without |= seen
    return False


def _inside(found: Any) -> list[Any]:
    """What a container or an object consists of."""
    if isinstance(found, PickledObject):
        return [found.args, found.named, found.state, found.appended, found.items]
    return [*found.keys(), *found.values()] if isinstance(found, dict) else list(found)
